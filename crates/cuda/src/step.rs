//! The checks of a step, and what becomes of its rows until they are waited for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use lily_backend::{
    Caps, Error, Input, LogProbs, Result, Row, RowOutput, SampledToken, SamplingParams, StageOutput, Standing, StateId,
    Step, Ticket, Want,
};

use crate::device::{Buffer, Event};
use crate::kernels::Run;
use crate::state::{Sampled, State};

/// A row that nothing stands against.
pub(crate) struct CheckedRow {
    pub(crate) state: StateId,
    /// Ids to feed, at least one; `None`: the token that the state's last step sampled.
    pub(crate) ids: Option<Vec<u32>>,
    pub(crate) want: Want,
}

impl CheckedRow {
    /// Tokens it feeds.
    pub(crate) fn len(&self) -> usize {
        self.ids.as_ref().map_or(1, Vec::len)
    }
}

/// An accepted step that was not waited for.
pub(crate) struct Pending {
    pub(crate) ticket: Ticket,
    pub(crate) states: Vec<StateId>,
    pub(crate) rows: Vec<RowResult>,
    pub(crate) trace: Vec<StageOutput>,
    /// Behind all its work.
    pub(crate) event: Event,
}

/// What a row has come to.
pub(crate) enum RowResult {
    Done(RowOutput),
    /// A token that the device puts into a slot of the results.
    Token(Sampling),
    /// The same, once its mask comes.
    Waiting(Box<Masked>),
    Failed(Error),
}

/// A token that is being sampled.
pub(crate) struct Sampling {
    pub(crate) state: StateId,
    pub(crate) slot: usize,
    /// Position of the token whose logits they are.
    pub(crate) position: usize,
    /// Logits for the report, and how many tokens it has.
    pub(crate) report: Option<(Vec<f32>, u32)>,
}

/// A sampling that waits for its mask.
pub(crate) struct Masked {
    pub(crate) sampling: Sampling,
    pub(crate) params: SamplingParams,
    /// What the device needs to know; its addresses stay valid through `_words`.
    pub(crate) run: Run,
    pub(crate) logits: Buffer,
    pub(crate) _words: Arc<Buffer>,
}

impl Sampling {
    /// The output for the id and the status that the device delivered.
    pub(crate) fn output(&self, row: usize, id: u32, status: u32) -> Result<RowOutput> {
        match status {
            Run::BAD_LOGITS => Err(Error::BadLogits { row, position: self.position }),
            Run::EXCLUDED => Err(Error::EmptyMask(row)),
            _ => {
                let logprobs = self.report.as_ref().map(|(logits, top)| report(logits, id, *top as usize));
                Ok(RowOutput::Token(SampledToken { id, logprobs }))
            }
        }
    }
}

/// Log-probabilities under the raw logits. On the host, because few ask for them and the logits have to be there anyway.
fn report(logits: &[f32], chosen: u32, top: usize) -> LogProbs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let log = |id: u32| (f64::from(logits[id as usize]) - f64::from(max) - sum.ln()) as f32;
    // Adding zero makes -0 equal to 0.
    let falls = |a: &u32, b: &u32| (logits[*b as usize] + 0.0).total_cmp(&(logits[*a as usize] + 0.0)).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let top = top.min(ids.len());
    if top > 0 && top < ids.len() {
        ids.select_nth_unstable_by(top, falls);
    }
    ids.truncate(top);
    ids.sort_unstable_by(falls);
    LogProbs { chosen: log(chosen), top: ids.into_iter().map(|id| (id, log(id))).collect() }
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
            has_sample: state.sampled != Sampled::Nothing,
        })
    })?;
    let rows = step.rows.into_iter().map(|Row { state, input, want }| {
        let ids = match input {
            Input::Tokens(ids) => Some(ids),
            Input::PreviousSample => None,
        };
        CheckedRow { state, ids, want }
    });
    Ok(rows.collect())
}
