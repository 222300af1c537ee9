//! `/v1/completions`: a prompt as it stands, and how it goes on.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::usage::finish_reason;
use super::{Style, logprobs};
use crate::App;
use crate::answer::{Answer, Part};
use crate::api::{Heading, options, respond};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::guard::{Received, read_json};
use crate::sse::{Frames, Surface};
use crate::turn::{Input, TokenLogProb, TurnEnd, TurnError, TurnEvent, TurnRequest};

/// How the answer is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletionStyle {
    style: Style,
    /// The text begins with the prompt.
    echo: bool,
    logprobs: bool,
}

/// Reads a request.
///
/// # Errors
/// For the sender to mend, with the field.
pub fn parse(body: &Value) -> Result<(TurnRequest, CompletionStyle), TurnError> {
    let fields = Fields::of_body(body)?;
    options::refuse_unsupported(&fields)?;
    // OpenAI's clients know a number, some others a switch with the number beside it.
    let logprobs = match fields.get("logprobs") {
        Some(Value::Bool(false)) => None,
        Some(Value::Bool(true)) => Some(options::logprob_count(&fields, "top_logprobs")?.unwrap_or(0)),
        _ => options::logprob_count(&fields, "logprobs")?,
    };
    let echo = fields.boolean("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        return fields.refuse("echo", "no logprobs with it: those of the prompt are not computed");
    }
    let request = TurnRequest {
        format: options::format(&fields, "response_format")?,
        sampling: options::sampling(&fields)?,
        stop: options::stop(&fields, "stop")?,
        max_tokens: options::max_tokens(&fields, &["max_tokens", "max_completion_tokens", "n_predict"])?,
        logprobs,
        affinity: options::affinity(&fields)?,
        ..TurnRequest::new(prompt(&fields)?)
    };
    Ok((request, CompletionStyle { style: Style::of(&fields)?, echo, logprobs: logprobs.is_some() }))
}

/// One prompt: a text, the ids of tokens, or a list that has one of these.
fn prompt(fields: &Fields<'_>) -> Result<Input, TurnError> {
    const EXPECTED: &str = "a string or an array of token ids, not empty";
    const ONE: &str = "one prompt per request; send several requests";
    let Some(prompt) = fields.get("prompt") else { return fields.refuse("prompt", EXPECTED) };
    match prompt {
        Value::String(text) => one_text(fields, text),
        Value::Array(list) => match &list[..] {
            [] => fields.refuse("prompt", EXPECTED),
            [Value::String(text)] => one_text(fields, text),
            [Value::Array(ids)] if !ids.is_empty() => Ok(Input::Tokens(options::token_ids(&list[0], "prompt[0]")?)),
            [Value::String(_) | Value::Array(_), ..] if list.len() > 1 => {
                Err(TurnError::invalid("prompt", format!("{} prompts", list.len()), ONE))
            }
            _ => Ok(Input::Tokens(options::token_ids(prompt, "prompt")?)),
        },
        _ => fields.refuse("prompt", EXPECTED),
    }
}

fn one_text(fields: &Fields<'_>, text: &str) -> Result<Input, TurnError> {
    if text.is_empty() { fields.refuse("prompt", "at least one character") } else { Ok(Input::Text(text.to_owned())) }
}

pub(crate) async fn handle(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let Received { body, session } = read_json(&app, request).await?;
    let (request, style) = parse(&body)?;
    let heading = Heading::new(&app, "cmpl-", style.style.model.clone());
    let log = ("completions", heading.id.clone());
    let echo = match &request.input {
        _ if !style.echo => String::new(),
        Input::Text(text) => text.clone(),
        Input::Tokens(ids) => app.turns.text().tokenizer.decode(ids, false),
        Input::Chat(_) => String::new(),
    };
    let is_streamed = style.style.stream;
    let surface = CompletionSurface { heading, style, echo, logprobs: Vec::new(), offset: 0 };
    respond(&app, request.of_session(session), is_streamed, surface, log).await
}

/// What an answer and its parts are called.
const OBJECT: &str = "text_completion";

/// The form of one answer.
struct CompletionSurface {
    heading: Heading,
    style: CompletionStyle,
    /// What the text begins with.
    echo: String,
    /// Of tokens whose text is still to come.
    logprobs: Vec<TokenLogProb>,
    /// Characters of the text so far.
    offset: usize,
}

impl CompletionSurface {
    fn chunk(&self, choices: Value) -> Value {
        self.style.style.chunk(&self.heading, OBJECT, choices)
    }

    fn text(&mut self, text: &str) -> Value {
        let logprobs = self.take_logprobs();
        self.chunk(json!([{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": null}]))
    }

    fn take_logprobs(&mut self) -> Value {
        if self.logprobs.is_empty() {
            return Value::Null;
        }
        logprobs::completion(&std::mem::take(&mut self.logprobs), &mut self.offset)
    }

    fn end(&mut self, end: &TurnEnd, out: &mut Frames) {
        let logprobs = self.take_logprobs();
        let reason = finish_reason(&end.reason);
        let choice = json!({"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason});
        self.style.style.end(&self.heading, OBJECT, choice, end, out);
    }
}

impl Surface for CompletionSurface {
    fn whole(&self, answer: Answer) -> Value {
        let texts = answer.parts.iter().filter_map(|part| match part {
            Part::Reasoning(text) | Part::Content(text) => Some(text.as_str()),
            Part::Call(_) => None,
        });
        let text: String = std::iter::once(self.echo.as_str()).chain(texts).collect();
        let logprobs = if self.style.logprobs { logprobs::completion(&answer.logprobs, &mut 0) } else { Value::Null };
        let choice = json!({
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(&answer.end.reason),
        });
        super::whole(&self.heading, OBJECT, choice, &answer.end)
    }

    fn event(&mut self, event: TurnEvent, out: &mut Frames) {
        match event {
            TurnEvent::Started { .. } => {
                if !self.echo.is_empty() {
                    let echo = std::mem::take(&mut self.echo);
                    out.data(&self.text(&echo));
                }
            }
            TurnEvent::Reasoning(text) | TurnEvent::Content(text) => out.data(&self.text(&text)),
            TurnEvent::LogProb(entry) => self.logprobs.push(entry),
            TurnEvent::Finished(end) => self.end(&end, out),
            // A raw prompt has no calls.
            TurnEvent::Progress { .. }
            | TurnEvent::CallBegun { .. }
            | TurnEvent::Arguments { .. }
            | TurnEvent::CallEnded { .. } => {}
        }
    }

    fn heartbeat(&mut self, out: &mut Frames) {
        out.comment("keep-alive");
    }

    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.openai());
    }
}
