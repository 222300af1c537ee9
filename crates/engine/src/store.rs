//! Sessions on the disk: what left the memory, and what a restart is to find again.
//!
//! One file per session, written under another name, synced and renamed, so that a file with the right name is whole. Writing costs
//! the engine a copy into the system's memory; a thread waits for the disk and renames. A file holds
//!
//! ```text
//! "lily session 1\n", number of tokens u64, the tokens u32 each, the state as the backend exports it
//! ```
//!
//! all little endian. The state carries a fingerprint of the checkpoint and a sum of its own: the backend refuses one that is
//! damaged or of another model. A file that is refused is deleted with a warning and never looked at again.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

use lily_backend::export::CheckSum;
use lily_backend::{Backend, StateId};

use crate::session::Session;

const MAGIC: &[u8; 15] = b"lily session 1\n";
const SUFFIX: &str = "session";
const UNFINISHED: &str = "unfinished";
const LOCK: &str = "lock";
/// Bytes before the tokens.
const HEADER: usize = MAGIC.len() + 8;
/// Sessions of fewer tokens are computed again sooner than they are read.
const LEAST_TOKENS: usize = 256;
/// More tokens than any context has: what a damaged header may say.
const MOST_TOKENS: u64 = 1 << 24;

/// Where sessions are stored, and how many.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The folder; made if it is not there. Only one process may use it.
    pub folder: PathBuf,
    /// Most bytes of all files.
    pub bytes: u64,
}

/// A stored session.
pub(crate) struct Entry {
    pub(crate) tokens: Vec<u32>,
    file: PathBuf,
    bytes: u64,
    used: SystemTime,
    /// Whether the file is on the disk under its name.
    finished: bool,
}

/// The sessions of a folder.
pub(crate) struct Store {
    options: StoreOptions,
    entries: Vec<Entry>,
    finisher: Finisher,
    /// Locked as long as the store is open.
    _lock: File,
}

/// The thread that sees written files on the disk and gives them their names.
struct Finisher {
    /// `None`: no more come.
    written: Option<Sender<Written>>,
    finished: Receiver<(PathBuf, io::Result<()>)>,
    thread: Option<JoinHandle<()>>,
}

/// A file whose bytes were all handed to the system.
struct Written {
    open: File,
    unfinished: PathBuf,
    file: PathBuf,
}

