//! Who may ask, from where, by which name of the server, and with how long a body.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

use crate::App;
use crate::errors::ApiError;

/// Web pages that may talk to the server. One that the server itself sent always may.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// Those that this machine serves, on any port, and programs that are made of pages: a page from elsewhere could use the
    /// model of whoever visits it.
    #[default]
    Local,
    /// These, each like `https://chat.example.org`.
    Listed(Vec<String>),
    /// All.
    Any,
}

/// The layer for requests of web pages.
pub fn cors(origins: &Origins) -> CorsLayer {
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::OPTIONS])
        .allow_headers(Any)
        .expose_headers([HeaderName::from_static("x-request-id"), header::RETRY_AFTER]);
    match origins.clone() {
        Origins::Any => layer.allow_origin(Any),
        origins => layer.allow_origin(AllowOrigin::predicate(move |origin, _| origins.allow(origin))),
    }
}

impl Origins {
    fn allow(&self, origin: &HeaderValue) -> bool {
        match self {
            Origins::Any => true,
            Origins::Listed(list) => {
                list.iter().any(|allowed| allowed.trim_end_matches('/').as_bytes() == origin.as_bytes())
            }
            Origins::Local => is_local(origin),
        }
    }
}

fn is_local(origin: &HeaderValue) -> bool {
    let uri = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
    let Some(uri) = uri else { return false };
    // Extensions and programs on the desktop have schemes of their own; the web does not.
    let is_web = uri.scheme().is_none_or(|scheme| matches!(scheme.as_str(), "http" | "https"));
    let host = uri.host().unwrap_or_default();
    !is_web || matches!(host, "localhost" | "127.0.0.1" | "[::1]") || host.ends_with(".localhost")
}

/// The layer that refuses what pages of other origins ask. Without it a browser would hide the answer from such a page, and
/// the server would do the work.
pub async fn refuse_foreign_pages(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let Some(origin) = headers.get(header::ORIGIN) else { return next.run(request).await };
    let authority =
        origin.as_bytes().windows(3).position(|three| three == b"://").map(|at| &origin.as_bytes()[at + 3..]);
    let is_own = authority.is_some() && authority == headers.get(header::HOST).map(HeaderValue::as_bytes);
    if is_own || app.settings.origins.allow(origin) {
        return next.run(request).await;
    }
    let message = format!(
        "pages from {} may not use this server; start it with `--cors ORIGIN` to allow them",
        origin.to_str().unwrap_or("this origin")
    );
    ApiError::new(StatusCode::FORBIDDEN, message).into_response()
}

/// Names by which requests may call the server. Its addresses always are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// `localhost`, names below it, and these. Whoever owns another name can have it point at a loopback address once a browser has
    /// loaded a page from there; for the browser, page and server are then of one origin (DNS rebinding). An address cannot be
    /// pointed elsewhere.
    Local(Vec<String>),
    /// All.
    Any,
}

impl Default for Hosts {
    fn default() -> Hosts {
        Hosts::Local(Vec::new())
    }
}

impl Hosts {
    fn allow(&self, authority: &str) -> bool {
        let Hosts::Local(listed) = self else { return true };
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let is_address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        let is_listed = listed.iter().any(|name| name.eq_ignore_ascii_case(&host));
        is_address || host == "localhost" || host.ends_with(".localhost") || is_listed
    }
}

/// The layer that refuses what is asked by another name. Requests of programs may have none.
pub async fn refuse_foreign_names(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let header = request.headers().get(header::HOST).map(HeaderValue::as_bytes);
    let names = [request.uri().authority().map(|authority| authority.as_str().as_bytes()), header];
    let foreign = names
        .into_iter()
        .flatten()
        .find(|name| !std::str::from_utf8(name).is_ok_and(|name| app.settings.hosts.allow(name)));
    let Some(foreign) = foreign else { return next.run(request).await };
    let message = format!(
        "this server is asked as {:?}, which is neither an address nor localhost; start it with `--allow-host NAME` to allow the \
         name",
        String::from_utf8_lossy(foreign)
    );
    ApiError::new(StatusCode::FORBIDDEN, message).into_response()
}

/// What is there without a key: for load balancers.
const OPEN_PATHS: [&str; 2] = ["/health", "/ready"];

/// The layer that asks for the key, if the server has one.
pub async fn ask_for_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(key) = &app.settings.api_key else { return next.run(request).await };
    let given = given_key(request.headers());
    let is_right = given.is_some_and(|given| bool::from(given.as_bytes().ct_eq(key.as_bytes())));
    if is_right || OPEN_PATHS.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let found = if given.is_some() { "the API key is wrong" } else { "the request has no API key" };
    let message = format!("{found}; send the key of this server as `Authorization: Bearer KEY` or `x-api-key: KEY`");
    let code = Some("invalid_api_key");
    ApiError { code, ..ApiError::new(StatusCode::UNAUTHORIZED, message) }.into_response()
}

fn given_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

/// Headers by which clients name the session that a request belongs to.
const SESSION_HEADERS: [&str; 5] =
    ["x-session-affinity", "x-session-id", "session_id", "session-id", "x-claude-code-session-id"];

/// A request that was read.
pub struct Received {
    /// Its JSON.
    pub body: Value,
    /// What requests of one conversation have in common, if a header says it.
    pub session: Option<String>,
}

/// Reads the JSON of a request.
///
/// # Errors
/// 415 for what says that it is no JSON, 413 for more than the server takes, 400 with line and column for broken JSON.
pub async fn read_json(app: &App, request: Request) -> Result<Received, ApiError> {
    let headers = request.headers();
    let session = SESSION_HEADERS.iter().find_map(|name| headers.get(*name)?.to_str().ok()).map(str::to_owned);
    if let Some(coding) = headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity") {
        let message = format!("the body is compressed ({coding:?}); send it as it is, without Content-Encoding");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    if let Some(kind) = headers.get(header::CONTENT_TYPE) {
        let kind = kind.to_str().unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if essence != "application/json" && !essence.ends_with("+json") {
            let message =
                format!("the body is declared as {kind:?}; send JSON with the header `Content-Type: application/json`");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
    }
    let limit = app.settings.body_limit_bytes;
    let too_large = || {
        let message = format!("the body has more than {limit} bytes, which is this server's limit for one request");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let body = match axum::body::to_bytes(request.into_body(), limit).await {
        Ok(body) => body,
        Err(error) if is_length_limit(&error) => return Err(too_large()),
        Err(error) => {
            return Err(ApiError::new(StatusCode::BAD_REQUEST, format!("the body could not be read: {error}")));
        }
    };
    Ok(Received { body: parse_json(&body)?, session })
}

fn is_length_limit(error: &axum::Error) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if error.to_string() == "length limit exceeded" {
            return true;
        }
        source = error.source();
    }
    false
}

fn parse_json(body: &Bytes) -> Result<Value, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "the body is empty; send a JSON object"));
    }
    serde_json::from_slice(body)
        .map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {error}")))
}
