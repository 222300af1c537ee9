//! Server-sent events: an API's form of a turn, written as the turn goes on.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use serde_json::Value;

use crate::answer::Answer;
use crate::connection::Unwritten;
use crate::errors::ApiError;
use crate::turn::TurnEvent;
use crate::turns::Running;

/// An API's form of one answer.
pub trait Surface: Send + Unpin + 'static {
    /// The whole answer.
    fn whole(&self, answer: Answer) -> Value;

    /// Writes what an event is in this API.
    fn event(&mut self, event: TurnEvent, out: &mut Frames);

    /// Writes that work goes on.
    fn heartbeat(&mut self, out: &mut Frames);

    /// Writes that the answer ends here by an error.
    fn failed(&mut self, error: &ApiError, out: &mut Frames);
}

/// An event but for one value in it, already written: what is the same in every part of an answer.
#[derive(Clone, Debug)]
pub struct Around {
    before: String,
    behind: String,
}

impl Around {
    /// `data` gives the event with a value in it.
    pub fn of(data: impl Fn(Value) -> Value) -> Around {
        let mut frames = Frames::default();
        frames.data(&data(Value::String(Around::PLACE.to_owned())));
        let text = String::from_utf8_lossy(&frames.0);
        // Names that clients chose come before the value: the last place is the right one.
        let (before, behind) = text.rsplit_once(&format!("\"{}\"", Around::PLACE)).unwrap_or_default();
        Around { before: before.to_owned(), behind: behind.to_owned() }
    }

    const PLACE: &str = "<value>";
}

/// Events that are written and not yet sent.
#[derive(Debug, Default)]
pub struct Frames(Vec<u8>);

impl Frames {
    /// An event without a name.
    pub fn data(&mut self, data: &Value) {
        self.text("data: ");
        // Writing to memory does not fail, and neither does a value whose keys are strings.
        let _ = serde_json::to_writer(&mut self.0, data);
        self.text("\n\n");
    }

    /// An event without a name: `part` with this in its place.
    pub fn data_within(&mut self, part: &Around, inner: &Value) {
        self.text(&part.before);
        // Does not fail, as in `data`.
        let _ = serde_json::to_writer(&mut self.0, inner);
        self.text(&part.behind);
    }

    /// An event whose name is the `type` of its data.
    pub fn typed(&mut self, data: &Value) {
        self.text("event: ");
        self.text(data["type"].as_str().unwrap_or_default());
        self.text("\n");
        self.data(data);
    }

    /// What tells OpenAI's clients that the stream is complete.
    pub fn done(&mut self) {
        self.text("data: [DONE]\n\n");
    }

    /// A line that clients skip; it keeps connections open.
    pub fn comment(&mut self, text: &str) {
        self.text(": ");
        self.text(text);
        self.text("\n\n");
    }

    fn text(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    fn take(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.0))
    }
}

/// What is ready is sent together, up to about this size: a client that reads slowly holds the turn back instead of
/// filling memory.
const FRAME_BYTES: usize = 16 << 10;

/// The response that streams a turn. A heartbeat is written whenever the turn makes progress and nothing was sent for
/// `heartbeat`; so there are none where the engine stands still.
pub fn response(running: Running, surface: impl Surface, heartbeat: Duration) -> Response {
    let body = EventBody::new(running, surface, heartbeat);
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx would collect a stream before it passes it on.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let unwritten = body.unwritten.clone();
    (headers, Extension(unwritten), Body::new(body)).into_response()
}

struct EventBody<S> {
    running: Running,
    surface: S,
    frames: Frames,
    heartbeat: Duration,
    sent: Instant,
    over: bool,
    unwritten: Unwritten,
}

impl<S: Surface> EventBody<S> {
    fn new(running: Running, mut surface: S, heartbeat: Duration) -> EventBody<S> {
        let mut frames = Frames::default();
        surface.event(TurnEvent::Started { prompt_tokens: running.prompt_tokens() }, &mut frames);
        EventBody {
            running,
            surface,
            frames,
            heartbeat,
            sent: Instant::now(),
            over: false,
            unwritten: Unwritten::default(),
        }
    }

    fn write(&mut self, event: TurnEvent) {
        let is_progress = matches!(event, TurnEvent::Progress { .. });
        self.surface.event(event, &mut self.frames);
        if is_progress && self.frames.0.is_empty() && self.sent.elapsed() >= self.heartbeat {
            self.surface.heartbeat(&mut self.frames);
        }
    }
}

impl<S: Surface> http_body::Body for EventBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let mut waits = false;
        while !this.over && !waits && this.frames.0.len() < FRAME_BYTES {
            match this.running.poll_event(cx) {
                Poll::Ready(Some(Ok(event))) => this.write(event),
                Poll::Ready(Some(Err(error))) => {
                    this.surface.failed(&error.into(), &mut this.frames);
                    this.over = true;
                }
                Poll::Ready(None) => this.over = true,
                Poll::Pending => waits = true,
            }
        }
        if !this.frames.0.is_empty() {
            this.sent = Instant::now();
            this.unwritten.add(this.running.take_tokens_at());
            return Poll::Ready(Some(Ok(Frame::data(this.frames.take()))));
        }
        if this.over { Poll::Ready(None) } else { Poll::Pending }
    }
}
