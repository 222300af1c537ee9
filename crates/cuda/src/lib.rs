//! The CUDA backend: the model behind [`lily_backend::Backend`] on an NVIDIA GPU, with kernels of its own.
//!
//! - `forward`: the forward pass, one function for one token and one for many;
//! - `kernels`: one pair of files per group of operations, `.cu` beside the `.rs` that launches it;
//! - `plan`: what is made at load; `state`: what a session keeps; `step`: the checks of a step and its results;
//! - `device`: driver, memory, streams, graphs; [`compile`]: from source to machine code.
//!
//! A step of one token is one captured graph. Everything that changes from step to step (addresses of the state, position, token,
//! sampling parameters) stands in device memory and is moved on by the last kernel, so that a session's next step needs nothing
//! from the host but the launch. On GPUs that can, a kernel starts while the one in front of it ends, and loads its weights
//! meanwhile. Rows of a step run one after the other, so a row cannot depend on its neighbours. Inputs of linears are rounded to
//! 16 bits (see `common.cuh`), keys and values to BF16; everything else is f32.

#![warn(missing_docs)]
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "NVRTC is a C library; each call with its SAFETY note")]
pub mod compile;
#[expect(unsafe_code, reason = "the driver is a C library; each call with its SAFETY note")]
mod device;
mod forward;
#[expect(unsafe_code, reason = "one struct is handed to the device as bytes, with its SAFETY note")]
mod kernels;
#[cfg(test)]
mod phases;
mod plan;
mod state;
mod step;

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::sync::Arc;

use lily_backend::{
    Backend, Caps, Error, MemoryReport, Output, Result, RowOutput, SamplingParams, SnapshotId, StageOutput, StateId,
    Step, Ticket, Want,
};
use lily_model::Checkpoint;

use device::{Buffer, Device, Graph, Pinned, Pointer};
use forward::{Forward, Trace};
use kernels::sample::SampleScratch;
use kernels::{Kernels, Pass, Run};
use plan::{DeviceWeights, Scratch, ScratchGrid};
use state::{Sampled, Snapshot, State};
use step::{CheckedRow, Masked, Pending, RowResult, Sampling};

/// How to load.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Longest context of a state in tokens; `None`: what the memory allows, at most what the model was trained for.
    pub max_context: Option<usize>,
    /// Most tokens of a prefill chunk; `None`: 4096, or fewer where their activations would take more than a quarter of the
    /// memory.
    pub max_chunk: Option<usize>,
}

const DEFAULT_CHUNK: usize = 4096;
/// Most rows of a step. Two such steps use half of the ring of results.
const MAX_ROWS: usize = 64;
const STEPS_IN_FLIGHT: usize = 2;
/// Runs that may be on their way to the device: a row takes up to three, before and after a chunk and with its mask.
const RUNS: usize = 4 * MAX_ROWS * STEPS_IN_FLIGHT;
/// Device memory left to others where the context is chosen by memory.
const MARGIN_BYTES: usize = 1 << 30;

/// The captured graphs of one token.
struct Graphs {
    /// Up to the logits.
    forward: Graph,
    /// With the highest logit's token.
    greedy: Graph,
    /// With a token by all sampling parameters.
    sample: Graph,
}

/// What the run on the device is ready for without the host: the next token of a state.
struct Live {
    state: StateId,
    params: SamplingParams,
}

/// The model on an NVIDIA GPU.
pub struct CudaBackend {
    caps: Caps,
    checkpoint: Arc<Checkpoint>,
    fingerprint: u64,
    states: BTreeMap<u32, State>,
    snapshots: BTreeMap<u32, Snapshot>,
    pending: VecDeque<Pending>,
    next_state: u32,
    next_snapshot: u32,
    next_ticket: u64,
    next_slot: usize,
    next_run: usize,
    live: Option<Live>,
    graphs: Graphs,
    /// Id and status of each slot, written by the device.
    results: Pinned,
    /// Runs on their way to the device.
    runs: Pinned,
    scratch: Scratch,
    weights: DeviceWeights,
    kernels: Kernels,
    device: Device,
}

