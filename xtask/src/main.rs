//! Developer commands of lily.

mod standin;
mod synth;
mod tokenizer;

use clap::Parser;

/// Developer commands of lily.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Command {
    /// Write the byte-level tokenizer and chat template of the tiny checkpoint.
    Standin(standin::Args),
    /// Write a checkpoint of random weights in the published format.
    Synth(synth::Args),
    /// Rebuild the tokenizer of Qwen3.6-35B-A3B, which the exact tokenizer tests need.
    Tokenizer(tokenizer::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Standin(args) => standin::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Tokenizer(args) => tokenizer::run(&args),
    }
}
