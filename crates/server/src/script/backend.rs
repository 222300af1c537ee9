//! The script behind the seam: states, snapshots, steps and masks as on a device.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lily_backend::export::{CheckSum, read};
use lily_backend::{
    Backend, Caps, Error, Input, LogProbs, MemoryReport, Output, Result, Row, RowOutput, SampledToken, SamplingParams,
    SnapshotId, Standing, StateId, Step, Ticket, Want, check_capacity, check_step,
};
use lily_engine::TextModel;

use super::past::{Past, Rest};
use super::{Script, ScriptError, Tokens};

/// A backend that replays a [`Script`].
pub struct ScriptBackend {
    caps: Caps,
    script: Tokens,
    states: HashMap<StateId, State>,
    snapshots: HashMap<SnapshotId, Vec<u32>>,
    in_flight: VecDeque<Flight>,
    made: u32,
    /// When the steps that were accepted are done.
    busy_until: Instant,
}

struct State {
    past: Past,
    capacity: usize,
    sampled: Option<u32>,
    awaits_mask: Option<Ticket>,
    lost: bool,
}

/// An accepted step.
struct Flight {
    ticket: Ticket,
    states: Vec<StateId>,
    rows: Vec<RowResult>,
    due: Instant,
}

enum RowResult {
    Done(RowOutput),
    Failed(Error),
    /// A sample that waits for its mask, and what is left of the script.
    Waiting {
        params: SamplingParams,
        rest: Vec<u32>,
        error: Option<String>,
    },
}

impl ScriptBackend {
    /// Limits of [`ScriptBackend::new`] that are like those of a GPU: the published context, 16 rows, two steps in flight.
    /// What a state takes is what its tokens take.
    pub fn caps(text: &TextModel) -> Caps {
        Caps {
            name: "script".to_owned(),
            max_context: 262_144,
            max_chunk: 512,
            max_rows: 16,
            steps_in_flight: 2,
            overlaps: true,
            bytes_per_token: size_of::<u32>(),
            bytes_per_state: 0,
            own_memory: false,
            vocab: text.tokenizer.vocab_size(),
        }
    }

    /// Replays `script` by the tokens of `text`, within the limits of `caps`.
    ///
    /// # Errors
    /// If an output cannot be encoded.
    pub fn new(script: Script, text: Arc<TextModel>, caps: Caps) -> std::result::Result<ScriptBackend, ScriptError> {
        Ok(ScriptBackend {
            caps,
            script: Tokens::new(script, text)?,
            states: HashMap::new(),
            snapshots: HashMap::new(),
            in_flight: VecDeque::new(),
            made: 0,
            busy_until: Instant::now(),
        })
    }

    fn new_id(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    fn state(&self, state: StateId) -> Result<&State> {
        self.states.get(&state).ok_or(Error::Unknown { what: "state", id: state.0.into() })
    }

    fn state_mut(&mut self, state: StateId) -> Result<&mut State> {
        self.states.get_mut(&state).ok_or(Error::Unknown { what: "state", id: state.0.into() })
    }

    /// Replaces what a state was fed.
    fn refill(&mut self, state: StateId, past: Past) -> Result<()> {
        let state = self.state_mut(state)?;
        *state = State { past, capacity: state.capacity, sampled: None, awaits_mask: None, lost: false };
        Ok(())
    }

    fn run(&mut self, row: Row, ticket: Ticket) -> Result<(RowResult, Duration)> {
        let ScriptBackend { script, states, caps, .. } = self;
        let state = states.get_mut(&row.state).ok_or(Error::Unknown { what: "state", id: row.state.0.into() })?;
        let tokens = match row.input {
            Input::Tokens(tokens) => tokens,
            Input::PreviousSample => state.sampled.into_iter().collect(),
        };
        let mut logits = Vec::new();
        match (&tokens[..], &row.want) {
            (tokens, Want::AllLogits) => {
                for id in tokens {
                    state.past.push(*id, script);
                    logits.extend(next(&mut state.past, script).logits(caps.vocab));
                }
            }
            ([id], _) => state.past.push(*id, script),
            (tokens, _) => state.past.extend(tokens, script),
        }
        state.sampled = None;
        let is_prompt = tokens.len() > 1 || matches!(row.want, Want::Nothing);
        let pace = state.past.line(script).map(|line| line.line.pace).unwrap_or_default();
        let rate = if is_prompt { pace.prompt } else { pace.decode };
        let time = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(tokens.len() as f64 / rate));
        let result = match row.want {
            Want::Nothing => RowResult::Done(RowOutput::Nothing),
            Want::AllLogits => RowResult::Done(RowOutput::Logits(logits)),
            Want::LastLogits => RowResult::Done(RowOutput::Logits(next(&mut state.past, script).logits(caps.vocab))),
            Want::Token(params) => {
                let Next { rest, error, .. } = next(&mut state.past, script);
                if params.masked {
                    state.awaits_mask = Some(ticket);
                    RowResult::Waiting { params, rest: rest.iter().collect(), error }
                } else {
                    let (result, id) = sample(&params, &rest, error, script, None);
                    // A step that reads the sample of a failed one is accepted, as on a device.
                    state.sampled = Some(id);
                    result
                }
            }
        };
        Ok((result, time))
    }
}

