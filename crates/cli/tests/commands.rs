//! The real binary on the tiny checkpoint: what a person sees, and what a wrong input gets.

#![expect(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use safetensors::SafeTensors;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn tiny() -> String {
    root().join("testdata/tiny").display().to_string()
}

/// A command with a home of its own, so that a model pulled by the user running the tests plays no part.
fn lily(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.env("HOME", home).env_remove("XDG_DATA_HOME").stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    lily(home.path()).args(args).output().unwrap()
}

fn run_with_stdin(args: &[&str], input: &[u8]) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut child = lily(home.path())
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The command fails with this code, says these things in its last line, and does not panic.
#[track_caller]
fn refuses(output: &Output, code: i32, words: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    let last = message.lines().last().unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "no {word:?} in {last:?}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn without_a_model_the_embedded_one_answers_and_says_what_it_is() {
    let output = run(&["run", "Hello", "-n", "8", "--seed", "1"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("lily pull"), "{}", stderr(&output));
    assert!(stderr(&output).contains("answer 8 tokens"), "{}", stderr(&output));
}

#[test]
fn the_same_seed_gives_the_same_answer_and_another_seed_another() {
    let answer = |seed: &str| {
        let model = tiny();
        let output = run(&["run", "Hello", "--model", &model, "-n", "24", "--seed", seed, "--raw", "--quiet"]);
        assert!(output.status.success(), "{}", stderr(&output));
        output.stdout
    };
    assert_eq!(answer("1"), answer("1"));
    assert_ne!(answer("1"), answer("2"));
}

#[test]
fn the_prompt_comes_from_stdin_too() {
    let model = tiny();
    let args = ["--model", &model, "-n", "12", "--temperature", "0", "--raw", "--quiet"];
    let direct = run(&[&["run", "Once"][..], &args].concat());
    let piped = run_with_stdin(&[&["run", "-"][..], &args].concat(), b"Once");
    let bare = run_with_stdin(&[&["run"][..], &args].concat(), b"Once");
    assert!(direct.status.success(), "{}", stderr(&direct));
    assert_eq!(stdout(&direct), stdout(&piped));
    assert_eq!(stdout(&direct), stdout(&bare));
}

#[test]
fn prompts_that_cannot_be_run_are_refused_with_what_to_do() {
    let model = tiny();
    refuses(&run_with_stdin(&["run", "--model", &model], b"caf\xe9"), 2, &["UTF-8", "byte 3"]);
    refuses(&run_with_stdin(&["run", "--model", &model], b" \n"), 2, &["empty"]);
    let long = "word ".repeat(200);
    refuses(&run(&["run", &long, "--model", &model, "--ctx", "100"]), 2, &["context", "100"]);
    refuses(&run(&["run", "x", "--model", &model, "--ctx", "0"]), 2, &["--ctx 0", "262,144"]);
    let serve = ["serve", "--port", "0", "--model", &model, "--ctx", "200000", "--cache-memory", "1MB"];
    refuses(&run(&serve), 2, &["--ctx 200000", "--cache-memory"]);
    refuses(&run(&["run", "x", "--model", &model, "--temperature", "9"]), 2, &["temperature", "9"]);
    refuses(&run(&["run", "x", "--model", &model, "--logit-bias", "1024=1"]), 2, &["logit_bias", "1024"]);
    refuses(&run(&["run", "x", "--model", &model, "--backend", "reference"]), 2, &["reference"]);
    let no_threads = run(&["run", "x", "--model", &model, "--threads", "0"]);
    assert_eq!(no_threads.status.code(), Some(2));
    assert!(stderr(&no_threads).contains("at least 1"), "{}", stderr(&no_threads));
}

#[test]
fn checkpoints_that_cannot_be_used_are_refused_by_file_and_field() {
    refuses(&run(&["run", "x", "--model", "/no/such/place"]), 3, &["/no/such/place"]);
    let empty = tempfile::tempdir().unwrap();
    let place = empty.path().display().to_string();
    refuses(&run(&["run", "x", "--model", &place]), 3, &["config.json"]);
    std::fs::write(empty.path().join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    refuses(&run(&["inspect", "--model", &place]), 3, &["model_type", "llama", "qwen3_5_moe"]);
}

#[test]
fn a_broken_tokenizer_is_named() {
    let copy = copy_of_tiny();
    std::fs::write(copy.path().join("tokenizer.json"), "{").unwrap();
    let place = copy.path().display().to_string();
    refuses(&run(&["run", "x", "--model", &place]), 3, &["tokenizer.json"]);
}

#[test]
fn a_template_that_raises_is_a_refusal_in_its_own_words() {
    let copy = copy_of_tiny();
    std::fs::write(copy.path().join("chat_template.jinja"), "{{ raise_exception('No poems today.') }}").unwrap();
    let place = copy.path().display().to_string();
    refuses(&run(&["run", "x", "--model", &place]), 2, &["No poems today."]);
}

#[test]
fn weights_that_give_no_numbers_are_an_error_and_not_a_token() {
    let copy = copy_of_tiny();
    let shard = copy.path().join("model-00005-of-00005.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let scales = tensors.tensor("language_model.lm_head.scales").unwrap().data().as_ptr_range();
    let start = scales.start.addr() - bytes.as_ptr().addr();
    // BF16 NaN in every group of the first row.
    bytes[start..start + 8].copy_from_slice(&[0xC0, 0x7F].repeat(4));
    std::fs::write(&shard, bytes).unwrap();
    let place = copy.path().display().to_string();
    refuses(&run(&["run", "x", "--model", &place, "--raw", "-n", "2"]), 1, &["not finite"]);
}

fn copy_of_tiny() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

#[test]
fn logits_are_those_of_the_goldens() {
    let goldens = std::fs::read(root().join("testdata/goldens/tiny.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&goldens).unwrap();
    let ids: Vec<String> = words(goldens.tensor("p7.ids").unwrap().data()).map(|id| id.to_string()).collect();
    let expected: Vec<f32> = words(goldens.tensor("p7.f32.logits").unwrap().data()).map(f32::from_bits).collect();
    let folder = tempfile::tempdir().unwrap();
    // The bounds that NUMERICS.md sets against the oracle for 16-bit activations and for the f32 forward, both with an f32
    // cache.
    for (backend, bound) in [("cpu", 4e-3), ("reference", 1e-3)] {
        let out = folder.path().join(format!("{backend}.safetensors"));
        let file = out.display().to_string();
        let ids = ids.join(",");
        let output = run(&["logits", &ids, "--model", &tiny(), "--backend", backend, "--kv", "f32", "--out", &file]);
        assert!(output.status.success(), "{}", stderr(&output));
        let bytes = std::fs::read(&out).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [7, 1024]);
        let found: Vec<f32> = words(logits.data()).map(f32::from_bits).collect();
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < bound, "{backend}: {worst}");
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b))
}

#[test]
fn wrong_token_ids_are_refused() {
    refuses(&run(&["logits", "1,two", "--model", &tiny()]), 2, &["two", "1024"]);
    refuses(&run(&["logits", "1024", "--model", &tiny()]), 2, &["1024"]);
    refuses(&run(&["logits", ",", "--model", &tiny()]), 2, &["no token ids"]);
    refuses(&run(&["logits", "1", "--model", &tiny(), "--out", "/no/such/folder/x"]), 1, &["/no/such/folder/x"]);
}

#[test]
fn inspect_shows_the_shape_and_what_fits() {
    let output = run(&["inspect", "--model", &tiny(), "--tensors"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for words in [
        "4 (3 gated DeltaNet, 1 attention), hidden 256",
        "8 of width 64, 2 per token",
        "lm_head",
        "4,096 tokens",
        "fits",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
}

#[test]
fn diff_finds_no_stage_where_cpu_and_reference_part() {
    let output = run(&["inspect", "--model", &tiny(), "--diff", "reference,cpu", "--kv", "f32"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for stage in ["embedding", "layer 0 delta", "layer 3 attention", "layer 3 router", "final norm", "logits"] {
        assert!(text.contains(stage), "no {stage:?} in\n{text}");
    }
    assert!(!text.contains("<-") && !text.contains("not recorded"), "{text}");
    refuses(&run(&["inspect", "--model", &tiny(), "--diff", "cpu,cpu"]), 2, &["two different"]);
}

#[test]
fn chat_answers_and_obeys_commands() {
    let home = tempfile::tempdir().unwrap();
    let saved = home.path().join("talk.json").display().to_string();
    let model = tiny();
    let input = format!(
        "/system Be brief.\nHello\n/stats\n/nonsense\n/retry\n/save {saved}\n/undo\n/undo\n/load {saved}\n/exit\n"
    );
    let args = ["chat", "--model", &model, "-n", "4", "--no-think", "--seed", "3"];
    let output = run_with_stdin(&args, input.as_bytes());
    assert!(output.status.success(), "{}", stderr(&output));
    let notes = stderr(&output);
    assert!(notes.contains("unknown command /nonsense") && notes.contains("there is no question yet"), "{notes}");
    let conversation: serde_json::Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(conversation["system"], "Be brief.");
    assert_eq!(conversation["messages"].as_array().unwrap().len(), 2);
    assert_eq!(conversation["messages"][0]["content"], "Hello");
}

#[test]
fn a_second_turn_reuses_the_first() {
    let model = tiny();
    let args = ["chat", "--model", &model, "-n", "4", "--no-think", "--seed", "3"];
    let output = run_with_stdin(&args, b"Hello there, this is a first question\nAnd a second\n/stats\n");
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("reused"), "{}", stderr(&output));
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    let home = tempfile::tempdir().unwrap();
    let mut child = lily(home.path())
        .args(["run", "Hello", "--model", &tiny(), "-n", "200", "--raw", "--temperature", "0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn a_tool_call_is_printed_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tools.json");
    let tools = serde_json::json!([{"type": "function", "function": {
        "name": "random_number", "description": "Returns a random number",
        "parameters": {"type": "object", "required": ["faces"], "properties": {"faces": {"type": "integer", "description": "Number of sides"}}}
    }}]);
    std::fs::write(&file, tools.to_string()).unwrap();
    let file = file.display().to_string();
    let output = run(&["run", "Throw a die with 6 sides, please.", "--tools", &file, "--temperature", "0"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let call: serde_json::Value = serde_json::from_str(stdout(&output).trim()).unwrap();
    assert_eq!(call, serde_json::json!({"name": "random_number", "arguments": {"faces": 6}}));
    std::fs::write(&file, "no json").unwrap();
    refuses(&run(&["run", "x", "--tools", &file]), 2, &["tools.json", "not JSON"]);
}

#[test]
fn completions_are_written_for_each_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success() && stdout(&output).contains("lily"), "{shell}");
    }
}

#[test]
fn a_selftest_reports_cases_and_laws_and_why_a_device_is_not_there() {
    let output = run(&["selftest", "--backend", "cpu", "--threads", "2"]);
    let report = stdout(&output);
    assert!(output.status.success(), "{report}");
    assert!(report.lines().last().unwrap().ends_with("checks, 0 failed"), "{report}");
    for line in
        ["device   cpu (", "case     ok      full-size layers", "law      ok      prefill equals repeated decode"]
    {
        assert!(report.contains(line), "no {line:?} in {report}");
    }
    #[cfg(not(target_os = "macos"))]
    refuses(&run(&["selftest", "--backend", "metal"]), 4, &["metal", "needs a Mac"]);
}
