//! The checks of a step, and what becomes of its rows until they are waited for.

use std::collections::{BTreeMap, VecDeque};

use lily_backend::{
    Caps, Error, Input, Output, Result, Row, RowOutput, SampledToken, SamplingParams, StageOutput, Standing, StateId,
    Step, Ticket, Want,
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
    let in_flight = pending.iter().map(|step| &step.states[..]);
    lily_backend::check_step(&step, caps, in_flight, |id| {
        states.get(&id.0).map(|state| Standing {
            position: state.position(),
            capacity: state.capacity(),
            lost: state.lost,
            awaits_mask: state.awaits_mask,
            has_sample: state.sampled.is_some(),
        })
    })?;
    step.rows.into_iter().map(|row| checked(row, caps, states)).collect()
}

/// A row that has passed, with its ids and room for its logits.
fn checked(row: Row, caps: &Caps, states: &BTreeMap<u32, State>) -> Result<CheckedRow> {
    let Row { state, input, want } = row;
    let ids = match input {
        Input::Tokens(ids) => ids,
        Input::PreviousSample => states.get(&state.0).and_then(|state| state.sampled).into_iter().collect(),
    };
    let positions = match &want {
        Want::Nothing | Want::Token(_) => 0,
        Want::LastLogits => 1,
        Want::AllLogits => ids.len(),
    };
    Ok(CheckedRow { state, logits: room_for(positions * caps.vocab)?, ids, want })
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
