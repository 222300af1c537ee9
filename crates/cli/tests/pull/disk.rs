//! Directories and disks that do not do.

use std::fs;
use std::process::{Child, Stdio};
#[cfg(target_os = "linux")]
use std::process::{Command, Output};
use std::time::Duration;

#[cfg(target_os = "linux")]
use super::fixture::failure;
use super::fixture::{Fixture, assert_says, fails, len, succeeds, wait_until};
use super::server::Reply;

#[test]
fn a_directory_serves_one_pull_at_a_time() {
    struct Killed(Child);
    impl Drop for Killed {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|request, earlier, body| {
        let silence = Duration::from_secs(60);
        (earlier == 0).then(|| Reply { silence, ..Reply::honest(request, body).cut_to(20_000) })
    });
    let first = Killed(fixture.pull(&server.endpoint).stderr(Stdio::null()).spawn().unwrap());
    wait_until("the first pull has begun", || len(&fixture.path("weights.part")) == 20_000);
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["another `lily pull` is at work in", "--dir"]);
    drop(first);
    // The lock went with its process.
    succeeds(&mut fixture.pull(&server.endpoint));
    fixture.assert_complete();
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_the_first_request() {
    let fixture = Fixture::weights(50_000);
    let huge = format!("weights\t{}\t{}\n", 1_u64 << 60, "0".repeat(64));
    fs::write(fixture.manifest(), huge).unwrap();
    let server = fixture.serve(|_, _, _| None);
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["are missing on the disk of", "the download needs 1.15 EB", "are free", "--dir"]);
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    for below in ["", "below"] {
        let mut fixture = Fixture::weights(50_000);
        let file = fixture.temp.path().join("file");
        fs::write(&file, "").unwrap();
        fixture.dir = file.join(below);
        let message = fails(&mut fixture.pull("http://hub.invalid"));
        assert_says(&message, &[file.to_str().unwrap(), "choose a directory with --dir that can be written to"]);
    }
}

/// Stands for a disk that fills up during the download: each write to `/dev/full` ends in ENOSPC.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_fills_up_is_named() {
    let fixture = Fixture::weights(50_000);
    fs::create_dir_all(&fixture.dir).unwrap();
    std::os::unix::fs::symlink("/dev/full", fixture.path("weights.part")).unwrap();
    let server = fixture.serve(|_, _, _| None);
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["weights.part: No space left on device", "make room", "resumes", "--dir"]);
}

/// Runs `pull` in a mount namespace of its own, with a tmpfs of these `options` on the directory.
#[cfg(target_os = "linux")]
fn pull_on_tmpfs(fixture: &Fixture, options: &str, meanwhile: &str, endpoint: &str) -> Output {
    fs::create_dir_all(&fixture.dir).unwrap();
    let pull = fixture.pull(endpoint);
    let script = r#"dir=$1 options=$2 meanwhile=$3; shift 3; mount -t tmpfs -o "$options" none "$dir" && { eval "$meanwhile"; exec "$@"; }"#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    command.arg(&fixture.dir).args([options, meanwhile]).arg(pull.get_program()).args(pull.get_args());
    for (name, value) in pull.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.output().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs `unshare` and unprivileged user namespaces"]
fn a_read_only_disk_is_named() {
    let fixture = Fixture::weights(50_000);
    let message = failure(&pull_on_tmpfs(&fixture, "ro", "", "http://hub.invalid"));
    assert_says(&message, &["Read-only file system", fixture.dir.to_str().unwrap(), "--dir that can be written to"]);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs `unshare` and unprivileged user namespaces"]
fn a_disk_that_another_program_fills_leaves_what_fitted() {
    let fixture = Fixture::weights(3_000_000);
    let server = fixture.serve(|request, _, body| {
        Some(Reply { pause_per_16_kib: Duration::from_millis(20), ..Reply::honest(request, body) })
    });
    // There is room for the file until two of the four megabytes are taken, a second into the download.
    let meanwhile = r#"(sleep 1; head -c 2000000 /dev/zero > "$dir/other") &"#;
    let message = failure(&pull_on_tmpfs(&fixture, "size=4m", meanwhile, &server.endpoint));
    assert_says(&message, &["weights.part: No space left on device", "make room", "resumes"]);
}
