//! A byte of switches and text as a model's output: no panic, the same result in one piece, by characters and by pieces
//! of a length that the first byte says, and arguments that are JSON.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lily_engine::{Reply, ReplyParser};
use serde_json::{Map, Value, json};

static TOOLS: LazyLock<Value> = LazyLock::new(|| {
    let properties = json!({"s": {"type": "string"}, "i": {"type": "integer"}, "m": {"type": ["string", "null"]}});
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}])
});

fuzz_target!(|input: &[u8]| {
    let Some((&switches, output)) = input.split_first() else { return };
    let output = String::from_utf8_lossy(output);
    let in_thinking = switches & 1 != 0;
    let tools = if switches & 2 != 0 { &*TOOLS } else { &Value::Null };
    let whole = ReplyParser::parse(in_thinking, tools, &output);
    for characters in [1, 1 + usize::from(switches >> 2)] {
        let mut parser = ReplyParser::new(in_thinking, tools);
        let mut reply = Reply::default();
        let mut rest = &*output;
        while let Some((last, _)) = rest.char_indices().take(characters).last() {
            let end = rest.ceil_char_boundary(last + 1);
            reply.extend(parser.push(&rest[..end]));
            rest = &rest[end..];
        }
        reply.extend(parser.finish().0);
        assert_eq!(reply, whole);
    }
    for call in &whole.calls {
        assert!(serde_json::from_str::<Map<String, Value>>(&call.arguments).is_ok(), "{}", call.arguments);
    }
});
