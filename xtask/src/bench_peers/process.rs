//! A program run to its end, with the most memory that it had.

use std::io::{Read, Seek};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// What a successful run leaves.
pub struct Finished {
    pub stdout: String,
    /// Highest resident memory in bytes, mapped files included; 0 where the system does not tell.
    pub peak_memory: u64,
}

/// The kernel keeps the highest value, so only what grows in the last moment is missed.
const POLL: Duration = Duration::from_millis(10);

/// Runs a program; what it writes to stderr is shown.
pub fn run(command: &mut Command) -> Result<Finished> {
    eprintln!("{command:?}");
    // A file and not a pipe: nobody has to read while it runs.
    let mut stdout = tempfile::tempfile()?;
    let mut child = command
        .stdout(stdout.try_clone()?)
        .stdin(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    let status_file = format!("/proc/{}/status", child.id());
    let mut peak_memory = 0;
    let status = loop {
        let now = std::fs::read_to_string(&status_file).ok().and_then(|status| high_water_mark(&status));
        peak_memory = peak_memory.max(now.unwrap_or(0));
        match child.try_wait()? {
            Some(status) => break status,
            None => thread::sleep(POLL),
        }
    };
    ensure!(status.success(), "{command:?} failed");
    let mut text = String::new();
    stdout.rewind()?;
    stdout.read_to_string(&mut text)?;
    Ok(Finished { stdout: text, peak_memory })
}

/// `VmHWM` of a Linux process status, in bytes.
fn high_water_mark(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_comes_back_and_failure_is_an_error() {
        let finished = run(Command::new("cargo").arg("--version")).unwrap();
        assert!(finished.stdout.starts_with("cargo "), "{}", finished.stdout);
        let error = run(Command::new("cargo").arg("no-such-command")).err().unwrap().to_string();
        assert!(error.contains("no-such-command"), "{error}");
    }
}
