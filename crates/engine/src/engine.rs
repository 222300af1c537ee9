//! The engine: one backend, the text side of its checkpoint, and the requests it takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lily_backend::{Backend, Caps, MemoryReport};

use crate::error::{EngineError, Result};
use crate::generation::Generation;
use crate::sampler::Sampling;
use crate::session::Session;
use crate::text::{Prompt, TextModel};

/// Most likely tokens that can be reported beside the chosen one.
pub const MAX_LOGPROBS: u32 = 20;

/// Runs one checkpoint on one backend.
pub struct Engine {
    backend: Box<dyn Backend>,
    text: Arc<TextModel>,
    vocab_limit: u32,
    /// Ids below `vocab_limit` for which the tokenizer has no token, with the bias that excludes them. The published
    /// tokenizer has none.
    holes: Vec<(u32, f32)>,
}

/// Added to a logit, excludes it: far below every logit and bias, and finite after division by any temperature.
const EXCLUDED: f32 = -1e9;

/// What to generate, beside the prompt. The default takes everything from the checkpoint and stops at the end of the
/// context.
#[derive(Clone, Debug, Default)]
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
    /// Ends the generation from elsewhere.
    pub cancel: CancelToken,
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

impl Engine {
    /// Takes a loaded backend and the text side of the same checkpoint.
    pub fn new(backend: Box<dyn Backend>, text: Arc<TextModel>) -> Engine {
        // Rows of the embedding beyond the tokenizer's ids are padding, and a head may not have all of its ids.
        let ids = text.tokenizer.vocab_size().min(backend.caps().vocab);
        let vocab_limit = u32::try_from(ids).unwrap_or(u32::MAX);
        let holes = (0..vocab_limit).filter(|id| text.tokenizer.token_bytes(*id).is_none());
        Engine { backend, vocab_limit, holes: holes.map(|id| (id, EXCLUDED)).collect(), text }
    }

    /// Name and limits of the backend.
    pub fn caps(&self) -> &Caps {
        self.backend.caps()
    }

    /// The text side of the checkpoint.
    pub fn text(&self) -> &Arc<TextModel> {
        &self.text
    }

    /// Memory in use on the device.
    pub fn memory(&self) -> MemoryReport {
        self.backend.memory()
    }

    /// Opens a session whose prompt and answer may have `context_tokens` together.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] if that is nothing or more than [`Caps::max_context`]; [`EngineError::Backend`] if the memory
    /// does not suffice.
    pub fn open(&mut self, context_tokens: usize) -> Result<Session> {
        let most = self.caps().max_context;
        // One token of prompt and one of answer.
        if !(2..=most).contains(&context_tokens) {
            return Err(EngineError::bad_request("context", context_tokens, format!("2 to {most} tokens")));
        }
        Ok(Session::new(self.backend.new_state(context_tokens)?, context_tokens))
    }

    /// Frees what a session holds on the device.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the session is of another engine.
    pub fn close(&mut self, mut session: Session) -> Result<()> {
        session.free_snapshots(self.backend.as_mut());
        Ok(self.backend.free_state(session.state())?)
    }

    /// Starts to answer a prompt. What the session was fed before is used as far as the prompt repeats it.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] and [`EngineError::PromptTooLong`] before anything happens to the session.
    pub fn generate<'a>(
        &'a mut self,
        session: &'a mut Session,
        prompt: &Prompt,
        request: GenerateRequest,
    ) -> Result<Generation<'a>> {
        let sampling = request.sampling.clone().or(&self.text.sampling);
        let mut params = sampling.params(self.vocab_limit, prompt.ids.len())?;
        params.logprobs = request.logprobs;
        if !self.holes.is_empty() {
            params.logit_bias = params.logit_bias.iter().chain(&self.holes).copied().collect();
        }
        self.check(session, prompt, &request)?;
        Generation::start(self.backend.as_mut(), &self.text, session, prompt, request, params)
    }

    fn check(&self, session: &Session, prompt: &Prompt, request: &GenerateRequest) -> Result<()> {
        let vocab = self.caps().vocab;
        if prompt.ids.is_empty() {
            return Err(EngineError::bad_request("prompt", "no tokens", "at least one token"));
        }
        if let Some(id) = prompt.ids.iter().find(|id| **id as usize >= vocab) {
            return Err(EngineError::bad_request("prompt", format!("token id {id}"), format!("ids below {vocab}")));
        }
        if prompt.ids.len() >= session.capacity() {
            let (prompt_tokens, context_tokens) = (prompt.ids.len(), session.capacity());
            return Err(EngineError::PromptTooLong { prompt_tokens, context_tokens });
        }
        if request.max_tokens == Some(0) {
            return Err(EngineError::bad_request("max_tokens", 0, "1 or more"));
        }
        match request.logprobs {
            Some(n) if n > MAX_LOGPROBS => {
                Err(EngineError::bad_request("top_logprobs", n, format!("0 to {MAX_LOGPROBS}")))
            }
            _ => Ok(()),
        }
    }
}
