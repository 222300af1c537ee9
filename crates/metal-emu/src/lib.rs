//! Runs .metal files on Linux, unmodified, to find what is wrong with them. For tests only.
//!
//! A file goes through a token pass with lints (`pass`), is checked for address spaces and compiled by clang-19, as C++14 for
//! MSL 3 and as C++17 for MSL 4, against stand-ins for `<metal_stdlib>`, `<metal_tensor>` and the tensor operations of
//! `MetalPerformancePrimitives` (`library`, `shim/`), and runs on fibers, one per thread (`shim/runtime.cpp`).
//! An [`Emulator`] has the shape of a Metal device: buffers, pipelines, command buffers with a concurrent encoder.
//!
//! It faults on: accesses outside of what is bound, misaligned ones, and writes to what is bound for reading; races between
//! threadgroups, between dispatches that no barrier separates, and between simdgroups of a threadgroup; simd calls and
//! barriers that not all lanes reach; more than 32 KiB of threadgroup memory; shuffles from absent lanes; bindings that do not
//! fit the kernel's parameters; host accesses to memory that a command buffer in flight uses; writes to mapped files. Unwritten memory is NaN.
//! Work is done late, when it is waited for, and in an order that the seed chooses: dispatches between two barriers,
//! threadgroups, simdgroups and lanes.
//!
//! The same files run on an NVIDIA GPU through clang's CUDA mode ([`nvidia`]): with true concurrency, and at sizes for which the
//! emulator is too slow.
//!
//! It cannot show: that Apple's compiler takes a file, the accuracy of Apple's math functions, the order in which their
//! reductions add, memory that threadgroups share while they run, registers, speed.

#![warn(missing_docs)]
#![deny(unsafe_code)]

mod lex;
#[expect(unsafe_code, reason = "compiled kernels are opened and called; each with its SAFETY note")]
mod library;
#[expect(unsafe_code, reason = "memory is mapped, protected and lent to kernels; each with its SAFETY note")]
mod memory;
#[expect(unsafe_code, reason = "the driver's library is opened and called; each with its SAFETY note")]
pub mod nvidia;
mod pass;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

use library::{BoundRange, Launch, Library, Specialized};
use memory::{Block, MOST_THREADS, Memory, STACK_BYTES};

/// Why a file is refused, a command is refused, or a kernel was stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The token pass found what Apple's compiler would refuse or read otherwise.
    #[error("{file}:\n{lints}")]
    Lint {
        /// The file.
        file: String,
        /// One line each.
        lints: String,
    },
    /// clang refused the file, or its object could not be opened.
    #[error("{file}: {output}")]
    Compiler {
        /// The file.
        file: String,
        /// What clang said.
        output: String,
    },
    /// There is no clang.
    #[error("{compiler} cannot be run ({source}): install Debian's package clang-19")]
    NoCompiler {
        /// Its name.
        compiler: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Files of the cache could not be read or written.
    #[error("the cache of compiled kernels: {0}")]
    Cache(std::io::Error),
    /// Memory could not be had.
    #[error("{bytes} bytes of device memory: {source}")]
    Memory {
        /// How much.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A dispatch does not fit its kernel.
    #[error("encoding refused: {0}")]
    Encoding(String),
    /// The host touches memory that work in flight uses.
    #[error("the host {what} memory that a command buffer in flight uses")]
    HostRace {
        /// `reads` or `writes`.
        what: &'static str,
    },
    /// An NVIDIA GPU's driver refused a call.
    #[error("{call}: {what}")]
    Nvidia {
        /// The function.
        call: &'static str,
        /// What it said.
        what: String,
    },
    /// A kernel did what no kernel may.
    #[error("{kernel}: {message}")]
    Fault {
        /// The kernel.
        kernel: String,
        /// What it did, and where.
        message: String,
    },
}

/// Result of an emulator call.
pub type Result<T> = std::result::Result<T, Error>;

/// The version of the Metal Shading Language that a file is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// C++14.
    Metal3_2,
    /// C++17, with tensors.
    Metal4_0,
}

/// A buffer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(u32);

/// A compiled file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LibraryId(usize);

/// A kernel with its function constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineId(usize);

/// A committed command buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommitId(u64);

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Which buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: usize,
    /// Length in bytes. Kernels may touch these and no others.
    pub bytes: usize,
}

/// What a dispatch binds at a slot.
#[derive(Clone, Debug)]
pub enum Bound {
    /// For reading.
    Read(Slice),
    /// For reading and writing.
    Write(Slice),
    /// A copy of these bytes.
    Bytes(Vec<u8>),
}

