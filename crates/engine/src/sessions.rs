//! Where requests get their sessions from, within the memory that sessions may take: from the prefix cache, from the disk, or new.

use lily_backend::{Backend, Caps, Error as BackendError, StateId};

use crate::error::{EngineError, Result};
use crate::prefix_cache::{Hit, PrefixCache};
use crate::session::Session;
use crate::store::{Store, StoreOptions};

/// A parked session whose rest has fewer tokens is not copied but cut: to compute them again, if anyone comes back to them, takes
/// less than a second of two cores and nothing of a GPU, while each copy takes the memory of a whole session, for which
/// another one may have to leave.
const CUT_WITHOUT_COPY: usize = 32;

/// An entry on the disk must save this many tokens over what is in memory: reading it costs tens of milliseconds, which a fast
/// device computes some hundred tokens in.
const WORTH_READING: usize = 512;

/// Rooms are multiples of this, so that a growing conversation does not move at every turn.
const ROOM_STEP: usize = 1024;

/// How many sessions there may be, and how large.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Most sessions, those in use included.
    pub most: usize,
    /// Most bytes of device memory for states and snapshots; `None`: whatever the device gives.
    pub memory: Option<usize>,
    /// Room for this many tokens beyond the prompt (or fewer, if the request asks for fewer), and as many more whenever they are
    /// used up. `None`: room for the whole context from the start.
    pub room: Option<usize>,
    /// Where sessions go that have no place in memory any more.
    pub store: Option<StoreOptions>,
}

/// What became of the wish for a session.
pub(crate) enum Found {
    /// Here it is; so many tokens of the prompt are in it.
    Session(Session, usize),
    /// Sessions in use have to end first.
    Later,
}

/// Sessions that no request uses, and the rules for all.
pub(crate) struct Sessions {
    options: SessionOptions,
    cache: PrefixCache,
    store: Option<Store>,
    counts: CacheCounts,
}

/// What the prefix cache did since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Prompts that found a beginning of theirs.
    pub hits: u64,
    /// Prompts that found none.
    pub misses: u64,
    /// Sessions that had to leave the memory.
    pub evictions: u64,
    /// Sessions that came back from the disk.
    pub loads: u64,
}

impl CacheCounts {
    pub(crate) fn and(self, other: CacheCounts) -> CacheCounts {
        CacheCounts {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            evictions: self.evictions + other.evictions,
            loads: self.loads + other.loads,
        }
    }
}

impl Sessions {
    pub(crate) fn new(options: SessionOptions) -> std::io::Result<Sessions> {
        let store = options.store.clone().map(Store::open).transpose()?;
        Ok(Sessions { store, ..Sessions::in_memory(options) })
    }

    /// Without a place on the disk.
    pub(crate) fn in_memory(options: SessionOptions) -> Sessions {
        Sessions { options, cache: PrefixCache::default(), store: None, counts: CacheCounts::default() }
    }

    pub(crate) fn counts(&self) -> CacheCounts {
        self.counts
    }

    pub(crate) fn parked(&self) -> usize {
        self.cache.len()
    }

    #[cfg(test)]
    pub(crate) fn parked_tokens(&self) -> Vec<Vec<u32>> {
        self.cache.tokens()
    }

    /// A session for a prompt whose answer makes it at most `longest` tokens. `in_use`: number and bytes of the sessions of other
    /// requests.
    pub(crate) fn find(
        &mut self,
        backend: &mut dyn Backend,
        prompt: &[u32],
        longest: usize,
        in_use: (usize, usize),
    ) -> Result<Found> {
        let capacity = self.capacity(backend.caps(), prompt.len(), longest);
        let hit = self.cache.find(prompt);
        let reusable = hit.map_or(0, |hit| hit.reusable);
        let mut found = self.load(backend, prompt, capacity, in_use, reusable)?;
        if let (None, Some(hit)) = (&found, hit) {
            found = self.reuse(backend, hit, capacity, in_use)?;
        }
        if found.is_none() {
            found = self.create(backend, capacity, in_use)?.map(|session| (session, 0));
        }
        let Some((session, cached)) = found else { return Ok(Found::Later) };
        match cached {
            0 => self.counts.misses += 1,
            _ => self.counts.hits += 1,
        }
        Ok(Found::Session(session, cached))
    }

