//! The APIs: their paths, and what their handlers have in common.

pub mod anthropic;
pub mod openai;
pub mod options;
mod status;
pub mod thinking;
pub mod tokens;

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::answer::Answer;
use crate::errors::ApiError;
use crate::sse::{self, Surface};
use crate::turn::{Input, TurnError, TurnRequest};
use crate::turns::Running;
use crate::{App, ids};

/// All paths. Those of OpenAI's API are there without `/v1`, too: clients differ in what they take for the base.
pub(crate) fn routes() -> Router<Arc<App>> {
    let openai = Router::new()
        .route("/chat/completions", post(openai::chat::handle))
        .route("/completions", post(openai::completions::handle))
        .route("/responses", post(openai::responses::handle))
        .route("/models", get(openai::models::list))
        .route("/models/{*id}", get(openai::models::one));
    Router::new()
        .merge(openai.clone())
        .nest("/v1", openai)
        .route("/v1/messages", post(anthropic::handle))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(status::health))
        .route("/ready", get(status::ready))
        .route("/metrics", get(status::metrics))
        .route("/drain", post(status::drain))
}

/// Answers a request whose JSON was understood. `id` is the answer's name, for the log.
async fn respond(
    app: &App,
    mut request: TurnRequest,
    is_streamed: bool,
    surface: impl Surface,
    log: (&'static str, String),
) -> Result<Response, ApiError> {
    check(app, &request)?;
    if let Input::Chat(chat) = &mut request.input {
        app.settings.complete(chat);
    }
    let (api, id) = log;
    let running = Running::start(&*app.turns, request, api, id).await?;
    if is_streamed {
        return Ok(sse::response(running, surface, app.settings.heartbeat));
    }
    let answer = Answer::collect(running).await?;
    Ok(Json(surface.whole(answer)).into_response())
}

/// What needs the model to be checked.
fn check(app: &App, request: &TurnRequest) -> Result<(), TurnError> {
    let vocab = u32::try_from(app.turns.text().tokenizer.vocab_size()).unwrap_or(u32::MAX);
    request.sampling.check(vocab)?;
    if let Input::Tokens(ids) = &request.input
        && let Some(id) = ids.iter().find(|id| **id >= vocab)
    {
        return Err(TurnError::invalid("prompt", format!("token id {id}"), format!("ids below {vocab}")));
    }
    Ok(())
}

/// The name that answers carry: the request's, or the model's own.
fn model_name(app: &App, requested: Option<String>) -> String {
    requested.unwrap_or_else(|| app.turns.model().id.clone())
}

/// What an answer is named and when it was made.
#[derive(Clone, Debug)]
pub struct Heading {
    /// Unique among answers.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model as the request calls it.
    pub model: String,
}

impl Heading {
    fn new(app: &App, prefix: &str, requested: Option<String>) -> Heading {
        Heading { id: ids::new(prefix), created: ids::now(), model: model_name(app, requested) }
    }
}
