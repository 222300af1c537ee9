use std::collections::HashMap;
use std::sync::LazyLock;

use lily_model::chat::{Chat, ChatTemplate};
use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;

/// An output and what it is, written by hand.
struct Case {
    name: String,
    tools: Value,
    in_thinking: bool,
    output: String,
    reply: Reply,
}

static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let corpus: Value = serde_json::from_str(include_str!("../../../../testdata/replies/corpus.json")).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let case = |case: &Value| Case {
        name: text(&case["name"]),
        tools: corpus["tools"][case["tools"].as_str().unwrap()].clone(),
        in_thinking: case["in_thinking"].as_bool().unwrap(),
        output: case["output"].as_array().unwrap().iter().map(text).collect::<Vec<_>>().join("\n"),
        reply: Reply {
            reasoning: text(&case["reasoning"]),
            content: text(&case["content"]),
            calls: case["calls"].as_array().into_iter().flatten().map(call).collect(),
        },
    };
    let cases: Vec<Case> = corpus["cases"].as_array().unwrap().iter().map(case).collect();
    assert!(cases.len() >= 60, "the corpus is not whole: {} cases", cases.len());
    cases
});

fn call(call: &Value) -> ToolCall {
    ToolCall {
        name: call["name"].as_str().unwrap().to_owned(),
        arguments: call["arguments"].as_str().map_or_else(|| call["arguments"].to_string(), str::to_owned),
        complete: call["complete"].as_bool().unwrap(),
    }
}

/// All events, those of one kind in a row as one, and the end. Checks the laws that hold for any output.
fn stream<'a>(
    in_thinking: bool,
    tools: &Value,
    pieces: impl IntoIterator<Item = &'a str>,
) -> (Vec<ReplyEvent>, ReplyEnd) {
    let mut parser = ReplyParser::new(in_thinking, tools);
    let mut events = Vec::new();
    for piece in pieces {
        events.extend(parser.push(piece));
        let held = format!("{}{}", parser.gap, parser.held);
        assert!(is_undecided(&held), "held back without need: {held:?}");
    }
    let (rest, end) = parser.finish();
    events.extend(rest);
    check_order(&events);
    let mut merged: Vec<ReplyEvent> = Vec::new();
    for event in events {
        use ReplyEvent::{Arguments, Content, Reasoning};
        match (merged.last_mut(), event) {
            (Some(Reasoning(a)), Reasoning(b)) | (Some(Content(a)), Content(b)) => a.push_str(&b),
            (Some(Arguments { json: a, .. }), Arguments { json: b, .. }) => a.push_str(&b),
            (_, event) => merged.push(event),
        }
    }
    (merged, end)
}

/// Calls are counted, and between begin and end of one is nothing but its arguments, which are JSON.
fn check_order(events: &[ReplyEvent]) {
    let mut begun = 0;
    let mut open: Option<String> = None;
    for event in events {
        match (event, &mut open) {
            (ReplyEvent::Reasoning(text) | ReplyEvent::Content(text), None) => assert!(!text.is_empty()),
            (ReplyEvent::CallBegun { index, .. }, None) => {
                assert_eq!(*index, begun);
                begun += 1;
                open = Some(String::new());
            }
            (ReplyEvent::Arguments { index, json }, Some(arguments)) => {
                assert!(*index == begun - 1 && !json.is_empty());
                arguments.push_str(json);
            }
            (ReplyEvent::CallEnded { index, .. }, Some(arguments)) => {
                assert_eq!(*index, begun - 1);
                assert!(serde_json::from_str::<Map<String, Value>>(arguments).is_ok(), "no JSON: {arguments}");
                open = None;
            }
            _ => panic!("out of order: {event:?} in {events:?}"),
        }
    }
    assert_eq!(open, None, "a call has no end");
}

/// Whether a text is white space, tags and the beginning of a tag: all that may be held back.
fn is_undecided(text: &str) -> bool {
    const TAGS: [&str; 6] = ["<think>", "</think>", "<tool_call>", "</tool_call>", "</function>", "</parameter>"];
    const NAMED: [&str; 2] = ["<function=", "<parameter="];
    let text = text.trim_start();
    let begins = |tag: &&str| tag.starts_with(text);
    if text.is_empty() || TAGS.iter().chain(&NAMED).any(begins) {
        return true;
    }
    if let Some(rest) = TAGS.iter().find_map(|tag| text.strip_prefix(tag)) {
        return is_undecided(rest);
    }
    let Some(name) = NAMED.iter().find_map(|tag| text.strip_prefix(tag)) else { return false };
    match name.split_once('>') {
        Some((name, rest)) => !name.contains('\n') && is_undecided(rest),
        None => !name.contains('\n'),
    }
}

fn reply(events: &[ReplyEvent]) -> Reply {
    let mut reply = Reply::default();
    reply.extend(events.iter().cloned());
    reply
}

