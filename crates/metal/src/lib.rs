//! The Metal backend: the model behind [`lily_backend::Backend`], on the GPU of a Mac.
//!
//! - `forward`: the forward pass of one token, one function per block; `prefill`: that of many; `trace`: their stages;
//! - `kernels`: shaders, each with its wrapper beside it;
//! - `plan`: what is decided at load; `load`: how weights come into device memory; `room`: what to say if they do not fit; `state`: what
//!   a session keeps; `step`: the checks of a step and its results; `sample`: sampling on the host, but for the highest logit, which
//!   the GPU finds;
//! - `device`: the trait that a GPU implements, `macos` on a Mac and the emulator of `lily-metal-emu` in tests.
//!
//! A step is encoded as a few command buffers and returns at once. A second step may follow before the first is waited for; the
//! token that the first one samples stays on the GPU.
//! Activations are f32.

#![warn(missing_docs)]
#![deny(unsafe_code)]
#![cfg_attr(not(any(test, target_os = "macos")), expect(dead_code, reason = "there is no device that would use it"))]

mod backend;
mod device;
#[cfg(test)]
mod emulated;
mod forward;
mod kernels;
mod load;
#[cfg(target_os = "macos")]
#[expect(unsafe_code, reason = "Metal is called, and memory that it shares is copied; each with its SAFETY note")]
mod macos;
mod plan;
mod prefill;
mod room;
mod sample;
mod state;
mod step;
#[cfg(test)]
mod tests;
mod trace;

use lily_backend::{Backend, Result};
use lily_model::{Checkpoint, Shape};

pub use kernels::KernelReport;
pub use state::KvDtype;

/// The model on this Mac's GPU: compiles the kernels, maps or copies the weights.
///
/// Fails with [`Unavailable`](lily_backend::Error::Unavailable) where there is no Apple GPU, macOS 15 or kernel for the
/// checkpoint, with [`OutOfMemory`](lily_backend::Error::OutOfMemory) if the GPU may not hold the weights.
#[cfg(target_os = "macos")]
pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Box<dyn Backend>> {
    Ok(Box::new(backend::MetalBackend::load(macos::MacGpu::open()?, checkpoint, options)?))
}

/// There is no Metal here: [`Unavailable`](lily_backend::Error::Unavailable).
#[cfg(not(target_os = "macos"))]
pub fn load(_checkpoint: &Checkpoint, _options: &LoadOptions) -> Result<Box<dyn Backend>> {
    Err(lily_backend::Error::Unavailable { name: "metal", reason: "it needs a Mac".into() })
}

/// What this Mac makes of every kernel for a shape: each is compiled, whatever becomes of the others.
///
/// Fails as [`load`] does where there is no GPU for them.
#[cfg(target_os = "macos")]
pub fn survey(shape: &Shape, kv: KvDtype) -> Result<Vec<KernelReport>> {
    plan::survey(&mut macos::MacGpu::open()?, shape, kv)
}

/// There is no Metal here: [`Unavailable`](lily_backend::Error::Unavailable).
#[cfg(not(target_os = "macos"))]
pub fn survey(_shape: &Shape, _kv: KvDtype) -> Result<Vec<KernelReport>> {
    Err(lily_backend::Error::Unavailable { name: "metal", reason: "it needs a Mac".into() })
}

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Element type of the KV cache.
    pub kv: KvDtype,
    /// Longest context of a state in tokens; `None`: what fits beside the weights, at most what the model was trained for.
    pub max_context: Option<usize>,
    /// Most tokens of a row in one step; `None`: as many as the memory of the device is good for.
    pub max_chunk: Option<usize>,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions { kv: KvDtype::Bf16, max_context: None, max_chunk: None }
    }
}
