//! `/v1/responses`.

use lily_model::chat::Chat;
use serde_json::{Value, json};

use crate::testing::{self, chat, events, finished, hello, logprob, play, rich, server, started};
use crate::turn::{Format, ToolChoice, TurnEvent, TurnReason, TurnRequest};

const PATH: &str = "/v1/responses";

async fn asked(body: Value) -> TurnRequest {
    testing::asked(PATH, body).await
}

async fn messages(input: Value) -> Value {
    chat(asked(json!({"input": input})).await).messages
}

async fn refusal(body: Value) -> String {
    testing::refusal(PATH, body).await
}

/// Ids replaced by their prefixes and a count, so that sequences can be compared.
fn normalize(events: &[Value]) -> Vec<Value> {
    let mut text = serde_json::to_string(events).unwrap();
    for prefix in ["resp_", "rs_", "msg_", "fc_"] {
        let mut count = 0;
        while let Some(at) = text.match_indices(prefix).map(|(at, _)| at).find(|at| {
            text.get(at + prefix.len()..at + prefix.len() + 24)
                .is_some_and(|id| id.bytes().all(|b| b.is_ascii_hexdigit()))
        }) {
            let id = text[at..at + prefix.len() + 24].to_owned();
            text = text.replace(&id, &format!("{}-{count}", prefix.trim_end_matches('_')));
            count += 1;
        }
    }
    serde_json::from_str(&text).unwrap()
}

#[tokio::test]
async fn a_stream_is_this_sequence() {
    let body = json!({"model": "m", "input": "Hi", "stream": true});
    let found = normalize(&events(&server(play(rich(TurnReason::ToolCalls))).stream(PATH, body).await));
    for (number, event) in found.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let brief: Vec<Value> = found
        .iter()
        .map(|event| {
            let mut event = event.clone();
            let map = event.as_object_mut().unwrap();
            map.remove("sequence_number");
            if let Some(response) = map.remove("response") {
                map.insert("status".into(), response["status"].clone());
            }
            event
        })
        .collect();
    let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    let thought = |text: &str| json!({"type": "reasoning_text", "text": text});
    let reasoning = |status: &str, content: Value| json!({"id": "rs-0", "type": "reasoning", "status": status, "summary": [], "content": content});
    let message = |status: &str, content: Value| json!({"id": "msg-0", "type": "message", "status": status, "role": "assistant", "content": content});
    let call = |index: usize, status: &str, name: &str, arguments: &str| {
        json!({"id": format!("fc-{index}"), "type": "function_call", "status": status,
            "call_id": format!("call_{index:024x}"), "name": name, "arguments": arguments})
    };
    let at = |kind: &str, item: &str, index: usize, more: Value| {
        let mut event = json!({"type": format!("response.{kind}"), "item_id": item, "output_index": index});
        if !item.starts_with("fc") {
            event["content_index"] = 0.into();
        }
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        event
    };
    let item = |kind: &str, index: usize, item: Value| json!({"type": format!("response.output_item.{kind}"), "output_index": index, "item": item});
    let arguments = "{\"at\":\"a \\\"b\\\"\"}";
    let expected = [
        json!({"type": "response.created", "status": "in_progress"}),
        json!({"type": "response.in_progress", "status": "in_progress"}),
        item("added", 0, reasoning("in_progress", json!([]))),
        at("content_part.added", "rs-0", 0, json!({"part": thought("")})),
        at("reasoning_text.delta", "rs-0", 0, json!({"delta": "Let me "})),
        at("reasoning_text.delta", "rs-0", 0, json!({"delta": "look."})),
        at("reasoning_text.done", "rs-0", 0, json!({"text": "Let me look."})),
        at("content_part.done", "rs-0", 0, json!({"part": thought("Let me look.")})),
        item("done", 0, reasoning("completed", json!([thought("Let me look.")]))),
        item("added", 1, message("in_progress", json!([]))),
        at("content_part.added", "msg-0", 1, json!({"part": part("")})),
        at("output_text.delta", "msg-0", 1, json!({"delta": "I will ", "logprobs": []})),
        at("output_text.delta", "msg-0", 1, json!({"delta": "look 🌷.", "logprobs": []})),
        at("output_text.done", "msg-0", 1, json!({"text": "I will look 🌷.", "logprobs": []})),
        at("content_part.done", "msg-0", 1, json!({"part": part("I will look 🌷.")})),
        item("done", 1, message("completed", json!([part("I will look 🌷.")]))),
        item("added", 2, call(0, "in_progress", "look", "")),
        at("function_call_arguments.delta", "fc-0", 2, json!({"delta": "{\"at\":"})),
        at("function_call_arguments.delta", "fc-0", 2, json!({"delta": "\"a \\\"b\\\"\"}"})),
        at("function_call_arguments.done", "fc-0", 2, json!({"name": "look", "arguments": arguments})),
        item("done", 2, call(0, "completed", "look", arguments)),
        item("added", 3, call(1, "in_progress", "now", "")),
        at("function_call_arguments.delta", "fc-1", 3, json!({"delta": "{}"})),
        at("function_call_arguments.done", "fc-1", 3, json!({"name": "now", "arguments": "{}"})),
        item("done", 3, call(1, "completed", "now", "{}")),
        json!({"type": "response.completed", "status": "completed"}),
    ];
    for (found, expected) in brief.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
    assert_eq!(brief.len(), expected.len());
    let response = &found.last().unwrap()["response"];
    let done =
        found.iter().filter(|event| event["type"] == "response.output_item.done").map(|event| event["item"].clone());
    assert_eq!(response["output"], done.collect::<Value>());
    let usage = json!({"input_tokens": 12, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 21});
    assert_eq!(response["usage"], usage);
    assert_eq!((&response["object"], &response["model"]), (&json!("response"), &json!("m")));
}

