//! The contract at the top of this crate as functions that panic where a backend breaks it.
//!
//! They use nothing but the trait, so a law holds for any checkpoint of at least [`CONTEXT`] tokens of context. Logits
//! are compared bit by bit where the contract says so, within the subject's budget elsewhere.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::conformance::cases::Generator;
use crate::{
    Backend, Error, Input, Output, Part, Row, RowOutput, SampledToken, SamplingParams, Stage, StateId, Step, Ticket,
    Want,
};

pub use super::chunk_laws::*;
pub use super::sampling_laws::*;

/// Context that a subject must offer.
pub const CONTEXT: usize = 256;

/// A backend under test.
pub struct Subject<'a> {
    /// Makes a fresh one.
    pub load: &'a dyn Fn() -> Box<dyn Backend>,
    /// Largest difference of two logits that other chunk borders may make where they change no choice of experts; the reason stands
    /// with the subject.
    pub budget: f32,
    /// Of the checkpoint's shape.
    pub experts_per_token: usize,
}

/// A loaded backend with shorthands that panic on errors.
pub(super) struct Device(pub(super) Box<dyn Backend>);

impl Subject<'_> {
    pub(super) fn device(&self) -> Device {
        Device((self.load)())
    }
}

impl Device {
    pub(super) fn vocab(&self) -> usize {
        self.0.caps().vocab
    }

    /// Seeded ids inside the vocabulary.
    pub(super) fn prompt(&self, seed: u64, tokens: usize) -> Vec<u32> {
        Generator::new(seed).ids(tokens, self.vocab())
    }

    pub(super) fn state(&mut self) -> StateId {
        self.0.new_state(CONTEXT).expect("a state")
    }

    pub(super) fn submit(&mut self, rows: Vec<Row>) -> Ticket {
        self.0.submit(Step { rows, trace: false }).expect("an accepted step")
    }

    pub(super) fn wait(&mut self, ticket: Ticket) -> Output {
        self.0.wait(ticket).expect("an output")
    }

    pub(super) fn step(&mut self, rows: Vec<Row>) -> Vec<RowOutput> {
        let ticket = self.submit(rows);
        self.wait(ticket).rows
    }

    fn one(&mut self, row: Row) -> RowOutput {
        self.step(vec![row]).remove(0)
    }

    pub(super) fn refusal(&mut self, rows: Vec<Row>) -> Error {
        self.0.submit(Step { rows, trace: false }).expect_err("a refused step")
    }

    /// Feeds `ids` in chunks that the backend takes, without any output.
    pub(super) fn feed(&mut self, state: StateId, ids: &[u32]) {
        for ids in ids.chunks(self.0.caps().max_chunk) {
            self.one(Row { state, input: tokens(ids), want: Want::Nothing });
        }
    }

    /// Feeds one chunk and returns the logits of its last token.
    pub(super) fn last_logits(&mut self, state: StateId, ids: &[u32]) -> Vec<f32> {
        logits(self.one(Row { state, input: tokens(ids), want: Want::LastLogits }))
    }

    /// Feeds `ids` in chunks of `chunk` and returns the logits of all.
    pub(super) fn all_logits(&mut self, state: StateId, ids: &[u32], chunk: usize) -> Vec<f32> {
        let chunk = chunk.min(self.0.caps().max_chunk);
        let parts = ids.chunks(chunk).map(|ids| {
            let row = Row { state, input: tokens(ids), want: Want::AllLogits };
            logits(self.one(row))
        });
        parts.collect::<Vec<_>>().concat()
    }

    pub(super) fn sample(&mut self, state: StateId, input: Input, params: SamplingParams) -> SampledToken {
        token(self.one(Row { state, input, want: Want::Token(params) }))
    }

    /// A prefill and some decoding steps, as a continuation that would show any difference in the state.
    fn continuation(&mut self, state: StateId) -> Vec<f32> {
        let ids = self.prompt(99, 12);
        let mut all = self.last_logits(state, &ids[..9]);
        for id in &ids[9..] {
            all.extend(self.last_logits(state, &[*id]));
        }
        all
    }

    pub(super) fn position(&self, state: StateId) -> usize {
        self.0.position(state).expect("a position")
    }
}

pub(super) fn tokens(ids: &[u32]) -> Input {
    Input::Tokens(ids.to_vec())
}

