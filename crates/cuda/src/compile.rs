//! Kernels from source to machine code: the source for a shape, NVIDIA's run-time compiler, and where cubins are kept.
//!
//! A cubin comes from the binary if it was built with one for this shape and GPU (`cargo xtask cubins` makes them), else from the
//! cache on disk, else from NVRTC of an installed CUDA toolkit. For a GPU that acts as an older one it is PTX, from the latter two.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use etcetera::BaseStrategy;
use libloading::{Library, Symbol};
use lily_backend::{Error, Result};
use lily_model::Shape;

use crate::device::{Device, unavailable};
use crate::kernels::{Kernels, SOURCES, Sizes};

/// Compute capabilities that release builds carry cubins for. `90a` has instructions that only Hopper runs.
pub const ARCHES: &[&str] = &["80", "86", "89", "90a", "100", "120"];

/// The compute capability that code for a GPU of `arch` (90 for 9.0) is compiled for.
pub fn arch_name(arch: u32) -> String {
    if arch == 90 { "90a".into() } else { arch.to_string() }
}

/// KiB of shared memory that a block of threads may have on GPUs of this name, like `90a` (CUDA C++ programming guide, technical
/// specifications per compute capability).
pub fn shared_kib(arch: &str) -> usize {
    match arch.trim_end_matches('a').parse().unwrap_or(0) {
        80 | 87 => 163,
        90..=119 => 227,
        _ => 99,
    }
}

/// Kernels and the bytes of shared memory that they get at launch. Those that only Hopper has are not among them.
pub fn dynamic_shared(shape: &Shape, shared_kib: usize) -> Vec<(&'static str, usize)> {
    Kernels::dynamic_shared(&Sizes::new(shape, shared_kib))
}

/// All kernels for a shape as one source, for GPUs with so much [shared memory](shared_kib).
pub fn source(shape: &Shape, shared_kib: usize) -> String {
    let mut source = prelude(shape, shared_kib);
    for (name, text) in SOURCES {
        // Writing to a string cannot fail.
        let _ = writeln!(source, "#line 1 \"{name}\"\n{text}");
    }
    source
}

/// The sizes of a shape as constants.
fn prelude(shape: &Shape, shared_kib: usize) -> String {
    let mut text = String::new();
    for (name, value) in Sizes::new(shape, shared_kib).constants() {
        let _ = writeln!(text, "constexpr int {name} = {value};");
    }
    let _ = writeln!(text, "constexpr float RMS_EPS = {:e}f;", shape.rms_eps);
    let half = Shape::ROTARY_DIM / 2;
    let turns = (0..half).map(|i| shape.rope_theta.powf(-(i as f64) / half as f64) / std::f64::consts::PI);
    let turns: Vec<String> = turns.map(|turn| format!("{turn:e}")).collect();
    let _ = writeln!(text, "__constant__ const double ROPE_HALF_TURNS[{half}] = {{{}}};", turns.join(", "));
    text
}

/// What a cubin is kept under: a sum over the source and the architecture.
pub fn key(source: &str, arch: &str) -> String {
    // FNV-1a: keys must differ where sources do, and nobody picks sources.
    let hash = source
        .bytes()
        .chain([0])
        .chain(arch.bytes())
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}-sm_{arch}")
}

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// All kernels for a shape on a GPU.
pub(crate) fn kernels(shape: &Shape, device: &Device) -> Result<Kernels> {
    let arch = arch_name(device.arch);
    let shared_kib = shared_kib(&arch);
    let code = code(&source(shape, shared_kib), &arch, device.acts)?;
    Kernels::load(device, Sizes::new(shape, shared_kib), &code)
}

/// A source as the driver takes it: machine code, or, where a GPU acts as an older one, PTX.
fn code(source: &str, arch: &str, acts: bool) -> Result<Vec<u8>> {
    let key = key(source, arch);
    let embedded = EMBEDDED.iter().find(|(name, _)| *name == key);
    if let Some((_, cubin)) = embedded.filter(|_| !acts) {
        return Ok(cubin.to_vec());
    }
    let kind = if acts { "ptx" } else { "cubin" };
    let cached = cache_directory().map(|directory| directory.join(format!("{key}.{kind}")));
    if let Some(code) = cached.as_ref().and_then(|path| std::fs::read(path).ok()) {
        tracing::debug!(key, "kernels from the cache");
        return Ok(code);
    }
    let compiler = Nvrtc::open(None).map_err(|e| match e {
        Error::Unavailable { reason, .. } => {
            unavailable(format!("this binary has no kernels for sm_{arch} and this shape, and {reason}"))
        }
        other => other,
    })?;
    tracing::info!(arch, "compiling kernels for this GPU, once");
    let code = if acts { compiler.ptx(source, arch)? } else { compiler.compile(source, arch)?.cubin };
    if let Some(path) = cached
        && let Err(error) = store(&path, &code)
    {
        tracing::warn!(%error, path = %path.display(), "the compiled kernels could not be kept");
    }
    Ok(code)
}

fn cache_directory() -> Option<PathBuf> {
    etcetera::choose_base_strategy().ok().map(|base| base.cache_dir().join("lily").join("cuda"))
}

/// Written aside and renamed, so that no other process reads half of it.
fn store(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let unfinished = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&unfinished, cubin)?;
    std::fs::rename(unfinished, path)
}

/// NVIDIA's run-time compiler, loaded from a shared library.
pub struct Nvrtc(Library);

/// What the compiler made.
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// Warnings, and what the assembler says of each kernel.
    pub log: String,
}

type Program = *mut c_void;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type GetBytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;

