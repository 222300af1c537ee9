//! The device: a trait that a GPU, or its emulator, implements, and what the planning above it hands over.
//!
//! Everything about the model is decided above this line, so that the path that tests run on the emulator is the one that
//! runs on a Mac.

use lily_backend::{Error, Result};
use lily_model::MappedFile;

/// A buffer of memory that host and GPU share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer(pub(crate) u32);

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) buffer: Buffer,
    /// First byte.
    pub(crate) offset: usize,
    /// Length in bytes.
    pub(crate) bytes: usize,
}

impl Slice {
    /// `bytes` bytes from `offset` on, counted inside this slice.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Slice {
        assert!(offset + bytes <= self.bytes, "bytes {offset} to {} of a slice of {}", offset + bytes, self.bytes);
        Slice { offset: self.offset + offset, bytes, ..self }
    }

    /// Slice `index` of equal ones of `bytes` bytes.
    pub(crate) fn nth(self, index: usize, bytes: usize) -> Slice {
        self.part(index * bytes, bytes)
    }

    fn overlaps(self, other: Slice) -> bool {
        self.buffer == other.buffer
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// A kernel, compiled and with its function constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pipeline(pub(crate) u32);

/// Work that was handed to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Commit(pub(crate) u64);

/// Most words of [`Bound::Words`].
pub(crate) const MOST_WORDS: usize = 4;

/// What a dispatch binds to a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    /// Memory that the kernel only reads.
    Read(Slice),
    /// Memory that it may write.
    Write(Slice),
    /// Numbers that travel with the command: the first so many of these.
    Words([u32; MOST_WORDS], usize),
}

impl Bound {
    /// One number.
    pub(crate) fn word(value: usize) -> Bound {
        Bound::words([value])
    }

    /// A few numbers, each below 2^32: positions, counts and ids are.
    pub(crate) fn words<const N: usize>(values: [usize; N]) -> Bound {
        const { assert!(N <= MOST_WORDS) };
        let mut words = [0; MOST_WORDS];
        words.iter_mut().zip(values).for_each(|(word, value)| *word = value as u32);
        Bound::Words(words, N)
    }
}

/// One dispatch: what is bound to slots 0, 1, ...; the grid in threadgroups; threads of a threadgroup.
#[derive(Clone, Debug)]
pub(crate) struct Dispatch {
    pub(crate) pipeline: Pipeline,
    pub(crate) bound: Vec<Bound>,
    pub(crate) groups: [usize; 2],
    pub(crate) threads: usize,
}

/// What a concurrent encoder is told.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    Dispatch(Dispatch),
    /// What follows waits for what came before.
    Barrier,
}

/// Dispatches in the order of the data, with a barrier wherever one touches what another writes since the last barrier.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    pub(crate) commands: Vec<Command>,
    /// Memory used since the last barrier, and whether it is written.
    level: Vec<(Slice, bool)>,
    /// Where a command buffer ends, in numbers of commands.
    cuts: Vec<usize>,
}

impl Pass {
    /// Adds a dispatch, after a barrier if it needs one.
    pub(crate) fn dispatch(&mut self, dispatch: Dispatch) {
        let uses = dispatch.bound.iter().filter_map(|bound| match bound {
            Bound::Read(slice) => Some((*slice, false)),
            Bound::Write(slice) => Some((*slice, true)),
            Bound::Words(..) => None,
        });
        let uses: Vec<(Slice, bool)> = uses.collect();
        let conflicts = |(slice, writes): &(Slice, bool)| {
            self.level.iter().any(|(other, written)| (*writes || *written) && slice.overlaps(*other))
        };
        if uses.iter().any(conflicts) {
            self.commands.push(Command::Barrier);
            self.level.clear();
        }
        self.level.extend(uses);
        self.commands.push(Command::Dispatch(dispatch));
    }

    /// What follows goes into a command buffer of its own: a display waits for the GPU as long as one of them takes.
    pub(crate) fn cut(&mut self) {
        if self.commands.len() > self.cuts.last().copied().unwrap_or(0) {
            self.commands.push(Command::Barrier);
            self.level.clear();
            self.cuts.push(self.commands.len());
        }
    }

    /// Hands over everything, and leaves an empty pass. Returns the last commit, if there was anything.
    pub(crate) fn commit<G: Gpu + ?Sized>(&mut self, gpu: &mut G) -> Result<Option<Commit>> {
        let Pass { commands, cuts, .. } = std::mem::take(self);
        let (mut commands, mut done, mut last) = (commands.into_iter(), 0, None);
        for end in cuts.into_iter().chain([usize::MAX]) {
            let buffer: Vec<Command> = commands.by_ref().take(end - done).collect();
            done = end;
            if !buffer.is_empty() {
                last = Some(gpu.commit(buffer)?);
            }
        }
        Ok(last)
    }
}

