//! What packages say about the binary, held against the binary.

#![expect(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn packaging(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)).unwrap()
}

/// lily with these arguments; behind them `--help`, so that they are read and nothing is done.
fn accepts(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lily")).args(args).arg("--help").output().unwrap()
}

/// What stands between two texts.
fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    text.split_once(start).unwrap().1.split_once(end).unwrap().0
}

#[test]
fn services_use_options_that_exist() {
    let unit = packaging("lily.service");
    let options = between(&unit, "LILY_OPTIONS=--", ",");
    let systemd = between(&unit, "/usr/local/bin/lily ", "\n").replace("$LILY_OPTIONS", &format!("--{options}"));
    let launchd = between(&packaging("lily.plist"), "/usr/local/bin/lily ", " 2&gt;").replace('"', "");
    let docker: Vec<String> =
        serde_json::from_str(packaging("Dockerfile").lines().find_map(|line| line.strip_prefix("CMD ")).unwrap())
            .unwrap();
    for line in [systemd, launchd, docker.join(" ")] {
        let args: Vec<&str> = line.split_whitespace().collect();
        let output = accepts(&args);
        assert!(args[0] == "serve" && output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    // Unknown ones are refused in this way of asking, too.
    assert!(!accepts(&["serve", "--no-such-option"]).status.success());
}

#[test]
fn every_command_has_a_manual_page() {
    let directory = tempfile::tempdir().unwrap();
    let pages: PathBuf = directory.path().join("man1");
    let output = Command::new(env!("CARGO_BIN_EXE_lily")).arg("man").arg(&pages).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for command in ["lily", "lily-run", "lily-serve", "lily-bench", "lily-pull"] {
        let page = std::fs::read_to_string(pages.join(format!("{command}.1"))).unwrap();
        assert!(page.contains(&format!(".TH {command} 1")) && page.contains(".SH SYNOPSIS"), "{page}");
    }
    let serve = std::fs::read_to_string(pages.join("lily-serve.1")).unwrap();
    assert!(serve.contains("\\-\\-cache\\-dir"), "{serve}");
}