pub(super) fn feed_row(state: StateId, ids: &[u32]) -> Row {
    Row { state, input: tokens(ids), want: Want::Nothing }
}

fn logits(output: RowOutput) -> Vec<f32> {
    match output {
        RowOutput::Logits(logits) => logits,
        other => panic!("logits were wanted, got {other:?}"),
    }
}

pub(super) fn token(output: RowOutput) -> SampledToken {
    match output {
        RowOutput::Token(token) => token,
        other => panic!("a token was wanted, got {other:?}"),
    }
}

fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    let differs = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differs, None, "{what}: first value that differs");
}

/// Two loads of one checkpoint, fed the same chunks, give the same bits.
pub fn the_same_steps_give_the_same_bits(subject: &Subject<'_>) {
    let run = || {
        let mut device = subject.device();
        let state = device.state();
        let ids = device.prompt(2, 40);
        let mut all = device.all_logits(state, &ids, 17);
        all.extend(device.continuation(state));
        all
    };
    assert_same_bits(&run(), &run(), "a second load");
}

/// A row's bits are the same alone and in a step with rows of other lengths, before it or after it.
pub fn batch_neighbours_do_not_change_a_row(subject: &Subject<'_>) {
    let mut device = subject.device();
    let rows = 3.min(device.0.caps().max_rows);
    let prompts: Vec<Vec<u32>> = (0..rows).map(|i| device.prompt(i as u64, [9, 1, 30][i])).collect();
    let mut alone = Vec::new();
    for ids in &prompts {
        let state = device.state();
        let first = device.last_logits(state, ids);
        let second = device.last_logits(state, &ids[..1]);
        alone.push((first, second));
    }
    let states: Vec<StateId> = prompts.iter().map(|_| device.state()).collect();
    let row = |i: usize, ids: &[u32]| Row { state: states[i], input: tokens(ids), want: Want::LastLogits };
    let first = device.step((0..rows).map(|i| row(i, &prompts[i])).collect());
    // The second step has the rows the other way round.
    let second = device.step((0..rows).rev().map(|i| row(i, &prompts[i][..1])).collect());
    let together = first.into_iter().zip(second.into_iter().rev());
    for (i, (together, alone)) in together.zip(alone).enumerate() {
        assert_same_bits(&logits(together.0), &alone.0, &format!("row {i}, first step"));
        assert_same_bits(&logits(together.1), &alone.1, &format!("row {i}, second step"));
    }
}

/// After going back to a snapshot a state continues with the bits that it had the first time, whatever came between.
pub fn a_restored_snapshot_continues_bit_identical(subject: &Subject<'_>) {
    let mut device = subject.device();
    let state = device.state();
    let ids = device.prompt(3, 33);
    device.feed(state, &ids);
    let snapshot = device.0.snapshot(state).expect("a snapshot");
    let first = device.continuation(state);
    device.0.restore(state, snapshot).expect("restored");
    assert_eq!(device.position(state), 33);
    let other = device.prompt(4, 20);
    device.feed(state, &other);
    device.0.restore(state, snapshot).expect("restored again");
    assert_same_bits(&first, &device.continuation(state), "after restoring");
}

/// A snapshot of position 0, and one whose state was reset, fed the same again, or freed, still work.
pub fn a_snapshot_outlives_the_steps_after_it_and_its_state(subject: &Subject<'_>) {
    let mut device = subject.device();
    let state = device.state();
    let start = device.0.snapshot(state).expect("a snapshot of nothing");
    let ids = device.prompt(5, 20);
    device.feed(state, &ids);
    let snapshot = device.0.snapshot(state).expect("a snapshot");
    let first = device.continuation(state);
    device.0.restore(state, start).expect("restored to the start");
    assert_eq!(device.position(state), 0);
    device.feed(state, &ids);
    assert_same_bits(&first, &device.continuation(state), "after the start");
    device.0.free_state(state).expect("freed");
    let heir = device.state();
    device.feed(heir, &ids);
    device.feed(heir, &ids[..3]);
    device.0.restore(heir, snapshot).expect("a state with the same past");
    assert_same_bits(&first, &device.continuation(heir), "in another state");
}

