//! Developer commands of lily.

mod bench_peers;
mod check;
mod cubins;
mod dist;
mod goldens;
mod recordings;
mod report;
mod soak;
mod standin;
mod synth;
mod tokenizer;
mod toolchain;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Parser;

/// Developer commands of lily.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Command {
    /// Measure lily against other engines on random weights of the same shape.
    BenchPeers(Box<bench_peers::Args>),
    /// Check formatting, lints, tests, documentation and links.
    Check(check::Args),
    /// Compile the CUDA kernels for every supported GPU, for release builds to embed.
    Cubins(cubins::Args),
    /// Make the archives of a release, with licences, a bill of materials and checksums.
    Dist(dist::Args),
    /// Make the wide checkpoint and its goldens with mlx-lm, which the ignored golden tests need.
    Goldens(goldens::Args),
    /// Draw what a terminal shows of lily, for the README.
    Recordings(recordings::Args),
    /// Write the page of benchmarks and its plots from the records in bench/results.
    Report(report::Args),
    /// Hold random conversations with `lily serve` for some minutes; every answer is checked against a server that caches nothing.
    Soak(soak::Args),
    /// Write the byte-level tokenizer and chat template of the tiny checkpoint.
    Standin(standin::Args),
    /// Write a checkpoint of random weights in the published format.
    Synth(Box<synth::Args>),
    /// Rebuild the tokenizer of Qwen3.6-35B-A3B, which the exact tokenizer tests need.
    Tokenizer(tokenizer::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::BenchPeers(args) => bench_peers::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Cubins(args) => cubins::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Goldens(args) => goldens::run(&args),
        Command::Recordings(args) => recordings::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Standin(args) => standin::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Tokenizer(args) => tokenizer::run(&args),
    }
}

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Cargo: the one that runs this, else the one of the path. Not the one that built this: by its own path it would leave the choice of a compiler
/// to the folder of every dependency.
fn cargo() -> std::process::Command {
    std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Where cargo puts what it builds.
fn target() -> anyhow::Result<PathBuf> {
    // This program is <target>/debug/xtask.
    let xtask = std::env::current_exe()?;
    Ok(xtask.ancestors().nth(2).context("xtask runs outside a target directory")?.to_owned())
}
