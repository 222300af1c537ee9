//! What the backend asks of the machine: threads, memory, instruction set.

use std::any::Any;
#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lily_backend::{Error, Result};
use memmap2::MmapMut;

/// The instruction sets that kernels are compiled for.
///
/// [`Isa::detect`] is the only maker of a value, so that holding one means that this CPU has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// What the target of the build guarantees.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with the integer multiply-adds of VNNI, and the former.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The tile registers of AMX with products of bytes, and the former.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON with the dot products of bytes.
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// NEON with the former and the products of 2x8 by 8x2 bytes.
    #[cfg(target_arch = "aarch64")]
    I8mm,
}

impl Isa {
    /// The best set that this CPU has.
    pub(crate) fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            return match wide {
                true if may_use_tiles() => Isa::Amx,
                true => Isa::Avx512,
                false => Isa::Avx2,
            };
        }
        #[cfg(target_arch = "aarch64")]
        if is_aarch64_feature_detected!("dotprod") {
            return if is_aarch64_feature_detected!("i8mm") { Isa::I8mm } else { Isa::Dotprod };
        }
        Isa::Portable
    }

    /// All sets that this CPU has, for tests that compare them.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Isa> {
        match Isa::detect() {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => vec![Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Amx],
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => vec![Isa::Portable, Isa::Avx2, Isa::Avx512],
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => vec![Isa::Portable, Isa::Dotprod, Isa::I8mm],
            best => [Isa::Portable, best][usize::from(best == Isa::Portable)..].to_vec(),
        }
    }

    /// Its name in [`lily_backend::Caps::name`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "avx512-amx",
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => "neon-i8mm",
        }
    }
}

