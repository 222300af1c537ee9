//! `.lily-pull`: the lock of a download directory, and the memory of which files were verified.

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use super::disk_error;
use super::manifest::Entry;

const NAME: &str = ".lily-pull";

/// The open and locked record of one directory. The lock goes with the process, however it ends.
///
/// One line per verified file holds its name, hash, size and time of modification, so that 20 GB need not be hashed on
/// each call. Lines are only appended: one that a crash tore matches nothing, and its file is hashed again.
pub struct Record {
    dir: PathBuf,
    file: File,
    lines: HashSet<String>,
}

impl Record {
    /// Opens the record of `dir`, or fails if another process has it open.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(NAME);
        let mut file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(|error| disk_error(&path, error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!(
                    "another `lily pull` is at work in {}: wait for it, or choose another directory with --dir",
                    dir.display()
                )
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| {
                    format!("cannot lock {}: choose a directory on another file system with --dir", path.display())
                });
            }
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| disk_error(&path, error))?;
        let lines = String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect();
        Ok(Self { dir: dir.to_owned(), file, lines })
    }

    /// Whether `entry` was verified and its file has not been touched since.
    pub fn holds(&self, entry: &Entry) -> bool {
        self.line(entry).is_ok_and(|line| self.lines.contains(&line))
    }

    /// Notes that the file of `entry` has just been verified.
    pub fn add(&mut self, entry: &Entry) -> Result<()> {
        let path = self.dir.join(&entry.name);
        let line = self.line(entry).map_err(|error| disk_error(&path, error))?;
        if !self.lines.contains(&line) {
            // The leading line break closes a line that a crash may have torn.
            self.file
                .write_all(format!("\n{line}\n").as_bytes())
                .map_err(|error| disk_error(&self.dir.join(NAME), error))?;
            self.lines.insert(line);
        }
        Ok(())
    }

    fn line(&self, entry: &Entry) -> io::Result<String> {
        let metadata = fs::metadata(self.dir.join(&entry.name))?;
        let modified = metadata.modified()?.duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
        Ok(format!("{}\t{}\t{}\t{}", entry.name, entry.sha256, metadata.len(), modified.as_nanos()))
    }
}