/// A state whose tokens differ from the snapshot's, or are fewer, is refused and not changed.
pub fn a_snapshot_of_another_past_is_refused(subject: &Subject<'_>) {
    let mut device = subject.device();
    let (state, other) = (device.state(), device.state());
    let ids = device.prompt(6, 10);
    device.feed(state, &ids);
    let snapshot = device.0.snapshot(state).expect("a snapshot");
    let mut changed = ids.clone();
    changed[4] = (changed[4] + 1) % device.vocab() as u32;
    device.feed(other, &changed);
    assert!(matches!(device.0.restore(other, snapshot), Err(Error::BadStep(_))), "other tokens");
    assert_eq!(device.position(other), 10);
    device.0.reset_state(other).expect("reset");
    device.feed(other, &ids[..9]);
    assert!(matches!(device.0.restore(other, snapshot), Err(Error::BadStep(_))), "too few tokens");
    assert_eq!(device.position(other), 9);
}

/// A fork has the bits of its source from then on, in a state of any capacity that suffices; what one is fed does not
/// reach the other.
pub fn a_fork_continues_bit_identical_and_leaves_its_source_alone(subject: &Subject<'_>) {
    let mut device = subject.device();
    let source = device.state();
    let ids = device.prompt(7, 31);
    device.feed(source, &ids);
    let fork = device.0.new_state(CONTEXT / 2).expect("a smaller state");
    let old = device.prompt(8, 50);
    device.feed(fork, &old);
    device.0.fork(source, fork).expect("a fork");
    assert_eq!(device.position(fork), 31);
    let forked = device.continuation(fork);
    assert_same_bits(&device.continuation(source), &forked, "source and fork");
    let small = device.0.new_state(8).expect("a small state");
    assert!(matches!(device.0.fork(source, small), Err(Error::ContextFull { .. })), "a fork that does not fit");
    assert_eq!(device.position(small), 0);
}

/// A reset state continues with the bits of a new one.
pub fn a_reset_state_is_a_fresh_one(subject: &Subject<'_>) {
    let mut device = subject.device();
    let (used, fresh) = (device.state(), device.state());
    let ids = device.prompt(9, 60);
    device.feed(used, &ids);
    device.0.reset_state(used).expect("reset");
    assert_eq!(device.position(used), 0);
    assert_same_bits(&device.continuation(fresh), &device.continuation(used), "fresh and reset");
}

/// An export, imported by another load into a state of another capacity, continues with the same bits.
pub fn an_export_continues_bit_identical_after_import(subject: &Subject<'_>) {
    let mut device = subject.device();
    let state = device.state();
    let ids = device.prompt(10, 37);
    device.feed(state, &ids);
    let mut bytes = Vec::new();
    device.0.export(state, &mut bytes).expect("exported");
    let expected = device.continuation(state);
    let mut other = subject.device();
    let heir = other.0.new_state(CONTEXT / 2).expect("a smaller state");
    other.0.import(heir, &mut bytes.as_slice()).expect("imported");
    assert_eq!(other.position(heir), 37);
    assert_same_bits(&expected, &other.continuation(heir), "after import");
    // What was imported knows its tokens: its past can be told from another.
    other.0.import(heir, &mut bytes.as_slice()).expect("imported again");
    let snapshot = other.0.snapshot(heir).expect("a snapshot");
    let same = other.state();
    other.feed(same, &ids);
    other.0.restore(same, snapshot).expect("the same past");
}

/// Truncated, altered and foreign bytes are errors; the state is then at position 0 and usable.
pub fn a_damaged_export_is_refused_and_leaves_position_0(subject: &Subject<'_>) {
    let mut device = subject.device();
    let state = device.state();
    let fresh = device.continuation(state);
    let mut bytes = Vec::new();
    device.0.export(state, &mut bytes).expect("exported");
    let mut damaged: Vec<(String, Vec<u8>)> = [0, 1, 20, bytes.len() / 2, bytes.len() - 1]
        .iter()
        .map(|n| (format!("cut at {n}"), bytes[..*n].into()))
        .collect();
    for at in [0, 17, 25, 40, bytes.len() / 2, bytes.len() - 1] {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x10;
        damaged.push((format!("byte {at} altered"), bytes));
    }
    damaged.push(("not an export".into(), vec![0x7f; 4096]));
    for (what, bytes) in damaged {
        device.feed(state, &[1, 2]);
        let error = device.0.import(state, &mut bytes.as_slice()).expect_err(&what);
        assert!(matches!(error, Error::BadExport(_)), "{what}: {error}");
        assert_eq!(device.position(state), 0, "{what}");
    }
    let small = device.0.new_state(4).expect("a small state");
    device.0.import(small, &mut bytes.as_slice()).expect_err("an export that does not fit");
    assert_same_bits(&fresh, &device.continuation(state), "after refused imports");
}

