//! The CPU backend: the model behind [`lily_backend::Backend`], with the weights read in packed form from the mapped
//! files.
//!
//! - `forward`: the forward pass, one function per block;
//! - `kernels`: the arithmetic, one file per operation;
//! - `plan`: what is decided at load; `state`: what a session keeps; `device`: threads, memory, instruction set;
//! - `step`: the checks of a step and what a row's result waits for.
//!
//! Steps run inside [`submit`](lily_backend::Backend::submit), one row after the other, so a row cannot depend on its
//! neighbours; only the sampling of masked rows waits for their masks. Activations are f32; inputs of linears are rounded to 16
//! bits (`kernels::activations`).

#![warn(missing_docs)]
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "threads that share slices, raw memory and system calls; each with its SAFETY note")]
mod device;
mod forward;
#[expect(
    unsafe_code,
    reason = "vector instructions, and parts of slices written side by side; each with its SAFETY note"
)]
mod kernels;
mod plan;
mod state;
mod step;

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lily_backend::{
    Backend, Caps, Error, MemoryReport, Output, Result, RowOutput, SnapshotId, StageOutput, StateId, Step, Ticket, Want,
};
use lily_model::Checkpoint;

use device::{Buffer, Pool, memory_bytes, populate};
use forward::Forward;
use kernels::norm::all_finite;
use kernels::sample::has_penalties;
use plan::{Plan, Scratch};
use state::{Snapshot, State};
use step::{CheckedRow, Pending, RowResult, Sampling};

pub use device::default_threads;
pub use state::KvDtype;

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Worker threads; `None`: one per physical core, as far as affinity and container quota allow.
    pub threads: Option<usize>,
    /// Element type of the KV cache. With BF16, the default, logits of the wide test checkpoint are 0.002 to 0.006 from the
    /// exact ones on average; the budget is 0.03.
    pub kv: KvDtype,
    /// Longest context of a state in tokens; `None`: what the model was trained for.
    pub max_context: Option<usize>,
    /// Most tokens of a prefill chunk. Scratch memory grows with it, 0.3 MB per token of the full-size model, and so do the
    /// tokens that an expert meets at a time: 32 of 1024 are 15 % faster than 16 of 512.
    pub max_chunk: usize,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions { threads: None, kv: KvDtype::Bf16, max_context: None, max_chunk: 1024 }
    }
}

/// Most worker threads that can be asked for.
const MAX_THREADS: usize = 1024;
/// Most rows of a step. Rows run one after the other, so this bounds a step's latency, not memory.
const MAX_ROWS: usize = 64;
/// Steps that may wait for `wait`. Their results are already there.
const STEPS_IN_FLIGHT: usize = 2;

/// The model on this machine's CPU.
pub struct CpuBackend {
    caps: Caps,
    plan: Plan,
    pool: Pool,
    scratch: Scratch,
    /// Logits of one position, to sample from.
    logits: Buffer<f32>,
    states: BTreeMap<u32, State>,
    snapshots: BTreeMap<u32, Snapshot>,
    pending: VecDeque<Pending>,
    next_state: u32,
    next_snapshot: u32,
    next_ticket: u64,
    _reader: Reader,
}

/// Reads the weights ahead of the first steps, which would otherwise wait for the disk page by page. Ends with the backend.
struct Reader {
    stop: Arc<AtomicBool>,
}

/// Share of the memory, in percent, that weights may take to be read ahead; larger ones would push each other out again.
const READ_AHEAD_PERCENT: usize = 90;