/// The version of the Metal Shading Language that a file is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    /// Of macOS 15.
    Metal3_2,
    /// Of macOS 26, with tensors.
    Metal4_0,
}

/// A file of kernels: its name for messages, its language, and its whole text.
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) language: Language,
    pub(crate) text: String,
}

/// Which kernel of a file, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelSpec<'a> {
    pub(crate) kernel: &'static str,
    /// All function constants of the file.
    pub(crate) constants: &'a [(&'static str, usize)],
    /// Threads of a threadgroup.
    pub(crate) threads: usize,
}

/// A device that runs kernels.
///
/// Commits run one after the other in the order of [`Gpu::commit`]. The host reads and writes only memory that no commit
/// uses which was not waited for.
pub(crate) trait Gpu: Send {
    /// Its name.
    fn name(&self) -> String;

    /// Whether it has units that multiply the tensors of [`Language::Metal4_0`]; if not, what it lacks.
    fn tensor_units(&self) -> std::result::Result<(), String>;

    /// Bytes that it can hold at a time.
    fn memory_bytes(&self) -> usize;

    /// Bytes of the machine's memory, of which the former are a part.
    fn machine_bytes(&self) -> usize;

    /// A buffer of any content; `what` is for the message of [`Error::OutOfMemory`].
    fn buffer(&mut self, bytes: usize, what: &str) -> Result<Buffer>;

    /// A whole file, as it is mapped, as a buffer that is only read; nothing is copied. `None` if the device does not take it.
    fn map(&mut self, file: &MappedFile) -> Result<Option<Buffer>>;

    /// Gives a buffer back.
    fn free(&mut self, buffer: Buffer);

    /// Compiles a kernel; an error if the device cannot run it.
    fn pipeline(&mut self, source: &Source, spec: &KernelSpec<'_>) -> Result<Pipeline>;

    /// Copies a slice to the host.
    fn read(&self, from: Slice, to: &mut [u8]) -> Result<()>;

    /// Copies bytes into a slice.
    fn write(&mut self, to: Slice, from: &[u8]) -> Result<()>;

    /// All bytes of a buffer that is no file, to be written by the host.
    fn contents(&mut self, buffer: Buffer) -> Result<&mut [u8]>;

    /// Copies between slices of equal length that do not overlap.
    fn copy(&mut self, from: Slice, to: Slice) -> Result<()>;

    /// Sets every byte of a slice to zero.
    fn clear(&mut self, slice: Slice) -> Result<()>;

    /// Hands over work, as one command buffer.
    fn commit(&mut self, commands: Vec<Command>) -> Result<Commit>;

    /// Waits for `commit` and all before it. Errors of the device surface here.
    fn wait(&mut self, commit: Commit) -> Result<()>;
}

/// Reads little-endian words: what host and GPU exchange.
pub(crate) fn read_words<T, G: Gpu + ?Sized>(gpu: &G, from: Slice, word: fn([u8; 4]) -> T) -> Result<Vec<T>> {
    let mut bytes = vec![0; from.bytes];
    gpu.read(from, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| word(*bytes)).collect())
}

/// The little-endian bytes of f32 values.
pub(crate) fn float_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// An error of a device in words.
pub(crate) fn device_error(what: impl std::fmt::Display) -> Error {
    Error::Device(what.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(dispatches: &[&[Bound]]) -> Vec<bool> {
        let mut pass = Pass::default();
        for bound in dispatches {
            pass.dispatch(Dispatch { pipeline: Pipeline(0), bound: bound.to_vec(), groups: [1, 1], threads: 32 });
        }
        pass.commands.iter().map(|command| matches!(command, Command::Barrier)).collect()
    }

    fn slice(buffer: u32, offset: usize, bytes: usize) -> Slice {
        Slice { buffer: Buffer(buffer), offset, bytes }
    }

    #[test]
    fn a_barrier_stands_where_a_dispatch_touches_what_another_writes() {
        use Bound::{Read, Write};
        let (a, b, a_tail) = (slice(0, 0, 16), slice(1, 0, 16), slice(0, 16, 8));
        assert_eq!(pass(&[&[Read(a)], &[Read(a)], &[Read(a), Write(b)]]), [false, false, false]);
        assert_eq!(pass(&[&[Write(a)], &[Read(a)]]), [false, true, false]);
        assert_eq!(pass(&[&[Read(a)], &[Write(a)]]), [false, true, false]);
        assert_eq!(pass(&[&[Write(a)], &[Write(a)]]), [false, true, false]);
        assert_eq!(pass(&[&[Write(a)], &[Write(a_tail)], &[Read(b)]]), [false, false, false]);
        assert_eq!(pass(&[&[Write(a)], &[Read(slice(0, 15, 4))]]), [false, true, false]);
        // What a barrier has separated is forgotten.
        assert_eq!(pass(&[&[Write(a)], &[Read(a), Write(b)], &[Read(a)]]), [false, true, false, false]);
    }
}
