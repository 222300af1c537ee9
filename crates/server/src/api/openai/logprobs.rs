//! Log-probabilities in the forms of the three APIs.

use serde_json::{Map, Value, json};

use crate::turn::{TokenLogProb, TokenText};

/// OpenAI's stand-in for minus infinity, which JSON does not have.
const LEAST: f32 = -9999.0;

fn number(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob.max(LEAST) } else { LEAST })
}

/// One token as chat completions and responses have it.
pub(super) fn chat(entry: &TokenLogProb) -> Value {
    let one = |token: &TokenText, logprob: f32| json!({"token": token.text, "logprob": number(logprob), "bytes": token.bytes});
    let mut value = one(&entry.token, entry.logprob);
    value["top_logprobs"] = entry.top.iter().map(|(token, logprob)| one(token, *logprob)).collect();
    value
}

/// Tokens as completions have them. `offset` counts the characters before the first, and then those before the next.
pub(super) fn completion(entries: &[TokenLogProb], offset: &mut usize) -> Value {
    let mut offsets = Vec::with_capacity(entries.len());
    for entry in entries {
        offsets.push(*offset);
        *offset += entry.token.text.chars().count();
    }
    let top = |entry: &TokenLogProb| -> Value {
        let mut map = Map::new();
        for (token, logprob) in &entry.top {
            // Two tokens may read the same where both are parts of characters; the likelier stays.
            map.entry(token.text.clone()).or_insert_with(|| number(*logprob));
        }
        Value::Object(map)
    };
    json!({
        "tokens": entries.iter().map(|entry| &*entry.token.text).collect::<Vec<_>>(),
        "token_logprobs": entries.iter().map(|entry| number(entry.logprob)).collect::<Vec<_>>(),
        "top_logprobs": entries.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
