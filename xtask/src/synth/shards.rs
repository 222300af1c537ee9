//! Tensors to safetensors shards and their index, one thread per shard and two at a time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result};
use lily_synth::{Order, Spec, write_shard};
use serde_json::{Map, Value, json};

/// A writer makes about 3 GB/s, more than a disk takes; the second one fills while the first waits for the disk.
const WRITERS: usize = 2;

/// Writes all shards and the index, replacing those of an earlier run; returns the bytes of tensor data.
pub fn write(out: &Path, tensors: &[Spec], seed: u64, order: Order, shard_bytes: u64) -> Result<u64> {
    remove_old(out)?;
    let shards = split(tensors, shard_bytes);
    let names: Vec<String> = (1..=shards.len()).map(|i| shard_name(i, shards.len())).collect();
    let queue = Mutex::new(names.iter().zip(&shards));
    let next = || queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next();
    std::thread::scope(|scope| {
        let worker = || -> Result<()> {
            while let Some((name, shard)) = next() {
                let path = out.join(name);
                File::create(&path)
                    .and_then(|mut file| write_shard(&mut file, shard.clone(), seed, order))
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
            Ok(())
        };
        let workers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let total = tensors.iter().map(|spec| spec.bytes() as u64).sum();
    let mut placed: Vec<(String, Value)> = Vec::new();
    for (name, shard) in names.iter().zip(&shards) {
        placed.extend(shard.iter().map(|spec| (spec.name.clone(), json!(name))));
    }
    placed.sort_by(|a, b| a.0.cmp(&b.0));
    let weight_map: Map<String, Value> = placed.into_iter().collect();
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    super::write_json(&out.join("model.safetensors.index.json"), &index)?;
    Ok(total)
}

fn remove_old(out: &Path) -> Result<()> {
    for entry in std::fs::read_dir(out)? {
        let path: PathBuf = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) {
            std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

fn shard_name(number: usize, of: usize) -> String {
    if of == 1 { "model.safetensors".into() } else { format!("model-{number:05}-of-{of:05}.safetensors") }
}

/// A running sum in module order against the limit, as MLX splits.
fn split(tensors: &[Spec], shard_bytes: u64) -> Vec<Vec<&Spec>> {
    let mut shards: Vec<Vec<&Spec>> = vec![Vec::new()];
    let mut size = 0;
    for spec in tensors {
        let bytes = spec.bytes() as u64;
        let last = shards.len() - 1;
        if size + bytes > shard_bytes && !shards[last].is_empty() {
            shards.push(vec![spec]);
            size = bytes;
        } else {
            shards[last].push(spec);
            size += bytes;
        }
    }
    shards
}

#[cfg(test)]
mod tests {
    use lily_model::{Checkpoint, Shape};
    use lily_synth::{TINY, config, tensors};

    use super::super::write_json;
    use super::*;

    fn synthetic(shape: &Shape, order: Order, shard_bytes: u64) -> (tempfile::TempDir, Checkpoint) {
        let directory = tempfile::tempdir().unwrap();
        write_json(&directory.path().join("config.json"), &config(shape).unwrap()).unwrap();
        write(directory.path(), &tensors(shape), 1, order, shard_bytes).unwrap();
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        (directory, checkpoint)
    }

    #[test]
    fn weights_do_not_depend_on_shards_and_alignment() {
        let (_one, one) = synthetic(&TINY, Order::Aligned, u64::MAX);
        let (directory, many) = synthetic(&TINY, Order::Misaligned, 1 << 19);
        assert!(directory.path().join("model-00002-of-00007.safetensors").is_file());
        for (a, b) in one.weights.matrices().zip(many.weights.matrices()) {
            assert_eq!(a.name, b.name);
            assert!(a.codes[..] == b.codes[..] && a.scales[..] == b.scales[..] && a.biases[..] == b.biases[..]);
            assert!(a.codes.as_ptr().addr().is_multiple_of(4) && a.scales.as_ptr().addr().is_multiple_of(2));
            assert!(!b.codes.as_ptr().addr().is_multiple_of(2), "{} is aligned", b.name);
        }
        assert_eq!(one.weights.norm, many.weights.norm);
    }

    #[test]
    fn another_run_replaces_all_shards() {
        let (directory, _) = synthetic(&TINY, Order::Misaligned, 1 << 19);
        write(directory.path(), &tensors(&TINY), 2, Order::Misaligned, u64::MAX).unwrap();
        Checkpoint::open(directory.path()).unwrap();
        let mut files: Vec<_> = directory.path().read_dir().unwrap().map(|e| e.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["config.json", "model.safetensors", "model.safetensors.index.json"]);
    }
}
