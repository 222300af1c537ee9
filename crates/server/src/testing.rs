//! The demo checkpoint's text side, and turns that play given events.

use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt;
use lily_engine::TextModel;
use lily_model::chat::Chat;
use lily_model::{Config, Source};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tower::ServiceExt;

use crate::turn::{Input, TokenLogProb, TokenText, TurnEnd, TurnError, TurnEvent, TurnReason, TurnRequest, Usage};
use crate::turns::{ModelInfo, Readiness, Starting, TokenAt, Told, TurnEvents, TurnStream, Turns};
use crate::{Settings, router};

/// Of the demo checkpoint.
pub(crate) fn text_model() -> Arc<TextModel> {
    static TEXT: LazyLock<Arc<TextModel>> = LazyLock::new(|| {
        let source = Source::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo"));
        let config = Config::parse("config.json", &source.read("config.json").unwrap()).unwrap();
        Arc::new(TextModel::load(&source, &config).unwrap())
    });
    TEXT.clone()
}

/// What a turn does.
pub(crate) type Play = Vec<Result<TurnEvent, TurnError>>;

/// Turns that all play the same events.
pub(crate) struct Played {
    play: Play,
    model: ModelInfo,
    /// What was asked for.
    pub(crate) requests: Mutex<Vec<TurnRequest>>,
    pub(crate) readiness: Mutex<Readiness>,
    /// Senders of turns whose play has no end: they are open until the client leaves.
    open: Mutex<Vec<mpsc::Sender<Told>>>,
    /// Between events.
    pause: Duration,
}

impl Played {
    pub(crate) fn new(play: Play) -> Played {
        let model = ModelInfo { id: "lily-demo".into(), created: 1_800_000_000, context_tokens: 4096 };
        Played {
            play,
            model,
            requests: Mutex::default(),
            readiness: Mutex::new(Readiness::Ready),
            open: Mutex::default(),
            pause: Duration::ZERO,
        }
    }

    pub(crate) fn with_pause(play: Play, pause: Duration) -> Played {
        Played { pause, ..Played::new(play) }
    }

    /// Whether the clients of all unfinished turns are gone.
    pub(crate) fn are_cancelled(&self) -> bool {
        self.open.lock().unwrap().iter().all(mpsc::Sender::is_closed)
    }

    /// The last request that came through.
    pub(crate) fn last(&self) -> TurnRequest {
        self.requests.lock().unwrap().last().unwrap().clone()
    }
}

impl TurnEvents for mpsc::Receiver<Told> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Told>> {
        self.poll_recv(cx)
    }
}

impl Turns for Played {
    fn start(&self, request: TurnRequest) -> Starting<'_> {
        self.requests.lock().unwrap().push(request);
        let play = self.play.clone();
        let pause = self.pause;
        let (sender, stream) = mpsc::channel(4);
        let is_over = matches!(play.last(), Some(Err(_) | Ok(TurnEvent::Finished(_))));
        if !is_over {
            self.open.lock().unwrap().push(sender.clone());
        }
        Box::pin(async move {
            if let [Err(error)] = &play[..] {
                return Err(error.clone());
            }
            tokio::spawn(async move {
                for event in play {
                    if !pause.is_zero() {
                        tokio::time::sleep(pause).await;
                    }
                    if sender.send(event.into()).await.is_err() {
                        return;
                    }
                }
            });
            Ok(Box::new(stream) as TurnStream)
        })
    }

    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn text(&self) -> &Arc<TextModel> {
        static TEXT: LazyLock<Arc<TextModel>> = LazyLock::new(text_model);
        &TEXT
    }

    fn readiness(&self) -> Readiness {
        self.readiness.lock().unwrap().clone()
    }

    fn drain(&self) {
        *self.readiness.lock().unwrap() = Readiness::Draining;
    }

    fn in_progress(&self) -> usize {
        0
    }

    fn stop(&self) {}

    fn written(&self, _: TokenAt) {}

    fn metrics(&self) -> String {
        "lily_requests_total 0\n".into()
    }
}

/// A server over a play.
pub(crate) struct Server {
    pub(crate) turns: Arc<Played>,
    pub(crate) router: Router,
}

pub(crate) fn server(play: Play) -> Server {
    server_with(Played::new(play), Settings::default())
}

pub(crate) fn server_with(turns: Played, settings: Settings) -> Server {
    let turns = Arc::new(turns);
    Server { router: router(turns.clone(), settings, Router::new()), turns }
}

/// A POST of JSON.
pub(crate) fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