/// Whether there is a GPU that this backend runs on: its name, or the reason why not.
pub fn probe() -> Result<String> {
    Device::open().map(|device| device.name.clone())
}

impl CudaBackend {
    /// Opens the first GPU, compiles or finds the kernels, and puts the weights there.
    ///
    /// Fails with [`Error::Unavailable`] without driver, GPU or kernels, or if the checkpoint's sizes are none that the kernels
    /// have; with [`Error::OutOfMemory`] if the weights do not fit.
    pub fn load(checkpoint: Arc<Checkpoint>, options: &LoadOptions) -> Result<CudaBackend> {
        let shape = checkpoint.config.shape.clone();
        plan::check(&shape, &checkpoint.weights)?;
        let device = Device::open()?;
        let (needed, available) = (plan::weight_bytes(&checkpoint.weights), device.free_memory()?);
        if needed > available {
            return Err(Error::OutOfMemory { what: format!("the weights on {}", device.name), needed, available });
        }
        let kernels = Kernels::load(&device, &shape, &compile::cubin(&shape, device.arch)?)?;
        let weights = plan::load_weights(&device, &kernels, &checkpoint)?;
        let pass = Pass { device: &device, overlap: device.overlaps() };
        let grid = ScratchGrid { parts: kernels.attention_parts(&pass), head: kernels.head_grid(&pass) };
        let wanted = options.max_chunk.unwrap_or(DEFAULT_CHUNK).min(options.max_context.unwrap_or(shape.max_context));
        let max_chunk = plan::chunk_that_fits(&kernels.sizes, wanted, grid, device.free_memory()?)?;
        let scratch = Scratch::new(&device, &kernels.sizes, max_chunk, grid)?;
        let (per_token, per_state) = (shape.kv_bytes_per_token(2) + 4, state::recurrent_bytes(&shape));
        let fitting = device.free_memory()?.saturating_sub(MARGIN_BYTES + per_state) / per_token;
        let max_context = options.max_context.unwrap_or_else(|| shape.max_context.min(fitting)).max(1);
        let results = device.pinned(8 * Run::RESULTS)?;
        let runs = device.pinned(size_of::<Run>() * RUNS)?;
        let graphs = Graphs::capture(&pass, &kernels, &weights, &scratch, results.pointer)?;
        device.synchronize()?;
        let way = if device.overlaps() { "graphs of overlapping kernels" } else { "graphs" };
        let caps = Caps {
            name: format!("cuda ({}, sm_{}, {way})", device.name, device.arch),
            max_context,
            max_chunk: max_chunk.min(max_context),
            max_rows: MAX_ROWS,
            steps_in_flight: STEPS_IN_FLIGHT,
            overlaps: true,
            bytes_per_token: per_token,
            bytes_per_state: per_state,
            vocab: shape.vocab,
        };
        tracing::debug!(
            name = caps.name,
            weights = weights.bytes(),
            scratch = scratch.bytes(),
            memory = device.memory,
            "loaded"
        );
        Ok(CudaBackend {
            caps,
            fingerprint: plan::fingerprint(&checkpoint),
            checkpoint,
            states: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            pending: VecDeque::new(),
            next_state: 0,
            next_snapshot: 0,
            next_ticket: 0,
            next_slot: 0,
            next_run: 0,
            live: None,
            graphs,
            results,
            runs,
            scratch,
            weights,
            kernels,
            device,
        })
    }

    fn state(&self, id: StateId) -> Result<&State> {
        self.states.get(&id.0).ok_or_else(|| unknown("state", id.0))
    }

    fn state_mut(&mut self, id: StateId) -> Result<&mut State> {
        self.states.get_mut(&id.0).ok_or_else(|| unknown("state", id.0))
    }

    /// Learns the ids of all tokens of a state, which the device may still be sampling, for what is about to look at them.
    /// After it the device has nothing to do, and its run is not relied on.
    fn resolve(&mut self, id: StateId) -> Result<()> {
        self.device.enter();
        self.device.synchronize()?;
        self.live = None;
        let state = self.states.get_mut(&id.0).ok_or_else(|| unknown("state", id.0))?;
        state.resolve_all(&self.results);
        Ok(())
    }

