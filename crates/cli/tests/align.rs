//! `lily align` as a person meets it.

#![expect(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny")
}

fn lily(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.env("HOME", home).env_remove("XDG_DATA_HOME").args(args).output().unwrap()
}

#[track_caller]
fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
fn refuses(output: &Output, code: i32, words: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The CPU computes the same bits from either, and all files but the weights are the same.
#[test]
fn an_aligned_checkpoint_is_the_same_model() {
    let home = tempfile::tempdir().unwrap();
    let (aligned, tiny) = (home.path().join("aligned"), tiny());
    let output = lily(home.path(), &["align", "--model", text(&tiny), "--dir", text(&aligned)]);
    succeeds(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), text(&aligned));
    let logits = |model: &Path| {
        let file = home.path().join("logits.safetensors");
        let ids = "5,6,7,8,900,10,11,12,13,14,15";
        let device = ["--backend", "cpu", "--threads", "2"];
        let args = [&["logits", "--model", text(model), ids, "--out", text(&file)], &device[..]].concat();
        succeeds(&lily(home.path(), &args));
        fs::read(file).unwrap()
    };
    assert!(logits(&tiny) == logits(&aligned));
    for entry in fs::read_dir(&aligned).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let same = || fs::read(tiny.join(name)).unwrap() == fs::read(&path).unwrap();
        assert!(name.ends_with(".safetensors") || name.ends_with(".index.json") || same(), "{name}");
    }
    assert!(!home.path().join("aligned.part").exists());
    refuses(&lily(home.path(), &["align", "--model", text(&tiny), "--dir", text(&aligned)]), 2, &["is there already"]);
}

/// What a call that was ended left behind is gone on with; what is wrong in it is found, and nothing gets its name.
#[test]
fn an_interrupted_call_is_gone_on_with_and_its_remains_are_compared() {
    let home = tempfile::tempdir().unwrap();
    let (first, second, tiny) = (home.path().join("first"), home.path().join("second"), tiny());
    let align = |dir: &Path| lily(home.path(), &["align", "--model", text(&tiny), "--dir", text(dir)]);
    succeeds(&align(&first));
    let shards = |dir: &Path| -> Vec<PathBuf> {
        let all = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let mut shards: Vec<_> = all.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
        shards.sort();
        shards
    };
    let written = &shards(&first)[0];
    let part = home.path().join("second.part");
    fs::create_dir(&part).unwrap();
    let mut damaged = fs::read(written).unwrap();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let kept = part.join(written.file_name().unwrap());
    fs::write(&kept, &damaged).unwrap();
    refuses(&align(&second), 1, &["is not what it was made of", "delete", text(&part)]);
    assert!(!second.exists());
    // A half of it is written again.
    fs::write(&kept, &damaged[..last / 2]).unwrap();
    succeeds(&align(&second));
    assert_eq!(shards(&first).len(), shards(&second).len());
    for (a, b) in shards(&first).iter().zip(shards(&second)) {
        assert!(fs::read(a).unwrap() == fs::read(b).unwrap());
    }
}

#[test]
fn without_a_model_or_with_another_one_the_reason_is_said() {
    let home = tempfile::tempdir().unwrap();
    refuses(&lily(home.path(), &["align"]), 2, &["lily pull", "--model"]);
    let empty = home.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let to = home.path().join("to");
    refuses(&lily(home.path(), &["align", "--model", text(&empty), "--dir", text(&to)]), 3, &["model.safetensors"]);
    assert!(!to.exists() && !home.path().join("to.part").exists());
}
