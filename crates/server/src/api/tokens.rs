//! `/tokenize` and `/detokenize`, which take the fields of llama.cpp's and of vLLM's.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use lily_engine::TextModel;
use lily_model::chat::Chat;
use lily_model::tokenizer::TokenizerError;
use serde_json::{Value, json};

use super::openai::chat;
use super::options::token_ids;
use crate::App;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::guard::{Received, read_json};
use crate::turn::{Input, TurnError};

/// What is to be tokenized.
#[derive(Clone, Debug)]
pub enum Text {
    /// As it stands; the switch says whether control tokens in it count.
    Plain(String, bool),
    /// A conversation.
    Chat(Box<Chat>),
}

/// Reads a request to tokenize: `content`, `text` or `prompt` with `parse_special`, or `messages` as in a chat completion.
/// The second is whether the tokens are wanted with their texts.
///
/// # Errors
/// For the sender to mend.
pub fn parse(body: &Value) -> Result<(Text, bool), TurnError> {
    let fields = Fields::of_body(body)?;
    let with_pieces = fields.boolean("with_pieces")?.or(fields.boolean("return_token_strs")?).unwrap_or(false);
    if fields.get("messages").is_some() {
        let Input::Chat(chat) = chat::parse(body)?.0.input else {
            return fields.refuse("messages", "messages");
        };
        return Ok((Text::Chat(Box::new(chat)), with_pieces));
    }
    for name in ["content", "text", "prompt"] {
        if let Some(text) = fields.string(name)? {
            let special = fields.boolean("parse_special")?.unwrap_or(true);
            return Ok((Text::Plain(text.to_owned(), special), with_pieces));
        }
    }
    fields.refuse("content", "a string, or messages")
}

pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (mut text, with_pieces) = parse(&read_json(&app, request).await?.body)?;
    if let Text::Chat(chat) = &mut text {
        app.settings.complete(chat);
    }
    let model = app.turns.text().clone();
    let ids = on_a_thread(move || match text {
        Text::Chat(chat) => count_chat(&model, &chat),
        Text::Plain(text, true) => model.tokenizer.encode_stock(&text).map_err(too_much),
        Text::Plain(text, false) => model.tokenizer.encode_text(&text).map_err(too_much),
    })
    .await?;
    let tokens = match with_pieces {
        false => json!(ids),
        true => ids.iter().map(|id| json!({"id": id, "piece": piece(app.turns.text(), *id)})).collect(),
    };
    Ok(Json(json!({"tokens": tokens, "count": ids.len(), "max_model_len": app.turns.model().context_tokens})))
}

/// The text of a token, or its bytes where they are no text.
fn piece(model: &TextModel, id: u32) -> Value {
    let bytes = model.tokenizer.token_bytes(id).unwrap_or_default();
    std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text))
}

pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let Received { body, .. } = read_json(&app, request).await?;
    let fields = Fields::of_body(&body)?;
    let Some(tokens) = fields.get("tokens") else {
        return fields.refuse("tokens", "an array of token ids").map_err(ApiError::from);
    };
    let ids = token_ids(tokens, "tokens")?;
    let tokenizer = &app.turns.text().tokenizer;
    if let Some(at) = ids.iter().position(|id| tokenizer.token_bytes(*id).is_none()) {
        let expected = format!("the id of a token, below {}", tokenizer.vocab_size());
        return Err(TurnError::invalid(format!("tokens[{at}]"), ids[at], expected).into());
    }
    let text = tokenizer.decode(&ids, false);
    Ok(Json(json!({"content": text, "prompt": text})))
}

/// The tokens that a conversation has as a prompt.
///
/// # Errors
/// For the sender to mend.
pub(super) fn count_chat(model: &TextModel, chat: &Chat) -> Result<Vec<u32>, TurnError> {
    let rendered = model.template.render_chat(chat)?;
    Ok(model.prompt(&rendered)?.ids)
}

fn too_much(error: TokenizerError) -> TurnError {
    TurnError::Invalid { field: None, message: error.to_string() }
}

/// Runs what takes long for long texts beside the threads that serve connections.
pub(super) async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, TurnError> + Send + 'static,
) -> Result<T, TurnError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(TurnError::Failed(format!("the text could not be tokenized: {error}"))))
}
