//! Messages of content blocks, brought into the words of chat completions.
//!
//! - Texts of a message, and blocks of the system prompt, are joined by an empty line.
//! - Results of tools become messages of their own, at their place. One that is an error begins with `Error: `. An image in
//!   one becomes a line that says so: the model has to know that it does not see it, and refusing it would end a
//!   conversation whose history it is in.
//! - Thinking becomes the reasoning of its message; redacted thinking is left out.
//! - `cache_control` and other members are ignored.
//! - The line about billing that Claude Code puts before its system prompt is left out. It is different in each request and
//!   would make every prompt a new one from its first line.

use serde_json::{Map, Value, json};

use crate::fields::{Fields, describe};
use crate::turn::TurnError;

type Result<T> = std::result::Result<T, TurnError>;

const BETWEEN: &str = "\n\n";

/// How the line about billing begins.
const BILLING: &str = "x-anthropic-billing-header:";

const NO_IMAGES: &str = "text: this model reads no images; leave the block out or describe it";

/// The messages of a request, its system prompt first.
pub(super) fn chat_messages(body: &Fields<'_>) -> Result<Value> {
    let mut out = Vec::new();
    let system = system(body)?;
    if !system.is_empty() {
        out.push(json!({"role": "system", "content": system}));
    }
    let Some(messages) = body.array("messages")?.filter(|messages| !messages.is_empty()) else {
        return body.refuse("messages", "an array of at least one message");
    };
    for (index, message) in messages.iter().enumerate() {
        let message = Fields::of(message, format!("messages[{index}]"))?;
        match message.string("role")? {
            Some("user") => user(&message, &mut out)?,
            Some("assistant") => out.push(assistant(&message)?),
            Some("system") => out.push(json!({"role": "system", "content": text_of(&message, "content")?})),
            _ => return message.refuse("role", "\"user\" or \"assistant\""),
        }
    }
    Ok(Value::Array(out))
}

fn system(body: &Fields<'_>) -> Result<String> {
    let texts = match body.get("system") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.as_str()],
        Some(_) => texts(body, "system")?,
    };
    Ok(join(texts.into_iter().filter(|text| !text.starts_with(BILLING))))
}

/// A content that is text alone.
fn text_of(fields: &Fields<'_>, name: &str) -> Result<String> {
    match fields.get(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Ok(join(texts(fields, name)?.into_iter())),
    }
}

fn texts<'a>(fields: &Fields<'a>, name: &str) -> Result<Vec<&'a str>> {
    let blocks = blocks(fields, name)?;
    blocks.iter().map(|block| if block.kind()? == "text" { block.text() } else { block.refuse_kind("text") }).collect()
}

fn join<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(BETWEEN)
}

fn user(message: &Fields<'_>, out: &mut Vec<Value>) -> Result<()> {
    if let Some(Value::String(text)) = message.get("content") {
        out.push(json!({"role": "user", "content": text}));
        return Ok(());
    }
    let mut pending: Vec<&str> = Vec::new();
    let flush = |pending: &mut Vec<&str>, out: &mut Vec<Value>| {
        if !pending.is_empty() {
            out.push(json!({"role": "user", "content": join(std::mem::take(pending).into_iter())}));
        }
    };
    let blocks = blocks(message, "content")?;
    for block in &blocks {
        match block.kind()? {
            "text" => pending.push(block.text()?),
            "document" => pending.push(block.document()?),
            "tool_result" => {
                flush(&mut pending, out);
                out.push(block.tool_result()?);
            }
            "image" => return block.refuse_image(),
            _ => return block.refuse_kind("text, tool_result or document"),
        }
    }
    if blocks.is_empty() {
        out.push(json!({"role": "user", "content": ""}));
    }
    flush(&mut pending, out);
    Ok(())
}

fn assistant(message: &Fields<'_>) -> Result<Value> {
    if let Some(Value::String(text)) = message.get("content") {
        return Ok(json!({"role": "assistant", "content": text}));
    }
    let (mut texts, mut thinking, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in &blocks(message, "content")? {
        match block.kind()? {
            "text" => texts.push(block.text()?),
            "thinking" => thinking.extend(block.0.string("thinking")?),
            "redacted_thinking" => {}
            "tool_use" => calls.push(block.tool_use()?),
            "image" => return block.refuse_image(),
            _ => return block.refuse_kind("text, thinking or tool_use"),
        }
    }
    let mut out = Map::new();
    out.insert("role".to_owned(), "assistant".into());
    out.insert("content".to_owned(), join(texts.into_iter()).into());
    if !thinking.is_empty() {
        out.insert("reasoning_content".to_owned(), join(thinking.into_iter()).into());
    }
    if !calls.is_empty() {
        out.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(Value::Object(out))
}

/// A content block.
struct Block<'a>(Fields<'a>);

fn blocks<'a>(fields: &Fields<'a>, name: &str) -> Result<Vec<Block<'a>>> {
    match fields.get(name) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => {
            let path = fields.path(name);
            let block = |(index, block)| Fields::of(block, format!("{path}[{index}]")).map(Block);
            list.iter().enumerate().map(block).collect()
        }
        Some(_) => fields.refuse(name, "a string or an array of content blocks"),
    }
}

impl<'a> Block<'a> {
    fn kind(&self) -> Result<&'a str> {
        self.0.required_string("type")
    }

    fn text(&self) -> Result<&'a str> {
        self.0.required_string("text")
    }

    fn refuse_kind<T>(&self, expected: &str) -> Result<T> {
        self.0.refuse("type", format!("a block of {expected}"))
    }

    fn refuse_image<T>(&self) -> Result<T> {
        self.0.refuse("type", NO_IMAGES)
    }

    /// A document that is text.
    fn document(&self) -> Result<&'a str> {
        let Some(source) = self.0.object("source")? else { return self.0.refuse("source", "a source of type text") };
        if source.string("type")? != Some("text") {
            return source.refuse("type", "\"text\": this server reads no other documents");
        }
        source.required_string("data")
    }

    fn tool_use(&self) -> Result<Value> {
        let name = self.0.required_string("name")?;
        if name.is_empty() {
            return self.0.refuse("name", "the name of a tool");
        }
        let input = match self.0.get("input") {
            None => json!({}),
            Some(input @ (Value::Object(_) | Value::String(_))) => input.clone(),
            Some(_) => return self.0.refuse("input", "an object"),
        };
        let id = self.0.string("id")?.unwrap_or_default();
        Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
    }

    fn tool_result(&self) -> Result<Value> {
        let text = match self.0.get("content") {
            Some(Value::String(text)) => text.clone(),
            _ => {
                let blocks = blocks(&self.0, "content")?;
                let texts: Vec<String> = blocks.iter().map(Block::result_text).collect::<Result<_>>()?;
                join(texts.iter().map(String::as_str))
            }
        };
        let text = if self.0.boolean("is_error")?.unwrap_or(false) { format!("Error: {text}") } else { text };
        let id = self.0.string("tool_use_id")?.unwrap_or_default();
        Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
    }

    /// A block of a tool's result as text.
    fn result_text(&self) -> Result<String> {
        match self.kind()? {
            "text" => Ok(self.text()?.to_owned()),
            kind @ ("image" | "document") => Ok(left_out(kind)),
            "tool_reference" => Ok(describe(self.0.get("tool_name").unwrap_or(&Value::Null))),
            _ => self.refuse_kind("text or image"),
        }
    }
}

/// What stands for what a tool returned and the model cannot read.
pub(in crate::api) fn left_out(kind: &str) -> String {
    format!("[{kind} left out: this model reads text only]")
}
