//! `bench-peers`: lily against the fastest peer of a device, on random weights of the same shape, in turns.
//!
//! Minutes apart, a shared machine differs more than two engines do. So the engines take turns: run by run on a cut of
//! the model that fits into memory twice, in blocks of several runs at full size. Each turn begins as the first start after
//! a boot does, with no page of either file in memory, and an engine that reads its own into pages of its choice; lily
//! asks for large ones, and a file that has just been written lies in small ones.

mod gguf;
mod llama;
mod process;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use lily_model::Shape;
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct Args {
    /// The device to compare on.
    #[arg(value_enum)]
    device: Device,
    /// Layers of the shape; the rest is Qwen3.6-35B-A3B.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Its vocabulary.
    #[arg(long, default_value_t = 4096)]
    vocab: usize,
    /// The whole model: twice 19.5 GB on disk; fewer turns with more rounds in each.
    #[arg(long, conflicts_with_all = ["layers", "vocab"])]
    full: bool,
    /// Only fetch, build and write what a measurement needs.
    #[arg(long)]
    prepare: bool,
    /// Timed runs of each engine. Default: 5; at full size 2 turns of 3.
    #[arg(long)]
    rounds: Option<usize>,
    /// Threads of both. Default: lily's.
    #[arg(long)]
    threads: Option<usize>,
    /// lily's checkpoint of this shape; by default it is made.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The peer's file of this shape; by default it is made.
    #[arg(long)]
    gguf: Option<PathBuf>,
    /// The program `lily`; by default a release build of this tree.
    #[arg(long)]
    lily: Option<PathBuf>,
    /// More options for `lily bench`, separated by blanks, like "--kv bf16".
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    lily_options: String,
    /// Python 3 that can make a virtual environment.
    #[arg(long, default_value = "python3")]
    python: String,
    /// Records are appended here. Default: bench/results/cpu-peers.jsonl of this tree.
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Device {
    /// This machine's processor, against llama.cpp.
    Cpu,
}

/// Tokens of the prefills, and the depths to decode at: the first and the last of them.
const CONTEXTS: [usize; 3] = [64, 512, 2048];
const DECODE: usize = 64;
const SHORT: usize = CONTEXTS[0];
const LONG: usize = CONTEXTS[2];

pub fn run(args: &Args) -> Result<()> {
    let Device::Cpu = args.device;
    let shape = match args.full {
        true => Shape::QWEN36,
        false => Shape { layers: args.layers, vocab: args.vocab, ..Shape::QWEN36 },
    };
    let place = crate::root().join("target/peers");
    let pair = Pair::prepare(args, &place, &shape)?;
    if args.prepare {
        return Ok(());
    }
    // Turns, and rounds within a turn.
    let (turns, rounds) = match (args.full, args.rounds) {
        (true, rounds) => (2, rounds.unwrap_or(3)),
        (false, rounds) => (rounds.unwrap_or(5), 1),
    };
    let (mut lily, mut peer) = (Numbers::default(), Numbers::default());
    let mut records: Vec<Value> = Vec::new();
    for turn in 1..=turns {
        eprintln!("bench-peers: turn {turn} of {turns}");
        pair.forget()?;
        pair.lily(&[SHORT], 1, 1, &mut Numbers::default())?;
        let new = pair.lily(&CONTEXTS, rounds, DECODE, &mut lily)?;
        for (old, new) in records.iter().zip(&new) {
            let (old, new) = (&old["digest"], &new["digest"]);
            ensure!(old == new, "lily sampled other tokens ({new}) than in its first turn ({old})");
        }
        records = new;
        let threads = records[0]["threads"].as_u64().context("lily names no threads")? as usize;
        pair.forget()?;
        llama::bench(&pair.llama, &pair.gguf, threads, &["-p", "64", "-n", "1", "-r", "1"])?;
        pair.peer(rounds, threads, &mut peer)?;
    }
    report(&lily, &peer);
    let out = args.out.clone().unwrap_or_else(|| crate::root().join("bench/results/cpu-peers.jsonl"));
    append(&out, &records, &lily, &peer)
}

/// Both engines, ready to run.
struct Pair<'a> {
    args: &'a Args,
    lily: PathBuf,
    model: PathBuf,
    llama: PathBuf,
    gguf: PathBuf,
}

