//! An answer as a response of items, whole or as events.

use serde_json::{Map, Value, json};

use super::super::logprobs;
use crate::answer::{Answer, Call, Part};
use crate::api::Heading;
use crate::errors::ApiError;
use crate::ids;
use crate::sse::{Frames, Surface};
use crate::turn::{TurnEnd, TurnEvent, TurnReason, Usage};

/// The form of one answer.
pub(super) struct ResponseSurface {
    heading: Heading,
    echo: Map<String, Value>,
    has_logprobs: bool,
    /// The number of the next event.
    sequence: u64,
    /// Items that are over.
    output: Vec<Value>,
    open: Option<Item>,
    /// Of tokens whose text is still to come.
    logprobs: Vec<Value>,
}

/// An item of the output.
struct Item {
    kind: Kind,
    id: String,
    /// Its text, or the arguments of the call.
    text: String,
    logprobs: Vec<Value>,
}

#[derive(Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { id: String, name: String },
}

impl Item {
    fn new(kind: Kind) -> Item {
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call { .. } => "fc_",
        };
        Item { kind, id: ids::new(prefix), text: String::new(), logprobs: Vec::new() }
    }

    /// The part that holds the text.
    fn part(&self) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}),
        }
    }

    /// The item; one that has just been added is without its text.
    fn json(&self, status: &str) -> Value {
        let parts = if status == "in_progress" { json!([]) } else { json!([self.part()]) };
        let Item { id, text, .. } = self;
        match &self.kind {
            Kind::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": parts})
            }
            Kind::Message => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": parts})
            }
            Kind::Call { id: call_id, name } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": text,
            }),
        }
    }
}

impl ResponseSurface {
    pub(super) fn new(heading: Heading, echo: Map<String, Value>, has_logprobs: bool) -> ResponseSurface {
        let (output, logprobs) = (Vec::new(), Vec::new());
        ResponseSurface { heading, echo, has_logprobs, sequence: 0, output, open: None, logprobs }
    }

    /// The response as it stands.
    fn response(&self, status: &str, output: &[Value]) -> Value {
        let mut response = Map::new();
        for (name, value) in [
            ("id", json!(self.heading.id)),
            ("object", json!("response")),
            ("created_at", json!(self.heading.created)),
            ("status", json!(status)),
            ("error", Value::Null),
            ("incomplete_details", Value::Null),
            ("model", json!(self.heading.model)),
            ("output", json!(output)),
        ] {
            response.insert(name.to_owned(), value);
        }
        response.extend(self.echo.clone());
        response.insert("usage".to_owned(), Value::Null);
        Value::Object(response)
    }

    /// The response at its end.
    fn ended(&self, end: &TurnEnd, output: &[Value]) -> Value {
        let is_cut = end.reason == TurnReason::Length;
        let mut response = self.response(if is_cut { "incomplete" } else { "completed" }, output);
        if is_cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = usage(&end.usage);
        response
    }

    fn send(&mut self, kind: &str, members: Value, out: &mut Frames) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        if let (Value::Object(event), Value::Object(members)) = (&mut event, members) {
            event.extend(members);
        }
        self.sequence += 1;
        out.typed(&event);
    }

    /// Where a part of an item is.
    fn place(&self, item: &Item, more: Value) -> Value {
        let mut place = json!({"item_id": item.id, "output_index": self.output.len()});
        if !matches!(item.kind, Kind::Call { .. }) {
            place["content_index"] = 0.into();
        }
        if let (Value::Object(place), Value::Object(more)) = (&mut place, more) {
            place.extend(more);
        }
        place
    }

    /// Opens an item of this kind unless one is open; closes another.
    fn open(&mut self, kind: Kind, out: &mut Frames) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", out);
        let item = Item::new(kind);
        let added = json!({"output_index": self.output.len(), "item": item.json("in_progress")});
        self.send("response.output_item.added", added, out);
        if !matches!(item.kind, Kind::Call { .. }) {
            let part = self.place(&item, json!({"part": item.part()}));
            self.send("response.content_part.added", part, out);
        }
        self.open = Some(item);
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut Frames) {
        let name = match kind {
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        let is_message = kind == Kind::Message;
        self.open(kind, out);
        let Some(mut item) = self.open.take() else { return };
        item.text.push_str(text);
        let mut delta = json!({"delta": text});
        if is_message {
            let logprobs = std::mem::take(&mut self.logprobs);
            delta["logprobs"] = json!(logprobs);
            item.logprobs.extend(logprobs);
        }
        let delta = self.place(&item, delta);
        self.send(name, delta, out);
        self.open = Some(item);
    }

    /// Ends the open item. A call that is cut stays without its last event: clients run a call when that comes.
    fn close(&mut self, status: &str, out: &mut Frames) {
        let Some(mut item) = self.open.take() else { return };
        if item.kind == Kind::Message {
            item.logprobs.append(&mut self.logprobs);
        }
        match &item.kind {
            Kind::Reasoning => {
                let done = self.place(&item, json!({"text": item.text}));
                self.send("response.reasoning_text.done", done, out);
            }
            Kind::Message => {
                let done = self.place(&item, json!({"text": item.text, "logprobs": item.logprobs}));
                self.send("response.output_text.done", done, out);
            }
            Kind::Call { name, .. } if status == "completed" => {
                let done = self.place(&item, json!({"name": name, "arguments": item.text}));
                self.send("response.function_call_arguments.done", done, out);
            }
            Kind::Call { .. } => {}
        }
        let is_call = matches!(item.kind, Kind::Call { .. });
        if !is_call {
            let part = self.place(&item, json!({"part": item.part()}));
            self.send("response.content_part.done", part, out);
        }
        let ended = item.json(status);
        if !is_call || status == "completed" {
            let done = json!({"output_index": self.output.len(), "item": ended});
            self.send("response.output_item.done", done, out);
        }
        self.output.push(ended);
    }

    fn end(&mut self, end: &TurnEnd, out: &mut Frames) {
        let is_cut = end.reason == TurnReason::Length;
        self.close(if is_cut { "incomplete" } else { "completed" }, out);
        let response = self.ended(end, &self.output);
        let kind = if is_cut { "response.incomplete" } else { "response.completed" };
        self.send(kind, json!({"response": response}), out);
    }
}

