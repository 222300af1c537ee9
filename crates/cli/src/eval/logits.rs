//! `lily eval logits`: how far a backend is from stored logits.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use lily_reference::quality::{Agreement, Likelihood};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Serialize;

use super::passage::{self, Passage};
use super::record::Results;
use super::text::Against;
use super::{Common, name};
use crate::checkpoint;
use crate::devices::Forward;
use crate::exit::Usage;
use crate::output::{grouped, progress};

/// Arguments of `lily eval logits`.
#[derive(Args)]
pub struct LogitsArgs {
    /// A safetensors file with `ids` (I32 `[n]`) and `logits` (F32 or BF16 `[n, vocabulary]`), as `lily logits` writes it. If
    /// `starts` is there, too (I32), a new text begins at each of these places, the first at 0.
    file: PathBuf,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Outcome {
    tokens: usize,
    perplexity: f64,
    against: Against,
}

/// Runs the command.
pub fn logits(args: &LogitsArgs) -> anyhow::Result<()> {
    let mut results = Results::open(&args.common)?;
    let model = &args.common.model;
    let checkpoint = Arc::new(checkpoint::open(model.model.as_deref())?);
    let vocab = checkpoint.config.shape.vocab;
    let bytes = std::fs::read(&args.file).with_context(|| format!("cannot read {}", args.file.display()))?;
    let stored = Stored::parse(&bytes, vocab).map_err(|reason| Usage(format!("{}: {reason}", args.file.display())))?;

    let longest = stored.texts.iter().map(|passage| passage.tokens.len() - 1).max().unwrap_or(0);
    let mut reader = Forward::load(model, Arc::clone(&checkpoint), longest)?;
    let bar = progress("reading", "tokens");
    bar.set_length(stored.texts.iter().map(|passage| passage.count() as u64).sum());
    let (mut ours, mut theirs, mut agreement) = (Likelihood::default(), Likelihood::default(), Agreement::default());
    for text in &stored.texts {
        passage::read(&mut [&mut reader], &stored.ids, text, vocab, |at, logits| {
            let (next, expected) = (stored.ids[at], stored.logits(at - 1));
            ours.add(logits[0], next);
            theirs.add(&expected, next);
            agreement.add(&expected, logits[0]);
        })?;
        bar.inc(text.count() as u64);
    }
    bar.finish_and_clear();

    let name = name(&args.file);
    println!("{name}: {} tokens predicted in {} texts", grouped(ours.tokens), grouped(stored.texts.len()));
    let against = Against::new(name, &theirs, &agreement);
    against.print(&reader.describe(args.common.kv()), ours.perplexity());
    let outcome = Outcome { tokens: ours.tokens, perplexity: ours.perplexity(), against };
    results.append("logits", &args.common, &checkpoint, reader.name(), &outcome)
}

/// What a file holds.
struct Stored<'a> {
    ids: Vec<u32>,
    texts: Vec<Passage>,
    /// Bytes of `[n, vocab]`.
    logits: &'a [u8],
    dtype: Dtype,
    vocab: usize,
}