impl<'a> Pair<'a> {
    fn prepare(args: &'a Args, place: &Path, shape: &Shape) -> Result<Pair<'a>> {
        let llama = llama::prepare(place, &args.python)?;
        let name = format!("qwen36-{}-{}", shape.layers, shape.vocab);
        let model = args.model.clone().unwrap_or_else(|| place.join(&name));
        if !model.join("config.json").is_file() {
            crate::synth::make(&model, shape)?;
        }
        let gguf = args.gguf.clone().unwrap_or_else(|| place.join(format!("{name}.gguf")));
        if !gguf.is_file() {
            eprintln!("bench-peers: writing {}", gguf.display());
            gguf::write(&gguf, shape)?;
        }
        let lily = match &args.lily {
            Some(lily) => lily.clone(),
            None => build_lily()?,
        };
        Ok(Pair { args, lily, model, llama, gguf })
    }

    /// Takes both files out of the page cache.
    fn forget(&self) -> Result<()> {
        for path in [&self.model, &self.gguf] {
            let files = match path.is_dir() {
                true => std::fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?,
                false => vec![path.clone()],
            };
            for file in files {
                // Pages that are not on the disk yet stay.
                File::open(&file)?.sync_all()?;
                let mut name = std::ffi::OsString::from("if=");
                name.push(&file);
                process::run(Command::new("dd").arg(name).args(["iflag=nocache", "count=0", "status=none"]))?;
            }
        }
        Ok(())
    }

    /// Measures lily and gives its records, one per context.
    fn lily(&self, contexts: &[usize], rounds: usize, decode: usize, numbers: &mut Numbers) -> Result<Vec<Value>> {
        let file = tempfile::NamedTempFile::new()?;
        let mut command = Command::new(&self.lily);
        command.arg("bench").arg("--model").arg(&self.model).arg("--json").arg(file.path());
        command.args(["--contexts", &contexts.iter().map(usize::to_string).collect::<Vec<_>>().join(",")]);
        command.args(["--rounds", &rounds.to_string(), "--decode", &decode.to_string()]);
        command.args(self.args.threads.iter().flat_map(|n| ["--threads".to_owned(), n.to_string()]));
        command.args(self.args.lily_options.split_whitespace());
        let finished = process::run(&mut command)?;
        numbers.peak_memory = numbers.peak_memory.max(finished.peak_memory);
        let text = std::fs::read_to_string(file.path())?;
        let records = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        for (&context, record) in contexts.iter().zip(&records) {
            ensure!(record["context"] == context, "lily recorded {} where {context} was due", record["context"]);
            for key in [PREFILL, DECODING, READ, SHARE] {
                let rounds = record[key]["rounds"].as_array().with_context(|| format!("lily recorded no {key}"))?;
                let rounds: Vec<f64> = rounds.iter().filter_map(Value::as_f64).collect();
                numbers.add(key, context, &rounds);
            }
        }
        ensure!(records.len() == contexts.len(), "lily recorded {} contexts of {}", records.len(), contexts.len());
        Ok(records)
    }

    fn peer(&self, rounds: usize, threads: usize, numbers: &mut Numbers) -> Result<()> {
        let (rounds, decode) = (rounds.to_string(), DECODE.to_string());
        let prompts = CONTEXTS.map(|n| n.to_string()).join(",");
        let depths = format!("{SHORT},{LONG}");
        for options in [["-p", &prompts, "-n", "0", "-d", "0"], ["-p", "0", "-n", &decode, "-d", &depths]] {
            let options = [&options[..], &["-r", &rounds]].concat();
            let (samples, finished) = llama::bench(&self.llama, &self.gguf, threads, &options)?;
            numbers.peak_memory = numbers.peak_memory.max(finished.peak_memory);
            for sample in samples {
                match sample.prompt {
                    0 => numbers.add(DECODING, sample.depth, &sample.speeds),
                    prompt => numbers.add(PREFILL, prompt, &sample.speeds),
                }
            }
        }
        Ok(())
    }
}

/// The release build that `cargo xtask` itself would use.
pub fn build_lily() -> Result<PathBuf> {
    let mut cargo = crate::cargo();
    cargo.args(["build", "--release", "--package", "lily-cli"]).current_dir(crate::root());
    ensure!(cargo.status().context("cannot run cargo")?.success(), "lily does not build");
    Ok(crate::target()?.join("release").join(format!("lily{}", std::env::consts::EXE_SUFFIX)))
}

/// What is measured over rounds, by its name in records.
const PREFILL: &str = "prefill_tok_s";
const DECODING: &str = "decode_tok_s";
const READ: &str = "read_gb_s";
const SHARE: &str = "read_share";

/// Rounds by what was measured at which context, and the highest memory.
#[derive(Default)]
struct Numbers {
    rounds: Vec<(&'static str, usize, Vec<f64>)>,
    peak_memory: u64,
}

impl Numbers {
    fn add(&mut self, key: &'static str, context: usize, rounds: &[f64]) {
        match self.rounds.iter_mut().find(|(k, c, _)| (*k, *c) == (key, context)) {
            Some((_, _, all)) => all.extend(rounds),
            None => self.rounds.push((key, context, rounds.to_vec())),
        }
    }

