//! `lily eval` as a person runs it: numbers that another way of computing them gives, too, and what a wrong input gets.

#![expect(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use lily_model::tokenizer::Tokenizer;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn tiny() -> String {
    root().join("testdata/tiny").display().to_string()
}

fn eval(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.arg("eval").args(args).stdin(Stdio::null()).output().unwrap()
}

/// The record that a successful run appends.
#[track_caller]
fn record(args: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.jsonl").display().to_string();
    let output = eval(&[args, &["--json", &file]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

#[track_caller]
fn refuses(args: &[&str], words: &[&str]) {
    let output = eval(args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    let last = message.lines().last().unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "no {word:?} in {last:?}");
    }
}

fn file(folder: &TempDir, name: &str, bytes: &[u8]) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

const TEXT: &str = "The fox ran over the hill and saw the sea, and it went home and slept well that night.";

/// The tokens of [`TEXT`], and its perplexity by the logits that `lily logits` writes, computed as the definition has it.
fn by_hand(folder: &TempDir, backend: &str) -> (usize, f64, String) {
    let json = std::fs::read(root().join("testdata/tiny/tokenizer.json")).unwrap();
    let ids = Tokenizer::from_json(&json, None).unwrap().encode_text(TEXT).unwrap();
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    let out = folder.path().join(format!("{backend}.safetensors")).display().to_string();
    let args = ["logits", &list.join(","), "--model", &tiny(), "--backend", backend, "--kv", "f32", "--out", &out];
    assert!(Command::new(env!("CARGO_BIN_EXE_lily")).args(args).output().unwrap().status.success());
    let bytes = std::fs::read(&out).unwrap();
    let logits = SafeTensors::deserialize(&bytes).unwrap();
    let logits = logits.tensor("logits").unwrap();
    let values: Vec<f64> =
        logits.data().chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect();
    let vocab = logits.shape()[1];
    // The geometric mean of one over the probabilities, factor by factor: their product is too small for a number.
    let exponent = -1.0 / (ids.len() - 1) as f64;
    let factors = values.chunks(vocab).zip(&ids[1..]).map(|(row, next)| {
        let probability = row[*next as usize].exp() / row.iter().map(|x| x.exp()).sum::<f64>();
        probability.powf(exponent)
    });
    (ids.len(), factors.product(), out)
}

#[test]
fn perplexity_is_that_of_the_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (tokens, expected, _) = by_hand(&folder, "reference");
    let text = file(&folder, "text", TEXT.as_bytes());
    let window = tokens.to_string();
    let got = record(&["text", &text, "--window", &window, "--backend", "reference", "--model", &tiny()]);
    assert_eq!((&got["eval"], &got["device"], &got["kv"]), (&"text".into(), &"reference".into(), &"f32".into()));
    assert_eq!(got["result"]["tokens"], tokens - 1);
    let perplexity = got["result"]["perplexity"].as_f64().unwrap();
    // Only the order of sums differs.
    assert!((perplexity / expected - 1.0).abs() < 1e-9, "{perplexity}, by hand {expected}");
}

#[test]
fn two_backends_agree_as_far_as_their_tests_say() {
    let folder = tempfile::tempdir().unwrap();
    let text = file(&folder, "text", TEXT.repeat(3).as_bytes());
    let args = ["text", &text, "--window", "64", "--backend", "cpu", "--kv", "f32", "--model", &tiny()];
    let got = record(&[&args[..], &["--against", "reference"]].concat());
    let (result, against) = (&got["result"], &got["result"]["against"]);
    assert_eq!(against["name"], "reference");
    let (ours, theirs) = (result["perplexity"].as_f64().unwrap(), against["perplexity"].as_f64().unwrap());
    // Logits are at most 4e-3 apart, the CPU backend's tolerance, so log-probabilities at most twice that.
    assert!(ours != theirs && (ours / theirs).ln().abs() < 8e-3, "{ours} against {theirs}");
    assert!(against["kl"].as_f64().unwrap() < 8e-3 && against["same_top"].as_f64().unwrap() > 0.9, "{against}");
}

#[test]
fn stored_logits_of_the_same_backend_are_met_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let (tokens, expected, logits) = by_hand(&folder, "cpu");
    let got = record(&["logits", &logits, "--backend", "cpu", "--kv", "f32", "--model", &tiny()]);
    let (result, against) = (&got["result"], &got["result"]["against"]);
    assert_eq!(result["tokens"], tokens - 1);
    assert_eq!(result["perplexity"], against["perplexity"]);
    assert!((result["perplexity"].as_f64().unwrap() / expected - 1.0).abs() < 1e-9);
    assert_eq!((against["same_top"].as_f64(), against["worst_kl"].as_f64()), (Some(1.0), Some(0.0)));
}

