//! The whole server but for the forward pass: APIs, engine, cache, constraints and parser over a script.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use http_body_util::BodyExt;
use lily_engine::{Engine, EngineOptions, SessionOptions};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::script::{Script, ScriptBackend};
use crate::service::{Service, ServiceSettings};
use crate::testing::{events, post, read, text_model};
use crate::turns::Turns;
use crate::{Settings, router};

pub(super) const CHAT: &str = "/v1/chat/completions";

pub(super) struct Whole {
    service: Arc<Service>,
    router: Router,
}

/// A server that says the lines of a script.
pub(super) fn whole(lines: &[Value]) -> Whole {
    whole_with(lines, Settings::default())
}

pub(super) fn whole_with(lines: &[Value], settings: Settings) -> Whole {
    let script: Vec<String> = lines.iter().map(Value::to_string).collect();
    let text = text_model();
    let script = Script::parse(&script.join("\n")).unwrap();
    let backend = ScriptBackend::new(script, text.clone(), ScriptBackend::caps(&text)).unwrap();
    let sessions = SessionOptions { most: 16, memory: None, room: Some(512), store: None };
    let options = EngineOptions { running: 4, waiting: 64, sessions, ..EngineOptions::single() };
    let engine = Engine::with_options(Box::new(backend), text, options).unwrap();
    let service = Arc::new(Service::start(engine, ServiceSettings::default()).unwrap());
    Whole { router: router(service.clone(), settings, Router::new()), service }
}

pub(super) fn says(output: &str) -> Whole {
    whole(&[json!({"output": output})])
}

impl Whole {
    pub(super) async fn json(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        read(self.router.clone().oneshot(post(path, body.to_string())).await.unwrap()).await
    }

    pub(super) async fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, body) = self.json(path, body).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        body
    }

    pub(super) async fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.router.clone().oneshot(post(path, body.to_string())).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        events(std::str::from_utf8(&response.into_body().collect().await.unwrap().to_bytes()).unwrap())
    }

    /// Reasoning, content, calls (name and arguments) and the reason, which a stream has to give like a whole answer.
    pub(super) async fn chat(&self, body: Value) -> Said {
        let choice = self.ok(CHAT, &body).await["choices"][0].clone();
        let message = &choice["message"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let call = |call: &Value| (text(&call["function"]["name"]), text(&call["function"]["arguments"]));
        let said = Said {
            reasoning: text(&message["reasoning_content"]),
            content: text(&message["content"]),
            calls: message["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
            reason: text(&choice["finish_reason"]),
        };
        assert_eq!(self.streamed(body).await, said);
        said
    }

    async fn streamed(&self, body: Value) -> Said {
        let mut said = Said::default();
        for choice in self.events(CHAT, &body).await.iter().map(|event| &event["choices"][0]) {
            let delta = &choice["delta"];
            said.reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
            said.content.push_str(delta["content"].as_str().unwrap_or_default());
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let arguments = call["function"]["arguments"].as_str().unwrap();
                match call["function"]["name"].as_str() {
                    Some(name) => said.calls.push((name.to_owned(), arguments.to_owned())),
                    None => said.calls[call["index"].as_u64().unwrap() as usize].1.push_str(arguments),
                }
            }
            said.reason.push_str(choice["finish_reason"].as_str().unwrap_or_default());
        }
        said
    }
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Said {
    pub(super) reasoning: String,
    pub(super) content: String,
    pub(super) calls: Vec<(String, String)>,
    pub(super) reason: String,
}

pub(super) fn ask(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

pub(super) fn tools() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}});
    let function =
        json!({"name": "weather", "parameters": {"type": "object", "properties": properties, "required": ["city"]}});
    json!([{"type": "function", "function": function}, {"type": "function", "function": {"name": "now"}}])
}

pub(super) const CALL: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
                    </function>\n</tool_call>";
pub(super) const ARGUMENTS: &str = "{\"city\":\"Rome\",\"days\":3}";

/// Arguments without white space, in their order.
pub(super) fn compact(json: &str) -> String {
    serde_json::from_str::<Value>(json).unwrap().to_string()
}