impl Reader {
    fn start(checkpoint: Arc<Checkpoint>) -> Reader {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        if checkpoint.weights.quantized_bytes() > memory_bytes() / 100 * READ_AHEAD_PERCENT {
            return Reader { stop };
        }
        let read = move || {
            for matrix in checkpoint.weights.matrices() {
                for bytes in [&matrix.codes, &matrix.scales, &matrix.biases] {
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    populate(bytes);
                }
            }
        };
        // Without the thread, weights are read when they are first used.
        let started = std::thread::Builder::new().name("lily-cpu-reader".into()).spawn(read);
        tracing::debug!(started = started.is_ok(), "weights are being read ahead");
        Reader { stop }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl CpuBackend {
    /// Plans for a checkpoint and starts the threads. Weights are read into memory behind its back, in the order of the
    /// forward pass, if they all fit.
    ///
    /// Fails with [`Error::OutOfMemory`] if the scratch memory for `max_chunk` does not fit, with [`Error::Unavailable`]
    /// if the checkpoint's sizes are none that the kernels have.
    pub fn load(checkpoint: Arc<Checkpoint>, options: &LoadOptions) -> Result<CpuBackend> {
        let plan = Plan::new(checkpoint, options)?;
        let scratch = Scratch::new(&plan)?;
        let logits = Buffer::zeroed("logits", plan.shape().vocab)?;
        let pool = Pool::new(options.threads.unwrap_or_else(default_threads).min(MAX_THREADS))?;
        let shape = plan.shape();
        let caps = Caps {
            name: format!("cpu ({} threads, {})", pool.threads(), plan.isa.name()),
            max_context: plan.max_context,
            max_chunk: plan.max_chunk,
            max_rows: MAX_ROWS,
            steps_in_flight: STEPS_IN_FLIGHT,
            overlaps: false,
            bytes_per_token: shape.kv_bytes_per_token(plan.kv.bytes()),
            bytes_per_state: shape.recurrent_bytes(),
            own_memory: false,
            vocab: shape.vocab,
        };
        tracing::debug!(name = caps.name, scratch_bytes = scratch.bytes(), "loaded");
        let reader = Reader::start(Arc::clone(&plan.checkpoint));
        Ok(CpuBackend {
            caps,
            plan,
            pool,
            scratch,
            logits,
            states: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            pending: VecDeque::new(),
            next_state: 0,
            next_snapshot: 0,
            next_ticket: 0,
            _reader: reader,
        })
    }

    fn state(&self, id: StateId) -> Result<&State> {
        self.states.get(&id.0).ok_or_else(|| unknown("state", id.0))
    }

    fn state_mut(&mut self, id: StateId) -> Result<&mut State> {
        self.states.get_mut(&id.0).ok_or_else(|| unknown("state", id.0))
    }

    /// A state that is not lost.
    fn sound_state(&self, id: StateId) -> Result<&State> {
        let state = self.state(id)?;
        if state.lost { Err(Error::StateLost(id.0)) } else { Ok(state) }
    }

    /// Runs row `index` of a step; an error of its result stands in the result.
    fn run_row(
        &mut self,
        ticket: Ticket,
        index: usize,
        row: CheckedRow,
        trace: Option<&mut Vec<StageOutput>>,
    ) -> RowResult {
        let CheckedRow { state: id, ids, want, logits: mut room } = row;
        let Some(state) = self.states.get_mut(&id.0) else {
            return RowResult::Failed(unknown("state", id.0));
        };
        let tokens = ids.len();
        let mut forward = Forward {
            pool: &self.pool,
            plan: &self.plan,
            scratch: &mut self.scratch,
            state,
            tokens,
            trace: trace.is_some().then(Vec::new),
        };
        forward.run(&ids);
        match want {
            Want::Nothing => {}
            Want::Token(_) => forward.head(tokens - 1, &mut self.logits),
            Want::LastLogits => forward.head(tokens - 1, &mut room),
            Want::AllLogits => forward.head(0, &mut room),
        }
        if let (Some(trace), Some(recorded)) = (trace, forward.trace.take()) {
            trace.extend(recorded.into_iter().map(|(stage, values)| StageOutput { stage, row: index, values }));
        }
        state.sampled = None;
        let position = state.position();
        match want {
            Want::Nothing => RowResult::Done(RowOutput::Nothing),
            Want::LastLogits | Want::AllLogits => {
                let vocab = self.caps.vocab;
                let first = position - room.len() / vocab;
                match room.chunks_exact(vocab).position(|logits| !all_finite(self.plan.isa, logits)) {
                    Some(bad) => RowResult::Failed(Error::BadLogits { row: index, position: first + bad }),
                    None => RowResult::Done(RowOutput::Logits(room)),
                }
            }
            Want::Token(params) => {
                let penalized = match has_penalties(&params) {
                    true => state.tokens[params.penalty_start.min(position)..].to_vec(),
                    false => Vec::new(),
                };
                let sampling = Sampling { state: id, row: index, params, penalized, position };
                if !sampling.params.masked {
                    let result = sampling.run(self.plan.isa, &self.logits, None);
                    return sampling.settle(state, result);
                }
                if !all_finite(self.plan.isa, &self.logits) {
                    return RowResult::Failed(Error::BadLogits { row: index, position: position - 1 });
                }
                state.awaits_mask = Some(ticket);
                RowResult::Waiting(sampling, self.logits.to_vec())
            }
        }
    }

    /// Bytes of all states together.
    fn state_bytes(&self) -> usize {
        self.states.values().map(State::bytes).sum()
    }
}

fn unknown(what: &'static str, id: u32) -> Error {
    Error::Unknown { what, id: id.into() }
}

impl Backend for CpuBackend {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn new_state(&mut self, capacity: usize) -> Result<StateId> {
        lily_backend::check_capacity(capacity, &self.caps)?;
        let needed = capacity.saturating_mul(self.caps.bytes_per_token).saturating_add(self.caps.bytes_per_state);
        let available = memory_bytes().saturating_sub(self.state_bytes());
        if needed > available {
            return Err(Error::OutOfMemory { what: format!("a state of {capacity} tokens"), needed, available });
        }
        let state = State::new(self.plan.shape(), self.plan.kv, capacity)?;
        let id = self.next_state;
        self.next_state += 1;
        self.states.insert(id, state);
        Ok(StateId(id))
    }

    fn free_state(&mut self, state: StateId) -> Result<()> {
        self.states.remove(&state.0).map(drop).ok_or_else(|| unknown("state", state.0))
    }

    fn reset_state(&mut self, state: StateId) -> Result<()> {
        self.state_mut(state)?.reset();
        Ok(())
    }

    fn position(&self, state: StateId) -> Result<usize> {
        Ok(self.state(state)?.position())
    }

    fn snapshot(&mut self, state: StateId) -> Result<SnapshotId> {
        let snapshot = self.sound_state(state)?.snapshot()?;
        let id = self.next_snapshot;
        self.next_snapshot += 1;
        self.snapshots.insert(id, snapshot);
        Ok(SnapshotId(id))
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) -> Result<()> {
        self.snapshots.remove(&snapshot.0).map(drop).ok_or_else(|| unknown("snapshot", snapshot.0))
    }

    fn restore(&mut self, state: StateId, snapshot: SnapshotId) -> Result<()> {
        let state = self.states.get_mut(&state.0).ok_or_else(|| unknown("state", state.0))?;
        let snapshot = self.snapshots.get(&snapshot.0).ok_or_else(|| unknown("snapshot", snapshot.0))?;
        state.restore(snapshot)
    }

    fn fork(&mut self, from: StateId, to: StateId) -> Result<()> {
        self.sound_state(from)?;
        let mut target = self.states.remove(&to.0).ok_or_else(|| unknown("state", to.0))?;
        let result = match self.states.get(&from.0) {
            // A state is a copy of itself.
            None => Ok(()),
            Some(source) if source.position() > target.capacity() => {
                Err(Error::ContextFull { position: 0, more: source.position(), capacity: target.capacity() })
            }
            Some(source) => {
                target.copy_from(source);
                Ok(())
            }
        };
        self.states.insert(to.0, target);
        result
    }

    fn export(&mut self, state: StateId, to: &mut dyn Write) -> Result<()> {
        self.sound_state(state)?.export(self.plan.fingerprint, to)
    }

    fn import(&mut self, state: StateId, from: &mut dyn Read) -> Result<()> {
        let (fingerprint, vocab) = (self.plan.fingerprint, self.caps.vocab);
        self.state_mut(state)?.import(fingerprint, vocab, from)
    }

    fn feed_noise(&mut self, id: StateId, tokens: &[u32], seed: u64) -> Result<()> {
        let (position, capacity) = (self.sound_state(id)?.position(), self.state(id)?.capacity());
        if tokens.len() > capacity - position {
            return Err(Error::ContextFull { position, more: tokens.len(), capacity });
        }
        if let Some(bad) = tokens.iter().find(|token| **token as usize >= self.caps.vocab) {
            return Err(Error::BadStep(format!("token {bad} is outside the vocabulary of {}", self.caps.vocab)));
        }
        self.state_mut(id)?.feed_noise(tokens, seed);
        Ok(())
    }

    fn submit(&mut self, step: Step) -> Result<Ticket> {
        let trace = step.trace;
        let rows = step::check(step, &self.caps, &self.states, &self.pending)?;
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let states: Vec<StateId> = rows.iter().map(|row| row.state).collect();
        let (mut results, mut stages) = (Vec::with_capacity(rows.len()), Vec::new());
        for (index, row) in rows.into_iter().enumerate() {
            results.push(self.run_row(ticket, index, row, trace.then_some(&mut stages)));
        }
        let failed = |result: &RowResult| matches!(result, RowResult::Failed(Error::BadLogits { .. }));
        if results.iter().any(failed) {
            for id in &states {
                self.state_mut(*id)?.lost = true;
            }
        }
        self.pending.push_back(Pending { ticket, states, rows: results, trace: stages });
        Ok(ticket)
    }

    fn set_mask(&mut self, ticket: Ticket, row: usize, mask: &[u32]) -> Result<()> {
        let pending = self.pending.iter_mut().find(|pending| pending.ticket == ticket);
        let pending = pending.ok_or(Error::Unknown { what: "ticket", id: ticket.0 })?;
        let result = pending.rows.get_mut(row);
        let Some(RowResult::Waiting(sampling, logits)) = result.as_deref() else {
            return Err(Error::BadStep(format!("row {row} does not wait for a mask")));
        };
        let chosen = sampling.run(self.plan.isa, logits, Some(mask));
        let settled = match self.states.get_mut(&sampling.state.0).filter(|state| state.awaits_mask == Some(ticket)) {
            Some(state) => sampling.settle(state, chosen),
            // Reset, restored or freed meanwhile: the token is reported and not kept.
            None => RowResult::from(chosen),
        };
        pending.rows[row] = settled;
        Ok(())
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Output> {
        let Some(first) = self.pending.front() else {
            return Err(Error::Unknown { what: "ticket", id: ticket.0 });
        };
        if first.ticket != ticket {
            if self.pending.iter().any(|pending| pending.ticket == ticket) {
                return Err(Error::BadStep(format!(
                    "ticket {} is to be waited for before {}",
                    first.ticket.0, ticket.0
                )));
            }
            return Err(Error::Unknown { what: "ticket", id: ticket.0 });
        }
        if let Some(row) = first.rows.iter().position(|row| matches!(row, RowResult::Waiting(..))) {
            return Err(Error::BadStep(format!("row {row} waits for its mask")));
        }
        let Some(done) = self.pending.pop_front() else {
            return Err(Error::Unknown { what: "ticket", id: ticket.0 });
        };
        done.output()
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            weights_mapped: self.plan.weights().quantized_bytes(),
            weights_owned: self.plan.owned_bytes(),
            states: self.state_bytes(),
            snapshots: self.snapshots.values().map(Snapshot::bytes).sum(),
            scratch: self.scratch.bytes() + self.logits.bytes(),
        }
    }
}
