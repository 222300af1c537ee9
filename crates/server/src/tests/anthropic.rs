//! `/v1/messages`.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::testing::{self, chat, events, hello, merged, play, rich, server};
use crate::turn::{Format, ToolChoice, TurnReason, TurnRequest};

const PATH: &str = "/v1/messages";

fn with(extra: Value) -> Value {
    let body = json!({"model": "claude", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]});
    merged(body, &extra)
}

async fn asked(extra: Value) -> TurnRequest {
    testing::asked(PATH, with(extra)).await
}

async fn refusal(extra: Value) -> String {
    testing::refusal(PATH, with(extra)).await
}

#[tokio::test]
async fn a_whole_message_has_blocks_in_their_order() {
    let mut body = server(play(rich(TurnReason::ToolCalls))).ok(PATH, with(json!({}))).await;
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    body.as_object_mut().unwrap().remove("id");
    let expected = json!({
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [
            {"type": "thinking", "thinking": "Let me look.", "signature": "bGlseQ=="},
            {"type": "text", "text": "I will look 🌷."},
            {"type": "tool_use", "id": "toolu_000000000000000000000000", "name": "look", "input": {"at": "a \"b\""}},
            {"type": "tool_use", "id": "toolu_000000000000000000000001", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": null,
        "usage": {"input_tokens": 7, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5, "output_tokens": 9},
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn a_stream_is_this_sequence() {
    let mut found =
        events(&server(play(rich(TurnReason::ToolCalls))).stream(PATH, with(json!({"stream": true}))).await);
    found[0]["message"].as_object_mut().unwrap().remove("id");
    let start =
        |index: usize, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
    let delta = |index: usize, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let stop = |index: usize| json!({"type": "content_block_stop", "index": index});
    let tool = |index: usize, name: &str| json!({"type": "tool_use", "id": format!("toolu_{index:024x}"), "name": name, "input": {}});
    let usage = |input: usize, cached: usize, output: usize| json!({"input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached, "output_tokens": output});
    let message = json!({"type": "message", "role": "assistant", "model": "claude", "content": [], "stop_reason": null,
        "stop_sequence": null, "usage": usage(12, 0, 0)});
    let expected = [
        json!({"type": "message_start", "message": message}),
        start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
        delta(0, json!({"type": "thinking_delta", "thinking": "Let me "})),
        delta(0, json!({"type": "thinking_delta", "thinking": "look."})),
        delta(0, json!({"type": "signature_delta", "signature": "bGlseQ=="})),
        stop(0),
        start(1, json!({"type": "text", "text": ""})),
        delta(1, json!({"type": "text_delta", "text": "I will "})),
        delta(1, json!({"type": "text_delta", "text": "look 🌷."})),
        stop(1),
        start(2, tool(0, "look")),
        delta(2, json!({"type": "input_json_delta", "partial_json": "{\"at\":"})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "\"a \\\"b\\\"\"}"})),
        stop(2),
        start(3, tool(1, "now")),
        delta(3, json!({"type": "input_json_delta", "partial_json": "{}"})),
        stop(3),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": usage(7, 5, 9)}),
        json!({"type": "message_stop"}),
    ];
    assert_eq!(found, expected);
}

#[tokio::test]
async fn the_reason_of_the_end_is_said() {
    for (reason, name, sequence) in [
        (TurnReason::Stop, "end_turn", Value::Null),
        (TurnReason::Length, "max_tokens", Value::Null),
        (TurnReason::ToolCalls, "tool_use", Value::Null),
        (TurnReason::StopString("\nHuman:".into()), "stop_sequence", json!("\nHuman:")),
    ] {
        let server = server(play(rich(reason)));
        let whole = server.ok(PATH, with(json!({}))).await;
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(name), &sequence));
        let found = events(&server.stream(PATH, with(json!({"stream": true}))).await);
        let delta = &found[found.len() - 2]["delta"];
        assert_eq!((&delta["stop_reason"], &delta["stop_sequence"]), (&json!(name), &sequence));
    }
}

#[tokio::test]
async fn what_claude_code_sends_is_taken() {
    let cached = json!({"type": "ephemeral"});
    let body = json!({
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": cached},
            {"type": "text", "text": "Be brief.", "cache_control": cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}, {"type": "text", "text": "List", "cache_control": cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I need ls.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls", "b": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "cache_control": cached},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": true, "content": [{"type": "text", "text": "no file"}, {"type": "image", "source": {}}]},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
                {"type": "text", "text": "Go on."},
            ]},
        ],
        "tools": [
            {"name": "Bash", "description": "Runs", "input_schema": {"type": "object"}, "cache_control": cached},
            {"type": "custom", "name": "Read", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        "metadata": {"user_id": "user_1"}, "thinking": {"type": "enabled", "budget_tokens": 31999}, "temperature": 1,
        "context_management": {"edits": []}, "betas": ["x"],
    });
    let request = asked(body).await;
    assert_eq!((request.max_tokens, request.max_thinking_tokens), (Some(100), Some(31_999)));
    assert_eq!(request.affinity.as_deref(), Some("user_1"));
    let chat = chat(request);
    assert_eq!(chat.enable_thinking, Some(true));
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = json!([
        {"role": "system", "content": "You are Claude Code.\n\nBe brief."},
        {"role": "user", "content": "<system-reminder>x</system-reminder>\n\nList"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "I need ls.", "tool_calls": [
            call("toolu_1", "Bash", json!({"command": "ls", "b": 1})), call("toolu_2", "Read", json!({}))]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no file\n\n[image left out: this model reads text only]"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "Go on."},
    ]);
    assert_eq!(chat.messages.to_string(), expected.to_string());
    let tools = json!([
        {"type": "function", "function": {"name": "Bash", "description": "Runs", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}},
    ]);
    assert_eq!(chat.tools.to_string(), tools.to_string());
}

#[tokio::test]
async fn thinking_is_off_unless_it_is_asked_for() {
    for (extra, on) in [
        (json!({}), false),
        (json!({"thinking": {"type": "disabled"}}), false),
        (json!({"thinking": {"type": "adaptive"}}), true),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), true),
    ] {
        assert_eq!(chat(asked(extra.clone()).await).enable_thinking, Some(on), "{extra}");
    }
    assert!(refusal(json!({"thinking": {"type": "on"}})).await.starts_with("thinking.type: found \"on\""));
}

#[tokio::test]
async fn choices_stops_and_formats_are_read() {
    let tools = json!([{"name": "f", "input_schema": {}}]);
    for (choice, expected, parallel) in [
        (json!({"type": "auto"}), ToolChoice::Auto, true),
        (json!({"type": "any", "disable_parallel_tool_use": true}), ToolChoice::Required, false),
        (json!({"type": "tool", "name": "f"}), ToolChoice::Function("f".into()), true),
        (json!({"type": "none"}), ToolChoice::None, true),
    ] {
        let request = asked(json!({"tools": tools, "tool_choice": choice})).await;
        assert_eq!((request.tool_choice, request.parallel_tool_calls), (expected, parallel));
    }
    assert_eq!(asked(json!({"stop_sequences": ["a", "b"]})).await.stop, ["a", "b"]);
    let schema = json!({"type": "object"});
    let format = json!({"type": "json_schema", "schema": schema});
    for extra in [json!({"output_format": format}), json!({"output_config": {"format": format, "effort": "high"}})] {
        assert_eq!(asked(extra).await.format, Format::JsonSchema(schema.clone()));
    }
    for (extra, field) in [
        (json!({"tool_choice": {"type": "any"}}), "tool_choice: found"),
        (json!({"tool_choice": "auto"}), "tool_choice: found \"auto\""),
        (json!({"tools": tools, "tool_choice": {"type": "tool", "name": "g"}}), "tool_choice: found \"g\""),
        (json!({"tools": [{"input_schema": {}}]}), "tools[0].name: found nothing"),
        (json!({"stop_sequences": [""]}), "stop_sequences: found an empty string"),
        (json!({"max_tokens": 0}), "max_tokens: found 0"),
        (json!({"messages": []}), "messages: found an empty array"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages[0].content[0].type: found \"image\"",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}),
            "messages[0].content[0].type: found \"tool_use\"",
        ),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content: found 5"),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 5}]}]}),
            "messages[0].content[0].input: found 5",
        ),
        (json!({"system": [{"type": "image"}]}), "system[0].type: found \"image\""),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}),
            "messages[0].content[0].source.type: found \"base64\"",
        ),
    ] {
        let message = refusal(extra).await;
        assert!(message.starts_with(field), "{message}");
    }
}

#[tokio::test]
async fn tokens_are_counted_as_the_prompt_has_them() {
    let server = server(hello());
    let body = json!({"model": "x", "system": "S", "messages": [{"role": "user", "content": "A fox"}]});
    let count = server.ok("/v1/messages/count_tokens", body).await["input_tokens"].as_u64().unwrap();
    let chat = json!({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "A fox"}], "enable_thinking": false});
    assert_eq!(server.ok("/tokenize", chat).await["count"], count);
    assert!(server.turns.requests.lock().unwrap().is_empty());
    let (status, body) = server.json("/v1/messages/count_tokens", json!({"messages": []})).await;
    assert_eq!((status, &body["type"]), (StatusCode::BAD_REQUEST, &json!("error")));
}