#[tokio::test]
async fn thinking_and_content_are_told_apart_in_every_spelling() {
    let server = says("<think>\nHm, a <b>.\n</think>\n\nHello 🌷!");
    let on =
        Said { reasoning: "Hm, a <b>.".into(), content: "Hello 🌷!".into(), reason: "stop".into(), calls: vec![] };
    assert_eq!(server.chat(ask(json!({}))).await, on);
    let off = Said { content: "Hello 🌷!".into(), reason: "stop".into(), ..Said::default() };
    for spelling in [json!({"enable_thinking": false}), json!({"reasoning_effort": "none"}), json!({"think": false})] {
        assert_eq!(server.chat(ask(spelling)).await, off);
    }
    let message =
        server.ok("/v1/messages", &ask(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}))).await;
    assert_eq!(message["content"][0]["thinking"], "Hm, a <b>.");
    assert_eq!(message["content"][1], json!({"type": "text", "text": "Hello 🌷!"}));
    let response = server.ok("/v1/responses", &json!({"input": "Hi"})).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "Hm, a <b>.");
    assert_eq!(response["output"][1]["content"][0]["text"], "Hello 🌷!");
}

#[tokio::test]
async fn a_call_in_an_unclosed_think_block_is_a_call() {
    let server = says(&format!("<think>\nI need it.\n{CALL}"));
    let said = server.chat(ask(json!({"tools": tools()}))).await;
    assert_eq!(
        (said.reasoning.as_str(), said.content.as_str(), said.reason.as_str()),
        ("I need it.", "", "tool_calls")
    );
    assert_eq!(compact(&said.calls[0].1), ARGUMENTS);
}

#[tokio::test]
async fn calls_stream_with_their_types_and_nothing_of_their_form() {
    let server = says(&format!("Looking.\n\n{CALL}\n<tool_call>\n<function=now>\n</function>\n</tool_call>"));
    let said = server.chat(ask(json!({"tools": tools()}))).await;
    assert_eq!((said.content.as_str(), said.reason.as_str()), ("Looking.", "tool_calls"));
    let calls: Vec<(String, String)> = said.calls.iter().map(|(name, json)| (name.clone(), compact(json))).collect();
    assert_eq!(calls, [("weather".into(), ARGUMENTS.into()), ("now".into(), "{}".into())]);
    let one = server.chat(ask(json!({"tools": tools(), "parallel_tool_calls": false}))).await;
    assert_eq!((one.calls.len(), one.reason.as_str()), (1, "tool_calls"));
    let message = server
        .ok(
            "/v1/messages",
            &ask(json!({"tools": [{"name": "weather", "input_schema": tools()[0]["function"]["parameters"]}]})),
        )
        .await;
    assert_eq!(message["stop_reason"], "tool_use");
    assert_eq!(message["content"][1]["input"].to_string(), ARGUMENTS);
    let none = server.chat(ask(json!({"tools": tools(), "tool_choice": "none"}))).await;
    assert_eq!((none.calls.len(), none.reason.as_str()), (0, "stop"));
}

#[tokio::test]
async fn values_come_through_as_they_are_and_long_ones_in_pieces() {
    let value = format!("  \"quoted\" \\n /tmp/f\ttab\r\n👨‍👩‍👧 \n{}", "fn main() {}\n".repeat(300));
    let output =
        format!("<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>");
    let server = says(&output);
    let said = server.chat(ask(json!({"tools": tools(), "enable_thinking": false}))).await;
    let arguments: Value = serde_json::from_str(&said.calls[0].1).unwrap();
    assert_eq!(arguments["city"], value);
    let pieces = server.events(CHAT, &ask(json!({"tools": tools(), "enable_thinking": false}))).await.len();
    assert!(pieces > 500, "{pieces}");
}

#[tokio::test]
async fn a_choice_of_tools_makes_the_call() {
    let server = says(&format!("I would rather talk.\n\n{CALL}"));
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        for think in [true, false] {
            let body =
                ask(json!({"tools": tools(), "tool_choice": choice, "enable_thinking": think, "max_tokens": 200}));
            let said = server.chat(body).await;
            assert_eq!((said.content.as_str(), said.reason.as_str()), ("", "tool_calls"), "{choice}");
            assert_eq!(said.calls[0].0, "weather");
            assert_eq!(compact(&said.calls[0].1), ARGUMENTS);
        }
    }
}

