//! lily-backend
