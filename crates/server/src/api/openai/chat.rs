//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use lily_model::chat::{Chat, normalize_messages};
use serde_json::{Map, Value, json};

use super::usage::finish_reason;
use super::{Style, logprobs};
use crate::App;
use crate::answer::{Answer, Call};
use crate::api::thinking::Thinking;
use crate::api::{Heading, options, respond};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::guard::{Received, read_json};
use crate::sse::{Around, Frames, Surface};
use crate::turn::{Input, TokenLogProb, TurnEnd, TurnError, TurnEvent, TurnRequest};

/// Where the text of thinking goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningField {
    /// `reasoning_content`.
    #[default]
    ReasoningContent,
    /// `reasoning`.
    Reasoning,
    /// Nowhere.
    Hidden,
}

impl ReasoningField {
    fn name(self) -> Option<&'static str> {
        match self {
            ReasoningField::ReasoningContent => Some("reasoning_content"),
            ReasoningField::Reasoning => Some("reasoning"),
            ReasoningField::Hidden => None,
        }
    }

    fn of(body: &Fields<'_>) -> Result<ReasoningField, TurnError> {
        const FORMATS: [(&str, ReasoningField); 6] = [
            ("auto", ReasoningField::ReasoningContent),
            ("deepseek", ReasoningField::ReasoningContent),
            ("reasoning_content", ReasoningField::ReasoningContent),
            ("reasoning", ReasoningField::Reasoning),
            ("parsed", ReasoningField::Reasoning),
            ("hidden", ReasoningField::Hidden),
        ];
        let excluded = match body.object("reasoning")? {
            Some(reasoning) => reasoning.boolean("exclude")?.unwrap_or(false),
            None => false,
        };
        let format = body.word("reasoning_format", &FORMATS)?.unwrap_or_default();
        Ok(if excluded { ReasoningField::Hidden } else { format })
    }
}

/// How the answer is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatStyle {
    style: Style,
    reasoning: ReasoningField,
    /// Chunks tell how much of the prompt is read.
    return_progress: bool,
    logprobs: bool,
}

/// Reads a request.
///
/// # Errors
/// For the sender to mend, with the field.
pub fn parse(body: &Value) -> Result<(TurnRequest, ChatStyle), TurnError> {
    let fields = Fields::of_body(body)?;
    options::refuse_unsupported(&fields)?;
    refuse_legacy(&fields)?;
    let messages = body["messages"].clone();
    normalize_messages(&messages)?;
    let tools = options::function_tools(&fields)?;
    let thinking = Thinking::of(&fields)?;
    let wants_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = options::logprob_count(&fields, "top_logprobs")?;
    if !wants_logprobs && top.is_some_and(|top| top > 0) {
        return fields.refuse("top_logprobs", "it together with \"logprobs\": true");
    }
    let chat = Chat {
        messages,
        tools: tools.clone(),
        enable_thinking: thinking.on,
        preserve_thinking: thinking.preserve,
        add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(true),
        variables: thinking.variables,
    };
    let request = TurnRequest {
        tool_choice: options::tool_choice(&fields, &tools)?,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        format: options::format(&fields, "response_format")?,
        sampling: options::sampling(&fields)?,
        stop: options::stop(&fields, "stop")?,
        max_tokens: options::max_tokens(&fields, &["max_tokens", "max_completion_tokens", "n_predict"])?,
        max_thinking_tokens: thinking.max_tokens,
        logprobs: wants_logprobs.then_some(top.unwrap_or(0)),
        affinity: options::affinity(&fields)?,
        ..TurnRequest::new(Input::Chat(chat))
    };
    let style = ChatStyle {
        style: Style::of(&fields)?,
        reasoning: ReasoningField::of(&fields)?,
        return_progress: fields.boolean("return_progress")?.unwrap_or(false),
        logprobs: wants_logprobs,
    };
    Ok((request, style))
}

/// The first form of tools, and answers that are not text.
fn refuse_legacy(fields: &Fields<'_>) -> Result<(), TurnError> {
    if fields.array("functions")?.is_some_and(|functions| !functions.is_empty()) {
        return fields.refuse("functions", "tools, which replaced them");
    }
    match fields.get("function_call") {
        None => {}
        Some(Value::String(word)) if word == "none" || word == "auto" => {}
        Some(_) => return fields.refuse("function_call", "tool_choice, which replaced it"),
    }
    let modalities = fields.array("modalities")?;
    if modalities.is_some_and(|list| list.iter().any(|kind| kind != "text")) {
        return fields.refuse("modalities", "[\"text\"]: the model writes nothing else");
    }
    Ok(())
}

