//! The chat page: a client of the API for whoever opens the server's address in a browser. Its files are part of the
//! program and load nothing from elsewhere.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::Router;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::errors;

/// A file of the page.
#[derive(Clone, Copy)]
struct File {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

/// The page asks for the others by relative paths, so it also works where a proxy serves it below a path of its own.
const FILES: [File; 6] = [
    File { path: "/", content_type: "text/html; charset=utf-8", text: include_str!("page/index.html") },
    File { path: "/page/style.css", content_type: "text/css; charset=utf-8", text: include_str!("page/style.css") },
    File { path: "/page/icon.svg", content_type: "image/svg+xml", text: include_str!("page/icon.svg") },
    File { path: "/page/app.js", content_type: SCRIPT, text: include_str!("page/app.js") },
    File { path: "/page/api.js", content_type: SCRIPT, text: include_str!("page/api.js") },
    File { path: "/page/markdown.js", content_type: SCRIPT, text: include_str!("page/markdown.js") },
];

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// What a model writes may be anything: even if some of it became markup, nothing would run, load or leave.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page at `/` and its files.
pub fn routes() -> Router {
    let add = |router: Router, file: File| {
        router.route(file.path, get(move |headers: HeaderMap| async move { file.serve(&headers) }))
    };
    FILES.into_iter().fold(Router::new(), add).method_not_allowed_fallback(errors::wrong_method)
}

impl File {
    /// Browsers keep the file and ask each time whether it has changed.
    fn serve(self, asked: &HeaderMap) -> Response {
        let tag = self.tag();
        let headers = [
            (header::CONTENT_TYPE, self.content_type),
            (header::CACHE_CONTROL, "no-cache"),
            (header::ETAG, tag.as_str()),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        ];
        let is_known = asked.get(header::IF_NONE_MATCH).is_some_and(|known| {
            let known = known.to_str().unwrap_or_default();
            known.split(',').any(|known| known.trim().trim_start_matches("W/") == tag)
        });
        if is_known {
            (StatusCode::NOT_MODIFIED, headers).into_response()
        } else {
            (headers, self.text).into_response()
        }
    }

    fn tag(self) -> String {
        let mut hasher = DefaultHasher::new();
        self.text.hash(&mut hasher);
        format!("\"{:016x}\"", hasher.finish())
    }
}