impl Store {
    /// Looks at what is there. Files that cannot be read are deleted with a warning, and so are unfinished ones.
    ///
    /// # Errors
    /// If the folder cannot be made or read, or another process uses it.
    pub(crate) fn open(options: StoreOptions) -> io::Result<Store> {
        fs::create_dir_all(&options.folder)?;
        let lock = File::create(options.folder.join(LOCK))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another process stores its sessions there"),
            TryLockError::Error(error) => error,
        })?;
        let mut entries = Vec::new();
        for file in fs::read_dir(&options.folder)? {
            let file = file?.path();
            match file.extension().and_then(|suffix| suffix.to_str()) {
                Some(SUFFIX) => match read_entry(&file) {
                    Ok(entry) => entries.push(entry),
                    Err(error) => discard(&file, &error.to_string()),
                },
                Some(UNFINISHED) => discard(&file, "it was not written to its end"),
                _ => {}
            }
        }
        Ok(Store { options, entries, finisher: Finisher::start()?, _lock: lock })
    }

    /// The tokens of the longest stored session that is a beginning of a prompt and shorter than all of it.
    pub(crate) fn find(&self, prompt: &[u32]) -> Option<&[u32]> {
        let tokens = self.entries.iter().map(|entry| &entry.tokens[..]);
        tokens
            .filter(|tokens| tokens.len() < prompt.len() && prompt.starts_with(tokens))
            .max_by_key(|tokens| tokens.len())
    }

    /// Reads the session with these tokens into a state. `false`: it cannot be used and is gone.
    pub(crate) fn load(&mut self, tokens: &[u32], backend: &mut dyn Backend, state: StateId) -> bool {
        if self.entries.iter().any(|entry| entry.tokens == tokens && !entry.finished) {
            self.finish();
        }
        let Some(index) = self.entries.iter().position(|entry| entry.tokens == tokens) else { return false };
        match read_state(&self.entries[index], backend, state) {
            Ok(()) => {
                self.entries[index].used = SystemTime::now();
                let touch = File::open(&self.entries[index].file).and_then(|file| file.set_modified(SystemTime::now()));
                if let Err(error) = touch {
                    tracing::debug!(%error, "the time of a stored session could not be set");
                }
                true
            }
            Err(reason) => {
                discard(&self.entries.remove(index).file, &reason);
                false
            }
        }
    }

    /// Stores a session and frees it. What is stored is its last snapshot, where the next turn goes on even if it shows the answer
    /// differently; without one, all of it. Failing to is no harm but to the time of later prompts.
    pub(crate) fn save(&mut self, backend: &mut dyn Backend, mut session: Session) {
        if let Some(position) = session.last_snapshot()
            && let Err(error) = session.rewind(backend, position)
        {
            tracing::warn!(%error, "a session could not be stored");
            return session.free(backend);
        }
        let tokens = session.tokens();
        if tokens.len() >= LEAST_TOKENS && !self.entries.iter().any(|entry| entry.tokens.starts_with(tokens)) {
            match self.write(backend, session.state(), tokens) {
                Ok(entry) => {
                    self.entries.push(entry);
                    self.take_finished();
                    self.keep_within_limit();
                }
                Err(error) => tracing::warn!("a session could not be stored: {error}"),
            }
        }
        session.free(backend);
    }

    /// Waits until all that was saved is on the disk.
    pub(crate) fn finish(&mut self) {
        while self.entries.iter().any(|entry| !entry.finished)
            && let Ok((file, result)) = self.finisher.finished.recv()
        {
            self.note_finished(&file, result);
        }
        self.keep_within_limit();
    }

    fn take_finished(&mut self) {
        while let Ok((file, result)) = self.finisher.finished.try_recv() {
            self.note_finished(&file, result);
        }
    }

    fn note_finished(&mut self, file: &Path, result: io::Result<()>) {
        match result {
            Ok(()) => {
                self.entries.iter_mut().filter(|entry| entry.file == file).for_each(|entry| entry.finished = true)
            }
            Err(error) => {
                tracing::warn!("a session could not be stored: {error}");
                self.entries.retain(|entry| entry.file != file);
            }
        }
    }

    fn write(&self, backend: &mut dyn Backend, state: StateId, tokens: &[u32]) -> Result<Entry, String> {
        let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        let name = name_of(&ids);
        let unfinished = self.options.folder.join(&name).with_extension(UNFINISHED);
        let file = self.options.folder.join(&name).with_extension(SUFFIX);
        match write_state(&unfinished, &ids, backend, state) {
            Ok((open, bytes)) => {
                self.finisher.take(Written { open, unfinished, file: file.clone() })?;
                Ok(Entry { tokens: tokens.to_vec(), file, bytes, used: SystemTime::now(), finished: false })
            }
            Err(error) => {
                // It may not even be there.
                let _ = fs::remove_file(&unfinished);
                Err(error)
            }
        }
    }

    /// Deletes the longest unused files while all together are too large.
    fn keep_within_limit(&mut self) {
        while self.entries.iter().map(|entry| entry.bytes).sum::<u64>() > self.options.bytes {
            let finished = self.entries.iter().enumerate().filter(|(_, entry)| entry.finished);
            let oldest = finished.min_by_key(|(_, entry)| entry.used).map(|(index, _)| index);
            let Some(oldest) = oldest else { return };
            let entry = self.entries.swap_remove(oldest);
            if let Err(error) = fs::remove_file(&entry.file) {
                tracing::warn!(%error, file = %entry.file.display(), "a stored session could not be deleted");
            }
        }
    }
}

