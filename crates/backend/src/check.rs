//! The checks of a step that every backend makes before it changes anything.

use crate::{Caps, Error, Input, Result, Row, StateId, Step, Ticket, Want};

/// What the checks need to know of a state.
pub struct Standing {
    /// Tokens fed so far.
    pub position: usize,
    /// Tokens it has room for.
    pub capacity: usize,
    /// Whether a failed step left it undefined.
    pub lost: bool,
    /// The step whose sampling waits for a mask.
    pub awaits_mask: Option<Ticket>,
    /// Whether its last step samples a token.
    pub has_sample: bool,
}

/// Checks how many tokens a new state is to have room for.
pub fn check_capacity(capacity: usize, caps: &Caps) -> Result<()> {
    if (1..=caps.max_context).contains(&capacity) {
        return Ok(());
    }
    Err(Error::BadStep(format!("a state of {capacity} tokens; it may have 1 to {}", caps.max_context)))
}

/// Checks a whole step against the limits and the contract. `in_flight` are the states of each accepted step that was not waited
/// for; `standing` knows the states that exist.
pub fn check_step<'a>(
    step: &Step,
    caps: &Caps,
    in_flight: impl ExactSizeIterator<Item = &'a [StateId]> + Clone,
    standing: impl Fn(StateId) -> Option<Standing>,
) -> Result<()> {
    let refuse = |reason: String| Err(Error::BadStep(reason));
    if in_flight.len() >= caps.steps_in_flight {
        return refuse(format!("{} steps are in flight; wait for the first", in_flight.len()));
    }
    if step.rows.is_empty() || step.rows.len() > caps.max_rows {
        return refuse(format!("{} rows; a step may have 1 to {}", step.rows.len(), caps.max_rows));
    }
    for (index, row) in step.rows.iter().enumerate() {
        if step.rows[..index].iter().any(|other| other.state == row.state) {
            return refuse(format!("state {} stands in two rows", row.state.0));
        }
        let masked = matches!(&row.want, Want::Token(params) if params.masked);
        if masked && in_flight.clone().any(|states| states.contains(&row.state)) {
            return refuse(format!("row {index} is masked while another step of its state is in flight"));
        }
    }
    for (index, row) in step.rows.iter().enumerate() {
        let state = standing(row.state).ok_or(Error::Unknown { what: "state", id: row.state.0.into() })?;
        check_row(index, row, caps, &state)?;
    }
    Ok(())
}

fn check_row(index: usize, row: &Row, caps: &Caps, state: &Standing) -> Result<()> {
    let refuse = |reason: String| Err(Error::BadStep(format!("row {index}: {reason}")));
    if state.lost {
        return Err(Error::StateLost(row.state.0));
    }
    if let Some(ticket) = state.awaits_mask {
        return refuse(format!("its state waits for the mask of ticket {}", ticket.0));
    }
    let tokens = match &row.input {
        Input::Tokens(ids) => ids.len(),
        Input::PreviousSample if state.has_sample => 1,
        Input::PreviousSample => return refuse("the state's last step sampled no token".into()),
    };
    if tokens == 0 || tokens > caps.max_chunk {
        return refuse(format!("{tokens} tokens; a row may have 1 to {}", caps.max_chunk));
    }
    if let Input::Tokens(ids) = &row.input
        && let Some(token) = ids.iter().find(|token| **token as usize >= caps.vocab)
    {
        return refuse(format!("token {token} is outside the vocabulary of {}", caps.vocab));
    }
    if tokens > state.capacity - state.position {
        return Err(Error::ContextFull { position: state.position, more: tokens, capacity: state.capacity });
    }
    match &row.want {
        Want::Token(params) => params.check(caps.vocab).or_else(refuse),
        _ => Ok(()),
    }
}
