//! What the APIs need of the rest of the server: something that answers turns.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use lily_engine::TextModel;

use crate::turn::{TurnEnd, TurnError, TurnEvent, TurnRequest};

/// Events of a turn as they happen. Dropping them cancels the turn.
pub trait TurnEvents: Send {
    /// The next one; `None` behind the last.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Told>>;
}

/// Events of a turn, whoever answers it.
pub type TurnStream = Box<dyn TurnEvents>;

impl dyn TurnEvents {
    /// The next one; see [`poll_next`](TurnEvents::poll_next).
    pub async fn next(&mut self) -> Option<Told> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

/// An event on its way to the client.
#[derive(Clone, Debug)]
pub struct Told {
    /// What happened.
    pub event: Result<TurnEvent, TurnError>,
    /// With the first event that a token gives: where the token was when.
    pub token_at: Option<TokenAt>,
}

/// When a token was where, on its way to the client.
#[derive(Clone, Copy, Debug)]
pub struct TokenAt {
    /// The engine had it.
    pub engine: Instant,
    /// The task that writes it had it: later by what the system takes to wake that task.
    pub task: Instant,
}

impl From<Result<TurnEvent, TurnError>> for Told {
    fn from(event: Result<TurnEvent, TurnError>) -> Told {
        Told { event, token_at: None }
    }
}

/// A turn that is about to start.
pub type Starting<'a> = Pin<Box<dyn Future<Output = Result<TurnStream, TurnError>> + Send + 'a>>;

/// Answers turns.
pub trait Turns: Send + Sync + 'static {
    /// Starts a turn. The stream begins with [`TurnEvent::Started`] and ends behind [`TurnEvent::Finished`] or an error.
    fn start(&self, request: TurnRequest) -> Starting<'_>;

    /// The model that answers.
    fn model(&self) -> &ModelInfo;

    /// Its text side, for counting tokens.
    fn text(&self) -> &Arc<TextModel>;

    /// Whether requests should come here.
    fn readiness(&self) -> Readiness;

    /// Takes no more turns; those that were accepted go on.
    fn drain(&self);

    /// Turns that were accepted and are not over.
    fn in_progress(&self) -> usize;

    /// Cancels what is in progress, and ends. Blocks until then.
    fn stop(&self);

    /// Notes that what a token gave is written to its connection.
    fn written(&self, token: TokenAt);

    /// Metrics in the text format of Prometheus.
    fn metrics(&self) -> String;
}

/// The model as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its name. Requests may use any.
    pub id: String,
    /// Seconds since 1970 at which it was loaded.
    pub created: u64,
    /// Room for prompt and answer.
    pub context_tokens: usize,
}

/// Whether a server wants requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Send them.
    Ready,
    /// It finishes what it has and takes no more.
    Draining,
    /// It answers nothing any more, for this reason.
    Failed(String),
}

/// A turn that runs, from behind [`TurnEvent::Started`] to its end, and its line in the log.
pub struct Running {
    events: TurnStream,
    prompt_tokens: usize,
    api: &'static str,
    id: String,
    over: bool,
    tokens_at: Vec<TokenAt>,
}

impl Running {
    /// Starts a turn and waits until it is accepted. `api` and `id` are for the log.
    pub async fn start(
        turns: &dyn Turns,
        request: TurnRequest,
        api: &'static str,
        id: String,
    ) -> Result<Running, TurnError> {
        let start = async {
            let mut events = turns.start(request).await?;
            match events.next().await.map(|told| told.event) {
                Some(Ok(TurnEvent::Started { prompt_tokens })) => Ok((events, prompt_tokens)),
                Some(Err(error)) => Err(error),
                Some(Ok(_)) | None => Err(lost()),
            }
        };
        match start.await {
            Ok((events, prompt_tokens)) => {
                Ok(Running { events, prompt_tokens, api, id, over: false, tokens_at: Vec::new() })
            }
            Err(error) => {
                tracing::info!(api, id, %error, "refused");
                Err(error)
            }
        }
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// The next event; `None` behind the end. A turn that stops without an end gives an error.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<TurnEvent, TurnError>>> {
        if self.over {
            return Poll::Ready(None);
        }
        // A panic costs the turn, not its connection.
        let told = catch_unwind(AssertUnwindSafe(|| self.events.poll_next(cx))).unwrap_or(Poll::Ready(None));
        let Told { event, token_at } = ready!(told).unwrap_or_else(|| Err(lost()).into());
        self.tokens_at.extend(token_at);
        match &event {
            Ok(TurnEvent::Finished(end)) => self.finished(end),
            Err(error) => {
                self.over = true;
                tracing::warn!(api = self.api, id = self.id, %error, "failed");
            }
            Ok(_) => {}
        }
        Poll::Ready(Some(event))
    }

    /// When the tokens were where, of the events that came since the last call.
    pub fn take_tokens_at(&mut self) -> Vec<TokenAt> {
        std::mem::take(&mut self.tokens_at)
    }

    /// The next event; see [`poll_event`](Running::poll_event).
    pub async fn next(&mut self) -> Option<Result<TurnEvent, TurnError>> {
        poll_fn(|cx| self.poll_event(cx)).await
    }

    fn finished(&mut self, end: &TurnEnd) {
        self.over = true;
        tracing::info!(
            api = self.api,
            id = self.id,
            reason = ?end.reason,
            prompt_tokens = end.usage.prompt_tokens,
            cached_tokens = end.usage.cached_tokens,
            completion_tokens = end.usage.completion_tokens,
            first_token_ms = end.to_first_token.as_millis(),
            decode_ms = end.decode.as_millis(),
            "answered"
        );
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            tracing::info!(api = self.api, id = self.id, prompt_tokens = self.prompt_tokens, "the client went away");
        }
    }
}

fn lost() -> TurnError {
    TurnError::Failed("the server lost this request; the log has more".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Broken;

    impl TurnEvents for Broken {
        fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Told>> {
            panic!("out of order")
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_turn() {
        let events = Box::new(Broken);
        let id = String::new();
        let mut running = Running { events, prompt_tokens: 1, api: "test", id, over: false, tokens_at: Vec::new() };
        assert_eq!(running.next().await, Some(Err(lost())));
        assert_eq!(running.next().await, None);
    }
}
