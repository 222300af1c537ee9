//! `lily eval text`: perplexity of a text, and how far two backends are apart on it.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use lily_engine::TextModel;
use lily_model::tokenizer::Tokenizer;
use lily_reference::quality::{Agreement, Likelihood};
use serde::Serialize;

use super::passage::{self, Passage};
use super::record::Results;
use super::{Common, name};
use crate::args::{BackendName, DeviceArgs, KvType, ModelArgs};
use crate::checkpoint;
use crate::devices::Forward;
use crate::exit::Usage;
use crate::output::{grouped, progress};

/// What ends each document of a file that has several.
const END: &str = "<|endoftext|>";

/// Arguments of `lily eval text`.
#[derive(Args)]
pub struct TextArgs {
    /// The text, UTF-8.
    file: PathBuf,
    /// The file has documents that end with <|endoftext|>; a line break after it is not theirs. Each is read for itself, its end mark
    /// included, and control tokens in it count.
    #[arg(long)]
    documents: bool,
    /// Tokens that are read at once, from an empty state.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    window: usize,
    /// From the begin of a window to that of the next; the tokens that both have are predicted by the first. Default: half a
    /// window.
    #[arg(long, value_name = "TOKENS")]
    stride: Option<NonZeroUsize>,
    /// Only so many tokens: of documents, whole ones until there are as many.
    #[arg(long, value_name = "N")]
    tokens: Option<NonZeroUsize>,
    /// Compare with this backend: most likely tokens and KL divergence at every token.
    #[arg(long, value_enum, value_name = "BACKEND")]
    against: Option<BackendName>,
    /// Element type of its KV cache. Default: that of --kv.
    #[arg(long, value_enum, value_name = "TYPE", requires = "against")]
    against_kv: Option<KvType>,
    #[command(flatten)]
    common: Common,
}

/// What came out.
#[derive(Serialize)]
struct Outcome {
    text: String,
    /// Tokens that were predicted.
    tokens: usize,
    window: usize,
    stride: usize,
    perplexity: f64,
    against: Option<Against>,
}

/// How far the predictions are from others.
#[derive(Serialize)]
pub struct Against {
    /// Whose.
    pub name: String,
    /// Perplexity by them.
    pub perplexity: f64,
    /// Share of tokens at which both have the same most likely one.
    pub same_top: f64,
    /// Mean KL divergence of ours from theirs, in nats.
    pub kl: f64,
    /// The largest.
    pub worst_kl: f64,
}

impl Against {
    pub fn new(name: String, theirs: &Likelihood, agreement: &Agreement) -> Against {
        Against {
            name,
            perplexity: theirs.perplexity(),
            same_top: agreement.same_top_share(),
            kl: agreement.mean_divergence(),
            worst_kl: agreement.worst_divergence,
        }
    }

    /// Prints the table of both, ours first.
    pub fn print(&self, ours: &str, perplexity: f64) {
        let width = ours.len().max(self.name.len());
        println!("{:width$}  {:>11}", "", "perplexity");
        println!("{:width$}  {:>11.5}", self.name, self.perplexity);
        let (change, same) = (100.0 * (perplexity / self.perplexity - 1.0), 100.0 * self.same_top);
        println!(
            "{ours:width$}  {perplexity:>11.5}  {change:+.4} %; same most likely token at {same:.3} %; KL {:.2e} nats a token, \
             at most {:.2e}",
            self.kl, self.worst_kl
        );
    }
}

