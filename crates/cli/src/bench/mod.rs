//! `lily bench`: how fast a checkpoint runs here, under a contract that is printed with the numbers.
//!
//! - `contract`: what is measured; `measure`: one context by it; `stream`: the memory bandwidth it is compared with;
//! - `machine`, `record`: what is kept; `report`, `plot`: what is shown.

pub mod contract;
pub mod machine;
mod measure;
mod plot;
pub mod record;
mod report;
mod stat;
mod stream;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use lily_backend::Error as BackendError;
use lily_model::{Checkpoint, Shape};

use crate::args::{DeviceArgs, ModelArgs};
use crate::exit::Usage;
use crate::output::{bytes, grouped};
use crate::{checkpoint, devices};
use contract::Contexts;
use machine::Machine;
use measure::{Bench, Measured, Plan};
use record::{Journal, Record, Sizes, TokenBytes};
use stat::Stat;
use stream::Stream;

/// Arguments of `lily bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Checkpoint directory. Default: the pulled model if it is there, else the small one inside the binary.
    #[arg(long, value_name = "DIR", conflicts_with = "synthetic")]
    model: Option<PathBuf>,
    /// Random weights in memory instead of a checkpoint: qwen36, demo or tiny, with other numbers of layers and of
    /// vocabulary if they follow, like qwen36:4:4096.
    #[arg(long, value_name = "SHAPE[:LAYERS[:VOCAB]]")]
    synthetic: Option<Synthetic>,
    /// Contexts in tokens; `256..131072` doubles.
    #[arg(long, value_name = "LIST", default_value = "256..2048")]
    contexts: Contexts,
    /// Decode steps after each prefill.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    decode: u16,
    /// Timed runs of each context, after one that is not timed.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Sessions that decode together, each with a prompt of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    sessions: u16,
    /// Append a line of JSON per context to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the speeds against the context into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A shape without files.
#[derive(Clone, Debug)]
struct Synthetic {
    name: String,
    shape: Shape,
}

/// Shapes by name.
#[derive(Clone, Copy, ValueEnum)]
enum ShapeName {
    Qwen36,
    Demo,
    Tiny,
}

impl FromStr for Synthetic {
    type Err = Usage;

    fn from_str(text: &str) -> Result<Synthetic, Usage> {
        let mut parts = text.split(':');
        let mut shape = match ShapeName::from_str(parts.next().unwrap_or_default(), false) {
            Ok(ShapeName::Qwen36) => Shape::QWEN36,
            Ok(ShapeName::Demo) => Shape::DEMO,
            Ok(ShapeName::Tiny) => lily_synth::TINY,
            Err(_) => return Err(Usage(format!("{text:?}: expected qwen36, demo or tiny before the first colon"))),
        };
        for size in [&mut shape.layers, &mut shape.vocab] {
            let Some(part) = parts.next() else { break };
            *size = part.parse().map_err(|_| Usage(format!("{text:?}: {part:?} is not a number")))?;
        }
        if parts.next().is_some() {
            return Err(Usage(format!("{text:?}: expected at most SHAPE:LAYERS:VOCAB, like qwen36:4:4096")));
        }
        Ok(Synthetic { name: format!("synthetic {text}"), shape })
    }
}

/// Share of the free memory, in percent, that synthetic weights may take. More would push out the files that others work
/// with, and a file of weights is the better choice: it counts as free itself.
const MEMORY_PERCENT: usize = 80;

impl Synthetic {
    /// Makes the weights, if there is memory for them.
    fn checkpoint(&self) -> anyhow::Result<Checkpoint> {
        // First: a shape without layers or the like has no sensible size.
        lily_synth::config(&self.shape)?;
        let needed = lily_synth::total_bytes(&self.shape);
        let available = devices::available_memory() / 100 * MEMORY_PERCENT;
        if needed > available {
            return Err(BackendError::OutOfMemory { what: format!("{} in memory", self.name), needed, available })
                .context(
                    "use fewer layers, like --synthetic qwen36:4, or `cargo xtask synth --out DIR` and --model DIR",
                );
        }
        eprintln!("lily: making {} of random weights", bytes(needed));
        Ok(Checkpoint::load(lily_synth::in_memory(&self.name, &self.shape, contract::SEED)?)?)
    }
}

