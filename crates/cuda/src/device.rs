//! The device: driver, context, stream, memory, modules, graphs. The only file that calls the driver.

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use lily_backend::{Error, Result};

/// The oldest driver, as `cuDriverGetVersion` counts, whose functions are all there: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12_000;
/// The oldest compute capability that the kernels run on: asynchronous copies and integer mma.
const OLDEST_ARCH: u32 = 80;
/// From here on a kernel may start before the one before it has ended.
const OVERLAP_ARCH: u32 = 90;

/// What is on the machine is not enough.
pub(crate) fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { name: "cuda", reason: reason.into() }
}

/// Turns a driver's answer into an error that says what was tried.
fn check(result: CUresult, what: &str) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = null();
    // SAFETY: `text` receives a pointer to a static string of the driver, or stays null.
    let known = unsafe { sys::cuGetErrorString(result, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    // SAFETY: not null, and a string of the driver that lives as long as the program.
    let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown error".into() };
    Err(Error::Device(format!("{what}: {text}")))
}

/// Calls a function of the driver, naming it in the error.
macro_rules! driver {
    ($call:ident ( $($argument:expr),* )) => {
        // SAFETY: pointers among the arguments are valid for what the driver does with them: handles that this file made and
        // keeps alive, places of this frame that receive results, and device memory owned by a `Buffer`.
        check(unsafe { sys::$call($($argument),*) }, stringify!($call))
    };
}

/// A context on one device. Kept by everything that was made in it.
#[derive(Debug)]
pub(crate) struct Context(sys::CUcontext, sys::CUdevice);

// SAFETY: the driver's contexts may be used from any thread that makes them current, which every use here does.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}

impl Context {
    fn enter(&self) {
        // An error here comes back in the call that follows.
        let _ = driver!(cuCtxSetCurrent(self.0));
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = driver!(cuDevicePrimaryCtxRelease_v2(self.1));
    }
}

/// A device with one stream, on which everything runs in order.
pub(crate) struct Device {
    pub(crate) context: Arc<Context>,
    stream: sys::CUstream,
    /// Its name, like `NVIDIA H200`.
    pub(crate) name: String,
    /// Compute capability times 10, like 90.
    pub(crate) arch: u32,
    /// Whether it acts as an older one than it is.
    pub(crate) acts: bool,
    /// Streaming multiprocessors.
    pub(crate) processors: u32,
    /// Bytes of its memory.
    pub(crate) memory: usize,
}

// SAFETY: a stream may be used from any thread; `Device` is owned by one backend, which one thread uses at a time.
unsafe impl Send for Device {}

impl Device {
    /// Opens a device of the machine, counted from 0.
    pub(crate) fn open(index: usize) -> Result<Device> {
        probe_driver()?;
        driver!(cuInit(0)).map_err(|e| unavailable(format!("the driver does not start: {e}")))?;
        let mut count = 0;
        driver!(cuDeviceGetCount(&raw mut count))?;
        if count == 0 {
            return Err(unavailable("the driver finds no NVIDIA GPU"));
        }
        let index = i32::try_from(index).ok().filter(|index| *index < count);
        let Some(index) = index else {
            return Err(unavailable(format!("the driver finds {count} NVIDIA GPUs, and one more was asked for")));
        };
        let mut device = 0;
        driver!(cuDeviceGet(&raw mut device, index))?;
        let attribute = |attribute| {
            let mut value = 0;
            driver!(cuDeviceGetAttribute(&raw mut value, attribute, device)).map(|()| value.unsigned_abs())
        };
        use sys::CUdevice_attribute::*;
        let arch = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let mut name = [0; 256];
        driver!(cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        // SAFETY: the array ends with a zero that the driver was not given room to overwrite.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        if arch < OLDEST_ARCH {
            return Err(unavailable(format!(
                "{name} has compute capability {}.{}; the kernels need 8.0 or newer",
                arch / 10,
                arch % 10
            )));
        }
        let mut memory = 0;
        driver!(cuDeviceTotalMem_v2(&raw mut memory, device))?;
        let mut context = null_mut();
        driver!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        let context = Arc::new(Context(context, device));
        context.enter();
        let mut stream = null_mut();
        driver!(cuStreamCreate(&raw mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Device { context, stream, name, arch, acts: false, processors, memory })
    }

    /// Makes it act as a GPU of compute capability `compute`, times ten: as itself, or as an older one whose kernels do not overlap.
    pub(crate) fn act_as(&mut self, compute: u32) -> Result<()> {
        let older = OLDEST_ARCH..self.arch.min(OVERLAP_ARCH);
        if compute != self.arch && !older.contains(&compute) {
            return Err(unavailable(format!(
                "{} can act as an older GPU of compute capability 8.0 to 8.9, not as one of {}.{}",
                self.name,
                compute / 10,
                compute % 10
            )));
        }
        (self.acts, self.arch) = (compute < self.arch, compute);
        Ok(())
    }

    /// Makes the context current on this thread. Every call of the backend begins with it.
    pub(crate) fn enter(&self) {
        self.context.enter();
    }

    /// Whether kernels may overlap.
    pub(crate) fn overlaps(&self) -> bool {
        self.arch >= OVERLAP_ARCH
    }

    /// Bytes of its memory that nothing uses.
    pub(crate) fn free_memory(&self) -> Result<usize> {
        let (mut free, mut total) = (0, 0);
        driver!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok(free)
    }

    /// Memory of `bytes`, zeros.
    pub(crate) fn zeroed(&self, what: &str, bytes: usize) -> Result<Buffer> {
        let bytes = bytes.max(16);
        let available = self.free_memory()?;
        let exhausted = || Error::OutOfMemory { what: what.into(), needed: bytes, available };
        if bytes > available {
            return Err(exhausted());
        }
        let mut pointer = 0;
        driver!(cuMemAlloc_v2(&raw mut pointer, bytes)).map_err(|_| exhausted())?;
        let buffer = Buffer { pointer, bytes, context: Arc::clone(&self.context) };
        driver!(cuMemsetD8Async(pointer, 0, bytes, self.stream))?;
        Ok(buffer)
    }

    /// Host memory that the device can read and write.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut host = null_mut();
        // 2: mapped into the device's addresses.
        driver!(cuMemHostAlloc(&raw mut host, bytes, 2))?;
        // SAFETY: `bytes` bytes were just allocated there.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        let mut pointer = 0;
        driver!(cuMemHostGetDevicePointer_v2(&raw mut pointer, host, 0))?;
        Ok(Pinned { host: host.cast(), pointer: Pointer(pointer), bytes, context: Arc::clone(&self.context) })
    }

    /// Copies to the device, in the order of the stream. The source may change when this returns.
    pub(crate) fn upload(&self, to: Pointer, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        driver!(cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), from.len(), self.stream))
    }

    /// Copies pinned memory to the device, in the order of the stream; it must not change before that.
    pub(crate) fn upload_pinned(&self, to: Pointer, from: &Pinned, offset: usize, bytes: usize) -> Result<()> {
        assert!(offset + bytes <= from.bytes);
        driver!(cuMemcpyHtoDAsync_v2(to.0, from.host.wrapping_add(offset).cast(), bytes, self.stream))
    }

    /// Copies to the host, after all that was submitted before.
    pub(crate) fn download(&self, to: &mut [u8], from: Pointer) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        driver!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, to.len(), self.stream))?;
        self.synchronize()
    }

    /// [`Device::download`] of f32.
    pub(crate) fn download_floats(&self, to: &mut [f32], from: Pointer) -> Result<()> {
        // SAFETY: every pattern of bytes is an f32, and the bytes are those of the slice.
        let bytes = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), size_of_val(to)) };
        self.download(bytes, from)
    }

    /// Copies on the device.
    pub(crate) fn copy(&self, to: Pointer, from: Pointer, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        driver!(cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, self.stream))
    }

    /// Fills with zeros.
    pub(crate) fn clear(&self, at: Pointer, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        driver!(cuMemsetD8Async(at.0, 0, bytes, self.stream))
    }

    /// Waits for all that was submitted.
    pub(crate) fn synchronize(&self) -> Result<()> {
        driver!(cuStreamSynchronize(self.stream))
    }

    /// A mark in the stream that can be waited for.
    pub(crate) fn event(&self) -> Result<Event> {
        let mut event = null_mut();
        driver!(cuEventCreate(&raw mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32))?;
        Ok(Event(event, Arc::clone(&self.context)))
    }

    /// Puts the mark behind what was submitted so far.
    pub(crate) fn record(&self, event: &Event) -> Result<()> {
        driver!(cuEventRecord(event.0, self.stream))
    }

    /// Loads a cubin, or PTX that ends with a zero byte.
    pub(crate) fn module(&self, code: &[u8]) -> Result<Module> {
        let mut module = null_mut();
        driver!(cuModuleLoadData(&raw mut module, code.as_ptr().cast()))?;
        Ok(Module(module, Arc::clone(&self.context)))
    }

    /// Launches a kernel; see [`Launch`].
    pub(crate) fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: an attribute of zeros is valid: the one that is ignored.
        let mut overlap: sys::CUlaunchAttribute = unsafe { MaybeUninit::zeroed().assume_init() };
        overlap.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        overlap.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: launch.grid.1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: self.stream,
            attrs: &raw mut overlap,
            numAttrs: u32::from(launch.overlap),
        };
        let parameters = launch.arguments.as_ptr().cast_mut();
        driver!(cuLaunchKernelEx(&raw const config, launch.function.0, parameters, null_mut()))
            .map_err(|e| Error::Device(format!("{}: {e}", launch.function.1)))
    }

    /// Records what `submit` launches as a graph.
    pub(crate) fn capture(&self, submit: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        driver!(cuStreamBeginCapture_v2(self.stream, mode))?;
        let submitted = submit();
        let mut graph = null_mut();
        let ended = driver!(cuStreamEndCapture(self.stream, &raw mut graph));
        submitted.and(ended)?;
        let mut exec = null_mut();
        let made = driver!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        driver!(cuGraphDestroy(graph))?;
        made?;
        Ok(Graph(exec, Arc::clone(&self.context)))
    }

    /// Runs a graph.
    pub(crate) fn run(&self, graph: &Graph) -> Result<()> {
        driver!(cuGraphLaunch(graph.0, self.stream))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.enter();
        let _ = driver!(cuStreamDestroy_v2(self.stream));
    }
}

