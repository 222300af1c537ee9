//! How fast this machine reads memory: the limit that decoding is measured against.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use lily_model::{QuantMatrix, Shape, Weights};

/// A read shorter than this is repeated: it would measure the start of the threads.
const SHORTEST: Duration = Duration::from_millis(200);

/// The weights that decoding one token touches, as slices for each thread.
pub struct Stream<'a> {
    threads: Vec<Vec<&'a [u8]>>,
}

impl<'a> Stream<'a> {
    /// All dense matrices and as many experts as a token chooses; each thread gets a contiguous part of every matrix,
    /// as in a forward pass.
    pub fn of_a_token(weights: &'a Weights, shape: &Shape, threads: usize) -> Stream<'a> {
        let embedding = weights.embedding.codes.as_ptr();
        let matrices = weights.matrices().filter(|m| m.codes.as_ptr() != embedding);
        Stream::new(matrices.map(|m| (m, experts_of_a_token(m, shape))), threads)
    }

    /// All weights.
    pub fn of_all(weights: &'a Weights, threads: usize) -> Stream<'a> {
        Stream::new(weights.matrices().map(|m| (m, m.experts)), threads)
    }

    fn new(matrices: impl Iterator<Item = (&'a QuantMatrix, usize)>, threads: usize) -> Stream<'a> {
        let mut stream = Stream { threads: vec![Vec::new(); threads] };
        for (matrix, experts) in matrices {
            for tensor in [&matrix.codes, &matrix.scales, &matrix.biases] {
                let touched = &tensor[..tensor.len() / matrix.experts * experts];
                let part = touched.len().div_ceil(threads).max(1);
                stream.threads.iter_mut().zip(touched.chunks(part)).for_each(|(own, part)| own.push(part));
            }
        }
        stream
    }

    /// Bytes of one pass.
    pub fn bytes(&self) -> usize {
        self.threads.iter().flatten().map(|part| part.len()).sum()
    }

    /// Reads everything once or more and gives bytes per second.
    pub fn read(&self) -> f64 {
        let started = Instant::now();
        let mut passes = 0;
        while passes == 0 || started.elapsed() < SHORTEST {
            thread::scope(|scope| {
                for parts in &self.threads {
                    scope.spawn(move || {
                        for part in parts {
                            black_box(sum(part));
                        }
                    });
                }
            });
            passes += 1;
        }
        (self.bytes() * passes) as f64 / started.elapsed().as_secs_f64()
    }
}

fn experts_of_a_token(matrix: &QuantMatrix, shape: &Shape) -> usize {
    if matrix.experts > 1 { shape.experts_per_token } else { 1 }
}

/// A sum that needs every byte and little arithmetic: eight independent chains of 64-bit additions.
fn sum(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<64>();
    let mut sums = [0u64; 8];
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    let rest = rest.iter().map(|byte| u64::from(*byte));
    sums.into_iter().chain(rest).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use lily_model::Checkpoint;

    use super::*;

    #[test]
    fn a_stream_has_the_bytes_of_its_weights_whatever_the_threads() {
        let checkpoint = Checkpoint::load(lily_synth::in_memory("random", &lily_synth::TINY, 0).unwrap()).unwrap();
        let (weights, shape) = (&checkpoint.weights, &checkpoint.config.shape);
        for threads in [1, 2, 3, 7] {
            assert_eq!(Stream::of_all(weights, threads).bytes(), weights.quantized_bytes());
            let row = weights.embedding.total_bytes() / weights.embedding.rows();
            assert_eq!(Stream::of_a_token(weights, shape, threads).bytes() + row, weights.bytes_per_token(shape));
        }
        assert!(Stream::of_a_token(weights, shape, 2).read() > 0.0);
    }
}
