//! What the server counts, in the text format of Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lily_engine::EngineStatus;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets, linear_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::turn::{TurnEnd, TurnError, TurnReason};
use crate::turns::TokenAt;

/// What ended a turn.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// Counters of a service.
pub(crate) struct Metrics {
    registry: Registry,
    turns: Family<Outcome, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    first_token: Histogram,
    between_tokens: Histogram,
    engine_to_socket: Histogram,
    task_to_socket: Histogram,
    turn: Histogram,
    running: Gauge,
    waiting: Gauge,
    sessions: Gauge,
    cache: Family<Kind, Gauge>,
    memory: Family<Kind, Gauge>,
    /// A running mean of turns' times in milliseconds, for those who have to wait.
    mean_turn_ms: AtomicU64,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        // From 0.1 ms to 5 min in steps of 2.
        let times = || Histogram::new(exponential_buckets(1e-4, 2.0, 22));
        // By 10 us around the 100 us that are allowed, in steps of 2 up to a second above.
        let short_times = || Histogram::new(linear_buckets(1e-5, 1e-5, 20).chain(exponential_buckets(4e-4, 2.0, 12)));
        let metrics = Metrics {
            registry: Registry::with_prefix("lily"),
            turns: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            first_token: times(),
            between_tokens: times(),
            engine_to_socket: short_times(),
            task_to_socket: short_times(),
            turn: times(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            sessions: Gauge::default(),
            cache: Family::default(),
            memory: Family::default(),
            mean_turn_ms: AtomicU64::new(1000),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Metrics {
        let all = &mut self.registry;
        all.register("turns", "Turns by how they ended", self.turns.clone());
        all.register("prompt_tokens", "Tokens of prompts", self.prompt_tokens.clone());
        all.register("cached_tokens", "Tokens of prompts that were not computed again", self.cached_tokens.clone());
        all.register("completion_tokens", "Tokens of answers", self.completion_tokens.clone());
        let seconds = || Unit::Seconds;
        all.register_with_unit("first_token", "From a request to its first token", seconds(), self.first_token.clone());
        all.register_with_unit("between_tokens", "From a token to the next", seconds(), self.between_tokens.clone());
        all.register_with_unit(
            "token_to_socket",
            "From the engine having a token until what it gives is written to its connection",
            seconds(),
            self.engine_to_socket.clone(),
        );
        all.register_with_unit(
            "token_task_to_socket",
            "Of this, from the connection's task having the token: without what the system takes to wake it",
            seconds(),
            self.task_to_socket.clone(),
        );
        all.register_with_unit("turn", "From a request to its end", seconds(), self.turn.clone());
        all.register("requests_running", "Requests in progress", self.running.clone());
        all.register("requests_waiting", "Requests that wait for their turn", self.waiting.clone());
        all.register("sessions_parked", "Sessions in the prefix cache", self.sessions.clone());
        all.register("cache_events", "What the prefix cache did since the start", self.cache.clone());
        all.register_with_unit("memory", "Device memory by use", Unit::Bytes, self.memory.clone());
        self
    }

    fn count(&self, outcome: &'static str) {
        self.turns.get_or_create(&Outcome { outcome }).inc();
    }

    /// A turn that was not accepted.
    pub(crate) fn refused(&self, error: &TurnError) {
        self.count(match error {
            TurnError::Busy { .. } => "busy",
            TurnError::Invalid { .. } | TurnError::PromptTooLong { .. } => "invalid",
            _ => "failed",
        });
    }

    /// The first token of a turn, so long after it was asked for.
    pub(crate) fn first_token(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    /// Another token, so long after the last.
    pub(crate) fn token(&self, time: Duration) {
        self.between_tokens.observe(time.as_secs_f64());
    }

    /// What a token gave is written.
    pub(crate) fn written(&self, token: TokenAt) {
        self.engine_to_socket.observe(token.engine.elapsed().as_secs_f64());
        self.task_to_socket.observe(token.task.elapsed().as_secs_f64());
    }

    pub(crate) fn finished(&self, end: &TurnEnd) {
        self.count(match end.reason {
            TurnReason::Length => "length",
            TurnReason::ToolCalls => "tool_calls",
            TurnReason::Stop | TurnReason::StopString(_) => "stop",
        });
        self.prompt_tokens.inc_by(end.usage.prompt_tokens as u64);
        self.cached_tokens.inc_by(end.usage.cached_tokens as u64);
        self.completion_tokens.inc_by(end.usage.completion_tokens as u64);
        let time = end.to_first_token + end.decode;
        self.turn.observe(time.as_secs_f64());
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let mean = self.mean_turn_ms.load(Ordering::Relaxed);
        self.mean_turn_ms.store(mean / 8 * 7 + ms / 8, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self) {
        self.count("failed");
    }

    /// A turn whose client went away.
    pub(crate) fn abandoned(&self) {
        self.count("abandoned");
    }

    /// How long a turn takes, for clients that are to come again.
    pub(crate) fn typical_turn(&self) -> Duration {
        Duration::from_secs(self.mean_turn_ms.load(Ordering::Relaxed).div_ceil(1000).clamp(1, 60))
    }

    pub(crate) fn text(&self, status: &EngineStatus) -> String {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.running.set(gauge(status.running));
        self.waiting.set(gauge(status.waiting));
        self.sessions.set(gauge(status.parked));
        let cache = status.cache;
        let events =
            [("hit", cache.hits), ("miss", cache.misses), ("eviction", cache.evictions), ("load", cache.loads)];
        for (kind, value) in events {
            self.cache.get_or_create(&Kind { kind }).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        let memory = status.memory;
        for (kind, bytes) in [
            ("weights", memory.weights_mapped + memory.weights_owned),
            ("states", memory.states),
            ("snapshots", memory.snapshots),
            ("scratch", memory.scratch),
        ] {
            self.memory.get_or_create(&Kind { kind }).set(gauge(bytes));
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