#[tokio::test]
async fn length_wins_over_calls() {
    let server = says(CALL);
    let limit = 12;
    let said = server.chat(ask(json!({"tools": tools(), "enable_thinking": false, "max_tokens": limit}))).await;
    assert_eq!(said.reason, "length");
    let whole = server.ok(CHAT, &ask(json!({"enable_thinking": false, "max_tokens": limit}))).await;
    assert_eq!(whole["usage"]["completion_tokens"], limit);
}

#[tokio::test]
async fn characters_come_whole_whatever_their_tokens() {
    for text in ["👨‍👩‍👧‍👦 🏳️‍🌈", "Příliš žluťoučký kůň", "你好，世界", "שלום"]
    {
        let server = says(text);
        let found = server.events(CHAT, &ask(json!({"enable_thinking": false}))).await;
        let pieces: Vec<&str> =
            found.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
        let body = json!({"prompt": "x", "logprobs": 0});
        assert_eq!(server.ok("/v1/completions", &body).await["choices"][0]["text"], text);
    }
}

#[tokio::test]
async fn stops_cut_exactly_where_they_match() {
    let server = says("alpha beta gamma delta");
    for (stop, text) in [
        (json!("beta gamma"), "alpha "),
        (json!(["zzz", "a d", "gamma delta!"]), "alpha beta gamm"),
        (json!(["gamma delta!"]), "alpha beta gamma delta"),
        (json!("alpha"), ""),
    ] {
        let said = server.chat(ask(json!({"enable_thinking": false, "stop": stop}))).await;
        assert_eq!((said.content.as_str(), said.reason.as_str()), (text, "stop"));
    }
    let message = server.ok("/v1/messages", &ask(json!({"stop_sequences": ["ta ga"]}))).await;
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!("ta ga")));
    assert_eq!(message["content"], json!([{"type": "text", "text": "alpha be"}]));
    let text = server.ok("/v1/completions", &json!({"prompt": "Say:", "stop": ["ta ga"]})).await;
    assert_eq!(text["choices"][0]["text"], "alpha be");
}

#[tokio::test]
async fn an_answer_may_be_empty_or_end_while_thinking() {
    let said = says("").chat(ask(json!({"enable_thinking": false}))).await;
    assert_eq!(said, Said { reason: "stop".into(), ..Said::default() });
    let said = says("<think>\nI wonder").chat(ask(json!({}))).await;
    assert_eq!(said, Said { reasoning: "I wonder".into(), reason: "stop".into(), ..Said::default() });
}

#[tokio::test]
async fn log_probabilities_spell_the_content() {
    let server = says("<think>\nHm.\n</think>\n\nA 🌷!");
    let whole = server.ok(CHAT, &ask(json!({"logprobs": true, "top_logprobs": 3}))).await;
    let entries = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert!(String::from_utf8(bytes).unwrap().contains("A 🌷!"));
    assert!(entries.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == 3));
}

#[tokio::test]
async fn a_schema_holds_with_and_without_thinking() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let formats = [
        json!({"type": "json_object"}),
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
    ];
    for output in ["<think>\nLet me {see}.\n</think>\n\n{\"a\": 1}", "Sure! {\"a\": 1}"] {
        let server = says(output);
        for format in &formats {
            for think in [true, false] {
                let body = ask(json!({"response_format": format, "enable_thinking": think, "max_tokens": 100}));
                let said = server.chat(body).await;
                assert_eq!(compact(&said.content), "{\"a\":1}", "{output}, {think}");
                let thought = if think && output.starts_with('<') { "Let me {see}." } else { "" };
                assert_eq!((said.reasoning.as_str(), said.reason.as_str()), (thought, "stop"));
            }
        }
    }
    let (status, body) = says("x")
        .json(
            CHAT,
            &ask(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "magic"}}}})),
        )
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body["error"]["message"].as_str().unwrap().starts_with("response_format"), "{body}");
}

