//! `lily eval`: how well a checkpoint and a backend do what they should, in numbers that anyone can measure again.
//!
//! - `text`: perplexity of a text, and how far one backend is from another on it; `logits`: the same against stored logits;
//!   `passage`: what both read, and by which pieces;
//! - `tasks`: answers to prompts whose right answers are known; `needle`: answers about one sentence in a long context; `ask`: how
//!   both get their answers;
//! - `record`: what is kept.

mod ask;
mod logits;
mod needle;
mod passage;
mod record;
mod tasks;
mod text;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::args::{BackendName, KvType, ModelArgs};

/// Arguments of `lily eval`.
#[derive(Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Perplexity of a text; with --against, how far two backends are apart on it.
    Text(text::TextArgs),
    /// The same against stored logits, those of another implementation or of `lily logits`.
    Logits(logits::LogitsArgs),
    /// Whether a sentence in a long context is found again, by context and depth.
    Needle(needle::NeedleArgs),
    /// Scores of answers to a file of prompts: right, ended by themselves, thought as they were told.
    Tasks(tasks::TasksArgs),
}

/// What all of them take.
#[derive(Args)]
struct Common {
    /// Append the result to this file as a line of JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
}

impl Common {
    /// Element type of the KV cache. The reference knows only one.
    fn kv(&self) -> KvType {
        match self.model.device.backend {
            BackendName::Reference => KvType::F32,
            _ => self.model.device.kv,
        }
    }
}

/// What a file is called in results: where it lies is nobody's business.
fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Runs the command.
pub fn eval(args: EvalArgs) -> anyhow::Result<()> {
    match args.what {
        What::Text(args) => text::text(&args),
        What::Logits(args) => logits::logits(&args),
        What::Needle(args) => needle::needle(&args),
        What::Tasks(args) => tasks::tasks(&args),
    }
}
