//! Runs .metal files on an NVIDIA GPU: as a second device beside the emulator, with true concurrency. A simdgroup is a warp.
//!
//! Files are compiled where clang is ([`compile`]), and run where the GPU is ([`Nvidia`]), which needs its driver and nothing else.
//! Buffers are in memory that host and GPU share, as on a Mac.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;
use sha2::{Digest, Sha256};

use crate::{Error, Language, Result, library};

/// Compiles a file into `folder`, for [`Nvidia::pipeline`] to find it there.
pub fn compile(folder: &Path, name: &str, source: &str, language: Language) -> Result<()> {
    let to = place(folder, source, language);
    if to.exists() {
        return Ok(());
    }
    std::fs::create_dir_all(folder).map_err(Error::Cache)?;
    std::fs::write(to, library::ptx(name, source, language)?).map_err(Error::Cache)
}

/// Where the PTX of a source is: under the hash of it.
fn place(folder: &Path, source: &str, language: Language) -> PathBuf {
    let mut hash = Sha256::new();
    hash.update(format!("{language:?}"));
    hash.update(source);
    let hash: String = hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    folder.join(format!("{hash}.ptx"))
}

/// A pipeline of an [`Nvidia`].
#[derive(Clone, Copy, Debug)]
pub struct Pipeline(usize);

/// An address in memory that host and GPU share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(u64);

impl Address {
    /// So many bytes further.
    pub fn offset(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// Most buffers of a kernel, as cuda_runtime.h has it.
const BUFFERS: usize = 31;
/// `CU_MEM_ATTACH_GLOBAL`.
const ATTACH_GLOBAL: c_uint = 1;

/// The first GPU of this machine.
pub struct Nvidia {
    driver: Library,
    name: String,
    folder: PathBuf,
    functions: Vec<*mut c_void>,
}

// SAFETY: the driver's handles may be used from any thread, once it has the context, which every call sees to.
unsafe impl Send for Nvidia {}

impl Nvidia {
    /// The first GPU, for kernels that were compiled into `folder`.
    pub fn open(folder: &Path) -> Result<Nvidia> {
        let failed = |e: libloading::Error| Error::Nvidia { call: "libcuda.so.1", what: e.to_string() };
        // SAFETY: the driver's library may be opened by any program.
        let driver = unsafe { Library::new("libcuda.so.1") }.map_err(failed)?;
        let mut gpu = Nvidia { driver, name: String::new(), folder: folder.to_owned(), functions: Vec::new() };
        let (mut device, mut context) = (0 as c_int, std::ptr::null_mut::<c_void>());
        let mut name = [0 as c_char; 128];
        // SAFETY: these are the driver's functions with the types of its documentation; what they write to is there.
        unsafe {
            gpu.call("cuInit", |f: unsafe extern "C" fn(c_uint) -> c_int| f(0))?;
            gpu.call("cuDeviceGet", |f: unsafe extern "C" fn(*mut c_int, c_int) -> c_int| f(&mut device, 0))?;
            gpu.call("cuDeviceGetName", |f: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
                f(name.as_mut_ptr(), 128, device)
            })?;
            gpu.call("cuDevicePrimaryCtxRetain", |f: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int| {
                f(&mut context, device)
            })?;
            gpu.call("cuCtxSetCurrent", |f: unsafe extern "C" fn(*mut c_void) -> c_int| f(context))?;
            gpu.name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
        }
        Ok(gpu)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Memory of any content, at least so many bytes.
    pub fn allocate(&mut self, bytes: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: as in `open`.
        unsafe {
            self.call("cuMemAllocManaged", |f: unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int| {
                f(&mut address, bytes.max(1), ATTACH_GLOBAL)
            })?;
        }
        Ok(Address(address))
    }

    /// Gives memory back.
    ///
    /// # Safety
    ///
    /// `address` comes from [`Nvidia::allocate`], and nothing uses it any more.
    pub unsafe fn free(&mut self, address: Address) -> Result<()> {
        // SAFETY: as in `open`; the rest is the caller's promise.
        unsafe { self.call("cuMemFree_v2", |f: unsafe extern "C" fn(u64) -> c_int| f(address.0)) }
    }

    /// The bytes at an address.
    ///
    /// # Safety
    ///
    /// They are inside of what [`Nvidia::allocate`] has given, and no launch is unfinished.
    pub unsafe fn bytes(&self, at: Address, bytes: usize) -> &[u8] {
        // SAFETY: the caller's promise; every value is a valid byte.
        unsafe { std::slice::from_raw_parts(at.0 as *const u8, bytes) }
    }

    /// The same, to be written.
    ///
    /// # Safety
    ///
    /// As [`Nvidia::bytes`].
    pub unsafe fn bytes_mut(&mut self, at: Address, bytes: usize) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(at.0 as *mut u8, bytes) }
    }

