//! Whether the server lives, wants requests, and what it counts.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::App;
use crate::turns::Readiness;

/// 200 while the process can answer; a server that finishes its work before it stops is alive.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.turns.readiness() {
        Readiness::Failed(reason) => unavailable("failed", &reason),
        _ => Json(json!({"status": "ok", "model": app.turns.model().id})).into_response(),
    }
}

/// 200 while requests should come here.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.turns.readiness() {
        Readiness::Ready => Json(json!({"status": "ready"})).into_response(),
        Readiness::Draining => unavailable("draining", "the server finishes its requests and takes no more"),
        Readiness::Failed(reason) => unavailable("failed", &reason),
    }
}

/// Takes no more requests from now on; those that were accepted go on. `in_progress` says how many are left, also when asked
/// again.
pub(super) async fn drain(State(app): State<Arc<App>>) -> Response {
    app.turns.drain();
    Json(json!({"status": "draining", "in_progress": app.turns.in_progress()})).into_response()
}

fn unavailable(status: &str, reason: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": status, "reason": reason}))).into_response()
}

/// For Prometheus.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.turns.metrics()).into_response()
}
