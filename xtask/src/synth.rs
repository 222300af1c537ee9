//! `synth`: a checkpoint of random weights in the published format, of any shape, at the speed of the disk.
//!
//! What the tensors hold is `lily_synth`'s; here they become files.

mod shards;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use lily_model::Shape;
use lily_synth::{Order, TINY};
use serde::Serialize;
use serde_json::Value;

/// The published shards have at most 5 GiB.
const SHARD_BYTES: u64 = 5 << 30;

#[derive(clap::Args)]
pub struct Args {
    /// Directory to write, made if absent; model files in it are replaced
    #[arg(long)]
    out: PathBuf,
    /// Sizes to start from; the options below change single ones
    #[arg(long, value_enum, default_value = "qwen36")]
    shape: BaseShape,
    #[command(flatten)]
    sizes: Sizes,
    /// Same seed and sizes, same weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Place every tensor at a multiple of its element size; the published files, and so the default, do not
    #[arg(long)]
    aligned: bool,
    /// Most bytes of tensors in a shard (a larger single tensor gets its own)
    #[arg(long, default_value_t = SHARD_BYTES)]
    shard_bytes: u64,
    /// Directory to copy tokenizer.json, chat_template.jinja and their configurations from; by default what
    /// `cargo xtask tokenizer` rebuilt, or the stand-in of testdata/tiny
    #[arg(long)]
    tokenizer: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BaseShape {
    /// Qwen3.6-35B-A3B, 19.5 GB
    Qwen36,
    /// The checkpoint that the binary carries
    Demo,
    /// testdata/tiny
    Tiny,
}

/// Sizes that differ from the base shape
#[derive(clap::Args, Default)]
struct Sizes {
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long)]
    vocab: Option<usize>,
    #[arg(long)]
    hidden: Option<usize>,
    #[arg(long)]
    query_heads: Option<usize>,
    #[arg(long)]
    kv_heads: Option<usize>,
    #[arg(long)]
    delta_key_heads: Option<usize>,
    #[arg(long)]
    delta_value_heads: Option<usize>,
    #[arg(long)]
    experts: Option<usize>,
    #[arg(long)]
    experts_per_token: Option<usize>,
    #[arg(long)]
    expert_width: Option<usize>,
    #[arg(long)]
    shared_width: Option<usize>,
}

const TOKENIZER: &str = "tokenizer.json";

pub fn run(args: &Args) -> Result<()> {
    let shape = args.sizes.apply(args.shape.shape());
    let order = if args.aligned { Order::Aligned } else { Order::Misaligned };
    write(&args.out, &shape, args.seed, order, args.shard_bytes)?;
    copy_tokenizer(args.tokenizer.as_deref(), &shape, &args.out)
}

/// Configuration and weights of the seed that `lily bench --synthetic` has, too, as the published files lie.
pub fn make(out: &Path, shape: &Shape) -> Result<()> {
    write(out, shape, 0, Order::Misaligned, SHARD_BYTES)
}

fn write(out: &Path, shape: &Shape, seed: u64, order: Order, shard_bytes: u64) -> Result<()> {
    let config = lily_synth::config(shape)?;
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let started = Instant::now();
    let tensors = lily_synth::tensors(shape);
    let total = shards::write(out, &tensors, seed, order, shard_bytes)?;
    // Last, so that what is unfinished is no checkpoint.
    write_json(&out.join("config.json"), &config)?;
    let seconds = started.elapsed().as_secs_f64();
    let gigabytes = total as f64 / 1e9;
    println!("{}: {} tensors, {gigabytes:.2} GB, {seconds:.1} s", out.display(), tensors.len());
    Ok(())
}

impl BaseShape {
    fn shape(self) -> Shape {
        match self {
            BaseShape::Qwen36 => Shape::QWEN36,
            BaseShape::Demo => Shape::DEMO,
            BaseShape::Tiny => TINY,
        }
    }
}

impl Sizes {
    fn apply(&self, base: Shape) -> Shape {
        Shape {
            hidden: self.hidden.unwrap_or(base.hidden),
            layers: self.layers.unwrap_or(base.layers),
            vocab: self.vocab.unwrap_or(base.vocab),
            query_heads: self.query_heads.unwrap_or(base.query_heads),
            kv_heads: self.kv_heads.unwrap_or(base.kv_heads),
            delta_key_heads: self.delta_key_heads.unwrap_or(base.delta_key_heads),
            delta_value_heads: self.delta_value_heads.unwrap_or(base.delta_value_heads),
            experts: self.experts.unwrap_or(base.experts),
            experts_per_token: self.experts_per_token.unwrap_or(base.experts_per_token),
            expert_width: self.expert_width.unwrap_or(base.expert_width),
            shared_width: self.shared_width.unwrap_or(base.shared_width),
            ..base
        }
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Copies the tokenizer given; else the published one where it was rebuilt and fits the vocabulary, else the stand-in of
/// the tiny checkpoint.
fn copy_tokenizer(given: Option<&Path>, shape: &Shape, out: &Path) -> Result<()> {
    let published = ["target/qwen3.6", "testdata/qwen3.6"].map(|path| crate::root().join(path));
    let stand_in = crate::root().join("testdata/tiny");
    let places = match given {
        Some(directory) => vec![directory.to_path_buf()],
        None if shape.vocab == Shape::QWEN36.vocab && published[0].join(TOKENIZER).is_file() => published.to_vec(),
        None if shape.vocab >= TINY.vocab => vec![stand_in],
        None => {
            eprintln!("no tokenizer: the stand-in needs a vocabulary of {}", TINY.vocab);
            return Ok(());
        }
    };
    ensure!(places[0].join(TOKENIZER).is_file(), "{} has no {TOKENIZER}", places[0].display());
    for file in [TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        if let Some(path) = places.iter().map(|place| place.join(file)).find(|path| path.is_file()) {
            std::fs::copy(&path, out.join(file)).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLISHED: &str = include_str!("../../testdata/qwen3.6/config.json");

    #[test]
    fn the_configuration_of_the_full_size_is_the_published_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        write_json(&path, &lily_synth::config(&Shape::QWEN36).unwrap()).unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), PUBLISHED);
    }
}