/// One dispatch of threadgroups.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// Which kernel.
    pub pipeline: PipelineId,
    /// Slots and what is bound there.
    pub bindings: Vec<(usize, Bound)>,
    /// Slots of threadgroup memory and their bytes.
    pub threadgroup: Vec<(usize, u32)>,
    /// Threadgroups of the grid.
    pub groups: [u32; 3],
    /// Threads of a threadgroup.
    pub threads: [u32; 3],
}

/// What a concurrent encoder takes.
#[derive(Clone, Debug)]
pub enum Command {
    /// Runs side by side with the other dispatches up to the next barrier.
    Dispatch(Dispatch),
    /// What follows waits for what came before.
    Barrier,
}

/// Bytes that a dispatch moved, each address counted once.
#[derive(Clone, Debug)]
pub struct Moved {
    /// The kernel.
    pub kernel: String,
    /// Slot, what is bound there (none for copied bytes), bytes read, bytes written.
    pub slots: Vec<(usize, Option<Slice>, u64, u64)>,
}

/// A command buffer that waits to be run.
struct Pending {
    id: CommitId,
    commands: Vec<Command>,
    /// Blocks that it uses, and whether it writes them.
    uses: Vec<(Block, bool)>,
    /// Holds the copied bytes.
    copied: Option<Block>,
}

/// A Metal device made of a CPU thread.
pub struct Emulator {
    memory: Memory,
    order: u32,
    buffers: BTreeMap<u32, Block>,
    /// Those that are files.
    read_only: BTreeSet<u32>,
    libraries: Vec<Library>,
    pipelines: Vec<Specialized>,
    pending: Vec<Pending>,
    moved: Vec<Moved>,
    next_buffer: u32,
    next_commit: u64,
    /// Of the next threadgroup.
    stamp: u32,
    /// Simd calls, barriers and ends of lanes so far.
    lane_steps: u64,
}

/// Offsets of copied bytes and of buffers that kernels take as references: Metal's rule for the constant address space on
/// a Mac.
const CONSTANT_ALIGNMENT: usize = 32;
/// Offsets of other buffers.
const ALIGNMENT: usize = 4;
/// Threadgroup memory of every Apple GPU family from 7 on.
const MOST_THREADGROUP_BYTES: usize = 32768;
/// Most bytes that an encoder copies.
const MOST_COPIED: usize = 4096;

impl Emulator {
    /// A device whose work runs in the order that `order` chooses: 0 as counted, 1 reversed, others are seeds.
    pub fn new(order: u32) -> Result<Emulator> {
        Ok(Emulator {
            memory: Memory::new()?,
            order,
            buffers: BTreeMap::new(),
            read_only: BTreeSet::new(),
            libraries: Vec::new(),
            pipelines: Vec::new(),
            pending: Vec::new(),
            moved: Vec::new(),
            next_buffer: 0,
            next_commit: 0,
            stamp: 1,
            lane_steps: 0,
        })
    }

    /// A buffer of poisoned bytes, or of zeros that cost nothing until they are touched.
    pub fn buffer(&mut self, bytes: usize, zeroed: bool) -> Result<BufferId> {
        let block = self.memory.allocate(bytes, zeroed)?;
        let id = self.next_buffer;
        self.next_buffer += 1;
        self.buffers.insert(id, block);
        Ok(BufferId(id))
    }

    /// The first `bytes` bytes of a file as a buffer, which neither host nor kernels may write. Nothing is copied.
    pub fn map(&mut self, file: &File, bytes: usize) -> Result<BufferId> {
        let block = self.memory.map(file, bytes)?;
        let id = self.next_buffer;
        self.next_buffer += 1;
        self.buffers.insert(id, block);
        self.read_only.insert(id);
        Ok(BufferId(id))
    }

    /// Frees a buffer that no work in flight uses.
    pub fn free(&mut self, buffer: BufferId) -> Result<()> {
        let block = self.block(Slice { buffer, offset: 0, bytes: 0 })?;
        let block = Block { bytes: self.buffers.get(&buffer.0).map_or(0, |all| all.bytes), ..block };
        self.host_access(block, true)?;
        self.buffers.remove(&buffer.0);
        self.read_only.remove(&buffer.0);
        self.memory.release(block);
        Ok(())
    }