impl Server {
    pub(crate) async fn send(&self, request: Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Status and body of a POST.
    pub(crate) async fn json(&self, path: &str, body: Value) -> (StatusCode, Value) {
        read(self.send(post(path, body.to_string())).await).await
    }

    /// The body of a POST that succeeds.
    pub(crate) async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, body) = self.json(path, body).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        body
    }

    /// The message of a POST that is refused with 400.
    pub(crate) async fn refusal(&self, path: &str, body: Value) -> String {
        let (status, body) = self.json(path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
        body["error"]["message"].as_str().unwrap().to_owned()
    }

    /// The body of a POST that streams, as text.
    pub(crate) async fn stream(&self, path: &str, body: Value) -> String {
        let response = self.send(post(path, body.to_string())).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }
}

/// Status and JSON of a response.
pub(crate) async fn read(response: Response) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{status}: {body:?}")))
}

/// The data of a stream's events, `[DONE]` as a string; names must be the types of their data.
pub(crate) fn events(stream: &str) -> Vec<Value> {
    let blocks = stream.split("\n\n").filter(|block| !block.is_empty() && !block.starts_with(':'));
    blocks
        .map(|block| {
            let (name, data) = match block.split_once('\n') {
                Some((name, data)) => (Some(name.strip_prefix("event: ").unwrap()), data),
                None => (None, block),
            };
            let data = data.strip_prefix("data: ").unwrap();
            if data == "[DONE]" {
                return json!("[DONE]");
            }
            let data: Value = serde_json::from_str(data).unwrap();
            assert!(name.is_none() || data["type"] == name.unwrap(), "{block}");
            data
        })
        .collect()
}

pub(crate) fn started() -> TurnEvent {
    TurnEvent::Started { prompt_tokens: 12 }
}

pub(crate) fn finished(reason: TurnReason) -> TurnEvent {
    TurnEvent::Finished(TurnEnd {
        reason,
        usage: Usage { prompt_tokens: 12, cached_tokens: 5, completion_tokens: 9, reasoning_tokens: 3 },
        seed: 7,
        to_first_token: Duration::from_millis(14),
        decode: Duration::from_millis(80),
    })
}

/// Two calls behind reasoning and content.
pub(crate) fn rich(reason: TurnReason) -> Vec<TurnEvent> {
    let arguments = |index, json: &str| TurnEvent::Arguments { index, json: json.into() };
    let begun = |index, name: &str| TurnEvent::CallBegun { index, id: format!("call_{index:024x}"), name: name.into() };
    vec![
        started(),
        TurnEvent::Progress { done: 5, total: 12 },
        TurnEvent::Progress { done: 12, total: 12 },
        TurnEvent::Reasoning("Let me ".into()),
        TurnEvent::Reasoning("look.".into()),
        TurnEvent::Content("I will ".into()),
        TurnEvent::Content("look 🌷.".into()),
        begun(0, "look"),
        arguments(0, "{\"at\":"),
        arguments(0, "\"a \\\"b\\\"\"}"),
        TurnEvent::CallEnded { index: 0, complete: true },
        begun(1, "now"),
        arguments(1, "{}"),
        TurnEvent::CallEnded { index: 1, complete: true },
        finished(reason),
    ]
}

pub(crate) fn play(events: Vec<TurnEvent>) -> Play {
    events.into_iter().map(Ok).collect()
}

/// A plain answer.
pub(crate) fn hello() -> Play {
    play(vec![started(), TurnEvent::Content("Hel".into()), TurnEvent::Content("lo".into()), finished(TurnReason::Stop)])
}

pub(crate) fn logprob(text: &str, in_content: bool) -> TurnEvent {
    let token = |text: &str| TokenText { text: text.into(), bytes: text.as_bytes().to_vec() };
    TurnEvent::LogProb(TokenLogProb {
        token: token(text),
        logprob: -0.5,
        top: vec![(token(text), -0.5), (token("other"), f32::NEG_INFINITY)],
        in_content,
    })
}

/// `body` with these members in place of its own.
pub(crate) fn merged(mut body: Value, extra: &Value) -> Value {
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// What turns are asked for by a request.
pub(crate) async fn asked(path: &str, body: Value) -> TurnRequest {
    let server = server(hello());
    server.ok(path, body).await;
    server.turns.last()
}

/// Why a request is refused.
pub(crate) async fn refusal(path: &str, body: Value) -> String {
    server(hello()).refusal(path, body).await
}

/// The conversation of a request.
pub(crate) fn chat(request: TurnRequest) -> Chat {
    let Input::Chat(chat) = request.input else { panic!("no chat") };
    chat
}
