//! A Qwen3.6-35B-A3B checkpoint as typed data: its sizes, its weights in packed form, its tokenizer and chat
//! template. No device code: backends read what this crate describes.

#![warn(missing_docs)]

pub mod align;
pub mod chat;
pub mod checkpoint;
pub mod config;
mod error;
pub mod quant;
pub mod safetensors;
pub mod shape;
pub mod tokenizer;
pub mod weights;

pub use checkpoint::{Checkpoint, MappedFile, Source};
pub use config::{Config, Quantization};
pub use error::ModelError;
pub use quant::{Bits, QuantMatrix};
pub use shape::{LayerKind, Shape};
pub use weights::{AttentionWeights, DeltaWeights, LayerWeights, Mixer, Mlp, MoeWeights, Weights};