    /// Compiles a file; `name` is for messages.
    pub fn library(&mut self, name: &str, source: &str, language: Language) -> Result<LibraryId> {
        self.libraries.push(Library::compile(name, source, language)?);
        Ok(LibraryId(self.libraries.len() - 1))
    }

    /// Names of a file's kernels.
    pub fn kernels(&self, library: LibraryId) -> Vec<String> {
        self.libraries[library.0].kernels.iter().map(|kernel| kernel.name.clone()).collect()
    }

    /// A kernel with values for all function constants of its file.
    pub fn pipeline(&mut self, library: LibraryId, kernel: &str, constants: &[(&str, u32)]) -> Result<PipelineId> {
        self.pipelines.push(self.libraries[library.0].specialize(kernel, constants)?);
        Ok(PipelineId(self.pipelines.len() - 1))
    }

    /// The bytes of a slice.
    pub fn read(&self, slice: Slice) -> Result<&[u8]> {
        let block = self.block(slice)?;
        self.host_access(block, false)?;
        Ok(self.memory.bytes(block))
    }

    /// The bytes of a slice, to be written.
    pub fn write(&mut self, slice: Slice) -> Result<&mut [u8]> {
        let block = self.writable(slice)?;
        self.host_access(block, true)?;
        Ok(self.memory.bytes_mut(block))
    }

    /// All bytes of a buffer, to be written.
    pub fn contents(&mut self, buffer: BufferId) -> Result<&mut [u8]> {
        let bytes = self.buffers.get(&buffer.0).map_or(0, |block| block.bytes);
        self.write(Slice { buffer, offset: 0, bytes })
    }

    /// Copies `from` to the beginning of `to`, by the host.
    pub fn copy(&mut self, from: Slice, to: Slice) -> Result<()> {
        let (from, to) = (self.block(from)?, self.writable(to)?);
        if from.bytes > to.bytes {
            return Err(Error::Encoding(format!("a copy of {} bytes into {}", from.bytes, to.bytes)));
        }
        self.host_access(from, false)?;
        self.host_access(to, true)?;
        self.memory.copy(from, to);
        Ok(())
    }

    /// Accepts a command buffer: checks all its bindings, runs nothing yet.
    pub fn commit(&mut self, mut commands: Vec<Command>) -> Result<CommitId> {
        let mut uses = Vec::new();
        let mut copied_bytes = 0;
        for command in &commands {
            let Command::Dispatch(dispatch) = command else { continue };
            self.check(dispatch)?;
            for (_, bound) in &dispatch.bindings {
                match bound {
                    Bound::Read(slice) => uses.push((self.block(*slice)?, false)),
                    Bound::Write(slice) => uses.push((self.writable(*slice)?, true)),
                    Bound::Bytes(bytes) => copied_bytes += bytes.len().next_multiple_of(CONSTANT_ALIGNMENT),
                }
            }
        }
        let copied = match copied_bytes {
            0 => None,
            bytes => Some(self.copy_constants(bytes, &mut commands)?),
        };
        let id = CommitId(self.next_commit);
        self.next_commit += 1;
        self.pending.push(Pending { id, commands, uses, copied });
        Ok(id)
    }

    /// Moves the copied bytes of all dispatches into one block, as buffers.
    fn copy_constants(&mut self, bytes: usize, commands: &mut [Command]) -> Result<Block> {
        let block = self.memory.allocate(bytes, false)?;
        let mut at = block.start;
        for command in commands {
            let Command::Dispatch(dispatch) = command else { continue };
            for (_, bound) in &mut dispatch.bindings {
                if let Bound::Bytes(bytes) = bound {
                    self.memory.bytes_mut(Block { start: at, bytes: bytes.len() }).copy_from_slice(bytes);
                    at += bytes.len().next_multiple_of(CONSTANT_ALIGNMENT);
                }
            }
        }
        Ok(block)
    }

    /// Runs everything up to and with `commit`. After a fault the rest of its command buffer is not run.
    pub fn wait(&mut self, commit: CommitId) -> Result<()> {
        while self.pending.first().is_some_and(|first| first.id <= commit) {
            let pending = self.pending.remove(0);
            let result = self.run(&pending);
            if let Some(block) = pending.copied {
                self.memory.release(block);
            }
            result?;
        }
        Ok(())
    }

    /// Bytes moved by each dispatch since the last call.
    pub fn take_moved(&mut self) -> Vec<Moved> {
        std::mem::take(&mut self.moved)
    }

    /// Simd calls, barriers and ends of lanes so far: a measure of work that does not depend on the machine.
    pub fn lane_steps(&self) -> u64 {
        self.lane_steps
    }

