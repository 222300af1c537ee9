//! The engine: one backend, the text side of its checkpoint, and the requests it takes. It advances all requests together, one step of
//! the device after the other.
//!
//! A step has a row for each answer that can go on, and at most one chunk of one prompt, so that a long prompt delays the others
//! by one chunk at a time. Prompts take turns, and so do all where there are more than a step has rows. Where a chunk ends depends on
//! the prompt and on the engine's options alone, never on the other requests, so that an answer does not depend on them either.
//!
//! What a request in progress has read is shared, as what is parked is: a prompt with the same beginning waits until it is read, and goes
//! on from a copy.

use std::collections::VecDeque;
use std::sync::Arc;

use lily_backend::{Backend, Caps, Input, MemoryReport, Output, Row, RowOutput, Step, Ticket, Want};

use crate::error::{EngineError, Result};
use crate::generation::{Event, FinishReason, Generation};
use crate::job::{Happened, Job};
use crate::request::{GenerateRequest, MAX_LOGPROBS, RequestId};
use crate::session::{Session, common_length};
use crate::sessions::{CacheCounts, Found, SessionOptions, Sessions};
use crate::text::{Prompt, TextModel};

/// Steps in flight while decoding, where the backend overlaps them: the device runs one while the tokens of the one
/// before are looked at. More would only waste more steps at the end.
const STEPS_IN_FLIGHT: usize = 2;

/// A request waits for another one's prompt, or takes a copy of its session, if that saves this many tokens: both hold up the others
/// for a step.
const WORTH_SHARING: usize = 256;

/// Added to a logit, excludes it: far below every logit and bias, and finite after division by any temperature.
const EXCLUDED: f32 = -1e9;

/// How an engine works.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most requests in progress at once.
    pub running: usize,
    /// Most requests that wait for their turn.
    pub waiting: usize,
    /// Most tokens of a prompt in one step; `None`: as many as the backend takes.
    pub chunk: Option<usize>,
    /// Long prompts get a snapshot each time so many tokens were read, rounded to whole chunks.
    pub snapshot_every: usize,
    /// Number and size of sessions.
    pub sessions: SessionOptions,
}

impl EngineOptions {
    /// For one conversation at a time: one session, with room for the whole context.
    pub fn single() -> EngineOptions {
        EngineOptions {
            running: 1,
            waiting: 1,
            chunk: None,
            snapshot_every: 8192,
            sessions: SessionOptions { most: 1, memory: None, room: None, store: None },
        }
    }
}

/// What an engine is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Requests in progress.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Sessions that no request uses.
    pub parked: usize,
    /// What the prefix cache did.
    pub cache: CacheCounts,
    /// Memory in use on the device.
    pub memory: MemoryReport,
}

impl EngineStatus {
    /// This engine and another one together.
    #[must_use]
    pub fn and(self, other: EngineStatus) -> EngineStatus {
        let (a, b) = (self.memory, other.memory);
        EngineStatus {
            running: self.running + other.running,
            waiting: self.waiting + other.waiting,
            parked: self.parked + other.parked,
            cache: self.cache.and(other.cache),
            memory: MemoryReport {
                weights_mapped: a.weights_mapped + b.weights_mapped,
                weights_owned: a.weights_owned + b.weights_owned,
                states: a.states + b.states,
                snapshots: a.snapshots + b.snapshots,
                scratch: a.scratch + b.scratch,
            },
        }
    }
}

/// Runs one checkpoint on one backend.
pub struct Engine {
    backend: Box<dyn Backend>,
    text: Arc<TextModel>,
    vocab_limit: u32,
    /// Ids below `vocab_limit` for which the tokenizer has no token, with the bias that excludes them. The published
    /// tokenizer has none.
    holes: Vec<(u32, f32)>,
    options: EngineOptions,
    waiting: VecDeque<Job>,
    /// In the order in which they take turns: the one whose last row is the longest ago comes first.
    running: Vec<Running>,
    sessions: Sessions,
    in_flight: VecDeque<Flight>,
    events: Vec<Happened>,
    accepted: u64,
}

/// A request with its session.
struct Running {
    job: Job,
    session: Session,
    /// The state is not to be used again.
    lost: bool,
}

/// A step that was not waited for, with the requests of its rows.
struct Flight {
    ticket: Ticket,
    rows: Vec<RequestId>,
}

impl Engine {
    /// Takes a loaded backend and the text side of the same checkpoint, for one conversation at a time.
    pub fn new(backend: Box<dyn Backend>, text: Arc<TextModel>) -> Engine {
        let options = EngineOptions::single();
        // Only a folder for sessions can fail.
        let sessions = Sessions::in_memory(options.sessions.clone());
        Engine::build(backend, text, options, sessions)
    }

