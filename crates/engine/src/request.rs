//! What is asked of the engine, and how it is called off.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::constraint::Constraint;
use crate::sampler::Sampling;

/// Most likely tokens that can be reported beside the chosen one.
pub const MAX_LOGPROBS: u32 = 20;

/// A request that the engine accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What to generate, beside the prompt. The default takes everything from the checkpoint and stops at the end of the
/// context.
#[derive(Default)]
pub struct GenerateRequest {
    /// How tokens are chosen; what is not said comes from the checkpoint.
    pub sampling: Sampling,
    /// Texts that end the answer. They are not part of it.
    pub stop: Vec<String>,
    /// Most tokens of the answer, at least 1; not said: what the context has room for.
    pub max_tokens: Option<usize>,
    /// `Some(n)`: report the log-probability of each token and of the `n` most likely ones, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// Go on after stop tokens, for measurements.
    pub ignore_stop_tokens: bool,
    /// Which tokens may come; not said: any.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Ends the generation from elsewhere.
    pub cancel: CancelToken,
}

impl fmt::Debug for GenerateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GenerateRequest")
            .field("sampling", &self.sampling)
            .field("stop", &self.stop)
            .field("max_tokens", &self.max_tokens)
            .field("logprobs", &self.logprobs)
            .field("constrained", &self.constraint.is_some())
            .finish_non_exhaustive()
    }
}

/// A switch that cancels a generation. Clones are the same switch.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Cancels: the generation finishes at its next event.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
