//! The executable specification of the model: [`ops`] has one function per operation with its formula, [`forward`] the
//! order in which they are applied. Everything is plain loops in f32; the point is to be read and to be right.
//!
//! [`golden`] reads the stored outputs of mlx-lm and compares logits with them, for the tests of this crate and of the
//! backends. [`quality`] says how likely a text is by given logits, and how far two engines' logits are apart.

#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod forward;
pub mod golden;
pub mod ops;
pub mod quality;

pub use forward::{LayerState, Logits, Reference, State, Trace};
pub use ops::Ops;
