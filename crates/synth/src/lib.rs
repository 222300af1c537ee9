//! Checkpoints of random weights in the published format, of any shape: for measuring speed and memory.
//!
//! Every byte is a function of the seed, the tensor's name and the position in it, so tensors can be made in any order,
//! in memory or on disk, and do not depend on how they are spread over shards. Magnitudes are chosen so that the
//! residual stream, the decays and the logits stay in the range of a trained model; see [`tensors`].

#![warn(missing_docs)]

mod config;
mod fill;
mod layout;
mod shard;

pub use config::config;
pub use fill::{Fill, hash, key};
pub use layout::{Spec, tensors};
pub use shard::{Order, write_shard};

use lily_model::checkpoint::MemoryFiles;
use lily_model::{ModelError, Shape, Source};

/// The shape of `testdata/tiny`.
pub const TINY: Shape = Shape {
    hidden: 256,
    layers: 4,
    vocab: 1024,
    query_heads: 4,
    kv_heads: 2,
    delta_key_heads: 2,
    delta_value_heads: 4,
    experts: 8,
    experts_per_token: 2,
    expert_width: 64,
    shared_width: 64,
    ..Shape::QWEN36
};

/// Bytes of all tensors of a shape.
pub fn total_bytes(shape: &Shape) -> usize {
    tensors(shape).iter().map(Spec::bytes).sum()
}

/// Configuration and weights in memory, without tokenizer. Elements lie as unaligned as in the published files.
/// Messages call it `name`. Fails if no loader takes the shape.
pub fn in_memory(name: &str, shape: &Shape, seed: u64) -> Result<Source, ModelError> {
    let config = config(shape)?.to_string().into_bytes();
    let tensors = tensors(shape);
    // Header entries take less than 256 bytes each.
    let mut weights = Vec::with_capacity(total_bytes(shape) + 256 * tensors.len());
    let shard = tensors.iter().collect();
    write_shard(&mut weights, shard, seed, Order::Misaligned)
        .map_err(|source| ModelError::Read { file: name.into(), source })?;
    let files = [("config.json", config), ("model.safetensors", weights)];
    Ok(Source::Memory(MemoryFiles::new(name, files)))
}

#[cfg(test)]
mod tests {
    use lily_model::Checkpoint;

    use super::*;

    fn synthetic(order: Order) -> Checkpoint {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config(&TINY).unwrap().to_string()).unwrap();
        let mut file = std::fs::File::create(directory.path().join("model.safetensors")).unwrap();
        write_shard(&mut file, tensors(&TINY).iter().collect(), 1, order).unwrap();
        Checkpoint::open(directory.path()).unwrap()
    }

    #[test]
    fn weights_in_memory_are_those_on_disk_and_as_unaligned_as_the_published_ones() {
        let memory = Checkpoint::load(in_memory("random", &TINY, 1).unwrap()).unwrap();
        let disk = synthetic(Order::Aligned);
        for (a, b) in disk.weights.matrices().zip(memory.weights.matrices()) {
            assert_eq!(a.name, b.name);
            assert!(a.codes[..] == b.codes[..] && a.scales[..] == b.scales[..] && a.biases[..] == b.biases[..]);
            assert!(a.codes.as_ptr().addr().is_multiple_of(4) && a.scales.as_ptr().addr().is_multiple_of(2));
            assert!(!b.codes.as_ptr().addr().is_multiple_of(2), "{} is aligned", b.name);
        }
        assert_eq!(disk.weights.norm, memory.weights.norm);
        let other = Checkpoint::load(in_memory("random", &TINY, 2).unwrap()).unwrap();
        assert_ne!(other.weights.norm, memory.weights.norm);
    }

    #[test]
    fn total_bytes_are_those_of_the_published_text_model() {
        assert_eq!(total_bytes(&Shape::QWEN36), 19_508_787_456);
    }

    #[test]
    fn matrices_have_the_deviation_their_gain_asks_for() {
        let checkpoint = synthetic(Order::Misaligned);
        for (matrix, gain) in
            [(&checkpoint.weights.embedding, 16.0f32), (&checkpoint.weights.layers[0].moe.router, 2.0)]
        {
            let (mut row, mut sum, mut squares, mut n) = (vec![0.0; matrix.inputs], 0.0, 0.0, 0.0);
            for r in 0..matrix.rows() {
                matrix.dequantize_row(r, &mut row);
                sum += row.iter().sum::<f32>();
                squares += row.iter().map(|x| x * x).sum::<f32>();
                n += row.len() as f32;
            }
            let (mean, deviation, wanted) = (sum / n, (squares / n).sqrt(), gain / 16.0);
            // 2048 numbers are the fewest here; the scales spread by 17 % and add 1.5 % to the deviation.
            assert!(mean.abs() < 0.1 * wanted && (deviation / wanted - 1.0).abs() < 0.1, "{mean} {deviation}");
        }
    }
}
