//! `/v1/models`: one model, in the words of both OpenAI's and Anthropic's API.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::App;
use crate::turns::ModelInfo;

pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let model = app.turns.model();
    Json(json!({
        "object": "list",
        "data": [entry(&model.id, model)],
        // Codex wants this list. An entry would replace its instructions for the model, so there is none: it then takes
        // those it has for models that it does not know.
        "models": [],
        "has_more": false,
        "first_id": model.id,
        "last_id": model.id,
    }))
}

/// Any name is one of the model.
pub(crate) async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Json<Value> {
    Json(entry(&id, app.turns.model()))
}

fn entry(id: &str, model: &ModelInfo) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": model.created,
        "owned_by": "lily",
        "max_model_len": model.context_tokens,
        "context_length": model.context_tokens,
        "type": "model",
        "display_name": id,
        "created_at": rfc3339(model.created),
    })
}

/// `2026-11-30T12:00:00Z`.
fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    // Years from March on, so that the day that leap years have more is their last; 1 March 0000 is 719,468 days before 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (400 * era + year, month + 3) } else { (400 * era + year + 1, month - 9) };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_796_040_000, "2026-11-30T12:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), date);
        }
    }
}