impl Finisher {
    fn start() -> io::Result<Finisher> {
        let (written, to_finish) = channel::<Written>();
        let (done, finished) = channel();
        let thread = std::thread::Builder::new().name("session files".into()).spawn(move || {
            for file in to_finish {
                let result = file.finish();
                // The store waits for the thread before it is gone.
                let _ = done.send((file.file, result));
            }
        })?;
        Ok(Finisher { written: Some(written), finished, thread: Some(thread) })
    }

    fn take(&self, file: Written) -> Result<(), String> {
        let sent = self.written.as_ref().map(|written| written.send(file));
        sent.and_then(Result::ok).ok_or_else(|| "the thread that finishes files has ended".to_owned())
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        self.written = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that finishes session files ended by a panic");
        }
    }
}

impl Written {
    fn finish(&self) -> io::Result<()> {
        let result = self.open.sync_all().and_then(|()| fs::rename(&self.unfinished, &self.file));
        if result.is_err() {
            // What is left is deleted at the next start.
            let _ = fs::remove_file(&self.unfinished);
        }
        result
    }
}

/// Writes a whole file; gives it and its size.
fn write_state(file: &Path, ids: &[u8], backend: &mut dyn Backend, state: StateId) -> Result<(File, u64), String> {
    let io = |error: io::Error| error.to_string();
    let mut out = BufWriter::with_capacity(1 << 20, File::create(file).map_err(io)?);
    out.write_all(MAGIC).map_err(io)?;
    out.write_all(&(ids.len() as u64 / 4).to_le_bytes()).map_err(io)?;
    out.write_all(ids).map_err(io)?;
    backend.export(state, &mut out).map_err(|e| e.to_string())?;
    let file = out.into_inner().map_err(|e| e.to_string())?;
    let bytes = file.metadata().map_err(io)?.len();
    Ok((file, bytes))
}

/// Reads what [`write_state`] wrote into a state.
fn read_state(entry: &Entry, backend: &mut dyn Backend, state: StateId) -> Result<(), String> {
    let mut from = BufReader::new(File::open(&entry.file).map_err(|e| e.to_string())?);
    let before = (HEADER + 4 * entry.tokens.len()) as u64;
    from.seek(SeekFrom::Start(before)).map_err(|e| e.to_string())?;
    backend.import(state, &mut from).map_err(|e| e.to_string())?;
    if from.read(&mut [0]).map_err(|e| e.to_string())? > 0 {
        return Err("it goes on behind its end".into());
    }
    match backend.position(state) {
        Ok(position) if position == entry.tokens.len() => Ok(()),
        _ => Err("its state has other tokens".into()),
    }
}

/// Name of the file of a session with these tokens, as bytes.
fn name_of(ids: &[u8]) -> String {
    let mut sum = CheckSum::new();
    sum.add(ids);
    format!("{:016x}-{}", sum.value(), ids.len() / 4)
}

fn read_entry(file: &Path) -> io::Result<Entry> {
    let damaged = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let mut from = BufReader::new(File::open(file)?);
    let metadata = from.get_ref().metadata()?;
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let (magic, numbers) = header.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(damaged("it is no stored session of this version"));
    }
    let count = u64::from_le_bytes(numbers.try_into().map_err(|_| damaged("its header is short"))?);
    if count == 0 || count > MOST_TOKENS || 4 * count > metadata.len() {
        return Err(damaged("its header is damaged"));
    }
    let mut ids = vec![0; 4 * count as usize];
    from.read_exact(&mut ids)?;
    if file.file_stem().and_then(|name| name.to_str()) != Some(&name_of(&ids)) {
        return Err(damaged("its tokens are not those of its name"));
    }
    let (ids, _) = ids.as_chunks::<4>();
    let tokens = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
    Ok(Entry { tokens, file: file.to_owned(), bytes: metadata.len(), used: metadata.modified()?, finished: true })
}

fn discard(file: &Path, reason: &str) {
    tracing::warn!(file = %file.display(), reason, "a stored session is discarded");
    if let Err(error) = fs::remove_file(file) {
        tracing::warn!(%error, file = %file.display(), "it could not be deleted");
    }
}
