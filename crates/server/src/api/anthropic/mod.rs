//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

mod messages;
mod surface;

pub(super) use messages::left_out;

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use lily_model::chat::Chat;
use serde_json::{Value, json};

use super::thinking::Thinking;
use super::tokens::{count_chat, on_a_thread};
use super::{Heading, options, respond};
use crate::App;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::guard::{Received, read_json};
use crate::turn::{Format, Input, ToolChoice, TurnError, TurnRequest};

/// How the answer is to be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageStyle {
    /// The model as the request calls it.
    pub model: Option<String>,
    /// As events.
    pub stream: bool,
}

/// Reads a request.
///
/// # Errors
/// For the sender to mend, with the field.
pub fn parse(body: &Value) -> Result<(TurnRequest, MessageStyle), TurnError> {
    let fields = Fields::of_body(body)?;
    options::refuse_unsupported(&fields)?;
    let (chat, max_thinking_tokens) = chat(&fields)?;
    let (tool_choice, parallel_tool_calls) = tool_choice(&fields, &chat.tools)?;
    let request = TurnRequest {
        tool_choice,
        parallel_tool_calls,
        format: format(&fields)?,
        sampling: options::sampling(&fields)?,
        stop: options::stop(&fields, "stop_sequences")?,
        max_tokens: options::max_tokens(&fields, &["max_tokens"])?,
        max_thinking_tokens,
        affinity: affinity(&fields)?,
        ..TurnRequest::new(Input::Chat(chat))
    };
    let style = MessageStyle {
        model: fields.string("model")?.map(str::to_owned),
        stream: fields.boolean("stream")?.unwrap_or(false),
    };
    Ok((request, style))
}

/// The conversation, and most tokens of thinking.
fn chat(fields: &Fields<'_>) -> Result<(Chat, Option<usize>), TurnError> {
    let thinking = Thinking::of(fields)?;
    let chat = Chat {
        messages: messages::chat_messages(fields)?,
        tools: tools(fields)?,
        // As this API has it: who does not ask for thinking gets none.
        enable_thinking: Some(thinking.on.unwrap_or(false)),
        preserve_thinking: thinking.preserve,
        add_generation_prompt: true,
        variables: thinking.variables,
    };
    Ok((chat, thinking.max_tokens))
}

/// Tools that the client runs. Those that Anthropic would run itself are left out.
fn tools(fields: &Fields<'_>) -> Result<Value, TurnError> {
    let Some(list) = fields.array("tools")? else { return Ok(Value::Null) };
    let mut tools = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        let tool = Fields::of(tool, format!("tools[{index}]"))?;
        let schema = tool.object("input_schema")?;
        let is_custom = tool.string("type")?.is_none_or(|kind| kind == "custom");
        if schema.is_none() && !is_custom {
            continue;
        }
        let name = tool.required_string("name")?;
        if name.is_empty() {
            return tool.refuse("name", "the name of a tool");
        }
        tools.push(options::as_function(name, tool.get("description"), tool.get("input_schema")));
    }
    Ok(if tools.is_empty() { Value::Null } else { Value::Array(tools) })
}

fn tool_choice(fields: &Fields<'_>, tools: &Value) -> Result<(ToolChoice, bool), TurnError> {
    #[derive(Clone, Copy)]
    enum Kind {
        Auto,
        Any,
        Tool,
        None,
    }
    const KINDS: [(&str, Kind); 4] =
        [("auto", Kind::Auto), ("any", Kind::Any), ("tool", Kind::Tool), ("none", Kind::None)];
    let Some(choice) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let choice = match choice.word("type", &KINDS)? {
        Some(Kind::Auto) => ToolChoice::Auto,
        Some(Kind::Any) => ToolChoice::Required,
        Some(Kind::None) => ToolChoice::None,
        Some(Kind::Tool) => ToolChoice::Function(choice.required_string("name")?.to_owned()),
        None => return choice.refuse("type", "\"auto\", \"any\", \"tool\" or \"none\""),
    };
    options::check_choice(&choice, tools)?;
    Ok((choice, parallel))
}

/// `output_config.format`, or `output_format` as it was called first.
fn format(fields: &Fields<'_>) -> Result<Format, TurnError> {
    match fields.object("output_config")? {
        Some(config) if config.get("format").is_some() => options::format(&config, "format"),
        _ => options::format(fields, "output_format"),
    }
}

/// Clients name the session in `metadata.user_id`.
fn affinity(fields: &Fields<'_>) -> Result<Option<String>, TurnError> {
    let Some(metadata) = fields.object("metadata")? else { return Ok(None) };
    Ok(metadata.string("user_id")?.map(str::to_owned))
}

pub(super) async fn handle(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let Received { body, session } = read_json(&app, request).await?;
    let (request, style) = parse(&body)?;
    let heading = Heading::new(&app, "msg_", style.model);
    let log = ("messages", heading.id.clone());
    respond(&app, request.of_session(session), style.stream, surface::MessageSurface::new(heading), log).await
}

pub(super) async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let Received { body, .. } = read_json(&app, request).await?;
    let (mut chat, _) = chat(&Fields::of_body(&body)?)?;
    app.settings.complete(&mut chat);
    let model = app.turns.text().clone();
    let ids = on_a_thread(move || count_chat(&model, &chat)).await?;
    Ok(Json(json!({"input_tokens": ids.len()})))
}
