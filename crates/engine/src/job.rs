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

    /// Takes the oldest token that was sampled and not taken.
    pub(crate) fn take(&mut self, token: SampledToken, text: &TextModel, events: &mut Vec<Event>) -> Result<()> {
        if self.first_token.is_none() {
            self.first_token = Some(Instant::now());
            let total = self.prompt.ids.len();
            events.push(Event::PromptProgress { done: total, total });
        }
        self.seen += 1;
        let id = token.id;
        if text.stop_tokens.contains(&id) && !self.ignore_stop_tokens {
            self.finish(FinishReason::StopToken(id), events);
            return Ok(());
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.advance(id).map_err(EngineError::Constraint)?;
        }
        let stop = self.answer.push(token);
        self.give_tokens(events);
        if let Some(stop) = stop {
            self.finish(FinishReason::StopString(stop), events);
        } else if self.seen == self.limit {
            let by_request = self.max_tokens.is_some_and(|most| most == self.limit);
            self.finish(if by_request { FinishReason::Length } else { FinishReason::ContextFull }, events);
        }
        Ok(())
    }

    fn give_tokens(&mut self, events: &mut Vec<Event>) {
        events.extend(std::iter::from_fn(|| self.answer.pop()).map(Event::Token));
    }

    /// Ends the answer.
    pub(crate) fn finish(&mut self, reason: FinishReason, events: &mut Vec<Event>) {
        self.over = true;
        let end = Instant::now();
        // After a stop string the answer is cut already; else its last bytes may complete one.
        let stop = if let FinishReason::StopString(_) = reason { None } else { self.answer.finish() };
        self.give_tokens(events);
        let first_token = self.first_token.unwrap_or(end);
        events.push(Event::Finished(Finished {
            reason: stop.map_or(reason, FinishReason::StopString),
            prompt_tokens: self.prompt.ids.len(),
            cached_tokens: self.cached_tokens,
            generated_tokens: self.seen,
            prefill: first_token - self.started,
            decode: end - first_token,
            seed: self.params.seed,
        }));
    }

    /// Ends it without an answer.
    pub(crate) fn fail(&mut self) {
        self.over = true;
    }
}