#[test]
fn the_demo_model_solves_a_prompt_of_each_task() {
    let demo = root().join("assets/demo").display().to_string();
    let tasks = root().join("tools/train-demo/heldout/tasks.jsonl").display().to_string();
    let got = record(&["tasks", &tasks, "--each", "1", "--backend", "cpu", "--model", &demo]);
    let scores = got["result"]["scores"].as_array().unwrap().clone();
    let sum = |name: &str| scores.iter().map(|score| score[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!((scores.len(), sum("prompts"), sum("stopped"), sum("switch")), (9, 9, 9, 9));
    // Its card has 92 right of 100 for the hardest tasks.
    assert!(sum("right") >= 8, "{scores:?}");
}

#[test]
fn the_demo_model_finds_what_was_said_last() {
    let demo = root().join("assets/demo").display().to_string();
    let args =
        ["needle", "--contexts", "128", "--depths", "100", "--trials", "4", "--backend", "cpu", "--model", &demo];
    let got = record(&args);
    let cell = &got["result"]["cells"][0];
    assert_eq!((&cell["context"], &cell["depth"], &cell["trials"]), (&128.into(), &100.into(), &4.into()));
    // Chance is one of eight.
    assert!(cell["found"].as_u64().unwrap() >= 3, "{cell}");
}

#[test]
fn texts_that_cannot_be_read_are_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let model = ["--backend", "cpu", "--model", &tiny()];
    let text = |bytes: &[u8], more: &[&str], words: &[&str]| {
        let file = file(&folder, "text", bytes);
        refuses(&[&["text", &file][..], more, &model].concat(), words);
    };
    text(b" \n", &[], &["text is empty"]);
    text(b"caf\xe9", &[], &["UTF-8", "byte 3"]);
    text(b"Short.", &["--window", "64"], &["tokens, a window 64", "--window"]);
    text(TEXT.as_bytes(), &["--window", "1"], &["--window 1", "at least 2"]);
    text(TEXT.as_bytes(), &["--window", "16", "--stride", "16"], &["--stride 16", "less than the window of 16"]);
    text(TEXT.as_bytes(), &["--documents"], &["<|endoftext|>", "--documents"]);
    text(TEXT.as_bytes(), &["--window", "16", "--against", "cpu"], &["--against cpu", "itself"]);
}

#[test]
fn files_of_other_evaluations_are_refused_with_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let model = ["--backend", "cpu", "--model", &tiny()];
    let (ids, logits) = ([0; 8], [0; 16]);
    let tensors = [
        ("ids", TensorView::new(Dtype::I32, vec![2], &ids).unwrap()),
        ("logits", TensorView::new(Dtype::F32, vec![2, 2], &logits).unwrap()),
    ];
    let other = file(&folder, "other.safetensors", &safetensors::serialize(tensors, None).unwrap());
    refuses(&[&["logits", &other][..], &model].concat(), &["other.safetensors", "[2, 2]", "expected [2, 1024]"]);
    let tasks = |text: &str, words: &[&str]| {
        let file = file(&folder, "tasks.jsonl", text.as_bytes());
        refuses(&[&["tasks", &file][..], &model].concat(), words);
    };
    tasks("\n", &["tasks.jsonl has no prompts"]);
    tasks("{}", &["line 1", "task", "expected"]);
    tasks("\n{\"task\": \"a\", \"messages\": [], \"thinking\": true, \"expect\": {\"sum\": 7}}", &["line 2", "number"]);
    refuses(&[&["needle", "--contexts", "8"][..], &model].concat(), &["8 tokens", "or more"]);
}
