//! From a request to what the engine is asked, and from the engine's events to those of the turn: thinking, calls, formats, ends.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use lily_engine::{
    CancelToken, Event, FinishReason, Finished, GenerateRequest, Prompt, ReplyEvent, ReplyParser, Token,
};
use lily_model::chat::Rendered;
use serde_json::{Value, json};
use tokio::time::{Sleep, sleep_until};

use crate::ids;
use crate::service::{EngineEvent, EngineEvents, Shared, TurnInProgress};
use crate::trace;
use crate::turn::{
    Format, Input, TokenLogProb, TokenText, ToolChoice, TurnEnd, TurnError, TurnEvent, TurnReason, TurnRequest, Usage,
};
use crate::turns::{TokenAt, Told, TurnEvents};

/// Makes a call improbable without touching the prompt; the largest bias that requests may have.
const NEVER: f32 = -100.0;

/// Between signs of life while tokens give no text.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// A turn as the engine takes it, and what is needed to read its output.
pub(crate) struct Prepared {
    pub(crate) prompt: Prompt,
    pub(crate) request: GenerateRequest,
    cancel: CancelToken,
    /// `None`: all of the output is content.
    parser: Option<ReplyParser>,
    one_call: bool,
    logprobs: bool,
    asked: Instant,
    trace: Option<trace::Trace>,
}

/// Renders and tokenizes the prompt and builds the constraint. Takes its time.
pub(crate) fn prepare(shared: &Shared, turn: TurnRequest) -> Result<Prepared, TurnError> {
    let asked = Instant::now();
    let text = &shared.text;
    let (prompt, tools) = match &turn.input {
        Input::Chat(chat) => (text.prompt(&text.template.render_chat(chat)?)?, Some(chat.tools.clone())),
        Input::Text(prompt) => (text.prompt(&Rendered::by_hand(prompt.as_str()))?, None),
        Input::Tokens(ids) => {
            let branches = ids.len().checked_sub(1).filter(|last| *last > 0).into_iter().collect();
            (Prompt { ids: ids.clone(), branches, in_thinking: false }, None)
        }
    };
    let in_thinking = prompt.in_thinking && tools.is_some();
    let mut sampling = turn.sampling.clone();
    let offered = tools.as_ref().filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()));
    if offered.is_some() && turn.tool_choice == ToolChoice::None {
        let call = text.tokenizer.token_id(b"<tool_call>");
        sampling.logit_bias.get_or_insert_default().extend(call.map(|id| (id, NEVER)));
    }
    let request = GenerateRequest {
        sampling,
        stop: turn.stop.clone(),
        max_tokens: turn.max_tokens,
        logprobs: turn.logprobs,
        constraint: constraint(shared, &turn, in_thinking, offered)?,
        ..GenerateRequest::default()
    };
    let heard = if turn.tool_choice == ToolChoice::None { Value::Null } else { tools.clone().unwrap_or(Value::Null) };
    Ok(Prepared {
        cancel: request.cancel.clone(),
        parser: tools.map(|_| ReplyParser::new(in_thinking, &heard)),
        one_call: !turn.parallel_tool_calls,
        logprobs: turn.logprobs.is_some(),
        asked,
        trace: shared.settings.trace_dir.as_ref().map(|folder| trace::Trace::new(folder, &turn, &prompt)),
        prompt,
        request,
    })
}

fn constraint(
    shared: &Shared,
    turn: &TurnRequest,
    in_thinking: bool,
    tools: Option<&Value>,
) -> Result<Option<Box<dyn lily_engine::Constraint>>, TurnError> {
    let several = turn.parallel_tool_calls;
    let wrong = |field: &str| {
        let field = field.to_owned();
        move |reason: String| TurnError::Invalid { message: format!("{field}: {reason}"), field: Some(field) }
    };
    let schema = match &turn.format {
        Format::Text => None,
        Format::JsonObject => Some(json!({"type": "object"})),
        Format::JsonSchema(schema) => Some(schema.clone()),
    };
    let forced = match &turn.tool_choice {
        ToolChoice::Required => Some(None),
        ToolChoice::Function(name) => Some(Some(name.as_str())),
        ToolChoice::Auto | ToolChoice::None => None,
    };
    let grammar = match (forced, schema, tools) {
        (Some(only), _, tools) => {
            let calls = shared.grammars()?.calls(in_thinking, tools.unwrap_or(&Value::Null), only, several);
            Some(calls.map_err(wrong("tool_choice"))?)
        }
        (None, Some(schema), Some(tools)) if turn.tool_choice == ToolChoice::Auto => {
            let either = shared.grammars()?.json_or_calls(in_thinking, &schema, tools, several);
            Some(either.map_err(wrong("response_format"))?)
        }
        (None, Some(schema), _) => {
            Some(shared.grammars()?.json(in_thinking, &schema).map_err(wrong("response_format"))?)
        }
        (None, None, _) => None,
    };
    if grammar.is_none() && turn.max_thinking_tokens.is_none() {
        return Ok(None);
    }
    Ok(shared.grammars()?.constraint(in_thinking, turn.max_thinking_tokens, grammar))
}

