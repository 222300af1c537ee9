//! The seam between the engine and a device: one call per step, no tensor crosses it.
//!
//! # The contract
//!
//! **States.** A state holds one session on the device: KV cache, convolution history, delta state, and the ids of the
//! tokens that were fed. Its position is the number of tokens fed so far, counting steps that were submitted but not
//! waited for. The delta state cannot be rewound: going back needs a snapshot.
//!
//! **Steps.** [`Backend::submit`] checks a whole step before it changes anything. An error from `submit` means that no
//! state moved. Once a step is accepted, its rows advance their states by the number of their input tokens, in the order
//! of submission. A state may stand in one row of a step only.
//!
//! **Tickets.** At most [`Caps::steps_in_flight`] accepted steps may be unwaited. Tickets are waited for in the order
//! of submission. `wait` is where device errors surface; after one, every state that the step touched must be reset or
//! restored before it is used again, and until then `submit` refuses it with [`Error::StateLost`].
//!
//! **Sampled tokens** stay on the device: [`Input::PreviousSample`] feeds the token that the state's last step sampled,
//! whether or not that step was waited for. A sampled token is not part of the state until it is fed.
//!
//! **Masks.** A row whose sampling is constrained ([`SamplingParams::masked`]) samples only after
//! [`Backend::set_mask`] for its ticket. Such a step must be the only one in flight that touches its state. Waiting
//! without having set the mask is an error.
//!
//! **Determinism.** Same backend, same steps, same chunk borders: same bits. A row's result does not depend on the
//! other rows of its step. A restored or forked state continues exactly like the state it was taken from. Different
//! chunk borders, and prefill against decode, agree within the backend's numeric budget, stated by its conformance
//! tests, but for tokens at which rounding decides between two experts, and what follows on them. Random draws depend only on the seed and the position (see [`SamplingParams`]).
//!
//! **Who checks what.** The engine checks requests against the tokenizer and the context. The backend checks every
//! step against its own limits and reports, never truncates. Ids are checked against the vocabulary of the shape.

#![warn(missing_docs)]

mod check;
pub mod conformance;
pub mod export;
mod sampling;
mod stage;

pub use check::{Standing, check_capacity, check_step};
pub use sampling::{LogProbs, SampledToken, SamplingParams};
pub use stage::{Part, Stage, StageOutput};

use std::io::{Read, Write};

/// A session's state on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateId(pub u32);

/// A copy of a state's recurrent part at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub u32);

/// An accepted step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What a backend is and can do, fixed at load.
#[derive(Clone, Debug)]
pub struct Caps {
    /// The device in words, with the kernel path that was chosen, like `cpu (2 threads, portable)`.
    pub name: String,
    /// Longest context a state may have, in tokens.
    pub max_context: usize,
    /// Most tokens of one row in one step; longer prompts are fed in chunks.
    pub max_chunk: usize,
    /// Most rows in one step.
    pub max_rows: usize,
    /// Steps that may be submitted and not yet waited for.
    pub steps_in_flight: usize,
    /// Whether `submit` returns before the work is done, so that a second step in flight keeps the device busy while
    /// the first one's token is looked at. Where it does not, a step submitted ahead would only come to waste at the
    /// end of an answer, and the engine submits none.
    pub overlaps: bool,
    /// Device bytes per token of a state's capacity.
    pub bytes_per_token: usize,
    /// Device bytes of a state beside its tokens; also the size of a snapshot.
    pub bytes_per_state: usize,
    /// Whether states and snapshots lie in memory of the device's own, which nobody else wants.
    pub own_memory: bool,
    /// Length of the logits of one position.
    pub vocab: usize,
}

/// Device memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Weights that the backend reads in place (mapped files).
    pub weights_mapped: usize,
    /// Weights that it holds in a form of its own.
    pub weights_owned: usize,
    /// States with their KV caches.
    pub states: usize,
    /// Snapshots.
    pub snapshots: usize,
    /// Everything else: activations, tables.
    pub scratch: usize,
}

/// One call of the device: for each row, tokens in and what is wanted out.
#[derive(Clone, Debug)]
pub struct Step {
    /// The sessions that take part; at most [`Caps::max_rows`], each state once.
    pub rows: Vec<Row>,
    /// Record the output of every stage (slow; for diagnosis).
    pub trace: bool,
}

/// One session's part of a step.
#[derive(Clone, Debug)]
pub struct Row {
    /// Whose state advances.
    pub state: StateId,
    /// The tokens to feed.
    pub input: Input,
    /// What to compute from them.
    pub want: Want,
}

/// The tokens a row feeds.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// These ids, at least one and at most [`Caps::max_chunk`].
    Tokens(Vec<u32>),
    /// The token that this state's last step sampled.
    PreviousSample,
}

/// What a row computes.
#[derive(Clone, Debug)]
pub enum Want {
    /// The state alone: a chunk of a prompt that is not its last.
    Nothing,
    /// A token sampled from the logits of the last input.
    Token(SamplingParams),
    /// The logits of the last input.
    LastLogits,
    /// The logits of every input.
    AllLogits,
}

/// What a step produced.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// One entry per row, in order.
    pub rows: Vec<RowOutput>,
    /// The stages, if the step asked for a trace: rows one after the other.
    pub trace: Vec<StageOutput>,
}

