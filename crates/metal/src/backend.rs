//! [`Backend`] on any [`Gpu`]: states, snapshots, steps in flight.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};

use lily_backend::{
    Backend, Caps, Error, Input, MemoryReport, Output, Part, Result, Row, RowOutput, SampledToken, SnapshotId, Stage,
    StageOutput, StateId, Step, Ticket, Want,
};
use lily_model::Checkpoint;

use crate::LoadOptions;
use crate::device::{Commit, Gpu, Slice, float_bytes, read_words};
use crate::forward::{Forward, Token};
use crate::kernels::gemv::NO_ID;
use crate::plan::Plan;
use crate::prefill::{MANY, Prefill, Tokens};
use crate::room;
use crate::sample::{self, is_plain_greedy};
use crate::state::{Layout, Sampled, Snapshot, State};
use crate::step::{self, ANGLES, MAX_ROWS, Pending, RowResult, Sampling, StepSet, angles};

/// Steps that may wait for `wait`: one that runs and one that is ready when it ends.
const STEPS_IN_FLIGHT: usize = 2;
/// Sets of step memory: the token that a step sampled is read by the next one, which is waited for before a third begins.
const STEP_SETS: usize = STEPS_IN_FLIGHT + 1;
/// Tokens of a command buffer. A display waits for the GPU no longer than one takes: 8 tokens of the full-size model are
/// 80 ms at 200 GB/s.
const COMMIT_TOKENS: usize = 8;

/// The model on a GPU.
pub(crate) struct MetalBackend<G: Gpu> {
    gpu: G,
    caps: Caps,
    plan: Plan,
    layout: Layout,
    sets: Vec<StepSet>,
    /// Logits of one position each, for rows to come.
    spare_logits: Vec<Slice>,
    logits_bytes: usize,
    states: BTreeMap<u32, State>,
    snapshots: BTreeMap<u32, Snapshot>,
    pending: VecDeque<Pending>,
    next_state: u32,
    next_snapshot: u32,
    next_ticket: u64,
}

fn unknown(what: &'static str, id: u64) -> Error {
    Error::Unknown { what, id }
}

impl<G: Gpu> MetalBackend<G> {
    /// Compiles the kernels, maps or copies the weights.
    pub(crate) fn load(mut gpu: G, checkpoint: &Checkpoint, options: &LoadOptions) -> Result<MetalBackend<G>> {
        let plan = Plan::new(&mut gpu, checkpoint, options)?;
        let shape = &plan.shape;
        let layout = Layout::new(shape, options.kv);
        let how: Vec<String> = std::iter::once(gpu.name()).chain(plan.prefill.how.clone()).collect();
        let used = plan.mapped_bytes + plan.weight_bytes + plan.scratch_bytes;
        let fitting = || room::context(&gpu, used, layout.bytes(), shape.max_context);
        let max_context = options.max_context.unwrap_or_else(fitting).max(1);
        let max_chunk = plan.prefill.most_tokens.min(max_context);
        let caps = Caps {
            name: format!("metal ({})", how.join(", ")),
            max_context,
            max_chunk,
            max_rows: MAX_ROWS,
            steps_in_flight: STEPS_IN_FLIGHT,
            overlaps: true,
            bytes_per_token: layout.bytes().per_token,
            bytes_per_state: layout.bytes().whatever,
            own_memory: false,
            vocab: shape.vocab,
        };
        let sets = (0..STEP_SETS).map(|_| StepSet::new(&mut gpu, max_chunk)).collect::<Result<Vec<_>>>()?;
        Ok(MetalBackend {
            gpu,
            caps,
            plan,
            layout,
            sets,
            spare_logits: Vec::new(),
            logits_bytes: 0,
            states: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            pending: VecDeque::new(),
            next_state: 0,
            next_snapshot: 0,
            next_ticket: 0,
        })
    }

    /// The device below, for what tests ask of it.
    #[cfg(test)]
    pub(crate) fn gpu(&mut self) -> &mut G {
        &mut self.gpu
    }

    /// Makes the head too short for its kernel, so that the device fails.
    #[cfg(test)]
    pub(crate) fn shorten_head(&mut self) {
        let codes = &mut self.plan.head.codes;
        *codes = codes.part(0, codes.bytes / 2);
    }

    fn state(&self, id: StateId) -> Result<&State> {
        self.states.get(&id.0).ok_or_else(|| unknown("state", id.0.into()))
    }

