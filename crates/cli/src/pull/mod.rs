//! `lily pull`: brings the pinned checkpoint to this machine, resumably, and checks every byte of it.

mod download;
mod manifest;
pub mod progress;
mod record;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail};
use etcetera::BaseStrategy;
use indicatif::DecimalBytes;

pub use download::part_path;
use download::{Hub, hash_file};
use manifest::{Entry, Manifest, REPO};
use progress::Progress;
use record::Record;

/// Where the checkpoint is published.
const PUBLIC_HUB: &str = "https://huggingface.co";

/// Files at work at once. The checkpoint's bulk is four shards of about the same size, so one connection per file is as
/// parallel as several per file, and each file stays a plain prefix of itself.
const FILES_AT_ONCE: usize = 4;

/// Downloads the Qwen3.6-35B-A3B checkpoint (20.4 GB) and checks every file
#[derive(Debug, clap::Args)]
#[command(
    after_help = "An interrupted download goes on where it stopped. Proxies are taken from HTTPS_PROXY, HTTP_PROXY, ALL_PROXY \
                        and NO_PROXY. The directory is printed to stdout."
)]
pub struct PullArgs {
    /// Directory of the checkpoint [default: in the user's data directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Hash files again that were verified before, and replace those that differ
    #[arg(long)]
    verify: bool,

    /// Address of the hub or of a mirror
    #[arg(long, value_name = "URL", env = "HF_ENDPOINT", default_value = PUBLIC_HUB)]
    endpoint: String,

    /// Access token, for a private mirror
    #[arg(long, env = "HF_TOKEN", hide_env_values = true)]
    token: Option<String>,

    /// How often a request is tried again that brought nothing
    #[arg(long, value_name = "N", default_value_t = 5)]
    retries: u32,

    /// Seconds after which a silent connection is given up
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,

    /// Another list of files, for tests against a local server
    #[arg(long, value_name = "FILE", hide = true)]
    manifest: Option<PathBuf>,
}

/// Downloads what is missing of the checkpoint, verifies it and prints its directory to stdout.
///
/// # Errors
/// One line that names the file or address and what to do. What was downloaded stays, and the next call goes on from it.
pub fn pull(args: &PullArgs) -> Result<()> {
    let manifest = match &args.manifest {
        None => Manifest::embedded()?,
        Some(path) => {
            let context = || format!("--manifest {}", path.display());
            Manifest::parse(&fs::read_to_string(path).with_context(context)?).with_context(context)?
        }
    };
    let dir = args.dir.clone().map_or_else(default_model_dir, Ok)?;
    fs::create_dir_all(&dir).map_err(|error| disk_error(&dir, error))?;
    let mut record = Record::open(&dir)?;
    let wanted: Vec<&Entry> = manifest.files.iter().filter(|entry| args.verify || !record.holds(entry)).collect();
    if !wanted.is_empty() {
        check_space(&dir, &wanted)?;
        let endpoint = if args.endpoint.trim().is_empty() { PUBLIC_HUB } else { &args.endpoint };
        let hub = Hub::new(endpoint, args.token.as_deref(), args.retries, Duration::from_secs(args.timeout))?;
        let progress = Progress::new(wanted.iter().map(|entry| entry.size_bytes).sum());
        Job { dir: &dir, replace: args.verify, hub, progress }.run(&wanted, &mut record)?;
    }
    writeln!(io::stdout(), "{}", dir.display()).context("stdout")
}

/// Where `lily pull` puts the checkpoint: `lily/Qwen3.6-35B-A3B-4bit` in `$XDG_DATA_HOME` (`~/.local/share`), in
/// `~/Library/Application Support` on macOS, in `%APPDATA%` on Windows.
///
/// # Errors
/// Without a home directory.
pub fn default_model_dir() -> Result<PathBuf> {
    let home = etcetera::base_strategy::choose_native_strategy()
        .context("no home directory to put the checkpoint in: choose a directory with --dir")?;
    Ok(home.data_dir().join("lily").join(REPO.rsplit('/').next().unwrap_or(REPO)))
}

/// The pulled checkpoint, if all its files are in [`default_model_dir`] with the right sizes. (Files get their names
/// only once they are verified.)
pub fn pulled_model() -> Option<PathBuf> {
    let dir = default_model_dir().ok()?;
    is_complete(&dir, &Manifest::embedded().ok()?).then_some(dir)
}

fn is_complete(dir: &Path, manifest: &Manifest) -> bool {
    manifest.files.iter().all(|entry| file_len(&dir.join(&entry.name)) == Some(entry.size_bytes))
}

