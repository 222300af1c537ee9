//! One accepted request on its way: which tokens to feed next, what became of those that were sampled. Knows no device and no
//! other request.

use std::time::Instant;

use lily_backend::{SampledToken, SamplingParams};

use crate::answer::Answer;
use crate::constraint::Constraint;
use crate::error::{EngineError, Result};
use crate::generation::{Event, FinishReason, Finished};
use crate::request::{CancelToken, GenerateRequest, RequestId};
use crate::text::{Prompt, TextModel};

/// What happened to which request.
pub(crate) type Happened = (RequestId, Result<Event>);

pub(crate) struct Job {
    pub(crate) id: RequestId,
    pub(crate) prompt: Prompt,
    pub(crate) params: SamplingParams,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    pub(crate) cancel: CancelToken,
    answer: Answer,
    max_tokens: Option<usize>,
    ignore_stop_tokens: bool,
    /// Most tokens to sample.
    limit: usize,
    /// Tokens that steps were submitted for.
    asked: usize,
    /// Tokens that were seen.
    seen: usize,
    cached_tokens: usize,
    started: Instant,
    first_token: Option<Instant>,
    over: bool,
}

impl Job {
    pub(crate) fn new(
        id: RequestId,
        text: &TextModel,
        prompt: Prompt,
        params: SamplingParams,
        request: GenerateRequest,
        max_context: usize,
    ) -> Result<Job> {
        let room = max_context - prompt.ids.len();
        Ok(Job {
            id,
            params,
            constraint: request.constraint,
            cancel: request.cancel,
            answer: Answer::new(&text.tokenizer, request.stop)?,
            max_tokens: request.max_tokens,
            ignore_stop_tokens: request.ignore_stop_tokens,
            limit: request.max_tokens.map_or(room, |most| most.min(room)),
            asked: 0,
            seen: 0,
            cached_tokens: 0,
            started: Instant::now(),
            first_token: None,
            over: false,
            prompt,
        })
    }

    /// Whether the answer has ended; steps of it may still be in flight.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// Whether another token may be sampled.
    pub(crate) fn wants_more(&self) -> bool {
        !self.over && self.asked < self.limit
    }

    /// Tokens of prompt and answer together, if it becomes as long as it may.
    pub(crate) fn longest(&self) -> usize {
        self.prompt.ids.len() + self.limit
    }

    /// Notes where the prompt starts to be fed.
    pub(crate) fn begin(&mut self, cached_tokens: usize) -> Event {
        self.cached_tokens = cached_tokens;
        Event::PromptProgress { done: cached_tokens, total: self.prompt.ids.len() }
    }

    /// Notes that a step samples a token.
    pub(crate) fn ask(&mut self) {
        self.asked += 1;
    }

    /// Takes the oldest token that was sampled and not taken. The job is over behind an error.
    pub(crate) fn take(&mut self, token: SampledToken, text: &TextModel) -> Vec<Happened> {
        let mut happened = Vec::new();
        if self.first_token.is_none() {
            self.first_token = Some(Instant::now());
            let total = self.prompt.ids.len();
            happened.push((self.id, Ok(Event::PromptProgress { done: total, total })));
        }
        self.seen += 1;
        let id = token.id;
        if text.stop_tokens.contains(&id) && !self.ignore_stop_tokens {
            happened.extend(self.finish(FinishReason::StopToken(id)));
            return happened;
        }
        if let Some(Err(reason)) = self.constraint.as_mut().map(|constraint| constraint.advance(id)) {
            self.over = true;
            happened.push((self.id, Err(EngineError::Constraint(reason))));
            return happened;
        }
        let stop = self.answer.push(token);
        happened.extend(self.tokens());
        if let Some(stop) = stop {
            happened.extend(self.finish(FinishReason::StopString(stop)));
        } else if self.seen == self.limit {
            let by_request = self.max_tokens.is_some_and(|most| most == self.limit);
            happened.extend(self.finish(if by_request { FinishReason::Length } else { FinishReason::ContextFull }));
        }
        happened
    }

    /// The tokens that have become certain.
    fn tokens(&mut self) -> impl Iterator<Item = Happened> {
        std::iter::from_fn(|| self.answer.pop().map(|token| (self.id, Ok(Event::Token(token)))))
    }

    /// Ends the answer.
    pub(crate) fn finish(&mut self, reason: FinishReason) -> Vec<Happened> {
        self.over = true;
        let end = Instant::now();
        // After a stop string the answer is cut already; else its last bytes may complete one.
        let stop = if let FinishReason::StopString(_) = reason { None } else { self.answer.finish() };
        let mut happened: Vec<Happened> = self.tokens().collect();
        let first_token = self.first_token.unwrap_or(end);
        let finished = Finished {
            reason: stop.map_or(reason, FinishReason::StopString),
            prompt_tokens: self.prompt.ids.len(),
            cached_tokens: self.cached_tokens,
            generated_tokens: self.seen,
            prefill: first_token - self.started,
            decode: end - first_token,
            seed: self.params.seed,
        };
        happened.push((self.id, Ok(Event::Finished(finished))));
        happened
    }

    /// Ends it without an answer.
    pub(crate) fn fail(&mut self) {
        self.over = true;
    }
}