#[tokio::test]
async fn a_whole_response_is_the_one_that_the_stream_ends_with() {
    for reason in [TurnReason::Stop, TurnReason::ToolCalls, TurnReason::Length] {
        let mut events_of = rich(reason.clone());
        if reason == TurnReason::Length {
            let end = events_of.len() - 2;
            events_of[end] = TurnEvent::CallEnded { index: 1, complete: false };
        }
        let server = server(play(events_of));
        let mut whole = server.ok(PATH, json!({"input": "Hi"})).await;
        let found = events(&server.stream(PATH, json!({"input": "Hi", "stream": true})).await);
        let mut last = found.last().unwrap()["response"].clone();
        for response in [&mut whole, &mut last] {
            response["created_at"] = 0.into();
        }
        assert_eq!(normalize(&[whole]), normalize(&[last]), "{reason:?}");
    }
}

#[tokio::test]
async fn a_cut_response_is_incomplete_and_its_cut_call_is_not_to_be_run() {
    let mut events_of = rich(TurnReason::Length);
    let end = events_of.len() - 2;
    events_of[end] = TurnEvent::CallEnded { index: 1, complete: false };
    let found = events(&server(play(events_of)).stream(PATH, json!({"input": "Hi", "stream": true})).await);
    let last = found.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(last["response"]["output"][3]["status"], "incomplete");
    let run: Vec<&Value> = found
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| &event["item"]["name"])
        .collect();
    assert_eq!(run, [&Value::Null, &Value::Null, &json!("look")]);
    let cut = play(vec![started(), TurnEvent::Content("So".into()), finished(TurnReason::Length)]);
    let whole = server(cut).ok(PATH, json!({"input": "Hi"})).await;
    assert_eq!((&whole["status"], &whole["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
}

#[tokio::test]
async fn what_codex_sends_is_taken() {
    let function = json!({"type": "function", "name": "shell", "description": "Runs", "strict": false,
        "parameters": {"type": "object", "properties": {"command": {"type": "array"}}}});
    let body = json!({
        "model": "qwen", "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List "}, {"type": "input_text", "text": "files"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I need ls."}], "encrypted_content": null},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "name": "shell", "arguments": "{\"command\":[\"ls\"]}", "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "call_2"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ok"}, {"type": "input_image", "image_url": "x"}]},
            {"type": "ghost_snapshot", "ghost_commit": {}},
            {"type": "web_search_call", "status": "completed"},
        ],
        "tools": [function, {"type": "custom", "name": "apply_patch", "format": {}}, {"type": "web_search"},
            {"type": "namespace", "name": "n", "tools": []}, {"type": "image_generation"}, {"type": "local_shell"}],
        "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": {"effort": "medium", "summary": "auto"},
        "store": false, "stream": false, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "thread-1",
        "text": {"verbosity": "medium"}, "service_tier": "auto", "client_metadata": {"x": "y"},
    });
    let server = server(hello());
    let response = server.ok(PATH, body).await;
    assert_eq!(response["tools"], json!([function]));
    assert_eq!((&response["store"], &response["parallel_tool_calls"]), (&json!(false), &json!(false)));
    let request = server.turns.last();
    assert_eq!((request.max_tokens, request.affinity.as_deref()), (None, Some("thread-1")));
    assert!(!request.parallel_tool_calls);
    let chat = chat(request);
    assert_eq!(chat.enable_thinking, Some(true));
    let name = |chat: &Chat, index: usize| chat.tools[index]["function"]["name"].clone();
    assert_eq!((name(&chat, 0), chat.tools.as_array().unwrap().len()), (json!("shell"), 1));
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = json!([
        {"role": "system", "content": "You are Codex."},
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": "List files"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "I need ls.",
            "tool_calls": [call("call_1", "shell", json!("{\"command\":[\"ls\"]}"))]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"},
        {"role": "assistant", "content": "", "tool_calls": [call("call_2", "apply_patch", json!({"input": "*** Begin"}))]},
        {"role": "tool", "tool_call_id": "call_2", "content": "ok\n\n[image left out: this model reads text only]"},
    ]);
    assert_eq!(chat.messages, expected);
}

