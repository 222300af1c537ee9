//! Tool calls in a finished answer: the XML form of Qwen3.6 read back.
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! value, which may have several lines
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! A value is what stands between the line break after its opening tag and the line break before its closing tag,
//! nothing trimmed. It ends at the first closing tag that another parameter or the end of the function follows, so a
//! value may hold the text of tags. Values become JSON only where the tool's schema says that they are no strings.

use serde_json::{Map, Value};

/// A call that the model made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Its arguments, in the order of the answer.
    pub arguments: Map<String, Value>,
}

/// The tag that opens a call.
pub const TOOL_CALL_OPEN: &str = "<tool_call>";
const TOOL_CALL_CLOSE: &str = "</tool_call>";

/// The text of an answer before its first call, and its calls. `tools` is the list that was offered (or null), in the
/// format of OpenAI's API. A call whose form cannot be read stays in the text, with all that follows it.
pub fn split_tool_calls(answer: &str, tools: &Value) -> (String, Vec<ToolCall>) {
    let Some(first) = answer.find(TOOL_CALL_OPEN) else {
        return (answer.to_owned(), Vec::new());
    };
    let mut text = answer[..first].trim_end().to_owned();
    let mut calls = Vec::new();
    let mut rest = &answer[first..];
    while let Some(start) = rest.find(TOOL_CALL_OPEN) {
        let Some((call, after)) = read_call(&rest[start + TOOL_CALL_OPEN.len()..], tools) else {
            text.push_str(&rest[start..]);
            break;
        };
        calls.push(call);
        rest = after;
    }
    (text, calls)
}

/// Reads one call behind its opening tag; returns it and what follows.
fn read_call<'a>(text: &'a str, tools: &Value) -> Option<(ToolCall, &'a str)> {
    let text = text.trim_start().strip_prefix("<function=")?;
    let (name, mut text) = text.split_once('>')?;
    let mut arguments = Map::new();
    loop {
        text = text.trim_start();
        if let Some(after) = text.strip_prefix("</function>") {
            let after = after.trim_start();
            let after = after.strip_prefix(TOOL_CALL_CLOSE).unwrap_or(after);
            return Some((ToolCall { name: name.to_owned(), arguments }, after));
        }
        let (key, after) = text.strip_prefix("<parameter=")?.split_once('>')?;
        let value = after.strip_prefix('\n').unwrap_or(after);
        let (value, after) = split_value(value)?;
        arguments.insert(key.to_owned(), typed(value, schema(tools, name, key)));
        text = after;
    }
}

/// A value and what follows its closing tag.
fn split_value(text: &str) -> Option<(&str, &str)> {
    const CLOSE: &str = "</parameter>";
    text.match_indices(CLOSE).find_map(|(at, _)| {
        let after = &text[at + CLOSE.len()..];
        let next = after.trim_start();
        let ends = next.starts_with("<parameter=") || next.starts_with("</function>");
        let value = &text[..at];
        ends.then(|| (value.strip_suffix('\n').unwrap_or(value), after))
    })
}

/// The schema of a parameter, if the tool says one.
fn schema<'a>(tools: &'a Value, name: &str, key: &str) -> Option<&'a Value> {
    let function = |tool: &'a Value| tool.get("function").unwrap_or(tool);
    let tool = tools.as_array()?.iter().map(function).find(|f| f["name"] == name)?;
    tool.get("parameters")?.get("properties")?.get(key)
}

/// A value as its schema wants it; the text as it is where the schema allows a string, says nothing, or is not met.
fn typed(text: &str, schema: Option<&Value>) -> Value {
    let types: Vec<&str> = match schema.and_then(|s| s.get("type")) {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let as_text = || Value::String(text.to_owned());
    if types.contains(&"null") && text.trim() == "null" {
        return Value::Null;
    }
    if types.is_empty() || types.contains(&"string") {
        return as_text();
    }
    let lowered = text.trim();
    let value = match lowered {
        "True" => Ok(Value::Bool(true)),
        "False" => Ok(Value::Bool(false)),
        _ => serde_json::from_str(lowered),
    };
    let Ok(value) = value else { return as_text() };
    let fits = types.iter().any(|wanted| match *wanted {
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    });
    if fits { value } else { as_text() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tools() -> Value {
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
            "o": {"type": "object"}, "maybe": {"type": ["integer", "null"]}
        }}}}])
    }

    fn call(parameters: &[(&str, &str)]) -> String {
        let parameters: String =
            parameters.iter().map(|(k, v)| format!("<parameter={k}>\n{v}\n</parameter>\n")).collect();
        format!("<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>")
    }

    fn arguments(parameters: &[(&str, &str)]) -> Value {
        let (text, calls) = split_tool_calls(&call(parameters), &tools());
        assert_eq!((text.as_str(), calls.len()), ("", 1));
        Value::Object(calls[0].arguments.clone())
    }

    #[test]
    fn values_are_typed_by_the_schema_and_strings_never_change() {
        assert_eq!(
            arguments(&[
                ("s", "05"),
                ("i", "05"),
                ("n", "1e3"),
                ("b", "True"),
                ("o", "{\"a\": [1]}"),
                ("maybe", "null")
            ]),
            json!({"s": "05", "i": "05", "n": serde_json::from_str::<Value>("1e3").unwrap(), "b": true, "o": {"a": [1]}, "maybe": null})
        );
        assert_eq!(arguments(&[("i", "5.0"), ("unknown", "5")]), json!({"i": "5.0", "unknown": "5"}));
    }

    #[test]
    fn a_value_keeps_its_spaces_lines_quotes_and_tags() {
        for value in
            ["  a ", "\"/tmp/f\"", "a\nb\n", "", "x</parameter>y", "<parameter=s>\n</tool_call>", "a\r\nb\t\\n"]
        {
            assert_eq!(arguments(&[("s", value)]), json!({"s": value}));
        }
    }

    #[test]
    fn several_calls_follow_the_text_and_a_broken_one_stays_text() {
        let answer = format!("Let me see.\n\n{}\n{}", call(&[("i", "1")]), call(&[("i", "2")]));
        let (text, calls) = split_tool_calls(&answer, &tools());
        assert_eq!(text, "Let me see.");
        assert_eq!(calls.iter().map(|c| c.arguments["i"].clone()).collect::<Vec<_>>(), [json!(1), json!(2)]);
        let broken = "<tool_call>\n<function=f>\n<parameter=i>\n1";
        assert_eq!(split_tool_calls(broken, &tools()), (broken.to_owned(), Vec::new()));
        assert_eq!(split_tool_calls("no call", &tools()), ("no call".to_owned(), Vec::new()));
    }

    #[test]
    fn a_function_without_parameters_has_no_arguments() {
        assert_eq!(arguments(&[]), json!({}));
    }
}
