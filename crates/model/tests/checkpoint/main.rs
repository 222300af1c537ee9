//! Opening a checkpoint: what opens, what is refused, and that a refusal names its reason.

mod config;
mod damaged;
mod parts;
mod published;
mod weights;