/// A turn's events, made of the engine's when they are asked for: so the one task that a token wakes is the one that writes to the
/// client. Dropping it cancels the turn.
pub(crate) struct Answering {
    events: EngineEvents,
    reading: Reading,
    /// What was made and is not yet asked for.
    told: VecDeque<Told>,
    deadline: Option<tokio::time::Instant>,
    /// When the engine last said something.
    heard: tokio::time::Instant,
    alarm: Pin<Box<Sleep>>,
}

impl Answering {
    /// Needs a runtime, for its alarm.
    pub(crate) fn new(turn: TurnInProgress, prepared: Prepared, events: EngineEvents) -> Answering {
        let settings = &turn.0.settings;
        let deadline = settings.turn_limit.map(|limit| tokio::time::Instant::from_std(prepared.asked + limit));
        let heard = tokio::time::Instant::now();
        let started = Ok(TurnEvent::Started { prompt_tokens: prepared.prompt.ids.len() });
        Answering {
            events,
            reading: Reading::new(turn, prepared),
            told: VecDeque::from([started.into()]),
            deadline,
            heard,
            // Looks at once when it has to ring.
            alarm: Box::pin(sleep_until(heard)),
        }
    }

    fn hear(&mut self, event: Option<EngineEvent>) {
        self.heard = tokio::time::Instant::now();
        let (had_at, event) = event.map_or_else(
            || (Instant::now(), Err(TurnError::ShuttingDown)),
            |(had_at, event)| (had_at, event.map_err(TurnError::from)),
        );
        let token_at = TokenAt { engine: had_at, task: self.heard.into_std() };
        let mut token_at = matches!(event, Ok(Event::Token(_))).then_some(token_at);
        for event in self.reading.read(event) {
            // A sign of life is none of the token's.
            let token_at = if matches!(event, Ok(TurnEvent::Progress { .. })) { None } else { token_at.take() };
            self.told.push_back(Told { event, token_at });
        }
    }

    /// Ends the turn if it has taken too long; else sets the alarm again. Only here: not at every token.
    fn ring(&mut self) {
        let settings = &self.reading.turn.0.settings;
        let stalled = self.heard + settings.stall_limit;
        let limit = self.deadline.map_or(stalled, |deadline| deadline.min(stalled));
        if limit > tokio::time::Instant::now() {
            return self.alarm.as_mut().reset(limit);
        }
        let error = timed_out(settings.turn_limit.filter(|_| self.deadline == Some(limit)));
        self.reading.fail(&error);
        self.told.push_back(Err(error).into());
    }
}

impl TurnEvents for Answering {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Told>> {
        loop {
            if let Some(told) = self.told.pop_front() {
                return Poll::Ready(Some(told));
            }
            if self.reading.over {
                return Poll::Ready(None);
            }
            // Events that are there are taken before it is looked at the clock.
            match self.events.poll_recv(cx) {
                Poll::Ready(event) => self.hear(event),
                Poll::Pending => {
                    ready!(self.alarm.as_mut().poll(cx));
                    self.ring();
                }
            }
        }
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.reading.cancel.cancel();
        if !self.reading.over {
            self.reading.turn.0.metrics.abandoned();
        }
    }
}

fn timed_out(turn_limit: Option<Duration>) -> TurnError {
    TurnError::TimedOut(match turn_limit {
        Some(limit) => format!(
            "the answer took longer than the {} s that this server allows; ask for fewer tokens or raise --timeout",
            limit.as_secs()
        ),
        None => "the engine did nothing for this request for too long; the server's log may say why".into(),
    })
}

/// Makes events of the turn from those of the engine.
struct Reading {
    turn: TurnInProgress,
    parser: Option<ReplyParser>,
    cancel: CancelToken,
    one_call: bool,
    logprobs: bool,
    asked: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    reasoning_tokens: usize,
    /// The answer was ended behind its first call.
    enough: bool,
    over: bool,
    last_sign: Instant,
    trace: Option<trace::Trace>,
}

impl Reading {
    fn new(turn: TurnInProgress, prepared: Prepared) -> Reading {
        Reading {
            turn,
            parser: prepared.parser,
            cancel: prepared.cancel,
            one_call: prepared.one_call,
            logprobs: prepared.logprobs,
            asked: prepared.asked,
            first_token: None,
            last_token: None,
            reasoning_tokens: 0,
            enough: false,
            over: false,
            last_sign: Instant::now(),
            trace: prepared.trace,
        }
    }

