//! One conversation on the device: its state, the tokens it was fed, and snapshots to go back to.

use std::collections::VecDeque;

use lily_backend::{Backend, Input, Output, Row, RowOutput, SampledToken, SnapshotId, StateId, Step, Ticket, Want};

use crate::error::Result;

/// Snapshots that a session keeps, the latest ones. Each takes [`Caps::bytes_per_state`](lily_backend::Caps) (61 MiB on
/// Qwen3.6-35B-A3B); two turns with two each are enough to edit or retry the last question.
const MAX_SNAPSHOTS: usize = 4;

/// A state on the device and what is in it. Made by [`Engine::open`](crate::Engine::open), given back with
/// [`Engine::close`](crate::Engine::close).
#[derive(Debug)]
pub struct Session {
    state: StateId,
    capacity: usize,
    /// The tokens that were fed. Steps in flight count as far as their tokens are known.
    fed: Vec<u32>,
    in_flight: VecDeque<Flight>,
    /// The token that the last step sampled, if it was waited for.
    sampled: Option<u32>,
    /// By ascending position, each at a beginning of `fed`.
    snapshots: Vec<(usize, SnapshotId)>,
    /// A failed step left the state undefined, and resetting it failed, too.
    lost: bool,
}

/// A step that was not waited for.
#[derive(Debug)]
struct Flight {
    ticket: Ticket,
    /// The step after it fed the token that it samples.
    fed_on: bool,
}

impl Session {
    pub(crate) fn new(state: StateId, capacity: usize) -> Session {
        Session {
            state,
            capacity,
            fed: Vec::new(),
            in_flight: VecDeque::new(),
            sampled: None,
            snapshots: Vec::new(),
            lost: false,
        }
    }

    /// The tokens in the state: prompt and answer so far. The last token of an answer may be missing: it was sampled
    /// and not fed. A stop token may be there: it was fed before it was seen.
    pub fn tokens(&self) -> &[u32] {
        &self.fed
    }

    /// Tokens that prompt and answer may have together.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn state(&self) -> StateId {
        self.state
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Makes the state one of a beginning of `prompt`, the longest that it can and shorter than all of it, and gives
    /// its length. No step may be in flight.
    pub(crate) fn rewind(&mut self, backend: &mut dyn Backend, prompt: &[u32]) -> Result<usize> {
        if self.lost {
            backend.reset_state(self.state)?;
            self.lost = false;
        }
        self.sampled = None;
        // At least one token must be fed to get logits.
        let most = prompt.len().saturating_sub(1);
        let common = self.fed.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count();
        if self.fed.len() <= common {
            return Ok(self.fed.len());
        }
        while let Some(&(position, snapshot)) = self.snapshots.last() {
            if position <= common {
                match backend.restore(self.state, snapshot) {
                    Ok(()) => {
                        self.fed.truncate(position);
                        return Ok(position);
                    }
                    Err(error) => tracing::warn!(%error, position, "a snapshot could not be restored"),
                }
            }
            self.snapshots.pop();
            self.free(backend, snapshot);
        }
        backend.reset_state(self.state)?;
        self.fed.clear();
        Ok(0)
    }

    /// Submits a step that feeds `tokens`. No sampled token may be waiting in a step before it.
    pub(crate) fn feed(&mut self, backend: &mut dyn Backend, tokens: &[u32], want: Want) -> Result<()> {
        self.submit(backend, Input::Tokens(tokens.to_vec()), want)?;
        self.fed.extend_from_slice(tokens);
        Ok(())
    }

    /// Submits a step that feeds the token that the last step samples or has sampled.
    pub(crate) fn feed_sample(&mut self, backend: &mut dyn Backend, want: Want) -> Result<()> {
        self.submit(backend, Input::PreviousSample, want)?;
        let flights = self.in_flight.len();
        match flights.checked_sub(2) {
            Some(before) => self.in_flight[before].fed_on = true,
            None => self.fed.extend(self.sampled.take()),
        }
        Ok(())
    }

    fn submit(&mut self, backend: &mut dyn Backend, input: Input, want: Want) -> Result<()> {
        let row = Row { state: self.state, input, want };
        let ticket = backend.submit(Step { rows: vec![row], trace: false })?;
        self.in_flight.push_back(Flight { ticket, fed_on: false });
        Ok(())
    }

    /// Waits for the oldest step in flight; gives the token that it sampled, if it did.
    pub(crate) fn wait(&mut self, backend: &mut dyn Backend) -> Result<Option<SampledToken>> {
        let Some(flight) = self.in_flight.pop_front() else { return Ok(None) };
        let Output { mut rows, .. } = backend.wait(flight.ticket)?;
        let Some(RowOutput::Token(token)) = rows.pop() else { return Ok(None) };
        if flight.fed_on {
            self.fed.push(token.id);
        } else {
            self.sampled = Some(token.id);
        }
        Ok(Some(token))
    }

    /// Waits for all steps in flight; their samples are dropped, what they fed stays.
    pub(crate) fn drain(&mut self, backend: &mut dyn Backend) {
        while !self.in_flight.is_empty() {
            if let Err(error) = self.wait(backend) {
                tracing::warn!(%error, "a discarded step failed; the session starts over");
                self.fail(backend);
            }
        }
    }

    /// Keeps a snapshot of the current position. Failing to is no harm but to the time of later prompts.
    pub(crate) fn keep_snapshot(&mut self, backend: &mut dyn Backend) {
        if self.snapshots.len() == MAX_SNAPSHOTS {
            let (_, oldest) = self.snapshots.remove(0);
            self.free(backend, oldest);
        }
        match backend.snapshot(self.state) {
            Ok(snapshot) => self.snapshots.push((self.fed.len(), snapshot)),
            Err(error) => tracing::warn!(%error, "no snapshot kept"),
        }
    }

    /// After an error: back to an empty state, so that the next prompt works if the device does.
    pub(crate) fn fail(&mut self, backend: &mut dyn Backend) {
        while let Some(flight) = self.in_flight.pop_front() {
            // What else goes wrong follows from the error that is being reported.
            let _ = backend.wait(flight.ticket);
        }
        self.free_snapshots(backend);
        self.fed.clear();
        self.sampled = None;
        self.lost = backend.reset_state(self.state).is_err();
    }

    pub(crate) fn free_snapshots(&mut self, backend: &mut dyn Backend) {
        for (_, snapshot) in std::mem::take(&mut self.snapshots) {
            self.free(backend, snapshot);
        }
    }

    fn free(&self, backend: &mut dyn Backend, snapshot: SnapshotId) {
        if let Err(error) = backend.free_snapshot(snapshot) {
            tracing::warn!(%error, "a snapshot could not be freed");
        }
    }
}