    fn block(&self, slice: Slice) -> Result<Block> {
        let Some(all) = self.buffers.get(&slice.buffer.0) else {
            return Err(Error::Encoding(format!("there is no buffer {}", slice.buffer.0)));
        };
        if slice.offset > all.bytes || slice.bytes > all.bytes - slice.offset {
            let Slice { offset, bytes, .. } = slice;
            return Err(Error::Encoding(format!("bytes {offset} to {} of a buffer of {}", offset + bytes, all.bytes)));
        }
        Ok(Block { start: all.start + slice.offset, bytes: slice.bytes })
    }

    /// The same of a buffer that is no file.
    fn writable(&self, slice: Slice) -> Result<Block> {
        match self.read_only.contains(&slice.buffer.0) {
            true => {
                Err(Error::Encoding(format!("buffer {} is a mapped file, which nothing may write", slice.buffer.0)))
            }
            false => self.block(slice),
        }
    }

    fn host_access(&self, block: Block, writes: bool) -> Result<()> {
        let in_use = |(used, written): &(Block, bool)| used.overlaps(block) && (writes || *written);
        match self.pending.iter().flat_map(|pending| &pending.uses).any(in_use) {
            true => Err(Error::HostRace { what: if writes { "writes" } else { "reads" } }),
            false => Ok(()),
        }
    }

    /// Holds a dispatch against its kernel's table.
    fn check(&self, dispatch: &Dispatch) -> Result<()> {
        let pipeline = &self.pipelines[dispatch.pipeline.0];
        let refuse = |what: String| Err(Error::Encoding(format!("{}: {what}", pipeline.kernel)));
        for slot in &pipeline.buffers {
            let number = slot.slot;
            let mut bound = dispatch.bindings.iter().filter(|(at, _)| *at == number);
            let (Some((_, bound)), None) = (bound.next(), bound.next()) else {
                return refuse(format!("slot {number} is not bound once"));
            };
            let (offset, bytes) = match bound {
                Bound::Read(slice) | Bound::Write(slice) => (slice.offset, slice.bytes),
                Bound::Bytes(bytes) => (0, bytes.len()),
            };
            if slot.writable != matches!(bound, Bound::Write(_)) {
                let how = if slot.writable {
                    "writes, but it is bound for reading"
                } else {
                    "only reads, but it is bound for writing"
                };
                return refuse(format!("the kernel's parameter at slot {number} {how}"));
            }
            let fits =
                if slot.is_reference { bytes == slot.element_bytes } else { bytes.is_multiple_of(slot.element_bytes) };
            if !fits {
                return refuse(format!("slot {number} has {bytes} bytes for elements of {}", slot.element_bytes));
            }
            let alignment = if slot.is_reference { CONSTANT_ALIGNMENT } else { slot.element_bytes.max(ALIGNMENT) };
            if !offset.is_multiple_of(alignment) {
                return refuse(format!("slot {number} begins at offset {offset}, no multiple of {alignment}"));
            }
            if matches!(bound, Bound::Bytes(bytes) if bytes.len() > MOST_COPIED) {
                return refuse(format!("slot {number} copies {bytes} bytes; an encoder copies {MOST_COPIED} at most"));
            }
        }
        if let Some((slot, _)) =
            dispatch.bindings.iter().find(|(at, _)| !pipeline.buffers.iter().any(|s| s.slot == *at))
        {
            return refuse(format!("the kernel has no buffer at slot {slot}"));
        }
        let mut bound: Vec<usize> = dispatch.threadgroup.iter().map(|(slot, _)| *slot).collect();
        bound.sort_unstable();
        if bound != pipeline.threadgroup_slots {
            return refuse(format!(
                "threadgroup slots {:?} are wanted, {bound:?} are bound",
                pipeline.threadgroup_slots
            ));
        }
        let local: usize = dispatch.threadgroup.iter().map(|(_, bytes)| *bytes as usize).sum();
        if local > MOST_THREADGROUP_BYTES {
            return refuse(format!("{local} bytes of threadgroup memory; there are {MOST_THREADGROUP_BYTES}"));
        }
        let threads = dispatch.threads.iter().map(|n| *n as usize).product::<usize>();
        let most = pipeline.most_threads.map_or(MOST_THREADS, |most| most as usize);
        if threads == 0 || threads > most {
            return refuse(format!("threadgroups of {threads} threads; there may be 1 to {most}"));
        }
        match dispatch.groups.contains(&0) {
            true => refuse(format!("a grid of {:?} threadgroups", dispatch.groups)),
            false => Ok(()),
        }
    }