/// Decoding with the token left on the device gives the tokens that feeding it back gives, with two steps in flight.
pub fn previous_sample_equals_explicit_token(subject: &Subject<'_>) {
    let mut device = subject.device();
    let limit = device.vocab() as u32;
    let ids = device.prompt(11, 15);
    let params = || SamplingParams { temperature: 0.9, seed: 5, ..SamplingParams::greedy(limit) };
    let explicit = device.state();
    let mut expected = vec![device.sample(explicit, tokens(&ids), params()).id];
    for i in 0..10 {
        expected.push(device.sample(explicit, tokens(&[expected[i]]), params()).id);
    }
    let state = device.state();
    let row = |input| vec![Row { state, input, want: Want::Token(params()) }];
    let mut tickets = vec![device.submit(row(tokens(&ids)))];
    let mut got = Vec::new();
    while got.len() < expected.len() {
        if device.0.caps().steps_in_flight > tickets.len() {
            tickets.push(device.submit(row(Input::PreviousSample)));
            continue;
        }
        let output = device.wait(tickets.remove(0));
        got.extend(output.rows.into_iter().map(|row| token(row).id));
    }
    assert_eq!(got, expected);
    for ticket in tickets {
        device.wait(ticket);
    }
}

/// The last sample can be fed only by the state whose last step sampled it: not after a step that sampled nothing, nor
/// after reset, restore, fork or import.
pub fn a_sampled_token_is_not_part_of_the_state(subject: &Subject<'_>) {
    let mut device = subject.device();
    let (state, fork) = (device.state(), device.state());
    let greedy = SamplingParams::greedy(device.vocab() as u32);
    let previous = |state| vec![Row { state, input: Input::PreviousSample, want: Want::Nothing }];
    assert!(matches!(device.refusal(previous(state)), Error::BadStep(_)), "a fresh state");
    let sampled = |device: &mut Device| device.sample(state, tokens(&[1, 2]), greedy.clone());
    sampled(&mut device);
    let snapshot = device.0.snapshot(state).expect("a snapshot");
    device.0.fork(state, fork).expect("a fork");
    assert!(matches!(device.refusal(previous(fork)), Error::BadStep(_)), "after a fork");
    device.step(previous(state));
    assert_eq!(device.position(state), 3);
    assert!(matches!(device.refusal(previous(state)), Error::BadStep(_)), "after a step without a sample");
    sampled(&mut device);
    device.0.restore(state, snapshot).expect("restored");
    assert!(matches!(device.refusal(previous(state)), Error::BadStep(_)), "after restoring");
    sampled(&mut device);
    device.0.reset_state(state).expect("reset");
    assert!(matches!(device.refusal(previous(state)), Error::BadStep(_)), "after a reset");
}

/// No more steps than stated may be unwaited; positions count them; they are waited for in order, each once.
pub fn steps_in_flight_are_bounded_and_waited_for_in_order(subject: &Subject<'_>) {
    let mut device = subject.device();
    let state = device.state();
    let most = device.0.caps().steps_in_flight;
    let tickets: Vec<Ticket> = (0..most).map(|_| device.submit(vec![feed_row(state, &[3])])).collect();
    assert_eq!(device.position(state), most);
    assert!(matches!(device.refusal(vec![feed_row(state, &[3])]), Error::BadStep(_)), "one step too many");
    assert_eq!(device.position(state), most);
    if most > 1 {
        assert!(matches!(device.0.wait(tickets[1]), Err(Error::BadStep(_))), "out of order");
    }
    for ticket in &tickets {
        device.wait(*ticket);
    }
    assert!(matches!(device.0.wait(tickets[0]), Err(Error::Unknown { .. })), "waited for twice");
    device.feed(state, &[4]);
    assert_eq!(device.position(state), most + 1);
}