impl<'a> Stored<'a> {
    /// Checks everything that can be wrong with a file; the reason says what was found and what was expected.
    fn parse(bytes: &'a [u8], vocab: usize) -> Result<Stored<'a>, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| format!("not a safetensors file: {error}"))?;
        let tensor = |name: &str| file.tensor(name).map_err(|_| format!("no tensor {name:?}: expected ids and logits"));
        let ids = integers("ids", &tensor("ids")?)?;
        let logits = tensor("logits")?;
        if !matches!(logits.dtype(), Dtype::F32 | Dtype::BF16) {
            return Err(format!("logits are {:?}: expected F32 or BF16", logits.dtype()));
        }
        if logits.shape() != [ids.len(), vocab] {
            return Err(format!(
                "logits are {:?}: expected [{}, {vocab}], a row for each of the ids and a column for each token of the checkpoint",
                logits.shape(),
                ids.len()
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(format!("ids have {id}: expected numbers below {vocab}"));
        }
        let starts = match file.tensor("starts") {
            Ok(starts) => integers("starts", &starts)?.into_iter().map(|start| start as usize).collect(),
            Err(_) => vec![0],
        };
        let borders: Vec<usize> = starts.iter().copied().chain([ids.len()]).collect();
        // A text of one token predicts nothing.
        if starts.first() != Some(&0) || borders.windows(2).any(|text| text[0] + 2 > text[1]) {
            return Err(format!(
                "starts are {starts:?} in {} ids: expected 0 first, then every text's, each of 2 tokens or more",
                ids.len()
            ));
        }
        let text = |border: &[usize]| Passage { tokens: border[0]..border[1], predicted: border[0] + 1 };
        let texts = borders.windows(2).map(text).collect();
        let stored = Stored { texts, logits: logits.data(), dtype: logits.dtype(), vocab, ids };
        for at in 0..stored.ids.len() {
            if stored.logits(at).iter().any(|logit| !logit.is_finite()) {
                return Err(format!("the logits of token {at} are not finite"));
            }
        }
        Ok(stored)
    }

    /// The logits of a token's successor.
    fn logits(&self, at: usize) -> Vec<f32> {
        let row = |size: usize| &self.logits[at * self.vocab * size..(at + 1) * self.vocab * size];
        match self.dtype {
            // The upper half of the F32 of the same value.
            Dtype::BF16 => {
                row(2).as_chunks().0.iter().map(|&[low, high]| f32::from_le_bytes([0, 0, low, high])).collect()
            }
            _ => row(4).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        }
    }
}

fn integers(name: &str, tensor: &TensorView<'_>) -> Result<Vec<u32>, String> {
    if tensor.dtype() != Dtype::I32 || tensor.shape().len() != 1 {
        return Err(format!("{name} are {:?} {:?}: expected I32 of one dimension", tensor.dtype(), tensor.shape()));
    }
    let values = tensor.data().as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
    values
        .map(|value| u32::try_from(value).map_err(|_| format!("{name} have {value}: expected no negative number")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ids: &[i32], starts: Option<&[i32]>, dtype: Dtype, shape: [usize; 2], logits: &[u8]) -> Vec<u8> {
        let bytes = |values: &[i32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (ids_bytes, starts_bytes) = (bytes(ids), bytes(starts.unwrap_or_default()));
        let mut tensors = vec![
            ("ids", TensorView::new(Dtype::I32, vec![ids.len()], &ids_bytes).unwrap()),
            ("logits", TensorView::new(dtype, shape.to_vec(), logits).unwrap()),
        ];
        if let Some(starts) = starts {
            tensors.push(("starts", TensorView::new(Dtype::I32, vec![starts.len()], &starts_bytes).unwrap()));
        }
        safetensors::serialize(tensors, None).unwrap()
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn both_element_types_give_the_same_numbers() {
        let values = [1.5f32, -2.0, 0.0, 0.25, 96.0, -0.375];
        let halves: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()[2..].to_vec()).collect();
        for (dtype, bytes) in [(Dtype::F32, floats(&values)), (Dtype::BF16, halves)] {
            let file = file(&[0, 1, 1], None, dtype, [3, 2], &bytes);
            let stored = Stored::parse(&file, 2).unwrap();
            assert_eq!(stored.logits(1), [0.0, 0.25]);
            assert_eq!(stored.texts, [Passage { tokens: 0..3, predicted: 1 }]);
        }
    }

    #[test]
    fn texts_are_between_their_starts() {
        let file = file(&[0; 5], Some(&[0, 3]), Dtype::F32, [5, 1], &floats(&[0.0; 5]));
        let texts = Stored::parse(&file, 1).unwrap().texts;
        assert_eq!(texts, [Passage { tokens: 0..3, predicted: 1 }, Passage { tokens: 3..5, predicted: 4 }]);
    }

    #[test]
    fn wrong_files_are_refused_with_what_is_wrong() {
        let zeros = floats(&[0.0; 4]);
        let refused = |file: &[u8], vocab| Stored::parse(file, vocab).err().unwrap();
        let whole = |ids: &[i32], starts: Option<&[i32]>| file(ids, starts, Dtype::F32, [2, 2], &zeros);
        assert!(refused(b"text", 2).contains("safetensors"));
        assert!(refused(&whole(&[0, 1], None), 3).contains("expected [2, 3]"));
        assert!(refused(&whole(&[0, 1, 1], None), 2).contains("expected [3, 2]"));
        assert!(refused(&whole(&[0, 2], None), 2).contains("ids have 2"));
        assert!(refused(&whole(&[0, -1], None), 2).contains("ids have -1"));
        for starts in [&[][..], &[1], &[0, 1], &[0, 2], &[0, 0]] {
            assert!(refused(&whole(&[0, 1], Some(starts)), 2).contains("starts"), "{starts:?}");
        }
        let bytes = [0; 8];
        assert!(refused(&file(&[0, 1], None, Dtype::F16, [2, 2], &bytes), 2).contains("F16"));
        let nan = floats(&[0.0, 0.0, f32::NAN, 0.0]);
        assert!(refused(&file(&[0, 1], None, Dtype::F32, [2, 2], &nan), 2).contains("token 1"));
        let alone = safetensors::serialize(Vec::<(&str, TensorView<'_>)>::new(), None).unwrap();
        assert!(refused(&alone, 2).contains("\"ids\""));
    }
}
