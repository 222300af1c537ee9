//! `soak`: `lily serve` under random conversations for some minutes. `tools/server-tests/soak.py` does it, and says what must hold.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

#[derive(clap::Args)]
pub struct Args {
    /// The program `lily`; by default a release build of this tree.
    lily: Option<PathBuf>,
    /// How long.
    #[arg(long, default_value_t = 10)]
    minutes: u32,
    /// Of everything that is random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Conversations go on in so many threads at once.
    #[arg(long, default_value_t = 4)]
    clients: u32,
    /// Python 3.
    #[arg(long, default_value = "python3")]
    python: String,
}

pub fn run(args: &Args) -> Result<()> {
    let lily = match &args.lily {
        Some(lily) => std::path::absolute(lily)?,
        None => crate::bench_peers::build_lily()?,
    };
    let mut soak = Command::new(&args.python);
    // Nothing is to lie beside the scripts afterwards.
    soak.arg("-B").arg(crate::root().join("tools/server-tests/soak.py")).arg(lily);
    for (name, value) in [
        ("--minutes", args.minutes.to_string()),
        ("--seed", args.seed.to_string()),
        ("--clients", args.clients.to_string()),
    ] {
        soak.args([name, &value]);
    }
    let status = soak.status().with_context(|| format!("cannot run {soak:?}"))?;
    ensure!(status.success(), "the server did not stand {} minutes with seed {}", args.minutes, args.seed);
    Ok(())
}
