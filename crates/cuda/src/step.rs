//! The checks of a step, and what becomes of its rows until they are waited for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use lily_backend::{
    Caps, Error, Input, LogProbs, Result, Row, RowOutput, SampledToken, SamplingParams, StageOutput, StateId, Step,
    Ticket, Want,
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
        (Input::Tokens(ids), _) => Some(ids),
        (Input::PreviousSample, Sampled::Nothing) => {
            return refuse("the state's last step sampled no token".into());
        }
        (Input::PreviousSample, _) => None,
    };
    let row = CheckedRow { state: id, ids, want };
    if row.len() == 0 || row.len() > caps.max_chunk {
        return refuse(format!("{} tokens; a row may have 1 to {}", row.len(), caps.max_chunk));
    }
    if let Some(token) = row.ids.iter().flatten().find(|token| **token as usize >= caps.vocab) {
        return refuse(format!("token {token} is outside the vocabulary of {}", caps.vocab));
    }
    let (position, capacity) = (state.position(), state.capacity());
    if row.len() > capacity - position {
        return Err(Error::ContextFull { position, more: row.len(), capacity });
    }
    if let Want::Token(params) = &row.want {
        params.check(caps.vocab).map_err(bad)?;
    }
    Ok(row)
}