/// One call of `pull`, shared by its threads.
struct Job<'a> {
    dir: &'a Path,
    /// Whether files that are there and differ may be replaced.
    replace: bool,
    hub: Hub,
    progress: Progress,
}

impl Job<'_> {
    /// Brings and verifies all `wanted` files. The first error ends the work on the others.
    fn run(&self, wanted: &[&Entry], record: &mut Record) -> Result<()> {
        let next = AtomicUsize::new(0);
        let (outcomes, finished) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..FILES_AT_ONCE.min(wanted.len()) {
                let (next, outcomes) = (&next, outcomes.clone());
                scope.spawn(move || {
                    while let Some(entry) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let stopped = self.hub.stop.load(Ordering::Relaxed);
                        if stopped || outcomes.send((*entry, self.provide(entry))).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(outcomes);
            let mut result = Ok(());
            for (entry, outcome) in finished {
                let outcome = outcome.and_then(|()| record.add(entry));
                if outcome.is_err() && result.is_ok() {
                    self.hub.stop.store(true, Ordering::Relaxed);
                    result = outcome;
                }
            }
            result
        })
    }

    /// Makes the file of `entry` be there and right.
    fn provide(&self, entry: &Entry) -> Result<()> {
        let path = self.dir.join(&entry.name);
        let progress = self.progress.file(&entry.name, entry.size_bytes);
        if let Some(len) = file_len(&path) {
            let same = len == entry.size_bytes && hash_file(&path, &progress)? == entry.sha256;
            if same {
                progress.note(&format!("{}: verified", entry.name));
                return Ok(());
            }
            if !self.replace {
                bail!(
                    "{} is not the published file, and may be yours: move it away, replace it with `lily pull --verify`, \
                     or choose another directory with --dir",
                    path.display()
                );
            }
            progress.note(&format!("{}: not the published file; downloading it again", entry.name));
            progress.restart();
            fs::remove_file(&path).map_err(|error| disk_error(&path, error))?;
        }
        self.hub.download(entry, &path, &progress)?;
        progress.note(&format!("{}: downloaded and verified", entry.name));
        Ok(())
    }
}

/// Refuses to start what cannot end.
fn check_space(dir: &Path, wanted: &[&Entry]) -> Result<()> {
    let missing_bytes = |entry: &&Entry| {
        let path = dir.join(&entry.name);
        entry.size_bytes.saturating_sub(file_len(&path).or_else(|| file_len(&part_path(&path))).unwrap_or(0))
    };
    let needed: u64 = wanted.iter().map(missing_bytes).sum();
    let free = fs4::available_space(dir).map_err(|error| disk_error(dir, error))?;
    if needed > free {
        bail!(
            "{} are missing on the disk of {}: the download needs {}, and {} are free; make room or choose another directory with --dir",
            DecimalBytes(needed - free),
            dir.display(),
            DecimalBytes(needed),
            DecimalBytes(free)
        );
    }
    Ok(())
}

/// `None` if there is no such file.
fn file_len(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.len())
}

/// What happened on the disk, where, and what to do about it.
fn disk_error(path: &Path, error: io::Error) -> Error {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "make room and run `lily pull` again, which resumes, or choose another directory with --dir"
        }
        ErrorKind::FileTooLarge => {
            "this disk or its limits cannot hold files of 5.4 GB: choose another directory with --dir"
        }
        ErrorKind::ReadOnlyFilesystem
        | ErrorKind::PermissionDenied
        | ErrorKind::NotADirectory
        | ErrorKind::AlreadyExists => "choose a directory with --dir that can be written to",
        _ => "check the disk, or choose another directory with --dir",
    };
    anyhow!("{}: {error}: {advice}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_complete_only_with_all_files_in_full_length() {
        let dir = tempfile::tempdir().unwrap();
        let hash = "0".repeat(64);
        let manifest = Manifest::parse(&format!("a\t3\t{hash}\nb\t0\t{hash}\n")).unwrap();
        assert!(!is_complete(dir.path(), &manifest));
        fs::write(dir.path().join("a"), "abc").unwrap();
        assert!(!is_complete(dir.path(), &manifest));
        fs::write(dir.path().join("b.part"), "").unwrap();
        assert!(!is_complete(dir.path(), &manifest));
        fs::write(dir.path().join("b"), "").unwrap();
        assert!(is_complete(dir.path(), &manifest));
        fs::write(dir.path().join("a"), "ab").unwrap();
        assert!(!is_complete(dir.path(), &manifest));
    }
}