/// What the script says next.
struct Next<'a> {
    rest: Rest<'a>,
    error: Option<String>,
    stop: u32,
}

fn next<'a>(past: &mut Past, script: &'a Tokens) -> Next<'a> {
    let stop = script.stop;
    match past.line(script) {
        Some(line) => Next { rest: past.rest(script), error: line.line.error.clone(), stop },
        None => Next {
            rest: Rest::default(),
            error: Some(
                "the script has no line for this prompt: each has a `when` that it does not contain".to_owned(),
            ),
            stop,
        },
    }
}

impl Next<'_> {
    /// Logarithms of the probabilities that a script stands for: one half for what it says, the other half for all others.
    fn logits(&self, vocab: usize) -> Vec<f32> {
        let said = self.rest.iter().next().unwrap_or(self.stop);
        (0..vocab as u32).map(|id| logprob(id, said, vocab)).collect()
    }
}

fn logprob(id: u32, said: u32, vocab: usize) -> f32 {
    if id == said { 0.5f32.ln() } else { (0.5 / vocab.saturating_sub(1).max(1) as f32).ln() }
}

/// A bias of this forbids a token, and of its opposite compels one: the strongest of OpenAI's API.
const FORBIDDING: f32 = -100.0;

/// The next token that is allowed, and its result.
fn sample(
    params: &SamplingParams,
    rest: &Rest<'_>,
    error: Option<String>,
    script: &Tokens,
    mask: Option<&[u32]>,
) -> (RowResult, u32) {
    let (stop, vocab) = (script.stop, script.text.tokenizer.vocab_size());
    let is_biased = |id: u32| params.logit_bias.iter().any(|(other, bias)| *other == id && *bias <= FORBIDDING);
    let in_mask =
        |id: u32| mask.is_none_or(|mask| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1));
    let is_allowed = |id: &u32| *id < params.vocab_limit && in_mask(*id) && !is_biased(*id);
    let compelled = params.logit_bias.iter().filter(|(_, bias)| *bias >= -FORBIDDING).map(|(id, _)| *id);
    let said = rest.iter().next().unwrap_or(stop);
    let next = || match mask {
        Some(_) if !is_allowed(&said) => {
            let allowed = (0..vocab as u32).filter(is_allowed);
            first_allowed(rest, allowed, script)
        }
        _ => rest.iter().find(is_allowed),
    };
    let chosen = match compelled.clone().find(is_allowed).or_else(next) {
        Some(id) => id,
        None if error.is_some() => return (RowResult::Failed(Error::Device(error.unwrap_or_default())), stop),
        None => match Some(stop).filter(is_allowed).or_else(|| (0..vocab as u32).find(is_allowed)) {
            Some(id) => id,
            None => return (RowResult::Failed(Error::EmptyMask(0)), stop),
        },
    };
    let logprobs = params.logprobs.map(|count| {
        let others = (0..vocab as u32).filter(|id| *id != said);
        let top = std::iter::once(said).chain(others).take(count as usize);
        LogProbs { chosen: logprob(chosen, said, vocab), top: top.map(|id| (id, logprob(id, said, vocab))).collect() }
    });
    (RowResult::Done(RowOutput::Token(SampledToken { id: chosen, logprobs })), chosen)
}