impl Surface for ResponseSurface {
    fn whole(&self, answer: Answer) -> Value {
        let is_cut = answer.end.reason == TurnReason::Length;
        let last = answer.parts.len().saturating_sub(1);
        let logprobs: Vec<Value> =
            answer.logprobs.iter().filter(|entry| entry.in_content).map(logprobs::chat).collect();
        let mut logprobs = Some(logprobs).filter(|_| self.has_logprobs);
        let mut output = Vec::with_capacity(answer.parts.len());
        for (index, part) in answer.parts.into_iter().enumerate() {
            let is_whole = !is_cut || index < last;
            let (kind, text, is_whole) = match part {
                Part::Reasoning(text) => (Kind::Reasoning, text, is_whole),
                Part::Content(text) => (Kind::Message, text, is_whole),
                Part::Call(Call { id, name, arguments, complete }) => (Kind::Call { id, name }, arguments, complete),
            };
            let logprobs = if kind == Kind::Message { logprobs.take() } else { None };
            let item = Item { text, logprobs: logprobs.unwrap_or_default(), ..Item::new(kind) };
            output.push(item.json(if is_whole { "completed" } else { "incomplete" }));
        }
        self.ended(&answer.end, &output)
    }

    fn event(&mut self, event: TurnEvent, out: &mut Frames) {
        match event {
            TurnEvent::Started { .. } => {
                let response = self.response("in_progress", &[]);
                self.send("response.created", json!({"response": response}), out);
                let response = self.response("in_progress", &[]);
                self.send("response.in_progress", json!({"response": response}), out);
            }
            TurnEvent::Reasoning(text) => self.text(Kind::Reasoning, &text, out),
            TurnEvent::Content(text) => self.text(Kind::Message, &text, out),
            TurnEvent::CallBegun { id, name, .. } => self.open(Kind::Call { id, name }, out),
            TurnEvent::Arguments { json: piece, .. } => {
                if let Some(Item { kind, .. }) = &self.open {
                    self.text(kind.clone(), &piece, out);
                }
            }
            TurnEvent::CallEnded { complete, .. } => {
                self.close(if complete { "completed" } else { "incomplete" }, out);
            }
            TurnEvent::LogProb(entry) if entry.in_content => self.logprobs.push(logprobs::chat(&entry)),
            TurnEvent::Progress { .. } | TurnEvent::LogProb(_) => {}
            TurnEvent::Finished(end) => self.end(&end, out),
        }
    }

    fn heartbeat(&mut self, out: &mut Frames) {
        // Comments do not reach the timer of Codex.
        let response = self.response("in_progress", &self.output);
        self.send("response.in_progress", json!({"response": response}), out);
    }

    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        self.close("incomplete", out);
        let mut response = self.response("failed", &self.output);
        let code = error.code.unwrap_or(error.openai_type());
        response["error"] = json!({"code": code, "message": error.message});
        self.send("response.failed", json!({"response": response}), out);
    }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