/// Runs the command.
pub fn text(args: &TextArgs) -> anyhow::Result<()> {
    let stride = stride(args)?;
    let other = other(args)?;
    let mut results = Results::open(&args.common)?;
    let text = read_text(&args.file)?;
    let model = &args.common.model;
    let checkpoint = Arc::new(checkpoint::open(model.model.as_deref())?);
    let tokenizer = TextModel::load(&checkpoint.source, &checkpoint.config)?.tokenizer;
    let documents = documents(args, &text, &tokenizer)?;
    let cut = |ids: &Vec<u32>| passage::windows(ids.len(), args.window, stride);
    let passages: Vec<(&[u32], Passage)> =
        documents.iter().flat_map(|ids| cut(ids).into_iter().map(move |passage| (&ids[..], passage))).collect();

    let longest = passages.iter().map(|(_, passage)| passage.tokens.len() - 1).max().unwrap_or(0);
    let mut first = Forward::load(model, Arc::clone(&checkpoint), longest)?;
    let mut second = other.map(|other| Forward::load(&other, Arc::clone(&checkpoint), longest)).transpose()?;
    let mut readers: Vec<&mut Forward> = [Some(&mut first), second.as_mut()].into_iter().flatten().collect();

    let bar = progress("reading", "tokens");
    bar.set_length(passages.iter().map(|(_, passage)| passage.count() as u64).sum());
    let (mut ours, mut theirs, mut agreement) = (Likelihood::default(), Likelihood::default(), Agreement::default());
    let vocab = checkpoint.config.shape.vocab;
    for (ids, passage) in &passages {
        passage::read(&mut readers, ids, passage, vocab, |at, logits| {
            ours.add(logits[0], ids[at]);
            if let Some(other) = logits.get(1) {
                theirs.add(other, ids[at]);
                agreement.add(other, logits[0]);
            }
        })?;
        bar.inc(passage.count() as u64);
    }
    bar.finish_and_clear();

    let name = name(&args.file);
    let against = second.as_ref().map(|second| {
        let name = second.describe(args.against_kv.unwrap_or(model.device.kv));
        Against::new(name, &theirs, &agreement)
    });
    println!(
        "{name}: {} tokens predicted, windows of {}, stride {}",
        grouped(ours.tokens),
        grouped(args.window),
        grouped(stride)
    );
    let (device, perplexity) = (first.describe(args.common.kv()), ours.perplexity());
    match &against {
        Some(against) => against.print(&device, perplexity),
        None => println!("{device}: perplexity {perplexity:.5}"),
    }
    let outcome = Outcome { text: name, tokens: ours.tokens, window: args.window, stride, perplexity, against };
    results.append("text", &args.common, &checkpoint, first.name(), &outcome)
}

/// The stride, checked against the window.
fn stride(args: &TextArgs) -> Result<usize, Usage> {
    if args.window < 2 {
        return Err(Usage(format!("--window {}: expected at least 2, one token and one to predict", args.window)));
    }
    let stride = args.stride.map_or(args.window / 2, NonZeroUsize::get);
    if stride >= args.window {
        return Err(Usage(format!(
            "--stride {stride}: expected less than the window of {}, so that every token has some before it",
            args.window
        )));
    }
    Ok(stride)
}

/// The arguments for the backend to compare with.
fn other(args: &TextArgs) -> Result<Option<ModelArgs>, Usage> {
    let own = &args.common.model;
    let Some(backend) = args.against else { return Ok(None) };
    let kv = args.against_kv.unwrap_or(own.device.kv);
    if (backend, kv) == (own.device.backend, own.device.kv) {
        let name = backend.name();
        return Err(Usage(format!("--against {name} compares {name} with itself: choose another, or --against-kv")));
    }
    Ok(Some(ModelArgs { device: DeviceArgs { backend, kv, ..own.device.clone() }, ..own.clone() }))
}

/// The text of a file, not empty.
fn read_text(file: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        Usage(format!("{} is not UTF-8: byte {} is invalid", file.display(), error.utf8_error().valid_up_to()))
    })?;
    if text.trim().is_empty() {
        return Err(Usage(format!("{} is empty: expected a text", file.display())).into());
    }
    Ok(text)
}

/// The tokens of each document.
fn documents(args: &TextArgs, text: &str, tokenizer: &Tokenizer) -> anyhow::Result<Vec<Vec<u32>>> {
    let file = args.file.display();
    let most = args.tokens.map_or(usize::MAX, NonZeroUsize::get);
    if !args.documents {
        let mut ids = tokenizer.encode_text(text)?;
        ids.truncate(most);
        if ids.len() < args.window {
            let (found, window) = (grouped(ids.len()), grouped(args.window));
            return Err(
                Usage(format!("{file} has {found} tokens, a window {window}: choose a smaller --window")).into()
            );
        }
        return Ok(vec![ids]);
    }
    if !text.contains(END) {
        return Err(Usage(format!("{file} has no {END}: leave --documents out if it is one text")).into());
    }
    let mut taken = 0;
    let mut all = Vec::new();
    for document in text.split_inclusive(END).map(|document| document.strip_prefix('\n').unwrap_or(document)) {
        if taken >= most || document.is_empty() {
            break;
        }
        let ids = tokenizer.encode_stock(document)?;
        taken += ids.len();
        all.push(ids);
    }
    if all.iter().all(|ids| ids.len() < 2) {
        return Err(Usage(format!("{file}: no document has two tokens, one to read and one to predict")).into());
    }
    Ok(all)
}
