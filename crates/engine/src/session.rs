//! One conversation on the device: its state, the tokens it was fed, and snapshots to go back to.

use std::collections::VecDeque;
use std::sync::Arc;

use lily_backend::{Backend, Caps, Input, SnapshotId, StateId};

use crate::error::Result;

/// Snapshots that a session keeps. Each takes [`Caps::bytes_per_state`] (61 MiB on Qwen3.6-35B-A3B); six are the end of the system
/// message, the last question, the last two answers and two on the way through a long prompt.
const MAX_SNAPSHOTS: usize = 6;

/// A state on the device and what is in it.
pub(crate) struct Session {
    state: StateId,
    capacity: usize,
    /// The tokens that were fed. Steps in flight count as far as their tokens are known.
    fed: Vec<u32>,
    /// Tokens that were fed, those of all steps in flight included.
    position: usize,
    /// For each step in flight, whether the step after it fed the token that it samples.
    flights: VecDeque<bool>,
    /// The token that the last step sampled, if it landed.
    sampled: Option<u32>,
    /// By ascending position, each at a beginning of `fed`.
    snapshots: Vec<Snapshot>,
}

/// A snapshot that sessions of the same past may share.
#[derive(Clone)]
struct Snapshot {
    position: usize,
    id: SnapshotId,
    holders: Arc<()>,
}

impl Session {
    /// An empty session with room for `capacity` tokens.
    pub(crate) fn new(backend: &mut dyn Backend, capacity: usize) -> Result<Session> {
        let state = backend.new_state(capacity)?;
        Ok(Session {
            state,
            capacity,
            fed: Vec::new(),
            position: 0,
            flights: VecDeque::new(),
            sampled: None,
            snapshots: Vec::new(),
        })
    }

    /// A session whose state was imported with these tokens. It keeps a snapshot there: nothing before can be gone back to.
    pub(crate) fn imported(mut self, backend: &mut dyn Backend, tokens: &[u32]) -> Session {
        self.fed = tokens.to_vec();
        self.position = tokens.len();
        self.keep_snapshot(backend);
        self
    }

