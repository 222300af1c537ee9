//! Counts and times at the end of an answer.

use std::time::Duration;

use serde_json::{Value, json};

use crate::turn::{TurnEnd, TurnReason, Usage};

pub(super) fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    })
}

/// What llama.cpp's server calls so; pages and routers read it.
pub(super) fn timings(end: &TurnEnd) -> Value {
    let milliseconds = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    let per_second = |tokens: usize, time: Duration| {
        if time.is_zero() { 0.0 } else { (tokens as f64 / time.as_secs_f64() * 100.0).round() / 100.0 }
    };
    let computed = end.usage.prompt_tokens - end.usage.cached_tokens.min(end.usage.prompt_tokens);
    json!({
        "cache_n": end.usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": milliseconds(end.to_first_token),
        "prompt_per_second": per_second(computed, end.to_first_token),
        "predicted_n": end.usage.completion_tokens,
        "predicted_ms": milliseconds(end.decode),
        // The first token belongs to the prompt's time.
        "predicted_per_second": per_second(end.usage.completion_tokens.saturating_sub(1), end.decode),
    })
}

pub(super) fn finish_reason(reason: &TurnReason) -> &'static str {
    match reason {
        TurnReason::Stop | TurnReason::StopString(_) => "stop",
        TurnReason::Length => "length",
        TurnReason::ToolCalls => "tool_calls",
    }
}