/// Runs the command.
pub fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let mut journal = args.json.as_deref().map(Journal::open).transpose()?;
    let checkpoint = match &args.synthetic {
        Some(synthetic) => synthetic.checkpoint()?,
        None => checkpoint::open(args.model.as_deref())?,
    };
    let checkpoint = Arc::new(checkpoint);
    let contexts = &args.contexts.0;
    let longest = contexts.last().copied().unwrap_or(0).saturating_add(args.decode.into());
    let most = checkpoint.config.shape.max_context;
    if longest > most {
        let most = grouped(most);
        return Err(Usage(format!(
            "--contexts and --decode reach {} tokens: expected at most {most}, the context the model was trained for",
            grouped(longest)
        ))
        .into());
    }
    let model = ModelArgs { model: args.model.clone(), ctx: Some(longest), device: args.device.clone() };
    let loading = Instant::now();
    let mut backend = devices::load(&model, Arc::clone(&checkpoint))?;
    let run = Run::new(args, &checkpoint, backend.caps().name.clone(), loading.elapsed());
    println!("{}\n", contract::text(run.shape.vocab, args.decode.into(), args.rounds.into(), args.sessions.into()));
    Stream::of_all(&checkpoint.weights, run.threads).read();
    let stream = Stream::of_a_token(&checkpoint.weights, run.shape, run.threads);
    let shortest = contexts.first().copied().unwrap_or(1);
    let plan = Plan { decode: args.decode.into(), rounds: args.rounds.into(), sessions: args.sessions.into() };
    let mut bench = Bench::new(&mut *backend, stream, plan, shortest)?;
    let mut records: Vec<Record> = Vec::new();
    for &context in contexts {
        let record = run.record(bench.context(context)?);
        if records.is_empty() {
            println!("{}\n\n{}", report::head(&record, checkpoint.weights.quantized_bytes()), report::columns());
        }
        println!("{}", report::row(&record));
        if let Some(journal) = &mut journal {
            journal.append(&record)?;
        }
        records.push(record);
        if let Some(path) = &args.svg {
            std::fs::write(path, plot::svg(&records)).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    println!("\npeak memory {}, mapped weights included", bytes(machine::peak_memory()));
    Ok(())
}

/// What holds for all contexts of a run.
struct Run<'a> {
    args: &'a BenchArgs,
    shape: &'a Shape,
    model: String,
    weights_per_token: usize,
    device: String,
    load: Duration,
    threads: usize,
    machine: Machine,
}

impl<'a> Run<'a> {
    fn new(args: &'a BenchArgs, checkpoint: &'a Checkpoint, device: String, load: Duration) -> Run<'a> {
        let shape = &checkpoint.config.shape;
        Run {
            args,
            shape,
            model: record::model_name(checkpoint),
            weights_per_token: checkpoint.weights.bytes_per_token(shape),
            device,
            load,
            threads: devices::threads(&args.device),
            machine: Machine::here(),
        }
    }

    fn record(&self, measured: Measured) -> Record {
        let (decode, kv) = (usize::from(self.args.decode), self.args.device.kv);
        let token_bytes = TokenBytes {
            weights: self.weights_per_token,
            state: 2 * self.shape.recurrent_bytes(),
            kv: (measured.context + decode / 2) * self.shape.kv_bytes_per_token(kv.bytes()),
        };
        let moved = token_bytes.total() as f64;
        let shares =
            measured.decode.rounds.iter().zip(&measured.read.rounds).map(|(decode, read)| decode * moved / read);
        Record {
            contract: contract::VERSION,
            engine: machine::ENGINE.into(),
            commit: machine::COMMIT.map(str::to_owned),
            date: record::now(),
            machine: self.machine.clone(),
            device: self.device.clone(),
            threads: self.threads,
            kv: kv.name(),
            model: self.model.clone(),
            shape: Sizes::of(self.shape),
            load_s: Some((self.load.as_secs_f64() * 1e3).round() / 1e3),
            context: measured.context,
            decode_tokens: decode,
            sessions: self.args.sessions.into(),
            start: measured.start,
            prefill_tok_s: measured.prefill,
            read_share: Stat::of(shares),
            read_gb_s: Stat::of(measured.read.rounds.iter().map(|read| read / 1e9)),
            decode_tok_s: measured.decode,
            token_bytes,
            digest: measured.digest,
            peak_memory_bytes: machine::peak_memory(),
        }
    }
}
