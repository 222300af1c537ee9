//! `/v1/responses`, as far as it needs no storage: what Codex sends, and the events that it reads.

mod input;
mod surface;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use lily_model::chat::Chat;
use serde_json::{Map, Value, json};

use crate::App;
use crate::api::thinking::Thinking;
use crate::api::{Heading, options, respond};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::guard::{Received, read_json};
use crate::turn::{Input, ToolChoice, TurnError, TurnRequest};

/// How the answer is to be written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseStyle {
    /// The model as the request calls it.
    pub model: Option<String>,
    /// As events.
    pub stream: bool,
    /// What the response repeats of the request.
    echo: Map<String, Value>,
}

/// Reads a request.
///
/// # Errors
/// For the sender to mend, with the field.
pub fn parse(body: &Value) -> Result<(TurnRequest, ResponseStyle), TurnError> {
    let fields = Fields::of_body(body)?;
    options::refuse_unsupported(&fields)?;
    refuse_storage(&fields)?;
    let thinking = Thinking::of(&fields)?;
    let (tools, offered) = tools(&fields)?;
    let text = fields.object("text")?;
    let chat = Chat {
        messages: input::chat_messages(&fields)?,
        tools: tools.clone(),
        enable_thinking: thinking.on,
        preserve_thinking: thinking.preserve,
        add_generation_prompt: true,
        variables: thinking.variables,
    };
    let top = options::logprob_count(&fields, "top_logprobs")?;
    let includes = fields.array("include")?;
    let wants_logprobs = includes.is_some_and(|list| list.iter().any(|name| name == "message.output_text.logprobs"));
    let request = TurnRequest {
        tool_choice: tool_choice(&fields, &tools)?,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        format: text.as_ref().map_or(Ok(Default::default()), |text| options::format(text, "format"))?,
        sampling: options::sampling(&fields)?,
        stop: options::stop(&fields, "stop")?,
        max_tokens: options::max_tokens(&fields, &["max_output_tokens", "max_tokens"])?,
        max_thinking_tokens: thinking.max_tokens,
        logprobs: (wants_logprobs || top.is_some_and(|top| top > 0)).then_some(top.unwrap_or(0)),
        affinity: options::affinity(&fields)?,
        ..TurnRequest::new(Input::Chat(chat))
    };
    let style = ResponseStyle {
        model: fields.string("model")?.map(str::to_owned),
        stream: fields.boolean("stream")?.unwrap_or(false),
        echo: echo(&fields, offered),
    };
    Ok((request, style))
}

/// What would need earlier responses, or this one later.
fn refuse_storage(fields: &Fields<'_>) -> Result<(), TurnError> {
    const WHOLE: &str = "nothing: this server keeps no responses; send the whole conversation in input";
    for name in ["previous_response_id", "conversation", "prompt"] {
        if fields.get(name).is_some() {
            return fields.refuse(name, WHOLE);
        }
    }
    if fields.boolean("background")? == Some(true) {
        return fields.refuse("background", "false: this server keeps no responses");
    }
    Ok(())
}

/// The functions in the words of chat completions, and as they were offered. Tools of other types are left out: they are
/// OpenAI's to run, or need a grammar of their own.
fn tools(fields: &Fields<'_>) -> Result<(Value, Vec<Value>), TurnError> {
    let (mut tools, mut offered) = (Vec::new(), Vec::new());
    for (index, value) in fields.array("tools")?.into_iter().flatten().enumerate() {
        let tool = Fields::of(value, format!("tools[{index}]"))?;
        if tool.required_string("type")? != "function" {
            continue;
        }
        // Some clients nest as chat completions do.
        let function = tool.object("function")?.unwrap_or(tool);
        let name = function.required_string("name")?;
        if name.is_empty() {
            return function.refuse("name", "the name of a function");
        }
        tools.push(options::as_function(name, function.get("description"), function.get("parameters")));
        offered.push(value.clone());
    }
    let tools = if tools.is_empty() { Value::Null } else { Value::Array(tools) };
    Ok((tools, offered))
}

/// As in chat completions, with one more form: a choice among tools.
fn tool_choice(fields: &Fields<'_>, tools: &Value) -> Result<ToolChoice, TurnError> {
    if let Some(choice) = fields.get("tool_choice").filter(|choice| choice["type"] == "allowed_tools") {
        let allowed = choice["tools"].as_array().map_or(&[][..], Vec::as_slice);
        let choice = match (allowed, choice["mode"].as_str()) {
            ([one], Some("required")) => ToolChoice::Function(one["name"].as_str().unwrap_or_default().to_owned()),
            _ => {
                return fields
                    .refuse("tool_choice", "the mode \"required\" with one tool; else send only the tools allowed");
            }
        };
        options::check_choice(&choice, tools)?;
        return Ok(choice);
    }
    options::tool_choice(fields, tools)
}

/// The members of a response that repeat the request.
fn echo(fields: &Fields<'_>, offered: Vec<Value>) -> Map<String, Value> {
    let or = |name: &str, default: Value| fields.get(name).cloned().unwrap_or(default);
    let echo = json!({
        "instructions": or("instructions", Value::Null),
        "max_output_tokens": or("max_output_tokens", Value::Null),
        "metadata": or("metadata", json!({})),
        "parallel_tool_calls": or("parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": or("reasoning", json!({"effort": null, "summary": null})),
        "store": false,
        "background": false,
        "temperature": or("temperature", Value::Null),
        "text": or("text", json!({"format": {"type": "text"}})),
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": offered,
        "top_p": or("top_p", Value::Null),
        "truncation": "disabled",
        "user": or("user", Value::Null),
    });
    if let Value::Object(echo) = echo { echo } else { Map::new() }
}

pub(crate) async fn handle(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let Received { body, session } = read_json(&app, request).await?;
    let (request, style) = parse(&body)?;
    let heading = Heading::new(&app, "resp_", style.model);
    let log = ("responses", heading.id.clone());
    let surface = surface::ResponseSurface::new(heading, style.echo, request.logprobs.is_some());
    respond(&app, request.of_session(session), style.stream, surface, log).await
}
