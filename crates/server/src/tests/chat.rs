//! `/v1/chat/completions`.

use axum::http::StatusCode;
use lily_engine::Sampling;
use serde_json::{Value, json};

use crate::testing::{self, chat, events, finished, hello, logprob, merged, play, rich, server, started};
use crate::turn::{Format, ToolChoice, TurnEvent, TurnReason, TurnRequest};

const PATH: &str = "/v1/chat/completions";

fn with(extra: Value) -> Value {
    let body = json!({"model": "any", "messages": [{"role": "user", "content": "Hi"}]});
    merged(body, &extra)
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}})
}

/// What the turns are asked for.
async fn asked(extra: Value) -> TurnRequest {
    testing::asked(PATH, with(extra)).await
}

async fn refusal(extra: Value) -> String {
    testing::refusal(PATH, with(extra)).await
}

#[tokio::test]
async fn a_whole_answer_has_reasoning_content_calls_and_usage() {
    let mut body = server(play(rich(TurnReason::ToolCalls))).ok(PATH, with(json!({}))).await;
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    body.as_object_mut().unwrap().retain(|name, _| name != "id" && name != "created");
    let call = |index: usize, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": format!("call_{index:024x}"), "type": "function", "function": function})
    };
    let expected = json!({
        "object": "chat.completion",
        "model": "any",
        "choices": [{
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "I will look 🌷.",
                "refusal": null,
                "reasoning_content": "Let me look.",
                "tool_calls": [call(0, "look", "{\"at\":\"a \\\"b\\\"\"}"), call(1, "now", "{}")],
            },
            "logprobs": null,
            "finish_reason": "tool_calls",
        }],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 9,
            "total_tokens": 21,
            "prompt_tokens_details": {"cached_tokens": 5},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
        "timings": {"cache_n": 5, "prompt_n": 7, "prompt_ms": 14.0, "prompt_per_second": 500.0, "predicted_n": 9,
            "predicted_ms": 80.0, "predicted_per_second": 100.0},
        "seed": 7,
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn a_stream_is_this_sequence() {
    let body = with(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let found = events(&server(play(rich(TurnReason::ToolCalls))).stream(PATH, body).await);
    let delta = |event: &Value| event["choices"][0]["delta"].clone();
    let call = |index: usize, name: &str| {
        let function = json!({"name": name, "arguments": ""});
        json!({"tool_calls": [{"index": index, "id": format!("call_{index:024x}"), "type": "function", "function": function}]})
    };
    let piece = |index: usize, json: &str| json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]});
    let expected = [
        json!({"role": "assistant", "content": null}),
        json!({"reasoning_content": "Let me "}),
        json!({"reasoning_content": "look."}),
        json!({"content": "I will "}),
        json!({"content": "look 🌷."}),
        call(0, "look"),
        piece(0, "{\"at\":"),
        piece(0, "\"a \\\"b\\\"\"}"),
        call(1, "now"),
        piece(1, "{}"),
        json!({}),
    ];
    let chunks = &found[..found.len() - 2];
    assert_eq!(chunks.iter().map(delta).collect::<Vec<_>>(), expected);
    for chunk in chunks {
        assert_eq!((&chunk["object"], &chunk["model"]), (&json!("chat.completion.chunk"), &json!("any")));
        assert_eq!((&chunk["id"], &chunk["usage"]), (&chunks[0]["id"], &Value::Null));
    }
    let reasons: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert!(reasons[..10].iter().all(|reason| reason.is_null()));
    assert_eq!(reasons[10], "tool_calls");
    let counts = &found[found.len() - 2];
    assert_eq!((&counts["choices"], &counts["usage"]["total_tokens"]), (&json!([]), &json!(21)));
    assert_eq!(counts["usage"]["prompt_tokens_details"]["cached_tokens"], 5);
    assert_eq!(found.last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn usage_comes_only_where_it_is_asked_for_and_the_reason_exactly_once() {
    for extra in [json!({"stream": true}), json!({"stream": true, "stream_options": {"include_usage": false}})] {
        let found = events(&server(hello()).stream(PATH, with(extra)).await);
        assert!(found.iter().all(|event| event.get("usage").is_none()));
        let reasons = found.iter().filter(|event| !event["choices"][0]["finish_reason"].is_null()).count();
        assert_eq!(reasons, 1);
        assert_eq!(found[found.len() - 2]["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn a_cut_answer_says_length_even_with_calls() {
    for (reason, name) in [
        (TurnReason::Length, "length"),
        (TurnReason::Stop, "stop"),
        (TurnReason::StopString("x".into()), "stop"),
        (TurnReason::ToolCalls, "tool_calls"),
    ] {
        let server = server(play(rich(reason)));
        assert_eq!(server.ok(PATH, with(json!({}))).await["choices"][0]["finish_reason"], name);
        let found = events(&server.stream(PATH, with(json!({"stream": true}))).await);
        assert_eq!(found[found.len() - 2]["choices"][0]["finish_reason"], name);
    }
}

#[tokio::test]
async fn an_empty_answer_is_one_and_calls_alone_have_no_content() {
    let empty = server(play(vec![started(), finished(TurnReason::Stop)]));
    let body = empty.ok(PATH, with(json!({}))).await;
    assert_eq!(body["choices"][0]["message"], json!({"role": "assistant", "content": "", "refusal": null}));
    let mut call = rich(TurnReason::ToolCalls);
    call.retain(|event| !matches!(event, TurnEvent::Content(_) | TurnEvent::Reasoning(_)));
    let body = server(play(call)).ok(PATH, with(json!({}))).await;
    assert_eq!(body["choices"][0]["message"]["content"], Value::Null);
}

#[tokio::test]
async fn reasoning_goes_into_the_field_that_is_asked_for() {
    for (extra, field) in [
        (json!({}), Some("reasoning_content")),
        (json!({"reasoning_format": "auto"}), Some("reasoning_content")),
        (json!({"reasoning_format": "reasoning"}), Some("reasoning")),
        (json!({"reasoning_format": "hidden"}), None),
        (json!({"reasoning": {"exclude": true}}), None),
    ] {
        let server = server(play(rich(TurnReason::Stop)));
        let whole = server.ok(PATH, with(extra.clone())).await;
        let mut streaming = with(extra);
        streaming["stream"] = true.into();
        let found = events(&server.stream(PATH, streaming).await);
        for name in ["reasoning_content", "reasoning"] {
            let text: String = found.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect();
            let expected = if field == Some(name) { "Let me look." } else { "" };
            assert_eq!(text, expected);
            assert_eq!(whole["choices"][0]["message"][name].as_str().unwrap_or_default(), expected);
        }
    }
    assert!(refusal(json!({"reasoning_format": "none"})).await.starts_with("reasoning_format: found \"none\""));
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_content() {
    let events_of = || {
        play(vec![
            started(),
            logprob("hm", false),
            TurnEvent::Reasoning("hm".into()),
            logprob("a", true),
            logprob("b", true),
            TurnEvent::Content("ab".into()),
            logprob("", true),
            finished(TurnReason::Stop),
        ])
    };
    let entry = |text: &str| {
        let token = |text: &str, logprob: f64| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()});
        let mut entry = token(text, -0.5);
        entry["top_logprobs"] = json!([token(text, -0.5), token("other", -9999.0)]);
        entry
    };
    let body = with(json!({"logprobs": true, "top_logprobs": 2}));
    let server = server(events_of());
    let whole = server.ok(PATH, body.clone()).await;
    assert_eq!(server.turns.last().logprobs, Some(2));
    let all = [entry("a"), entry("b"), entry("")];
    assert_eq!(whole["choices"][0]["logprobs"], json!({"content": all, "refusal": null}));
    let mut streaming = body;
    streaming["stream"] = true.into();
    let found = events(&server.stream(PATH, streaming).await);
    let parts: Vec<Value> = found
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(parts, all);
    let (without, _) = (asked(json!({"logprobs": false, "top_logprobs": 0})).await.logprobs, ());
    assert_eq!(without, None);
    assert_eq!(asked(json!({"logprobs": true})).await.logprobs, Some(0));
    assert_eq!(asked(json!({"logprobs": true, "top_logprobs": 20})).await.logprobs, Some(20));
    assert_eq!(
        refusal(json!({"logprobs": true, "top_logprobs": 21})).await,
        "top_logprobs: found 21, expected 0 to 20"
    );
    assert!(refusal(json!({"top_logprobs": 5})).await.starts_with("top_logprobs: found 5"));
}

#[tokio::test]
async fn the_smallest_limit_wins_and_none_is_the_context() {
    for (extra, limit) in [
        (json!({}), None),
        (json!({"max_tokens": null}), None),
        (json!({"max_tokens": -1}), None),
        (json!({"max_tokens": 100}), Some(100)),
        (json!({"max_tokens": 100.0}), Some(100)),
        (json!({"max_completion_tokens": 7}), Some(7)),
        (json!({"max_tokens": 100, "max_completion_tokens": 7}), Some(7)),
        (json!({"max_tokens": 5, "max_completion_tokens": 7}), Some(5)),
        (json!({"n_predict": 3}), Some(3)),
    ] {
        assert_eq!(asked(extra.clone()).await.max_tokens, limit, "{extra}");
    }
    assert!(refusal(json!({"max_tokens": 0})).await.starts_with("max_tokens: found 0, expected 1 or more"));
    assert!(refusal(json!({"max_completion_tokens": "7"})).await.starts_with("max_completion_tokens: found \"7\""));
}

#[tokio::test]
async fn every_sampling_field_acts() {
    assert_eq!(asked(json!({})).await.sampling, Sampling::default());
    let all = json!({"temperature": 0.5, "top_k": 0, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.75, "logit_bias": {"5": -100, "6": 1.5}, "seed": 42});
    let expected = Sampling {
        temperature: Some(0.5),
        top_k: Some(0),
        top_p: Some(0.25),
        min_p: Some(0.125),
        repetition_penalty: Some(1.5),
        presence_penalty: Some(-0.5),
        frequency_penalty: Some(0.75),
        logit_bias: Some(vec![(5, -100.0), (6, 1.5)]),
        seed: Some(42),
    };
    assert_eq!(asked(all).await.sampling, expected);
    assert_eq!(asked(json!({"repeat_penalty": 1.25, "seed": -1})).await.sampling.repetition_penalty, Some(1.25));
    assert_eq!(asked(json!({"seed": -1})).await.sampling.seed, None);
    for (extra, message) in [
        (json!({"temperature": 2.5}), "temperature: found 2.5, allowed 0 to 2"),
        (json!({"temperature": "hot"}), "temperature: found \"hot\", expected a number"),
        (json!({"top_p": -0.1}), "top_p: found -0.1"),
        (json!({"top_k": -2}), "top_k: found -2"),
        (json!({"min_p": 3}), "min_p: found 3"),
        (json!({"repetition_penalty": 0}), "repetition_penalty: found 0"),
        (json!({"presence_penalty": 3}), "presence_penalty: found 3"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias: found 101"),
        (json!({"logit_bias": {"fox": 1}}), "logit_bias: found \"fox\""),
        (json!({"logit_bias": {"4000000": 1}}), "logit_bias: found token id 4000000"),
        (json!({"logit_bias": [5]}), "logit_bias: found an array"),
        (json!({"seed": 1.5}), "seed: found 1.5"),
    ] {
        let found = refusal(extra).await;
        assert!(found.starts_with(message), "{found}");
    }
}

#[tokio::test]
async fn what_would_change_the_answer_and_is_not_there_is_refused() {
    for (name, neutral, other) in [
        ("n", json!(1), json!(2)),
        ("min_tokens", json!(0), json!(5)),
        ("ignore_eos", json!(false), json!(true)),
        ("mirostat", json!(0), json!(2)),
        ("typical_p", json!(1.0), json!(0.5)),
        ("grammar", json!(""), json!("root ::= x")),
        ("guided_json", Value::Null, json!({"type": "object"})),
        ("functions", json!([]), json!([{"name": "f"}])),
        ("function_call", json!("auto"), json!({"name": "f"})),
        ("modalities", json!(["text"]), json!(["text", "audio"])),
        ("continue_final_message", json!(false), json!(true)),
    ] {
        asked(json!({name: neutral})).await;
        let message = refusal(json!({name: other})).await;
        assert!(message.starts_with(&format!("{name}: found ")), "{message}");
    }
    let unknown =
        json!({"cache_prompt": true, "user": "me", "metadata": {}, "store": false, "verbosity": "low", "zzz": [1]});
    asked(unknown).await;
}

#[tokio::test]
async fn stops_are_one_or_several_and_never_empty() {
    assert_eq!(asked(json!({"stop": "\nUser:"})).await.stop, ["\nUser:"]);
    let many = json!(["a", "b", "c", "d", "e", "f"]);
    assert_eq!(asked(json!({"stop": many})).await.stop.len(), 6);
    assert!(asked(json!({"stop": []})).await.stop.is_empty());
    for stop in [json!(""), json!(["a", ""]), json!([1]), json!(5)] {
        assert!(refusal(json!({"stop": stop})).await.starts_with("stop: found "));
    }
}

#[tokio::test]
async fn formats_are_read_and_a_bad_schema_is_refused() {
    let schema = json!({"type": "object", "properties": {"z": {}, "a": {}}});
    let nested = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    for (format, expected) in [
        (Value::Null, Format::Text),
        (json!({"type": "text"}), Format::Text),
        (json!({"type": "json_object"}), Format::JsonObject),
        (json!({"type": "json_object", "schema": schema}), Format::JsonSchema(schema.clone())),
        (nested, Format::JsonSchema(schema.clone())),
    ] {
        assert_eq!(asked(json!({"response_format": format})).await.format, expected);
    }
    for (format, field) in [
        (json!("json"), "response_format: found \"json\""),
        (json!({}), "response_format.type: found nothing"),
        (json!({"type": "xml"}), "response_format.type: found \"xml\""),
        (json!({"type": "json_schema"}), "response_format.schema: found nothing"),
        (
            json!({"type": "json_schema", "json_schema": {"name": "x"}}),
            "response_format.json_schema.schema: found nothing",
        ),
        (
            json!({"type": "json_schema", "json_schema": {"schema": "x"}}),
            "response_format.json_schema.schema: found \"x\"",
        ),
    ] {
        let message = refusal(json!({"response_format": format})).await;
        assert!(message.starts_with(field), "{message}");
    }
}

#[tokio::test]
async fn tools_reach_the_template_as_they_come() {
    let tools = json!([
        {"type": "function", "function": {"name": "a", "description": "x <y> & 'z' ü"}, "extra": 1},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "object", "properties": {}, "required": null}, "strict": true}},
        {"function": {"parameters": {}, "name": "c"}},
    ]);
    let request = asked(json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false})).await;
    assert!(!request.parallel_tool_calls);
    assert_eq!(request.tool_choice, ToolChoice::Required);
    assert_eq!(chat(request).tools.to_string(), tools.to_string());
    for (tool, field) in [
        (json!(5), "tools[0]: found 5"),
        (json!({"type": "function"}), "tools[0].function: found nothing"),
        (json!({"type": "function", "function": {}}), "tools[0].function.name: found nothing"),
        (json!({"type": "web_search"}), "tools[0].type: found \"web_search\""),
    ] {
        let message = refusal(json!({"tools": [tool]})).await;
        assert!(message.starts_with(field), "{message}");
    }
}

