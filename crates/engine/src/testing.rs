//! A tokenizer of single bytes and a backend that follows a script and checks the contract.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use lily_backend::export::read;
use lily_backend::{
    Backend, Caps, Error, Input, LogProbs, MemoryReport, Output, Result, Row, RowOutput, SampledToken, SnapshotId,
    StateId, Step, Ticket, Want,
};
use lily_model::chat::ChatTemplate;
use lily_model::tokenizer::{SPLIT_PATTERN, Tokenizer};
use serde_json::json;

use crate::{Sampling, TextModel};

/// The token that ends answers, special like `<|im_end|>`.
pub(crate) const STOP: u32 = 256;

/// Id of the non-special token `<think>`.
pub(crate) const THINK: u32 = 257;

/// More ids than the tokenizer has.
pub(crate) const VOCAB: usize = 300;

/// One more than the tokenizer's highest id.
pub(crate) const VOCAB_LIMIT: u32 = 262;

/// Ids below that have no token.
pub(crate) const HOLES: [u32; 2] = [259, 260];

/// Ids 0 to 255 are the bytes; [`STOP`], [`THINK`] and two more special tokens follow.
pub(crate) fn byte_tokenizer() -> Tokenizer {
    Tokenizer::from_json(tokenizer_json().as_bytes(), None).unwrap()
}

