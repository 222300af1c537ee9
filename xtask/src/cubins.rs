//! `cubins`: the CUDA kernels compiled for every GPU generation that releases support, without a GPU and without a toolkit.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lily_cuda::compile::{ARCHES, Nvrtc, dynamic_shared, key, shared_kib, source};
use lily_model::Shape;

/// NVIDIA's run-time compiler on PyPI, the newest whose code every driver for CUDA 12 takes.
const PACKAGE: &str = "nvidia-cuda-nvrtc-cu12==12.9.86";
/// Where the library is in the package.
const LIBRARY: &str = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";

/// Where a few registers may go to memory: the kernels were shaped on older GPUs, and none of these has been at hand yet.
const UNTUNED: [&str; 2] = ["100", "120"];
/// Kernels that may all the same, by model and GPU. Attention of the demo model keeps the number of its job in memory, which is looked at
/// once a job.
const SPILLS: [(&str, &str, &str); 1] = [("demo", "90a", "attend")];

#[derive(clap::Args)]
pub struct Args {
    /// Only check that every kernel compiles and none spills registers to memory where it may not; write nothing.
    #[arg(long)]
    check: bool,
    /// The NVRTC library; installed with pip below target/ if not given.
    #[arg(long, value_name = "FILE")]
    nvrtc: Option<PathBuf>,
    /// Python 3 with pip, for the package.
    #[arg(long, default_value = "python3")]
    python: String,
}

/// Makes them all, for a build that comes next.
pub fn make() -> Result<()> {
    run(&Args { check: false, nvrtc: None, python: "python3".into() })
}

pub fn run(args: &Args) -> Result<()> {
    let library = match &args.nvrtc {
        Some(library) => library.clone(),
        None => install(&args.python)?,
    };
    let compiler = Nvrtc::open(Some(&library)).with_context(|| format!("cannot use {}", library.display()))?;
    let out = crate::root().join("target/cubins");
    if !args.check {
        // Old ones would be embedded beside the new.
        if out.exists() {
            std::fs::remove_dir_all(&out).with_context(|| format!("cannot clear {}", out.display()))?;
        }
        std::fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    }
    for (name, shape) in [("qwen36", Shape::QWEN36), ("demo", Shape::DEMO)] {
        for arch in ARCHES {
            let kib = shared_kib(arch);
            let source = source(&shape, kib);
            let compiled = compiler.compile(&source, arch)?;
            check_shared(&compiled.log, &dynamic_shared(&shape, kib), kib << 10)
                .with_context(|| format!("{name}, sm_{arch}"))?;
            let spilling = spilling(&compiled.log);
            let spills = match spilling.is_empty() {
                true => "nothing spills".to_owned(),
                false => format!("registers spill to memory in {}", spilling.join(", ")),
            };
            let allowed = spilling.iter().all(|kernel| SPILLS.contains(&(name, *arch, *kernel)));
            ensure!(allowed || UNTUNED.contains(arch), "{name}, sm_{arch}: {spills}");
            println!("{name:<8} sm_{arch:<4} {:>9} bytes, {spills}", compiled.cubin.len());
            if !args.check {
                std::fs::write(out.join(format!("{}.cubin", key(&source, arch))), &compiled.cubin)?;
            }
        }
    }
    if !args.check {
        println!("{}: the next build of lily embeds them", out.display());
    }
    Ok(())
}

/// Installs the package where it is not there yet.
fn install(python: &str) -> Result<PathBuf> {
    let place = crate::root().join("target/nvrtc");
    let library = place.join(LIBRARY);
    if !library.is_file() {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"];
        let status = Command::new(python).args(pip).arg(&place).arg(PACKAGE).status();
        let status = status.with_context(|| format!("cannot run {python}; --python names another one"))?;
        ensure!(status.success(), "pip cannot install {PACKAGE}; --nvrtc takes a library that is there");
    }
    ensure!(Path::new(&library).is_file(), "{PACKAGE} has no {LIBRARY}");
    Ok(library)
}

/// A block of each kernel must find room for what its source declares, which the assembler says, and what it gets at launch.
fn check_shared(log: &str, dynamic: &[(&str, usize)], limit: usize) -> Result<()> {
    let declared = declared_shared(log);
    for (kernel, dynamic) in dynamic {
        let declared = declared.iter().find(|(name, _)| name == kernel);
        let (_, declared) = declared.with_context(|| format!("the assembler says nothing of {kernel}"))?;
        let needed = declared + dynamic;
        ensure!(needed <= limit, "a block of {kernel} needs {needed} bytes of shared memory and may have {limit}");
    }
    Ok(())
}

/// What the assembler says, each line with the kernel that it is about.
fn lines_of_kernels(log: &str) -> impl Iterator<Item = (&str, &str)> {
    log.lines().scan("", |kernel, line| {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            *kernel = name.split('\'').next().unwrap_or_default();
        }
        Some((*kernel, line))
    })
}

/// Kernels with the bytes of shared memory that their source declares.
fn declared_shared(log: &str) -> Vec<(&str, usize)> {
    let used = lines_of_kernels(log).filter_map(|(kernel, line)| Some((kernel, line.split_once(": Used ")?.1)));
    used.map(|(kernel, used)| {
        let bytes = used.split(", ").find_map(|part| part.strip_suffix(" bytes smem")?.parse().ok());
        (kernel, bytes.unwrap_or(0))
    })
    .collect()
}

/// The kernels of which the assembler says that registers went to memory.
fn spilling(log: &str) -> Vec<&str> {
    let spills = |line: &str| {
        line.contains("bytes spill stores") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads")
    };
    lines_of_kernels(log).filter(|(_, line)| spills(line)).map(|(kernel, _)| kernel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_are_found_with_their_kernel() {
        let log = "ptxas info    : Compiling entry function 'good' for 'sm_80'\n\
                   ptxas info    : Function properties for good\n\
                   \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Compiling entry function 'bad' for 'sm_80'\n\
                   ptxas info    : Function properties for bad\n\
                   \x20   16 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n";
        assert_eq!(spilling(log), ["bad"]);
    }

    #[test]
    fn shared_memory_is_counted_whole() {
        let log = "ptxas info    : Compiling entry function 'plain' for 'sm_89'\n\
                   ptxas info    : Used 18 registers, used 0 barriers, 380 bytes cmem[0]\n\
                   ptxas info    : Compiling entry function 'both' for 'sm_89'\n\
                   ptxas info    : Used 90 registers, used 1 barriers, 2000 bytes smem, 380 bytes cmem[0]\n";
        assert_eq!(declared_shared(log), [("plain", 0), ("both", 2000)]);
        check_shared(log, &[("plain", 3000), ("both", 1000)], 3000).unwrap();
        let error = check_shared(log, &[("both", 1001)], 3000).unwrap_err().to_string();
        assert_eq!(error, "a block of both needs 3001 bytes of shared memory and may have 3000");
        assert!(check_shared(log, &[("gone", 0)], 3000).is_err());
    }
}
