//! The records of `bench/results`: which are benchmarks, what belongs together, which is the newest.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

/// One context of one run; `bench/results/README.md` describes the fields.
#[derive(Clone, Debug, Deserialize)]
pub struct Record {
    pub contract: Option<u32>,
    pub engine: String,
    pub commit: Option<String>,
    /// RFC 3339 in UTC, so that the order of texts is that of times.
    pub date: String,
    pub machine: Machine,
    pub device: String,
    pub threads: usize,
    pub kv: String,
    pub model: String,
    pub shape: Sizes,
    pub load_s: Option<f64>,
    pub context: usize,
    pub decode_tokens: usize,
    #[serde(default = "one")]
    pub sessions: usize,
    pub start: Start,
    pub prefill_tok_s: Option<Stat>,
    pub decode_tok_s: Option<Stat>,
    pub token_bytes: Option<TokenBytes>,
    pub read_share: Option<Stat>,
    pub peak_memory_bytes: Option<u64>,
    /// Name of the file.
    #[serde(skip)]
    pub file: String,
    /// Lines of one run have one number, which is not of another run.
    #[serde(skip)]
    pub run: usize,
}

fn one() -> usize {
    1
}

#[derive(Clone, Debug, Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Sizes {
    pub layers: usize,
    pub vocab: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    Prefill,
    Synthetic,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Stat {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub rounds: Vec<f64>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct TokenBytes {
    weights: u64,
    state: u64,
    kv: u64,
}

impl TokenBytes {
    pub fn total(&self) -> u64 {
        self.weights + self.state + self.kv
    }
}

impl Record {
    /// Name of the engine without its version.
    pub fn engine_name(&self) -> &str {
        self.engine.split(' ').next().unwrap_or_default()
    }

    pub fn is_ours(&self) -> bool {
        self.engine_name() == "lily"
    }

    /// The kind of device, and what stands in parentheses behind it.
    pub fn device_parts(&self) -> (&str, &str) {
        let (kind, rest) = self.device.split_once(" (").unwrap_or((&self.device, ""));
        (kind, rest.strip_suffix(')').unwrap_or(rest))
    }

    /// What it ran on, whichever kernels and engine.
    pub fn place(&self) -> String {
        let Machine { cpu, cores } = &self.machine;
        match self.device_parts() {
            ("cuda", how) => how.split(',').next().unwrap_or_default().to_owned(),
            ("metal", _) => format!("GPU of {cpu}"),
            _ if self.threads == *cores => format!("{cpu}, {cores} cores"),
            _ => format!("{cpu}, {cores} cores, {} threads", self.threads),
        }
    }

    /// What was run: random weights by their sizes, others by their name.
    pub fn weights(&self) -> String {
        // "cut" is what `bench-peers` called its checkpoint once.
        let random = self.model == "cut" || ["synthetic ", "qwen36-"].iter().any(|name| self.model.starts_with(name));
        let Sizes { layers, vocab } = self.shape;
        let sizes = format!("{layers} layers, vocabulary {}", super::page::grouped(vocab as u64));
        match random {
            true => format!("Random weights: {sizes}"),
            false => format!("{}: {sizes}", self.model),
        }
    }

    /// Whether both are numbers for the same thing, so that only the newer one counts.
    fn replaces(&self, older: &Record) -> bool {
        let kv = |record: &Record| record.is_ours().then(|| record.kv.clone());
        let key = |record: &Record| {
            let engine = record.engine_name().to_owned();
            (engine, record.place(), record.weights(), kv(record), record.sessions, record.context)
        };
        key(self) == key(older) && self.date >= older.date
    }

    /// Whether `other` may be the next line of the same run.
    fn continues(&self, other: &Record) -> bool {
        let run = |r: &Record| {
            let how = (r.engine.clone(), r.commit.clone(), r.device.clone(), r.threads, r.kv.clone());
            (how, r.model.clone(), r.decode_tokens, r.sessions, r.file.clone())
        };
        run(self) == run(other) && self.context < other.context
    }
}

/// What the files hold.
#[derive(Default)]
pub struct Records {
    /// In the order of files and lines.
    pub all: Vec<Record>,
    /// Files with lines that are no benchmarks.
    pub others: Vec<String>,
}

impl Records {
    /// Reads all `.jsonl` files of a directory.
    pub fn read(directory: &Path) -> Result<Records> {
        let entries = std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
        let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
        files.sort();
        let mut records = Records::default();
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            records.add(&name, &std::fs::read_to_string(&file)?)?;
        }
        Ok(records)
    }

    /// Adds the lines of a file.
    pub fn add(&mut self, file: &str, text: &str) -> Result<()> {
        for (line, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
            let place = || format!("{file}, line {}", line + 1);
            let value: Value = serde_json::from_str(text).with_context(|| format!("{}: not JSON", place()))?;
            let has = |key: &str| value.get(key).is_some_and(|value| !value.is_null());
            if !(has("context") && (has("prefill_tok_s") || has("decode_tok_s"))) {
                if self.others.last().is_none_or(|last| last != file) {
                    self.others.push(file.to_owned());
                }
                continue;
            }
            let mut record: Record = serde_json::from_value(value).with_context(place)?;
            record.file = file.to_owned();
            record.run = match self.all.last() {
                Some(last) if last.continues(&record) => last.run,
                Some(last) => last.run + 1,
                None => 0,
            };
            self.all.push(record);
        }
        Ok(())
    }

    /// Those that no other one replaces; of two of the same second the later line.
    pub fn newest(&self) -> Vec<&Record> {
        let replaced = |at: usize, record: &Record| {
            let later = |(i, other): (usize, &Record)| other.replaces(record) && (other.date > record.date || i > at);
            self.all.iter().enumerate().any(later)
        };
        self.all.iter().enumerate().filter(|(at, record)| !replaced(*at, record)).map(|(_, record)| record).collect()
    }

    /// lily's record that was measured in turns with one of a peer.
    pub fn in_turns(&self, peer: &Record) -> Option<&Record> {
        let with = |ours: &&Record| {
            ours.is_ours()
                && (&ours.file, &ours.date, ours.context) == (&peer.file, &peer.date, peer.context)
                && ours.place() == peer.place()
        };
        self.all.iter().find(with)
    }

    /// The records of a run.
    pub fn of_run(&self, run: usize) -> impl Iterator<Item = &Record> {
        self.all.iter().filter(move |record| record.run == run)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A line with some fields replaced.
    pub fn line(fields: Value) -> String {
        let stat = serde_json::json!({"median": 10.0, "min": 9.0, "max": 11.0, "rounds": [9.0, 11.0, 10.0]});
        let mut record = serde_json::json!({
            "contract": 1, "engine": "lily 0.1.0", "commit": "abc", "date": "2026-01-02T00:00:00Z",
            "machine": {"cpu": "A", "cores": 2, "memory_bytes": 1, "os": "linux x86_64"},
            "device": "cpu (2 threads, avx2)", "threads": 2, "kv": "bf16", "model": "synthetic qwen36:4",
            "shape": {"hidden": 8, "layers": 4, "vocab": 4096, "experts": 2, "experts_per_token": 1},
            "context": 64, "decode_tokens": 8, "start": "prefill", "prefill_tok_s": stat, "decode_tok_s": stat,
            "read_gb_s": stat, "token_bytes": {"weights": 1_000_000_000, "state": 0, "kv": 0}, "read_share": stat,
            "digest": "0", "peak_memory_bytes": 2_000_000_000,
        });
        for (key, value) in fields.as_object().unwrap() {
            record[key] = value.clone();
        }
        record.to_string()
    }

    fn records(lines: &[Value]) -> Records {
        let mut records = Records::default();
        let text: Vec<String> = lines.iter().map(|fields| line(fields.clone())).collect();
        records.add("a.jsonl", &text.join("\n")).unwrap();
        records
    }

    #[test]
    fn the_newest_record_wins_of_those_for_the_same_thing_only() {
        let records = records(&[
            serde_json::json!({"date": "2026-01-03T00:00:00Z", "commit": "newest"}),
            serde_json::json!({"commit": "old", "engine": "lily 0.0.9", "decode_tokens": 64}),
            serde_json::json!({"commit": "other context", "context": 128}),
            serde_json::json!({"commit": "other kv", "kv": "f32"}),
            serde_json::json!({"commit": "other model", "model": "demo"}),
            serde_json::json!({"commit": "other engine", "engine": "llama.cpp b1"}),
            serde_json::json!({"commit": "other GPU", "device": "cuda (NVIDIA H200, sm_90, graphs)"}),
            serde_json::json!({"commit": "twice", "sessions": 2}),
            serde_json::json!({"commit": "twice, later line", "sessions": 2}),
        ]);
        let commits: Vec<&str> = records.newest().iter().map(|record| record.commit.as_deref().unwrap()).collect();
        let expected = ["newest", "other context", "other kv", "other model", "other engine", "other GPU"];
        assert_eq!(commits, [&expected[..], &["twice, later line"]].concat());
    }

    #[test]
    fn lines_of_a_run_belong_together() {
        let records = records(&[
            serde_json::json!({"context": 64}),
            serde_json::json!({"context": 512}),
            serde_json::json!({"context": 64}),
            serde_json::json!({"context": 512, "engine": "llama.cpp b1"}),
        ]);
        assert_eq!(records.all.iter().map(|record| record.run).collect::<Vec<_>>(), [0, 0, 1, 2]);
        let pair = records.in_turns(&records.all[3]).unwrap();
        assert_eq!((pair.context, pair.run), (512, 0));
    }

    #[test]
    fn lines_of_another_kind_are_named_and_broken_ones_are_errors() {
        let mut records = Records::default();
        records.add("eval.jsonl", "{\"perplexity\": 8.1, \"context\": 2048}\n\n{\"recall\": 1}\n").unwrap();
        assert_eq!((records.all.len(), &records.others[..]), (0, &["eval.jsonl".to_owned()][..]));
        let broken = line(serde_json::json!({"threads": "two"}));
        let error = format!("{:#}", records.add("b.jsonl", &broken).unwrap_err());
        assert!(error.contains("b.jsonl, line 1") && error.contains("\"two\""), "{error}");
        assert!(records.add("c.jsonl", "{").unwrap_err().to_string().contains("c.jsonl, line 1"));
    }
}
