//! Servers that refuse, break off or lie.

use std::time::{Duration, Instant};

use super::fixture::{Fixture, assert_says, bytes, fails, len, succeeds};
use super::server::{Reply, Request};

#[test]
fn a_server_that_stops_half_way_for_good_leaves_a_part_to_resume() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|request, _, body| {
        let first = request.range_start().unwrap_or(0);
        Some(Reply::honest(request, body).cut_to(25_000_usize.saturating_sub(first)))
    });
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["weights: gave up after 2 retries", "`lily pull` again resumes", "25.00 kB of 50.00 kB"]);
    assert_eq!(server.requests().len(), 3);
    assert_eq!(len(&fixture.path("weights.part")), 25_000);
    assert!(!fixture.path("weights").exists());
}

#[test]
fn wrong_bytes_are_downloaded_once_more_and_then_refused() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|_, _, body| Some(Reply::whole(&bytes(99, body.len()))));
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["weights: wrong bytes twice", "SHA-256", &server.endpoint, "--endpoint"]);
    assert_eq!(server.requests().len(), 2);
    assert!(!fixture.path("weights").exists() && !fixture.path("weights.part").exists());

    let mended = fixture.serve(|_, earlier, body| (earlier == 0).then(|| Reply::whole(&bytes(99, body.len()))));
    let stderr = succeeds(&mut fixture.pull(&mended.endpoint));
    assert_says(&stderr, &["weights: wrong bytes (SHA-256", "downloading it once more"]);
    fixture.assert_complete();
}

#[test]
fn a_refusal_is_final_and_says_what_to_do() {
    for (status, advice) in [
        ("401 Unauthorized", "--token or HF_TOKEN"),
        ("403 Forbidden", "--token or HF_TOKEN"),
        ("404 Not Found", "does not serve the pinned revision"),
        ("416 Range Not Satisfiable", "shorter than the published one"),
        ("418 I'm a teapot", "check --endpoint"),
    ] {
        let fixture = Fixture::weights(50_000);
        let server = fixture.serve(move |_, _, _| Some(Reply::status(status)));
        let message = fails(&mut fixture.pull(&server.endpoint));
        assert_says(&message, &["weights: ", &server.endpoint, status, advice]);
        assert_eq!(server.requests().len(), 1, "{status}");
    }
}

#[test]
fn a_wrong_token_is_named_as_the_reason_of_a_refusal() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|_, _, _| Some(Reply::status("401 Unauthorized")));
    let message = fails(fixture.pull(&server.endpoint).args(["--token", "abc"]));
    assert_says(&message, &["the token of --token or HF_TOKEN is wrong"]);
    assert!(!message.contains("abc"));
}

#[test]
fn an_overloaded_server_is_asked_again() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|_, earlier, _| match earlier {
        0 => Some(Reply::status("500 Internal Server Error")),
        1 => Some(Reply::status("429 Too Many Requests").with("Retry-After", "3")),
        _ => None,
    });
    let start = Instant::now();
    succeeds(&mut fixture.pull(&server.endpoint));
    // One second after the first answer, as nothing else was said, and three after the second.
    assert!(start.elapsed() >= Duration::from_secs(4));
    fixture.assert_complete();
}

#[test]
fn an_overloaded_server_is_not_asked_for_ever() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|_, _, _| Some(Reply::status("503 Service Unavailable")));
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["gave up after 2 retries", "503 Service Unavailable"]);
    assert_eq!(server.requests().len(), 3);

    let server = fixture.serve(|_, _, _| Some(Reply::status("429 Too Many Requests").with("Retry-After", "7200")));
    let message = fails(&mut fixture.pull(&server.endpoint));
    assert_says(&message, &["429 Too Many Requests", "`lily pull` again in 7200 s resumes"]);
}

#[test]
fn the_first_error_ends_the_work_on_the_other_files() {
    let fixture = Fixture::new(&[("a", 1_000), ("weights", 5_000_000)]);
    let server = fixture.serve(|request, _, body| match request.file() {
        "a" => Some(Reply::status("404 Not Found")),
        // This one alone would take 15 s.
        _ => Some(Reply { pause_per_16_kib: Duration::from_millis(50), ..Reply::honest(request, body) }),
    });
    let start = Instant::now();
    assert_says(&fails(&mut fixture.pull(&server.endpoint)), &["a: ", "404"]);
    assert!(start.elapsed() < Duration::from_secs(8));
}

#[test]
fn an_answer_that_cannot_be_the_file_is_refused() {
    type Spoil = fn(&Request, &[u8]) -> Reply;
    let cases: [(Spoil, &str); 6] = [
        (
            |_, _| Reply::whole(b"<html>Log in</html>").with("Content-Type", "text/html; charset=utf-8"),
            "web page, not the file",
        ),
        (|_, _| Reply::whole(b"<html>Log in</html>"), "has 19 bytes, the published one 50000"),
        (|_, body| Reply::whole(&[body, b"!"].concat()).without_length(), "sends more than the 50000 bytes"),
        (|request, body| Reply::honest(request, &[body, b"!"].concat()), "has 50001 bytes, the published one 50000"),
        (
            |_, body| {
                Reply { status: "206 Partial Content", ..Reply::whole(body) }.with("Content-Range", "bytes */50000")
            },
            "Content-Range: found `bytes */50000`",
        ),
        (
            |_, body| {
                Reply { status: "206 Partial Content", ..Reply::whole(&body[30_000..]) }
                    .with("Content-Range", "bytes 30000-49999/50000")
            },
            "asked for the bytes from 20000, the server sent those from 30000",
        ),
    ];
    for (spoil, expected) in cases {
        let fixture = Fixture::weights(50_000);
        fixture.put("weights.part", &fixture.files["weights"][..20_000]);
        let server = fixture.serve(move |request, _, body| Some(spoil(request, body)));
        let message = fails(&mut fixture.pull(&server.endpoint));
        assert_says(&message, &["weights: ", expected]);
        assert_eq!(server.requests().len(), 1, "{message}");
        assert!(!fixture.path("weights").exists());
    }
}
