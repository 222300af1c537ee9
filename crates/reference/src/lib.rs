//! lily-reference