/// The longest of the allowed tokens with which the text of `rest` goes on, at the first place where there is one.
fn first_allowed(rest: &Rest<'_>, allowed: impl Iterator<Item = u32>, script: &Tokens) -> Option<u32> {
    let mut by_byte: Vec<Vec<u32>> = vec![Vec::new(); 256];
    for id in allowed {
        if let Some(first) = script.bytes_of(id).first() {
            by_byte[usize::from(*first)].push(id);
        }
    }
    let text: Vec<u8> = rest.iter().flat_map(|id| script.bytes_of(id)).copied().collect();
    (0..text.len()).find_map(|at| {
        let fitting = by_byte[usize::from(text[at])].iter().filter(|id| text[at..].starts_with(script.bytes_of(**id)));
        fitting.max_by_key(|id| script.bytes_of(**id).len()).copied()
    })
}

/// How exports begin.
const MAGIC: &[u8; 8] = b"lilyscr1";

impl Backend for ScriptBackend {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn new_state(&mut self, capacity: usize) -> Result<StateId> {
        check_capacity(capacity, &self.caps)?;
        let id = StateId(self.new_id());
        let past = Past::default();
        self.states.insert(id, State { past, capacity, sampled: None, awaits_mask: None, lost: false });
        Ok(id)
    }

    fn free_state(&mut self, state: StateId) -> Result<()> {
        self.states.remove(&state).map(drop).ok_or(Error::Unknown { what: "state", id: state.0.into() })
    }

    fn reset_state(&mut self, state: StateId) -> Result<()> {
        self.refill(state, Past::default())
    }

    fn position(&self, state: StateId) -> Result<usize> {
        Ok(self.state(state)?.past.ids().len())
    }

    fn snapshot(&mut self, state: StateId) -> Result<SnapshotId> {
        let state_ref = self.state(state)?;
        if state_ref.lost {
            return Err(Error::StateLost(state.0));
        }
        let ids = state_ref.past.ids().to_vec();
        let id = SnapshotId(self.new_id());
        self.snapshots.insert(id, ids);
        Ok(id)
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) -> Result<()> {
        self.snapshots.remove(&snapshot).map(drop).ok_or(Error::Unknown { what: "snapshot", id: snapshot.0.into() })
    }

    fn restore(&mut self, state: StateId, snapshot: SnapshotId) -> Result<()> {
        let ids =
            self.snapshots.get(&snapshot).ok_or(Error::Unknown { what: "snapshot", id: snapshot.0.into() })?.clone();
        if !self.state(state)?.past.ids().starts_with(&ids) {
            return Err(Error::BadStep("the snapshot is of another past than the state's".to_owned()));
        }
        let past = Past::of(ids, &self.script);
        self.refill(state, past)
    }

    fn fork(&mut self, from: StateId, to: StateId) -> Result<()> {
        let source = self.state(from)?;
        if source.lost {
            return Err(Error::StateLost(from.0));
        }
        let (past, capacity) = (source.past.clone(), self.state(to)?.capacity);
        let position = past.ids().len();
        if position > capacity {
            return Err(Error::ContextFull { position: 0, more: position, capacity });
        }
        self.refill(to, past)
    }

    fn export(&mut self, state: StateId, to: &mut dyn Write) -> Result<()> {
        let source = self.state(state)?;
        if source.lost {
            return Err(Error::StateLost(state.0));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend((source.past.ids().len() as u64).to_le_bytes());
        bytes.extend(source.past.ids().iter().flat_map(|id| id.to_le_bytes()));
        let mut sum = CheckSum::new();
        sum.add(&bytes);
        bytes.extend(sum.value().to_le_bytes());
        Ok(to.write_all(&bytes)?)
    }

    fn import(&mut self, state: StateId, from: &mut dyn Read) -> Result<()> {
        self.reset_state(state)?;
        let capacity = self.state(state)?.capacity;
        let mut bytes = vec![0; MAGIC.len() + size_of::<u64>()];
        read(from, &mut bytes)?;
        let (magic, count) = bytes.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(Error::BadExport("it is not of a script".to_owned()));
        }
        let count = count.first_chunk().map_or(0, |count| u64::from_le_bytes(*count));
        let Some(count) = usize::try_from(count).ok().filter(|count| *count <= capacity) else {
            return Err(Error::BadExport(format!("it has {count} tokens, the state has room for {capacity}")));
        };
        let start = bytes.len();
        bytes.resize(start + count * size_of::<u32>(), 0);
        read(from, &mut bytes[start..])?;
        let mut stored = [0; size_of::<u64>()];
        read(from, &mut stored)?;
        let mut sum = CheckSum::new();
        sum.add(&bytes);
        if sum.value() != u64::from_le_bytes(stored) {
            return Err(Error::BadExport("its checksum differs".to_owned()));
        }
        let (ids, _) = bytes[start..].as_chunks();
        let past = Past::of(ids.iter().map(|id| u32::from_le_bytes(*id)).collect(), &self.script);
        self.refill(state, past)
    }

