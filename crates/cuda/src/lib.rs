//! The CUDA backend: the model behind [`lily_backend::Backend`] on an NVIDIA GPU, with kernels of its own.
//!
//! - `forward`: the forward pass, one function for one token and one for many;
//! - `kernels`: one pair of files per group of operations, `.cu` beside the `.rs` that launches it;
//! - `plan`: what is made at load; `state`: what a session keeps; `step`: the checks of a step and its results; `run`: a row on
//!   the device;
//! - `device`: driver, memory, streams, graphs; [`compile`]: from source to machine code.
//!
//! A step of one token is one captured graph. Everything that changes from step to step (addresses of the state, position, token,
//! sampling parameters) stands in device memory and is moved on by the last kernel, so that a session's next step needs nothing
//! from the host but the launch. On GPUs that can, a kernel starts while the one in front of it ends, and loads its weights
//! meanwhile. Rows of one token share a pass and the weights that it reads, others run one after the other; the arithmetic of a row is
//! the same in either, so that it cannot depend on its neighbours. A prompt of up to 16 tokens takes the linears of such a pass. Inputs of
//! linears are rounded to 16 bits (see `common.cuh`), keys and values to BF16; everything else is f32.

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
mod run;
mod state;
mod step;

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Instant;

use lily_backend::{
    Backend, Caps, Error, MemoryReport, Output, Result, RowOutput, SamplingParams, SnapshotId, StageOutput, StateId,
    Step, Ticket,
};
use lily_model::Checkpoint;

use device::{Buffer, Device, Pinned};
use kernels::rows::ROWS;
use kernels::{Kernels, Pass, Run};
use plan::{DeviceWeights, Scratch, ScratchGrid};
use run::Graphs;
use state::{Snapshot, State};
use step::{CheckedRow, Pending, RowResult};

/// How to load.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Which GPU of the machine, counted from 0.
    pub device: usize,
    /// Longest context of a state in tokens; `None`: what the memory allows, at most what the model was trained for.
    pub max_context: Option<usize>,
    /// Most tokens of a prefill chunk; `None`: 4096, or fewer where their activations would take more than a quarter of the
    /// memory.
    pub max_chunk: Option<usize>,
    /// Acts as a GPU of this compute capability, times ten, from 80 to 89 and below its own: so that one can test what older ones run.
    /// `None`: as what it is.
    pub compute: Option<u32>,
}

const DEFAULT_CHUNK: usize = 4096;
/// Most rows of a step. Two such steps use half of the ring of results.
const MAX_ROWS: usize = 64;
const STEPS_IN_FLIGHT: usize = 2;
/// Runs that may be on their way to the device: a row takes up to three, before and after a chunk and with its mask; and room for what
/// a step does not use at the end of the ring.
const RUNS: usize = 4 * MAX_ROWS * STEPS_IN_FLIGHT;
/// Device memory left to others where the context is chosen by memory.
const MARGIN_BYTES: usize = 1 << 30;

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
    Device::open(0).map(|device| device.name.clone())
}

impl CudaBackend {
    /// Opens a GPU, compiles or finds the kernels, and puts the weights there.
    ///
    /// Fails with [`Error::Unavailable`] without driver, GPU or kernels, or if the checkpoint's sizes are none that the kernels
    /// have; with [`Error::OutOfMemory`] if the weights do not fit.
    pub fn load(checkpoint: Arc<Checkpoint>, options: &LoadOptions) -> Result<CudaBackend> {
        let shape = checkpoint.config.shape.clone();
        plan::check(&shape, &checkpoint.weights)?;
        let mut device = Device::open(options.device)?;
        if let Some(compute) = options.compute {
            device.act_as(compute)?;
        }
        let (needed, available) = (plan::weight_bytes(&checkpoint.weights), device.free_memory()?);
        if needed > available {
            return Err(Error::OutOfMemory { what: format!("the weights on {}", device.name), needed, available });
        }
        let kernels = compile::kernels(&shape, &device)?;
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
            own_memory: true,
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
            fingerprint: lily_backend::export::fingerprint(&checkpoint, ""),
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

    fn state_bytes(&self) -> usize {
        self.states.values().map(State::bytes).sum()
    }
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
        lily_backend::check_capacity(capacity, &self.caps)?;
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
        self.apply_updates(id)?;
        let pass = Pass { device: &self.device, overlap: false };
        self.kernels.fill_noise(&pass, self.scratch.run, tokens.len(), seed)?;
        self.state(id)?.upload_tokens(&self.device, position, tokens)?;
        let state = self.state_mut(id)?;
        state.advance(Some(tokens));
        state.applied = state.position();
        Ok(())
    }

    fn plain_read(&mut self) -> Result<Option<f64>> {
        /// As much as a token takes, but long enough for the start not to count.
        const MOST: usize = 8 << 30;
        self.device.enter();
        let bytes = self.weights.bytes().min(MOST);
        let pass = Pass { device: &self.device, overlap: false };
        self.device.synchronize()?;
        let started = Instant::now();
        self.kernels.plain_read(&pass, self.weights.start(), bytes, self.scratch.spare)?;
        self.device.synchronize()?;
        Ok(Some(bytes as f64 / started.elapsed().as_secs_f64()))
    }

    fn submit(&mut self, step: Step) -> Result<Ticket> {
        self.device.enter();
        let trace = step.trace;
        let rows = step::check(step, &self.caps, &self.states, &self.pending)?;
        let event = self.device.event()?;
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let states: Vec<StateId> = rows.iter().map(|row| row.state).collect();
        let mut stages = Vec::new();
        let results = self.run_step(ticket, rows, trace.then_some(&mut stages));
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
    /// Runs all rows of a step; those of one token share passes. A trace takes them one by one.
    fn run_step(
        &mut self,
        ticket: Ticket,
        rows: Vec<CheckedRow>,
        mut trace: Option<&mut Vec<StageOutput>>,
    ) -> Vec<RowResult> {
        let traced = trace.is_some();
        let (mut shared, alone): (Vec<_>, Vec<_>) =
            rows.into_iter().enumerate().partition(|(_, row)| row.len() == 1 && !traced);
        let mut results = Vec::with_capacity(shared.len() + alone.len());
        while !shared.is_empty() {
            let rest = shared.split_off(shared.len().min(ROWS));
            let group = std::mem::replace(&mut shared, rest);
            let indices: Vec<usize> = group.iter().map(|(index, _)| *index).collect();
            match <[_; 1]>::try_from(group) {
                Ok([(index, row)]) => {
                    let result = self.run_row(ticket, index, row, None);
                    results.push((index, result.unwrap_or_else(RowResult::Failed)));
                }
                Err(group) => match self.run_rows(ticket, group) {
                    Ok(done) => results.extend(done),
                    Err(error) => {
                        let failed = |index| (index, RowResult::Failed(Error::Device(error.to_string())));
                        results.extend(indices.into_iter().map(failed));
                    }
                },
            }
        }
        for (index, row) in alone {
            let result = self.run_row(ticket, index, row, trace.as_deref_mut());
            results.push((index, result.unwrap_or_else(RowResult::Failed)));
        }
        results.sort_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }

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