#[tokio::test]
async fn an_empty_input_is_answered() {
    for input in [json!([]), json!(""), Value::Null] {
        let request = asked(json!({"input": input, "max_output_tokens": 1})).await;
        assert_eq!(request.max_tokens, Some(1));
        assert_eq!(chat(request).messages, json!([{"role": "user", "content": ""}]));
    }
}

#[tokio::test]
async fn turns_of_the_assistant_are_put_together_and_kept_apart() {
    let say = |role: &str, text: &str| json!({"role": role, "content": text});
    let think = |text: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]});
    let call = json!({"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"});
    let found = messages(json!([
        say("user", "a"),
        think("b"),
        say("assistant", "c"),
        think("d"),
        call,
        call,
        say("assistant", "e")
    ]))
    .await;
    let calls = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let expected = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c", "reasoning_content": "b"},
        {"role": "assistant", "content": "", "reasoning_content": "d", "tool_calls": [calls, calls]},
        {"role": "assistant", "content": "e"},
    ]);
    assert_eq!(found, expected);
}

#[tokio::test]
async fn what_needs_storage_is_refused_and_so_is_what_cannot_be_read() {
    for (body, field) in [
        (
            json!({"input": "x", "previous_response_id": "resp_1"}),
            "previous_response_id: found \"resp_1\", expected nothing",
        ),
        (json!({"input": "x", "conversation": "c"}), "conversation: found"),
        (json!({"input": "x", "background": true}), "background: found true"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type: found \"item_reference\""),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type: found \"input_image\"",
        ),
        (json!({"input": [{"role": "tool", "content": "x"}]}), "input[0].role: found \"tool\""),
        (json!({"input": [{"type": "function_call"}]}), "input[0].name: found nothing"),
        (json!({"input": 5}), "input: found 5"),
        (json!({"input": "x", "tools": [{"type": "function"}]}), "tools[0].name: found nothing"),
        (json!({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}), "tool_choice: found"),
        (json!({"input": "x", "reasoning": {"effort": "huge"}}), "reasoning.effort: found \"huge\""),
        (json!({"input": "x", "text": {"format": {"type": "json_schema"}}}), "text.format.schema: found nothing"),
    ] {
        let message = refusal(body).await;
        assert!(message.starts_with(field), "{message}");
    }
}

#[tokio::test]
async fn formats_choices_and_limits_are_read() {
    let schema = json!({"type": "object"});
    let format = json!({"type": "json_schema", "name": "x", "schema": schema, "strict": true});
    let request =
        asked(json!({"input": "x", "text": {"format": format}, "max_output_tokens": 9, "temperature": 0})).await;
    assert_eq!((request.format, request.max_tokens), (Format::JsonSchema(schema), Some(9)));
    assert_eq!(request.sampling.temperature, Some(0.0));
    let tools = json!([{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]);
    for (choice, expected) in [
        (json!({"type": "function", "name": "g"}), ToolChoice::Function("g".into())),
        (json!("required"), ToolChoice::Required),
        (
            json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}),
            ToolChoice::Function("f".into()),
        ),
    ] {
        assert_eq!(asked(json!({"input": "x", "tools": tools, "tool_choice": choice})).await.tool_choice, expected);
    }
}

#[tokio::test]
async fn log_probabilities_come_with_the_text() {
    let events_of =
        play(vec![started(), logprob("a", true), TurnEvent::Content("a".into()), finished(TurnReason::Stop)]);
    let server = server(events_of);
    let body = json!({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let whole = server.ok(PATH, body.clone()).await;
    assert_eq!(server.turns.last().logprobs, Some(2));
    assert_eq!(whole["output"][0]["content"][0]["logprobs"][0]["token"], "a");
    let mut stream = body;
    stream["stream"] = true.into();
    let found = events(&server.stream(PATH, stream).await);
    let delta = found.iter().find(|event| event["type"] == "response.output_text.delta").unwrap();
    assert_eq!(delta["logprobs"], whole["output"][0]["content"][0]["logprobs"]);
}
