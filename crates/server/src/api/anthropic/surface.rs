//! An answer as a message of content blocks, whole or as events.

use serde_json::{Value, json};

use crate::answer::{Answer, Call, Part};
use crate::api::Heading;
use crate::errors::ApiError;
use crate::sse::{Frames, Surface};
use crate::turn::{TurnEnd, TurnEvent, TurnReason, Usage};

/// Clients send thinking back only if it is signed; nothing here checks it.
const SIGNATURE: &str = "bGlseQ==";

/// The form of one answer.
pub(super) struct MessageSurface {
    heading: Heading,
    /// The block that is open.
    open: Option<Kind>,
    /// Blocks that were opened.
    blocks: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    ToolUse,
}

impl MessageSurface {
    pub(super) fn new(heading: Heading) -> MessageSurface {
        MessageSurface { heading, open: None, blocks: 0 }
    }

    fn message(&self, content: Value, reason: Option<&TurnReason>, usage: Value) -> Value {
        json!({
            "id": self.heading.id,
            "type": "message",
            "role": "assistant",
            "model": self.heading.model,
            "content": content,
            "stop_reason": reason.map(stop_reason),
            "stop_sequence": reason.and_then(stop_sequence),
            "usage": usage,
        })
    }

    /// Opens a block of this kind unless one is open; closes another.
    fn open(&mut self, kind: Kind, block: Value, out: &mut Frames) {
        if self.open == Some(kind) && kind != Kind::ToolUse {
            return;
        }
        self.close(out);
        out.typed(&json!({"type": "content_block_start", "index": self.blocks, "content_block": block}));
        self.open = Some(kind);
        self.blocks += 1;
    }

    fn delta(&self, delta: Value, out: &mut Frames) {
        let index = self.blocks.saturating_sub(1);
        out.typed(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
    }

    fn close(&mut self, out: &mut Frames) {
        let Some(kind) = self.open else { return };
        if kind == Kind::Thinking {
            self.delta(json!({"type": "signature_delta", "signature": SIGNATURE}), out);
        }
        out.typed(&json!({"type": "content_block_stop", "index": self.blocks.saturating_sub(1)}));
        self.open = None;
    }

    fn end(&mut self, end: &TurnEnd, out: &mut Frames) {
        self.close(out);
        let delta = json!({"stop_reason": stop_reason(&end.reason), "stop_sequence": stop_sequence(&end.reason)});
        out.typed(&json!({"type": "message_delta", "delta": delta, "usage": usage(&end.usage)}));
        out.typed(&json!({"type": "message_stop"}));
    }
}

impl Surface for MessageSurface {
    fn whole(&self, answer: Answer) -> Value {
        let block = |part: &Part| match part {
            Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": SIGNATURE}),
            Part::Content(text) => json!({"type": "text", "text": text}),
            Part::Call(Call { id, name, arguments, .. }) => {
                let input: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!({"arguments": arguments}));
                json!({"type": "tool_use", "id": tool_use_id(id), "name": name, "input": input})
            }
        };
        let content = answer.parts.iter().map(block).collect();
        self.message(content, Some(&answer.end.reason), usage(&answer.end.usage))
    }

    fn event(&mut self, event: TurnEvent, out: &mut Frames) {
        match event {
            TurnEvent::Started { prompt_tokens } => {
                let counts = usage(&Usage { prompt_tokens, ..Usage::default() });
                let message = self.message(json!([]), None, counts);
                out.typed(&json!({"type": "message_start", "message": message}));
            }
            TurnEvent::Reasoning(text) => {
                self.open(Kind::Thinking, json!({"type": "thinking", "thinking": "", "signature": ""}), out);
                self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
            }
            TurnEvent::Content(text) => {
                self.open(Kind::Text, json!({"type": "text", "text": ""}), out);
                self.delta(json!({"type": "text_delta", "text": text}), out);
            }
            TurnEvent::CallBegun { id, name, .. } => {
                let block = json!({"type": "tool_use", "id": tool_use_id(&id), "name": name, "input": {}});
                self.open(Kind::ToolUse, block, out);
            }
            TurnEvent::Arguments { json: piece, .. } => {
                self.delta(json!({"type": "input_json_delta", "partial_json": piece}), out);
            }
            TurnEvent::CallEnded { .. } => self.close(out),
            TurnEvent::Progress { .. } | TurnEvent::LogProb(_) => {}
            TurnEvent::Finished(end) => self.end(&end, out),
        }
    }

    fn heartbeat(&mut self, out: &mut Frames) {
        out.typed(&json!({"type": "ping"}));
    }

    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        out.typed(&error.anthropic());
    }
}

fn tool_use_id(id: &str) -> String {
    format!("toolu_{}", id.strip_prefix("call_").unwrap_or(id))
}

fn stop_reason(reason: &TurnReason) -> &'static str {
    match reason {
        TurnReason::Stop => "end_turn",
        TurnReason::StopString(_) => "stop_sequence",
        TurnReason::Length => "max_tokens",
        TurnReason::ToolCalls => "tool_use",
    }
}

fn stop_sequence(reason: &TurnReason) -> Option<&str> {
    if let TurnReason::StopString(text) = reason { Some(text) } else { None }
}

/// Here, tokens of the prompt are those that no cache had.
fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    })
}