/// What a row produced.
#[derive(Clone, Debug)]
pub enum RowOutput {
    /// For [`Want::Nothing`].
    Nothing,
    /// For [`Want::Token`].
    Token(SampledToken),
    /// For the logits: `vocab` values per position, positions in order.
    Logits(Vec<f32>),
}

/// Why a backend refuses or fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device or the kernel path is not there.
    #[error("backend {name} is not available: {reason}")]
    Unavailable {
        /// Which backend.
        name: &'static str,
        /// Why, and what would make it available.
        reason: String,
    },
    /// Memory would not suffice.
    #[error("{what} needs {needed} bytes, {available} are available")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Its size in bytes.
        needed: usize,
        /// What is left in bytes.
        available: usize,
    },
    /// A state, snapshot or ticket that does not exist (any more).
    #[error("no such {what}: {id}")]
    Unknown {
        /// `state`, `snapshot` or `ticket`.
        what: &'static str,
        /// Its number.
        id: u64,
    },
    /// A step outside the backend's limits or against the contract.
    #[error("step refused: {0}")]
    BadStep(String),
    /// The tokens do not fit into the state.
    #[error("the context is full: {position} tokens and {more} more do not fit into {capacity}")]
    ContextFull {
        /// Tokens fed so far.
        position: usize,
        /// Tokens that were to be fed.
        more: usize,
        /// Capacity of the state.
        capacity: usize,
    },
    /// A state that a failed step left undefined.
    #[error("state {0} was lost in a failed step: reset it or restore a snapshot")]
    StateLost(u32),
    /// The logits of a row are not numbers.
    #[error("row {row}: the logits at position {position} are not finite: damaged weights or a device fault")]
    BadLogits {
        /// Row of the step.
        row: usize,
        /// Position of the token whose logits they are.
        position: usize,
    },
    /// A mask leaves no token to choose.
    #[error("row {0}: the constraint allows no token")]
    EmptyMask(usize),
    /// An exported state that does not belong to this checkpoint or is damaged.
    #[error("stored state refused: {0}")]
    BadExport(String),
    /// The device failed.
    #[error("device error: {0}")]
    Device(String),
    /// Reading or writing an export failed.
    #[error("state transfer failed: {0}")]
    Io(#[from] std::io::Error),
}

/// Result of a backend call.
pub type Result<T> = std::result::Result<T, Error>;

/// A device that runs the model. One thread owns it; see the contract at the top of this crate.
pub trait Backend: Send {
    /// Name and limits.
    fn caps(&self) -> &Caps;

    /// A fresh state at position 0 with room for `capacity` tokens.
    fn new_state(&mut self, capacity: usize) -> Result<StateId>;

    /// Frees a state. Its snapshots stay.
    fn free_state(&mut self, state: StateId) -> Result<()>;

    /// Back to position 0.
    fn reset_state(&mut self, state: StateId) -> Result<()>;

    /// Tokens fed so far.
    fn position(&self, state: StateId) -> Result<usize>;

    /// Copies the recurrent part at the current position. Later steps of the state do not change it.
    fn snapshot(&mut self, state: StateId) -> Result<SnapshotId>;

    /// Frees a snapshot.
    fn free_snapshot(&mut self, snapshot: SnapshotId) -> Result<()>;

    /// Takes `state` back to a snapshot of its own past: the KV cache is cut to the snapshot's position, the rest is
    /// copied. The tokens fed up to that position must be those of the snapshot; otherwise [`Error::BadStep`].
    fn restore(&mut self, state: StateId, snapshot: SnapshotId) -> Result<()>;

    /// Makes `to` a copy of `from` (KV cache, recurrent part, tokens); its capacity must suffice.
    fn fork(&mut self, from: StateId, to: StateId) -> Result<()>;

    /// Writes the state at its current position, in a form that [`Backend::import`] of the same backend reads.
    fn export(&mut self, state: StateId, to: &mut dyn Write) -> Result<()>;

    /// Replaces `state` by an exported one. After an error the state is at position 0.
    fn import(&mut self, state: StateId, from: &mut dyn Read) -> Result<()>;

    /// Advances `state` by `tokens` without computing them: their keys and values are seeded noise of deviation 1, the
    /// recurrent part stays as it is. For measuring decode in contexts that take too long to prefill. A backend may
    /// refuse with [`Error::BadStep`].
    fn feed_noise(&mut self, state: StateId, tokens: &[u32], seed: u64) -> Result<()> {
        let _ = (state, tokens, seed);
        Err(Error::BadStep("this backend makes no synthetic states".into()))
    }

    /// Bytes per second at which the device reads its weights and does nothing else: what decoding is measured against. `None` where
    /// weights lie in the host's memory, which its threads can read as well.
    fn plain_read(&mut self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Accepts a step; returns before the device has finished where the device allows it.
    fn submit(&mut self, step: Step) -> Result<Ticket>;

    /// Gives the constraint of a masked row: bit `id % 32` of word `id / 32` set where the token is allowed. Words
    /// beyond the mask count as zero.
    fn set_mask(&mut self, ticket: Ticket, row: usize, mask: &[u32]) -> Result<()>;

    /// Waits for a step and takes its output.
    fn wait(&mut self, ticket: Ticket) -> Result<Output>;

    /// Memory in use.
    fn memory(&self) -> MemoryReport;
}
