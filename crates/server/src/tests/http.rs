//! What all paths have in common: errors, keys, limits, origins, streams that break off.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::json;

use crate::testing::{Played, events, finished, hello, play, post, read, server, server_with, started};
use crate::turn::{TurnError, TurnEvent, TurnReason};
use crate::turns::Readiness;
use crate::{Hosts, Origins, Settings};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

fn ask() -> serde_json::Value {
    json!({"messages": [{"role": "user", "content": "Hi"}]})
}

#[tokio::test]
async fn errors_have_the_shape_of_the_api_that_was_asked() {
    let server = server(hello());
    let message = "messages[0].role: found \"banana\", expected ";
    let (status, body) = server.json(CHAT, json!({"messages": [{"role": "banana", "content": "x"}]})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(body["error"]["type"], "invalid_request_error");
    assert_eq!(body["error"]["param"], "messages[0].role");
    assert!(body["error"]["message"].as_str().unwrap().starts_with(message));
    let (status, body) = server.json(MESSAGES, json!({"messages": [{"role": "banana", "content": "x"}]})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
    assert!(body["error"]["message"].as_str().unwrap().starts_with(message));
}

#[tokio::test]
async fn a_body_that_is_no_json_is_refused_with_the_place() {
    let server = server(hello());
    for (body, words) in [
        ("{\"messages\": [}", "line 1 column 15"),
        ("", "the body is empty"),
        ("[1]", "body: found an array, expected a JSON object"),
        ("{\"a\": \"\\ud800\"}", "line 1"),
    ] {
        let (status, body) = read(server.send(post(CHAT, body)).await).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(body["error"]["message"].as_str().unwrap().contains(words), "{body}");
    }
    let deep = format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let (status, body) = read(server.send(post(CHAT, format!("{{\"messages\": {deep}}}"))).await).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body["error"]["message"].as_str().unwrap().contains("recursion limit"), "{body}");
    let form =
        Request::post(CHAT).header("content-type", "application/x-www-form-urlencoded").body("{}".into()).unwrap();
    let (status, body) = read(server.send(form).await).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(body["error"]["message"].as_str().unwrap().contains("Content-Type: application/json"));
    let packed = Request::post(CHAT).header("content-encoding", "zstd").body("{}".into()).unwrap();
    let (status, body) = read(server.send(packed).await).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(body["error"]["message"].as_str().unwrap().contains("compressed"));
    let bare = Request::post(CHAT).body(ask().to_string().into()).unwrap();
    assert_eq!(server.send(bare).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_whether_it_says_its_length_or_not() {
    let settings = Settings { body_limit_bytes: 100, ..Settings::default() };
    let server = server_with(Played::new(hello()), settings);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(100)}]}).to_string();
    let says = Request::post(MESSAGES).header("content-length", long.len()).body(Body::from(long.clone())).unwrap();
    let chunks = futures_of(&long);
    for request in [says, post(MESSAGES, chunks)] {
        let (status, body) = read(server.send(request).await).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(body["error"]["type"], "request_too_large");
        assert!(body["error"]["message"].as_str().unwrap().contains("100 bytes"));
    }
}

/// A body without a length.
fn futures_of(text: &str) -> Body {
    struct Once(Option<bytes::Bytes>);
    impl http_body::Body for Once {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, std::convert::Infallible>>> {
            std::task::Poll::Ready(self.0.take().map(|bytes| Ok(http_body::Frame::data(bytes))))
        }
    }
    Body::new(Once(Some(text.to_owned().into())))
}