/// Whether the CPU multiplies tiles of bytes and the system lets this process: their registers are large, so Linux gives
/// them to who asks.
#[cfg(target_arch = "x86_64")]
fn may_use_tiles() -> bool {
    /// Bits of `edx` of leaf 7: AMX-TILE and AMX-INT8.
    const TILES_OF_BYTES: u32 = 1 << 24 | 1 << 25;
    if std::arch::x86_64::__cpuid_count(7, 0).edx & TILES_OF_BYTES != TILES_OF_BYTES {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        /// `ARCH_REQ_XCOMP_PERM` and the number of the state, from Linux' `asm/prctl.h` and `asm/fpu/types.h`.
        const REQUEST: libc::c_ulong = 0x1023;
        const TILE_DATA: libc::c_ulong = 18;
        // SAFETY: asks for a permission; no pointer is passed.
        unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Zeroed memory. A large block costs nothing until it is touched, page by page, so a state with room for a long context
/// occupies what it has used; and its pages are 2 MB each where the system has such, which saves faults and look-ups.
pub(crate) struct Buffer<T> {
    data: NonNull<T>,
    len: usize,
    /// Where the data is.
    _block: Block<T>,
}

enum Block<T> {
    Small(#[expect(dead_code, reason = "held for its memory")] Vec<T>),
    Large(#[expect(dead_code, reason = "held for its memory")] MmapMut),
}

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Types for which all bytes zero is a value.
pub(crate) trait Zeroed: Copy + Send + Sync {
    /// That value.
    const ZERO: Self;
}
impl Zeroed for f32 {
    const ZERO: f32 = 0.0;
}
impl Zeroed for u32 {
    const ZERO: u32 = 0;
}
impl Zeroed for i16 {
    const ZERO: i16 = 0;
}

impl<T: Zeroed> Buffer<T> {
    /// `len` zeros; `what` names them where memory does not suffice.
    pub(crate) fn zeroed(what: &str, len: usize) -> Result<Buffer<T>> {
        let needed = len.saturating_mul(size_of::<T>());
        let failed = || Error::OutOfMemory { what: what.into(), needed, available: memory_bytes() };
        if needed < LARGE_PAGE {
            let mut block = Vec::new();
            block.try_reserve_exact(len).map_err(|_| failed())?;
            block.resize(len, T::ZERO);
            let data = NonNull::new(block.as_mut_ptr()).ok_or_else(failed)?;
            return Ok(Buffer { data, len, _block: Block::Small(block) });
        }
        // With a page more there is a start at a whole page, wherever the system puts the block.
        let mapped = needed.checked_add(LARGE_PAGE).filter(|mapped| isize::try_from(*mapped).is_ok());
        let mut block = MmapMut::map_anon(mapped.ok_or_else(failed)?).map_err(|_| failed())?;
        // A system without large pages refuses, and small ones do as well.
        #[cfg(target_os = "linux")]
        let _ = block.advise(memmap2::Advice::HugePage);
        let start = block.as_ptr().align_offset(LARGE_PAGE);
        let data = NonNull::new(block[start..start + needed].as_mut_ptr().cast()).ok_or_else(failed)?;
        Ok(Buffer { data, len, _block: Block::Large(block) })
    }

    /// A copy of values.
    pub(crate) fn copy_of(what: &str, values: &[T]) -> Result<Buffer<T>> {
        let mut copy = Buffer::zeroed(what, values.len())?;
        copy.copy_from_slice(values);
        Ok(copy)
    }

    /// Its size in bytes, touched or not.
    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `data` points to `len` values inside the block, zeroed when they were allocated.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; the borrow of `self` is unique.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

// SAFETY: a buffer owns its values as a Vec does.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Buffer<T> {}

/// A slice of which several workers write disjoint parts.
pub(crate) struct Parts<'a, T> {
    data: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Parts<'a, T> {
        Parts { data: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Part `start .. start + len`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts are disjoint")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}+{len} of {}", self.len);
        // SAFETY: inside the slice, which is borrowed for as long as `self` lives; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

// SAFETY: a worker that gets at a part has it for itself, as if the slice had been split; so T: Send suffices.
unsafe impl<T: Send> Send for Parts<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

/// How long a thread waits for work before it sleeps. Waking a sleeper costs about 15 us, and a step has hundreds of
/// jobs; between two steps of a decode the caller needs less than this.
const SPIN: Duration = Duration::from_micros(200);
/// Rounds of a spin between two looks at the clock.
const SPINS_PER_LOOK: usize = 64;

/// A fork-join pool. The calling thread is one of its workers; the others are made once and spin between jobs, then
/// sleep.
///
/// A job has units. Each worker owns a run of them, which it claims one by one from the front, so that it walks through
/// memory without a jump (two workers that take turns read 36 GB/s where two with a half each read 60, measured on Zen 3);
/// then it claims what others have left from the back. So a worker that is late (asleep, or off its CPU) is not waited for.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Makes the pool `!Sync`: one thread at a time may publish jobs, and a job cannot publish another.
    single_caller: PhantomData<Cell<()>>,
}

#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Per worker, the caller first, the units of its run that nobody claimed yet: the first in the low half, the end in
    /// the high half.
    claims: Vec<Line<AtomicU64>>,
    /// Jobs published so far.
    number: Line<AtomicUsize>,
    /// Finished units.
    done: Line<AtomicUsize>,
    job: UnsafeCell<Job>,
    sleeping: Vec<AtomicBool>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only between jobs (all units done, none claimable) and read only by a thread that holds a
// claimed unit of the job; claiming synchronises with publishing, see `Pool::run` and `Shared::work`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is followed only while `Pool::run` keeps what it points to alive.
unsafe impl Send for Shared {}

/// What is called with the number of each unit.
type Job = *const (dyn Fn(usize) + Sync);

impl Pool {
    /// A pool of `threads` workers, the caller included.
    pub(crate) fn new(threads: usize) -> Result<Pool> {
        let threads = threads.max(1);
        let nothing: &'static (dyn Fn(usize) + Sync) = &|_| ();
        let shared = Arc::new(Shared {
            claims: (0..threads).map(|_| Line(AtomicU64::new(0))).collect(),
            number: Line(AtomicUsize::new(0)),
            done: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(nothing),
            sleeping: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::new(), single_caller: PhantomData };
        for index in 0..threads - 1 {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new().name(format!("lily-cpu-{}", index + 1));
            let worker = worker
                .spawn(move || shared.serve(index + 1))
                .map_err(|e| Error::Device(format!("cannot start a thread: {e}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Number of workers.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job` with every number below `units`, each once, on any worker and in any order; returns when all calls
    /// have.
    pub(crate) fn run(&self, units: usize, job: impl Fn(usize) + Sync) {
        if units < 2 || self.workers.is_empty() {
            (0..units).for_each(job);
            return;
        }
        let Ok(count) = u32::try_from(units) else {
            (0..units).for_each(job);
            return;
        };
        let call: *const (dyn Fn(usize) + Sync + '_) = &job;
        // SAFETY: only the lifetime changes. The pointer is followed for claimed units only, and this function returns,
        // or unwinds, after all units are done.
        let call: *const (dyn Fn(usize) + Sync + 'static) = unsafe { std::mem::transmute(call) };
        let shared = &*self.shared;
        shared.done.0.store(0, Ordering::Relaxed);
        // SAFETY: no unit is claimable and all earlier ones are done, so no worker reads the job; this is the only
        // publishing thread, because the pool is not Sync.
        unsafe { *shared.job.get() = call };
        let workers = shared.claims.len() as u64;
        for (worker, claim) in (0..).zip(&shared.claims) {
            let [first, end] = [worker, worker + 1].map(|worker| u64::from(count) * worker / workers);
            claim.0.store(end << 32 | first, Ordering::Release);
        }
        shared.number.0.fetch_add(1, Ordering::SeqCst);
        for (sleeping, worker) in shared.sleeping.iter().zip(&self.workers) {
            if sleeping.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.work(0);
        let mut rounds = 0usize;
        while shared.done.0.load(Ordering::Acquire) != units {
            rounds += 1;
            // A worker that lost its CPU in the middle of a unit may need this one.
            if rounds.is_multiple_of(10_000) { thread::yield_now() } else { std::hint::spin_loop() }
        }
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `job` with the index of each piece of `len` elements of `data` (the last may be shorter) and the piece.
    pub(crate) fn pieces<T: Send>(&self, data: &mut [T], len: usize, job: impl Fn(usize, &mut [T]) + Sync) {
        let total = data.len();
        let parts = Parts::new(data);
        self.run(total.div_ceil(len), |i| {
            let start = i * len;
            // SAFETY: each index is passed once, and pieces of different indices do not overlap.
            job(i, unsafe { parts.part(start, len.min(total - start)) });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker cannot have panicked outside a job, and the panic of a job was passed on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Does the units of a worker's own run, then those that others have left.
    fn work(&self, worker: usize) {
        for own in 0..self.claims.len() {
            let run = &self.claims[(worker + own) % self.claims.len()].0;
            while let Some(unit) = claim(run, own == 0) {
                // SAFETY: a unit is claimed, so the job is published and stays until that unit is done.
                let job = unsafe { *self.job.get() };
                // SAFETY: `Pool::run` keeps the closure alive until all units are done.
                let call = unsafe { &*job };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| call(unit))) {
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                }
                self.done.0.fetch_add(1, Ordering::Release);
            }
        }
    }

    /// The life of a worker other than the caller.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let mut since = Instant::now();
            while !self.spin(seen) {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                if since.elapsed() >= SPIN {
                    self.sleep(worker - 1, seen);
                    since = Instant::now();
                }
            }
            seen = self.number.0.load(Ordering::Acquire);
            self.work(worker);
        }
    }

    /// Waits a little; whether there is a job after number `seen`.
    fn spin(&self, seen: usize) -> bool {
        (0..SPINS_PER_LOOK).any(|_| {
            std::hint::spin_loop();
            self.number.0.load(Ordering::Acquire) != seen
        })
    }

    fn sleep(&self, index: usize, seen: usize) {
        self.sleeping[index].store(true, Ordering::SeqCst);
        // A job published before the flag was seen is found here; one published after it finds the flag.
        while self.number.0.load(Ordering::SeqCst) == seen && !self.stop.load(Ordering::SeqCst) {
            thread::park();
            if !self.sleeping[index].load(Ordering::SeqCst) {
                return;
            }
        }
        self.sleeping[index].store(false, Ordering::SeqCst);
    }
}

/// Takes the first unit of a run, or its last.
fn claim(run: &AtomicU64, front: bool) -> Option<usize> {
    let mut left = run.load(Ordering::Acquire);
    loop {
        let (first, end) = (left & u64::from(u32::MAX), left >> 32);
        if first >= end {
            return None;
        }
        let (unit, rest) = if front { (first, left + 1) } else { (end - 1, left - (1 << 32)) };
        match run.compare_exchange_weak(left, rest, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(unit as usize),
            Err(now) => left = now,
        }
    }
}

thread_local! {
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Lends `job` a piece of this thread's scratch memory, `len` values of any content, from the start of a cache line on.
pub(crate) fn with_scratch<R>(len: usize, job: impl FnOnce(&mut [f32]) -> R) -> R {
    const LINE: usize = 64;
    let mut scratch = SCRATCH.take();
    if scratch.len() < len + LINE {
        scratch.resize(len + LINE, 0.0);
    }
    let start = scratch.as_ptr().align_offset(LINE).min(LINE);
    let result = job(&mut scratch[start..start + len]);
    SCRATCH.set(scratch);
    result
}

/// The threads to use if nobody says otherwise: one per physical core, as far as the affinity mask and the quota of the
/// container allow. A second thread on a core shares its memory port and gains nothing.
pub fn default_threads() -> usize {
    let allowed = thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(allowed, |cores| cores.clamp(1, allowed))
}

/// Physical cores among the CPUs that this process may use.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    // SAFETY: a set of CPUs is plain bits, for which zero is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most the size that it is told; 0 is this thread.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0 {
        return None;
    }
    let mut cores = std::collections::BTreeSet::new();
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: `cpu` is below the size of the set.
        if unsafe { libc::CPU_ISSET(cpu, &set) } {
            let siblings = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            cores.insert(std::fs::read_to_string(siblings).ok()?);
        }
    }
    Some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    None
}

/// Size of the pages that the system counts in.
fn page_bytes() -> Option<usize> {
    // SAFETY: sysconf reads a number and has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()
}

/// Reads mapped bytes into memory ahead of their use and maps the pages; does nothing where the system cannot be asked.
#[cfg(target_os = "linux")]
pub(crate) fn populate(bytes: &[u8]) {
    let Some(page) = page_bytes() else { return };
    let start = bytes.as_ptr().addr() / page * page;
    let len = bytes.as_ptr().addr() + bytes.len() - start;
    // SAFETY: this advice reads pages in and changes no content; a range that is not mapped, or a kernel before 5.14, makes
    // it an error, which leaves the pages to be read when they are touched.
    unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, libc::MADV_POPULATE_READ) };
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn populate(_bytes: &[u8]) {}

/// Memory that this process may have in bytes: of the machine, or of the container where that is less; `usize::MAX` where
/// it is not known.
pub(crate) fn memory_bytes() -> usize {
    // SAFETY: sysconf reads a number and has no preconditions.
    let pages = usize::try_from(unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) });
    let machine = match (pages, page_bytes()) {
        (Ok(pages), Some(page)) => pages.saturating_mul(page),
        _ => usize::MAX,
    };
    // Without a limit the file is absent or says `max`.
    let container = std::fs::read_to_string("/sys/fs/cgroup/memory.max");
    let container = container.ok().and_then(|limit| limit.trim().parse().ok());
    container.map_or(machine, |limit: usize| limit.min(machine))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For emulated processors, each with no more than it is named for: `cargo xtask check aarch64` runs them.
    #[cfg(target_arch = "aarch64")]
    mod detects {
        use super::*;

        #[test]
        #[ignore = "needs a processor without dot products of bytes"]
        fn portable() {
            assert_eq!(Isa::all(), [Isa::Portable]);
        }

        #[test]
        #[ignore = "needs a processor with dot products of bytes and without i8mm"]
        fn dotprod() {
            assert_eq!(Isa::all(), [Isa::Portable, Isa::Dotprod]);
        }

        #[test]
        #[ignore = "needs a processor with i8mm"]
        fn i8mm() {
            assert_eq!(Isa::all(), [Isa::Portable, Isa::Dotprod, Isa::I8mm]);
        }
    }

    #[test]
    fn every_unit_is_done_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for units in [0, 1, 2, 7, 300] {
                let counts: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
                pool.run(units, |unit| {
                    counts[unit].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} threads, {units} units");
            }
        }
    }

    #[test]
    fn sleeping_workers_do_not_hold_up_a_job_and_wake_for_the_next() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..5 {
            thread::sleep(4 * SPIN);
            let sum = AtomicUsize::new(0);
            pool.run(100, |unit| {
                sum.fetch_add(unit, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn a_panic_in_a_unit_reaches_the_caller_after_all_units_ended() {
        let pool = Pool::new(2).unwrap();
        let done = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(10, |unit| {
                done.fetch_add(1, Ordering::Relaxed);
                assert_ne!(unit, 3, "a unit that fails");
            });
        }));
        assert!(caught.is_err());
        assert_eq!(done.load(Ordering::Relaxed), 10);
        pool.run(2, |_| ());
    }

    #[test]
    fn pieces_cover_a_slice_with_a_shorter_last_one() {
        let pool = Pool::new(2).unwrap();
        let mut data = vec![0usize; 10];
        pool.pieces(&mut data, 4, |i, piece| piece.fill(i + 1));
        assert_eq!(data, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]);
    }

    #[test]
    fn a_buffer_that_cannot_be_had_is_an_error() {
        assert!(matches!(Buffer::<f32>::zeroed("x", usize::MAX / 2), Err(Error::OutOfMemory { .. })));
        assert!(Buffer::<f32>::zeroed("x", 1000).unwrap().iter().all(|v| *v == 0.0));
        assert!(Buffer::<f32>::zeroed("x", 0).unwrap().is_empty());
    }

    #[test]
    #[cfg_attr(not(target_os = "linux"), ignore = "the system does not tell what a process occupies")]
    fn a_large_buffer_starts_at_a_page_and_occupies_what_is_touched() {
        let mut buffer = Buffer::<f32>::zeroed("x", 1 << 28).unwrap();
        assert_eq!(buffer.as_ptr().align_offset(LARGE_PAGE), 0);
        let before = resident_bytes();
        for at in [0, (1 << 27) + 5, (1 << 28) - 1] {
            assert_eq!(buffer[at], 0.0);
            buffer[at] = 1.0;
        }
        let more = resident_bytes().saturating_sub(before);
        // Other tests of this process run meanwhile, so this is not exact; the buffer is 1 GB.
        assert!(more < 200 << 20, "{more} bytes for three pages");
    }

    /// Memory that this process occupies.
    fn resident_bytes() -> usize {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * page_bytes().unwrap()
    }
}