    fn get(&self, key: &str, context: usize) -> Option<&[f64]> {
        self.rounds.iter().find(|(k, c, _)| (*k, *c) == (key, context)).map(|(_, _, all)| &all[..])
    }
}

/// Lowest, median and highest of at least one number.
fn spread(numbers: &[f64]) -> [f64; 3] {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len() - 1;
    [sorted[0], (sorted[last / 2] + sorted[last.div_ceil(2)]) / 2.0, sorted[last]]
}

fn report(lily: &Numbers, peer: &Numbers) {
    println!("{:<24} {:>24} {:>24}  ratio of medians", "tokens per second", "lily", llama::NAME);
    let lines = CONTEXTS
        .map(|n| (PREFILL, n, "prefill of"))
        .into_iter()
        .chain([SHORT, LONG].map(|n| (DECODING, n, "decode at")));
    for (key, context, name) in lines {
        let (Some(ours), Some(theirs)) = (lily.get(key, context), peer.get(key, context)) else { continue };
        let name = format!("{name} {context}");
        let show = |numbers: &[f64]| {
            let [low, median, high] = spread(numbers);
            format!("{median:.2} ({low:.2} to {high:.2})")
        };
        println!("{name:<24} {:>24} {:>24}  {:.2}", show(ours), show(theirs), spread(ours)[1] / spread(theirs)[1]);
    }
    let gigabytes = |numbers: &Numbers| format!("{:.2} GB", numbers.peak_memory as f64 / 1e9);
    let ratio = lily.peak_memory as f64 / peer.peak_memory as f64;
    println!("{:<24} {:>24} {:>24}  {ratio:.2}", "peak memory", gigabytes(lily), gigabytes(peer));
}

/// A line per engine and context, in the form of `lily bench --json`; what the peer does not tell is null.
fn append(path: &Path, records: &[Value], lily: &Numbers, peer: &Numbers) -> Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let file = OpenOptions::new().create(true).append(true).open(path);
    let mut file = file.with_context(|| format!("cannot write {}", path.display()))?;
    for (numbers, is_peer) in [(lily, false), (peer, true)] {
        for (context, record) in CONTEXTS.into_iter().zip(records) {
            let mut line = record.clone();
            for key in [PREFILL, DECODING, READ, SHARE] {
                line[key] = match numbers.get(key, context) {
                    None => Value::Null,
                    Some(rounds) => {
                        let [min, median, max] = spread(rounds);
                        json!({"median": median, "min": min, "max": max, "rounds": rounds})
                    }
                };
            }
            line["peak_memory_bytes"] = numbers.peak_memory.into();
            if is_peer {
                let own = [("engine", llama::NAME), ("device", "cpu"), ("kv", "f16")];
                own.into_iter().for_each(|(key, value)| line[key] = value.into());
                ["contract", "commit", "token_bytes", "digest"].into_iter().for_each(|key| line[key] = Value::Null);
            }
            writeln!(file, "{line}")?;
        }
    }
    println!("records in {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(factor: f64) -> Numbers {
        let mut numbers = Numbers { peak_memory: 7, ..Numbers::default() };
        for context in CONTEXTS {
            numbers.add(PREFILL, context, &[factor * context as f64]);
        }
        numbers.add(DECODING, SHORT, &[3.0 * factor]);
        numbers.add(DECODING, SHORT, &[factor, 2.0 * factor]);
        numbers
    }

    #[test]
    fn rounds_of_all_turns_make_one_median() {
        assert_eq!(spread(numbers(1.0).get(DECODING, SHORT).unwrap()), [1.0, 2.0, 3.0]);
        assert_eq!(spread(&[4.0, 1.0]), [1.0, 2.5, 4.0]);
    }

    #[test]
    fn both_engines_are_recorded_in_the_form_of_lily() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/records.jsonl");
        let records = CONTEXTS.map(|n| json!({"engine": "lily", "commit": "abc", "digest": "0", "context": n}));
        append(&path, &records, &numbers(2.0), &numbers(1.0)).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 6);
        assert_eq!((&lines[0]["engine"], &lines[3]["engine"]), (&json!("lily"), &json!(llama::NAME)));
        assert_eq!((&lines[2]["context"], &lines[5]["context"]), (&json!(LONG), &json!(LONG)));
        assert_eq!((&lines[0]["commit"], &lines[3]["commit"]), (&json!("abc"), &Value::Null));
        assert_eq!(lines[0]["decode_tok_s"]["median"], 4.0);
        assert_eq!(lines[4]["prefill_tok_s"]["rounds"], json!([512.0]));
        assert_eq!(lines[5]["decode_tok_s"], Value::Null);
    }
}