impl Nvrtc {
    /// Opens the library at `path`, or the one that the system finds.
    pub fn open(path: Option<&Path>) -> Result<Nvrtc> {
        // Versions that have all functions used here; a plain name comes with the toolkit's development files.
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"];
        let windows = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
        let candidates: Vec<&Path> = match path {
            Some(path) => vec![path],
            None => names.iter().chain(&windows).map(Path::new).collect(),
        };
        // SAFETY: loading the library runs its initialisers, which every user of NVRTC does.
        let library = candidates.into_iter().find_map(|name| unsafe { Library::new(name) }.ok());
        library.map(Nvrtc).ok_or_else(|| unavailable("no NVRTC library of a CUDA toolkit 12 or newer was found"))
    }

    fn function<T>(&self, name: &str) -> Result<Symbol<'_, T>> {
        // SAFETY: the types below are those of NVRTC's header, unchanged since CUDA 11.1.
        unsafe { self.0.get(name.as_bytes()) }.map_err(|_| unavailable(format!("the NVRTC library has no {name}")))
    }

    /// Compiles a source to machine code of an architecture like `90a`. An error holds the compiler's messages.
    pub fn compile(&self, source: &str, arch: &str) -> Result<Compiled> {
        let (cubin, log) = self.run(source, arch, "sm", ["nvrtcGetCUBINSize", "nvrtcGetCUBIN"])?;
        Ok(Compiled { cubin, log })
    }

    /// Compiles a source to PTX, which the driver compiles for any GPU that is not older than `arch`.
    fn ptx(&self, source: &str, arch: &str) -> Result<Vec<u8>> {
        Ok(self.run(source, arch, "compute", ["nvrtcGetPTXSize", "nvrtcGetPTX"])?.0)
    }

    /// What the two functions of the library give of a compiled source, and the compiler's messages.
    fn run(&self, source: &str, arch: &str, kind: &str, [size, get]: [&str; 2]) -> Result<(Vec<u8>, String)> {
        let create: Symbol<'_, Create> = self.function("nvrtcCreateProgram")?;
        let compile: Symbol<'_, unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> =
            self.function("nvrtcCompileProgram")?;
        let destroy: Symbol<'_, unsafe extern "C" fn(*mut Program) -> c_int> = self.function("nvrtcDestroyProgram")?;
        let text = |text: &str| CString::new(text).map_err(|_| Error::Device("a zero byte in the kernels".into()));
        let source = text(source)?;
        let options = [&*format!("--gpu-architecture={kind}_{arch}"), "--std=c++17", "--ptxas-options=-v"];
        let options = options.into_iter().map(text).collect::<Result<Vec<_>>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: the strings are terminated and outlive the call; no headers are passed.
        let made = unsafe { create(&raw mut program, source.as_ptr(), c"kernels.cu".as_ptr(), 0, null(), null()) };
        if made != 0 {
            return Err(Error::Device(format!("nvrtcCreateProgram: error {made}")));
        }
        // SAFETY: `program` was made above, and the options are terminated strings.
        let result = unsafe { compile(program, options.len() as c_int, options.as_ptr()) };
        let log = self.bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog");
        let code = match result {
            0 => self.bytes(program, size, get),
            _ => Ok(Vec::new()),
        };
        // SAFETY: made above, destroyed once.
        unsafe { destroy(&raw mut program) };
        let log = log?;
        let log = CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default();
        if result != 0 {
            return Err(Error::Device(format!("the kernels do not compile for {kind}_{arch}: {}", log.trim())));
        }
        Ok((code?, log))
    }

    fn bytes(&self, program: Program, size: &str, get: &str) -> Result<Vec<u8>> {
        let (size, get) = (self.function::<GetSize>(size)?, self.function::<GetBytes>(get)?);
        let mut len = 0;
        // SAFETY: `program` is alive, and the buffer is as long as the library asks for.
        let result = unsafe {
            match size(program, &raw mut len) {
                0 => {
                    let mut bytes = vec![0u8; len];
                    (get(program, bytes.as_mut_ptr().cast()), bytes)
                }
                error => (error, Vec::new()),
            }
        };
        match result {
            (0, bytes) => Ok(bytes),
            (error, _) => Err(Error::Device(format!("NVRTC error {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_has_the_sizes_of_the_shape_and_every_kernel_file() {
        let source = source(&Shape::QWEN36, 227);
        assert!(source.contains("constexpr int HIDDEN = 2048;"));
        assert!(source.contains("constexpr int PROJ_DELTA = 12352;"));
        assert!(source.contains("constexpr float RMS_EPS = 1e-6f;"));
        assert!(SOURCES.iter().all(|(name, _)| source.contains(&format!("#line 1 \"{name}\""))));
    }

    #[test]
    fn sources_differ_by_shared_memory() {
        let kib: Vec<usize> = ARCHES.iter().map(|arch| shared_kib(arch)).collect();
        assert_eq!(kib, [163, 99, 99, 227, 227, 99]);
        assert!(source(&Shape::QWEN36, 99).contains("constexpr int SHARED_KIB = 99;"));
        assert!(source(&Shape::QWEN36, 227).contains("constexpr int SHARED_KIB = 227;"));
    }

    #[test]
    fn keys_differ_by_source_and_architecture() {
        let keys = [key("a", "80"), key("a", "90a"), key("b", "80")];
        assert!(keys[0] != keys[1] && keys[0] != keys[2]);
        assert_eq!(keys[1], key("a", "90a"));
        assert!(keys[1].ends_with("-sm_90a"));
    }
}
