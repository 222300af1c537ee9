//! Sessions that no request uses, kept for the prompts to come.
//!
//! A prompt takes the session that has the longest beginning of it. A scan over all is enough: there are dozens of sessions, and
//! comparing a prompt of 16,000 tokens with one takes microseconds, while computing a single one of them takes a thousand times
//! as long.

use std::collections::VecDeque;

use lily_backend::{Backend, Caps, StateId};

use crate::session::Session;

/// Parked sessions, the longest unused one first.
#[derive(Default)]
pub(crate) struct PrefixCache {
    parked: VecDeque<Session>,
}

/// A parked session and how much of a prompt it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hit {
    pub(crate) state: StateId,
    /// Tokens that need not be computed.
    pub(crate) reusable: usize,
    /// Tokens that the session has beyond them.
    pub(crate) lost: usize,
}

impl PrefixCache {
    /// The session with the longest usable beginning of a prompt; of several the one that loses least by it, and of these
    /// the one used last.
    pub(crate) fn find(&self, prompt: &[u32]) -> Option<Hit> {
        let hits = self.parked.iter().map(|session| {
            let reusable = session.reusable(prompt);
            Hit { state: session.state(), reusable, lost: session.tokens().len() - reusable }
        });
        hits.filter(|hit| hit.reusable > 0).max_by_key(|hit| (hit.reusable, std::cmp::Reverse(hit.lost)))
    }

    pub(crate) fn get(&self, state: StateId) -> Option<&Session> {
        self.parked.iter().find(|session| session.state() == state)
    }

    /// Takes a session out.
    pub(crate) fn take(&mut self, state: StateId) -> Option<Session> {
        let index = self.parked.iter().position(|session| session.state() == state)?;
        self.parked.remove(index)
    }

    /// Keeps a session whose request is over. One that has nothing is freed.
    pub(crate) fn park(&mut self, backend: &mut dyn Backend, session: Session) {
        if session.tokens().is_empty() {
            return session.free(backend);
        }
        self.parked.push_back(session);
    }

    /// Takes out the session that was not used for the longest time, but not `spared`.
    pub(crate) fn oldest(&mut self, spared: Option<StateId>) -> Option<Session> {
        let index = self.parked.iter().position(|session| Some(session.state()) != spared)?;
        self.parked.remove(index)
    }

    #[cfg(test)]
    pub(crate) fn tokens(&self) -> Vec<Vec<u32>> {
        self.parked.iter().map(|session| session.tokens().to_vec()).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.parked.len()
    }

    /// Device memory of all, in bytes.
    pub(crate) fn bytes(&self, caps: &Caps) -> usize {
        self.parked.iter().map(|session| session.bytes(caps)).sum()
    }
}