pub(crate) async fn handle(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let Received { body, session } = read_json(&app, request).await?;
    let (request, style) = parse(&body)?;
    let heading = Heading::new(&app, "chatcmpl-", style.style.model.clone());
    let log = ("chat.completions", heading.id.clone());
    let is_streamed = style.style.stream;
    respond(&app, request.of_session(session), is_streamed, ChatSurface::new(heading, style), log).await
}

/// What parts of a streamed answer are called.
const CHUNK: &str = "chat.completion.chunk";

/// The form of one answer.
struct ChatSurface {
    heading: Heading,
    style: ChatStyle,
    /// Of tokens whose text is still to come.
    logprobs: Vec<Value>,
    /// Whether the whole prompt is read.
    is_read: bool,
    /// A part that has nothing but its delta: most have, and to write the rest of each again would cost more than the delta.
    part: Around,
}

impl ChatSurface {
    fn new(heading: Heading, style: ChatStyle) -> ChatSurface {
        let part = Around::of(|delta| style.style.chunk(&heading, CHUNK, json!([choice(delta)])));
        ChatSurface { heading, style, logprobs: Vec::new(), is_read: false, part }
    }

    fn chunk(&self, choices: Value) -> Value {
        self.style.style.chunk(&self.heading, CHUNK, choices)
    }

    fn take_logprobs(&mut self) -> Value {
        if self.style.logprobs {
            json!({"content": std::mem::take(&mut self.logprobs), "refusal": null})
        } else {
            Value::Null
        }
    }

    fn end(&mut self, end: &TurnEnd, out: &mut Frames) {
        let logprobs = if self.logprobs.is_empty() { Value::Null } else { self.take_logprobs() };
        let reason = finish_reason(&end.reason);
        let choice = json!({"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": reason});
        self.style.style.end(&self.heading, CHUNK, choice, end, out);
    }
}

impl Surface for ChatSurface {
    fn whole(&self, answer: Answer) -> Value {
        let calls: Vec<Value> = answer.calls().map(call_json).collect();
        let content = answer.content();
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        let is_null = content.is_empty() && !calls.is_empty();
        message.insert("content".to_owned(), if is_null { Value::Null } else { content.into() });
        message.insert("refusal".to_owned(), Value::Null);
        let reasoning = answer.reasoning();
        if let (Some(name), false) = (self.style.reasoning.name(), reasoning.is_empty()) {
            message.insert(name.to_owned(), reasoning.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        let logprobs = if self.style.logprobs {
            let content: Vec<Value> =
                answer.logprobs.iter().filter(|entry| entry.in_content).map(logprobs::chat).collect();
            json!({"content": content, "refusal": null})
        } else {
            Value::Null
        };
        let choice = json!({
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(&answer.end.reason),
        });
        super::whole(&self.heading, "chat.completion", choice, &answer.end)
    }

    fn event(&mut self, event: TurnEvent, out: &mut Frames) {
        match event {
            TurnEvent::Started { .. } => out.data_within(&self.part, &json!({"role": "assistant", "content": null})),
            TurnEvent::Progress { done, total } => {
                if self.style.return_progress && !self.is_read {
                    self.is_read = done >= total;
                    let mut chunk = self.chunk(json!([choice(json!({}))]));
                    chunk["prompt_progress"] = json!({"processed": done, "total": total});
                    out.data(&chunk);
                }
            }
            TurnEvent::Reasoning(text) => {
                if let Some(name) = self.style.reasoning.name() {
                    out.data_within(&self.part, &json!({name: text}));
                }
            }
            TurnEvent::Content(text) => {
                let delta = json!({"content": text});
                if !self.style.logprobs {
                    return out.data_within(&self.part, &delta);
                }
                let mut choice = choice(delta);
                choice["logprobs"] = self.take_logprobs();
                out.data(&self.chunk(json!([choice])));
            }
            TurnEvent::CallBegun { index, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": index, "id": id, "type": "function", "function": function});
                out.data_within(&self.part, &json!({"tool_calls": [call]}));
            }
            TurnEvent::Arguments { index, json: piece } => {
                let call = json!({"index": index, "function": {"arguments": piece}});
                out.data_within(&self.part, &json!({"tool_calls": [call]}));
            }
            TurnEvent::CallEnded { .. } => {}
            TurnEvent::LogProb(entry) => self.keep(&entry),
            TurnEvent::Finished(end) => self.end(&end, out),
        }
    }

    fn heartbeat(&mut self, out: &mut Frames) {
        out.comment("keep-alive");
    }

    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.openai());
    }
}

impl ChatSurface {
    fn keep(&mut self, entry: &TokenLogProb) {
        if entry.in_content {
            self.logprobs.push(logprobs::chat(entry));
        }
    }
}

/// The choice of a part.
fn choice(delta: Value) -> Value {
    json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null})
}

fn call_json(call: &Call) -> Value {
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}