    /// A state that is not lost, with nothing in flight that would still change it.
    fn settled_state(&mut self, id: StateId) -> Result<&State> {
        self.state(id)?;
        self.drain();
        let state = self.state(id)?;
        if state.lost { Err(Error::StateLost(id.0)) } else { Ok(state) }
    }

    /// Room for the logits of so many positions.
    fn take_logits(&mut self, positions: usize) -> Result<Slice> {
        match self.spare_logits.pop() {
            Some(spare) if positions == 1 => Ok(spare),
            spare => {
                self.spare_logits.extend(spare);
                let bytes = 4 * positions * self.caps.vocab;
                let buffer = self.gpu.buffer(bytes, "the logits of a row")?;
                self.logits_bytes += bytes;
                Ok(Slice { buffer, offset: 0, bytes })
            }
        }
    }

    fn give_logits_back(&mut self, logits: Slice) {
        if logits.bytes == 4 * self.caps.vocab {
            return self.spare_logits.push(logits);
        }
        self.logits_bytes -= logits.bytes;
        self.gpu.free(logits.buffer);
    }

    /// Waits until the device has nothing left to do, and takes what it made.
    fn drain(&mut self) {
        for index in 0..self.pending.len() {
            self.finish(index);
        }
    }

    /// Waits for the device to end the `index`-th step in flight and takes its results; errors stand in its rows.
    fn finish(&mut self, index: usize) {
        let Some(commit) = self.pending[index].commit.take() else { return };
        let ended = self.gpu.wait(commit);
        let (ticket, states) = (self.pending[index].ticket, self.pending[index].states.clone());
        let mut lost = ended.is_err();
        // What a failed device left behind is not looked at.
        let mut failure = ended.err();
        for row in 0..self.pending[index].rows.len() {
            let result = std::mem::replace(&mut self.pending[index].rows[row], RowResult::Done(RowOutput::Nothing));
            let result = match failure.take() {
                Some(error) => {
                    self.discard(result);
                    RowResult::Failed(error)
                }
                None if lost => {
                    self.discard(result);
                    RowResult::Done(RowOutput::Nothing)
                }
                None => self.finish_row(ticket, row, result).unwrap_or_else(RowResult::Failed),
            };
            lost |= matches!(&result, RowResult::Failed(Error::BadLogits { .. } | Error::Device(_)));
            self.pending[index].rows[row] = result;
        }
        if lost {
            self.lose(&states);
        }
    }

    /// What these states hold is not defined any more.
    fn lose(&mut self, states: &[StateId]) {
        for id in states {
            if let Some(state) = self.states.get_mut(&id.0) {
                state.lost = true;
            }
        }
    }

    /// Gives back the memory of a result that nobody will see.
    fn discard(&mut self, result: RowResult) {
        if let RowResult::Logits { slice: logits, .. }
        | RowResult::Token { logits, .. }
        | RowResult::Sampling { logits, .. } = result
        {
            self.give_logits_back(logits);
        }
    }

    fn finish_row(&mut self, ticket: Ticket, row: usize, result: RowResult) -> Result<RowResult> {
        match result {
            RowResult::Logits { slice, first } => {
                let logits = read_words(&self.gpu, slice, f32::from_le_bytes)?;
                self.give_logits_back(slice);
                let bad = logits.iter().position(|logit| !logit.is_finite());
                Ok(match bad {
                    Some(bad) => RowResult::Failed(Error::BadLogits { row, position: first + bad / self.caps.vocab }),
                    None => RowResult::Done(RowOutput::Logits(logits)),
                })
            }
            RowResult::Token { sampling, token, logits } => {
                let id = read_words(&self.gpu, token, u32::from_le_bytes)?[0];
                let values = match sampling.params.logprobs {
                    Some(_) => read_words(&self.gpu, logits, f32::from_le_bytes)?,
                    None => Vec::new(),
                };
                self.give_logits_back(logits);
                let sampled = match id {
                    NO_ID => Err(sampling.bad_logits()),
                    _ => {
                        let logprobs = sampling.params.logprobs.map(|top| sample::report(&values, id, top as usize));
                        Ok(SampledToken { id, logprobs })
                    }
                };
                Ok(self.settle(ticket, &sampling, sampled))
            }
            RowResult::Sampling { sampling, logits: slice, mask } => {
                let logits = read_words(&self.gpu, slice, f32::from_le_bytes)?;
                self.give_logits_back(slice);
                if !logits.iter().all(|logit| logit.is_finite()) {
                    return Err(sampling.bad_logits());
                }
                if sampling.params.masked && mask.is_none() {
                    return Ok(RowResult::Waiting { sampling, logits });
                }
                let sampled = sampling.run(&logits, self.states.get(&sampling.state.0), mask.as_deref());
                Ok(self.settle(ticket, &sampling, sampled))
            }
            done => Ok(done),
        }
    }

