//! What clients send, brought into the shape that the checkpoint's template takes.

use serde_json::{Map, Value, json};

use super::ChatError;
use super::python::strip;

/// Brings messages into the template's shape. The rules, in the order of the messages:
///
/// - `developer` is `system`. The system messages at the beginning become one, their trimmed texts joined by an
///   empty line; an empty one adds nothing.
/// - A system message after that becomes a user message at its place, its text between `<system>` and `</system>`
///   on lines of their own; an empty one is left out. At its place, not in the first message: what comes before
///   it stays as it was, and a cached prefix with it.
/// - `content` that is null or missing is empty; text parts are joined without a separator. Images and other
///   kinds of parts are refused: this engine reads text.
/// - `reasoning` is taken as `reasoning_content` unless that is there.
/// - `tool_calls` that is null is left out. The `arguments` of a call may be an object or JSON text of one; null,
///   missing or empty means none. Anything else is passed on as one parameter with the name `arguments`, so that
///   what a model wrote wrongly in an earlier turn does not end the conversation.
///
/// Other members of a message are kept.
///
/// # Errors
/// [`ChatError::NoMessages`], or [`ChatError::Input`] naming the message, what it holds and what to send instead.
pub fn normalize_messages(messages: &Value) -> Result<Vec<Value>, ChatError> {
    let messages = messages.as_array().ok_or_else(|| bad("messages", messages, "an array of messages"))?;
    let mut out: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut is_beginning = true;
    for (index, message) in messages.iter().enumerate() {
        let message = normalize_message(&format!("messages[{index}]"), message)?;
        if message["role"] != "system" {
            is_beginning = false;
            out.push(Value::Object(message));
            continue;
        }
        let text = message["content"].as_str().unwrap_or_default();
        match out.first_mut() {
            None => out.push(Value::Object(message)),
            Some(first) if is_beginning => {
                let mut texts = [first["content"].as_str().unwrap_or_default(), text].map(strip).to_vec();
                texts.retain(|text| !text.is_empty());
                first["content"] = texts.join("\n\n").into();
            }
            Some(_) if strip(text).is_empty() => {}
            Some(_) => {
                let text = format!("<system>\n{}\n</system>", strip(text));
                out.push(json!({ "role": "user", "content": text }));
            }
        }
    }
    if out.is_empty() { Err(ChatError::NoMessages) } else { Ok(out) }
}

/// Checks a list of tools; an empty one is null. Their text is not touched: it goes into the prompt in the order and
/// spelling of the request, with `required: null` or without `parameters` as it came.
///
/// # Errors
/// [`ChatError::Input`] if it is no array of objects.
pub fn normalize_tools(tools: &Value) -> Result<Value, ChatError> {
    match tools {
        Value::Null => Ok(Value::Null),
        Value::Array(list) if list.is_empty() => Ok(Value::Null),
        Value::Array(list) => match list.iter().position(|tool| !tool.is_object()) {
            None => Ok(tools.clone()),
            Some(index) => Err(bad(format!("tools[{index}]"), &list[index], "an object that describes a tool")),
        },
        other => Err(bad("tools", other, "an array of tools")),
    }
}

/// Whether a normalized message is a user's question: not only a tool's response sent as a user message. The
/// template's own rule.
pub(super) fn is_question(message: &Value) -> bool {
    let text = strip(message["content"].as_str().unwrap_or_default());
    message["role"] == "user" && !(text.starts_with("<tool_response>") && text.ends_with("</tool_response>"))
}

fn bad(field: impl Into<String>, found: &Value, expected: &'static str) -> ChatError {
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    ChatError::Input { field: field.into(), found, expected }
}

fn normalize_message(field: &str, message: &Value) -> Result<Map<String, Value>, ChatError> {
    const ROLES: &str = "one of system, developer, user, assistant and tool";
    let mut out = message.as_object().ok_or_else(|| bad(field, message, "a message object"))?.clone();
    let role = match &message["role"] {
        Value::String(role) => match role.as_str() {
            "developer" => "system",
            "system" | "user" | "assistant" | "tool" => role,
            _ => return Err(bad(format!("{field}.role"), &message["role"], ROLES)),
        },
        other => return Err(bad(format!("{field}.role"), other, ROLES)),
    };
    out.insert("role".to_owned(), role.into());
    out.insert("content".to_owned(), content_text(&format!("{field}.content"), &message["content"])?.into());
    if role == "assistant" {
        if let (false, Value::String(_)) = (message["reasoning_content"].is_string(), &message["reasoning"]) {
            out.insert("reasoning_content".to_owned(), message["reasoning"].clone());
        }
        match &message["tool_calls"] {
            Value::Null => drop(out.remove("tool_calls")),
            Value::Array(calls) => {
                let calls = calls
                    .iter()
                    .enumerate()
                    .map(|(index, call)| normalize_call(&format!("{field}.tool_calls[{index}]"), call))
                    .collect::<Result<_, _>>()?;
                out.insert("tool_calls".to_owned(), Value::Array(calls));
            }
            other => return Err(bad(format!("{field}.tool_calls"), other, "an array of calls")),
        }
    }
    Ok(out)
}

fn content_text(field: &str, content: &Value) -> Result<String, ChatError> {
    const MEDIA: &str = "text: this engine reads no images, video or audio; leave the part out or describe it";
    const PARTS: &str = "a part of the form {\"type\": \"text\", \"text\": ...}";
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                let field = format!("{field}[{index}]");
                match (&part["type"], &part["text"]) {
                    (Value::Null, Value::String(piece)) => text.push_str(piece),
                    (Value::String(kind), Value::String(piece)) if kind == "text" => text.push_str(piece),
                    (Value::String(kind), other) if kind == "text" => {
                        return Err(bad(format!("{field}.text"), other, "a string"));
                    }
                    (Value::String(kind), _) if ["image", "video", "audio"].iter().any(|m| kind.contains(m)) => {
                        return Err(bad(format!("{field}.type"), &part["type"], MEDIA));
                    }
                    (Value::Null, _) => return Err(bad(field, part, PARTS)),
                    (kind, _) => return Err(bad(format!("{field}.type"), kind, PARTS)),
                }
            }
            Ok(text)
        }
        other => Err(bad(field, other, "a string, an array of text parts, or null")),
    }
}

/// A call as `{"type": "function", "function": {"name", "arguments"}}` or bare, its arguments made an object.
fn normalize_call(field: &str, call: &Value) -> Result<Value, ChatError> {
    let mut out = call.clone();
    let (function, field) = match out.get_mut("function") {
        Some(function) => (function, format!("{field}.function")),
        None => (&mut out, field.to_owned()),
    };
    let Value::Object(function) = function else {
        return Err(bad(field, function, "an object with name and arguments"));
    };
    match function.get("name") {
        Some(Value::String(name)) if !name.is_empty() => {}
        other => return Err(bad(format!("{field}.name"), other.unwrap_or(&Value::Null), "the name of a function")),
    }
    let arguments = match function.get("arguments").unwrap_or(&Value::Null) {
        Value::String(text) if strip(text).is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| text.as_str().into()),
        other => other.clone(),
    };
    let arguments = match arguments {
        Value::Null => json!({}),
        Value::Object(_) => arguments,
        other => json!({ "arguments": other }),
    };
    function.insert("arguments".to_owned(), arguments);
    Ok(out)
}
