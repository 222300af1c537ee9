//! The HTTP side of lily: several APIs over one engine.
//!
//! A request of any API becomes a [`turn::TurnRequest`], in no API's words; what happens while it is answered comes back as
//! [`turn::TurnEvent`]s, which the API writes in its own form, streamed or whole. So rules about thinking, tools, formats and
//! stops stand in one place ([`turn`]), and a module of [`api`] knows only shapes of JSON. Who answers turns is a
//! [`turns::Turns`].

#![warn(missing_docs)]

pub mod answer;
mod answering;
pub mod api;
mod connection;
pub mod errors;
pub mod fields;
mod guard;
mod ids;
pub mod life;
mod metrics;
pub mod page;
pub mod replicas;
pub mod script;
pub mod service;
pub mod sse;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod trace;
pub mod turn;
pub mod turns;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::middleware::{self, Next};
use axum::response::Response;

pub use axum::Router;
pub use guard::{Hosts, Origins};
use lily_model::chat::Chat;
use turns::Turns;

/// How the server behaves towards clients.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The key that requests must carry; `None`: none.
    pub api_key: Option<String>,
    /// Longest body of a request.
    pub body_limit_bytes: usize,
    /// Web pages that may talk to the server.
    pub origins: Origins,
    /// Names by which it may be called.
    pub hosts: Hosts,
    /// Longest silence of a stream whose turn makes progress.
    pub heartbeat: Duration,
    /// Whether thinking of earlier turns stays in the prompt where the request does not say; `None`: the template decides.
    pub preserve_thinking: Option<bool>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            api_key: None,
            // A context of 262,144 tokens is about a megabyte of text; tools and escapes make it a few.
            body_limit_bytes: 32 << 20,
            origins: Origins::default(),
            hosts: Hosts::default(),
            // Proxies cut silent connections after 30 s or more.
            heartbeat: Duration::from_secs(5),
            preserve_thinking: None,
        }
    }
}

impl Settings {
    /// Adds what they say to a conversation that does not say it.
    fn complete(&self, chat: &mut Chat) {
        chat.preserve_thinking = chat.preserve_thinking.or(self.preserve_thinking);
    }
}

/// What handlers share.
pub(crate) struct App {
    pub(crate) turns: Arc<dyn Turns>,
    pub(crate) settings: Settings,
}

/// All of the APIs. `pages` are served beside them without a key: a page asks for it by itself.
pub fn router(turns: Arc<dyn Turns>, settings: Settings, pages: Router) -> Router {
    let cors = guard::cors(&settings.origins);
    let app = Arc::new(App { turns, settings });
    api::routes()
        .method_not_allowed_fallback(errors::wrong_method)
        .route_layer(middleware::from_fn_with_state(app.clone(), guard::ask_for_key))
        .route_layer(middleware::from_fn_with_state(app.clone(), guard::refuse_foreign_pages))
        .with_state(app.clone())
        .merge(pages)
        .fallback(errors::unknown_path)
        .layer(middleware::from_fn_with_state(app, guard::refuse_foreign_names))
        .layer(middleware::from_fn(errors::shape_errors))
        .layer(middleware::from_fn(name_request))
        .layer(cors)
}

/// Gives every response an id that bug reports can quote.
async fn name_request(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if let Ok(id) = HeaderValue::from_str(&ids::new("req_")) {
        // Anthropic's clients read the second.
        response.headers_mut().insert(HeaderName::from_static("x-request-id"), id.clone());
        response.headers_mut().insert(HeaderName::from_static("request-id"), id);
    }
    response
}