    /// Tells the state which token its step `ticket` sampled.
    fn settle(&mut self, ticket: Ticket, sampling: &Sampling, sampled: Result<SampledToken>) -> RowResult {
        let id = sampled.as_ref().ok().map(|token| token.id);
        if let Some(state) = self.states.get_mut(&sampling.state.0) {
            match state.sampled {
                Sampled::OnDevice(by, _) | Sampled::ByHost(by) if by == ticket => {
                    state.sampled = id.map_or(Sampled::None, Sampled::Id);
                    state.awaits_mask = None;
                }
                // Fed already by the step after this one.
                _ => {
                    if let Some(unknown @ None) = state.tokens.get_mut(sampling.position) {
                        *unknown = id;
                    }
                }
            }
        }
        match sampled {
            Ok(token) => RowResult::Done(RowOutput::Token(token)),
            Err(error) => RowResult::Failed(error),
        }
    }

    /// Writes what a row's tokens bring along, and returns it with their ids, as far as the host knows them.
    fn write_inputs(&mut self, ticket: Ticket, index: usize, row: &Row) -> Result<(Vec<Token>, Vec<Option<u32>>)> {
        let set = self.set(ticket);
        let (ids, all_angles) = (set.ids, set.angles);
        let state = self.state(row.state)?;
        let start = state.position();
        let (tokens, on_device) = match (&row.input, state.sampled) {
            (Input::Tokens(ids), _) => (ids.iter().copied().map(Some).collect(), None),
            (Input::PreviousSample, Sampled::OnDevice(_, slice)) => (vec![None], Some(slice)),
            (Input::PreviousSample, Sampled::Id(id)) => (vec![Some(id)], None),
            (Input::PreviousSample, _) => return Err(Error::BadStep(format!("row {index}: no token was sampled"))),
        };
        let mut inputs = Vec::with_capacity(tokens.len());
        for (token, id) in tokens.iter().enumerate() {
            let place = index * self.caps.max_chunk + token;
            let own = Token {
                id: on_device.unwrap_or(ids.nth(place, 4)),
                angles: all_angles.nth(place, 4 * ANGLES),
                position: start + token,
            };
            self.gpu.write(own.angles, &float_bytes(&angles(own.position, self.plan.shape.rope_theta)))?;
            if let Some(id) = id {
                self.gpu.write(own.id, &id.to_le_bytes())?;
            }
            inputs.push(own);
        }
        Ok((inputs, tokens))
    }

    /// The memory of a step.
    fn set(&self, ticket: Ticket) -> &StepSet {
        &self.sets[(ticket.0 % STEP_SETS as u64) as usize]
    }

    /// Encodes and commits one row, the `index`-th of its step.
    fn run_row(&mut self, ticket: Ticket, index: usize, row: Row, trace: bool) -> Result<RunRow> {
        let (inputs, tokens) = self.write_inputs(ticket, index, &row)?;
        let sampled = self.set(ticket).sampled.nth(index, 4);
        let Row { state: id, want, .. } = row;
        let heads = match &want {
            Want::Nothing => 0,
            Want::Token(_) | Want::LastLogits => 1,
            Want::AllLogits => inputs.len(),
        };
        let logits = match heads {
            0 => None,
            heads => Some(self.take_logits(heads)?),
        };
        let vocab = self.caps.vocab;
        let limit = match &want {
            Want::Token(params) if is_plain_greedy(params) => Some(vocab.min(params.vocab_limit as usize)),
            _ => None,
        };

        let state = self.states.get(&id.0).ok_or_else(|| unknown("state", id.0.into()))?;
        let run = Run { plan: &self.plan, state, inputs: &inputs, logits, heads, limit, sampled, trace };
        let (commit, stages) =
            if inputs.len() < MANY { run.one_by_one(&mut self.gpu) } else { run.together(&mut self.gpu) }?;

        let position = self.state(id)?.position() + tokens.len();
        let (result, next) = match (want, logits) {
            (Want::Token(params), Some(logits)) => {
                let awaits_mask = params.masked;
                let sampling = Sampling { state: id, row: index, params, position };
                let (result, next) = match limit {
                    Some(_) => {
                        (RowResult::Token { sampling, token: sampled, logits }, Sampled::OnDevice(ticket, sampled))
                    }
                    None => (RowResult::Sampling { sampling, logits, mask: None }, Sampled::ByHost(ticket)),
                };
                (result, (next, awaits_mask.then_some(ticket)))
            }
            (_, Some(slice)) => (RowResult::Logits { slice, first: position - heads }, (Sampled::None, None)),
            (_, None) => (RowResult::Done(RowOutput::Nothing), (Sampled::None, None)),
        };
        if let Some(state) = self.states.get_mut(&id.0) {
            state.tokens.extend(tokens);
            (state.sampled, state.awaits_mask) = next;
        }
        let stages = stages.into_iter().map(|(stage, values)| StageOutput { stage, row: index, values });
        Ok(RunRow { result, commit, stages: stages.collect() })
    }
}

