//! The memory of a step, its checks, and what becomes of its rows until they are waited for.

use std::collections::{BTreeMap, VecDeque};

use lily_backend::{
    Caps, Error, Input, Result, Row, RowOutput, SampledToken, SamplingParams, StageOutput, StateId, Step, Ticket, Want,
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
    let refuse = |reason: String| Err(Error::BadStep(reason));
    if pending.len() >= caps.steps_in_flight {
        return refuse(format!("{} steps are in flight; wait for the first", pending.len()));
    }
    if step.rows.is_empty() || step.rows.len() > caps.max_rows {
        return refuse(format!("{} rows; a step may have 1 to {}", step.rows.len(), caps.max_rows));
    }
    for (index, row) in step.rows.iter().enumerate() {
        if step.rows[..index].iter().any(|other| other.state == row.state) {
            return refuse(format!("state {} stands in two rows", row.state.0));
        }
        let masked = matches!(&row.want, Want::Token(params) if params.masked);
        if masked && pending.iter().any(|step| step.states.contains(&row.state)) {
            return refuse(format!("row {index} is masked while another step of its state is in flight"));
        }
        check_row(index, row, caps, states)?;
    }
    Ok(())
}

fn check_row(index: usize, row: &Row, caps: &Caps, states: &BTreeMap<u32, State>) -> Result<()> {
    let refuse = |reason: String| Err(Error::BadStep(format!("row {index}: {reason}")));
    let id = row.state.0;
    let state = states.get(&id).ok_or(Error::Unknown { what: "state", id: id.into() })?;
    if state.lost {
        return Err(Error::StateLost(id));
    }
    if let Some(ticket) = state.awaits_mask {
        return refuse(format!("its state waits for the mask of ticket {}", ticket.0));
    }
    let tokens = match &row.input {
        Input::Tokens(ids) => {
            if let Some(token) = ids.iter().find(|token| **token as usize >= caps.vocab) {
                return refuse(format!("token {token} is outside the vocabulary of {}", caps.vocab));
            }
            ids.len()
        }
        Input::PreviousSample if matches!(state.sampled, Sampled::None) => {
            return refuse("the state's last step sampled no token".into());
        }
        Input::PreviousSample => 1,
    };
    if tokens == 0 || tokens > caps.max_chunk {
        return refuse(format!("{tokens} tokens; a row may have 1 to {}", caps.max_chunk));
    }
    let (position, capacity) = (state.position(), state.capacity());
    if tokens > capacity - position {
        return Err(Error::ContextFull { position, more: tokens, capacity });
    }
    match &row.want {
        Want::Token(params) => check_sampling(params, caps.vocab).or_else(refuse),
        _ => Ok(()),
    }
}

/// Biases beyond this could turn a finite logit into an infinite one.
const LARGEST_BIAS: f32 = 1e30;

/// Checks sampling parameters, so that no step of the sampling can make NaN.
fn check_sampling(p: &SamplingParams, vocab: usize) -> std::result::Result<(), String> {
    let ranges = [
        ("temperature", p.temperature, 0.0, f32::MAX),
        ("top_p", p.top_p, f32::MIN_POSITIVE, f32::MAX),
        ("min_p", p.min_p, 0.0, 1.0),
        ("repetition_penalty", p.repetition_penalty, f32::MIN_POSITIVE, f32::MAX),
        ("presence_penalty", p.presence_penalty, -LARGEST_BIAS, LARGEST_BIAS),
        ("frequency_penalty", p.frequency_penalty, -LARGEST_BIAS, LARGEST_BIAS),
    ];
    for (name, value, least, most) in ranges {
        if !(least..=most).contains(&value) {
            return Err(format!("{name} is {value}"));
        }
    }
    if p.vocab_limit == 0 {
        return Err("vocab_limit is 0: it allows no token".into());
    }
    for (id, bias) in p.logit_bias.iter() {
        let is_ban = *bias == f32::NEG_INFINITY;
        if *id as usize >= vocab || !(is_ban || bias.abs() <= LARGEST_BIAS) {
            return Err(format!("logit bias {bias} of token {id}, in a vocabulary of {vocab}"));
        }
    }
    Ok(())
}
