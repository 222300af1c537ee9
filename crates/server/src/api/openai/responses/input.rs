//! Input items, brought into the messages of chat completions.
//!
//! - Reasoning, messages of the assistant and calls that follow each other are one turn of the assistant.
//! - Calls and results of custom tools are those of a function with one parameter `input`; calls of the local shell those of
//!   one with the parameters of their action.
//! - Items of tools that OpenAI runs, and of types that are not known, are left out.
//! - An image in the result of a tool becomes a line that says so; elsewhere it is refused.
//! - Without a message there is an empty one of the user's: clients ask so whether the server is there.

use serde_json::{Map, Value, json};

use crate::api::anthropic::left_out;
use crate::fields::Fields;
use crate::turn::TurnError;

type Result<T> = std::result::Result<T, TurnError>;

const NO_IMAGES: &str = "text: this model reads no images or files; leave the part out or describe it";

/// The messages of a request, its instructions first.
pub(super) fn chat_messages(body: &Fields<'_>) -> Result<Value> {
    let mut out = Messages::default();
    if let Some(instructions) = body.string("instructions")?.filter(|text| !text.is_empty()) {
        out.push(json!({"role": "system", "content": instructions}));
    }
    match body.get("input") {
        None => {}
        Some(Value::String(text)) => out.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                out.item(&Fields::of(item, format!("input[{index}]"))?)?;
            }
        }
        Some(_) => return body.refuse("input", "a string or an array of items"),
    }
    let mut messages = out.finish();
    if messages.iter().all(|message| message["role"] == "system") {
        messages.push(json!({"role": "user", "content": ""}));
    }
    Ok(Value::Array(messages))
}

#[derive(Default)]
struct Messages {
    done: Vec<Value>,
    /// A turn of the assistant that may go on.
    turn: Turn,
}

#[derive(Default)]
struct Turn {
    reasoning: String,
    content: String,
    calls: Vec<Value>,
}

impl Messages {
    /// A message of someone else.
    fn push(&mut self, message: Value) {
        self.end_turn();
        self.done.push(message);
    }

    fn end_turn(&mut self) {
        let Turn { reasoning, content, calls } = std::mem::take(&mut self.turn);
        if reasoning.is_empty() && content.is_empty() && calls.is_empty() {
            return;
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        message.insert("content".to_owned(), content.into());
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), reasoning.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        self.done.push(Value::Object(message));
    }

    fn finish(mut self) -> Vec<Value> {
        self.end_turn();
        self.done
    }

    fn item(&mut self, item: &Fields<'_>) -> Result<()> {
        match item.string("type")? {
            None | Some("message") => self.message(item),
            Some("reasoning") => {
                let content = joined(item, "content", "text")?;
                let text = if content.is_empty() { joined(item, "summary", "text")? } else { content };
                // Reasoning behind a message begins the next turn.
                if !self.turn.content.is_empty() || !self.turn.calls.is_empty() {
                    self.end_turn();
                }
                append(&mut self.turn.reasoning, &text);
                Ok(())
            }
            Some("function_call") => {
                let arguments = item.get("arguments").cloned().unwrap_or_else(|| json!({}));
                self.call(item, item.required_string("name")?, arguments)
            }
            Some("custom_tool_call") => {
                let input = item.string("input")?.unwrap_or_default();
                self.call(item, item.required_string("name")?, json!({"input": input}))
            }
            Some("local_shell_call") => {
                let action = item.object("action")?.map(|action| action.map().clone()).unwrap_or_default();
                self.call(item, "local_shell", Value::Object(action))
            }
            Some("function_call_output" | "custom_tool_call_output" | "local_shell_call_output") => {
                let id = item.string("call_id")?.unwrap_or_default();
                self.push(json!({"role": "tool", "tool_call_id": id, "content": output(item)?}));
                Ok(())
            }
            Some("item_reference") => item.refuse("type", "the item itself: this server keeps no responses"),
            Some(_) => Ok(()),
        }
    }

    fn call(&mut self, item: &Fields<'_>, name: &str, arguments: Value) -> Result<()> {
        if name.is_empty() {
            return item.refuse("name", "the name of a function");
        }
        let id = item.string("call_id")?.unwrap_or_default();
        let function = json!({"name": name, "arguments": arguments});
        self.turn.calls.push(json!({"id": id, "type": "function", "function": function}));
        Ok(())
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<()> {
        let text = content(item)?;
        match item.string("role")? {
            Some("assistant") => {
                // The template has calls behind the text.
                if !self.turn.calls.is_empty() {
                    self.end_turn();
                }
                append(&mut self.turn.content, &text);
            }
            Some(role @ ("user" | "system" | "developer")) => self.push(json!({"role": role, "content": text})),
            _ => return item.refuse("role", "\"user\", \"assistant\", \"system\" or \"developer\""),
        }
        Ok(())
    }
}

fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

/// The text of a message: a string, or parts, which are joined without anything between.
fn content(item: &Fields<'_>) -> Result<String> {
    if let Some(Value::String(text)) = item.get("content") {
        return Ok(text.clone());
    }
    let mut text = String::new();
    for (index, part) in item.array("content")?.into_iter().flatten().enumerate() {
        let part = Fields::of(part, item.path(&format!("content[{index}]")))?;
        match part.required_string("type")? {
            "input_text" | "output_text" | "text" => text.push_str(part.required_string("text")?),
            "refusal" => text.push_str(part.string("refusal")?.unwrap_or_default()),
            "input_image" | "input_file" | "input_audio" => return part.refuse("type", NO_IMAGES),
            _ => return part.refuse("type", "\"input_text\" or \"output_text\""),
        }
    }
    Ok(text)
}

/// The result of a call.
fn output(item: &Fields<'_>) -> Result<String> {
    let parts = match item.get("output") {
        None => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        // Something else that a tool returned, as it came.
        Some(other) => return Ok(other.to_string()),
    };
    let mut text = String::new();
    for part in parts {
        let line = match (part["type"].as_str(), part["text"].as_str()) {
            (_, Some(text)) => text.to_owned(),
            (Some("input_image" | "image"), None) => left_out("image"),
            (Some("input_file"), None) => left_out("file"),
            _ => part.to_string(),
        };
        append(&mut text, &line);
    }
    Ok(text)
}

/// The texts in a list of parts.
fn joined(item: &Fields<'_>, list: &str, member: &str) -> Result<String> {
    let mut text = String::new();
    for (index, part) in item.array(list)?.into_iter().flatten().enumerate() {
        let part = Fields::of(part, item.path(&format!("{list}[{index}]")))?;
        append(&mut text, part.string(member)?.unwrap_or_default());
    }
    Ok(text)
}