/// A step that is refused for any row changes no state, and what follows has the bits it would have had.
pub fn refusals_leave_states_untouched(subject: &Subject<'_>) {
    let mut device = subject.device();
    let caps = device.0.caps().clone();
    let (state, other, undisturbed) = (device.state(), device.state(), device.state());
    let small = device.0.new_state(4).expect("a small state");
    let ids = device.prompt(12, 8);
    for state in [state, other, undisturbed] {
        device.feed(state, &ids);
    }
    let good = || feed_row(state, &[1, 2]);
    let vocab = caps.vocab as u32;
    let sampling = |params| Row { state: other, input: tokens(&[1]), want: Want::Token(params) };
    let greedy = || SamplingParams::greedy(vocab);
    let nan = f32::NAN;
    let bad: Vec<(&str, Vec<Row>)> = vec![
        ("no rows", vec![]),
        ("a state twice", vec![good(), good()]),
        ("no tokens", vec![good(), feed_row(other, &[])]),
        ("an id outside the vocabulary", vec![good(), feed_row(other, &[0, vocab])]),
        ("an id far outside", vec![good(), feed_row(other, &[u32::MAX])]),
        ("a chunk too long", vec![good(), feed_row(other, &vec![1; caps.max_chunk + 1])]),
        ("no previous sample", vec![good(), Row { state: other, input: Input::PreviousSample, want: Want::Nothing }]),
        ("too many rows", (0..=caps.max_rows).map(|_| good()).collect()),
        ("a temperature below 0", vec![good(), sampling(SamplingParams { temperature: -1.0, ..greedy() })]),
        ("a temperature that is no number", vec![good(), sampling(SamplingParams { temperature: nan, ..greedy() })]),
        ("no token below the limit", vec![good(), sampling(SamplingParams { vocab_limit: 0, ..greedy() })]),
        ("a repetition penalty of 0", vec![good(), sampling(SamplingParams { repetition_penalty: 0.0, ..greedy() })]),
        (
            "a bias of an unknown id",
            vec![good(), sampling(SamplingParams { logit_bias: Arc::new([(vocab, 1.0)]), ..greedy() })],
        ),
    ];
    for (what, rows) in bad {
        let error = device.refusal(rows);
        assert!(matches!(error, Error::BadStep(_)), "{what}: {error}");
        assert_eq!((device.position(state), device.position(other)), (8, 8), "{what}");
    }
    let error = device.refusal(vec![good(), feed_row(small, &[1; 5])]);
    assert!(matches!(error, Error::ContextFull { position: 0, more: 5, capacity: 4 }), "{error}");
    let error = device.refusal(vec![good(), feed_row(StateId(u32::MAX), &[1])]);
    assert!(matches!(error, Error::Unknown { what: "state", .. }), "{error}");
    assert_eq!(device.position(state), 8);
    let expected = device.continuation(undisturbed);
    for state in [state, other] {
        assert_same_bits(&expected, &device.continuation(state), "after refusals");
    }
}

/// Tokens fill a state to its last place; one more is refused.
pub fn a_full_context_is_an_error_and_its_last_token_fits(subject: &Subject<'_>) {
    let mut device = subject.device();
    let state = device.0.new_state(9).expect("a state");
    let ids = device.prompt(13, 9);
    device.feed(state, &ids[..7]);
    let error = device.refusal(vec![feed_row(state, &ids[..3])]);
    assert!(matches!(error, Error::ContextFull { position: 7, more: 3, capacity: 9 }), "{error}");
    device.feed(state, &ids[7..]);
    assert_eq!(device.position(state), 9);
    let error = device.refusal(vec![feed_row(state, &ids[..1])]);
    assert!(matches!(error, Error::ContextFull { position: 9, more: 1, capacity: 9 }), "{error}");
}

