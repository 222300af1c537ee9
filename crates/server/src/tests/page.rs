//! The page as it is sent; what it does is tried in a browser by `tools/server-tests/page.py`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::response::Response;
use http_body_util::BodyExt;
use tower::ServiceExt;

use crate::testing::{Played, hello};
use crate::{Settings, page, router};

fn locked() -> Router {
    let settings = Settings { api_key: Some("sesame".into()), ..Settings::default() };
    router(Arc::new(Played::new(hello())), settings, page::routes())
}

async fn get(path: &str) -> Response {
    locked().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap()
}

async fn text(response: Response) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// All that the page is made of, found from its own references.
async fn files() -> Vec<(String, Response)> {
    let page = text(get("/").await).await;
    let app = text(get("/page/app.js").await).await;
    let values = |text: &str, before: &str, end: char| -> Vec<String> {
        text.split(before).skip(1).filter_map(|rest| Some(rest.split_once(end)?.0.to_owned())).collect()
    };
    let mut paths = [values(&page, "href=\"", '"'), values(&page, "src=\"", '"')].concat();
    paths.extend(values(&app, "from './", '\'').iter().map(|name| format!("page/{name}")));
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), 5, "{paths:?}");
    let mut found = vec![("/".to_owned(), get("/").await)];
    for path in paths {
        let path = format!("/{path}");
        let response = get(&path).await;
        found.push((path, response));
    }
    found
}

#[tokio::test]
async fn every_file_comes_without_a_key_and_with_its_type_and_the_policy() {
    for (path, response) in files().await {
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let headers = response.headers();
        let kind = headers[header::CONTENT_TYPE].to_str().unwrap();
        let expected = match path.rsplit_once('.').map_or("html", |(_, end)| end) {
            "js" => "text/javascript; charset=utf-8",
            "svg" => "image/svg+xml",
            end => &format!("text/{end}; charset=utf-8"),
        };
        assert_eq!(kind, expected, "{path}");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"), "{policy}");
    }
}

#[tokio::test]
async fn nothing_comes_from_elsewhere_and_no_text_becomes_markup() {
    for (path, response) in files().await {
        let text = text(response).await.replace("http://www.w3.org/2000/svg", "").replace("/(https?:", "");
        for word in ["//cdn", "http://", "https://", "@import", "url("] {
            assert!(!text.contains(word), "{path} has {word}");
        }
        for word in ["innerHTML", "outerHTML", "AdjacentHTML", "document.write", "eval(", "<style", " style="] {
            assert!(!text.contains(word), "{path} has {word}");
        }
    }
}

#[tokio::test]
async fn a_file_that_the_browser_has_is_not_sent_again() {
    for (path, response) in files().await {
        let tag = response.headers()[header::ETAG].clone();
        assert_eq!(response.headers()[header::CACHE_CONTROL], "no-cache");
        let ask = |known: String| {
            let request = Request::get(&path).header("if-none-match", known).body(Body::empty()).unwrap();
            locked().oneshot(request)
        };
        let tag = tag.to_str().unwrap();
        for known in [tag.to_owned(), format!("\"other\", W/{tag}")] {
            let response = ask(known).await.unwrap();
            assert_eq!(response.status(), StatusCode::NOT_MODIFIED, "{path}");
            assert!(text(response).await.is_empty());
        }
        assert_eq!(ask("\"other\"".into()).await.unwrap().status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn the_page_is_only_read() {
    let response = locked().oneshot(Request::post("/").body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert!(text(response).await.contains("/ does not take POST"));
    let response = get("/page/other.js").await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
}
