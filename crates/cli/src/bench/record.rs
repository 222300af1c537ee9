//! What is kept of a measurement: one JSON object per context, one per line. `bench/results/README.md` describes the
//! fields.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use anyhow::Context as _;
use lily_model::{Checkpoint, Shape, Source};
use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::measure::Start;
use super::stat::Stat;

/// One context of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub contract: u32,
    pub engine: String,
    pub commit: Option<String>,
    pub date: String,
    pub machine: Machine,
    pub device: String,
    pub threads: usize,
    pub kv: String,
    pub model: String,
    pub shape: Sizes,
    /// Older records have none.
    #[serde(default)]
    pub load_s: Option<f64>,
    pub context: usize,
    pub decode_tokens: usize,
    /// Records of before there were several have none.
    #[serde(default = "one")]
    pub sessions: usize,
    pub start: Start,
    pub prefill_tok_s: Option<Stat>,
    pub decode_tok_s: Stat,
    pub read_gb_s: Stat,
    pub token_bytes: TokenBytes,
    pub read_share: Stat,
    pub digest: String,
    pub peak_memory_bytes: usize,
}

fn one() -> usize {
    1
}

/// The sizes of a shape that change how much there is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    pub hidden: usize,
    pub layers: usize,
    pub vocab: usize,
    pub experts: usize,
    pub experts_per_token: usize,
}

impl Sizes {
    pub fn of(shape: &Shape) -> Sizes {
        Sizes {
            hidden: shape.hidden,
            layers: shape.layers,
            vocab: shape.vocab,
            experts: shape.experts,
            experts_per_token: shape.experts_per_token,
        }
    }
}

/// Bytes that a decode step moves, by [`Shape`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenBytes {
    /// Weights read.
    pub weights: usize,
    /// Recurrent state, read and written.
    pub state: usize,
    /// KV cache read in the middle of the decode steps.
    pub kv: usize,
}

impl TokenBytes {
    pub fn total(&self) -> usize {
        self.weights + self.state + self.kv
    }
}

/// The name of a checkpoint in records: only that of its directory, where it lies is nobody's business.
pub fn model_name(checkpoint: &Checkpoint) -> String {
    match &checkpoint.source {
        Source::Directory(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        Source::Embedded(_) => "demo".into(),
        Source::Memory(_) => checkpoint.source.describe(),
    }
}

/// This moment as records say it.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// A file that records are appended to.
pub struct Journal(File);

impl Journal {
    /// Opens the file, or makes it, before anything is measured in vain.
    pub fn open(path: &Path) -> anyhow::Result<Journal> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ok(Journal(file.with_context(|| format!("cannot write records to {}", path.display()))?))
    }

    /// Appends a line.
    pub fn append(&mut self, record: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.0.write_all(&line).context("cannot append a record")
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A record of `context` tokens with made-up numbers.
    pub fn example(context: usize, prefill: Option<f64>, decode: f64) -> Record {
        Record {
            contract: 1,
            engine: "lily 0.1.0".into(),
            commit: None,
            date: "2026-11-30T00:00:00Z".into(),
            machine: Machine {
                cpu: "A <CPU> & more".into(),
                cores: 2,
                memory_bytes: 1 << 34,
                os: "linux x86_64".into(),
            },
            device: "cpu (2 threads, portable)".into(),
            threads: 2,
            kv: "f32".into(),
            model: "tiny".into(),
            shape: Sizes::of(&Shape::DEMO),
            load_s: Some(1.5),
            context,
            decode_tokens: 64,
            sessions: 1,
            start: if prefill.is_some() { Start::Prefill } else { Start::Synthetic },
            prefill_tok_s: prefill.map(|speed| Stat::of([speed, 1.1 * speed])),
            decode_tok_s: Stat::of([decode, 0.9 * decode, 1.2 * decode]),
            read_gb_s: Stat::of([20.0]),
            token_bytes: TokenBytes { weights: 100, state: 20, kv: 3 },
            read_share: Stat::of([0.5]),
            digest: "e3b0c44298fc1c14".into(),
            peak_memory_bytes: 1 << 30,
        }
    }

    #[test]
    fn records_come_back_as_they_were_appended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("records.jsonl");
        let records = [example(64, Some(1234.5), 99.0), example(131_072, None, 1.0 / 3.0)];
        for record in &records {
            Journal::open(&path).unwrap().append(record).unwrap();
        }
        let text = std::fs::read_to_string(path).unwrap();
        let read: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, records);
        assert!(text.contains(r#""start":"synthetic","prefill_tok_s":null"#), "{text}");
    }
}
