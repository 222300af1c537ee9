//! `lily align`: the same checkpoint in files that a Mac's GPU can use where they are mapped.
//!
//! Everything is written into `DIR.part`, compared with what it was made of, and only then gets its name. Shards that an earlier call
//! has finished are not written again.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::DecimalBytes;
use lily_model::Source;
use lily_model::align::{self, Aligned, Shard};
use lily_model::safetensors::{INDEX, Tensor, Tensors};

use crate::exit::Usage;
use crate::pull::progress::{FileProgress, Progress};
use crate::pull::{default_model_dir, part_path, pulled_model};

/// As large as published shards are, and less than any Mac with room for the model takes as one buffer.
const SHARD_BYTES: usize = 5_000_000_000;
/// Bytes read at once; larger ones gain nothing.
const BUFFER_BYTES: usize = 1 << 20;
/// Keeps a second call away from the unfinished directory.
const LOCK: &str = ".lily-align";

/// Arguments of `lily align`.
#[derive(clap::Args)]
#[command(
    after_help = "A Mac's GPU uses such files without copying them. No byte of a tensor changes: everything that reads the one \
                        directory reads the other. An interrupted call goes on where it stopped. The directory is printed to stdout."
)]
pub struct AlignArgs {
    /// Checkpoint directory. Default: the pulled model.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Directory to be made. Default: beside the pulled model, where all commands prefer it.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Writes the aligned checkpoint and prints its directory to stdout.
///
/// # Errors
/// One line that says what to do. What was written stays, and the next call goes on from it.
pub fn align(args: &AlignArgs) -> Result<()> {
    let from = args.model.clone().or_else(pulled_model).ok_or_else(|| {
        Usage("there is no model to align: `lily pull` brings one, or name a checkpoint directory with --model".into())
    })?;
    let to = args.dir.clone().map_or_else(default_aligned_dir, Ok)?;
    if to.exists() {
        return Err(Usage(format!("{} is there already: delete it, or choose another with --dir", to.display())).into());
    }
    let source = Source::Directory(from.clone());
    let aligned = align::align(&source, SHARD_BYTES)?;
    let part = part_path(&to);
    fs::create_dir_all(&part).map_err(|error| disk_error(&part, &error))?;
    let lock = lock(&part)?;
    check_space(&part, &aligned)?;
    let total: usize = aligned.shards.iter().map(Shard::bytes).sum();
    let progress = Progress::new(2 * total as u64);
    for shard in &aligned.shards {
        let path = part.join(&shard.name);
        let file_progress = progress.file(&shard.name, shard.bytes() as u64);
        match is_whole(&path, shard) {
            true => file_progress.add(shard.bytes() as u64),
            false => write(shard, &path, &file_progress).map_err(|error| disk_error(&path, &error))?,
        }
    }
    if let Some((name, content)) = &aligned.index {
        let path = part.join(name);
        fs::write(&path, content).map_err(|error| disk_error(&path, &error))?;
    }
    copy_others(&from, &part)?;
    compare(&source, &part, &progress.file("compared with the original", total as u64))?;
    drop(lock);
    fs::remove_file(part.join(LOCK)).map_err(|error| disk_error(&part, &error))?;
    fs::rename(&part, &to).map_err(|error| disk_error(&to, &error))?;
    progress.note(&format!("every tensor is the same as in {}, which may be deleted", from.display()));
    writeln!(io::stdout(), "{}", to.display()).context("stdout")
}

/// The aligned checkpoint, if it is where [`align()`] puts it by itself: it has its name only once it is complete.
pub fn aligned_model() -> Option<PathBuf> {
    default_aligned_dir().ok().filter(|dir| dir.is_dir())
}

fn default_aligned_dir() -> Result<PathBuf> {
    let pulled = default_model_dir()?;
    let name = pulled.file_name().unwrap_or_default().to_string_lossy();
    Ok(pulled.with_file_name(format!("{name}-aligned")))
}

fn lock(part: &Path) -> Result<File> {
    let path = part.join(LOCK);
    let file = File::create(&path).map_err(|error| disk_error(&path, &error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("another `lily align` is at work in {}: wait for it", part.display()),
        Err(TryLockError::Error(error)) => Err(disk_error(&path, &error)),
    }
}

fn is_whole(path: &Path, shard: &Shard) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.len() == shard.bytes() as u64)
}

