//! The memory of a step, its checks, and what becomes of its rows until they are waited for.

use std::collections::{BTreeMap, VecDeque};

use lily_backend::{
    Caps, Error, Result, RowOutput, SampledToken, SamplingParams, StageOutput, Standing, StateId, Step, Ticket,
};
use lily_model::Shape;

use crate::device::{Commit, Gpu, Slice};
use crate::sample::{self, NoToken};
use crate::state::{Sampled, State};

/// Most rows of a step. Rows run one after the other, so this bounds a step's latency, not memory.
pub(crate) const MAX_ROWS: usize = 8;
/// Angles of one position: cosine and sine of each pair of rotary dimensions.
pub(crate) const ANGLES: usize = Shape::ROTARY_DIM;

/// What a step brings along and takes away.
pub(crate) struct StepSet {
    /// `[rows, chunk]` u32.
    pub(crate) ids: Slice,
    /// `[rows, chunk, 32]` pairs of cosine and sine, f32.
    pub(crate) angles: Slice,
    /// `[rows]` u32: the tokens that it samples.
    pub(crate) sampled: Slice,
}

impl StepSet {
    pub(crate) fn new(gpu: &mut dyn Gpu, max_chunk: usize) -> Result<StepSet> {
        let tokens = MAX_ROWS * max_chunk;
        let mut slice = |bytes| -> Result<Slice> {
            let buffer = gpu.buffer(bytes, "inputs of a step")?;
            Ok(Slice { buffer, offset: 0, bytes })
        };
        Ok(StepSet { ids: slice(4 * tokens)?, angles: slice(4 * ANGLES * tokens)?, sampled: slice(4 * MAX_ROWS)? })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.ids.bytes + self.angles.bytes + self.sampled.bytes
    }
}

/// Cosine and sine of a position, in turn. Angles are made in f64; only these are rounded.
pub(crate) fn angles(position: usize, theta: f64) -> Vec<f32> {
    let pairs = ANGLES / 2;
    let angle = |i: usize| position as f64 * theta.powf(-(i as f64) / pairs as f64);
    (0..pairs).flat_map(|i| [angle(i).cos() as f32, angle(i).sin() as f32]).collect()
}

/// An accepted step that was not waited for.
pub(crate) struct Pending {
    pub(crate) ticket: Ticket,
    /// The last of its command buffers, until its results were read.
    pub(crate) commit: Option<Commit>,
    pub(crate) states: Vec<StateId>,
    pub(crate) rows: Vec<RowResult>,
    pub(crate) trace: Vec<StageOutput>,
}

/// What a row has come to.
pub(crate) enum RowResult {
    Done(RowOutput),
    Failed(Error),
    /// Logits on the device: where, of how many positions, and the position of the first.
    Logits {
        slice: Slice,
        first: usize,
    },
    /// The highest logit's id on the device, and the logits, from which log-probabilities are reported.
    Token {
        sampling: Sampling,
        token: Slice,
        logits: Slice,
    },
    /// Logits on the device, from which the host samples.
    Sampling {
        sampling: Sampling,
        logits: Slice,
        mask: Option<Vec<u32>>,
    },
    /// The same on the host, while the mask is not there.
    Waiting {
        sampling: Sampling,
        logits: Vec<f32>,
    },
}

/// A token to be sampled.
#[derive(Clone)]
pub(crate) struct Sampling {
    pub(crate) state: StateId,
    pub(crate) row: usize,
    pub(crate) params: SamplingParams,
    /// Position of the token to be sampled.
    pub(crate) position: usize,
}

impl Sampling {
    /// Samples from `logits` with what the state knows of its tokens.
    pub(crate) fn run(&self, logits: &[f32], state: Option<&State>, mask: Option<&[u32]>) -> Result<SampledToken> {
        let penalized: Vec<u32> = match state.filter(|_| sample::has_penalties(&self.params)) {
            // The tokens that this step has seen, should more have been fed since.
            Some(state) => {
                let start = self.params.penalty_start.min(self.position);
                state.tokens.get(start..self.position).unwrap_or(&[]).iter().flatten().copied().collect()
            }
            None => Vec::new(),
        };
        sample::sample(logits, &self.params, &penalized, mask, self.position).map_err(|why| match why {
            NoToken::BadLogits => self.bad_logits(),
            NoToken::Excluded => Error::EmptyMask(self.row),
        })
    }

    pub(crate) fn bad_logits(&self) -> Error {
        Error::BadLogits { row: self.row, position: self.position - 1 }
    }
}

/// Checks a whole step against the limits and the contract; changes nothing.
pub(crate) fn check(
    step: &Step,
    caps: &Caps,
    states: &BTreeMap<u32, State>,
    pending: &VecDeque<Pending>,
) -> Result<()> {
    let in_flight = pending.iter().map(|step| &step.states[..]);
    lily_backend::check_step(step, caps, in_flight, |id| {
        states.get(&id.0).map(|state| Standing {
            position: state.position(),
            capacity: state.capacity(),
            lost: state.lost,
            awaits_mask: state.awaits_mask,
            has_sample: !matches!(state.sampled, Sampled::None),
        })
    })
}