/// States, snapshots and tickets that do not exist (any more) are errors in every call.
pub fn what_was_freed_is_unknown(subject: &Subject<'_>) {
    let mut device = subject.device();
    let (state, gone) = (device.state(), device.state());
    let snapshot = device.0.snapshot(state).expect("a snapshot");
    device.0.free_snapshot(snapshot).expect("freed");
    device.0.free_state(gone).expect("freed");
    let d = &mut device.0;
    let results = [
        ("free_state", d.free_state(gone)),
        ("reset_state", d.reset_state(gone)),
        ("position", d.position(gone).map(drop)),
        ("snapshot", d.snapshot(gone).map(drop)),
        ("restore", d.restore(gone, snapshot)),
        ("restore of a freed snapshot", d.restore(state, snapshot)),
        ("free_snapshot", d.free_snapshot(snapshot)),
        ("fork from", d.fork(gone, state)),
        ("fork to", d.fork(state, gone)),
        ("export", d.export(gone, &mut Vec::new())),
        ("import", d.import(gone, &mut [].as_slice())),
        ("wait", d.wait(Ticket(u64::MAX)).map(drop)),
        ("set_mask", d.set_mask(Ticket(u64::MAX), 0, &[])),
    ];
    for (call, result) in results {
        assert!(matches!(result, Err(Error::Unknown { .. })), "{call}: {result:?}");
    }
}

/// A state of no tokens or of more than the longest context is refused; memory is accounted for.
pub fn stated_limits_hold(subject: &Subject<'_>) {
    let mut device = subject.device();
    let caps = device.0.caps().clone();
    assert!(caps.max_context >= CONTEXT, "a subject has {CONTEXT} tokens of context");
    assert!(caps.max_chunk > 0 && caps.max_rows > 0 && caps.steps_in_flight > 0 && !caps.name.is_empty());
    device.0.new_state(0).expect_err("a state of no tokens");
    device.0.new_state(caps.max_context + 1).expect_err("a state longer than the longest");
    let before = device.0.memory();
    assert!(before.weights_mapped + before.weights_owned > 0);
    let state = device.state();
    let snapshot = device.0.snapshot(state).expect("a snapshot");
    let during = device.0.memory();
    assert!(during.states >= before.states + caps.bytes_per_state + CONTEXT * caps.bytes_per_token);
    assert!(during.snapshots >= before.snapshots + caps.bytes_per_state);
    device.0.free_snapshot(snapshot).expect("freed");
    device.0.free_state(state).expect("freed");
    let after = device.0.memory();
    assert_eq!((after.states, after.snapshots), (before.states, before.snapshots));
}

/// A traced step records every stage of every layer once per row, with as many tokens as the row has, and has the bits of
/// an untraced one.
pub fn a_trace_has_every_stage_and_changes_nothing(subject: &Subject<'_>) {
    const LAYER: [Part; 6] = [Part::MixerNorm, Part::Mixer, Part::MoeNorm, Part::Router, Part::Moe, Part::Layer];
    let mut device = subject.device();
    let ids = device.prompt(19, 5);
    let (state, untraced) = (device.state(), device.state());
    let row = Row { state, input: tokens(&ids), want: Want::LastLogits };
    let ticket = device.0.submit(Step { rows: vec![row], trace: true }).expect("accepted");
    let mut output = device.wait(ticket);
    assert_same_bits(&logits(output.rows.remove(0)), &device.last_logits(untraced, &ids), "traced and untraced");
    let stages: Vec<Stage> = output.trace.iter().map(|stage| stage.stage).collect();
    let layers = stages.iter().filter_map(|stage| stage.layer).max().map_or(0, |last| last + 1);
    assert!(layers > 0);
    let mut expected: BTreeSet<Stage> =
        (0..layers).flat_map(|layer| LAYER.map(|part| Stage::of(layer, part))).collect();
    expected.extend([Stage::outside(Part::Embedding), Stage::outside(Part::FinalNorm)]);
    assert_eq!(stages.iter().copied().collect::<BTreeSet<_>>(), expected);
    assert_eq!(stages.len(), expected.len(), "each stage once");
    let length_of = |wanted: Stage| output.trace.iter().find(|stage| stage.stage == wanted).map(|s| s.values.len());
    let hidden = length_of(Stage::outside(Part::FinalNorm)).expect("the final norm, of one token");
    for stage in &output.trace {
        let tokens = if stage.stage.part == Part::FinalNorm { 1 } else { ids.len() };
        assert_eq!(stage.row, 0);
        assert!(stage.values.iter().all(|x| x.is_finite()), "{}", stage.stage);
        match stage.stage.part {
            Part::Router => assert!(stage.values.len().is_multiple_of(tokens), "{}", stage.stage),
            _ => assert_eq!(stage.values.len(), tokens * hidden, "{}", stage.stage),
        }
    }
}