    /// The tokens in the state: prompt and answer so far. The last token of an answer may be missing: it was sampled
    /// and not fed. A stop token may be there: it was fed before it was seen.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.fed
    }

    pub(crate) fn state(&self) -> StateId {
        self.state
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens fed, those of steps in flight included.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Steps that were accepted and have not landed.
    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Device memory of a session of this capacity, without snapshots.
    pub(crate) fn bytes_of(caps: &Caps, capacity: usize) -> usize {
        caps.bytes_per_state + capacity * caps.bytes_per_token
    }

    /// Device memory of this one with its snapshots; a shared one counts for each that holds it.
    pub(crate) fn bytes(&self, caps: &Caps) -> usize {
        Session::bytes_of(caps, self.capacity) + self.snapshots.len() * caps.bytes_per_state
    }

    /// The longest beginning of `prompt`, shorter than all of it, whose state this session can give.
    pub(crate) fn reusable(&self, prompt: &[u32]) -> usize {
        // At least one token must be fed to get logits.
        let most = prompt.len().saturating_sub(1);
        let common = common_length(&self.fed, &prompt[..most]);
        if self.fed.len() <= common {
            return self.fed.len();
        }
        self.snapshots.iter().map(|snapshot| snapshot.position).rfind(|position| *position <= common).unwrap_or(0)
    }

    /// Where the last snapshot lies.
    pub(crate) fn last_snapshot(&self) -> Option<usize> {
        self.snapshots.last().map(|snapshot| snapshot.position)
    }

    /// Goes back to a position that [`Session::reusable`] gave. No step may be in flight.
    pub(crate) fn rewind(&mut self, backend: &mut dyn Backend, position: usize) -> Result<()> {
        self.sampled = None;
        if position == self.fed.len() {
            return Ok(());
        }
        while self.snapshots.last().is_some_and(|snapshot| snapshot.position > position) {
            self.drop_snapshot(backend, self.snapshots.len() - 1);
        }
        match self.snapshots.last() {
            Some(snapshot) if snapshot.position == position => backend.restore(self.state, snapshot.id)?,
            _ => backend.reset_state(self.state)?,
        }
        self.fed.truncate(position);
        self.position = position;
        Ok(())
    }

    /// A session of its own with the beginning of this one, up to a position that [`Session::reusable`] gave. No step may be
    /// in flight.
    pub(crate) fn fork(&self, backend: &mut dyn Backend, capacity: usize, position: usize) -> Result<Session> {
        // The copy has all of this one before it goes back.
        let mut copy = Session::new(backend, capacity.max(self.fed.len()))?;
        if let Err(error) = backend.fork(self.state, copy.state) {
            copy.free(backend);
            return Err(error.into());
        }
        copy.fed = self.fed.clone();
        copy.position = self.position;
        copy.snapshots = self.snapshots.clone();
        match copy.rewind(backend, position) {
            Ok(()) => Ok(copy),
            Err(error) => {
                copy.free(backend);
                Err(error)
            }
        }
    }

    /// Moves to a state with more room. No step may be in flight; the token that the last step sampled can be fed by its id.
    pub(crate) fn grow(&mut self, backend: &mut dyn Backend, capacity: usize) -> Result<()> {
        let state = backend.new_state(capacity)?;
        if let Err(error) = backend.fork(self.state, state) {
            free_state(backend, state);
            return Err(error.into());
        }
        free_state(backend, self.state);
        (self.state, self.capacity) = (state, capacity);
        Ok(())
    }

    /// Notes that a step with this input was accepted.
    pub(crate) fn accepted(&mut self, input: &Input) {
        match input {
            Input::Tokens(tokens) => {
                self.fed.extend_from_slice(tokens);
                self.position += tokens.len();
                self.sampled = None;
            }
            Input::PreviousSample => {
                self.position += 1;
                match self.flights.back_mut() {
                    Some(fed_on) => *fed_on = true,
                    None => self.fed.extend(self.sampled.take()),
                }
            }
        }
        self.flights.push_back(false);
    }

    /// Notes that the oldest step in flight landed, with the token that it sampled.
    pub(crate) fn landed(&mut self, sampled: Option<u32>) {
        let fed_on = self.flights.pop_front().unwrap_or(false);
        match sampled {
            Some(id) if fed_on => self.fed.push(id),
            sampled => self.sampled = sampled,
        }
    }

    /// The token to feed next, if the last step sampled one and landed.
    pub(crate) fn sampled(&self) -> Option<u32> {
        self.sampled
    }

    /// Keeps a snapshot of the current position. Failing to is no harm but to the time of later prompts. No step may be in flight.
    pub(crate) fn keep_snapshot(&mut self, backend: &mut dyn Backend) {
        if self.last_snapshot() == Some(self.position) {
            return;
        }
        if self.snapshots.len() == MAX_SNAPSHOTS {
            self.drop_snapshot(backend, self.most_crowded());
        }
        match backend.snapshot(self.state) {
            Ok(id) => self.snapshots.push(Snapshot { position: self.position, id, holders: Arc::default() }),
            Err(error) => tracing::warn!(%error, "no snapshot kept"),
        }
    }

    /// The snapshot without which the least has to be computed again: the one whose neighbours are closest to each other. The start of
    /// the session counts as a neighbour, and the last snapshot always stays.
    fn most_crowded(&self) -> usize {
        let position = |index: usize| self.snapshots[index].position;
        let gap = |index: usize| position(index + 1) - if index == 0 { 0 } else { position(index - 1) };
        (0..self.snapshots.len() - 1).min_by_key(|index| gap(*index)).unwrap_or(0)
    }

    /// Frees what it holds on the device. No step may be in flight.
    pub(crate) fn free(mut self, backend: &mut dyn Backend) {
        while !self.snapshots.is_empty() {
            self.drop_snapshot(backend, self.snapshots.len() - 1);
        }
        free_state(backend, self.state);
    }

    fn drop_snapshot(&mut self, backend: &mut dyn Backend, index: usize) {
        let snapshot = self.snapshots.remove(index);
        if Arc::into_inner(snapshot.holders).is_some()
            && let Err(error) = backend.free_snapshot(snapshot.id)
        {
            tracing::warn!(%error, "a snapshot could not be freed");
        }
    }
}

fn free_state(backend: &mut dyn Backend, state: StateId) {
    if let Err(error) = backend.free_state(state) {
        tracing::warn!(%error, "a state could not be freed");
    }
}

/// How many tokens two sequences have in common at their beginning.
pub(crate) fn common_length(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