/// Looks for the driver before anything is called that would panic without it.
fn probe_driver() -> Result<()> {
    let names = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
    // SAFETY: loading NVIDIA's driver library runs its initialisers, which every CUDA program does.
    let library = names.into_iter().find_map(|name| unsafe { libloading::Library::new(name) }.ok());
    let library = library.ok_or_else(|| unavailable("no NVIDIA driver is installed (libcuda.so.1 was not found)"))?;
    let mut version = 0i32;
    // SAFETY: the function has had this signature since CUDA 2.2.
    let result = unsafe {
        let get: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> = library
            .get(b"cuDriverGetVersion")
            .map_err(|_| unavailable("the NVIDIA driver has no cuDriverGetVersion"))?;
        get(&raw mut version)
    };
    // The bindings load it again by name.
    drop(library);
    if result != 0 || version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(unavailable(format!("the NVIDIA driver is for CUDA {major}.{minor}; 12.0 or newer is needed")));
    }
    Ok(())
}

/// An address in device memory.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pointer(pub(crate) u64);

impl Pointer {
    /// No address.
    pub(crate) const NULL: Pointer = Pointer(0);

    /// `bytes` further on.
    pub(crate) fn at(self, bytes: usize) -> Pointer {
        Pointer(self.0 + bytes as u64)
    }
}

