//! One context measured on a backend, as the contract says.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use lily_backend::{Backend, Input, Row, RowOutput, SamplingParams, SnapshotId, StateId, Step, Ticket, Want};
use serde::{Deserialize, Serialize};

use super::contract::{self, LONGEST_CONTEXT, LONGEST_PREFILL, PREFIX, PROBE, SEED, prompt_id};
use super::stat::Stat;
use super::stream::Stream;

/// How the context came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// Every token of it was computed.
    Prefill,
    /// Its cache is noise but for the first tokens.
    Synthetic,
}

/// What one context gave.
pub struct Measured {
    pub context: usize,
    pub start: Start,
    /// Tokens of prompt per second until the first token was delivered; `None` on a synthetic start.
    pub prefill: Option<Stat>,
    /// Tokens per second.
    pub decode: Stat,
    /// Bytes per second of the plain read.
    pub read: Stat,
    /// Of the first token and those of the decode steps.
    pub digest: String,
}

/// A backend under measurement.
pub struct Bench<'a> {
    backend: &'a mut dyn Backend,
    stream: Stream<'a>,
    decode: usize,
    rounds: usize,
    sessions: usize,
    /// Seconds per token of the longest prefill so far.
    pace: f64,
}

/// What is measured on each context.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Decode steps.
    pub decode: usize,
    /// Timed runs.
    pub rounds: usize,
    /// Sessions that decode together.
    pub sessions: usize,
}

/// One round in seconds.
struct Round {
    prefill: f64,
    decode: f64,
    read: f64,
    tokens: Vec<u32>,
}