#[test]
fn every_output_of_the_corpus_is_what_it_says() {
    let mut wrong = Vec::new();
    for case in CASES.iter() {
        let found = ReplyParser::parse(case.in_thinking, &case.tools, &case.output);
        if found != case.reply {
            wrong.push(format!("{}:\n{:?}\nfound    {found:?}\nexpected {:?}", case.name, case.output, case.reply));
        }
        let (events, end) = stream(case.in_thinking, &case.tools, [case.output.as_str()]);
        assert_eq!(reply(&events), found, "{}", case.name);
        // A cut call is the last one.
        let cut = case.reply.calls.last().is_some_and(|call| !call.complete);
        assert_eq!(end == ReplyEnd::Call, cut, "{}", case.name);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn every_two_way_split_and_single_characters_give_the_same() {
    for case in CASES.iter() {
        let output = case.output.as_str();
        let whole = stream(case.in_thinking, &case.tools, [output]);
        for at in (0..=output.len()).filter(|at| output.is_char_boundary(*at)) {
            let halves = stream(case.in_thinking, &case.tools, [&output[..at], &output[at..]]);
            assert_eq!(halves, whole, "{} cut at {at}", case.name);
        }
        let characters = output.char_indices().map(|(at, c)| &output[at..at + c.len_utf8()]);
        assert_eq!(stream(case.in_thinking, &case.tools, characters), whole, "{}", case.name);
    }
}

#[test]
fn a_text_streams_through_the_arguments() {
    let body = "let s = \"é\\n\"; // <tag>\n".repeat(400);
    let output = format!(
        "<tool_call>\n<function=write>\n<parameter=body>\n{body}\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n"
    );
    let tools = json!([{"type": "function", "function": {"name": "write", "parameters": {"type": "object",
        "properties": {"body": {"type": "string"}, "n": {"type": "integer"}}}}}]);
    let mut parser = ReplyParser::new(false, &tools);
    let mut pieces = Vec::new();
    for character in output.chars() {
        for event in parser.push(&character.to_string()) {
            if let ReplyEvent::Arguments { json, .. } = event {
                pieces.push(json);
            }
        }
    }
    // The break before each `<`, and each `<` itself, wait for the next character; nothing else does.
    assert!(pieces.len() > body.chars().count() * 9 / 10, "{} pieces", pieces.len());
    assert_eq!(pieces[..3], ["{\"body\":\"", "l", "e"]);
    assert!(pieces.iter().all(|piece| piece.chars().count() <= 4 || piece.contains(':')), "{pieces:?}");
    assert_eq!(pieces.concat(), json!({"body": body, "n": 5}).to_string());
}

#[test]
fn text_is_given_out_at_once() {
    let tools = json!([{"name": "f"}]);
    let mut parser = ReplyParser::new(true, &tools);
    let content = |text: &str| vec![ReplyEvent::Content(text.into())];
    assert_eq!(parser.push("so"), [ReplyEvent::Reasoning("so".into())]);
    assert_eq!(parser.push(" it</"), [ReplyEvent::Reasoning(" it".into())]);
    assert!(parser.in_reasoning());
    assert_eq!(parser.push("think>\n"), []);
    assert!(!parser.in_reasoning());
    assert_eq!(parser.push("yes <b"), content("yes <b"));
    assert_eq!(parser.push(">a</b> \n"), content(">a</b>"));
    assert_eq!(parser.push("<tool_call"), []);
    assert_eq!(parser.push("s>"), content(" \n<tool_calls>"));
    assert_eq!(parser.push("\n"), []);
    assert_eq!(parser.finish(), (content("\n"), ReplyEnd::Content));
}

#[test]
fn without_tools_only_think_tags_are_held_back() {
    let mut parser = ReplyParser::new(false, &Value::Null);
    assert_eq!(parser.push("a \n"), [ReplyEvent::Content("a \n".into())]);
    assert_eq!(parser.push("<tool_call"), [ReplyEvent::Content("<tool_call".into())]);
    assert_eq!(parser.finish(), (vec![], ReplyEnd::Content));
}

#[test]
fn the_end_says_where_the_output_stopped() {
    let tools = json!([{"name": "f"}]);
    let end = |in_thinking, output: &str| stream(in_thinking, &tools, [output]).1;
    assert_eq!(end(true, "hm"), ReplyEnd::Reasoning);
    assert_eq!(end(true, "hm</think>"), ReplyEnd::Content);
    assert_eq!(end(false, "<tool_call>\n<function=f>\n</function>"), ReplyEnd::Content);
    assert_eq!(end(true, "<tool_call>\n<function=f>\n</function>\n</tool_call>"), ReplyEnd::Reasoning);
    assert_eq!(end(true, "<tool_call>\n<function=f>\n<parameter=a>\n1"), ReplyEnd::Call);
}

/// Cuts `text` where `cuts` say, each a part of its length.
fn pieces<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut at: Vec<usize> = cuts.iter().map(|cut| *cut.get(&borders)).chain([0, text.len()]).collect();
    at.sort_unstable();
    at.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect()
}

/// Outputs of tags, parts of tags and words.
fn mixed() -> impl Strategy<Value = Vec<String>> {
    let tags = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "\n<tool_call>\n",
        "</tool_call>",
        "\n</tool_call>",
        "<function=f>",
        "<function=g>\n",
        "</function>",
        "\n</function>\n",
        "<parameter=s>",
        "<parameter=i>\n",
        "</parameter>",
        "\n</parameter>\n",
        "</para",
        "</",
        "<",
        ">",
        "\n",
        " ",
        "null",
        "5",
        "[1]",
        "\"",
        "\\",
        "é",
        "🌷",
        "\r",
    ]);
    let call = "<tool_call>\n<function=f>\n<parameter=s>\n";
    let part = prop_oneof![8 => tags.prop_map(str::to_owned), 2 => Just(call.to_owned()), 3 => "w[0-9]{6}"];
    prop::collection::vec(part, 0..24)
}

