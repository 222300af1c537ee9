//! Metal backend.
