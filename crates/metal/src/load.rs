//! Weights on their way from files into device memory: not at all, where a file can be used as it is mapped; else once, by several
//! threads, in large reads.

use std::sync::{Mutex, PoisonError};

use lily_backend::{Error, Result};
use lily_model::safetensors::TensorBytes;
use lily_model::{MappedFile, QuantMatrix, Weights};

use crate::device::{Buffer, Gpu, Slice};

/// Where tensors in a mapped file have to begin: kernels read 16 bytes at once.
const ALIGNMENT: usize = 16;
/// A mapped file takes memory as a whole, so that one is only worth it of which hardly anything is copied all the same: sixteenths.
const LEAST_USED: usize = 15;

/// Files that the device uses as they are mapped.
#[derive(Default)]
pub(crate) struct Mapped {
    files: Vec<(MappedFile, Buffer)>,
}

impl Mapped {
    /// Binds the files that hold nearly nothing but matrices of which every stack is adjacent and aligned, unless the device does
    /// not take them.
    pub(crate) fn new(gpu: &mut dyn Gpu, weights: &Weights) -> Result<Mapped> {
        let mut used: Vec<(MappedFile, usize)> = Vec::new();
        for run in weights.stacks().iter().flat_map(|stack| runs(stack)) {
            let Some((file, _)) = place(&run) else { continue };
            match used.iter_mut().find(|(other, _)| *other == file) {
                Some((_, sum)) => *sum += length(&run),
                None => used.push((file, length(&run))),
            }
        }
        used.retain(|(file, used)| used / LEAST_USED >= file.bytes().len() / 16);
        let mut files = Vec::new();
        for (file, _) in used {
            if let Some(buffer) = gpu.map(&file)? {
                files.push((file, buffer));
            }
        }
        Ok(Mapped { files })
    }

    /// Bytes of the files.
    pub(crate) fn bytes(&self) -> usize {
        self.files.iter().map(|(file, _)| file.bytes().len()).sum()
    }

    /// Where a run of tensors lies, if it need not be copied.
    pub(crate) fn find(&self, run: &[&TensorBytes]) -> Option<Slice> {
        let (file, offset) = place(run)?;
        let (_, buffer) = self.files.iter().find(|(other, _)| *other == file)?;
        Some(Slice { buffer: *buffer, offset, bytes: length(run) })
    }

    /// Bytes of stacks that have to be copied.
    pub(crate) fn to_copy(&self, stacks: &[Vec<&QuantMatrix>]) -> usize {
        let runs = stacks.iter().flat_map(|stack| runs(stack));
        runs.filter(|run| self.find(run).is_none()).map(|run| length(&run)).sum()
    }
}

/// Codes, scales and biases of a stack of matrices.
pub(crate) fn runs<'a>(stack: &[&'a QuantMatrix]) -> [Vec<&'a TensorBytes>; 3] {
    let parts: [fn(&QuantMatrix) -> &TensorBytes; 3] =
        [|matrix| &matrix.codes, |matrix| &matrix.scales, |matrix| &matrix.biases];
    parts.map(|part| stack.iter().map(|matrix| part(matrix)).collect())
}

fn length(run: &[&TensorBytes]) -> usize {
    run.iter().map(|bytes| bytes.len()).sum()
}

/// Where tensors begin that lie one behind the other in one file, aligned.
fn place(run: &[&TensorBytes]) -> Option<(MappedFile, usize)> {
    let (file, start) = run.first()?.place()?;
    let mut end = start;
    for bytes in run {
        if bytes.place()? != (file.clone(), end) {
            return None;
        }
        end += bytes.len();
    }
    start.is_multiple_of(ALIGNMENT).then_some((file, start))
}

/// Bytes of one read. Reads of this size reach what a file system gives; smaller ones wait.
const READ_BYTES: usize = 8 << 20;
/// Threads that read at the same time: storage of Macs is fastest with a few, and gains nothing from more.
const MOST_THREADS: usize = 8;

/// A tensor, and where in a buffer it goes.
pub(crate) struct Piece<'a> {
    pub(crate) to: usize,
    pub(crate) from: &'a TensorBytes,
}

/// Fills parts of a buffer that do not overlap.
pub(crate) fn fill(gpu: &mut dyn Gpu, buffer: Buffer, mut pieces: Vec<Piece<'_>>) -> Result<()> {
    pieces.sort_by_key(|piece| piece.to);
    let (mut rest, mut at) = (gpu.contents(buffer)?, 0);
    let mut reads = Vec::new();
    let total: usize = pieces.iter().map(|piece| piece.from.len()).sum();
    for Piece { to, from } in pieces {
        let (mut own, after) = std::mem::take(&mut rest)[to - at..].split_at_mut(from.len());
        (rest, at) = (after, to + from.len());
        let mut start = 0;
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
    use crate::emulated::Emulated;

    #[test]
    fn every_byte_comes_to_its_place_and_nothing_else_changes() {
        let byte = |i: usize| (i * 31 + i / 251) as u8;
        // More than one read, by more than one thread.
        let long = TensorBytes::from_vec((0..2 * READ_BYTES + 77).map(byte).collect());
        let short = TensorBytes::from_vec((0..100).map(byte).collect());
        let mut gpu = Emulated::new(0);
        let bytes = long.len() + 164;
        let buffer = gpu.buffer(bytes, "a case").expect("memory");
        let pieces = vec![Piece { to: 140, from: &long }, Piece { to: 8, from: &short }];
        fill(&mut gpu, buffer, pieces).expect("filled");
        let mut got = vec![0; bytes];
        gpu.read(Slice { buffer, offset: 0, bytes }, &mut got).expect("read");
        let mut expected = vec![0xff; bytes];
        expected[8..108].copy_from_slice(&short);
        expected[140..140 + long.len()].copy_from_slice(&long);
        assert!(got == expected);
    }
}
