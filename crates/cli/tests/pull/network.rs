//! The way to the server: redirects, mirrors, proxies, wrong addresses.

use std::fs;
use std::net::TcpListener;
use std::process::Command;

use super::fixture::{Fixture, PREFIX, assert_says, fails, succeeds};
use super::server::Reply;

#[test]
fn redirects_keep_the_range_and_lose_the_token() {
    let fixture = Fixture::weights(50_000);
    fixture.put("weights.part", &fixture.files["weights"][..20_000]);
    let storage = fixture.serve(|_, _, _| None);
    let target = format!("{}/storage/weights", storage.endpoint);
    let hub = fixture.serve(move |_, _, _| Some(Reply::status("302 Found").with("Location", &*target)));
    succeeds(fixture.pull(&hub.endpoint).env("HF_TOKEN", "abc"));
    fixture.assert_complete();
    assert_eq!(hub.requests()[0].headers["authorization"], "Bearer abc");
    assert_eq!(storage.requests()[0].headers.get("authorization"), None);
    assert_eq!(storage.requests()[0].range_start(), Some(20_000));
}

#[test]
fn a_circle_of_redirects_is_an_error() {
    let fixture = Fixture::weights(50_000);
    let hub = fixture.serve(|request, _, _| Some(Reply::status("302 Found").with("Location", &*request.target)));
    assert_says(&fails(&mut fixture.pull(&hub.endpoint)), &["weights: no answer from", "redirect"]);
}

#[test]
fn the_mirror_of_the_environment_is_used() {
    let fixture = Fixture::weights(50_000);
    let server = fixture.serve(|_, _, _| None);
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.args(["pull", "--manifest"]).arg(fixture.manifest()).arg("--dir").arg(&fixture.dir);
    command.env("HF_ENDPOINT", format!("{}/", server.endpoint)).env("NO_PROXY", "127.0.0.1");
    succeeds(&mut command);
    fixture.assert_complete();
}

#[test]
fn the_proxy_of_the_environment_is_used() {
    let fixture = Fixture::weights(50_000);
    let proxy = fixture.serve(|_, _, _| None);
    succeeds(fixture.pull("http://hub.invalid").env("HTTP_PROXY", &proxy.endpoint));
    fixture.assert_complete();
    assert_eq!(proxy.requests()[0].target, format!("http://hub.invalid{PREFIX}weights"));
}

#[test]
fn an_unreachable_server_is_named() {
    let fixture = Fixture::weights(50_000);
    let free_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{free_port}");
    let message = fails(&mut fixture.pull(&endpoint));
    assert_says(&message, &["gave up after 2 retries", &endpoint, "is the network up?", "refused"]);
}

#[test]
fn wrong_arguments_are_refused_with_what_was_found() {
    let fixture = Fixture::weights(50_000);
    for endpoint in ["hub.invalid", "ftp://hub.invalid", "http://"] {
        assert_says(
            &fails(&mut fixture.pull(endpoint)),
            &["--endpoint", &format!("found `{}`", endpoint.trim_end_matches('/'))],
        );
    }
    let message = fails(fixture.pull("http://hub.invalid").args(["--token", "two words"]));
    assert_says(&message, &["--token or HF_TOKEN", "expected one word"]);
    fs::write(fixture.manifest(), "weights 1 2\n").unwrap();
    assert_says(
        &fails(&mut fixture.pull("http://hub.invalid")),
        &["manifest.tsv: line 1: expected name, bytes and sha256"],
    );
}
