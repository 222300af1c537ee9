//! Developer commands: `cargo xtask help` lists them. One module per command.

mod synth;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer commands of lily")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Synth(synth::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Synth(args) => synth::run(&args),
    }
}
