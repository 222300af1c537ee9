//! `lily`: the command line.

mod align;
mod args;
mod bench;
mod chat;
mod checkpoint;
mod devices;
mod eval;
mod exit;
mod inspect;
mod logits;
mod output;
mod pull;
mod run;
mod selftest;
mod serve;
mod talk;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};

/// A local inference engine for one model, Qwen3.6-35B-A3B.
#[derive(Parser)]
#[command(name = "lily", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more on stderr: once for progress, twice for details.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt, from the command line or from stdin.
    Run(run::RunArgs),
    /// Talk with the model in the terminal.
    Chat(chat::ChatArgs),
    /// Serve the APIs of OpenAI and Anthropic over HTTP.
    Serve(Box<serve::ServeArgs>),
    /// Show a checkpoint: shape, tensors, bytes, which context fits; compare two backends.
    Inspect(inspect::InspectArgs),
    /// Measure prefill and decode speed, memory bandwidth and memory.
    Bench(Box<bench::BenchArgs>),
    /// Measure quality: perplexity, agreement of backends, answers to tasks, recall from long contexts.
    Eval(Box<eval::EvalArgs>),
    /// Write the logits of given token ids to a safetensors file.
    Logits(logits::LogitsArgs),
    /// Check that the devices of this machine compute what they should; prints a report to send.
    Selftest(selftest::SelftestArgs),
    /// Download the model (20.4 GB), or continue a download.
    Pull(pull::PullArgs),
    /// Rewrite the model so that a Mac's GPU uses the mapped files without a copy.
    Align(align::AlignArgs),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write manual pages into a directory.
    Man {
        /// Made if it is not there.
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match cli.verbose {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).without_time().init();
    let result = match cli.command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::chat(args),
        Command::Serve(args) => serve::serve(&args),
        Command::Inspect(args) => inspect::inspect(args),
        Command::Bench(args) => bench::bench(&args),
        Command::Eval(args) => eval::eval(*args),
        Command::Logits(args) => logits::logits(args),
        Command::Selftest(args) => selftest::selftest(&args),
        Command::Pull(args) => pull::pull(&args),
        Command::Align(args) => align::align(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "lily", &mut std::io::stdout());
            Ok(())
        }
        Command::Man { directory } => man(&directory),
    };
    exit::report(result)
}

/// A page for lily and one for each command.
fn man(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), directory))
        .with_context(|| format!("cannot write manual pages into {}", directory.display()))
}