#[tokio::test]
async fn unknown_paths_and_wrong_methods_say_what_there_is() {
    let server = server(hello());
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let (status, body) = read(server.send(get("/v2/chat/completions")).await).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(body["error"]["code"], "unknown_url");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("nothing at /v2/chat/completions") && message.contains("base URL"), "{message}");
    let (status, body) = read(server.send(get("/v1/messages/batches")).await).await;
    assert_eq!((status, &body["error"]["type"]), (StatusCode::NOT_FOUND, &json!("not_found_error")));
    for path in [CHAT, MESSAGES, "/tokenize"] {
        let response = server.send(get(path)).await;
        assert_eq!(response.headers()["allow"], "POST");
        let (status, body) = read(response).await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
        assert!(body["error"]["message"].as_str().unwrap().contains("does not take GET"), "{body}");
    }
    assert_eq!(server.send(post("/v1/models", "{}")).await.status(), StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn a_key_is_asked_for_everywhere_but_where_load_balancers_look() {
    let settings = Settings { api_key: Some("secret".into()), ..Settings::default() };
    let server = server_with(Played::new(hello()), settings);
    let with =
        |name: &str, value: &str| Request::post(CHAT).header(name, value).body(Body::from(ask().to_string())).unwrap();
    for (name, value) in
        [("authorization", "Bearer secret"), ("authorization", "bearer  secret"), ("x-api-key", "secret")]
    {
        assert_eq!(server.send(with(name, value)).await.status(), StatusCode::OK, "{name}: {value}");
    }
    for (name, value) in [("authorization", "Bearer secre"), ("authorization", "secret"), ("x-api-key", ""), ("x", "y")]
    {
        let response = server.send(with(name, value)).await;
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let (status, body) = read(response).await;
        assert_eq!((status, &body["error"]["code"]), (StatusCode::UNAUTHORIZED, &json!("invalid_api_key")));
    }
    let (_, body) = server.json(MESSAGES, ask()).await;
    assert_eq!(body["error"]["type"], "authentication_error");
    for (path, status) in [("/health", 200), ("/ready", 200), ("/metrics", 401), ("/v1/models", 401)] {
        let request = Request::get(path).body(Body::empty()).unwrap();
        assert_eq!(server.send(request).await.status().as_u16(), status, "{path}");
    }
}

#[tokio::test]
async fn pages_of_this_machine_may_ask_and_others_may_not() {
    let preflight = |origin: &str| {
        Request::builder()
            .method(Method::OPTIONS)
            .uri(CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "content-type,authorization")
            .body(Body::empty())
            .unwrap()
    };
    let listed = Origins::Listed(vec!["https://chat.example.org/".into()]);
    for (origins, origin, allowed) in [
        (Origins::Local, "http://localhost:3000", true),
        (Origins::Local, "http://127.0.0.1:8080", true),
        (Origins::Local, "http://[::1]:8080", true),
        (Origins::Local, "https://evil.example", false),
        (Origins::Local, "http://localhost.evil.example", false),
        (Origins::Local, "null", false),
        (Origins::Local, "vscode-webview://abc", true),
        (Origins::Local, "http://tauri.localhost", true),
        (listed.clone(), "https://chat.example.org", true),
        (listed, "http://localhost:3000", false),
        (Origins::Any, "https://evil.example", true),
    ] {
        let key = Some("secret".into());
        let server = server_with(Played::new(hello()), Settings { origins, api_key: key, ..Settings::default() });
        let response = server.send(preflight(origin)).await;
        assert!(response.status().is_success());
        assert_eq!(response.headers().contains_key("access-control-allow-origin"), allowed, "{origin}");
    }
}

#[tokio::test]
async fn what_a_foreign_page_asks_is_not_done() {
    let server = server(hello());
    let ask = |origin: &str, host: &str| {
        Request::post(MESSAGES)
            .header("origin", origin)
            .header("host", host)
            .body(Body::from(ask().to_string()))
            .unwrap()
    };
    let (status, body) = read(server.send(ask("https://evil.example", "localhost:8080")).await).await;
    assert_eq!((status, &body["error"]["type"]), (StatusCode::FORBIDDEN, &json!("permission_error")));
    assert!(body["error"]["message"].as_str().unwrap().contains("--cors ORIGIN"));
    assert!(server.turns.requests.lock().unwrap().is_empty());
    for origin in ["http://192.168.1.5:8080", "http://localhost:3000"] {
        assert_eq!(server.send(ask(origin, "192.168.1.5:8080")).await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_server_of_this_machine_is_called_by_its_own_names() {
    let asked = |name: &str| Request::post(CHAT).header("host", name).body(Body::from(ask().to_string())).unwrap();
    let local = server(hello());
    for name in ["localhost", "LocalHost:8080", "lily.localhost.", "127.0.0.1:8080", "[::1]:8080", "192.168.1.5:80"] {
        assert_eq!(local.send(asked(name)).await.status(), StatusCode::OK, "{name}");
    }
    // As a page does whose name was pointed here: of one origin with the server, or without a word about it.
    for name in ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", ":8080", ""] {
        let mut request = asked(name);
        request.headers_mut().insert("origin", format!("http://{name}").parse().unwrap());
        for request in [request, asked(name)] {
            let (status, body) = read(local.send(request).await).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{name}");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.contains(&format!("asked as {name:?}")) && message.contains("--allow-host"), "{message}");
        }
    }
    let page = Request::get("/v1/models").header("host", "evil.example").body(Body::empty()).unwrap();
    assert_eq!(local.send(page).await.status(), StatusCode::FORBIDDEN);
    assert!(local.turns.requests.lock().unwrap().len() < 7, "what is refused is not done");
    for (hosts, name) in [(Hosts::Local(vec!["Lily.example".into()]), "lily.example:443"), (Hosts::Any, "evil.example")]
    {
        let settings = Settings { hosts, ..Settings::default() };
        assert_eq!(server_with(Played::new(hello()), settings).send(asked(name)).await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_header_names_the_session_unless_the_body_does() {
    let server = server(hello());
    for (body, session) in [(json!({}), "header"), (json!({"prompt_cache_key": "body"}), "body")] {
        let mut body = body;
        body["messages"] = ask()["messages"].clone();
        let request =
            Request::post(CHAT).header("x-session-affinity", "header").body(Body::from(body.to_string())).unwrap();
        assert_eq!(server.send(request).await.status(), StatusCode::OK);
        assert_eq!(server.turns.last().affinity.as_deref(), Some(session));
    }
}

#[tokio::test]
async fn refusals_of_the_engine_have_their_status_and_say_when_to_come_back() {
    let busy = TurnError::Busy { retry_after: Duration::from_millis(2500) };
    let long = TurnError::PromptTooLong { prompt_tokens: 5000, context_tokens: 4096 };
    for (error, status, openai, anthropic) in [
        (busy, 429, "rate_limit_error", "rate_limit_error"),
        (long, 400, "invalid_request_error", "invalid_request_error"),
        (TurnError::ShuttingDown, 503, "server_error", "overloaded_error"),
        (TurnError::TimedOut("too slow".into()), 504, "server_error", "timeout_error"),
        (TurnError::Failed("broken".into()), 500, "server_error", "api_error"),
        (TurnError::invalid("stop", "x", "y"), 400, "invalid_request_error", "invalid_request_error"),
    ] {
        let server = server(vec![Err(error.clone())]);
        for body in [ask(), json!({"messages": ask()["messages"], "stream": true})] {
            for (path, kind) in [(CHAT, openai), (MESSAGES, anthropic)] {
                let response = server.send(post(path, body.to_string())).await;
                let retry = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
                assert_eq!(
                    retry.as_deref(),
                    match status {
                        429 => Some("3"),
                        503 => Some("5"),
                        _ => None,
                    }
                );
                let (found, body) = read(response).await;
                assert_eq!((found.as_u16(), &body["error"]["type"]), (status, &json!(kind)));
                assert_eq!(body["error"]["message"], error.to_string());
            }
        }
    }
    let (_, body) =
        server(vec![Err(TurnError::PromptTooLong { prompt_tokens: 5, context_tokens: 4 })]).json(CHAT, ask()).await;
    assert_eq!(body["error"]["code"], "context_length_exceeded");
    assert!(body["error"]["message"].as_str().unwrap().starts_with("prompt is too long: 5 tokens > 4 maximum"));
}

#[tokio::test]
async fn an_error_within_a_stream_ends_it_in_the_shape_of_the_api() {
    let broken =
        || vec![Ok(started()), Ok(TurnEvent::Content("So far".into())), Err(TurnError::Failed("unplugged".into()))];
    let body = json!({"messages": ask()["messages"], "stream": true});
    let found = events(&server(broken()).stream(CHAT, body.clone()).await);
    assert_eq!(found.last().unwrap()["error"]["message"], "unplugged");
    assert!(found.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    let found = events(&server(broken()).stream(MESSAGES, body.clone()).await);
    assert_eq!(found.last().unwrap()["error"], json!({"type": "api_error", "message": "unplugged"}));
    let input = json!({"input": "Hi", "stream": true});
    let found = events(&server(broken()).stream("/v1/responses", input).await);
    let last = found.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"], json!({"code": "server_error", "message": "unplugged"}));
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "So far");
    let (status, body) = server(broken()).json(CHAT, ask()).await;
    assert_eq!((status, &body["error"]["message"]), (StatusCode::INTERNAL_SERVER_ERROR, &json!("unplugged")));
}

#[tokio::test]
async fn who_leaves_cancels_the_turn() {
    for stream in [true, false] {
        let server = server(play(vec![started(), TurnEvent::Content("x".into())]));
        let body = json!({"messages": ask()["messages"], "stream": stream});
        if stream {
            let mut response = server.send(post(CHAT, body.to_string())).await.into_body();
            response.frame().await.unwrap().unwrap();
            assert!(!server.turns.are_cancelled());
            drop(response);
        } else {
            let request = server.send(post(CHAT, body.to_string()));
            tokio::time::timeout(Duration::from_millis(50), request).await.expect_err("it waits for the end");
        }
        assert!(server.turns.are_cancelled());
    }
}

#[tokio::test]
async fn heartbeats_come_while_the_prompt_is_read_and_not_without_progress() {
    let mut slow: Vec<TurnEvent> = (1..=8).map(|done| TurnEvent::Progress { done, total: 8 }).collect();
    slow.insert(0, started());
    slow.extend([TurnEvent::Content("x".into()), finished(TurnReason::Stop)]);
    let settings = Settings { heartbeat: Duration::ZERO, ..Settings::default() };
    for (path, body, beat) in [
        (CHAT, ask(), ": keep-alive\n\n"),
        ("/v1/completions", json!({"prompt": "Hi"}), ": keep-alive\n\n"),
        (MESSAGES, ask(), "event: ping\n"),
        ("/v1/responses", json!({"input": "Hi"}), "event: response.in_progress\n"),
    ] {
        let mut body = body;
        body["stream"] = true.into();
        let turns = Played::with_pause(play(slow.clone()), Duration::from_millis(1));
        let text = server_with(turns, settings.clone()).stream(path, body.clone()).await;
        let beats = text.matches(beat).count();
        // One more where the event is part of every stream.
        let always = usize::from(path == "/v1/responses");
        assert_eq!(beats - always, 8, "{text}");
        // Often enough without them: none.
        let turns = Played::with_pause(play(slow.clone()), Duration::from_millis(1));
        let text = server_with(turns, Settings::default()).stream(path, body).await;
        assert_eq!(text.matches(beat).count(), always, "{text}");
    }
}

#[tokio::test]
async fn health_readiness_and_metrics_say_how_the_server_is() {
    let server = server(hello());
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    for (readiness, health, ready) in [
        (Readiness::Ready, 200, 200),
        (Readiness::Draining, 200, 503),
        (Readiness::Failed("the GPU is gone".into()), 503, 503),
    ] {
        *server.turns.readiness.lock().unwrap() = readiness;
        assert_eq!(server.send(get("/health")).await.status().as_u16(), health);
        assert_eq!(server.send(get("/ready")).await.status().as_u16(), ready);
    }
    let (_, body) = read(server.send(get("/health")).await).await;
    assert_eq!(body["reason"], "the GPU is gone");
    let metrics = server.send(get("/metrics")).await;
    assert_eq!(metrics.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let body = metrics.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "lily_requests_total 0\n");
}

#[tokio::test]
async fn models_are_listed_for_every_client() {
    let server = server(hello());
    for path in ["/v1/models", "/models", "/v1/models?client_version=0.1"] {
        let (status, body) = read(server.send(Request::get(path).body(Body::empty()).unwrap()).await).await;
        assert_eq!((status, &body["object"], &body["models"]), (StatusCode::OK, &json!("list"), &json!([])));
        let model = &body["data"][0];
        assert_eq!((&model["id"], &model["object"]), (&json!("lily-demo"), &json!("model")));
        assert_eq!((&model["max_model_len"], &model["context_length"]), (&json!(4096), &json!(4096)));
        assert_eq!((&model["type"], &model["created_at"]), (&json!("model"), &json!("2027-01-15T08:00:00Z")));
    }
    let (_, body) = read(server.send(Request::get("/v1/models/org/any").body(Body::empty()).unwrap()).await).await;
    assert_eq!(body["id"], "org/any");
}

#[tokio::test]
async fn texts_become_tokens_and_tokens_texts() {
    let server = server(hello());
    let plain = server.ok("/tokenize", json!({"content": "A fox <|im_end|>"})).await;
    let ids = plain["tokens"].as_array().unwrap();
    assert_eq!(plain["count"], ids.len());
    assert_eq!(plain["max_model_len"], 4096);
    assert_eq!(server.ok("/detokenize", json!({"tokens": ids})).await["content"], "A fox <|im_end|>");
    let data = server.ok("/tokenize", json!({"prompt": "A fox <|im_end|>", "parse_special": false})).await;
    assert!(data["tokens"].as_array().unwrap().len() > ids.len());
    let pieces = server.ok("/tokenize", json!({"text": "A 🦊", "with_pieces": true})).await;
    let text: Vec<u8> = pieces["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|token| match &token["piece"] {
            serde_json::Value::String(text) => text.as_bytes().to_vec(),
            bytes => bytes.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect(),
        })
        .collect();
    assert_eq!(text, "A 🦊".as_bytes());
    let chat = server.ok("/tokenize", ask()).await;
    let text = server.ok("/detokenize", json!({"tokens": chat["tokens"]})).await;
    assert!(text["content"].as_str().unwrap().starts_with("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"));
    for (path, body, field) in [
        ("/tokenize", json!({}), "content: found nothing"),
        ("/tokenize", json!({"content": 5}), "content: found 5"),
        ("/tokenize", json!({"messages": []}), "messages: found none"),
        ("/detokenize", json!({"tokens": [1, -1]}), "tokens[1]: found -1"),
        ("/detokenize", json!({"tokens": [4_000_000_000u32]}), "tokens[0]: found 4000000000"),
    ] {
        let message = server.refusal(path, body).await;
        assert!(message.starts_with(field), "{message}");
    }
}

#[tokio::test]
async fn every_response_has_an_id() {
    let server = server(hello());
    for path in [CHAT, "/nowhere"] {
        let response = server.send(post(path, ask().to_string())).await;
        assert!(response.headers()["x-request-id"].to_str().unwrap().starts_with("req_"));
    }
}
