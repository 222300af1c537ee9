//! What users of other servers complained of, tried here as they would.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::whole::{ARGUMENTS, CALL, CHAT, Whole, ask, compact, says, tools, whole, whole_with};
use crate::Settings;
use crate::testing::{merged, text_model};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const COMPLETIONS: &str = "/v1/completions";

/// Prompt and cached tokens of an answer of any API.
fn prompt_tokens(answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    if usage.get("cache_read_input_tokens").is_some() {
        let cached = number(&usage["cache_read_input_tokens"]);
        return (number(&usage["input_tokens"]) + cached, cached);
    }
    let details = if usage.get("prompt_tokens").is_some() { "prompt" } else { "input" };
    (number(&usage[format!("{details}_tokens")]), number(&usage[format!("{details}_tokens_details")]["cached_tokens"]))
}

/// The same conversation, with thinking in its first answer, for each API.
fn with_earlier_thinking(thinking: &str) -> [(&'static str, Value); 3] {
    let (first, second) =
        (json!({"role": "user", "content": "A number?"}), json!({"role": "user", "content": "Which?"}));
    let chat = json!({"messages": [first, {"role": "assistant", "content": "Done.", "reasoning_content": thinking}, second],
        "enable_thinking": true});
    let blocks =
        json!([{"type": "thinking", "thinking": thinking, "signature": ""}, {"type": "text", "text": "Done."}]);
    let messages = json!({"messages": [first, {"role": "assistant", "content": blocks}, second], "max_tokens": 50,
        "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let reasoning =
        json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thinking}]});
    let responses = json!({"input": [first, reasoning, {"role": "assistant", "content": "Done."}, second]});
    [(CHAT, chat), (MESSAGES, messages), (RESPONSES, responses)]
}

#[tokio::test]
async fn thinking_of_earlier_turns_stays_where_it_is_asked_for() {
    let thinking = "The number is 73914 02586, and its last digit is 6.";
    let length = text_model().tokenizer.encode_text(thinking).unwrap().len() as u64;
    let lines = [json!({"output": "Yes."})];
    let plain = whole(&lines);
    let keeping = whole_with(&lines, Settings { preserve_thinking: Some(true), ..Settings::default() });
    for (path, body) in with_earlier_thinking(thinking) {
        let asked =
            async |server: &Whole, extra: Value| prompt_tokens(&server.ok(path, &merged(body.clone(), &extra)).await).0;
        let without = asked(&plain, json!({})).await;
        let with = asked(&plain, json!({"chat_template_kwargs": {"preserve_thinking": true}})).await;
        assert!((length..length + 8).contains(&(with - without)), "{path}: {without}, {with}");
        assert_eq!(asked(&plain, json!({"preserve_thinking": true})).await, with, "{path}");
        // As the server's own default, and against it.
        assert_eq!(asked(&keeping, json!({})).await, with, "{path}");
        assert_eq!(asked(&keeping, json!({"preserve_thinking": false})).await, without, "{path}");
    }
    let (_, chat) = with_earlier_thinking(thinking)[0].clone();
    let tokens = keeping.ok("/tokenize", &chat).await["tokens"].clone();
    let text = keeping.ok("/detokenize", &json!({"tokens": tokens})).await;
    assert!(text["content"].as_str().unwrap().contains(thinking));
    let counted = keeping.ok("/v1/messages/count_tokens", &with_earlier_thinking(thinking)[1].1).await;
    assert_eq!(counted["input_tokens"], tokens.as_array().unwrap().len());
}

#[tokio::test]
async fn a_thinking_budget_holds_on_every_api() {
    let server = says("<think>\none two three four five six seven eight nine ten\n</think>\n\nDone.");
    for (path, body) in [
        (CHAT, ask(json!({"thinking_budget": 4}))),
        (CHAT, ask(json!({"reasoning": {"max_tokens": 4}}))),
        (MESSAGES, ask(json!({"thinking": {"type": "enabled", "budget_tokens": 4}}))),
        (RESPONSES, json!({"input": "Hi", "reasoning": {"max_tokens": 4}})),
    ] {
        let answer = server.ok(path, &body).await.to_string();
        assert!(answer.contains("one two") && !answer.contains("nine") && answer.contains("Done."), "{path}: {answer}");
    }
}

