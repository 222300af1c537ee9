//! The checks of a step, and what becomes of its rows until they are waited for.

use std::collections::{BTreeMap, VecDeque};

use lily_backend::{
    Caps, Error, Input, Output, Result, Row, RowOutput, SampledToken, SamplingParams, StageOutput, StateId, Step,
    Ticket, Want,
};

use crate::device::Isa;
use crate::kernels::sample::{Context, NoToken, sample};
use crate::state::State;

/// A row that nothing stands against.
pub(crate) struct CheckedRow {
    pub(crate) state: StateId,
    /// At least one.
    pub(crate) ids: Vec<u32>,
    pub(crate) want: Want,
    /// Zeros for the logits that the row returns.
    pub(crate) logits: Vec<f32>,
}

/// An accepted step that was not waited for.
pub(crate) struct Pending {
    pub(crate) ticket: Ticket,
    pub(crate) states: Vec<StateId>,
    pub(crate) rows: Vec<RowResult>,
    pub(crate) trace: Vec<StageOutput>,
}

/// What a row has come to.
pub(crate) enum RowResult {
    Done(RowOutput),
    /// Its logits, until its mask comes.
    Waiting(Sampling, Vec<f32>),
    Failed(Error),
}

/// A token to be sampled.
pub(crate) struct Sampling {
    pub(crate) state: StateId,
    pub(crate) row: usize,
    pub(crate) params: SamplingParams,
    /// Tokens that count for the penalties.
    pub(crate) penalized: Vec<u32>,
    /// Position of the token to be sampled.
    pub(crate) position: usize,
}

impl Sampling {
    /// Samples from `logits`.
    pub(crate) fn run(&self, isa: Isa, logits: &[f32], mask: Option<&[u32]>) -> Result<SampledToken> {
        let context = Context { penalized: &self.penalized, mask, position: self.position };
        sample(isa, logits, &self.params, &context).map_err(|why| match why {
            NoToken::BadLogits => Error::BadLogits { row: self.row, position: self.position - 1 },
            NoToken::Excluded => Error::EmptyMask(self.row),
        })
    }

    /// Leaves the token in the state for the next step.
    pub(crate) fn settle(&self, state: &mut State, result: Result<SampledToken>) -> RowResult {
        state.awaits_mask = None;
        state.sampled = result.as_ref().ok().map(|token| token.id);
        RowResult::from(result)
    }
}

impl From<Result<SampledToken>> for RowResult {
    fn from(result: Result<SampledToken>) -> RowResult {
        match result {
            Ok(token) => RowResult::Done(RowOutput::Token(token)),
            Err(error) => RowResult::Failed(error),
        }
    }
}

impl Pending {
    /// The output of a step none of whose rows waits, or the error of the first row that has one.
    pub(crate) fn output(self) -> Result<Output> {
        let mut rows = Vec::with_capacity(self.rows.len());
        for (index, row) in self.rows.into_iter().enumerate() {
            match row {
                RowResult::Done(output) => rows.push(output),
                RowResult::Failed(error) => return Err(error),
                RowResult::Waiting(..) => return Err(Error::BadStep(format!("row {index} waits for its mask"))),
            }
        }
        Ok(Output { rows, trace: self.trace })
    }
}

/// Checks a whole step against the limits and the contract; changes nothing.
pub(crate) fn check(
    step: Step,
    caps: &Caps,
    states: &BTreeMap<u32, State>,
    pending: &VecDeque<Pending>,
) -> Result<Vec<CheckedRow>> {
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
    }
    let rows = step.rows.into_iter().enumerate();
    rows.map(|(index, row)| check_row(index, row, caps, states)).collect()
}

fn check_row(index: usize, row: Row, caps: &Caps, states: &BTreeMap<u32, State>) -> Result<CheckedRow> {
    let bad = |reason: String| Error::BadStep(format!("row {index}: {reason}"));
    let refuse = |reason: String| Err(bad(reason));
    let Row { state: id, input, want } = row;
    let state = states.get(&id.0).ok_or(Error::Unknown { what: "state", id: id.0.into() })?;
    if state.lost {
        return Err(Error::StateLost(id.0));
    }
    if let Some(ticket) = state.awaits_mask {
        return refuse(format!("its state waits for the mask of ticket {}", ticket.0));
    }
    let ids = match (input, state.sampled) {
        (Input::Tokens(ids), _) => ids,
        (Input::PreviousSample, Some(id)) => vec![id],
        (Input::PreviousSample, None) => return refuse("the state's last step sampled no token".into()),
    };
    if ids.is_empty() || ids.len() > caps.max_chunk {
        return refuse(format!("{} tokens; a row may have 1 to {}", ids.len(), caps.max_chunk));
    }
    if let Some(token) = ids.iter().find(|token| **token as usize >= caps.vocab) {
        return refuse(format!("token {token} is outside the vocabulary of {}", caps.vocab));
    }
    let (position, capacity) = (state.position(), state.capacity());
    if ids.len() > capacity - position {
        return Err(Error::ContextFull { position, more: ids.len(), capacity });
    }
    let positions = match &want {
        Want::Nothing => 0,
        Want::LastLogits => 1,
        Want::AllLogits => ids.len(),
        Want::Token(params) => {
            check_sampling(params, caps.vocab).map_err(bad)?;
            0
        }
    };
    Ok(CheckedRow { state: id, logits: room_for(positions * caps.vocab)?, ids, want })
}

/// Zeros, or the error that there is no memory for them.
fn room_for(len: usize) -> Result<Vec<f32>> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        what: "the logits of a row".into(),
        needed: len * size_of::<f32>(),
        available: crate::device::memory_bytes(),
    })?;
    room.resize(len, 0.0);
    Ok(room)
}

/// Biases beyond this could turn a finite logit into an infinite one.
const LARGEST_BIAS: f32 = 1e30;

/// Checks sampling parameters, so that no step of the sampling can make NaN.
fn check_sampling(p: &SamplingParams, vocab: usize) -> std::result::Result<(), String> {
    let finite = [
        ("temperature", p.temperature, p.temperature >= 0.0),
        ("top_p", p.top_p, p.top_p > 0.0),
        ("min_p", p.min_p, (0.0..=1.0).contains(&p.min_p)),
        ("repetition_penalty", p.repetition_penalty, p.repetition_penalty > 0.0),
        ("presence_penalty", p.presence_penalty, p.presence_penalty.abs() <= LARGEST_BIAS),
        ("frequency_penalty", p.frequency_penalty, p.frequency_penalty.abs() <= LARGEST_BIAS),
    ];
    if let Some((name, value, _)) = finite.iter().find(|(_, value, in_range)| !in_range || !value.is_finite()) {
        return Err(format!("{name} is {value}"));
    }
    if p.vocab_limit == 0 {
        return Err("vocab_limit is 0: it allows no token".into());
    }
    let bad = |(id, bias): &&(u32, f32)| {
        *id as usize >= vocab || bias.is_nan() || (bias.abs() > LARGEST_BIAS && *bias != f32::NEG_INFINITY)
    };
    match p.logit_bias.iter().find(bad) {
        Some((id, bias)) => Err(format!("logit bias {bias} of token {id}, in a vocabulary of {vocab}")),
        None => Ok(()),
    }
}