impl<'a> Bench<'a> {
    /// Gets ready to measure: a prefill of [`PROBE`] tokens, or `shortest` if that is less, shows how fast they are.
    pub fn new(
        backend: &'a mut dyn Backend,
        stream: Stream<'a>,
        plan: Plan,
        shortest: usize,
    ) -> anyhow::Result<Bench<'a>> {
        let Plan { decode, rounds, sessions } = plan;
        let mut bench = Bench { backend, stream, decode, rounds, sessions, pace: 0.0 };
        let probe = PROBE.min(shortest);
        let state = bench.backend.new_state(probe)?;
        // Twice: the first one also wakes the threads and touches the scratch memory.
        for _ in 0..2 {
            bench.backend.reset_state(state)?;
            bench.pace = bench.feed(state, 0, 0..probe)?.1.as_secs_f64() / probe as f64;
        }
        bench.backend.free_state(state)?;
        Ok(bench)
    }

    /// Measures one context; those before it were shorter.
    pub fn context(&mut self, context: usize) -> anyhow::Result<Measured> {
        let mut states = Vec::with_capacity(self.sessions);
        let mut made = Ok(());
        while made.is_ok() && states.len() < self.sessions {
            made = self.backend.new_state(context + self.decode).map(|state| states.push(state));
        }
        let measured = made.map_err(anyhow::Error::from).and_then(|()| self.rounds(&states, context));
        for state in states {
            self.backend.free_state(state)?;
        }
        measured
    }

    fn rounds(&mut self, states: &[StateId], context: usize) -> anyhow::Result<Measured> {
        let started = Instant::now();
        let tokens = (context * states.len()) as f64;
        let expected = Duration::try_from_secs_f64(self.pace * tokens).unwrap_or(Duration::MAX);
        let start = if expected > LONGEST_PREFILL { Start::Synthetic } else { Start::Prefill };
        let snapshots = match start {
            Start::Prefill => Vec::new(),
            Start::Synthetic => {
                let synthetic =
                    states.iter().enumerate().map(|(session, state)| self.synthetic(*state, session, context));
                synthetic.collect::<anyhow::Result<Vec<SnapshotId>>>()?
            }
        };
        let warm_up = self.round(states, context, &snapshots)?;
        if start == Start::Prefill {
            self.pace = warm_up.prefill / tokens;
        }
        let mut rounds = Vec::new();
        while rounds.is_empty() || rounds.len() < self.rounds && started.elapsed() < LONGEST_CONTEXT {
            let round = self.round(states, context, &snapshots)?;
            must_repeat(context, rounds.len() + 1, &round.tokens, &warm_up.tokens)?;
            tracing::info!(context, round = rounds.len() + 1, prefill_s = round.prefill, decode_s = round.decode);
            rounds.push(round);
        }
        for snapshot in snapshots {
            self.backend.free_snapshot(snapshot)?;
        }
        let per_second = |tokens: usize, seconds: fn(&Round) -> f64| {
            Stat::of(rounds.iter().map(|round| tokens as f64 / seconds(round)))
        };
        Ok(Measured {
            context,
            start,
            prefill: (start == Start::Prefill).then(|| per_second(context * states.len(), |round| round.prefill)),
            decode: per_second(self.decode * states.len(), |round| round.decode),
            read: Stat::of(rounds.iter().map(|round| round.read)),
            digest: contract::digest(&warm_up.tokens),
        })
    }

    /// Brings `state` one token before `context` with a cache of noise.
    fn synthetic(&mut self, state: StateId, session: usize, context: usize) -> anyhow::Result<SnapshotId> {
        let prefix = PREFIX.min(context - 1);
        self.feed(state, session, 0..prefix)?;
        let vocab = self.backend.caps().vocab;
        let ids: Vec<u32> = (prefix..context - 1).map(|i| prompt_id(session, i, vocab)).collect();
        self.backend.feed_noise(state, &ids, SEED)?;
        Ok(self.backend.snapshot(state)?)
    }

    fn round(&mut self, states: &[StateId], context: usize, snapshots: &[SnapshotId]) -> anyhow::Result<Round> {
        let (mut tokens, mut prefill) = (Vec::new(), Duration::ZERO);
        for (session, state) in states.iter().enumerate() {
            let prompt = match snapshots.get(session) {
                None => {
                    self.backend.reset_state(*state)?;
                    0..context
                }
                Some(snapshot) => {
                    self.backend.restore(*state, *snapshot)?;
                    context - 1..context
                }
            };
            let (first, took) = self.feed(*state, session, prompt)?;
            tokens.push(first);
            prefill += took;
        }
        let read = match self.backend.plain_read()? {
            Some(read) => read,
            None => self.stream.read(),
        };
        let (more, decode) = self.decode(states)?;
        tokens.extend(more);
        Ok(Round { prefill: prefill.as_secs_f64(), decode: decode.as_secs_f64(), read, tokens })
    }

    /// Feeds a part of the prompt; gives the token that follows it and the time until it was there.
    fn feed(&mut self, state: StateId, session: usize, prompt: Range<usize>) -> anyhow::Result<(u32, Duration)> {
        let (vocab, chunk) = (self.backend.caps().vocab, self.backend.caps().max_chunk);
        let ids: Vec<u32> = prompt.map(|i| prompt_id(session, i, vocab)).collect();
        let chunks = ids.chunks(chunk);
        let last = chunks.len().saturating_sub(1);
        let started = Instant::now();
        let mut token = None;
        for (index, ids) in chunks.enumerate() {
            let want = if index == last { self.greedy() } else { Want::Nothing };
            let ticket = self.submit(vec![Row { state, input: Input::Tokens(ids.to_vec()), want }])?;
            token = self.wait(ticket)?.pop();
        }
        Ok((token.context("the prompt is empty")?, started.elapsed()))
    }

    /// The decode steps, as many in flight as help the device.
    fn decode(&mut self, states: &[StateId]) -> anyhow::Result<(Vec<u32>, Duration)> {
        let caps = self.backend.caps();
        let in_flight = if caps.overlaps { caps.steps_in_flight } else { 1 };
        let (mut flights, mut tokens) =
            (VecDeque::with_capacity(in_flight), Vec::with_capacity(self.decode * states.len()));
        let started = Instant::now();
        for step in 0..self.decode + in_flight {
            if flights.len() == in_flight || step >= self.decode {
                let Some(ticket) = flights.pop_front() else { break };
                tokens.extend(self.wait(ticket)?);
            }
            if step < self.decode {
                let row = |state: &StateId| Row { state: *state, input: Input::PreviousSample, want: self.greedy() };
                let rows = states.iter().map(row).collect();
                flights.push_back(self.submit(rows)?);
            }
        }
        Ok((tokens, started.elapsed()))
    }

    fn greedy(&self) -> Want {
        Want::Token(SamplingParams::greedy(self.backend.caps().vocab as u32))
    }

    fn submit(&mut self, rows: Vec<Row>) -> anyhow::Result<Ticket> {
        Ok(self.backend.submit(Step { rows, trace: false })?)
    }

    /// The tokens of a step's rows that wanted one.
    fn wait(&mut self, ticket: Ticket) -> anyhow::Result<Vec<u32>> {
        let tokens = self.backend.wait(ticket)?.rows.into_iter().filter_map(|row| match row {
            RowOutput::Token(token) => Some(token.id),
            _ => None,
        });
        Ok(tokens.collect())
    }
}

