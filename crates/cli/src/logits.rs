//! `lily logits`: token ids in, logits out, for checks against other implementations.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use lily_model::Checkpoint;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use crate::args::ModelArgs;
use crate::exit::Usage;
use crate::{checkpoint, devices};

/// Arguments of `lily logits`.
#[derive(Args)]
pub struct LogitsArgs {
    /// Token ids, separated by commas or blanks; `@FILE` reads them from a file.
    #[arg(value_name = "IDS")]
    ids: String,
    /// Where to write `ids` (I32 `[n]`) and `logits` (F32 `[n, vocabulary]`).
    #[arg(short, long, value_name = "FILE", default_value = "logits.safetensors")]
    out: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
}

/// Runs the command.
pub fn logits(args: LogitsArgs) -> anyhow::Result<()> {
    let checkpoint = checkpoint::open(args.model.model.as_deref())?;
    let ids = parse_ids(&args.ids, &checkpoint)?;
    let vocab = checkpoint.config.shape.vocab;
    let logits = devices::forward(&args.model, checkpoint, &ids, false)?.logits;
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (ids_bytes, logits_bytes) = (ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>(), bytes(&logits));
    let tensors = HashMap::from([
        ("ids", TensorView::new(Dtype::I32, vec![ids.len()], &ids_bytes)?),
        ("logits", TensorView::new(Dtype::F32, vec![ids.len(), vocab], &logits_bytes)?),
    ]);
    serialize_to_file(tensors, None, &args.out).with_context(|| format!("cannot write {}", args.out.display()))?;
    eprintln!("lily: wrote the logits of {} positions to {}", ids.len(), args.out.display());
    Ok(())
}

/// Token ids from an argument, checked against the vocabulary.
pub fn parse_ids(argument: &str, checkpoint: &Checkpoint) -> anyhow::Result<Vec<u32>> {
    let text = match argument.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file).with_context(|| format!("cannot read token ids from {file}"))?,
        None => argument.to_owned(),
    };
    let vocab = checkpoint.config.shape.vocab;
    let ids = text
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|part| !part.is_empty())
        .map(|part| match part.parse::<u32>() {
            Ok(id) if (id as usize) < vocab => Ok(id),
            _ => Err(Usage(format!("{part:?} is not a token id: expected a number below {vocab}"))),
        })
        .collect::<Result<Vec<u32>, Usage>>()?;
    if ids.is_empty() {
        return Err(Usage("no token ids given: expected at least one, like 1,2,3".into()).into());
    }
    Ok(ids)
}
