//! A .metal file as a shared object: translated, checked, compiled by clang-19, kept by the hash of all that went into it.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use sha2::{Digest, Sha256};

use crate::pass::{Kernel, Parameter, Unit, translate};
use crate::{Error, Language};

const CLANG: &str = "clang++-19";

/// Where kernels find the tensor operations.
const TENSOR_OPERATIONS: &str = "MetalPerformancePrimitives/MetalPerformancePrimitives.h";

const SHIM: [(&str, &str); 11] = [
    ("cuda_runtime.h", include_str!("shim/cuda_runtime.h")),
    ("runtime.h", include_str!("shim/runtime.h")),
    ("runtime.cpp", include_str!("shim/runtime.cpp")),
    ("metal_stdlib", include_str!("shim/metal_stdlib")),
    ("metal_simdgroup_matrix", include_str!("shim/metal_simdgroup_matrix")),
    ("metal_tensor", include_str!("shim/metal_tensor")),
    (TENSOR_OPERATIONS, include_str!("shim/tensor_operations.h")),
    ("address_spaces/metal_tensor", include_str!("shim/address_spaces/metal_tensor")),
    (
        "address_spaces/MetalPerformancePrimitives/MetalPerformancePrimitives.h",
        include_str!("shim/address_spaces/tensor_operations.h"),
    ),
    ("address_spaces/metal_stdlib", include_str!("shim/address_spaces/metal_stdlib")),
    ("address_spaces/metal_simdgroup_matrix", include_str!("shim/address_spaces/metal_simdgroup_matrix")),
];

/// Half is rounded at every operation, as a GPU does. Vectorizers would make accesses wider than the kernel wrote them.
const KERNEL_FLAGS: [&str; 13] = [
    "-O2",
    "-march=x86-64-v3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize-coverage=func,trace-loads,trace-stores",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Wall",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unused-const-variable",
];
const RUNTIME_FLAGS: [&str; 4] = ["-std=c++17", "-O2", "-march=x86-64-v3", "-fPIC"];
const ADDRESS_SPACE_FLAGS: [&str; 10] = [
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-target",
    "spir64",
    "-fsyntax-only",
    "-cl-no-stdinc",
    "-Wno-everything",
    "-ferror-limit=100",
    // A library function that a kernel file has of its own is not the one of OpenCL.
    "-fno-builtin",
];

/// Clang's CUDA mode needs nothing of CUDA itself. The stand-ins for vectors ask for C++17.
const CUDA_FLAGS: [&str; 15] = [
    "-x",
    "cuda",
    "--cuda-device-only",
    "--cuda-gpu-arch=sm_80",
    "-nocudainc",
    "-nocudalib",
    "-std=c++17",
    "-O3",
    "-ffp-contract=on",
    // Of CUDA 12: shuffles of a whole warp.
    "-Xclang",
    "-target-feature",
    "-Xclang",
    "+ptx80",
    "-Wno-unknown-attributes",
    "-S",
];

impl Language {
    /// C++14 is the language of MSL 3, C++17 that of MSL 4; what clang takes beyond them is an error.
    fn flags(self) -> [&'static str; 3] {
        match self {
            Language::Metal3_2 => ["-std=c++14", "-Werror=c++17-extensions", "-D__METAL_VERSION__=320"],
            Language::Metal4_0 => ["-std=c++17", "-Werror=c++20-extensions", "-D__METAL_VERSION__=400"],
        }
    }

    /// What of this the check of address spaces needs: its language has features of C++17 always.
    fn version_flag(self) -> &'static str {
        self.flags()[2]
    }
}

/// One dispatch, as runtime.h has it.
#[repr(C)]
pub(crate) struct Launch {
    pub(crate) groups: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) order: u32,
    pub(crate) level_stamp: u32,
    pub(crate) dispatch_stamp: u32,
    pub(crate) binding_count: u32,
    pub(crate) arena_begin: u64,
    pub(crate) arena_end: u64,
    pub(crate) cells: *mut u8,
    pub(crate) bindings: *mut BoundRange,
    pub(crate) buffers: [*mut c_void; 31],
    pub(crate) threadgroup_bytes: [u32; 8],
    pub(crate) stacks: *mut u8,
    pub(crate) stack_bytes: u64,
}

/// A bound buffer, as runtime.h has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoundRange {
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) slot: u32,
    pub(crate) writable: u32,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
}

/// What a dispatch came to, as runtime.h has it.
#[repr(C)]
pub(crate) struct Report {
    pub(crate) lane_steps: u64,
    pub(crate) faulted: u32,
    pub(crate) message: [u8; 508],
}

type Thunk = unsafe extern "C" fn(*const c_void, *const c_void);
type Run = unsafe extern "C" fn(Thunk, *const Launch, *mut Report);
type Types = unsafe extern "C" fn(*mut Type);

