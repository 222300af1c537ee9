//! Laws over many requests and answers.

use lily_model::chat::normalize_messages;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::api::openai::{chat, completions, responses};
use crate::api::{anthropic, tokens};
use crate::testing::{events, finished, play, server, started};
use crate::turn::{Input, TurnEvent, TurnReason};

/// Names that some API knows, so that what is generated gets past the first look.
const NAMES: [&str; 40] = [
    "messages",
    "role",
    "content",
    "type",
    "text",
    "tools",
    "function",
    "name",
    "arguments",
    "input",
    "tool_calls",
    "id",
    "system",
    "thinking",
    "reasoning",
    "summary",
    "output",
    "call_id",
    "tool_use_id",
    "is_error",
    "source",
    "data",
    "action",
    "input_schema",
    "parameters",
    "tool_choice",
    "response_format",
    "json_schema",
    "schema",
    "stop",
    "logit_bias",
    "max_tokens",
    "prompt",
    "temperature",
    "stream",
    "stream_options",
    "chat_template_kwargs",
    "logprobs",
    "metadata",
    "instructions",
];

/// Words that some field knows.
const WORDS: [&str; 24] = [
    "",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "input_text",
    "output_text",
    "function",
    "thinking",
    "tool_use",
    "tool_result",
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "custom_tool_call",
    "image",
    "auto",
    "required",
    "json_schema",
    "enabled",
    "</think>",
];

fn any_json() -> impl Strategy<Value = Value> {
    let word = || prop::sample::select(WORDS.to_vec()).prop_map(|word| json!(word));
    let leaf = prop_oneof![
        4 => word(),
        1 => any::<bool>().prop_map(|x| json!(x)),
        1 => (-2i64..5).prop_map(|x| json!(x)),
        1 => any::<f64>().prop_map(|x| json!(x)),
        1 => Just(Value::Null),
        1 => "\\PC{0,6}".prop_map(|x| json!(x)),
    ];
    leaf.prop_recursive(5, 48, 6, |inner| {
        let name = prop::sample::select(NAMES.to_vec());
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            2 => prop::collection::vec((name, inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().map(|(n, v)| (n.to_owned(), v)).collect::<Map<_, _>>())),
        ]
    })
}

/// A body whose members have at least the right names.
fn body() -> impl Strategy<Value = Value> {
    let item = || prop::collection::vec(any_json(), 0..4).prop_map(Value::Array);
    let field = prop_oneof![
        (prop::sample::select(vec!["messages", "input", "tools", "system"]), item()),
        (prop::sample::select(NAMES.to_vec()), any_json()),
    ];
    prop::collection::vec(field, 0..6)
        .prop_map(|members| Value::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()))
}

proptest! {
    #[test]
    fn no_body_makes_a_parser_panic_and_what_is_taken_is_in_the_templates_shape(body in body()) {
        let _ = completions::parse(&body);
        let _ = tokens::parse(&body);
        let parsed = [
            chat::parse(&body).map(|(request, _)| request),
            responses::parse(&body).map(|(request, _)| request),
            anthropic::parse(&body).map(|(request, _)| request),
        ];
        for request in parsed.into_iter().flatten() {
            let Input::Chat(chat) = request.input else { panic!("a chat") };
            prop_assert!(normalize_messages(&chat.messages).is_ok(), "{}", chat.messages);
        }
    }
}

/// Events of an answer: texts and calls in any order.
fn answers() -> impl Strategy<Value = Vec<TurnEvent>> {
    let text = || prop::collection::vec("[a🌷\"\\\\\n]{1,4}", 1..4);
    let part = prop_oneof![
        text().prop_map(|texts| (0, texts)),
        text().prop_map(|texts| (1, texts)),
        text().prop_map(|texts| (2, texts)),
    ];
    let reason = prop::sample::select(vec![TurnReason::Stop, TurnReason::Length, TurnReason::ToolCalls]);
    (prop::collection::vec(part, 0..5), reason).prop_map(|(parts, reason)| {
        let mut events = vec![started()];
        let mut calls = 0;
        for (kind, texts) in parts {
            match kind {
                0 => events.extend(texts.into_iter().map(TurnEvent::Reasoning)),
                1 => events.extend(texts.into_iter().map(TurnEvent::Content)),
                _ => {
                    let index = calls;
                    calls += 1;
                    events.push(TurnEvent::CallBegun { index, id: format!("call_{index:024x}"), name: "f".into() });
                    let whole = json!({"x": texts.concat()}).to_string();
                    let middle = whole.ceil_char_boundary(whole.len() / 2);
                    for json in [&whole[..middle], &whole[middle..]] {
                        events.push(TurnEvent::Arguments { index, json: json.to_owned() });
                    }
                    events.push(TurnEvent::CallEnded { index, complete: true });
                }
            }
        }
        events.push(finished(reason));
        events
    })
}

