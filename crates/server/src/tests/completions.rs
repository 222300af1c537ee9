//! `/v1/completions`.

use serde_json::{Value, json};

use crate::testing::{events, finished, hello, logprob, play, server, started, text_model};
use crate::turn::{Input, TurnEvent, TurnReason};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_whole_completion_and_its_stream_are_the_same_text() {
    let server = server(hello());
    let mut body = server.ok(PATH, json!({"model": "m", "prompt": "Say: ", "max_tokens": 5})).await;
    assert_eq!(server.turns.last().max_tokens, Some(5));
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    body.as_object_mut().unwrap().retain(|name, _| ["object", "model", "choices"].contains(&name.as_str()));
    let choice = json!({"index": 0, "text": "Hello", "logprobs": null, "finish_reason": "stop"});
    assert_eq!(body, json!({"object": "text_completion", "model": "m", "choices": [choice]}));
    let stream = json!({"prompt": "Say: ", "stream": true, "stream_options": {"include_usage": true}});
    let found = events(&server.stream(PATH, stream).await);
    let text: String = found.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "Hello");
    let reasons: Vec<&Value> =
        found.iter().map(|event| &event["choices"][0]["finish_reason"]).filter(|r| !r.is_null()).collect();
    assert_eq!(reasons, ["stop"]);
    assert_eq!(found[found.len() - 2]["usage"]["completion_tokens"], 9);
    assert_eq!(found.last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn a_prompt_is_one_text_or_one_list_of_tokens() {
    let server = server(hello());
    for (prompt, text, ids) in [
        (json!("a<think>"), Some("a<think>"), None),
        (json!(["a"]), Some("a"), None),
        (json!([1, 2, 3]), None, Some(vec![1, 2, 3])),
        (json!([[1, 2]]), None, Some(vec![1, 2])),
    ] {
        server.ok(PATH, json!({"prompt": prompt})).await;
        match server.turns.last().input {
            Input::Text(found) => assert_eq!((Some(found.as_str()), None), (text, ids)),
            Input::Tokens(found) => assert_eq!((None, Some(found)), (text, ids)),
            Input::Chat(_) => panic!("no chat"),
        }
    }
    for (prompt, message) in [
        (Value::Null, "prompt: found nothing"),
        (json!(""), "prompt: found \"\""),
        (json!([]), "prompt: found an empty array"),
        (json!([[]]), "prompt[0]: found an empty array"),
        (json!(["a", "b"]), "prompt: found 2 prompts, expected one prompt per request"),
        (json!([[1], [2]]), "prompt: found 2 prompts"),
        (json!([1, "a"]), "prompt[1]: found \"a\""),
        (json!([4_000_000]), "prompt: found token id 4000000"),
        (json!({"a": 1}), "prompt: found an object"),
    ] {
        let found = server.refusal(PATH, json!({"prompt": prompt})).await;
        assert!(found.starts_with(message), "{found}");
    }
}

#[tokio::test]
async fn an_echo_begins_with_the_prompt() {
    let server = server(hello());
    let ids = text_model().tokenizer.encode_text("A fox").unwrap();
    for prompt in [json!("A fox"), json!(ids)] {
        let body = json!({"prompt": prompt, "echo": true});
        assert_eq!(server.ok(PATH, body.clone()).await["choices"][0]["text"], "A foxHello");
        let mut stream = body;
        stream["stream"] = true.into();
        let found = events(&server.stream(PATH, stream).await);
        assert_eq!(found[0]["choices"][0]["text"], "A fox");
    }
    let refused = server.refusal(PATH, json!({"prompt": "a", "echo": true, "logprobs": 1})).await;
    assert!(refused.starts_with("echo: found true"), "{refused}");
    assert!(server.refusal(PATH, json!({"prompt": "a", "suffix": "b"})).await.starts_with("suffix: found \"b\""));
    assert!(server.refusal(PATH, json!({"prompt": "a", "best_of": 2})).await.starts_with("best_of: found 2"));
}

#[tokio::test]
async fn log_probabilities_have_the_old_form() {
    let server = server(play(vec![
        started(),
        logprob("né", true),
        TurnEvent::Content("né".into()),
        logprob("b", true),
        TurnEvent::Content("b".into()),
        finished(TurnReason::Length),
    ]));
    let body = json!({"prompt": "x", "logprobs": 5});
    let whole = server.ok(PATH, body.clone()).await;
    assert_eq!(server.turns.last().logprobs, Some(5));
    let top = |text: &str| json!({text: -0.5, "other": -9999.0});
    let expected = json!({"tokens": ["né", "b"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [top("né"), top("b")],
        "text_offset": [0, 2]});
    assert_eq!(whole["choices"][0]["logprobs"], expected);
    let mut stream = body;
    stream["stream"] = true.into();
    let found = events(&server.stream(PATH, stream).await);
    let offsets: Vec<Value> = found
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(offsets, [0, 2]);
    assert!(server.refusal(PATH, json!({"prompt": "x", "logprobs": 21})).await.starts_with("logprobs: found 21"));
}
