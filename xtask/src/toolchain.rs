//! What this machine can build with.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What rustc says.
pub fn rustc(args: &[&str]) -> Result<String> {
    let output = Command::new("rustc").args(args).output().context("cannot run rustc")?;
    ensure!(output.status.success(), "rustc does not know {args:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Whether there is a standard library for a target.
pub fn has_std(target: &str) -> Result<bool> {
    Ok(Path::new(&rustc(&["--print", "target-libdir", "--target", target])?).exists())
}

/// Whether a program is there and tells its version.
pub fn runs(program: &str) -> bool {
    let version = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}
