//! Weights on their way from files into device memory: once, by several threads, in large reads.

use std::sync::{Mutex, PoisonError};

use lily_backend::{Error, Result};
use lily_model::safetensors::TensorBytes;

use crate::device::{Buffer, Gpu};

/// Bytes of one read. Reads of this size reach what a file system gives; smaller ones wait.
const READ_BYTES: usize = 8 << 20;
/// Threads that read at the same time: storage of Macs is fastest with a few, and gains nothing from more.
const MOST_THREADS: usize = 8;

/// Bytes of a tensor, and where in a buffer they go.
pub(crate) struct Piece<'a> {
    pub(crate) to: usize,
    pub(crate) from: &'a TensorBytes,
    /// First byte of the tensor.
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

/// Fills parts of a buffer that do not overlap.
pub(crate) fn fill(gpu: &mut dyn Gpu, buffer: Buffer, mut pieces: Vec<Piece<'_>>) -> Result<()> {
    pieces.sort_by_key(|piece| piece.to);
    let (mut rest, mut at) = (gpu.contents(buffer)?, 0);
    let mut reads = Vec::new();
    let total: usize = pieces.iter().map(|piece| piece.bytes).sum();
    for Piece { to, from, start, bytes } in pieces {
        let (mut own, after) = std::mem::take(&mut rest)[to - at..].split_at_mut(bytes);
        (rest, at) = (after, to + bytes);
        let mut start = start;
        while !own.is_empty() {
            let (now, later) = own.split_at_mut(READ_BYTES.min(own.len()));
            let count = now.len();
            reads.push((now, from, start));
            (own, start) = (later, start + count);
        }
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    let threads = threads.min(total.div_ceil(READ_BYTES)).max(1);
    let queue = Mutex::new(reads.into_iter());
    let work = || -> std::io::Result<()> {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((to, from, start)) = next else { return Ok(()) };
            from.read_into(start, to)?;
        }
    };
    let result: std::io::Result<()> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        others
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(panicked())))
            .fold(own, std::io::Result::and)
    });
    result.map_err(Error::from)
}

fn panicked() -> std::io::Error {
    std::io::Error::other("a thread that reads weights ended without a result")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Slice;
    use crate::emulated::Emulated;

    #[test]
    fn every_byte_comes_to_its_place_and_nothing_else_changes() {
        let byte = |i: usize| (i * 31 + i / 251) as u8;
        // More than one read, by more than one thread; and from within a tensor.
        let long = TensorBytes::from_vec((0..2 * READ_BYTES + 77).map(byte).collect());
        let short = TensorBytes::from_vec((0..100).map(byte).collect());
        let mut gpu = Emulated::new(0);
        let bytes = long.len() + 64;
        let buffer = gpu.buffer(bytes, "a case").expect("memory");
        let pieces = vec![
            Piece { to: 40, from: &long, start: 3, bytes: long.len() - 3 },
            Piece { to: 8, from: &short, start: 90, bytes: 10 },
        ];
        fill(&mut gpu, buffer, pieces).expect("filled");
        let mut got = vec![0; bytes];
        gpu.read(Slice { buffer, offset: 0, bytes }, &mut got).expect("read");
        let mut expected = vec![0xff; bytes];
        expected[8..18].copy_from_slice(&short[90..]);
        expected[40..40 + long.len() - 3].copy_from_slice(&long[3..]);
        assert!(got == expected);
    }
}
