//! Checkpoints that are used where they are mapped, as a whole or in part.

use std::path::Path;

use lily_backend::Backend;
use lily_model::align::{Aligned, align};
use lily_model::{Checkpoint, Shape, Source};
use lily_reference::golden::tiny_checkpoint;
use tempfile::TempDir;

use super::{WIDE, load_with, logits};
use crate::KvDtype;
use crate::emulated::Emulated;
use crate::load::Mapped;

/// The tiny checkpoint has three of these.
const SHARD_BYTES: usize = 1_000_000;

/// Writes an aligned checkpoint, but the shards that `spoils` names with data two bytes further on.
fn written(aligned: &Aligned, config: &[u8], spoils: impl Fn(usize) -> bool) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (index, shard) in aligned.shards.iter().enumerate() {
        let mut file = shard.header.clone();
        if spoils(index) {
            file.extend(b"  ");
            let length = file.len() as u64 - 8;
            file[..8].copy_from_slice(&length.to_le_bytes());
        }
        shard.tensors.iter().for_each(|(_, tensor)| file.extend_from_slice(&tensor.bytes));
        std::fs::write(directory.path().join(&shard.name), file).expect("written");
    }
    if let Some((name, content)) = &aligned.index {
        std::fs::write(directory.path().join(name), content).expect("written");
    }
    std::fs::write(directory.path().join("config.json"), config).expect("written");
    directory
}

/// Logits of a prompt through the kernels of one token and of many, and an export.
fn answers(directory: &Path) -> ([usize; 2], Vec<f32>, Vec<u8>) {
    let mut backend = load_with(&Checkpoint::open(directory).expect("opened"), KvDtype::Bf16, 7);
    let memory = backend.memory();
    let state = backend.new_state(64).expect("a state");
    let mut all = logits(&mut backend, state, &[5, 6, 7]);
    all.extend(logits(&mut backend, state, &(20..50).collect::<Vec<u32>>()));
    let mut exported = Vec::new();
    backend.export(state, &mut exported).expect("exported");
    ([memory.weights_mapped, memory.weights_owned], all, exported)
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn aligned_and_mixed_checkpoints_give_the_same_bits_with_less_memory() {
    let source = Source::Directory(tiny_checkpoint());
    let config = std::fs::read(tiny_checkpoint().join("config.json")).expect("read");
    let aligned = align(&source, SHARD_BYTES).expect("aligned");
    let ([mapped, owned], expected, exported) = answers(&tiny_checkpoint());
    assert_eq!(mapped, 0);
    let weights = Checkpoint::open(tiny_checkpoint()).expect("opened").weights.quantized_bytes();
    for spoiled in [None, Some(1)] {
        let directory = written(&aligned, &config, |index| Some(index) == spoiled);
        let ([now_mapped, now_owned], got, now_exported) = answers(directory.path());
        assert!(expected.iter().map(|x| x.to_bits()).eq(got.iter().map(|x| x.to_bits())), "{spoiled:?}");
        assert!(exported == now_exported, "{spoiled:?}");
        let spoiled_bytes = spoiled.map_or(0, |index| aligned.shards[index].bytes());
        // What is mapped is not copied; the widths of the tiny model leave a hundredth unaligned.
        assert!(owned - now_owned >= (weights - spoiled_bytes) * 98 / 100, "{spoiled:?}: {owned} to {now_owned}");
        assert!(now_mapped + spoiled_bytes >= weights * 98 / 100, "{spoiled:?}: {now_mapped} of {weights}");
    }
}

/// At the widths of the full-size model no matrix is copied, whether or not a file has to end before it does.
#[test]
fn of_full_size_layers_nothing_is_copied() {
    let source = lily_synth::in_memory("wide", &Shape { experts: 24, ..WIDE }, 1).expect("a checkpoint");
    let config = source.read("config.json").expect("read");
    for shard_bytes in [usize::MAX, 50_000_000] {
        let aligned = align(&source, shard_bytes).expect("aligned");
        let directory = written(&aligned, &config, |_| false);
        let checkpoint = Checkpoint::open(directory.path()).expect("opened");
        let mut gpu = Emulated::new(0);
        let mapped = Mapped::new(&mut gpu, &checkpoint.weights).expect("mapped");
        assert_eq!(mapped.to_copy(&checkpoint.weights.stacks()), 0);
        // A file that is not aligned is not bound at all.
        let directory = written(&aligned, &config, |_| true);
        let checkpoint = Checkpoint::open(directory.path()).expect("opened");
        let mapped = Mapped::new(&mut gpu, &checkpoint.weights).expect("none");
        assert_eq!(mapped.bytes(), 0);
        assert_eq!(mapped.to_copy(&checkpoint.weights.stacks()), checkpoint.weights.quantized_bytes());
    }
}
