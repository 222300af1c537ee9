//! One answer, pulled event by event.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use lily_backend::{Backend, LogProbs, SampledToken, SamplingParams, Want};

use crate::answer::Answer;
use crate::engine::GenerateRequest;
use crate::error::Result;
use crate::session::Session;
use crate::text::{Prompt, TextModel};

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
    /// Tokens of the prompt that the session held already.
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

/// Steps in flight while decoding, where the backend overlaps them: the device runs one while the token of the one
/// before is looked at. More would only waste more steps at the end.
const STEPS_IN_FLIGHT: usize = 2;

/// An answer in the making: an iterator over its events, which ends after [`Event::Finished`] or an error. After an
/// error the session starts over with the next prompt. Dropped early, it is cancelled.
pub struct Generation<'a> {
    backend: &'a mut dyn Backend,
    text: &'a TextModel,
    session: &'a mut Session,
    prompt: Prompt,
    request: GenerateRequest,
    params: SamplingParams,
    answer: Answer,
    /// Most tokens to sample.
    limit: usize,
    /// Tokens that steps were submitted for.
    asked: usize,
    /// Tokens that were seen.
    seen: usize,
    cached_tokens: usize,
    started: Instant,
    first_token: Option<Instant>,
    events: VecDeque<Event>,
    over: bool,
}

impl<'a> Generation<'a> {
    pub(crate) fn start(
        backend: &'a mut dyn Backend,
        text: &'a TextModel,
        session: &'a mut Session,
        prompt: &Prompt,
        mut request: GenerateRequest,
        params: SamplingParams,
    ) -> Result<Generation<'a>> {
        let started = Instant::now();
        let answer = Answer::new(&text.tokenizer, std::mem::take(&mut request.stop))?;
        let cached_tokens = match session.rewind(backend, &prompt.ids) {
            Ok(cached) => cached,
            Err(error) => {
                session.fail(backend);
                return Err(error);
            }
        };
        let room = session.capacity() - prompt.ids.len();
        let progress = Event::PromptProgress { done: cached_tokens, total: prompt.ids.len() };
        Ok(Generation {
            limit: request.max_tokens.map_or(room, |most| most.min(room)),
            prompt: prompt.clone(),
            backend,
            text,
            session,
            request,
            params,
            answer,
            asked: 0,
            seen: 0,
            cached_tokens,
            started,
            first_token: None,
            events: VecDeque::from([progress]),
            over: false,
        })
    }

    /// Seed of the draws.
    pub fn seed(&self) -> u64 {
        self.params.seed
    }

    /// Does what brings the next event.
    fn advance(&mut self) -> Result<()> {
        if self.request.cancel.is_cancelled() {
            self.finish(FinishReason::Cancelled);
            return Ok(());
        }
        if self.session.tokens().len() < self.prompt.ids.len() { self.prefill_chunk() } else { self.decode() }
    }

    /// Feeds the next chunk of the prompt. The last one also samples the first token and is not waited for.
    fn prefill_chunk(&mut self) -> Result<()> {
        let (start, total) = (self.session.tokens().len(), self.prompt.ids.len());
        let branch = self.prompt.branches.iter().copied().find(|branch| *branch > start).unwrap_or(total);
        let end = total.min(branch).min(start + self.backend.caps().max_chunk);
        let is_last = end == total;
        let want = if is_last { Want::Token(self.params.clone()) } else { Want::Nothing };
        self.session.feed(self.backend, &self.prompt.ids[start..end], want)?;
        if is_last {
            self.asked = 1;
            return Ok(());
        }
        self.session.wait(self.backend)?;
        if end == branch {
            self.session.keep_snapshot(self.backend);
        }
        self.events.push_back(Event::PromptProgress { done: end, total });
        Ok(())
    }

    /// Keeps the device busy and takes the oldest step's token.
    fn decode(&mut self) -> Result<()> {
        let caps = self.backend.caps();
        let most = if caps.overlaps { caps.steps_in_flight.min(STEPS_IN_FLIGHT) } else { 1 };
        while self.asked < self.limit && self.session.in_flight() < most {
            self.session.feed_sample(self.backend, Want::Token(self.params.clone()))?;
            self.asked += 1;
        }
        match self.session.wait(self.backend)? {
            Some(token) => {
                self.take(token);
                Ok(())
            }
            None => {
                Err(lily_backend::Error::BadStep("the backend gave no token for a step that asked for one".into())
                    .into())
            }
        }
    }

    fn take(&mut self, token: SampledToken) {
        if self.first_token.is_none() {
            self.first_token = Some(Instant::now());
            let total = self.prompt.ids.len();
            self.events.push_back(Event::PromptProgress { done: total, total });
        }
        self.seen += 1;
        let id = token.id;
        if self.text.stop_tokens.contains(&id) && !self.request.ignore_stop_tokens {
            return self.finish(FinishReason::StopToken(id));
        }
        let stop = self.answer.push(token);
        self.give_tokens();
        if let Some(stop) = stop {
            self.finish(FinishReason::StopString(stop));
        } else if self.seen == self.limit {
            let by_request = self.request.max_tokens.is_some_and(|most| most == self.limit);
            self.finish(if by_request { FinishReason::Length } else { FinishReason::ContextFull });
        }
    }

    fn give_tokens(&mut self) {
        while let Some(token) = self.answer.pop() {
            self.events.push_back(Event::Token(token));
        }
    }

    fn finish(&mut self, reason: FinishReason) {
        self.over = true;
        let end = Instant::now();
        // After a stop string the answer is cut already; else its last bytes may complete one.
        let stop = if let FinishReason::StopString(_) = reason { None } else { self.answer.finish() };
        self.give_tokens();
        let first_token = self.first_token.unwrap_or(end);
        self.events.push_back(Event::Finished(Finished {
            reason: stop.map_or(reason, FinishReason::StopString),
            prompt_tokens: self.prompt.ids.len(),
            cached_tokens: self.cached_tokens,
            generated_tokens: self.seen,
            prefill: first_token - self.started,
            decode: end - first_token,
            seed: self.params.seed,
        }));
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(Ok(event));
            }
            if self.over {
                return None;
            }
            if let Err(error) = self.advance() {
                self.over = true;
                self.session.fail(self.backend);
                return Some(Err(error));
            }
        }
    }
}

impl Drop for Generation<'_> {
    /// Waits for the steps in flight: after the events are out, so that no end waits for a step that is discarded.
    fn drop(&mut self) {
        self.session.drain(self.backend);
    }
}