fn mixed_tools() -> Value {
    let properties =
        json!({"s": {"type": "string"}, "i": {"type": ["integer", "null"]}, "m": {"type": ["string", "null"]}});
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}])
}

fn json_value() -> impl Strategy<Value = Value> {
    let text = "[ab<>/\\n\\t\\\\\" é🌷{}]{0,12}";
    let leaf = prop_oneof![text.prop_map(Value::from), any::<i64>().prop_map(Value::from), Just(Value::Null)];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::hash_map("[a-z]{1,3}", inner, 0..3)
                .prop_map(|map: HashMap<String, Value>| map.into_iter().collect::<Map<_, _>>().into()),
        ]
    })
}

proptest! {
    #[test]
    fn any_split_of_the_corpus_gives_the_same(
        case in 0..CASES.len(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let case = &CASES[case];
        let whole = stream(case.in_thinking, &case.tools, [case.output.as_str()]);
        prop_assert_eq!(stream(case.in_thinking, &case.tools, pieces(&case.output, &cuts)), whole);
    }

    #[test]
    fn any_split_of_any_output_gives_the_same_and_no_word_is_lost(in_thinking: bool, with_tools: bool, parts in mixed()) {
        let tools = if with_tools { mixed_tools() } else { Value::Null };
        let output = parts.concat();
        let whole = stream(in_thinking, &tools, [output.as_str()]);
        prop_assert_eq!(&stream(in_thinking, &tools, parts.iter().map(String::as_str)), &whole);
        let characters = output.char_indices().map(|(at, c)| &output[at..at + c.len_utf8()]);
        prop_assert_eq!(&stream(in_thinking, &tools, characters), &whole);
        let all = format!("{:?}", whole.0);
        for word in parts.iter().filter(|part| part.starts_with('w')) {
            prop_assert!(all.contains(word.as_str()), "{word} is lost: {all}");
        }
    }

    /// The published template writes a turn with calls, and the parser reads it back.
    #[test]
    fn what_the_template_writes_is_read_back(
        reasoning in "[a-c<\\n é]{0,12}",
        content in "[a-c<\\n é]{0,12}",
        calls in prop::collection::vec(
            ("[ab<>/\\n\\r\\t\\\\\" é🌷{}0]{0,20}", json_value(), any::<Option<i64>>(), any::<bool>()), 0..3),
    ) {
        static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
            ChatTemplate::new(include_str!("../../../../testdata/qwen3.6/chat_template.jinja")).unwrap()
        });
        let properties = json!({"text": {"type": "string"}, "list": {"type": "array"}, "maybe": {"type": ["integer", "null"]}, "b": {"type": "boolean"}});
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]);
        let arguments: Vec<Value> = calls
            .into_iter()
            .map(|(text, value, maybe, b)| json!({"text": text, "list": [value], "maybe": maybe, "b": b}))
            .collect();
        let tool_calls: Vec<Value> =
            arguments.iter().map(|arguments| json!({"function": {"name": "f", "arguments": arguments}})).collect();
        let turn = json!({"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": tool_calls});
        let messages = json!([{"role": "user", "content": "q"}, turn]);
        let rendered = TEMPLATE.render_chat(&Chat { messages, ..Chat::default() }).unwrap();
        let output = rendered.text().split_once("<|im_start|>assistant\n<think>\n").unwrap().1;
        let found = ReplyParser::parse(true, &tools, output.strip_suffix("<|im_end|>\n").unwrap());
        prop_assert_eq!(found.reasoning, reasoning.trim());
        prop_assert_eq!(found.content, content.trim());
        let found_arguments: Vec<Value> =
            found.calls.iter().map(|call| serde_json::from_str(&call.arguments).unwrap()).collect();
        prop_assert_eq!(found_arguments, arguments);
        prop_assert!(found.calls.iter().all(|call| call.complete && call.name == "f"));
    }
}
