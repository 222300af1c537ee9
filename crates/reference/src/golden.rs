//! Stored outputs of mlx-lm, run in float32 on small checkpoints of the published format, and how logits are compared
//! with them. `tools/oracle` makes them.

use std::path::{Path, PathBuf};

use lily_model::safetensors::parse_header;

/// How far a logit of the reference may be from the goldens.
///
/// Two f32 implementations that add in different orders are 2e-5 apart on `tiny` and 4e-5 on `wide`; a wrong formula
/// moves some logit by more than 1.
pub const LOGIT_TOLERANCE: f32 = 1e-3;

/// The goldens of one checkpoint.
#[derive(Debug)]
pub struct Goldens {
    file: Vec<u8>,
    name: String,
}

/// One prompt and what mlx-lm answers.
#[derive(Debug)]
pub struct Prompt {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// `[ids, vocab]`: the logits of every position.
    pub logits: Vec<f32>,
    /// The greedy continuation.
    pub greedy: Vec<u32>,
    /// For each greedy token, how far its logit lies above the next one.
    pub greedy_margin: Vec<f32>,
    /// For each position, the last chosen minus the first unchosen router logit, the smallest over the layers.
    pub router_margin: Vec<f32>,
}

impl Prompt {
    /// The positions before the first whose router margin is below `error`, an implementation's own error on a router
    /// logit. From there on it may rightly have chosen another expert, and no single logit is comparable.
    pub fn comparable_positions(&self, error: f32) -> usize {
        self.router_margin.iter().position(|margin| *margin < error).unwrap_or(self.router_margin.len())
    }
}

/// The directory of the tiny checkpoint, which is part of the repository.
pub fn tiny_checkpoint() -> PathBuf {
    root().join("testdata/tiny")
}

/// The directory of the wide checkpoint, which `cargo xtask goldens` makes.
pub fn wide_checkpoint() -> PathBuf {
    root().join("target/goldens/wide")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl Goldens {
    /// Of the tiny checkpoint: prompts of 1, 7, 64, 65, 300 and 1000 tokens, and the trace of the second.
    pub fn tiny() -> Goldens {
        Goldens::open(&root().join("testdata/goldens/tiny.safetensors"))
    }

    /// Of the wide checkpoint: prompts of 1, 7, 64, 65 and 300 tokens. `cargo xtask goldens` makes them.
    pub fn wide() -> Goldens {
        Goldens::open(&root().join("target/goldens/wide.safetensors"))
    }

    /// Reads a file of goldens; panics if it cannot, for it is part of a test.
    pub fn open(path: &Path) -> Goldens {
        let name = path.display().to_string();
        let file = std::fs::read(path).unwrap_or_else(|e| panic!("{name}: {e}"));
        Goldens { file, name }
    }

    /// The lengths of the prompts, rising.
    pub fn lengths(&self) -> Vec<usize> {
        let mut lengths: Vec<usize> =
            self.names().iter().filter_map(|name| name.strip_prefix('p')?.strip_suffix(".ids")?.parse().ok()).collect();
        lengths.sort();
        lengths
    }

    /// The prompt of a length.
    pub fn prompt(&self, length: usize) -> Prompt {
        Prompt {
            ids: self.integers(&format!("p{length}.ids")),
            logits: self.floats(&format!("p{length}.f32.logits")),
            greedy: self.integers(&format!("p{length}.f32.greedy")),
            greedy_margin: self.floats(&format!("p{length}.f32.greedy_margin")),
            router_margin: self.floats(&format!("p{length}.f32.router_margin")),
        }
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        let (_, header) = parse_header(&self.file).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        header.tensors().into_keys().collect()
    }

    /// An F32 tensor, flat.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.elements(name, "F32").map(f32::from_le_bytes).collect()
    }

    /// An I32 tensor, flat.
    pub fn integers(&self, name: &str) -> Vec<u32> {
        self.elements(name, "I32").map(u32::from_le_bytes).collect()
    }

    fn elements(&self, name: &str, dtype: &str) -> impl Iterator<Item = [u8; 4]> {
        let (data, header) = parse_header(&self.file).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let info = header.info(name).unwrap_or_else(|| panic!("{} has no {name}", self.name));
        assert_eq!(info.dtype.to_string(), dtype, "{}: {name}", self.name);
        let (start, end) = info.data_offsets;
        self.file[data + start..data + end].as_chunks().0.iter().copied()
    }
}

/// The largest difference between two arrays of logits `[positions, vocab]`, or a message that names the position and
/// the id where it exceeds `tolerance`. NaN exceeds every tolerance.
pub fn compare_logits(got: &[f32], expected: &[f32], vocab: usize, tolerance: f32) -> Result<f32, String> {
    if got.len() != expected.len() {
        return Err(format!("{} logits, expected {} ({vocab} per position)", got.len(), expected.len()));
    }
    let differences = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).enumerate();
    // In the total order a NaN is the largest of all.
    let Some((at, difference)) = differences.max_by(|a, b| a.1.total_cmp(&b.1)) else {
        return Ok(0.0);
    };
    if difference <= tolerance {
        return Ok(difference);
    }
    Err(format!(
        "position {}, id {}: logit {}, expected {}; difference {difference:e}, tolerance {tolerance:e}",
        at / vocab,
        at % vocab,
        got[at],
        expected[at]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_position_and_id_of_the_worst_logit() {
        let message = compare_logits(&[0.0, 0.5, 0.0, 9.0], &[0.0; 4], 2, 1.0).unwrap_err();
        assert!(message.starts_with("position 1, id 1: logit 9, expected 0;"), "{message}");
        assert_eq!(compare_logits(&[0.0, 0.5, 0.0, 9.0], &[0.0; 4], 2, 9.0), Ok(9.0));
    }

    #[test]
    fn nan_and_missing_logits_meet_no_tolerance() {
        let message = compare_logits(&[f32::NAN, 7.0], &[0.0; 2], 2, f32::INFINITY).unwrap_err();
        assert!(message.starts_with("position 0, id 0: logit NaN"), "{message}");
        assert!(compare_logits(&[0.0; 2], &[0.0; 4], 2, f32::INFINITY).is_err());
    }

    #[test]
    fn positions_are_comparable_up_to_the_first_close_choice_of_experts() {
        let router_margin = vec![0.5, 0.1, 1e-5, 0.5];
        let prompt = Prompt { ids: vec![], logits: vec![], greedy: vec![], greedy_margin: vec![], router_margin };
        assert_eq!([1e-6, 1e-4, 0.2].map(|error| prompt.comparable_positions(error)), [4, 2, 1]);
    }
}