#[tokio::test]
async fn what_is_accepted_acts_on_every_api() {
    let server = says("A fox sang.");
    let end = text_model().tokenizer.token_id(b"<|im_end|>").unwrap();
    for (path, body) in [
        (CHAT, ask(json!({"enable_thinking": false}))),
        (COMPLETIONS, json!({"prompt": "Once"})),
        (MESSAGES, ask(json!({}))),
        (RESPONSES, json!({"input": "Hi", "reasoning": {"effort": "none"}})),
    ] {
        let said = server.ok(path, &body).await.to_string();
        assert!(said.contains("A fox sang."), "{path}: {said}");
        let bias = json!({"logit_bias": {end.to_string(): 100}});
        let said = server.ok(path, &merged(body.clone(), &bias)).await.to_string();
        assert!(!said.contains("fox"), "{path}");
        for (extra, words) in [
            (json!({"n": 2}), "n: found 2"),
            (json!({"temperature": 9}), "temperature: found 9"),
            (json!({"top_p": 2}), "top_p: found 2"),
            (json!({"logit_bias": {"1": 101}}), "logit_bias: found 101"),
            (json!({"min_tokens": 3}), "min_tokens: found 3"),
        ] {
            let (status, answer) = server.json(path, &merged(body.clone(), &extra)).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {extra}");
            assert!(answer["error"]["message"].as_str().unwrap().starts_with(words), "{path}: {answer}");
        }
        let neutral = json!({"n": 1, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "presence_penalty": 0,
            "frequency_penalty": 0, "repetition_penalty": 1});
        server.ok(path, &merged(body, &neutral)).await;
    }
}

#[tokio::test]
async fn the_usage_of_a_stream_is_one_more_chunk_where_it_is_asked_for() {
    let server = says("A fox sang.");
    for (path, body) in [(CHAT, ask(json!({"enable_thinking": false}))), (COMPLETIONS, json!({"prompt": "Once"}))] {
        let with =
            server.events(path, &merged(body.clone(), &json!({"stream_options": {"include_usage": true}}))).await;
        let [before @ .., usage, done] = &with[..] else { panic!("{with:?}") };
        assert_eq!((&usage["choices"], done), (&json!([]), &json!("[DONE]")), "{path}");
        let (prompt, cached) = prompt_tokens(usage);
        assert!(prompt > 0 && cached < prompt && usage["usage"]["completion_tokens"].as_u64().unwrap() > 0, "{usage}");
        assert!(before.iter().all(|chunk| chunk["usage"].is_null() && !chunk["choices"][0].is_null()), "{path}");
        assert!(!before.last().unwrap()["choices"][0]["finish_reason"].is_null());
        let without = server.events(path, &body).await;
        assert_eq!(without.len(), with.len() - 1, "{path}");
        assert!(without.iter().all(|chunk| chunk.get("usage").is_none()), "{path}");
    }
}