/// A row to be encoded.
struct Run<'a> {
    plan: &'a Plan,
    state: &'a State,
    inputs: &'a [Token],
    /// Where logits go, those of the last `heads` tokens.
    logits: Option<Slice>,
    heads: usize,
    /// Below which the highest logit is wanted, if it is.
    limit: Option<usize>,
    /// Where its id goes.
    sampled: Slice,
    trace: bool,
}

/// The last commit, and the stages that were asked for.
type Ran = (Option<Commit>, Vec<(Stage, Vec<f32>)>);

impl Run<'_> {
    /// Through the kernels of one token.
    fn one_by_one<G: Gpu>(&self, gpu: &mut G) -> Result<Ran> {
        let Run { plan, state, .. } = *self;
        let (vocab, without_head) = (plan.shape.vocab, self.inputs.len() - self.heads);
        let (mut commit, mut stages) = (None, Vec::new());
        let mut forward = Forward::new(plan, state, self.trace);
        for (token, own) in self.inputs.iter().enumerate() {
            forward.token(own);
            if let (Some(logits), Some(position)) = (self.logits, token.checked_sub(without_head)) {
                forward.head(logits.nth(position, 4 * vocab), self.limit.unwrap_or(vocab));
            }
            let is_last = token + 1 == self.inputs.len();
            if self.limit.is_some() && is_last {
                forward.argmax(self.sampled);
            }
            if self.trace {
                let views = forward.views();
                let mut new = forward.marks.run(gpu, &mut forward.pass, &views, &plan.shape)?;
                new.retain(|(stage, _)| stage.part != Part::FinalNorm || token >= without_head);
                append(&mut stages, new);
            }
            if self.trace || is_last || (token + 1) % COMMIT_TOKENS == 0 {
                commit = forward.pass.commit(gpu)?.or(commit);
                forward = Forward::new(plan, state, self.trace);
            }
        }
        Ok((commit, stages))
    }

    /// Through the kernels of many.
    fn together<G: Gpu>(&self, gpu: &mut G) -> Result<Ran> {
        let Run { plan, state, inputs, .. } = *self;
        let (vocab, hidden, count) = (plan.shape.vocab, plan.shape.hidden, inputs.len());
        let whole = |first: Slice, bytes: usize| Slice { bytes: bytes * count, ..first };
        let first = inputs[0];
        let tokens = Tokens {
            ids: whole(first.id, 4),
            angles: whole(first.angles, 4 * ANGLES),
            position: first.position,
            count,
        };
        let mut prefill = Prefill::new(plan, state, self.trace);
        prefill.tokens(&tokens, if self.trace { count } else { self.heads });
        match self.logits {
            Some(logits) if self.heads == 1 => prefill.head(count, logits, self.limit.unwrap_or(vocab)),
            Some(logits) => prefill.all_logits(count, logits),
            None => {}
        }
        if self.limit.is_some() {
            prefill.argmax(self.sampled);
        }
        let mut stages = Vec::new();
        if self.trace {
            let views = prefill.views(count);
            stages = prefill.marks.run(gpu, &mut prefill.pass, &views, &plan.shape)?;
            stages.retain(|(stage, _)| stage.part != Part::FinalNorm || self.heads > 0);
            for (_, values) in stages.iter_mut().filter(|(stage, _)| stage.part == Part::FinalNorm) {
                values.drain(..(count - self.heads) * hidden);
            }
        }
        let commit = prefill.pass.commit(gpu)?;
        Ok((commit, stages))
    }
}

/// What encoding a row came to.
struct RunRow {
    result: RowResult,
    commit: Option<Commit>,
    stages: Vec<StageOutput>,
}