/// The message that a client puts together from the chunks of a chat completion.
fn chat_message(events: &[Value]) -> Value {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::<Value>::new());
    let mut reason = Value::Null;
    for choice in events.iter().map(|event| &event["choices"][0]) {
        let delta = &choice["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                calls.push(json!({"id": call["id"], "type": call["type"], "function": call["function"]}));
            } else {
                let arguments = &mut calls[index]["function"]["arguments"];
                *arguments = json!(format!(
                    "{}{}",
                    arguments.as_str().unwrap(),
                    call["function"]["arguments"].as_str().unwrap()
                ));
            }
        }
        if !choice["finish_reason"].is_null() {
            assert!(reason.is_null(), "one reason");
            reason = choice["finish_reason"].clone();
        }
    }
    json!([content, reasoning, calls, reason])
}

/// The blocks that a client puts together from the events of a message.
fn blocks(events: &[Value]) -> Vec<Value> {
    let mut blocks: Vec<Value> = Vec::new();
    let mut input = String::new();
    let append = |value: &mut Value, more: &Value| {
        *value = json!(format!("{}{}", value.as_str().unwrap(), more.as_str().unwrap()))
    };
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                let block = blocks.last_mut().unwrap();
                let delta = &event["delta"];
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append(&mut block["text"], &delta["text"]),
                    "thinking_delta" => append(&mut block["thinking"], &delta["thinking"]),
                    "signature_delta" => append(&mut block["signature"], &delta["signature"]),
                    _ => input.push_str(delta["partial_json"].as_str().unwrap()),
                }
            }
            "content_block_stop" if !input.is_empty() => {
                blocks.last_mut().unwrap()["input"] = serde_json::from_str(&input).unwrap();
                input.clear();
            }
            _ => {}
        }
    }
    blocks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_put_together_is_the_whole_answer(events_of in answers()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = server(play(events_of));
            let ask = json!({"messages": [{"role": "user", "content": "Hi"}]});
            let mut streaming = ask.clone();
            streaming["stream"] = true.into();

            let whole = server.ok("/v1/chat/completions", ask.clone()).await;
            let found = events(&server.stream("/v1/chat/completions", streaming.clone()).await);
            let choice = &whole["choices"][0];
            let message = &choice["message"];
            let expected = json!([message["content"].as_str().unwrap_or_default(),
                message["reasoning_content"].as_str().unwrap_or_default(),
                message["tool_calls"].as_array().cloned().unwrap_or_default(), choice["finish_reason"]]);
            assert_eq!(chat_message(&found), expected);

            let whole = server.ok("/v1/messages", ask).await;
            let found = events(&server.stream("/v1/messages", streaming).await);
            assert_eq!(json!(blocks(&found)), whole["content"]);
            let count = |kind: &str| found.iter().filter(|event| event["type"] == kind).count();
            assert_eq!((count("message_start"), count("message_delta"), count("message_stop")), (1, 1, 1));
            assert_eq!(count("content_block_start"), count("content_block_stop"));

            let mut input = json!({"input": "Hi"});
            let whole = server.ok("/v1/responses", input.clone()).await;
            input["stream"] = true.into();
            let found = events(&server.stream("/v1/responses", input).await);
            let texts = |output: &Value| -> Vec<Value> {
                let text = |item: &Value| json!([item["type"], item["status"], item["content"][0]["text"], item["call_id"], item["arguments"]]);
                output.as_array().unwrap().iter().map(text).collect()
            };
            assert_eq!(texts(&found.last().unwrap()["response"]["output"]), texts(&whole["output"]));
            assert!(found.iter().enumerate().all(|(at, event)| event["sequence_number"] == at));
        });
    }
}