    /// The same for a state that must not be lost.
    fn resolve_sound(&mut self, id: StateId) -> Result<()> {
        if self.state(id)?.lost {
            return Err(Error::StateLost(id.0));
        }
        self.resolve(id)
    }

    fn take_slot(&mut self) -> usize {
        let slot = self.next_slot;
        self.next_slot = (slot + 1) % Run::RESULTS;
        slot
    }

    /// Puts a run on the device.
    fn upload_run(&mut self, run: &Run) -> Result<()> {
        self.live = None;
        let offset = self.next_run * size_of::<Run>();
        self.next_run = (self.next_run + 1) % RUNS;
        self.runs.write(offset, run.bytes());
        self.device.upload_pinned(self.scratch.run, &self.runs, offset, size_of::<Run>())
    }

    fn upload_biases(&self, params: &SamplingParams) -> Result<u32> {
        let mut sums: BTreeMap<u32, f32> = BTreeMap::new();
        for (id, bias) in params.logit_bias.iter() {
            *sums.entry(*id).or_default() += bias;
        }
        let bytes: Vec<u8> = sums.iter().flat_map(|(id, x)| [id.to_le_bytes(), x.to_le_bytes()]).flatten().collect();
        self.device.upload(self.scratch.biases, &bytes)?;
        Ok(sums.len() as u32)
    }

    fn sample_scratch(&self) -> SampleScratch {
        sample_scratch(&self.scratch)
    }

    /// Runs a row; what it samples is not waited for.
    fn run_row(
        &mut self,
        ticket: Ticket,
        index: usize,
        row: CheckedRow,
        trace: Option<&mut Vec<StageOutput>>,
    ) -> Result<RowResult> {
        let (id, tokens) = (row.state, row.len());
        let slot = self.take_slot();
        let state = self.state(id)?;
        let position = state.position();
        let mut run = Run { slot: slot as u32, ..state.run() };
        if let Want::Token(params) = &row.want {
            describe(params, &mut run);
        }
        let continues = match (&self.live, &row) {
            (Some(live), CheckedRow { ids: None, want: Want::Token(params), .. }) => {
                trace.is_none() && live.state == id && live.params == *params
            }
            _ => false,
        };
        if !continues {
            if let Want::Token(params) = &row.want {
                run.biases = self.upload_biases(params)?;
            }
            if let (Some(ids), true) = (&row.ids, tokens == 1) {
                run.token = ids[0];
            }
            self.upload_run(&run)?;
        }
        let vocab = self.caps.vocab;
        let mut logits = match row.want {
            Want::LastLogits => room_for(vocab)?,
            Want::AllLogits => room_for(tokens * vocab)?,
            _ => Vec::new(),
        };
        let sampled = self.launch_row(&row, &run, &mut logits, index, trace)?;
        let live = match &row.want {
            Want::Token(params) if sampled => Some(Live { state: id, params: params.clone() }),
            _ => None,
        };
        self.live = live;
        let state = self.state_mut(id)?;
        state.advance(row.ids.as_deref());
        let last = position + tokens - 1;
        match row.want {
            Want::Nothing => Ok(RowResult::Done(RowOutput::Nothing)),
            Want::LastLogits | Want::AllLogits => {
                let first = last + 1 - logits.len() / vocab;
                let bad = logits.chunks_exact(vocab).position(|logits| !logits.iter().all(|x| x.is_finite()));
                Ok(match bad {
                    Some(bad) => RowResult::Failed(Error::BadLogits { row: index, position: first + bad }),
                    None => RowResult::Done(RowOutput::Logits(logits)),
                })
            }
            Want::Token(params) => {
                let report = match params.logprobs {
                    Some(top) => {
                        let mut logits = room_for(vocab)?;
                        self.device.download_floats(&mut logits, self.scratch.logits)?;
                        Some((logits, top))
                    }
                    None => None,
                };
                let sampling = Sampling { state: id, slot, position: last, report };
                if sampled {
                    self.state_mut(id)?.sampled = Sampled::Slot(slot);
                    return Ok(RowResult::Token(sampling));
                }
                let held = self.device.zeroed("logits that wait for a mask", 4 * vocab)?;
                self.device.copy(held.pointer(), self.scratch.logits, held.bytes())?;
                let state = self.state_mut(id)?;
                state.awaits_mask = Some(ticket);
                let words = Arc::clone(&state.words);
                run.position = last as u32;
                Ok(RowResult::Waiting(Box::new(Masked { sampling, params, run, logits: held, _words: words })))
            }
        }
    }

