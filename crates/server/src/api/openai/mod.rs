//! OpenAI's API: chat completions, completions, responses, models.

pub mod chat;
pub mod completions;
mod logprobs;
pub(super) mod models;
pub mod responses;
mod usage;

use serde_json::{Value, json};

use super::Heading;
use crate::fields::Fields;
use crate::sse::Frames;
use crate::turn::{TurnEnd, TurnError};
use usage::{timings, usage};

/// How an answer is to be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// The model as the request calls it.
    pub model: Option<String>,
    /// As events.
    pub stream: bool,
    /// With a last event that has the usage.
    pub include_usage: bool,
}

impl Style {
    fn of(body: &Fields<'_>) -> Result<Style, TurnError> {
        let stream_options = body.object("stream_options")?;
        let include_usage = stream_options.map_or(Ok(None), |options| options.boolean("include_usage"))?;
        Ok(Style {
            model: body.string("model")?.map(str::to_owned),
            stream: body.boolean("stream")?.unwrap_or(false),
            include_usage: include_usage.unwrap_or(false),
        })
    }

    /// A part of a streamed answer.
    fn chunk(&self, heading: &Heading, object: &str, choices: Value) -> Value {
        let Heading { id, created, model } = heading;
        let mut chunk = json!({"id": id, "object": object, "created": created, "model": model, "choices": choices});
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The end of a streamed answer, with its last choice.
    fn end(&self, heading: &Heading, object: &str, choice: Value, end: &TurnEnd, out: &mut Frames) {
        let mut last = self.chunk(heading, object, json!([choice]));
        last["timings"] = timings(end);
        last["seed"] = end.seed.into();
        out.data(&last);
        if self.include_usage {
            let mut counts = self.chunk(heading, object, json!([]));
            counts["usage"] = usage(&end.usage);
            out.data(&counts);
        }
        out.done();
    }
}

/// An answer as a whole, with its choice.
fn whole(heading: &Heading, object: &str, choice: Value, end: &TurnEnd) -> Value {
    let Heading { id, created, model } = heading;
    json!({
        "id": id,
        "object": object,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(&end.usage),
        "timings": timings(end),
        "seed": end.seed,
    })
}
