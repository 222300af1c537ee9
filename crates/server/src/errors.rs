//! Errors as the APIs show them. Handlers return an [`ApiError`]; which shape it gets is decided in one place, by the
//! path of the request ([`shape_errors`]), so that unknown paths and refused keys look right, too.

use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::turn::TurnError;

/// A request that was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// Status of the response, if none has begun.
    pub status: StatusCode,
    /// What kind of error, for programs.
    pub code: Option<&'static str>,
    /// The field to blame.
    pub field: Option<String>,
    /// For the person who sends the request.
    pub message: String,
    /// When to try again.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// With this status and message.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, code: None, field: None, message: message.into(), retry_after: None }
    }

    fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// In the shape of OpenAI's API.
    pub fn openai(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.openai_type(),
            "param": self.field,
            "code": self.code,
        }})
    }

    /// The kind as OpenAI's API calls it.
    pub fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// In the shape of Anthropic's API.
    pub fn anthropic(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }

    fn render(&self, is_anthropic: bool) -> Response {
        let body = if is_anthropic { self.anthropic() } else { self.openai() };
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        if let Some(wait) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs_f64().ceil().max(1.0) as u64));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::GATEWAY_TIMEOUT {
            // The clients of both companies would start the same work again.
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response
    }
}

impl From<TurnError> for ApiError {
    fn from(error: TurnError) -> ApiError {
        let of = |status| ApiError::new(status, error.to_string());
        match &error {
            TurnError::Invalid { field, .. } => ApiError { field: field.clone(), ..of(StatusCode::BAD_REQUEST) },
            TurnError::PromptTooLong { .. } => of(StatusCode::BAD_REQUEST).with_code("context_length_exceeded"),
            TurnError::Busy { retry_after } => {
                let error = of(StatusCode::TOO_MANY_REQUESTS).with_code("rate_limit_exceeded");
                ApiError { retry_after: Some(*retry_after), ..error }
            }
            TurnError::ShuttingDown => {
                // Another server, or this one after its restart, may have answered by then.
                ApiError { retry_after: Some(Duration::from_secs(5)), ..of(StatusCode::SERVICE_UNAVAILABLE) }
            }
            TurnError::TimedOut(_) => of(StatusCode::GATEWAY_TIMEOUT).with_code("timeout"),
            TurnError::Failed(_) => of(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}

impl IntoResponse for ApiError {
    /// Without a body: [`shape_errors`] writes it.
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Whether a path belongs to Anthropic's API.
fn is_anthropic(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// The layer that gives errors the shape of the API whose path was asked for.
pub async fn shape_errors(request: Request, next: Next) -> Response {
    let is_anthropic = is_anthropic(request.uri().path());
    let mut response = next.run(request).await;
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let mut shaped = error.render(is_anthropic);
    if let Some(allow) = response.headers().get(header::ALLOW) {
        shaped.headers_mut().insert(header::ALLOW, allow.clone());
    }
    shaped
}

/// No such path.
pub async fn unknown_path(request: Request) -> ApiError {
    let path = request.uri().path();
    let hint = if path.ends_with("/chat/completions") || path.ends_with("/messages") || path.ends_with("/responses") {
        "; check the base URL of your client"
    } else {
        ""
    };
    let message = format!(
        "there is nothing at {path}{hint}. The server has /v1/chat/completions, /v1/completions, /v1/responses, \
         /v1/messages, /v1/models, /tokenize, /detokenize, /health, /ready and /metrics"
    );
    ApiError::new(StatusCode::NOT_FOUND, message).with_code("unknown_url")
}

/// A path that takes another method.
pub async fn wrong_method(request: Request) -> ApiError {
    let message = format!(
        "{} does not take {}; requests with a JSON body are sent with POST, what is only read with GET",
        request.uri().path(),
        request.method()
    );
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).with_code("method_not_allowed")
}