    /// Launches a row's kernels; tells whether they sample its token.
    fn launch_row(
        &mut self,
        row: &CheckedRow,
        run: &Run,
        logits: &mut [f32],
        index: usize,
        trace: Option<&mut Vec<StageOutput>>,
    ) -> Result<bool> {
        let tokens = row.len();
        let sampling = match &row.want {
            Want::Token(params) if !params.masked => Some(params),
            _ => None,
        };
        if tokens == 1 && trace.is_none() {
            let graph = match sampling {
                None => &self.graphs.forward,
                Some(params) if is_plain_greedy(params) => &self.graphs.greedy,
                Some(_) => &self.graphs.sample,
            };
            self.device.run(graph)?;
            self.device.download_floats(logits, self.scratch.logits)?;
            return Ok(sampling.is_some());
        }
        if let Some(ids) = &row.ids {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            self.device.upload(self.scratch.ids, &bytes)?;
        }
        let mut forward = self.forward();
        forward.trace = trace.is_some().then(|| Trace::new(Arc::clone(&self.checkpoint)));
        match tokens {
            1 => forward.one(Pointer::NULL)?,
            _ => forward.many(tokens)?,
        }
        let traced = forward.trace.take();
        // The run's token is the last one of the row from here on.
        let last = Run { position: run.position + tokens as u32 - 1, ..*run };
        self.upload_run(&last)?;
        let mut forward = self.forward();
        forward.trace = traced;
        match &row.want {
            Want::Nothing => {}
            Want::AllLogits if tokens > 1 => forward.all_logits(tokens, logits)?,
            Want::AllLogits | Want::LastLogits | Want::Token(_) => forward.head(tokens - 1)?,
        }
        if let (Some(trace), Some(recorded)) = (trace, forward.trace.take()) {
            let stages = recorded.stages.into_iter();
            trace.extend(stages.map(|(stage, values)| StageOutput { stage, row: index, values }));
        }
        if matches!(row.want, Want::LastLogits) || tokens == 1 {
            self.device.download_floats(logits, self.scratch.logits)?;
        }
        let Some(params) = sampling else { return Ok(false) };
        let pass = Pass { device: &self.device, overlap: false };
        let (k, s, results) = (&self.kernels, &self.scratch, self.results.pointer);
        if is_plain_greedy(params) {
            k.pick_best(&pass, s.run, s.bests, results)?;
        } else {
            k.sample(&pass, s.run, s.logits, &self.sample_scratch(), results)?;
        }
        Ok(true)
    }