#[tokio::test]
async fn stops_count_in_thinking_and_calls_and_over_their_borders() {
    let call =
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome END Italy\n</parameter>\n</function>\n</tool_call>";
    let server = says(&format!("<think>\nFirst, the END of it.\n</think>\n\nBefore the Goal.\n\n{call}"));
    for (stop, reasoning, content) in [
        (json!(["END"]), "First, the", ""),
        (json!("of it.\n</think>\n\nBefore"), "First, the END", ""),
        (json!("it.\n</think>"), "First, the END of", ""),
        (json!("First"), "", ""),
        (json!("the Goal"), "First, the END of it.", "Before"),
        (json!(["zz", "Goal.", "e the G", "efore", "fore the Goal!"]), "First, the END of it.", "B"),
        (json!(["nothing of it", "Goal. No"]), "First, the END of it.", "Before the Goal."),
    ] {
        let said = server.chat(ask(json!({"stop": stop}))).await;
        let (found, text) = (said.reasoning.trim_end(), said.content.split("\n\n<tool").next().unwrap().trim_end());
        assert_eq!((found, text, said.reason.as_str()), (reasoning, content, "stop"), "{stop}");
    }
    // What is left of a call that a stop cuts is JSON, and no call to run: the reason is not that of calls.
    let said = server.chat(ask(json!({"tools": tools(), "stop": "D Italy"}))).await;
    assert_eq!((said.calls[0].0.as_str(), said.reason.as_str()), ("weather", "stop"));
    assert_eq!(serde_json::from_str::<Value>(&said.calls[0].1).unwrap()["city"], "Rome EN");
}

#[tokio::test]
async fn log_probabilities_come_in_every_number_and_streamed_as_whole() {
    let server = says("A 🌷 fox!");
    for (top, extra) in [(0, json!({})), (5, json!({"presence_penalty": 1.5, "frequency_penalty": 1})), (20, json!({}))]
    {
        let body = merged(ask(json!({"logprobs": true, "top_logprobs": top, "enable_thinking": false})), &extra);
        let whole = server.ok(CHAT, &body).await["choices"][0]["logprobs"]["content"].clone();
        let entries = whole.as_array().unwrap();
        assert!(entries.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == top));
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry["bytes"].as_array().unwrap())
            .map(|b| b.as_u64().unwrap() as u8)
            .collect();
        assert!(bytes.starts_with("A 🌷 fox!".as_bytes()));
        let streamed: Vec<Value> = server
            .events(CHAT, &body)
            .await
            .iter()
            .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
            .collect();
        assert_eq!(&streamed, entries);
        let old =
            server.ok(COMPLETIONS, &json!({"prompt": "Once", "logprobs": top})).await["choices"][0]["logprobs"].clone();
        assert!(old["top_logprobs"].as_array().unwrap().iter().all(|map| map.as_object().unwrap().len() <= top));
        assert_eq!(old["tokens"].as_array().unwrap().len(), entries.len());
    }
    for (path, body) in [
        (CHAT, ask(json!({"logprobs": true, "top_logprobs": 21}))),
        (COMPLETIONS, json!({"prompt": "x", "logprobs": 21})),
    ] {
        assert_eq!(server.json(path, &body).await.0, StatusCode::BAD_REQUEST);
    }
}

#[tokio::test]
async fn a_format_leaves_room_for_tools_and_begins_with_the_json() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let formats = [
        json!({"type": "json_object"}),
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}),
    ];
    let answer = says("<think>\nHm {.\n</think>\n\n\n {\"a\": 1}");
    let call = says(&format!("<think>\nHm {{.\n</think>\n\n{CALL}"));
    for format in &formats {
        for think in [true, false] {
            let body = |extra: Value| {
                merged(ask(json!({"response_format": format, "enable_thinking": think, "max_tokens": 100})), &extra)
            };
            let thought = if think { "Hm {." } else { "" };
            for extra in [json!({}), json!({"tools": tools()})] {
                let said = answer.chat(body(extra)).await;
                assert!(said.content.starts_with('{'), "{said:?}");
                assert_eq!((said.reasoning.as_str(), said.reason.as_str()), (thought, "stop"));
            }
            let said = call.chat(body(json!({"tools": tools()}))).await;
            assert_eq!((said.content.as_str(), said.reason.as_str()), ("", "tool_calls"), "{said:?}");
            assert_eq!(compact(&said.calls[0].1), ARGUMENTS);
        }
    }
}

/// Tokens of a header and what a template puts at the beginning of an answer.
const TAIL: u64 = 8;
/// What the engine rather reads again than keeps a copy for.
const CUT: u64 = 32;