    /// A kernel of a file that was compiled, with all function constants of the file.
    pub fn pipeline(
        &mut self,
        source: &str,
        language: Language,
        kernel: &str,
        constants: &[(&str, u32)],
    ) -> Result<Pipeline> {
        let mut code = std::fs::read(place(&self.folder, source, language)).map_err(Error::Cache)?;
        // The driver takes PTX up to a zero, or what ptxas made of it.
        code.push(0);
        let (mut module, mut function) = (std::ptr::null_mut::<c_void>(), std::ptr::null_mut::<c_void>());
        let name = c_string(format!("msl_kernel_{kernel}").as_bytes())?;
        // SAFETY: as in `open`; the token pass made `uint` variables of the constants.
        unsafe {
            self.call("cuModuleLoadData", |f: unsafe extern "C" fn(*mut *mut c_void, *const u8) -> c_int| {
                f(&mut module, code.as_ptr())
            })?;
            for (constant, value) in constants {
                let constant = c_string(constant.as_bytes())?;
                let (mut address, mut bytes) = (0, 0);
                self.call(
                    "cuModuleGetGlobal_v2",
                    |f: unsafe extern "C" fn(*mut u64, *mut usize, *mut c_void, *const c_char) -> c_int| {
                        f(&mut address, &mut bytes, module, constant.as_ptr())
                    },
                )?;
                self.call("cuMemcpyHtoD_v2", |f: unsafe extern "C" fn(u64, *const u32, usize) -> c_int| {
                    f(address, value, size_of::<u32>())
                })?;
            }
            self.call(
                "cuModuleGetFunction",
                |f: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int| {
                    f(&mut function, module, name.as_ptr())
                },
            )?;
        }
        self.functions.push(function);
        Ok(Pipeline(self.functions.len() - 1))
    }

    /// Runs threadgroups, after all that was launched before.
    ///
    /// # Safety
    ///
    /// The kernel keeps to memory that [`Nvidia::allocate`] has given when it is bound to `buffers`, slot by slot.
    pub unsafe fn launch(
        &mut self,
        pipeline: Pipeline,
        buffers: &[Address],
        groups: [u32; 2],
        threads: u32,
    ) -> Result<()> {
        let mut arguments = [0u64; BUFFERS];
        arguments.iter_mut().zip(buffers).for_each(|(argument, buffer)| *argument = buffer.0);
        let mut parameters = [arguments.as_mut_ptr().cast::<c_void>()];
        let function = self.functions[pipeline.0];
        type Launch = unsafe extern "C" fn(
            *mut c_void,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            *mut c_void,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> c_int;
        let none = std::ptr::null_mut();
        // SAFETY: as in `open`; the driver copies the parameter, as large as the kernel's, before it returns.
        unsafe {
            self.call("cuLaunchKernel", |f: Launch| {
                f(function, groups[0], groups[1], 1, threads, 1, 1, 0, none, parameters.as_mut_ptr(), none.cast())
            })
        }
    }

    /// Waits for all launches. What went wrong in a kernel is said here, and ends the use of this GPU.
    pub fn finish(&mut self) -> Result<()> {
        // SAFETY: as in `open`.
        unsafe { self.call("cuCtxSynchronize", |f: unsafe extern "C" fn() -> c_int| f()) }
    }

    /// Calls a function of the driver.
    ///
    /// # Safety
    ///
    /// `F` is its type, and `run` keeps to its contract.
    unsafe fn call<F: Copy>(&self, call: &'static str, run: impl FnOnce(F) -> c_int) -> Result<()> {
        let failed = |what: String| Error::Nvidia { call, what };
        // SAFETY: the caller's promise.
        let function = unsafe { self.driver.get::<F>(call) }.map_err(|e| failed(e.to_string()))?;
        match run(*function) {
            0 => Ok(()),
            code => Err(failed(format!("error {code} of the driver, see CUresult in its documentation"))),
        }
    }
}

fn c_string(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|e| Error::Encoding(e.to_string()))
}