    /// A pass outside a graph.
    fn forward(&self) -> Forward<'_> {
        Forward {
            pass: Pass { device: &self.device, overlap: false },
            kernels: &self.kernels,
            weights: &self.weights,
            scratch: &self.scratch,
            trace: None,
        }
    }

    /// Samples a row whose mask is there.
    fn sample_masked(&mut self, ticket: Ticket, masked: Masked, mask: &[u32]) -> Result<RowResult> {
        let Masked { sampling, params, mut run, logits, .. } = masked;
        let waits = self.states.get(&sampling.state.0).is_some_and(|state| state.awaits_mask == Some(ticket));
        if !waits {
            // Reset, restored or freed meanwhile: the token is reported and not kept.
            run.sampled = self.scratch.spare;
        }
        let mut words = vec![0u32; self.kernels.sizes.vocab.div_ceil(32)];
        words.iter_mut().zip(mask).for_each(|(word, mask)| *word = *mask);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.device.upload(self.scratch.mask, &bytes)?;
        run.biases = self.upload_biases(&params)?;
        self.upload_run(&run)?;
        let pass = Pass { device: &self.device, overlap: false };
        let (s, results) = (&self.scratch, self.results.pointer);
        self.kernels.sample(&pass, s.run, logits.pointer(), &self.sample_scratch(), results)?;
        if let Some(state) = self.states.get_mut(&sampling.state.0).filter(|_| waits) {
            state.awaits_mask = None;
            state.sampled = Sampled::Slot(sampling.slot);
        }
        // Freed when the kernels have read it: freeing waits.
        drop(logits);
        Ok(RowResult::Token(sampling))
    }

    /// Takes a row's output, whose work is done.
    fn finish_row(&mut self, index: usize, row: RowResult) -> Result<RowOutput> {
        match row {
            RowResult::Done(output) => Ok(output),
            RowResult::Failed(error) => Err(error),
            RowResult::Waiting(_) => Err(Error::BadStep(format!("row {index} waits for its mask"))),
            RowResult::Token(sampling) => {
                let (id, status) = (self.results.word(2 * sampling.slot), self.results.word(2 * sampling.slot + 1));
                let output = sampling.output(index, id, status);
                // Tokens of any state may have come from this slot: forks of it, and itself.
                for state in self.states.values_mut() {
                    state.resolve(sampling.slot, id);
                }
                if output.is_err()
                    && let Some(state) = self.states.get_mut(&sampling.state.0)
                    && state.sampled == Sampled::Id(id)
                {
                    state.sampled = Sampled::Nothing;
                }
                output
            }
        }
    }

    fn state_bytes(&self) -> usize {
        self.states.values().map(State::bytes).sum()
    }
}

impl Graphs {
    fn capture(
        pass: &Pass<'_>,
        kernels: &Kernels,
        weights: &DeviceWeights,
        scratch: &Scratch,
        results: Pointer,
    ) -> Result<Graphs> {
        let forward = || -> Result<()> {
            let mut forward = Forward { pass: *pass, kernels, weights, scratch, trace: None };
            forward.one(Pointer::NULL)?;
            forward.head(0)
        };
        Ok(Graphs {
            forward: pass.device.capture(forward)?,
            greedy: pass.device.capture(|| {
                forward()?;
                kernels.pick_best(pass, scratch.run, scratch.bests, results)
            })?,
            sample: pass.device.capture(|| {
                forward()?;
                kernels.sample(pass, scratch.run, scratch.logits, &sample_scratch(scratch), results)
            })?,
        })
    }
}

fn sample_scratch(s: &Scratch) -> SampleScratch {
    SampleScratch { scores: s.scores, counts: s.token_counts, sampler: s.sampler, biases: s.biases, mask: s.mask }
}

/// Writes sampling parameters into a run, but for the biases.
fn describe(params: &SamplingParams, run: &mut Run) {
    run.vocab_limit = params.vocab_limit;
    run.top_k = params.top_k;
    run.penalty_start = u32::try_from(params.penalty_start).unwrap_or(u32::MAX);
    run.masked = u32::from(params.masked);
    run.temperature = params.temperature;
    run.top_p = params.top_p;
    run.min_p = params.min_p;
    run.repetition = params.repetition_penalty;
    run.presence = params.presence_penalty;
    run.frequency = params.frequency_penalty;
    run.seed = params.seed;
}

/// Whether the raw logits decide alone.
fn is_plain_greedy(p: &SamplingParams) -> bool {
    let penalties = p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0;
    p.temperature == 0.0 && p.logit_bias.is_empty() && !p.masked && !penalties
}

/// Zeros, or the error that there is no memory for them.
fn room_for(len: usize) -> Result<Vec<f32>> {
    let mut room = Vec::new();
    let needed = len * size_of::<f32>();
    room.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        what: "the logits of a row".into(),
        needed,
        available: 0,
    })?;
    room.resize(len, 0.0);
    Ok(room)
}

fn unknown(what: &'static str, id: u32) -> Error {
    Error::Unknown { what, id: id.into() }
}