/// Other tokens mean another computation, whose speed says nothing.
fn must_repeat(context: usize, round: usize, tokens: &[u32], warm_up: &[u32]) -> anyhow::Result<()> {
    if tokens == warm_up {
        return Ok(());
    }
    bail!(
        "context {context}: round {round} sampled other tokens ({}) than the warm-up ({}); the same steps must give the \
         same tokens, so no number of this run counts",
        contract::digest(tokens),
        contract::digest(warm_up)
    );
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lily_model::Checkpoint;

    use super::*;
    use crate::args::{BackendName, DeviceArgs, KvType, ModelArgs};
    use crate::devices;

    /// Measures 100 tokens where a prefill is expected to take `pace` seconds per token.
    fn measured(pace: f64) -> Measured {
        measured_together(pace, 1)
    }

    fn measured_together(pace: f64, sessions: usize) -> Measured {
        let checkpoint = Checkpoint::load(lily_synth::in_memory("random", &lily_synth::TINY, SEED).unwrap()).unwrap();
        let checkpoint = Arc::new(checkpoint);
        let device = DeviceArgs { backend: BackendName::Cpu, threads: Some(2), kv: KvType::F32 };
        let model = ModelArgs { model: None, ctx: Some(200), device };
        let mut backend = devices::load(&model, Arc::clone(&checkpoint)).unwrap();
        let stream = Stream::of_a_token(&checkpoint.weights, &checkpoint.config.shape, 2);
        let plan = Plan { decode: 5, rounds: 2, sessions };
        let mut bench = Bench::new(&mut *backend, stream, plan, 100).unwrap();
        assert!(bench.pace > 0.0);
        bench.pace = pace;
        bench.context(100).unwrap()
    }

    #[test]
    fn contexts_that_take_too_long_to_prefill_start_from_noise() {
        let computed = measured(1e-3);
        assert_eq!((computed.start, computed.decode.rounds.len()), (Start::Prefill, 2));
        assert_eq!(computed.prefill.as_ref().map(|prefill| prefill.rounds.len()), Some(2));
        let noise = measured(LONGEST_PREFILL.as_secs_f64());
        assert_eq!((noise.start, noise.decode.rounds.len()), (Start::Synthetic, 2));
        assert!(noise.prefill.is_none());
        assert_ne!(noise.digest, computed.digest);
        assert_eq!(noise.digest, measured(LONGEST_PREFILL.as_secs_f64()).digest);
        assert_eq!(computed.digest, measured(1e-3).digest);
    }

    #[test]
    fn sessions_have_prompts_of_their_own() {
        let (one, two) = (measured_together(1e-3, 1), measured_together(1e-3, 2));
        assert_ne!(one.digest, two.digest);
        assert_eq!(two.digest, measured_together(1e-3, 2).digest);
        assert_ne!(measured_together(LONGEST_PREFILL.as_secs_f64(), 2).digest, two.digest);
    }

    #[test]
    fn other_tokens_than_the_warm_up_gave_are_an_error() {
        assert!(must_repeat(64, 1, &[1, 2, 3], &[1, 2, 3]).is_ok());
        let error = must_repeat(64, 3, &[1, 2, 3], &[1, 2, 4]).unwrap_err().to_string();
        assert!(error.contains("context 64: round 3"), "{error}");
    }
}
