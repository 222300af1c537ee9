//! What happens while an answer is generated, and one answer pulled event by event.

use std::collections::VecDeque;
use std::time::Duration;

use lily_backend::LogProbs;

use crate::engine::Engine;
use crate::error::Result;
use crate::request::{CancelToken, RequestId};

/// What happens while an answer is generated, in this order: progress through the prompt, tokens, the end.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// More of the prompt is in the state. First comes what was there already, last the whole.
    PromptProgress {
        /// Tokens of the prompt in the state.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token of the answer.
    Token(Token),
    /// The end; nothing comes after it.
    Finished(Finished),
}

/// A token of the answer. It comes when its text is certain: whole characters, and no part of a stop string.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its text: the texts of all tokens, put together, are the answer. Empty for special tokens and within a
    /// character; the token that completes the character has it.
    pub text: String,
    /// Its log-probabilities, if the request wants them.
    pub logprobs: Option<LogProbs>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its answer with this stop token.
    StopToken(u32),
    /// The answer reached this stop string.
    StopString(String),
    /// The answer has as many tokens as the request allows.
    Length,
    /// Prompt and answer fill the context.
    ContextFull,
    /// The request was cancelled.
    Cancelled,
}

/// The end of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that an earlier request had fed already.
    pub cached_tokens: usize,
    /// Tokens that were sampled, the stop token and those of a stop string included.
    pub generated_tokens: usize,
    /// From the start to the first token.
    pub prefill: Duration,
    /// From the first token to the end.
    pub decode: Duration,
    /// Seed of the draws, to have the same answer again.
    pub seed: u64,
}

impl Finished {
    /// Speed through the part of the prompt that was not cached; 0 if it was cancelled there.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        let tokens = if self.generated_tokens > 0 { self.prompt_tokens - self.cached_tokens } else { 0 };
        rate(tokens, self.prefill)
    }

    /// Speed of the answer. Its first token belongs to the prompt's time.
    pub fn decode_tokens_per_second(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// The only answer in the making: an iterator over its events, which ends after [`Event::Finished`] or an error. Dropped early, it
/// is cancelled. Made by [`Engine::generate`].
pub struct Generation<'a> {
    engine: &'a mut Engine,
    id: RequestId,
    cancel: CancelToken,
    events: VecDeque<Result<Event>>,
    over: bool,
}

impl<'a> Generation<'a> {
    pub(crate) fn new(engine: &'a mut Engine, id: RequestId, cancel: CancelToken) -> Generation<'a> {
        Generation { engine, id, cancel, events: VecDeque::new(), over: false }
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                self.over = matches!(event, Err(_) | Ok(Event::Finished(_)));
                return Some(event);
            }
            if self.over {
                return None;
            }
            let own = |(id, event)| (id == self.id).then_some(event);
            self.events.extend(self.engine.step().into_iter().filter_map(own));
        }
    }
}

impl Drop for Generation<'_> {
    /// Waits for the steps in flight: after the events are out, so that no end waits for a step that is discarded.
    fn drop(&mut self) {
        self.cancel.cancel();
        while !self.engine.is_idle() {
            self.engine.step();
        }
    }
}