/// A parameter's C++ type, as runtime.h has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Type {
    /// 0 a value, 1 a pointer, 2 a reference.
    is_address: u32,
    is_const: u32,
    size: u32,
}

/// A row of a kernel's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferSlot {
    pub(crate) slot: usize,
    pub(crate) writable: bool,
    /// Bytes of one element; a reference has just one.
    pub(crate) element_bytes: usize,
    pub(crate) is_reference: bool,
}

/// A compiled file.
pub(crate) struct Library {
    object: PathBuf,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) constants: Vec<String>,
}

/// A kernel with its constants set, in its own copy of the object.
pub(crate) struct Specialized {
    pub(crate) kernel: String,
    pub(crate) buffers: Vec<BufferSlot>,
    pub(crate) threadgroup_slots: Vec<usize>,
    pub(crate) most_threads: Option<u32>,
    thunk: Thunk,
    run: Run,
    /// Keeps the code in memory.
    _object: libloading::Library,
}

/// One compilation at a time: tests run side by side and ask for the same files.
static COMPILING: Mutex<()> = Mutex::new(());

impl Library {
    /// Translates and compiles `source`, unless this was done before. `name` is for messages.
    pub(crate) fn compile(name: &str, source: &str, language: Language) -> Result<Library, Error> {
        let unit =
            translate(source, language).map_err(|lints| Error::Lint { file: name.into(), lints: lints.join("\n") })?;
        let object = build(name, &unit, language)?;
        Ok(Library { object, kernels: unit.kernels, constants: unit.constants })
    }

    /// The kernel `name` with these values for all function constants of the file.
    pub(crate) fn specialize(&self, name: &str, constants: &[(&str, u32)]) -> Result<Specialized, Error> {
        let kernel = self.kernels.iter().find(|kernel| kernel.name == name);
        let kernel = kernel.ok_or_else(|| Error::Encoding(format!("there is no kernel {name}")))?;
        for wanted in &self.constants {
            if !constants.iter().any(|(constant, _)| constant == wanted) {
                return Err(Error::Encoding(format!("{name}: function constant {wanted} has no value")));
            }
        }
        if let Some((unknown, _)) = constants.iter().find(|(constant, _)| !self.constants.iter().any(|c| c == constant))
        {
            return Err(Error::Encoding(format!("{name}: there is no function constant {unknown}")));
        }
        // Function constants and threadgroup memory are global variables of the object: each pipeline has its own copy.
        let copy = tempfile::Builder::new().suffix(".so").tempfile().map_err(Error::Cache)?;
        std::fs::copy(&self.object, copy.path()).map_err(Error::Cache)?;
        let opening = |e: libloading::Error| Error::Compiler { file: name.into(), output: e.to_string() };
        // SAFETY: the object was made by `build` and has no initializers beside those of C++ containers.
        let object = unsafe { libloading::Library::new(copy.path()) }.map_err(opening)?;
        for (constant, value) in constants {
            // SAFETY: the token pass made `uint` variables of the constants, and no kernel of this copy runs yet.
            unsafe { **object.get::<*mut u32>(*constant).map_err(opening)? = *value };
        }
        let symbol = |prefix: &str| format!("{prefix}{name}");
        // SAFETY: the token pass wrote these functions with the types that runtime.h and this file both have.
        let (thunk, run, types) = unsafe {
            let thunk = *object.get::<Thunk>(symbol("msl_kernel_").as_str()).map_err(opening)?;
            let run = *object.get::<Run>("msl_run").map_err(opening)?;
            (thunk, run, *object.get::<Types>(symbol("msl_types_").as_str()).map_err(opening)?)
        };
        // SAFETY: a constant of this type, where the kernel has a limit.
        let most_threads = unsafe { object.get::<*const u32>(symbol("msl_limit_").as_str()).map(|limit| **limit) };
        let mut found = vec![Type::default(); kernel.parameters.len()];
        // SAFETY: it writes one entry per parameter.
        unsafe { types(found.as_mut_ptr()) };
        let buffers = kernel.parameters.iter().zip(&found).filter_map(|(parameter, found)| match parameter {
            Parameter::Buffer(slot) => Some(BufferSlot {
                slot: *slot,
                writable: found.is_const == 0,
                element_bytes: found.size as usize,
                is_reference: found.is_address == 2,
            }),
            _ => None,
        });
        let threadgroup_slots = kernel.parameters.iter().filter_map(|parameter| match parameter {
            Parameter::Threadgroup(slot) => Some(*slot),
            _ => None,
        });
        Ok(Specialized {
            kernel: name.into(),
            buffers: buffers.collect(),
            threadgroup_slots: threadgroup_slots.collect(),
            most_threads: most_threads.ok(),
            thunk,
            run,
            _object: object,
        })
    }
}

