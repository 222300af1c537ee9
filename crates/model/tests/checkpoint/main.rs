//! Opening a checkpoint: what opens, what is refused, and that a refusal names its reason.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod aligned;
mod config;
mod damaged;
mod parts;
mod published;
mod weights;
