//! A small checkpoint to pull, and the binary under test.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::server::{Reply, Request, Server};

/// Path of the pinned revision on the hub.
pub const PREFIX: &str = "/mlx-community/Qwen3.6-35B-A3B-4bit/resolve/38740b847e4cb78f352aba30aa41c76e08e6eb46/";

/// A small checkpoint, its manifest, and a directory to pull it to.
pub struct Fixture {
    pub temp: TempDir,
    pub dir: PathBuf,
    pub files: Arc<HashMap<String, Vec<u8>>>,
    /// What goes to `--timeout`.
    pub timeout: &'static str,
}

impl Fixture {
    pub fn new(files: &[(&str, usize)]) -> Self {
        let files: HashMap<_, _> =
            files.iter().map(|(name, len)| ((*name).to_owned(), bytes(name.len() as u32, *len))).collect();
        let mut manifest = "# a test\n".to_owned();
        for (name, body) in &files {
            let sha256: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
            manifest += &format!("{name}\t{}\t{sha256}\n", body.len());
        }
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join("manifest.tsv"), manifest).unwrap();
        let dir = temp.path().join("checkpoint");
        Self { temp, dir, files: Arc::new(files), timeout: "30" }
    }

    /// One file, `weights`, of `len` bytes.
    pub fn weights(len: usize) -> Self {
        Self::new(&[("weights", len)])
    }

    pub fn manifest(&self) -> PathBuf {
        self.temp.path().join("manifest.tsv")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Puts a file into the directory before the pull.
    pub fn put(&self, name: &str, body: &[u8]) {
        fs::create_dir_all(&self.dir).unwrap();
        fs::write(self.path(name), body).unwrap();
    }

    /// A server of the files; `spoil` may replace the honest answer.
    pub fn serve(&self, spoil: impl Fn(&Request, usize, &[u8]) -> Option<Reply> + Send + Sync + 'static) -> Server {
        let files = self.files.clone();
        Server::start(move |request, earlier| {
            let Some(body) = files.get(request.file()) else {
                return Reply::status("404 Not Found");
            };
            spoil(request, earlier, body).unwrap_or_else(|| Reply::honest(request, body))
        })
    }

    pub fn pull(&self, endpoint: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_ENDPOINT"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command.args(["pull", "--retries", "2", "--timeout", self.timeout, "--endpoint", endpoint]);
        command.arg("--dir").arg(&self.dir).arg("--manifest").arg(self.manifest()).stdin(Stdio::null());
        command
    }

    pub fn assert_complete(&self) {
        for (name, body) in &*self.files {
            assert!(fs::read(self.path(name)).unwrap() == *body, "{name} differs");
            assert!(!self.path(&format!("{name}.part")).exists(), "{name}.part is left");
        }
    }
}

/// Reproducible noise (a linear congruential generator), other for each seed.
pub fn bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Runs to success and returns what was written to stderr.
#[track_caller]
pub fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {stderr}", output.status);
    stderr
}

/// Runs to a failure with one message, which is returned, as the last line.
#[track_caller]
pub fn fails(command: &mut Command) -> String {
    failure(&command.output().unwrap())
}

#[track_caller]
pub fn failure(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(output.stdout.is_empty());
    let errors = stderr.lines().filter(|line| line.starts_with("lily: ")).count();
    assert_eq!(errors, 1, "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert!(last.starts_with("lily: "), "{stderr}");
    last.to_owned()
}

#[track_caller]
pub fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[track_caller]
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < end, "waited 20 s until {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub fn len(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}