    fn run(&mut self, pending: &Pending) -> Result<()> {
        // Where the copied bytes of each dispatch begin.
        let mut at = pending.copied.map_or(0, |block| block.start);
        let mut level: Vec<(&Dispatch, usize)> = Vec::new();
        for command in &pending.commands {
            match command {
                Command::Dispatch(dispatch) => {
                    level.push((dispatch, at));
                    for (_, bound) in &dispatch.bindings {
                        if let Bound::Bytes(bytes) = bound {
                            at += bytes.len().next_multiple_of(CONSTANT_ALIGNMENT);
                        }
                    }
                }
                Command::Barrier => self.run_level(std::mem::take(&mut level))?,
            }
        }
        self.run_level(level)
    }

    /// Runs the dispatches between two barriers, in the order that the seed chooses.
    fn run_level(&mut self, mut level: Vec<(&Dispatch, usize)>) -> Result<()> {
        match self.order {
            0 => {}
            1 => level.reverse(),
            seed => {
                let mut random = u64::from(seed) ^ u64::from(self.stamp) << 32 | 1;
                for last in (1..level.len()).rev() {
                    random = random.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
                    level.swap(last, (random % (last as u64 + 1)) as usize);
                }
            }
        }
        let level_stamp = self.stamp;
        for (dispatch, copied) in level {
            self.run_dispatch(dispatch, copied, level_stamp)?;
        }
        Ok(())
    }

    fn run_dispatch(&mut self, dispatch: &Dispatch, mut copied: usize, level_stamp: u32) -> Result<()> {
        let mut buffers = [std::ptr::null_mut(); 31];
        let mut ranges = Vec::new();
        for (slot, bound) in &dispatch.bindings {
            let (block, writable) = match bound {
                Bound::Read(slice) => (self.block(*slice)?, false),
                Bound::Write(slice) => (self.block(*slice)?, true),
                Bound::Bytes(bytes) => {
                    let block = Block { start: copied, bytes: bytes.len() };
                    copied += bytes.len().next_multiple_of(CONSTANT_ALIGNMENT);
                    (block, false)
                }
            };
            let begin = self.memory.address(block);
            buffers[*slot] = begin as *mut std::ffi::c_void;
            ranges.push(BoundRange {
                begin,
                end: begin + block.bytes as u64,
                slot: *slot as u32,
                writable: writable.into(),
                read_bytes: 0,
                written_bytes: 0,
            });
        }
        let mut threadgroup_bytes = [0; 8];
        dispatch.threadgroup.iter().for_each(|(slot, bytes)| threadgroup_bytes[*slot] = *bytes);
        let (arena_begin, arena_end) = self.memory.arena();
        let launch = Launch {
            groups: dispatch.groups,
            threads: dispatch.threads,
            order: self.order,
            level_stamp,
            dispatch_stamp: self.stamp,
            binding_count: ranges.len() as u32,
            arena_begin,
            arena_end,
            cells: self.memory.cells(),
            bindings: ranges.as_mut_ptr(),
            buffers,
            threadgroup_bytes,
            stacks: self.memory.stacks(),
            stack_bytes: STACK_BYTES as u64,
        };
        self.stamp += dispatch.groups.iter().product::<u32>();
        let pipeline = &mut self.pipelines[dispatch.pipeline.0];
        #[expect(unsafe_code, reason = "the one call of a kernel")]
        // SAFETY: all ranges are blocks of this memory, and `&mut self` keeps everyone else away from it.
        let report = unsafe { pipeline.run(&launch) };
        self.lane_steps += report.lane_steps;
        if report.faulted != 0 {
            let length = report.message.iter().position(|byte| *byte == 0).unwrap_or(report.message.len());
            let message = String::from_utf8_lossy(&report.message[..length]).into_owned();
            return Err(Error::Fault { kernel: pipeline.kernel.clone(), message });
        }
        let slots = ranges.iter().zip(&dispatch.bindings).map(|(range, (slot, bound))| {
            let slice = match bound {
                Bound::Read(slice) | Bound::Write(slice) => Some(*slice),
                Bound::Bytes(_) => None,
            };
            (*slot, slice, range.read_bytes, range.written_bytes)
        });
        self.moved.push(Moved { kernel: pipeline.kernel.clone(), slots: slots.collect() });
        Ok(())
    }
}
