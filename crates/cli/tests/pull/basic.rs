//! What a pull does and leaves alone.

use std::fs::{self, File};
use std::sync::Barrier;

use super::fixture::{Fixture, PREFIX, assert_says, bytes, fails, succeeds};

#[test]
fn a_pull_brings_every_file_of_the_pinned_revision_and_prints_the_directory() {
    let fixture =
        Fixture::new(&[("config.json", 700), ("empty", 0), ("model.safetensors", 3_000_000), ("tokenizer", 65_536)]);
    let server = fixture.serve(|_, _, _| None);
    let output = fixture.pull(&server.endpoint).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\n", fixture.dir.display()));
    fixture.assert_complete();
    // An empty file needs no request; each other one needs one.
    assert_eq!(server.requests().len(), 3);
    assert!(server.requests().iter().all(|request| request.target.starts_with(PREFIX)));
}

#[test]
fn four_files_are_downloaded_at_once() {
    let fixture = Fixture::new(&[("a", 10), ("bb", 20), ("ccc", 30), ("dddd", 40)]);
    let all_there = Barrier::new(4);
    let server = fixture.serve(move |_, _, _| {
        all_there.wait();
        None
    });
    succeeds(&mut fixture.pull(&server.endpoint));
    fixture.assert_complete();
}

#[test]
fn verified_files_are_neither_requested_nor_hashed_again() {
    let fixture = Fixture::new(&[("config.json", 700), ("weights", 100_000)]);
    let server = fixture.serve(|_, _, _| None);
    succeeds(&mut fixture.pull(&server.endpoint));
    // A change that only a hash can find: same length, same time.
    let modified = fs::metadata(fixture.path("weights")).unwrap().modified().unwrap();
    fixture.put("weights", &bytes(99, 100_000));
    File::options().write(true).open(fixture.path("weights")).unwrap().set_modified(modified).unwrap();

    succeeds(&mut fixture.pull(&server.endpoint));
    assert_eq!(server.requests().len(), 2);

    let stderr = succeeds(fixture.pull(&server.endpoint).arg("--verify"));
    assert_says(&stderr, &["config.json: verified", "weights: not the published file; downloading it again"]);
    assert_eq!(server.requests().len(), 3);
    fixture.assert_complete();
}

#[test]
fn a_file_changed_after_its_verification_is_noticed() {
    let fixture = Fixture::weights(100_000);
    let server = fixture.serve(|_, _, _| None);
    succeeds(&mut fixture.pull(&server.endpoint));
    fixture.put("weights", &bytes(99, 100_000));
    assert_says(&fails(&mut fixture.pull(&server.endpoint)), &["weights is not the published file"]);
}

#[test]
fn a_torn_record_costs_a_hash_and_no_download() {
    let fixture = Fixture::new(&[("config.json", 700), ("weights", 100_000)]);
    let server = fixture.serve(|_, _, _| None);
    succeeds(&mut fixture.pull(&server.endpoint));
    let record = fs::read(fixture.path(".lily-pull")).unwrap();
    fixture.put(".lily-pull", &record[..record.len() - 3]);
    let stderr = succeeds(&mut fixture.pull(&server.endpoint));
    assert_eq!(stderr.lines().filter(|line| line.ends_with(": verified")).count(), 1, "{stderr}");
    assert_eq!(succeeds(&mut fixture.pull(&server.endpoint)), "");
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn right_files_that_were_put_there_by_hand_are_kept() {
    let fixture = Fixture::new(&[("config.json", 700), ("weights", 100_000)]);
    fixture.put("weights", &fixture.files["weights"]);
    let server = fixture.serve(|_, _, _| None);
    succeeds(&mut fixture.pull(&server.endpoint));
    assert_eq!(server.requests_of("weights").len(), 0);
    fixture.assert_complete();
}

#[test]
fn a_file_that_pull_did_not_write_is_not_overwritten_unasked() {
    for own in [&b"my own settings"[..], &bytes(99, 700)] {
        let fixture = Fixture::new(&[("config.json", 700)]);
        fixture.put("config.json", own);
        let server = fixture.serve(|_, _, _| None);
        let message = fails(&mut fixture.pull(&server.endpoint));
        assert_says(&message, &["config.json is not the published file", "move it away", "--verify", "--dir"]);
        assert_eq!(fs::read(fixture.path("config.json")).unwrap(), own);
        succeeds(fixture.pull(&server.endpoint).arg("--verify"));
        fixture.assert_complete();
    }
}
