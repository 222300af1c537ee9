//! `lily bench` from outside: numbers, records, plot, and what a wrong request gets.

#![expect(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn bench(args: &str, more: &[&Path]) -> Output {
    let home = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_lily"))
        .arg("bench")
        .args(args.split_whitespace())
        .args(more)
        .env("HOME", home.path())
        .env_remove("XDG_DATA_HOME")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn records(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_shape_without_files_is_measured_printed_recorded_and_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("records.jsonl");
    let svg = directory.path().join("plot.svg");
    let args = "--synthetic demo --contexts 32,64 --decode 8 --rounds 3 --threads 2 --json";
    let text = stdout(&bench(args, &[&json, Path::new("--svg"), &svg]));
    for words in ["contract 1", "2654435761) mod 2^32) mod 4096", "3; median", "decode tok/s", "peak memory"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let first = records(&json);
    assert_eq!(first.iter().map(|r| r["context"].as_u64().unwrap()).collect::<Vec<_>>(), [32, 64]);
    for record in &first {
        assert_eq!(record["decode_tok_s"]["rounds"].as_array().unwrap().len(), 3);
        assert!(record["prefill_tok_s"]["median"].as_f64().unwrap() > 0.0);
        assert_eq!((&record["start"], &record["threads"]), (&"prefill".into(), &2.into()));
        assert_eq!(record["model"], "synthetic demo");
        // 0.6 MB of the head and at least 50 kB of each layer.
        assert!(record["token_bytes"]["weights"].as_u64().unwrap() > 1_000_000);
        assert!(text.contains(record["digest"].as_str().unwrap()));
    }
    assert!(std::fs::read_to_string(svg).unwrap().ends_with("</svg>\n"));

    // The same tokens in another process and with other threads; lines are appended.
    let args = "--synthetic demo --contexts 32 --decode 8 --rounds 1 --threads 1 --json";
    stdout(&bench(args, &[&json]));
    let all = records(&json);
    assert_eq!((all.len(), &all[..2]), (3, &first[..]));
    assert_eq!(all[2]["digest"], first[0]["digest"]);
}

#[test]
fn other_sizes_of_a_shape_and_the_checkpoint_in_the_binary_are_measured_too() {
    let text = stdout(&bench("--synthetic demo:4:512 --contexts 16 --decode 2 --rounds 1", &[]));
    assert!(text.contains("synthetic demo:4:512: 4 layers, vocabulary 512"), "{text}");
    let text = stdout(&bench("--contexts 16 --decode 2 --rounds 1 --kv bf16", &[]));
    assert!(text.contains("demo: 8 layers") && text.contains("KV cache in bf16"), "{text}");
}

#[track_caller]
fn refuses(args: &str, code: i32, words: &[&str]) {
    let output = bench(args, &[]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    for word in words {
        assert!(message.contains(word), "no {word:?} in {message}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn wrong_requests_are_refused_with_what_to_do() {
    refuses("--synthetic llama", 2, &["qwen36, demo or tiny"]);
    refuses("--synthetic demo:x", 2, &["\"x\" is not a number"]);
    refuses("--synthetic demo:4:512:1", 2, &["SHAPE:LAYERS:VOCAB"]);
    refuses("--synthetic demo:0", 3, &["num_hidden_layers"]);
    refuses("--synthetic demo --model somewhere", 2, &["cannot be used with"]);
    refuses("--synthetic demo --contexts 0", 2, &["256..2048"]);
    refuses("--synthetic demo --contexts 400000", 2, &["400,064", "262,144"]);
    refuses("--synthetic demo --rounds 0", 2, &["1..=100"]);
    refuses("--synthetic demo --backend reference", 2, &["only computes logits"]);
    refuses("--synthetic demo --json /no/such/place/records.jsonl", 1, &["cannot write records", "/no/such/place"]);
    // 25 times the full size: no machine of a developer holds this.
    refuses("--synthetic qwen36:1000", 4, &["synthetic qwen36:1000", "qwen36:4", "cargo xtask synth"]);
}