    /// How much of a prompt parked sessions have.
    pub(crate) fn reusable(&self, prompt: &[u32]) -> usize {
        self.cache.find(prompt).map_or(0, |hit| hit.reusable)
    }

    /// A copy of a session in use, none of whose steps is in flight, up to a position that [`Session::reusable`] gave. `None`: there
    /// is no memory for it.
    pub(crate) fn copy(
        &mut self,
        backend: &mut dyn Backend,
        session: &Session,
        longest: usize,
        position: usize,
        in_use: (usize, usize),
    ) -> Option<Session> {
        let capacity = self.capacity(backend.caps(), position, longest).max(session.tokens().len());
        if !self.make_room_for_session(backend, capacity, in_use, None) {
            return None;
        }
        match session.fork(backend, capacity, position) {
            Ok(copy) => {
                self.counts.hits += 1;
                Some(copy)
            }
            Err(error) => {
                tracing::debug!(%error, "a session in use could not be copied");
                None
            }
        }
    }

    /// Takes a session back whose request is over.
    pub(crate) fn park(&mut self, backend: &mut dyn Backend, session: Session) {
        self.cache.park(backend, session);
    }

    /// Room for `needed` tokens and some more for a session that has less. `false`: there is none.
    pub(crate) fn grow(
        &mut self,
        backend: &mut dyn Backend,
        session: &mut Session,
        needed: usize,
        longest: usize,
        in_use: (usize, usize),
    ) -> Result<bool> {
        let capacity = self.capacity(backend.caps(), needed, longest);
        // Until the old state is freed there are two.
        if !self.make_room_for_session(backend, capacity, in_use, None) {
            return Ok(false);
        }
        match self.try_evicting(backend, |backend| session.grow(backend, capacity)) {
            Err(error) if is_out_of_memory(&error) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Whether there is memory for a snapshot more of a session in use; parked sessions leave for it.
    pub(crate) fn has_room_for_snapshot(&mut self, backend: &mut dyn Backend, in_use: (usize, usize)) -> bool {
        let bytes = backend.caps().bytes_per_state;
        self.make_room(backend, (0, bytes), in_use, None)
    }

    /// Writes the parked sessions to the disk, as far as there is one, and frees them.
    pub(crate) fn clear(&mut self, backend: &mut dyn Backend) {
        while self.evict(backend, None) {}
        if let Some(store) = &mut self.store {
            store.finish();
        }
    }

    fn capacity(&self, caps: &Caps, tokens: usize, longest: usize) -> usize {
        let Some(room) = self.options.room else { return caps.max_context };
        (tokens + room).min(longest).next_multiple_of(ROOM_STEP).min(caps.max_context)
    }

    /// The session of a hit: itself if nothing much is lost by it or there is no memory for two, else a copy.
    fn reuse(
        &mut self,
        backend: &mut dyn Backend,
        hit: Hit,
        capacity: usize,
        in_use: (usize, usize),
    ) -> Result<Option<(Session, usize)>> {
        if hit.lost >= CUT_WITHOUT_COPY && self.make_room_for_session(backend, capacity, in_use, Some(hit.state)) {
            let copy = self.cache.get(hit.state).map(|session| session.fork(backend, capacity, hit.reusable));
            match copy {
                Some(Ok(copy)) => {
                    // The original counts as used.
                    if let Some(original) = self.cache.take(hit.state) {
                        self.cache.park(backend, original);
                    }
                    return Ok(Some((copy, hit.reusable)));
                }
                Some(Err(error)) if !is_out_of_memory(&error) => {
                    tracing::warn!(%error, "a session could not be copied");
                }
                _ => {}
            }
        }
        let Some(mut session) = self.cache.take(hit.state) else { return Ok(None) };
        if let Err(error) = session.rewind(backend, hit.reusable) {
            tracing::warn!(%error, "a session could not be taken back; it starts over");
            session.free(backend);
            return Ok(None);
        }
        Ok(Some((session, hit.reusable)))
    }

    /// A session from the disk, if that saves more than the one in memory with `reusable` tokens.
    fn load(
        &mut self,
        backend: &mut dyn Backend,
        prompt: &[u32],
        capacity: usize,
        in_use: (usize, usize),
        reusable: usize,
    ) -> Result<Option<(Session, usize)>> {
        let found = self.store.as_ref().and_then(|store| store.find(prompt));
        let Some(tokens) = found.filter(|tokens| tokens.len() >= reusable + WORTH_READING) else { return Ok(None) };
        let tokens = tokens.to_vec();
        let Some(session) = self.create(backend, capacity, in_use)? else { return Ok(None) };
        let loaded = self.store.as_mut().is_some_and(|store| store.load(&tokens, backend, session.state()));
        if !loaded {
            session.free(backend);
            return Ok(None);
        }
        self.counts.loads += 1;
        Ok(Some((session.imported(backend, &tokens), tokens.len())))
    }

    /// An empty session, for which others leave. `None`: those in use have to end first.
    fn create(
        &mut self,
        backend: &mut dyn Backend,
        capacity: usize,
        in_use: (usize, usize),
    ) -> Result<Option<Session>> {
        let others = in_use.0 > 0;
        if !self.make_room_for_session(backend, capacity, in_use, None) && others {
            return Ok(None);
        }
        match self.try_evicting(backend, |backend| Session::new(backend, capacity)) {
            Err(error) if others && is_out_of_memory(&error) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Tries again for as long as the device has too little memory and a parked session can leave.
    fn try_evicting<T>(
        &mut self,
        backend: &mut dyn Backend,
        mut attempt: impl FnMut(&mut dyn Backend) -> Result<T>,
    ) -> Result<T> {
        loop {
            match attempt(backend) {
                Err(error) if is_out_of_memory(&error) && self.evict(backend, None) => {}
                result => return result,
            }
        }
    }

    fn make_room_for_session(
        &mut self,
        backend: &mut dyn Backend,
        capacity: usize,
        in_use: (usize, usize),
        spared: Option<StateId>,
    ) -> bool {
        let bytes = Session::bytes_of(backend.caps(), capacity);
        self.make_room(backend, (1, bytes), in_use, spared)
    }

    /// Lets sessions leave until `needed`, sessions and bytes, is within the limits.
    fn make_room(
        &mut self,
        backend: &mut dyn Backend,
        needed: (usize, usize),
        in_use: (usize, usize),
        spared: Option<StateId>,
    ) -> bool {
        loop {
            let sessions = needed.0 + in_use.0 + self.cache.len();
            let bytes = needed.1 + in_use.1 + self.cache.bytes(backend.caps());
            if sessions <= self.options.most && self.options.memory.is_none_or(|most| bytes <= most) {
                return true;
            }
            if !self.evict(backend, spared) {
                return false;
            }
        }
    }

    /// The longest unused session leaves the memory. `false`: there is none.
    fn evict(&mut self, backend: &mut dyn Backend, spared: Option<StateId>) -> bool {
        let Some(session) = self.cache.oldest(spared) else { return false };
        self.counts.evictions += 1;
        match &mut self.store {
            Some(store) => store.save(backend, session),
            None => session.free(backend),
        }
        true
    }
}

fn is_out_of_memory(error: &EngineError) -> bool {
    matches!(error, EngineError::Backend(error) if matches!(**error, BackendError::OutOfMemory { .. }))
}
