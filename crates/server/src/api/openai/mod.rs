//! OpenAI's API: chat completions, completions, responses, models.

pub mod chat;
pub mod completions;
mod logprobs;
pub(super) mod models;
pub mod responses;
mod usage;

use crate::fields::Fields;
use crate::turn::TurnError;

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
}
