//! Developer commands of lily.

mod synth;

use clap::Parser;

/// Developer commands of lily.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Command {
    /// Write a checkpoint of random weights in the published format.
    Synth(synth::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Synth(args) => synth::run(&args),
    }
}
