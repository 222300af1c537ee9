//! What was downloaded once is not downloaded again.

use std::process::Stdio;
use std::time::Duration;

use super::fixture::{Fixture, assert_says, bytes, len, succeeds, wait_until};
use super::server::Reply;

/// No handler is involved: what a kill leaves is what Ctrl-C leaves, also where the test runs with SIGINT ignored.
#[test]
fn after_an_interruption_only_the_missing_bytes_are_transferred() {
    const LEN: usize = 2_000_000;
    let fixture = Fixture::weights(LEN);
    let slow = fixture.serve(|request, _, body| {
        Some(Reply { pause_per_16_kib: Duration::from_millis(20), ..Reply::honest(request, body) })
    });
    let mut child = fixture.pull(&slow.endpoint).stderr(Stdio::null()).spawn().unwrap();
    wait_until("some bytes are there", || len(&fixture.path("weights.part")) > 100_000);
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = len(&fixture.path("weights.part")) as usize;
    assert!((100_001..LEN).contains(&kept));

    let server = fixture.serve(|_, _, _| None);
    succeeds(&mut fixture.pull(&server.endpoint));
    fixture.assert_complete();
    assert_eq!(server.requests()[0].range_start(), Some(kept));
    assert_eq!(server.sent_bytes(), LEN - kept);
}

#[test]
fn a_complete_part_is_verified_without_a_request() {
    let fixture = Fixture::weights(50_000);
    fixture.put("weights.part", &fixture.files["weights"]);
    let server = fixture.serve(|_, _, _| None);
    succeeds(&mut fixture.pull(&server.endpoint));
    assert_eq!(server.requests().len(), 0);
    fixture.assert_complete();
}

#[test]
fn a_part_with_wrong_or_too_many_bytes_is_replaced() {
    for part in [bytes(99, 20_000), bytes(99, 50_000), bytes(99, 50_001)] {
        let fixture = Fixture::weights(50_000);
        fixture.put("weights.part", &part);
        let server = fixture.serve(|_, _, _| None);
        succeeds(&mut fixture.pull(&server.endpoint));
        fixture.assert_complete();
        assert_eq!(server.requests().last().unwrap().range_start(), None);
    }
}

#[test]
fn a_cut_connection_is_continued_where_it_broke() {
    // The first cut leaves less than counts as progress, the others more: four cuts within two retries.
    const CUTS: [usize; 4] = [1_000, 1_500_000, 1_200_000, 1_100_000];
    let fixture = Fixture::weights(4_000_000);
    let server =
        fixture.serve(|request, earlier, body| CUTS.get(earlier).map(|cut| Reply::honest(request, body).cut_to(*cut)));
    let stderr = succeeds(&mut fixture.pull(&server.endpoint));
    assert_says(&stderr, &["weights: the connection ended at 1.00 kB of 4.00 MB", "retry 1 of 2 in 1 s"]);
    fixture.assert_complete();
    assert_eq!(server.requests().len(), CUTS.len() + 1);
    assert_eq!(server.sent_bytes(), 4_000_000);
}

#[test]
fn a_cut_of_a_body_without_length_is_noticed() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|request, earlier, body| {
        (earlier == 0).then(|| Reply::honest(request, body).without_length().cut_to(20_000))
    });
    succeeds(&mut fixture.pull(&server.endpoint));
    fixture.assert_complete();
    assert_eq!(server.sent_bytes(), 50_000);
}

#[test]
fn a_silent_connection_is_given_up_and_continued() {
    let fixture = Fixture { timeout: "1", ..Fixture::weights(50_000) };
    let server = fixture.serve(|request, earlier, body| {
        let silence = Duration::from_secs(60);
        (earlier == 0).then(|| Reply { silence, ..Reply::honest(request, body).cut_to(20_000) })
    });
    succeeds(&mut fixture.pull(&server.endpoint));
    fixture.assert_complete();
    assert_eq!(server.requests()[1].range_start(), Some(20_000));
}

#[test]
fn a_server_without_ranges_still_completes_a_part() {
    let fixture = Fixture::weights(50_000);
    fixture.put("weights.part", &fixture.files["weights"][..20_000]);
    let server = fixture.serve(|_, _, body| Some(Reply::whole(body)));
    succeeds(&mut fixture.pull(&server.endpoint));
    assert_eq!(server.requests().len(), 1);
    assert_eq!(server.requests()[0].range_start(), Some(20_000));
    fixture.assert_complete();
}
