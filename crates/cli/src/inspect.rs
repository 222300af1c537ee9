//! `lily inspect`: what a checkpoint is, what will fit, and where two backends differ.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use lily_backend::{Stage, StageOutput};
use lily_model::{Checkpoint, LayerKind, Shape};

use crate::args::{BackendName, KvType, ModelArgs};
use crate::exit::Usage;
use crate::output::{bytes, grouped};
use crate::{checkpoint, devices, logits};

/// Arguments of `lily inspect`.
#[derive(Args)]
pub struct InspectArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// List every quantized matrix.
    #[arg(long)]
    tensors: bool,
    /// Run two backends on the same tokens and compare them stage by stage.
    #[arg(long, value_name = "A,B", value_parser = parse_pair)]
    diff: Option<(BackendName, BackendName)>,
    /// Token ids for --diff, separated by commas; `@FILE` reads them from a file.
    #[arg(long, value_name = "IDS", default_value = "1,2,3,4,5,6,7,8", requires = "diff")]
    tokens: String,
}

fn parse_pair(text: &str) -> Result<(BackendName, BackendName), String> {
    let (left, right) = text.split_once(',').ok_or("expected two backends, like reference,cpu")?;
    Ok((BackendName::from_str(left.trim(), true)?, BackendName::from_str(right.trim(), true)?))
}

/// Runs the command.
pub fn inspect(args: InspectArgs) -> anyhow::Result<()> {
    let checkpoint = checkpoint::open(args.model.model.as_deref())?;
    match args.diff {
        Some((left, right)) => diff(&args, checkpoint, left, right),
        None => {
            describe(&args, &Arc::new(checkpoint));
            Ok(())
        }
    }
}

fn describe(args: &InspectArgs, checkpoint: &Arc<Checkpoint>) {
    let s = &checkpoint.config.shape;
    println!("checkpoint   {}", checkpoint.source.describe());
    println!(
        "layers       {} ({} gated DeltaNet, {} attention), hidden {}",
        s.layers,
        s.delta_layers(),
        s.attention_layers(),
        s.hidden
    );
    println!(
        "attention    {} query heads, {} key/value heads of {}, rotary {}",
        s.query_heads,
        s.kv_heads,
        Shape::HEAD_DIM,
        Shape::ROTARY_DIM
    );
    println!(
        "delta        {} key heads, {} value heads of {}",
        s.delta_key_heads,
        s.delta_value_heads,
        Shape::DELTA_HEAD_DIM
    );
    println!(
        "experts      {} of width {}, {} per token, shared expert of width {}",
        s.experts, s.expert_width, s.experts_per_token, s.shared_width
    );
    println!("vocabulary   {}", grouped(s.vocab));
    println!("context      up to {} tokens", grouped(s.max_context));
    describe_weights(args, checkpoint);
    describe_fit(args.model.device.kv, checkpoint);
    for device in devices::probe(&args.model, checkpoint) {
        println!("device       {device}");
    }
}

fn describe_weights(args: &InspectArgs, checkpoint: &Checkpoint) {
    let weights = &checkpoint.weights;
    println!("weights      {} in {} quantized matrices", bytes(weights.quantized_bytes()), weights.matrices().count());
    println!("per token    {} of weights are read", bytes(weights.bytes_per_token(&checkpoint.config.shape)));
    if weights.skipped.0 > 0 {
        println!(
            "skipped      {} tensors, {} (vision tower, multi-token prediction)",
            weights.skipped.0,
            bytes(weights.skipped.1)
        );
    }
    if args.tensors {
        for m in weights.matrices() {
            let experts = if m.experts > 1 { format!("{} x ", m.experts) } else { String::new() };
            println!(
                "  {:<64} {experts}{} x {}, {}-bit, {}",
                m.name,
                m.outputs,
                m.inputs,
                m.bits.count(),
                bytes(m.total_bytes())
            );
        }
    }
}

fn describe_fit(kv: KvType, checkpoint: &Checkpoint) {
    let shape = &checkpoint.config.shape;
    let available = devices::available_memory();
    println!("memory       {} free on this machine", bytes(available));
    let element = kv.bytes();
    for context in [4096, 32_768, 131_072, 262_144] {
        if context > shape.max_context {
            continue;
        }
        let state = shape.recurrent_bytes() + context * shape.kv_bytes_per_token(element);
        let whole = state + devices::resident_weights(checkpoint);
        let verdict = if whole <= available { "fits" } else { "does not fit" };
        println!(
            "  {:>7} tokens  {} of state, {} with the weights: {verdict}",
            grouped(context),
            bytes(state),
            bytes(whole)
        );
    }
}

/// The largest difference that two f32 forwards with other orders of addition show on a stage of magnitude 1; larger
/// ones are marked. Measured between the reference and the CPU backend: below 1e-4.
const NOTEWORTHY: f32 = 1e-3;

fn diff(args: &InspectArgs, checkpoint: Checkpoint, left: BackendName, right: BackendName) -> anyhow::Result<()> {
    if left == right {
        return Err(Usage("--diff needs two different backends, like reference,cpu".into()).into());
    }
    let ids = logits::parse_ids(&args.tokens, &checkpoint)?;
    let (source, shape) = (checkpoint.source.clone(), checkpoint.config.shape.clone());
    let a = devices::forward(&args.model.on(left), checkpoint, &ids, true)?;
    let b = devices::forward(&args.model.on(right), Checkpoint::load(source)?, &ids, true)?;
    println!("{:<24} {:>11} {:>11} {:>11}", "stage", "largest", "max |diff|", "mean |diff|");
    for stage in &a.trace {
        let Some(other) = b.trace.iter().find(|o| o.stage == stage.stage) else {
            println!("{:<24} not recorded by the second backend", stage_name(stage.stage, &shape));
            continue;
        };
        print_difference(&stage_name(stage.stage, &shape), stage, &other.values);
    }
    let logits = StageOutput { stage: Stage::outside(lily_backend::Part::FinalNorm), row: 0, values: a.logits };
    print_difference("logits", &logits, &b.logits);
    Ok(())
}

fn stage_name(stage: Stage, shape: &Shape) -> String {
    match (stage.layer, stage.part) {
        (Some(layer), lily_backend::Part::Mixer) => match shape.layer_kind(layer) {
            LayerKind::Delta => format!("layer {layer} delta"),
            LayerKind::Attention => format!("layer {layer} attention"),
        },
        _ => stage.to_string(),
    }
}

fn print_difference(name: &str, a: &StageOutput, b: &[f32]) {
    if a.values.len() != b.len() {
        println!("{name:<24} {} values against {}", a.values.len(), b.len());
        return;
    }
    let (mut largest, mut worst, mut sum) = (0.0f32, 0.0f32, 0.0f64);
    for (x, y) in a.values.iter().zip(b) {
        let d = (x - y).abs();
        (largest, worst, sum) = (largest.max(x.abs()), worst.max(d), sum + f64::from(d));
    }
    let mark = if worst > NOTEWORTHY * largest.max(1.0) { "  <-" } else { "" };
    println!("{name:<24} {largest:>11.4} {worst:>11.2e} {:>11.2e}{mark}", sum / b.len().max(1) as f64);
}