#[tokio::test]
async fn the_choice_of_tools_is_read_in_every_form() {
    for (choice, expected) in [
        (json!("auto"), ToolChoice::Auto),
        (json!("none"), ToolChoice::None),
        (json!("any"), ToolChoice::Required),
        (json!({"type": "function", "function": {"name": "f"}}), ToolChoice::Function("f".into())),
    ] {
        let request = asked(json!({"tools": [tool("f")], "tool_choice": choice})).await;
        assert_eq!((request.tool_choice, request.parallel_tool_calls), (expected, true));
    }
    for extra in [
        json!({"tool_choice": "sometimes"}),
        json!({"tool_choice": "required"}),
        json!({"tool_choice": 5}),
        json!({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ] {
        assert!(refusal(extra).await.starts_with("tool_choice: found "));
    }
}

#[tokio::test]
async fn thinking_and_template_variables_reach_the_conversation() {
    let kwargs = json!({"enable_thinking": false, "preserve_thinking": true, "tone": "kind"});
    let chat_of = chat(asked(json!({"chat_template_kwargs": kwargs})).await);
    assert_eq!((chat_of.enable_thinking, chat_of.preserve_thinking), (Some(false), Some(true)));
    assert_eq!(Value::Object(chat_of.variables), json!({"tone": "kind"}));
    let request = asked(json!({"thinking": {"type": "enabled", "budget_tokens": 50}})).await;
    assert_eq!(request.max_thinking_tokens, Some(50));
    assert_eq!(chat(request).enable_thinking, Some(true));
    assert_eq!(chat(asked(json!({})).await).enable_thinking, None);
    let message = refusal(json!({"reasoning_effort": "extreme"})).await;
    assert!(message.starts_with("reasoning_effort: found \"extreme\", expected \"none\""), "{message}");
}

#[tokio::test]
async fn messages_of_every_shape_are_taken_and_others_named() {
    let server = server(hello());
    let calls = json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}}]);
    for messages in [
        json!([{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, {"role": "user", "content": "x"}]),
        json!([{"role": "user", "content": "x"}, {"role": "system", "content": "late"}]),
        json!([{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]),
        json!([{"role": "assistant", "content": null, "tool_calls": calls}, {"role": "tool", "content": ""}]),
        json!([{"role": "assistant", "reasoning": "x"}]),
        json!([{"role": "user"}]),
    ] {
        server.ok(PATH, json!({"messages": messages})).await;
        assert_eq!(chat(server.turns.last()).messages, messages);
    }
    for (messages, field) in [
        (json!([]), "messages: found none"),
        (Value::Null, "messages: found null"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].type: found \"image_url\"",
        ),
        (json!([{"role": "user", "content": [{"type": "magic"}]}]), "messages[0].content[0].type: found \"magic\""),
        (json!([{"role": "banana"}]), "messages[0].role: found \"banana\""),
    ] {
        let message = server.refusal(PATH, json!({"messages": messages})).await;
        assert!(message.starts_with(field), "{message}");
    }
}

#[tokio::test]
async fn any_model_name_is_taken_and_repeated() {
    let server = server(hello());
    assert_eq!(server.ok(PATH, with(json!({"model": "gpt-9"}))).await["model"], "gpt-9");
    assert_eq!(server.ok(PATH, with(json!({"model": null}))).await["model"], "lily-demo");
    let (status, _) = server.json(PATH, with(json!({"model": 5}))).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(asked(json!({"prompt_cache_key": "k"})).await.affinity.as_deref(), Some("k"));
}

#[tokio::test]
async fn progress_is_told_where_it_is_asked_for() {
    let body = with(json!({"stream": true, "return_progress": true}));
    let found = events(&server(play(rich(TurnReason::Stop))).stream(PATH, body).await);
    let progress: Vec<&Value> = found.iter().filter_map(|event| event.get("prompt_progress")).collect();
    assert_eq!(progress, [&json!({"processed": 5, "total": 12}), &json!({"processed": 12, "total": 12})]);
}