/// Device memory.
#[derive(Debug)]
pub(crate) struct Buffer {
    pointer: u64,
    bytes: usize,
    context: Arc<Context>,
}

impl Buffer {
    pub(crate) fn pointer(&self) -> Pointer {
        Pointer(self.pointer)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.context.enter();
        // Waits for the work that uses it.
        let _ = driver!(cuMemFree_v2(self.pointer));
    }
}

/// Host memory that the device sees.
pub(crate) struct Pinned {
    host: *mut u8,
    pub(crate) pointer: Pointer,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Writes at `offset`, what no pending copy reads.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.slice_mut(offset, bytes.len()).copy_from_slice(bytes);
    }

    /// A part that no pending copy reads.
    pub(crate) fn slice_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.bytes);
        // SAFETY: inside the allocation, which `self` borrows mutably; the device only reads it in copies that callers wait for.
        unsafe { std::slice::from_raw_parts_mut(self.host.add(offset), len) }
    }

    /// A word that the device has written, read after waiting for it.
    pub(crate) fn word(&self, index: usize) -> u32 {
        assert!((index + 1) * 4 <= self.bytes);
        // SAFETY: inside the allocation and aligned like it; volatile because the device writes it.
        unsafe { self.host.cast::<u32>().add(index).read_volatile() }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.enter();
        let _ = driver!(cuMemFreeHost(self.host.cast()));
    }
}

/// A mark in the stream.
pub(crate) struct Event(sys::CUevent, Arc<Context>);

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Waits for it; errors of the work before it surface here.
    pub(crate) fn wait(&self) -> Result<()> {
        driver!(cuEventSynchronize(self.0))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.1.enter();
        let _ = driver!(cuEventDestroy_v2(self.0));
    }
}

/// Loaded kernels.
pub(crate) struct Module(sys::CUmodule, Arc<Context>);

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}

impl Module {
    /// The kernel of a name, with room for `shared` bytes of dynamic shared memory.
    pub(crate) fn function(&self, name: &'static str, shared: u32) -> Result<Function> {
        let symbol = CString::new(name).map_err(|_| Error::Device(format!("{name:?} is no name of a kernel")))?;
        let mut function = null_mut();
        driver!(cuModuleGetFunction(&raw mut function, self.0, symbol.as_ptr()))
            .map_err(|e| Error::Device(format!("{name}: {e}")))?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        driver!(cuFuncSetAttribute(function, attribute, shared as i32))
            .map_err(|e| unavailable(format!("{name} needs {shared} bytes of shared memory: {e}")))?;
        // All memory that may be shared is: kernels that want another split cannot run beside each other.
        let split = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        driver!(cuFuncSetAttribute(function, split, 100))?;
        Ok(Function(function, name))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.1.enter();
        let _ = driver!(cuModuleUnload(self.0));
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction, &'static str);

// SAFETY: functions may be used from any thread.
unsafe impl Send for Function {}

/// How a kernel is launched.
pub(crate) struct Launch<'a> {
    pub(crate) function: Function,
    pub(crate) grid: (u32, u32),
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Whether it may start before the kernel in front of it has ended.
    pub(crate) overlap: bool,
    /// The addresses of its arguments, of the types that the kernel has.
    pub(crate) arguments: &'a [*mut c_void],
}

/// Kernels that run as one.
pub(crate) struct Graph(sys::CUgraphExec, Arc<Context>);

// SAFETY: graphs may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        self.1.enter();
        let _ = driver!(cuGraphExecDestroy(self.0));
    }
}