impl Specialized {
    /// Runs a dispatch to its end or its first fault.
    ///
    /// # Safety
    ///
    /// Every address in `launch` must be valid, and nothing else may use the memory that the bindings name.
    pub(crate) unsafe fn run(&mut self, launch: &Launch) -> Report {
        let mut report = Report { lane_steps: 0, faulted: 0, message: [0; 508] };
        // SAFETY: the runner checks each access of the kernel against the bindings, which the caller vouches for.
        unsafe { (self.run)(self.thunk, launch, &mut report) };
        report
    }
}

/// Where compiled files are kept: beside the running test, so that `cargo clean` clears them.
fn cache() -> Result<PathBuf, Error> {
    let program = std::env::current_exe().map_err(Error::Cache)?;
    let directory = program.parent().unwrap_or(Path::new(".")).join("metal-emu-cache");
    std::fs::create_dir_all(&directory).map_err(Error::Cache)?;
    Ok(directory)
}

/// The shared object of a translated file.
fn build(name: &str, unit: &Unit, language: Language) -> Result<PathBuf, Error> {
    let mut hash = Sha256::new();
    for (_, content) in SHIM {
        hash.update(content);
    }
    for flags in [&KERNEL_FLAGS[..], &RUNTIME_FLAGS, &ADDRESS_SPACE_FLAGS, &language.flags()] {
        hash.update(flags.join(" "));
    }
    hash.update(&unit.cpp);
    hash.update(&unit.address_spaces);
    let hash: String = hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    let cache = cache()?;
    let object = cache.join(format!("{hash}.so"));
    // A poisoned lock only says that another test failed.
    let _one_at_a_time = COMPILING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if object.exists() {
        return Ok(object);
    }
    let work = Workshop::new(&cache, &[("kernels.cpp", &unit.cpp), ("kernels.cl", &unit.address_spaces)])?;
    let clang = || work.clang();
    let checked = ["-isystem", "address_spaces", language.version_flag(), "kernels.cl"];
    run(name, clang().args(ADDRESS_SPACE_FLAGS).args(checked))?;
    run(
        name,
        clang().args(KERNEL_FLAGS).args(language.flags()).args([
            "-isystem",
            ".",
            "-c",
            "kernels.cpp",
            "-o",
            "kernels.o",
        ]),
    )?;
    run(name, clang().args(RUNTIME_FLAGS).args(["-c", "runtime.cpp", "-o", "runtime.o"]))?;
    // Symbols of one object are bound inside it, whatever other copies are loaded.
    run(name, clang().args(["-shared", "-Wl,-Bsymbolic", "kernels.o", "runtime.o", "-o", "kernels.so"]))?;
    std::fs::rename(work.at("kernels.so"), &object).map_err(Error::Cache)?;
    Ok(object)
}

/// PTX of a file, for the GPUs from A100 on.
pub(crate) fn ptx(name: &str, source: &str, language: Language) -> Result<String, Error> {
    let unit =
        translate(source, language).map_err(|lints| Error::Lint { file: name.into(), lints: lints.join("\n") })?;
    let work = Workshop::new(&cache()?, &[("kernels.cu", &unit.cuda)])?;
    run(
        name,
        work.clang().args(CUDA_FLAGS).args([
            language.version_flag(),
            "-isystem",
            ".",
            "kernels.cu",
            "-o",
            "kernels.ptx",
        ]),
    )?;
    std::fs::read_to_string(work.at("kernels.ptx")).map_err(Error::Cache)
}

/// A folder with the stand-ins and some sources, for clang to work in.
struct Workshop(tempfile::TempDir);

impl Workshop {
    fn new(cache: &Path, sources: &[(&str, &String)]) -> Result<Workshop, Error> {
        let work = Workshop(tempfile::tempdir_in(cache).map_err(Error::Cache)?);
        for directory in ["address_spaces", "."] {
            let directory = work.at(directory).join("MetalPerformancePrimitives");
            std::fs::create_dir_all(directory).map_err(Error::Cache)?;
        }
        let sources = sources.iter().map(|(file, content)| (*file, content.as_str()));
        for (file, content) in SHIM.into_iter().chain(sources) {
            std::fs::write(work.at(file), content).map_err(Error::Cache)?;
        }
        Ok(work)
    }

    fn at(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn clang(&self) -> Command {
        let mut command = Command::new(CLANG);
        command.current_dir(self.0.path());
        command
    }
}

fn run(name: &str, command: &mut Command) -> Result<(), Error> {
    let output = command.output().map_err(|source| Error::NoCompiler { compiler: CLANG, source })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::Compiler { file: name.into(), output: text })
}