impl Backend for CudaBackend {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn new_state(&mut self, capacity: usize) -> Result<StateId> {
        self.device.enter();
        if capacity == 0 || capacity > self.caps.max_context {
            let most = self.caps.max_context;
            return Err(Error::BadStep(format!("a state of {capacity} tokens; it may have 1 to {most}")));
        }
        let state = State::new(&self.device, &self.checkpoint.config.shape, capacity)?;
        let id = self.next_state;
        self.next_state += 1;
        self.states.insert(id, state);
        Ok(StateId(id))
    }

    fn free_state(&mut self, state: StateId) -> Result<()> {
        self.device.enter();
        self.live = None;
        self.states.remove(&state.0).map(drop).ok_or_else(|| unknown("state", state.0))
    }

    fn reset_state(&mut self, state: StateId) -> Result<()> {
        self.device.enter();
        self.live = None;
        let state = self.states.get_mut(&state.0).ok_or_else(|| unknown("state", state.0))?;
        state.reset(&self.device)
    }

    fn position(&self, state: StateId) -> Result<usize> {
        Ok(self.state(state)?.position())
    }

    fn snapshot(&mut self, state: StateId) -> Result<SnapshotId> {
        self.resolve_sound(state)?;
        let snapshot = self.state(state)?.snapshot(&self.device)?;
        let id = self.next_snapshot;
        self.next_snapshot += 1;
        self.snapshots.insert(id, snapshot);
        Ok(SnapshotId(id))
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) -> Result<()> {
        self.device.enter();
        self.snapshots.remove(&snapshot.0).map(drop).ok_or_else(|| unknown("snapshot", snapshot.0))
    }

    fn restore(&mut self, state: StateId, snapshot: SnapshotId) -> Result<()> {
        self.resolve(state)?;
        let state = self.states.get_mut(&state.0).ok_or_else(|| unknown("state", state.0))?;
        let snapshot = self.snapshots.get(&snapshot.0).ok_or_else(|| unknown("snapshot", snapshot.0))?;
        state.restore(&self.device, snapshot)
    }

    fn fork(&mut self, from: StateId, to: StateId) -> Result<()> {
        self.resolve_sound(from)?;
        let mut target = self.states.remove(&to.0).ok_or_else(|| unknown("state", to.0))?;
        let result = match self.states.get(&from.0) {
            // A state is a copy of itself.
            None => Ok(()),
            Some(source) if source.position() > target.capacity() => {
                Err(Error::ContextFull { position: 0, more: source.position(), capacity: target.capacity() })
            }
            Some(source) => target.copy_from(&self.device, source),
        };
        self.states.insert(to.0, target);
        result
    }

    fn export(&mut self, state: StateId, to: &mut dyn Write) -> Result<()> {
        self.resolve_sound(state)?;
        self.state(state)?.export(&self.device, self.fingerprint, to)
    }

    fn import(&mut self, state: StateId, from: &mut dyn Read) -> Result<()> {
        self.resolve(state)?;
        let (fingerprint, vocab) = (self.fingerprint, self.caps.vocab);
        let state = self.states.get_mut(&state.0).ok_or_else(|| unknown("state", state.0))?;
        state.import(&self.device, fingerprint, vocab, from)
    }

    fn feed_noise(&mut self, id: StateId, tokens: &[u32], seed: u64) -> Result<()> {
        self.resolve_sound(id)?;
        let (position, capacity) = (self.state(id)?.position(), self.state(id)?.capacity());
        if tokens.len() > capacity - position {
            return Err(Error::ContextFull { position, more: tokens.len(), capacity });
        }
        if let Some(bad) = tokens.iter().find(|token| **token as usize >= self.caps.vocab) {
            return Err(Error::BadStep(format!("token {bad} is outside the vocabulary of {}", self.caps.vocab)));
        }
        if tokens.is_empty() {
            return Ok(());
        }
        let slot = self.take_slot() as u32;
        let run = Run { slot, ..self.state(id)?.run() };
        self.upload_run(&run)?;
        let pass = Pass { device: &self.device, overlap: false };
        self.kernels.fill_noise(&pass, self.scratch.run, tokens.len(), seed)?;
        self.state(id)?.upload_tokens(&self.device, position, tokens)?;
        self.state_mut(id)?.advance(Some(tokens));
        Ok(())
    }