    /// Takes a loaded backend, the text side of the same checkpoint, and how to work.
    ///
    /// # Errors
    /// If the folder for stored sessions cannot be used.
    pub fn with_options(
        backend: Box<dyn Backend>,
        text: Arc<TextModel>,
        options: EngineOptions,
    ) -> std::io::Result<Engine> {
        let sessions = Sessions::new(options.sessions.clone())?;
        Ok(Engine::build(backend, text, options, sessions))
    }

    fn build(backend: Box<dyn Backend>, text: Arc<TextModel>, options: EngineOptions, sessions: Sessions) -> Engine {
        // Rows of the embedding beyond the tokenizer's ids are padding, and a head may not have all of its ids.
        let ids = text.tokenizer.vocab_size().min(backend.caps().vocab);
        let vocab_limit = u32::try_from(ids).unwrap_or(u32::MAX);
        let holes = (0..vocab_limit).filter(|id| text.tokenizer.token_bytes(*id).is_none());
        Engine {
            vocab_limit,
            holes: holes.map(|id| (id, EXCLUDED)).collect(),
            backend,
            text,
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            sessions,
            in_flight: VecDeque::new(),
            events: Vec::new(),
            accepted: 0,
        }
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

    /// What it is doing.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            running: self.running.iter().filter(|running| !running.job.is_over()).count(),
            waiting: self.waiting.len(),
            parked: self.sessions.parked(),
            cache: self.sessions.counts(),
            memory: self.backend.memory(),
        }
    }

    /// Whether no request is in progress or waits, and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Starts to answer a prompt, for programs with one request at a time. What earlier prompts fed is used as far as this one
    /// repeats it.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn generate(&mut self, prompt: &Prompt, request: GenerateRequest) -> Result<Generation<'_>> {
        let cancel = request.cancel.clone();
        let id = self.submit(prompt.clone(), request)?;
        Ok(Generation::new(self, id, cancel))
    }

    /// Accepts a request. Its events come from [`Engine::step`].
    ///
    /// # Errors
    /// [`EngineError::BadRequest`], [`EngineError::PromptTooLong`] and [`EngineError::Busy`], before anything happens.
    pub fn submit(&mut self, prompt: Prompt, request: GenerateRequest) -> Result<RequestId> {
        let sampling = request.sampling.clone().or(&self.text.sampling);
        let mut params = sampling.params(self.vocab_limit, prompt.ids.len())?;
        params.logprobs = request.logprobs;
        if !self.holes.is_empty() {
            params.logit_bias = params.logit_bias.iter().chain(&self.holes).copied().collect();
        }
        self.check(&prompt, &request)?;
        if self.waiting.len() >= self.options.waiting {
            return Err(EngineError::Busy { waiting: self.waiting.len() });
        }
        let id = RequestId(self.accepted);
        let job = Job::new(id, &self.text, prompt, params, request, self.caps().max_context)?;
        self.accepted += 1;
        self.waiting.push_back(job);
        Ok(id)
    }

    fn check(&self, prompt: &Prompt, request: &GenerateRequest) -> Result<()> {
        let Caps { vocab, max_context, .. } = *self.caps();
        if prompt.ids.is_empty() {
            return Err(EngineError::bad_request("prompt", "no tokens", "at least one token"));
        }
        if let Some(id) = prompt.ids.iter().find(|id| **id as usize >= vocab) {
            return Err(EngineError::bad_request("prompt", format!("token id {id}"), format!("ids below {vocab}")));
        }
        if prompt.ids.len() >= max_context {
            let prompt_tokens = prompt.ids.len();
            return Err(EngineError::PromptTooLong { prompt_tokens, context_tokens: max_context });
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

    /// Does a step of work for all requests, if there is any, and gives what happened. After an `Err` or [`Event::Finished`] there is
    /// nothing more of a request.
    pub fn step(&mut self) -> Vec<(RequestId, Result<Event>)> {
        self.end_cancelled();
        self.admit();
        let most = if self.caps().overlaps { self.caps().steps_in_flight.min(STEPS_IN_FLIGHT) } else { 1 };
        while self.in_flight.len() < most {
            let rows = self.plan(most);
            if rows.is_empty() {
                break;
            }
            if !self.launch(rows) {
                break;
            }
        }
        // What is known already should not wait for the device.
        if self.events.is_empty() {
            self.land();
        }
        self.release();
        std::mem::take(&mut self.events)
    }

    /// Ends all requests with an error and waits for the device: for a caller whose call of [`Engine::step`] panicked.
    pub fn abandon(&mut self, reason: &str) -> Vec<(RequestId, Result<Event>)> {
        let error = EngineError::from(lily_backend::Error::Device(reason.to_owned()));
        let ids: Vec<RequestId> = self.running.iter().map(|running| running.job.id).collect();
        self.fail(&ids, &error);
        for job in std::mem::take(&mut self.waiting) {
            self.events.push((job.id, Err(error.clone())));
        }
        while !self.in_flight.is_empty() {
            self.land();
        }
        self.release();
        std::mem::take(&mut self.events)
    }

    /// Ends: stores what is parked, as far as there is a place, and frees it.
    pub fn clear_cache(&mut self) {
        self.sessions.clear(self.backend.as_mut());
    }

    /// The tokens of the sessions that no request uses.
    #[cfg(test)]
    pub(crate) fn parked_tokens(&self) -> Vec<Vec<u32>> {
        self.sessions.parked_tokens()
    }

    fn end_cancelled(&mut self) {
        for job in self.waiting.iter_mut().chain(self.running.iter_mut().map(|running| &mut running.job)) {
            if job.cancel.is_cancelled() && !job.is_over() {
                self.events.extend(job.finish(FinishReason::Cancelled));
            }
        }
        self.waiting.retain(|job| !job.is_over());
    }

    /// Number and bytes of the sessions in use.
    fn in_use(&self) -> (usize, usize) {
        (self.running.len(), self.running.iter().map(|running| running.session.bytes(self.caps())).sum())
    }

    /// Gives waiting requests their sessions, as long as there are any.
    fn admit(&mut self) {
        // A request often continues an answer that has just ended, and its last step may still be on its way.
        while !self.waiting.is_empty() && self.running.iter().any(|running| running.job.is_over()) {
            self.land();
            self.release();
        }
        let mut index = 0;
        while self.running.len() < self.options.running && index < self.waiting.len() {
            if self.is_being_read(&self.waiting[index].prompt.ids) {
                index += 1;
                continue;
            }
            let Some(mut job) = self.waiting.remove(index) else { return };
            let found = match self.share(&job) {
                Some((session, cached_tokens)) => Ok(Found::Session(session, cached_tokens)),
                None => {
                    let in_use = self.in_use();
                    self.sessions.find(self.backend.as_mut(), &job.prompt.ids, job.longest(), in_use)
                }
            };
            match found {
                Ok(Found::Session(session, cached_tokens)) => {
                    self.events.push((job.id, Ok(job.begin(cached_tokens))));
                    self.running.push(Running { job, session, lost: false });
                }
                Ok(Found::Later) => return self.waiting.insert(index, job),
                Err(error) => self.events.push((job.id, Err(error))),
            }
        }
    }

    /// Whether a request in progress is about to read more of a prompt than any other session has.
    fn is_being_read(&self, prompt: &[u32]) -> bool {
        let (mut known, mut coming) = (self.sessions.reusable(prompt), 0);
        for running in self.running.iter().filter(|running| !running.lost) {
            let will = self.will_share(&running.job.prompt, prompt);
            if !running.job.is_over() && running.session.position() < will {
                coming = coming.max(will);
            } else {
                known = known.max(running.session.reusable(prompt));
            }
        }
        coming >= known + WORTH_SHARING
    }

    /// How much of `prompt` a session will have at a snapshot once it has read another prompt.
    fn will_share(&self, other: &Prompt, prompt: &[u32]) -> usize {
        let common = common_length(&other.ids, &prompt[..prompt.len() - 1]);
        let branch = other.branches.iter().copied().rfind(|branch| *branch <= common).unwrap_or(0);
        // The whole of a prompt is no place to keep a snapshot at.
        branch.max(common.min(other.ids.len() - 1) / self.snapshot_every() * self.snapshot_every())
    }

    /// A copy of what a request in progress has of a prompt, if that is worth it.
    fn share(&mut self, job: &Job) -> Option<(Session, usize)> {
        let prompt = &job.prompt.ids;
        let reusable = |running: &Running| if running.lost { 0 } else { running.session.reusable(prompt) };
        let nearest = (0..self.running.len()).max_by_key(|index| reusable(&self.running[*index]))?;
        let worth = self.sessions.reusable(prompt) + WORTH_SHARING;
        if reusable(&self.running[nearest]) < worth {
            return None;
        }
        // No step may be on its way.
        while self.running[nearest].session.in_flight() > 0 {
            self.land();
        }
        let cached_tokens = reusable(&self.running[nearest]);
        if cached_tokens < worth {
            return None;
        }
        let in_use = self.in_use();
        let session = &self.running[nearest].session;
        let copy = self.sessions.copy(self.backend.as_mut(), session, job.longest(), cached_tokens, in_use);
        copy.map(|session| (session, cached_tokens))
    }

    /// The rows of the next step: which request feeds what.
    fn plan(&mut self, most_in_flight: usize) -> Vec<(usize, Input)> {
        let mut rows = Vec::new();
        let mut has_prompt = false;
        for index in 0..self.running.len() {
            if rows.len() == self.caps().max_rows {
                break;
            }
            let Running { job, session, .. } = &self.running[index];
            if !job.wants_more() {
                continue;
            }
            let total = job.prompt.ids.len();
            if session.position() < total {
                // A chunk has to land before the next, which may begin with a snapshot.
                if !has_prompt && session.in_flight() == 0 && self.has_room(index, total) {
                    has_prompt = true;
                    rows.push((index, Input::Tokens(self.next_chunk(index))));
                }
                continue;
            }
            let most = if job.constraint.is_some() { 1 } else { most_in_flight };
            if session.in_flight() < most
                && let Some(input) = self.next_input(index)
            {
                rows.push((index, input));
            }
        }
        rows
    }

    /// Feeds the token that the last step samples. `None` if the state has no room for it now.
    fn next_input(&mut self, index: usize) -> Option<Input> {
        let before = self.running[index].session.state();
        let needed = self.running[index].session.position() + 1;
        if !self.has_room(index, needed) {
            return None;
        }
        let session = &self.running[index].session;
        // A state that was copied has lost the sample.
        match session.sampled() {
            Some(id) if session.state() != before => Some(Input::Tokens(vec![id])),
            _ => Some(Input::PreviousSample),
        }
    }

    /// Whether a state has room for so many tokens, which it may have to get. An answer that cannot get any ends.
    fn has_room(&mut self, index: usize, needed: usize) -> bool {
        let running = &self.running[index];
        if running.session.capacity() >= needed {
            return true;
        }
        if running.session.in_flight() > 0 {
            return false;
        }
        let longest = running.job.longest();
        let in_use = self.in_use();
        let running = &mut self.running[index];
        match self.sessions.grow(self.backend.as_mut(), &mut running.session, needed, longest, in_use) {
            Ok(true) => return true,
            Ok(false) => {
                self.events.extend(running.job.finish(FinishReason::ContextFull));
            }
            Err(error) => {
                let id = running.job.id;
                self.fail(&[id], &error);
            }
        }
        false
    }

    /// The next tokens of a prompt: up to a branch or the next multiple of the chunk size, whichever is first.
    fn next_chunk(&self, index: usize) -> Vec<u32> {
        let Running { job, session, .. } = &self.running[index];
        let (start, total) = (session.position(), job.prompt.ids.len());
        let branch = job.prompt.branches.iter().copied().find(|branch| *branch > start).unwrap_or(total);
        let end = total.min(branch).min((start / self.chunk() + 1) * self.chunk());
        job.prompt.ids[start..end].to_vec()
    }

    fn snapshot_every(&self) -> usize {
        self.options.snapshot_every.next_multiple_of(self.chunk())
    }

    fn chunk(&self) -> usize {
        let most = self.caps().max_chunk;
        self.options.chunk.map_or(most, |chunk| chunk.clamp(1, most))
    }

    /// Submits a step. `false`: it was refused, and its requests have ended.
    fn launch(&mut self, rows: Vec<(usize, Input)>) -> bool {
        let ids: Vec<RequestId> = rows.iter().map(|(index, _)| self.running[*index].job.id).collect();
        let mut step = Step { rows: Vec::new(), trace: false };
        for (index, input) in &rows {
            let Running { job, session, .. } = &self.running[*index];
            let fed = if let Input::Tokens(tokens) = input { tokens.len() } else { 1 };
            let want = if session.position() + fed < job.prompt.ids.len() {
                Want::Nothing
            } else {
                let mut params = job.params.clone();
                params.masked = job.constraint.as_ref().is_some_and(|constraint| constraint.is_active());
                Want::Token(params)
            };
            step.rows.push(Row { state: session.state(), input: input.clone(), want });
        }
        let wants: Vec<Option<bool>> = step.rows.iter().map(|row| masked(&row.want)).collect();
        let ticket = match self.backend.submit(step) {
            Ok(ticket) => ticket,
            Err(error) => {
                self.fail(&ids, &error.into());
                return false;
            }
        };
        for ((index, input), want) in rows.iter().zip(&wants) {
            let Running { job, session, .. } = &mut self.running[*index];
            session.accepted(input);
            if want.is_some() {
                job.ask();
            }
        }
        self.in_flight.push_back(Flight { ticket, rows: ids });
        for (row, ((index, _), want)) in rows.iter().zip(&wants).enumerate() {
            if *want == Some(true) {
                self.mask(ticket, row, *index);
            }
        }
        // Those who had a row come behind those who had none.
        if let Some(flight) = self.in_flight.back() {
            self.running.sort_by_key(|running| flight.rows.contains(&running.job.id));
        }
        true
    }

    /// Gives the constraint of a row while the device works.
    fn mask(&mut self, ticket: Ticket, row: usize, index: usize) {
        let Some(constraint) = &mut self.running[index].job.constraint else { return };
        // The step has to go on even if there is no constraint any more.
        let (mask, failed) = match constraint.mask() {
            Ok(mask) if mask.iter().any(|word| *word != 0) => (mask, None),
            other => {
                let reason = other.err().unwrap_or_else(|| "it allows no token".into());
                (vec![u32::MAX; (self.vocab_limit as usize).div_ceil(32)], Some(EngineError::Constraint(reason)))
            }
        };
        let result = self.backend.set_mask(ticket, row, &mask);
        let id = self.running[index].job.id;
        if let Some(error) = failed {
            self.end_with(id, error);
        }
        if let Err(error) = result {
            self.fail(&[id], &error.into());
        }
    }

    /// Waits for the oldest step and takes its tokens.
    fn land(&mut self) {
        let Some(Flight { ticket, rows }) = self.in_flight.pop_front() else { return };
        let result = self.backend.wait(ticket);
        let outputs: Vec<Option<RowOutput>> = match result {
            Ok(Output { rows: outputs, .. }) => outputs.into_iter().map(Some).collect(),
            Err(error) => {
                self.fail(&rows, &error.into());
                rows.iter().map(|_| None).collect()
            }
        };
        for (id, output) in rows.into_iter().zip(outputs) {
            let Some(index) = self.running.iter().position(|running| running.job.id == id) else { continue };
            let Running { job, session, .. } = &mut self.running[index];
            let token = if let Some(RowOutput::Token(token)) = output { Some(token) } else { None };
            session.landed(token.as_ref().map(|token| token.id));
            if job.is_over() {
                continue;
            }
            match token {
                Some(token) => self.events.extend(job.take(token, &self.text)),
                None => self.chunk_landed(index),
            }
        }
    }

    /// More of a prompt is in its state: keeps a snapshot if later prompts may come back here.
    fn chunk_landed(&mut self, index: usize) {
        let every = self.snapshot_every();
        let in_use = self.in_use();
        let Running { job, session, .. } = &mut self.running[index];
        let (done, total) = (session.position(), job.prompt.ids.len());
        if (job.prompt.branches.contains(&done) || done % every == 0)
            && self.sessions.has_room_for_snapshot(self.backend.as_mut(), in_use)
        {
            session.keep_snapshot(self.backend.as_mut());
        }
        self.events.push((job.id, Ok(Event::PromptProgress { done, total })));
    }

    /// Ends a request with an error that is not its state's.
    fn end_with(&mut self, id: RequestId, error: EngineError) {
        if let Some(running) = self.running.iter_mut().find(|running| running.job.id == id && !running.job.is_over()) {
            running.job.fail();
            self.events.push((id, Err(error)));
        }
    }

    /// Ends requests whose states a failed step left undefined.
    fn fail(&mut self, ids: &[RequestId], error: &EngineError) {
        for running in self.running.iter_mut().filter(|running| ids.contains(&running.job.id)) {
            running.lost = true;
            if running.job.is_over() {
                tracing::warn!(%error, "a discarded step failed; its session starts over");
            } else {
                running.job.fail();
                self.events.push((running.job.id, Err(error.clone())));
            }
        }
    }

    /// Parks the sessions of requests that are over and have no step in flight.
    fn release(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let Running { job, session, .. } = &self.running[index];
            if !job.is_over() || session.in_flight() > 0 {
                index += 1;
                continue;
            }
            let Running { session, lost, .. } = self.running.remove(index);
            if lost {
                session.free(self.backend.as_mut());
            } else {
                self.sessions.park(self.backend.as_mut(), session);
            }
        }
    }
}

/// For a row that samples: whether a mask limits it.
fn masked(want: &Want) -> Option<bool> {
    if let Want::Token(params) = want { Some(params.masked) } else { None }
}