/// Appends one more token's stages to those of the tokens before it.
fn append(stages: &mut Vec<(Stage, Vec<f32>)>, new: Vec<(Stage, Vec<f32>)>) {
    for (stage, values) in new {
        match stages.iter_mut().find(|(other, _)| *other == stage) {
            Some((_, all)) => all.extend(values),
            None => stages.push((stage, values)),
        }
    }
}

impl<G: Gpu> Backend for MetalBackend<G> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn new_state(&mut self, capacity: usize) -> Result<StateId> {
        lily_backend::check_capacity(capacity, &self.caps)?;
        let memory = self.memory();
        let weights = memory.weights_mapped + memory.weights_owned;
        let used = weights + memory.states + memory.snapshots + memory.scratch;
        let state = self.layout.bytes();
        if state.of(capacity) > self.gpu.memory_bytes().saturating_sub(used) {
            return Err(room::no_room_for_state(&self.gpu, used, state, capacity));
        }
        let state = State::new(&mut self.gpu, self.layout, capacity)?;
        let id = self.next_state;
        self.next_state += 1;
        self.states.insert(id, state);
        Ok(StateId(id))
    }

    fn free_state(&mut self, state: StateId) -> Result<()> {
        self.state(state)?;
        self.drain();
        if let Some(state) = self.states.remove(&state.0) {
            state.free(&mut self.gpu);
        }
        Ok(())
    }

    fn reset_state(&mut self, state: StateId) -> Result<()> {
        self.state(state)?;
        self.drain();
        match self.states.get_mut(&state.0) {
            Some(state) => state.reset(&mut self.gpu),
            None => Err(unknown("state", state.0.into())),
        }
    }

    fn position(&self, state: StateId) -> Result<usize> {
        Ok(self.state(state)?.position())
    }

    fn snapshot(&mut self, state: StateId) -> Result<SnapshotId> {
        self.settled_state(state)?;
        let state = self.states.get(&state.0).ok_or_else(|| unknown("state", state.0.into()))?;
        let snapshot = state.snapshot(&mut self.gpu)?;
        let id = self.next_snapshot;
        self.next_snapshot += 1;
        self.snapshots.insert(id, snapshot);
        Ok(SnapshotId(id))
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) -> Result<()> {
        let found = self.snapshots.remove(&snapshot.0).ok_or_else(|| unknown("snapshot", snapshot.0.into()))?;
        found.free(&mut self.gpu);
        Ok(())
    }

    fn restore(&mut self, state: StateId, snapshot: SnapshotId) -> Result<()> {
        self.state(state)?;
        self.drain();
        let snapshot = self.snapshots.get(&snapshot.0).ok_or_else(|| unknown("snapshot", snapshot.0.into()))?;
        match self.states.get_mut(&state.0) {
            Some(state) => state.restore(&mut self.gpu, snapshot),
            None => Err(unknown("state", state.0.into())),
        }
    }

    fn fork(&mut self, from: StateId, to: StateId) -> Result<()> {
        self.settled_state(from)?;
        let mut target = self.states.remove(&to.0).ok_or_else(|| unknown("state", to.0.into()))?;
        let result = match self.states.get(&from.0) {
            // A state is a copy of itself.
            None => Ok(()),
            Some(source) if source.position() > target.capacity() => {
                Err(Error::ContextFull { position: 0, more: source.position(), capacity: target.capacity() })
            }
            Some(source) => target.copy_from(&mut self.gpu, source),
        };
        self.states.insert(to.0, target);
        result
    }

    fn export(&mut self, state: StateId, to: &mut dyn Write) -> Result<()> {
        self.settled_state(state)?;
        self.state(state)?.export(&self.gpu, &self.plan.fingerprint, to)
    }

    fn import(&mut self, state: StateId, from: &mut dyn Read) -> Result<()> {
        self.state(state)?;
        self.drain();
        match self.states.get_mut(&state.0) {
            Some(state) => state.import(&mut self.gpu, &self.plan.fingerprint, self.caps.vocab, from),
            None => Err(unknown("state", state.0.into())),
        }
    }

    fn feed_noise(&mut self, id: StateId, tokens: &[u32], seed: u64) -> Result<()> {
        let state = self.settled_state(id)?;
        let (position, capacity) = (state.position(), state.capacity());
        if tokens.len() > capacity - position {
            return Err(Error::ContextFull { position, more: tokens.len(), capacity });
        }
        if let Some(bad) = tokens.iter().find(|token| **token as usize >= self.caps.vocab) {
            return Err(Error::BadStep(format!("token {bad} is outside the vocabulary of {}", self.caps.vocab)));
        }
        match self.states.get_mut(&id.0) {
            Some(state) => state.feed_noise(&mut self.gpu, tokens, seed),
            None => Err(unknown("state", id.0.into())),
        }
    }

    fn submit(&mut self, step: Step) -> Result<Ticket> {
        step::check(&step, &self.caps, &self.states, &self.pending)?;
        let needs_host = |row: &Row| {
            let by_host = matches!(self.states.get(&row.state.0).map(|state| state.sampled), Some(Sampled::ByHost(_)));
            row.input == Input::PreviousSample && by_host
        };
        if step.trace || step.rows.iter().any(needs_host) {
            self.drain();
            // The token may have turned out to be none.
            step::check(&step, &self.caps, &self.states, &self.pending)?;
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let states: Vec<StateId> = step.rows.iter().map(|row| row.state).collect();
        let (mut rows, mut trace, mut commit) = (Vec::with_capacity(states.len()), Vec::new(), None);
        for (index, row) in step.rows.into_iter().enumerate() {
            match self.run_row(ticket, index, row, step.trace) {
                Ok(ran) => {
                    rows.push(ran.result);
                    trace.extend(ran.stages);
                    commit = ran.commit.or(commit);
                }
                // Some rows may have moved: what is left is an error at `wait`.
                Err(error) => {
                    rows.push(RowResult::Failed(error));
                    self.lose(&states);
                    break;
                }
            }
        }
        self.pending.push_back(Pending { ticket, commit, states, rows, trace });
        Ok(ticket)
    }

    fn set_mask(&mut self, ticket: Ticket, row: usize, mask: &[u32]) -> Result<()> {
        let pending = self.pending.iter_mut().find(|pending| pending.ticket == ticket);
        let pending = pending.ok_or_else(|| unknown("ticket", ticket.0))?;
        let refused = || Error::BadStep(format!("row {row} does not wait for a mask"));
        match pending.rows.get_mut(row) {
            Some(RowResult::Sampling { sampling, mask: own @ None, .. }) if sampling.params.masked => {
                *own = Some(mask.to_vec());
                // From here on the token is the host's to sample whenever it is needed.
                if let Some(state) = self.states.get_mut(&sampling.state.0) {
                    state.awaits_mask = None;
                }
                Ok(())
            }
            Some(RowResult::Waiting { sampling, logits }) => {
                let sampling = sampling.clone();
                let sampled = sampling.run(logits, self.states.get(&sampling.state.0), Some(mask));
                let result = self.settle(ticket, &sampling, sampled);
                let pending = self.pending.iter_mut().find(|pending| pending.ticket == ticket);
                if let Some(place) = pending.and_then(|pending| pending.rows.get_mut(row)) {
                    *place = result;
                }
                Ok(())
            }
            _ => Err(refused()),
        }
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Output> {
        let Some(first) = self.pending.front() else {
            return Err(unknown("ticket", ticket.0));
        };
        if first.ticket != ticket {
            if self.pending.iter().any(|pending| pending.ticket == ticket) {
                let (first, this) = (first.ticket.0, ticket.0);
                return Err(Error::BadStep(format!("ticket {first} is to be waited for before {this}")));
            }
            return Err(unknown("ticket", ticket.0));
        }
        self.finish(0);
        let waits = |row: &RowResult| matches!(row, RowResult::Waiting { .. });
        if let Some(row) = self.pending.front().and_then(|pending| pending.rows.iter().position(waits)) {
            return Err(Error::BadStep(format!("row {row} waits for its mask")));
        }
        let Some(done) = self.pending.pop_front() else {
            return Err(unknown("ticket", ticket.0));
        };
        let mut rows = Vec::with_capacity(done.rows.len());
        for row in done.rows {
            match row {
                RowResult::Done(output) => rows.push(output),
                RowResult::Failed(error) => return Err(error),
                _ => return Err(Error::Device("a step ended without its results".into())),
            }
        }
        Ok(Output { rows, trace: done.trace })
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            weights_mapped: self.plan.mapped_bytes,
            weights_owned: self.plan.weight_bytes,
            states: self.states.values().map(State::bytes).sum(),
            snapshots: self.snapshots.values().map(Snapshot::bytes).sum(),
            scratch: self.plan.scratch_bytes + self.logits_bytes + self.sets.iter().map(StepSet::bytes).sum::<usize>(),
        }
    }
}