/// Refuses to start what cannot end.
fn check_space(part: &Path, aligned: &Aligned) -> Result<()> {
    let missing = aligned.shards.iter().filter(|shard| !is_whole(&part.join(&shard.name), shard));
    let needed = missing.map(|shard| shard.bytes() as u64).sum::<u64>();
    let free = fs4::available_space(part).map_err(|error| disk_error(part, &error))?;
    ensure!(
        needed <= free,
        "{} are missing on the disk of {}: the aligned files need {}, and {} are free; make room or choose another directory \
         with --dir",
        DecimalBytes(needed - free),
        part.display(),
        DecimalBytes(needed),
        DecimalBytes(free)
    );
    Ok(())
}

/// Writes a shard, which has its name only when it is whole.
fn write(shard: &Shard, path: &Path, progress: &FileProgress<'_>) -> io::Result<()> {
    let unfinished = part_path(path);
    let mut file = File::create(&unfinished)?;
    file.write_all(&shard.header)?;
    progress.add(shard.header.len() as u64);
    let mut buffer = vec![0; BUFFER_BYTES];
    for (_, tensor) in &shard.tensors {
        in_pieces(tensor.bytes.len(), |start, count| {
            tensor.bytes.read_into(start, &mut buffer[..count])?;
            file.write_all(&buffer[..count])?;
            progress.add(count as u64);
            Ok(())
        })?;
    }
    file.sync_all()?;
    fs::rename(&unfinished, path)
}

fn in_pieces(bytes: usize, mut work: impl FnMut(usize, usize) -> io::Result<()>) -> io::Result<()> {
    (0..bytes).step_by(BUFFER_BYTES).try_for_each(|start| work(start, BUFFER_BYTES.min(bytes - start)))
}

/// Copies what is no shard: configuration, tokenizer, template, licence. Hidden files and unfinished ones stay where they are.
fn copy_others(from: &Path, part: &Path) -> Result<()> {
    for entry in fs::read_dir(from).map_err(|error| disk_error(from, &error))? {
        let path = entry.map_err(|error| disk_error(from, &error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_weights = name.ends_with(".safetensors") || name == INDEX;
        if is_weights || name.starts_with('.') || name.ends_with(".part") || !path.is_file() {
            continue;
        }
        let copy = part.join(name);
        fs::copy(&path, &copy).map_err(|error| disk_error(&copy, &error))?;
    }
    Ok(())
}

/// Reads back what was written: every tensor of the one is in the other, with the same bytes.
fn compare(source: &Source, part: &Path, progress: &FileProgress<'_>) -> Result<()> {
    let (old, new) = (Tensors::open_all(source)?, Tensors::open_all(&Source::Directory(part.to_path_buf()))?);
    let differs =
        |name: &str| format!("{name} in {0} is not what it was made of: delete {0} and start again", part.display());
    ensure!(old.iter().map(|(name, _)| name).eq(new.iter().map(|(name, _)| name)), differs("the list of tensors"));
    for ((name, old), (_, new)) in old.iter().zip(new.iter()) {
        ensure!(same(old, new, progress).context(differs(name))?, differs(name));
    }
    Ok(())
}

fn same(old: &Tensor, new: &Tensor, progress: &FileProgress<'_>) -> io::Result<bool> {
    if (old.dtype, &old.shape, old.bytes.len()) != (new.dtype, &new.shape, new.bytes.len()) {
        return Ok(false);
    }
    let [mut a, mut b] = [vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]];
    let mut same = true;
    in_pieces(old.bytes.len(), |start, count| {
        old.bytes.read_into(start, &mut a[..count])?;
        new.bytes.read_into(start, &mut b[..count])?;
        same &= a[..count] == b[..count];
        progress.add(count as u64);
        Ok(())
    })?;
    Ok(same)
}

/// What happened on the disk, where, and what to do about it.
fn disk_error(path: &Path, error: &io::Error) -> anyhow::Error {
    let advice = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room and run `lily align` again, which goes on from here"
        }
        _ => "check the disk, or choose another directory with --dir",
    };
    anyhow::anyhow!("{}: {error}: {advice}", path.display())
}
