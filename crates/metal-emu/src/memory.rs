//! Device memory: buffers in one reserved range of addresses, each ending at pages that cannot be touched, and beside the
//! range a cell for every four bytes, in which the runner notes who touched them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use crate::Error;

/// Addresses reserved for buffers. Nothing is used twice, so this is what an emulator may allocate in its life.
const ARENA_BYTES: usize = 16 << 30;
/// The runner's note on four bytes: stamps of the last writer and reader. Smaller pieces are not told apart.
const CELL_BYTES: usize = 8;
const PAGE: usize = 4096;
/// What a buffer holds before anything is written: NaN in every float format, an absurd index.
const POISON: u8 = 0xff;

/// A reserved range of addresses.
struct Range {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the range belongs to one `Memory`, which hands out its bytes by `&self` and `&mut self` alone.
unsafe impl Send for Range {}

impl Range {
    fn reserve(bytes: usize, protection: libc::c_int) -> Result<Range, Error> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the system's choice touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => Ok(Range { start, bytes }),
            _ => Err(Error::Memory { bytes, source: io::Error::last_os_error() }),
        }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `reserve` with these bounds, and nothing borrows from it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// All buffers of an emulator.
pub(crate) struct Memory {
    arena: Range,
    cells: Range,
    stacks: Range,
    used: usize,
}

/// Bytes of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Block {
    pub(crate) fn end(self) -> usize {
        self.start + self.bytes
    }

    pub(crate) fn overlaps(self, other: Block) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// Stack of one lane.
pub(crate) const STACK_BYTES: usize = 64 << 10;
/// Most threads of a threadgroup, on every Apple GPU.
pub(crate) const MOST_THREADS: usize = 1024;

impl Memory {
    pub(crate) fn new() -> Result<Memory, Error> {
        let usable = libc::PROT_READ | libc::PROT_WRITE;
        Ok(Memory {
            arena: Range::reserve(ARENA_BYTES, libc::PROT_NONE)?,
            cells: Range::reserve(ARENA_BYTES / 4 * CELL_BYTES, usable)?,
            stacks: Range::reserve(MOST_THREADS * STACK_BYTES, usable)?,
            used: 0,
        })
    }

    /// A block that ends at an untouchable page, or up to 15 bytes before it. Its bytes are zero if `zeroed`, which costs
    /// no memory until they are touched, else poisoned.
    pub(crate) fn allocate(&mut self, bytes: usize, zeroed: bool) -> Result<Block, Error> {
        let room = bytes.max(1).next_multiple_of(PAGE);
        let end = self.used + room;
        if end + PAGE > ARENA_BYTES {
            let source = io::Error::other("all addresses of the emulator are used");
            return Err(Error::Memory { bytes, source });
        }
        // SAFETY: the pages lie inside the arena and belong to no block yet.
        let opened = unsafe {
            let pages = self.arena.start.as_ptr().add(self.used).cast();
            libc::mprotect(pages, room, libc::PROT_READ | libc::PROT_WRITE)
        };
        if opened != 0 {
            return Err(Error::Memory { bytes, source: io::Error::last_os_error() });
        }
        self.used = end + PAGE;
        let block = Block { start: end - bytes.max(1).next_multiple_of(16), bytes };
        if !zeroed {
            self.bytes_mut(block).fill(POISON);
        }
        Ok(block)
    }

    /// A block that is the first `bytes` bytes of a file, which the processor lets nobody write.
    pub(crate) fn map(&mut self, file: &File, bytes: usize) -> Result<Block, Error> {
        let room = bytes.next_multiple_of(PAGE);
        let failed = |source| Error::Memory { bytes, source };
        if bytes == 0 || file.metadata().map_err(failed)?.len() < bytes as u64 {
            return Err(failed(io::Error::other("so much is not in the file")));
        }
        if self.used + room + PAGE > ARENA_BYTES {
            return Err(failed(io::Error::other("all addresses of the emulator are used")));
        }
        let (flags, protection) = (libc::MAP_SHARED | libc::MAP_FIXED, libc::PROT_READ);
        // SAFETY: the pages lie inside the arena and belong to no block yet, so that nothing that exists is replaced.
        let mapped = unsafe {
            let pages = self.arena.start.as_ptr().add(self.used).cast();
            libc::mmap(pages, room, protection, flags, file.as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let block = Block { start: self.used, bytes };
        self.used += room + PAGE;
        Ok(block)
    }

    /// Gives the pages of a block back; its addresses fault from now on.
    pub(crate) fn release(&mut self, block: Block) {
        let (first, last) = (block.start / PAGE * PAGE, block.end().next_multiple_of(PAGE));
        // SAFETY: whole pages that belong to this block alone.
        unsafe {
            let pages = self.arena.start.as_ptr().add(first).cast();
            libc::madvise(pages, last - first, libc::MADV_DONTNEED);
            libc::mprotect(pages, last - first, libc::PROT_NONE);
        }
    }

    pub(crate) fn bytes(&self, block: Block) -> &[u8] {
        // SAFETY: `block` was allocated here and not released, its pages are readable, and kernels run under `&mut self`.
        unsafe { std::slice::from_raw_parts(self.arena.start.as_ptr().add(block.start), block.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self, block: Block) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.arena.start.as_ptr().add(block.start), block.bytes) }
    }

    /// Copies inside the arena; blocks of one length, which may overlap.
    pub(crate) fn copy(&mut self, from: Block, to: Block) {
        // SAFETY: both blocks lie in pages that are readable and writable, and `ptr::copy` allows overlap.
        unsafe {
            let start = self.arena.start.as_ptr();
            std::ptr::copy(start.add(from.start), start.add(to.start), from.bytes.min(to.bytes));
        }
    }

    pub(crate) fn address(&self, block: Block) -> u64 {
        self.arena.start.as_ptr() as u64 + block.start as u64
    }

    pub(crate) fn arena(&self) -> (u64, u64) {
        let start = self.arena.start.as_ptr() as u64;
        (start, start + ARENA_BYTES as u64)
    }

    pub(crate) fn cells(&self) -> *mut u8 {
        self.cells.start.as_ptr()
    }

    pub(crate) fn stacks(&self) -> *mut u8 {
        self.stacks.start.as_ptr()
    }
}