    fn submit(&mut self, step: Step) -> Result<Ticket> {
        self.device.enter();
        let trace = step.trace;
        let rows = step::check(step, &self.caps, &self.states, &self.pending)?;
        let event = self.device.event()?;
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let states: Vec<StateId> = rows.iter().map(|row| row.state).collect();
        let (mut results, mut stages) = (Vec::with_capacity(rows.len()), Vec::new());
        for (index, row) in rows.into_iter().enumerate() {
            let result = self.run_row(ticket, index, row, trace.then_some(&mut stages));
            results.push(result.unwrap_or_else(RowResult::Failed));
        }
        let recorded = self.device.record(&event);
        if recorded.is_err() || results.iter().any(|result| matches!(result, RowResult::Failed(_))) {
            self.lose(&states);
        }
        self.pending.push_back(Pending { ticket, states, rows: results, trace: stages, event });
        Ok(ticket)
    }

    fn set_mask(&mut self, ticket: Ticket, row: usize, mask: &[u32]) -> Result<()> {
        self.device.enter();
        let at = self.pending.iter().position(|pending| pending.ticket == ticket);
        let at = at.ok_or(Error::Unknown { what: "ticket", id: ticket.0 })?;
        let Some(result) = self.pending[at].rows.get_mut(row).filter(|row| matches!(row, RowResult::Waiting(_))) else {
            return Err(Error::BadStep(format!("row {row} does not wait for a mask")));
        };
        let waiting = std::mem::replace(result, RowResult::Done(RowOutput::Nothing));
        let RowResult::Waiting(masked) = waiting else { return Ok(()) };
        let state = masked.sampling.state;
        let result = self.sample_masked(ticket, *masked, mask);
        if result.is_err() {
            self.lose(&[state]);
        }
        self.pending[at].rows[row] = result.unwrap_or_else(RowResult::Failed);
        self.device.record(&self.pending[at].event)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Output> {
        self.device.enter();
        let Some(first) = self.pending.front() else {
            return Err(Error::Unknown { what: "ticket", id: ticket.0 });
        };
        if first.ticket != ticket {
            if self.pending.iter().any(|pending| pending.ticket == ticket) {
                let first = first.ticket.0;
                return Err(Error::BadStep(format!("ticket {first} is to be waited for before {}", ticket.0)));
            }
            return Err(Error::Unknown { what: "ticket", id: ticket.0 });
        }
        if let Some(row) = first.rows.iter().position(|row| matches!(row, RowResult::Waiting(_))) {
            return Err(Error::BadStep(format!("row {row} waits for its mask")));
        }
        let Some(done) = self.pending.pop_front() else {
            return Err(Error::Unknown { what: "ticket", id: ticket.0 });
        };
        if let Err(error) = done.event.wait() {
            self.lose(&done.states);
            return Err(error);
        }
        let mut outputs = Vec::with_capacity(done.rows.len());
        let mut failed = None;
        for (index, row) in done.rows.into_iter().enumerate() {
            match self.finish_row(index, row) {
                Ok(output) => outputs.push(output),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            None => Ok(Output { rows: outputs, trace: done.trace }),
            Some(error) => {
                if !matches!(error, Error::EmptyMask(_)) {
                    self.lose(&done.states);
                }
                Err(error)
            }
        }
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            weights_mapped: 0,
            weights_owned: self.weights.bytes(),
            states: self.state_bytes(),
            snapshots: self.snapshots.values().map(Snapshot::bytes).sum(),
            scratch: self.scratch.bytes() + self.held_bytes(),
        }
    }
}

impl CudaBackend {
    /// States that a failed step left undefined.
    fn lose(&mut self, states: &[StateId]) {
        self.live = None;
        for id in states {
            if let Some(state) = self.states.get_mut(&id.0) {
                state.lost = true;
            }
        }
    }

    /// Bytes of logits that wait for masks.
    fn held_bytes(&self) -> usize {
        let rows = self.pending.iter().flat_map(|pending| &pending.rows);
        let held = |row: &RowResult| match row {
            RowResult::Waiting(masked) => Some(Buffer::bytes(&masked.logits)),
            _ => None,
        };
        rows.filter_map(held).sum()
    }
}
