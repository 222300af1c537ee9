//! What can go wrong with a request, by who can act on it.

use std::fmt::Display;
use std::sync::Arc;

/// Why the engine refuses or fails. Cancelling is not an error: a cancelled generation finishes with
/// [`FinishReason::Cancelled`](crate::FinishReason::Cancelled).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A field of the request is out of its range; who sent the request can mend it.
    #[error("{field}: found {found}, allowed {allowed}")]
    BadRequest {
        /// Name of the field, as APIs spell it.
        field: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        allowed: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt_tokens} tokens, the context holds {context_tokens} with the answer: shorten the prompt \
         or start with a longer context"
    )]
    PromptTooLong {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// Capacity of the session.
        context_tokens: usize,
    },
    /// As many requests wait as may.
    #[error("{waiting} requests wait already: try again later")]
    Busy {
        /// How many wait.
        waiting: usize,
    },
    /// The constraint of the answer cannot go on.
    #[error("the constraint of the answer failed: {0}")]
    Constraint(String),
    /// The device refused or failed. All requests of the step share the error; others are not touched.
    #[error(transparent)]
    Backend(Arc<lily_backend::Error>),
}

/// Result of an engine call.
pub type Result<T> = std::result::Result<T, EngineError>;

impl From<lily_backend::Error> for EngineError {
    fn from(error: lily_backend::Error) -> EngineError {
        EngineError::Backend(Arc::new(error))
    }
}

impl EngineError {
    pub(crate) fn bad_request(field: &'static str, found: impl Display, allowed: impl Display) -> EngineError {
        EngineError::BadRequest { field, found: found.to_string(), allowed: allowed.to_string() }
    }
}