    fn read(&mut self, event: Result<Event, TurnError>) -> Vec<Result<TurnEvent, TurnError>> {
        let events = match event {
            Ok(Event::PromptProgress { done, total }) => vec![TurnEvent::Progress { done, total }],
            Ok(Event::Token(token)) => self.token(token),
            Ok(Event::Finished(end)) => self.finish(end),
            Err(error) => {
                self.fail(&error);
                return vec![Err(error)];
            }
        };
        events.into_iter().map(Ok).collect()
    }

    fn token(&mut self, token: Token) -> Vec<TurnEvent> {
        if self.enough {
            return Vec::new();
        }
        let now = Instant::now();
        match self.last_token.replace(now) {
            Some(last) => self.turn.0.metrics.token(now - last),
            None => {
                self.first_token = Some(now);
                self.turn.0.metrics.first_token(now - self.asked);
            }
        }
        if let Some(trace) = &mut self.trace {
            trace.token(&token);
        }
        let mut events = Vec::new();
        let in_reasoning = self.parser.as_ref().is_some_and(ReplyParser::in_reasoning);
        self.reasoning_tokens += usize::from(in_reasoning);
        if self.logprobs
            && let Some(logprobs) = &token.logprobs
        {
            let text = |id: u32| self.token_text(id);
            events.push(TurnEvent::LogProb(TokenLogProb {
                token: text(token.id),
                logprob: logprobs.chosen,
                top: logprobs.top.iter().map(|(id, logprob)| (text(*id), *logprob)).collect(),
                in_content: !in_reasoning && self.parser.as_ref().is_none_or(|parser| parser.calls() == 0),
            }));
        }
        match &mut self.parser {
            Some(parser) => {
                let parts = parser.push(&token.text);
                self.parts(parts, &mut events);
            }
            None if token.text.is_empty() => {}
            None => events.push(TurnEvent::Content(token.text)),
        }
        if events.is_empty() && now - self.last_sign > SIGN_OF_LIFE {
            events.push(TurnEvent::Progress { done: 1, total: 1 });
        }
        if !events.is_empty() {
            self.last_sign = now;
        }
        events
    }

    fn token_text(&self, id: u32) -> TokenText {
        let bytes = self.turn.0.text.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        TokenText { text: String::from_utf8_lossy(&bytes).into_owned(), bytes }
    }

    fn parts(&mut self, parts: Vec<ReplyEvent>, events: &mut Vec<TurnEvent>) {
        for part in parts {
            if self.enough {
                return;
            }
            events.push(match part {
                ReplyEvent::Reasoning(text) => TurnEvent::Reasoning(text),
                ReplyEvent::Content(text) => TurnEvent::Content(text),
                ReplyEvent::CallBegun { index, name } => TurnEvent::CallBegun { index, id: ids::new("call_"), name },
                ReplyEvent::Arguments { index, json } => TurnEvent::Arguments { index, json },
                ReplyEvent::CallEnded { index, complete } => {
                    if self.one_call && complete {
                        self.enough = true;
                        self.cancel.cancel();
                    }
                    TurnEvent::CallEnded { index, complete }
                }
            });
        }
    }

    fn finish(&mut self, end: Finished) -> Vec<TurnEvent> {
        let mut events = Vec::new();
        if let Some(parser) = &mut self.parser {
            let (parts, _) = parser.finish();
            self.parts(parts, &mut events);
        }
        let has_calls = self.parser.as_ref().is_some_and(|parser| parser.calls() > 0);
        let reason = match &end.reason {
            _ if self.enough => TurnReason::ToolCalls,
            FinishReason::Length | FinishReason::ContextFull => TurnReason::Length,
            FinishReason::StopString(stop) => TurnReason::StopString(stop.clone()),
            FinishReason::StopToken(_) | FinishReason::Cancelled if has_calls => TurnReason::ToolCalls,
            FinishReason::StopToken(_) | FinishReason::Cancelled => TurnReason::Stop,
        };
        let now = Instant::now();
        let first_token = self.first_token.unwrap_or(now);
        let end = TurnEnd {
            reason,
            usage: Usage {
                prompt_tokens: end.prompt_tokens,
                cached_tokens: end.cached_tokens,
                completion_tokens: end.generated_tokens,
                reasoning_tokens: self.reasoning_tokens,
            },
            seed: end.seed,
            to_first_token: first_token - self.asked,
            decode: now - first_token,
        };
        self.over = true;
        self.turn.0.metrics.finished(&end);
        if let Some(trace) = self.trace.take() {
            trace.write(&Ok(&end));
        }
        events.push(TurnEvent::Finished(end));
        events
    }

    fn fail(&mut self, error: &TurnError) {
        self.over = true;
        self.turn.0.metrics.failed();
        if let Some(trace) = self.trace.take() {
            trace.write(&Err(error));
        }
    }
}
