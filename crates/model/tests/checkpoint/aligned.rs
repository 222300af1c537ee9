//! The same checkpoint in aligned shards.

use std::path::Path;

use crate::parts::testdata;
use lily_model::align::{Aligned, align};
use lily_model::safetensors::{Tensor, Tensors};
use lily_model::{Checkpoint, Source};

fn tiny() -> Source {
    Source::Directory(testdata("tiny"))
}

fn write(aligned: &Aligned, directory: &Path) {
    for shard in &aligned.shards {
        let data = shard.tensors.iter().flat_map(|(_, tensor)| tensor.bytes.iter().copied());
        let file: Vec<u8> = shard.header.iter().copied().chain(data).collect();
        assert_eq!(file.len(), shard.bytes());
        std::fs::write(directory.join(&shard.name), file).unwrap();
    }
    if let Some((name, content)) = &aligned.index {
        std::fs::write(directory.join(name), content).unwrap();
    }
    std::fs::copy(testdata("tiny/config.json"), directory.join("config.json")).unwrap();
}

/// In one shard and in several: the same names, types and bytes; parts that lily does not run are in shards of their own.
#[test]
fn an_aligned_checkpoint_has_the_same_tensors() {
    for (shard_bytes, several) in [(usize::MAX, false), (200_000, true)] {
        let aligned = align(&tiny(), shard_bytes).unwrap();
        let is_unused = |name: &str| !name.starts_with("language_model.");
        for shard in &aligned.shards {
            let unused = shard.tensors.iter().filter(|(name, _)| is_unused(name)).count();
            assert!(unused == 0 || unused == shard.tensors.len(), "{}", shard.name);
        }
        assert_eq!(aligned.shards.len() > 2, several);
        let directory = tempfile::tempdir().unwrap();
        write(&aligned, directory.path());
        let same = Tensors::open_all(&Source::Directory(directory.path().to_path_buf())).unwrap();
        let all = |tensors: &Tensors| -> Vec<_> {
            let of = |(name, t): (&String, &Tensor)| (name.clone(), t.dtype, t.shape.clone(), t.bytes.to_vec());
            tensors.iter().map(of).collect()
        };
        assert!(all(&Tensors::open_all(&tiny()).unwrap()) == all(&same));
        Checkpoint::open(directory.path()).unwrap();
    }
}

/// Nothing lies between the matrices of a stack, and the first begins aligned unless a stack before it is of an odd length.
#[test]
fn matrices_that_are_read_together_are_adjacent() {
    let directory = tempfile::tempdir().unwrap();
    write(&align(&tiny(), 200_000).unwrap(), directory.path());
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let (mut aligned, mut all) = (0, 0);
    for stack in checkpoint.weights.stacks() {
        for part in [0, 1, 2] {
            let parts = stack.iter().map(|m| [&m.codes, &m.scales, &m.biases][part]);
            let places: Vec<_> = parts.map(|bytes| (bytes.place().unwrap(), bytes.len())).collect();
            for pair in places.windows(2) {
                let (((file, start), bytes), ((next_file, next), _)) = (&pair[0], &pair[1]);
                assert!(file == next_file && start + bytes == *next, "{}", stack[0].name);
            }
            let bytes: usize = places.iter().map(|(_, bytes)| bytes).sum();
            all += bytes;
            aligned += if places[0].0.1.is_multiple_of(16) { bytes } else { 0 };
        }
    }
    // The tiny model is so narrow that some of its stacks have lengths of 8 more than a multiple of 16.
    assert!(aligned * 100 > all * 99, "{aligned} of {all} bytes");
}
