//! Puts the commit into the binary, for the records of `lily bench`. Without git the binary does without.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let Some(commit) = git(&["describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]) else { return };
    println!("cargo:rustc-env=LILY_COMMIT={commit}");
    // Moves with every commit and checkout.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
}

/// What git prints, if it is there and this is a repository.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