/// The file of [`byte_tokenizer`].
pub(crate) fn tokenizer_json() -> String {
    // GPT-2's names: printable bytes are themselves, the others are counted up from U+0100.
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 0x100..;
    let vocab: serde_json::Map<_, _> = (0..=255u8)
        .map(|byte| {
            let code = if printable(byte) { u32::from(byte) } else { others.next().unwrap() };
            (char::from_u32(code).unwrap().to_string(), json!(byte))
        })
        .collect();
    let file = json!({
        "added_tokens": [
            {"id": STOP, "content": "<|im_end|>", "special": true},
            {"id": THINK, "content": "<think>", "special": false},
            {"id": 258, "content": "<|im_start|>", "special": true},
            {"id": 261, "content": "<|endoftext|>", "special": true},
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    file.to_string()
}

pub(crate) fn text_model() -> Arc<TextModel> {
    Arc::new(TextModel {
        tokenizer: byte_tokenizer(),
        template: ChatTemplate::new("").unwrap(),
        stop_tokens: BTreeSet::from([STOP]),
        sampling: Sampling::greedy(),
    })
}

/// What the backend samples.
pub(crate) enum Script {
    /// These tokens, after any prompt; then [`STOP`].
    Tokens(Vec<u32>),
    /// A letter that depends on every token fed so far, in their order, as a real model's would.
    Hash,
}

/// What happened, seen from outside.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    Feed(Vec<u32>),
    FeedSample,
    Wait,
    Snapshot(usize),
    Restore(usize),
    Fork(usize),
    Reset,
}

#[derive(Default)]
struct State {
    capacity: usize,
    fed: Vec<u32>,
    /// Length of the prompt: how much was fed as tokens.
    prompt: usize,
    sampled: Option<u32>,
    lost: bool,
    /// The constraint of the step in flight, and what it would sample without.
    awaits_mask: Option<Ticket>,
}

pub(crate) struct Scripted {
    caps: Caps,
    script: Script,
    states: HashMap<StateId, State>,
    snapshots: HashMap<SnapshotId, Vec<u32>>,
    in_flight: VecDeque<(Ticket, Vec<(StateId, RowOutput)>)>,
    made: u32,
    /// Fail the wait for this ticket.
    fail_at: Option<u64>,
    /// Most bytes of all states; a token takes one.
    memory: usize,
    pub(crate) calls: Arc<Mutex<Vec<Call>>>,
    /// What the last step asked for.
    pub(crate) wants: Arc<Mutex<Vec<Want>>>,
}

impl Scripted {
    pub(crate) fn new(script: Script, steps_in_flight: usize) -> Scripted {
        let caps = Caps {
            name: "scripted".into(),
            max_context: 1000,
            max_chunk: 8,
            max_rows: 1,
            steps_in_flight,
            overlaps: true,
            bytes_per_token: 0,
            bytes_per_state: 0,
            own_memory: false,
            vocab: VOCAB,
        };
        Scripted {
            caps,
            script,
            states: HashMap::new(),
            snapshots: HashMap::new(),
            in_flight: VecDeque::new(),
            made: 0,
            fail_at: None,
            memory: usize::MAX,
            calls: Arc::default(),
            wants: Arc::default(),
        }
    }

    /// Does the work in `submit`.
    pub(crate) fn without_overlap(mut self) -> Scripted {
        self.caps.overlaps = false;
        self
    }

    /// Takes steps of so many rows.
    pub(crate) fn with_rows(mut self, max_rows: usize) -> Scripted {
        self.caps.max_rows = max_rows;
        self
    }

    pub(crate) fn with_context(mut self, max_context: usize) -> Scripted {
        self.caps.max_context = max_context;
        self
    }

    /// Has memory for states of so many tokens together.
    pub(crate) fn with_memory(mut self, tokens: usize) -> Scripted {
        self.memory = tokens;
        self.caps.bytes_per_token = 1;
        self
    }

    /// Says that a state takes so many bytes beside its tokens.
    pub(crate) fn with_state_bytes(mut self, bytes: usize) -> Scripted {
        self.caps.bytes_per_state = bytes;
        self
    }

    pub(crate) fn failing_at(mut self, ticket: u64) -> Scripted {
        self.fail_at = Some(ticket);
        self
    }

    fn call(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn is_in_flight(&self, state: StateId) -> bool {
        self.in_flight.iter().flat_map(|(_, rows)| rows).any(|(other, _)| *other == state)
    }

    fn new_id(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    fn row(&mut self, ticket: Ticket, row: Row) -> (StateId, RowOutput) {
        self.call(match &row.input {
            Input::Tokens(tokens) => Call::Feed(tokens.clone()),
            Input::PreviousSample => Call::FeedSample,
        });
        self.wants.lock().unwrap().push(row.want.clone());
        let mut state = self.states.remove(&row.state).expect("each state once");
        assert!(!state.lost, "a lost state was used");
        assert_eq!(state.awaits_mask, None, "a state was used that waits for a mask");
        match &row.input {
            Input::Tokens(tokens) => {
                assert!((1..=self.caps.max_chunk).contains(&tokens.len()), "chunk of {}", tokens.len());
                state.fed.extend(tokens);
                state.prompt = state.fed.len();
                state.sampled = None;
            }
            Input::PreviousSample => state.fed.push(state.sampled.take().expect("a sample before PreviousSample")),
        }
        assert!(state.fed.len() <= state.capacity, "context overrun");
        let output = match &row.want {
            Want::Token(params) => {
                let id = self.sample(&state);
                state.sampled = Some(id);
                state.awaits_mask = params.masked.then_some(ticket);
                let logprobs =
                    params.logprobs.map(|n| LogProbs { chosen: -(id as f32), top: vec![(id, 0.0); n as usize] });
                RowOutput::Token(SampledToken { id, logprobs })
            }
            _ => RowOutput::Nothing,
        };
        self.states.insert(row.state, state);
        (row.state, output)
    }

    fn sample(&self, state: &State) -> u32 {
        match &self.script {
            Script::Tokens(tokens) => tokens.get(state.fed.len() - state.prompt).copied().unwrap_or(STOP),
            Script::Hash => {
                let hash =
                    state.fed.iter().fold(7u32, |hash, &id| hash.wrapping_mul(31).wrapping_add(id) ^ (hash >> 9));
                u32::from(b'a') + hash % 26
            }
        }
    }
}

impl Backend for Scripted {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn new_state(&mut self, capacity: usize) -> Result<StateId> {
        let used: usize = self.states.values().map(|state| state.capacity).sum();
        if used.saturating_add(capacity) > self.memory {
            return Err(Error::OutOfMemory { what: "a state".into(), needed: capacity, available: self.memory - used });
        }
        let id = StateId(self.new_id());
        self.states.insert(id, State { capacity, ..State::default() });
        Ok(id)
    }

    fn free_state(&mut self, state: StateId) -> Result<()> {
        assert!(self.states.remove(&state).is_some());
        Ok(())
    }

    fn reset_state(&mut self, state: StateId) -> Result<()> {
        assert!(!self.is_in_flight(state), "reset with steps in flight");
        self.call(Call::Reset);
        let state = self.states.get_mut(&state).unwrap();
        *state = State { capacity: state.capacity, ..State::default() };
        Ok(())
    }

    fn position(&self, state: StateId) -> Result<usize> {
        Ok(self.states[&state].fed.len())
    }

    fn snapshot(&mut self, state: StateId) -> Result<SnapshotId> {
        let fed = self.states[&state].fed.clone();
        self.call(Call::Snapshot(fed.len()));
        let id = SnapshotId(self.new_id());
        self.snapshots.insert(id, fed);
        Ok(id)
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) -> Result<()> {
        assert!(self.snapshots.remove(&snapshot).is_some());
        Ok(())
    }

    fn restore(&mut self, state: StateId, snapshot: SnapshotId) -> Result<()> {
        let fed = self.snapshots[&snapshot].clone();
        self.call(Call::Restore(fed.len()));
        let state = self.states.get_mut(&state).unwrap();
        if !state.fed.starts_with(&fed) {
            return Err(Error::BadStep("a snapshot of another past".into()));
        }
        *state = State { capacity: state.capacity, prompt: fed.len(), fed, ..State::default() };
        Ok(())
    }

    fn fork(&mut self, from: StateId, to: StateId) -> Result<()> {
        assert!(!self.is_in_flight(from) && !self.is_in_flight(to), "fork with steps in flight");
        let State { fed, prompt, .. } = &self.states[&from];
        let (fed, prompt) = (fed.clone(), *prompt);
        self.call(Call::Fork(fed.len()));
        let to = self.states.get_mut(&to).unwrap();
        assert!(fed.len() <= to.capacity);
        *to = State { capacity: to.capacity, prompt, fed, ..State::default() };
        Ok(())
    }

    fn export(&mut self, state: StateId, to: &mut dyn Write) -> Result<()> {
        let fed = &self.states[&state].fed;
        to.write_all(&(fed.len() as u64).to_le_bytes())?;
        to.write_all(&fed.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())?;
        Ok(to.write_all(b"end")?)
    }

    fn import(&mut self, state: StateId, from: &mut dyn Read) -> Result<()> {
        let mut count = [0; 8];
        read(from, &mut count)?;
        let mut bytes = vec![0; 4 * u64::from_le_bytes(count) as usize + 3];
        read(from, &mut bytes)?;
        let Some(bytes) = bytes.strip_suffix(b"end") else { return Err(Error::BadExport("it has no end".into())) };
        let fed: Vec<u32> = bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        let state = self.states.get_mut(&state).unwrap();
        *state = State { capacity: state.capacity, prompt: fed.len(), fed, ..State::default() };
        Ok(())
    }

    fn submit(&mut self, step: Step) -> Result<Ticket> {
        assert!(self.in_flight.len() < self.caps.steps_in_flight, "too many steps in flight");
        assert!((1..=self.caps.max_rows).contains(&step.rows.len()), "{} rows", step.rows.len());
        let ticket = Ticket(u64::from(self.new_id()));
        let rows = step.rows.into_iter().map(|row| self.row(ticket, row)).collect();
        self.in_flight.push_back((ticket, rows));
        Ok(ticket)
    }

    fn set_mask(&mut self, ticket: Ticket, row: usize, mask: &[u32]) -> Result<()> {
        let (_, rows) = self.in_flight.iter_mut().find(|(other, _)| *other == ticket).unwrap();
        let (id, output) = &mut rows[row];
        let state = self.states.get_mut(id).unwrap();
        assert_eq!(state.awaits_mask.take(), Some(ticket), "a mask that no row waits for");
        let allowed = |id: &u32| mask.get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        let RowOutput::Token(token) = output else { panic!("a mask without a sample") };
        if !allowed(&token.id) {
            token.id = (0..VOCAB as u32).find(allowed).expect("a mask that allows something");
            state.sampled = Some(token.id);
        }
        Ok(())
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Output> {
        self.call(Call::Wait);
        let (oldest, rows) = self.in_flight.pop_front().unwrap();
        assert_eq!(oldest, ticket, "waited out of order");
        assert!(self.states.values().all(|state| state.awaits_mask != Some(ticket)), "waited without a mask");
        if self.fail_at == Some(ticket.0) {
            for (state, _) in rows {
                self.states.get_mut(&state).unwrap().lost = true;
            }
            return Err(Error::Device("unplugged".into()));
        }
        Ok(Output { rows: rows.into_iter().map(|(_, row)| row).collect(), trace: Vec::new() })
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport { states: self.states.len(), snapshots: self.snapshots.len(), ..MemoryReport::default() }
    }
}