#[tokio::test]
async fn a_second_turn_reads_only_what_is_new_and_says_the_same() {
    let lines = [json!({"output": "one"}), json!({"output": "two"})];
    let long = "Tell me about the fox and the hen. ".repeat(40);
    let first = json!({"messages": [{"role": "user", "content": long}], "enable_thinking": false});
    let second = json!({"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": "And then?"}], "enable_thinking": false});
    let warm = whole(&lines);
    warm.ok(CHAT, &first).await;
    let found = warm.ok(CHAT, &second).await;
    let usage = &found["usage"];
    let (prompt, cached) =
        (usage["prompt_tokens"].as_u64().unwrap(), usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
    assert!(prompt - cached < 40 && cached > 200, "{usage}");
    assert_eq!(found["choices"][0]["message"]["content"], "two");
    let cold = whole(&lines).ok(CHAT, &second).await;
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(cold["choices"], found["choices"]);
    let usage = &warm.ok("/v1/messages", &second).await["usage"];
    assert_eq!(usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap(), prompt);
}

#[tokio::test]
async fn conversations_without_a_question_are_answered() {
    let server = says("Yes.");
    for messages in [
        json!([{"role": "system", "content": "A"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, {"role": "tool", "content": "x"}]),
        json!([{"role": "user", "content": "<tool_response>x</tool_response>"}]),
        json!([{"role": "assistant", "content": "hi"}]),
    ] {
        let body = json!({"messages": messages, "enable_thinking": false});
        assert_eq!(server.ok(CHAT, &body).await["choices"][0]["message"]["content"], "Yes.");
    }
}

#[tokio::test]
async fn a_failure_of_the_device_fails_the_request_and_not_the_server() {
    let server = whole(&[json!({"when": "fail", "output": "So far", "error": "unplugged"}), json!({"output": "fine"})]);
    let failing = json!({"messages": [{"role": "user", "content": "fail"}], "enable_thinking": false});
    let (status, body) = server.json(CHAT, &failing).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(body["error"]["message"].as_str().unwrap().contains("unplugged"), "{body}");
    let found = server.events(CHAT, &failing).await;
    assert!(found.last().unwrap()["error"]["message"].as_str().unwrap().contains("unplugged"));
    assert_eq!(server.chat(ask(json!({"enable_thinking": false}))).await.content, "fine");
}

#[tokio::test]
async fn conversations_at_the_same_time_are_not_mixed_up() {
    let lines: Vec<Value> =
        (0..24).map(|n| json!({"when": format!("number {n}."), "output": format!("This is answer {n}, said slowly."), "tokens_per_second": 2000})).collect();
    let server = Arc::new(whole(&lines));
    let asked = (0..24).map(|n| {
        let server = server.clone();
        tokio::spawn(async move {
            let body = json!({"messages": [{"role": "user", "content": format!("Say number {n}.")}], "enable_thinking": false});
            (n, server.streamed(body).await.content)
        })
    });
    let mut seen = BTreeSet::new();
    for task in asked.collect::<Vec<_>>() {
        let (n, content) = task.await.unwrap();
        assert_eq!(content, format!("This is answer {n}, said slowly."));
        seen.insert(n);
    }
    assert_eq!(seen.len(), 24);
}

#[tokio::test]
async fn clients_that_leave_leave_nothing_behind() {
    let slow = json!({"output": "word ".repeat(500), "tokens_per_second": 5000, "prompt_tokens_per_second": 20000});
    let server = whole(&[slow, json!({"when": "last", "output": "still here"})]);
    for n in 0..100 {
        let body = ask(json!({"stream": true, "enable_thinking": false}));
        let response = server.router.clone().oneshot(post(CHAT, body.to_string())).await.unwrap();
        let mut body = response.into_body();
        for _ in 0..n % 4 {
            body.frame().await.unwrap().unwrap();
        }
    }
    let last = json!({"messages": [{"role": "user", "content": "last"}], "enable_thinking": false});
    assert_eq!(server.streamed(last).await.content, "still here");
    let gone = async {
        while server.service.in_progress() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("all turns end");
}