/// A conversation by a client who keeps only what an answer shows.
struct Talk {
    messages: Vec<Value>,
    think: bool,
    /// Whether nobody else asks.
    alone: bool,
    prompt: u64,
}

impl Talk {
    fn new(system: &str, think: bool) -> Talk {
        Talk { messages: vec![json!({"role": "system", "content": system})], think, alone: true, prompt: 0 }
    }

    async fn send(&self, server: &Whole) -> (String, u64, u64) {
        let body = json!({"messages": self.messages, "enable_thinking": self.think});
        let answer = server.ok(CHAT, &body).await;
        let (prompt, cached) = prompt_tokens(&answer);
        (answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned(), prompt, cached)
    }

    /// Asks, and checks that no more was read than is new.
    async fn ask(&mut self, server: &Whole, question: &str) {
        self.messages.push(json!({"role": "user", "content": question}));
        let (answer, prompt, cached) = self.send(server).await;
        if self.prompt > 0 {
            let most = prompt - self.prompt + TAIL + if self.alone { 0 } else { CUT };
            assert!(prompt - cached <= most, "{prompt} tokens, {cached} cached, {} before", self.prompt);
        }
        self.prompt = prompt;
        self.messages.push(json!({"role": "assistant", "content": answer}));
    }
}

#[tokio::test]
async fn six_turns_read_only_what_is_new() {
    let lines: Vec<Value> = (1..=6)
        .map(|turn| json!({"output": format!("<think>\nWhat comes {turn}th?\n</think>\n\nAnswer {turn}, and some words more.")}))
        .collect();
    let long = "You help with stories about foxes. ".repeat(60);
    // Short ones of less than 64 tokens, too.
    for (system, think) in [("", false), ("Be kind.", true), (&long, false), (&long, true)] {
        let server = whole(&lines);
        let mut talk = Talk::new(system, think);
        for turn in 1..=6 {
            talk.ask(&server, &format!("Question {turn}: and then?")).await;
        }
        // The last answer once more, and once more.
        talk.messages.pop();
        let (answer, prompt, cached) = talk.send(&server).await;
        assert_eq!(answer, "Answer 6, and some words more.");
        assert!(prompt - cached <= TAIL, "{prompt}, {cached}");
        let (again, _, cached) = talk.send(&server).await;
        assert!(again == answer && prompt - cached <= TAIL, "{prompt}, {cached}");
        // Another last question: only it is read.
        let question = talk.messages.pop().unwrap();
        talk.messages.push(json!({"role": "user", "content": "Something else altogether, please."}));
        let (_, prompt, cached) = talk.send(&server).await;
        assert!(prompt - cached <= 24 + TAIL, "{prompt}, {cached}");
        // The first way is still there.
        *talk.messages.last_mut().unwrap() = question;
        let (same, prompt, cached) = talk.send(&server).await;
        assert!(same == answer && prompt - cached <= TAIL + CUT, "{prompt}, {cached}");
    }
}

#[tokio::test]
async fn clients_in_turns_over_one_system_prompt_keep_what_is_theirs() {
    let lines: Vec<Value> = (1..=6).map(|turn| json!({"output": format!("Answer {turn}.")})).collect();
    let server = whole(&lines);
    let system = "You help with stories about foxes. ".repeat(100);
    let mut talks = [Talk::new(&system, false), Talk::new(&system, true)];
    for turn in 1..=6 {
        for (client, talk) in talks.iter_mut().enumerate() {
            talk.alone = false;
            talk.ask(&server, &format!("Client {client} asks for the {turn}th time.")).await;
        }
    }
    // Others who begin behind the same system prompt have it read.
    for question in ["A?", "B?", "A?", "B?"] {
        let mut other = Talk::new(&system, false);
        other.messages.push(json!({"role": "user", "content": question}));
        let (_, prompt, cached) = other.send(&server).await;
        assert!(prompt - cached <= 16 + TAIL && cached > 400, "{prompt}, {cached}");
    }
}
