//! `synth`: a checkpoint of random weights in the published format, of any shape, at the speed of the disk.
//!
//! Every byte is a function of the seed, the tensor's name and the position in it. So tensors are written by several
//! threads without buffers, and do not depend on how they are spread over shards. Magnitudes are chosen so that the
//! residual stream, the decays and the logits stay in the range of a trained model; see [`layout`].

mod fill;
mod layout;
mod shards;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use lily_model::{Config, LayerKind, Shape};
use serde::Serialize;
use serde_json::{Map, Value, json};

use shards::Order;

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
    #[arg(long, default_value_t = 5 << 30)]
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

/// The published configuration; a synthetic one differs in sizes and token ids only.
const PUBLISHED: &str = include_str!("../../testdata/qwen3.6/config.json");

const TOKENIZER: &str = "tokenizer.json";

pub fn run(args: &Args) -> Result<()> {
    let shape = args.sizes.apply(args.shape.shape());
    let config = config(&shape)?;
    let out = &args.out;
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let started = Instant::now();
    let order = if args.aligned { Order::Aligned } else { Order::Misaligned };
    let tensors = layout::tensors(&shape);
    let total = shards::write(out, &tensors, args.seed, order, args.shard_bytes)?;
    write_json(&out.join("config.json"), &config)?;
    copy_tokenizer(args.tokenizer.as_deref(), &shape, out)?;
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
            BaseShape::Tiny => Shape {
                hidden: 256,
                layers: 4,
                vocab: 1024,
                query_heads: 4,
                kv_heads: 2,
                delta_key_heads: 2,
                delta_value_heads: 4,
                experts: 8,
                experts_per_token: 2,
                expert_width: 64,
                shared_width: 64,
                ..Shape::QWEN36
            },
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

/// The published configuration with other sizes, checked as the engine checks it: a shape that no loader takes is an
/// error here.
fn config(shape: &Shape) -> Result<Value> {
    let mut config: Value = serde_json::from_str(PUBLISHED)?;
    let text = config["text_config"].as_object_mut().context("the published config has a text_config")?;
    for (key, size) in [
        ("hidden_size", shape.hidden),
        ("num_hidden_layers", shape.layers),
        ("vocab_size", shape.vocab),
        ("num_attention_heads", shape.query_heads),
        ("num_key_value_heads", shape.kv_heads),
        ("linear_num_key_heads", shape.delta_key_heads),
        ("linear_num_value_heads", shape.delta_value_heads),
        ("num_experts", shape.experts),
        ("num_experts_per_tok", shape.experts_per_token),
        ("moe_intermediate_size", shape.expert_width),
        ("shared_expert_intermediate_size", shape.shared_width),
    ] {
        text.insert(key.into(), size.into());
    }
    let kinds = (0..shape.layers).map(|layer| match shape.layer_kind(layer) {
        LayerKind::Delta => "linear_attention",
        LayerKind::Attention => "full_attention",
    });
    text.insert("layer_types".into(), kinds.collect());
    if shape.vocab < Shape::QWEN36.vocab {
        special_tokens(&mut config, shape.vocab);
    }
    for key in ["quantization", "quantization_config"] {
        config[key] = quantization(shape.layers);
    }
    let read = Config::parse("the synthetic config.json", config.to_string().as_bytes())?;
    ensure!(read.shape == *shape, "the configuration says {:?}, not {shape:?}", read.shape);
    Ok(config)
}

/// Moves the special tokens to the top of a smaller vocabulary.
fn special_tokens(config: &mut Value, vocab: usize) {
    config["eos_token_id"] = json!([vocab - 1, vocab - 2]);
    for key in ["bos_token_id", "eos_token_id"] {
        config["text_config"][key] = json!(vocab - 2);
    }
    let images = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"];
    for (below, key) in images.into_iter().enumerate() {
        config[key] = json!(vocab.saturating_sub(3 + below));
    }
}

/// 4 bits everywhere but in the two gates of each MoE.
fn quantization(layers: usize) -> Value {
    let mut map: Map<String, Value> = [("group_size", json!(64)), ("bits", json!(4)), ("mode", json!("affine"))]
        .map(|(key, value)| (key.to_owned(), value))
        .into_iter()
        .collect();
    for layer in 0..layers {
        for gate in ["gate", "shared_expert_gate"] {
            map.insert(format!("{}layers.{layer}.mlp.{gate}", layout::PREFIX), json!({"group_size": 64, "bits": 8}));
        }
    }
    map.into()
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
        None if shape.vocab >= BaseShape::Tiny.shape().vocab => vec![stand_in],
        None => {
            eprintln!("no tokenizer: the stand-in needs a vocabulary of {}", BaseShape::Tiny.shape().vocab);
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

    #[test]
    fn the_configuration_of_the_full_size_is_the_published_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        write_json(&path, &config(&Shape::QWEN36).unwrap()).unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), PUBLISHED);
    }

    #[test]
    fn a_shape_that_no_loader_takes_is_refused_by_field() {
        let sizes = Sizes { hidden: Some(100), ..Sizes::default() };
        let error = config(&sizes.apply(Shape::DEMO)).unwrap_err().to_string();
        assert!(error.contains("hidden_size is 100"), "{error}");
    }
}