    fn submit(&mut self, step: Step) -> Result<Ticket> {
        let standing = |id| {
            self.states.get(&id).map(|state| Standing {
                position: state.past.ids().len(),
                capacity: state.capacity,
                lost: state.lost,
                awaits_mask: state.awaits_mask,
                has_sample: state.sampled.is_some(),
            })
        };
        check_step(&step, &self.caps, self.in_flight.iter().map(|flight| &flight.states[..]), standing)?;
        let ticket = Ticket(u64::from(self.new_id()));
        let states = step.rows.iter().map(|row| row.state).collect();
        let mut rows = Vec::with_capacity(step.rows.len());
        let mut time = Duration::ZERO;
        for row in step.rows {
            let (result, row_time) = self.run(row, ticket)?;
            rows.push(result);
            time = time.max(row_time);
        }
        self.busy_until = self.busy_until.max(Instant::now()) + time;
        self.in_flight.push_back(Flight { ticket, states, rows, due: self.busy_until });
        Ok(ticket)
    }

    fn set_mask(&mut self, ticket: Ticket, row: usize, mask: &[u32]) -> Result<()> {
        let flight = self.in_flight.iter_mut().find(|flight| flight.ticket == ticket);
        let flight = flight.ok_or(Error::Unknown { what: "ticket", id: ticket.0 })?;
        let Some(RowResult::Waiting { params, rest, error }) = flight.rows.get_mut(row) else {
            return Err(Error::BadStep(format!("row {row} does not wait for a mask")));
        };
        let rest = Rest { tokens: rest, ..Rest::default() };
        let (result, id) = sample(params, &rest, error.take(), &self.script, Some(mask));
        flight.rows[row] = match result {
            RowResult::Failed(Error::EmptyMask(_)) => RowResult::Failed(Error::EmptyMask(row)),
            result => result,
        };
        // Unless it was reset, restored or freed meanwhile.
        if let Some(state) = self.states.get_mut(&flight.states[row]).filter(|state| state.awaits_mask == Some(ticket))
        {
            (state.awaits_mask, state.sampled) = (None, Some(id));
        }
        Ok(())
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Output> {
        let unknown = || Error::Unknown { what: "ticket", id: ticket.0 };
        let first = self.in_flight.front().ok_or_else(unknown)?;
        if first.ticket != ticket {
            return Err(match self.in_flight.iter().any(|flight| flight.ticket == ticket) {
                true => Error::BadStep(format!("ticket {} is to be waited for before {}", first.ticket.0, ticket.0)),
                false => unknown(),
            });
        }
        if let Some(row) = first.rows.iter().position(|row| matches!(row, RowResult::Waiting { .. })) {
            return Err(Error::BadStep(format!("row {row} waits for its mask")));
        }
        let flight = self.in_flight.pop_front().ok_or_else(unknown)?;
        thread::sleep(flight.due.saturating_duration_since(Instant::now()));
        let mut rows = Vec::with_capacity(flight.rows.len());
        let mut failure = None;
        for row in flight.rows {
            match row {
                RowResult::Done(output) => rows.push(output),
                RowResult::Failed(error) => failure = Some(error),
                RowResult::Waiting { .. } => {}
            }
        }
        let Some(error) = failure else { return Ok(Output { rows, trace: Vec::new() }) };
        for state in flight.states {
            if let Some(state) = self.states.get_mut(&state) {
                state.lost = true;
            }
        }
        Err(error)
    }

    fn memory(&self) -> MemoryReport {
        let state = |state: &State| state.capacity * self.caps.bytes_per_token + self.caps.bytes_per_state;
        MemoryReport {
            weights_owned: self.script.bytes(),
            states: self.states.values().map(state).sum(),
            snapshots: self
                .snapshots
                .values()
                .map(|ids| ids.len() * size_of::<u32>() + self.caps.bytes_per_state)
                .sum(),
            ..MemoryReport::default()
        }
    }
}
