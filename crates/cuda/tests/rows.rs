//! Rows of a step that share a pass have the bits that they have alone, however many they are.

use std::ops::Range;
use std::sync::Arc;

use lily_backend::conformance::cases::Generator;
use lily_backend::{Backend, Input, Row, RowOutput, SamplingParams, StateId, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::{Checkpoint, Shape};

const CONTEXT: usize = 200;
/// Steps that are decoded together: rows that share a pass write each head's state once in four tokens.
const STEPS: usize = 9;

fn feed(backend: &mut CudaBackend, rows: Vec<Row>) -> Vec<RowOutput> {
    let ticket = backend.submit(Step { rows, trace: false }).expect("accepted");
    backend.wait(ticket).expect("an output").rows
}

/// What row `index` wants: logits, the likeliest token or a drawn one.
fn want(index: usize, vocab: usize) -> Want {
    match index % 3 {
        0 => Want::LastLogits,
        1 => Want::Token(SamplingParams::greedy(vocab as u32)),
        _ => {
            let greedy = SamplingParams::greedy(vocab as u32);
            Want::Token(SamplingParams { temperature: 0.9, top_p: 0.95, seed: index as u64, ..greedy })
        }
    }
}

/// Feeds tokens of their own to some states, all in one step or each in one.
fn steps(backend: &mut CudaBackend, states: &[StateId], prompts: &[Vec<u32>], together: bool) -> Vec<Vec<String>> {
    let vocab = backend.caps().vocab;
    for (state, prompt) in states.iter().zip(prompts) {
        feed(backend, vec![Row { state: *state, input: Input::Tokens(prompt.clone()), want: Want::Nothing }]);
    }
    let mut outputs = vec![Vec::new(); states.len()];
    for step in 0..STEPS {
        let row = |index: usize| {
            let input = if step > 0 && !index.is_multiple_of(3) {
                Input::PreviousSample
            } else {
                Input::Tokens(vec![(prompts[index][0] + step as u32) % vocab as u32])
            };
            Row { state: states[index], input, want: want(index, vocab) }
        };
        let rows: Vec<Row> = (0..states.len()).map(row).collect();
        let results = if together {
            feed(backend, rows)
        } else {
            rows.into_iter().flat_map(|row| feed(backend, vec![row])).collect()
        };
        for (outputs, result) in outputs.iter_mut().zip(results) {
            // Digits that tell every f32 from its neighbours.
            outputs.push(format!("{result:?}"));
        }
    }
    outputs
}

fn rows_are_the_same_together(shape: &Shape, counts: &[usize]) {
    let source = lily_synth::in_memory("random weights", shape, 4).expect("weights");
    let checkpoint = Arc::new(Checkpoint::load(source).expect("a checkpoint"));
    let options = LoadOptions { max_context: Some(CONTEXT), max_chunk: Some(128), ..LoadOptions::default() };
    let mut backend = CudaBackend::load(checkpoint, &options).expect("loaded");
    let most = counts.iter().copied().max().unwrap_or(0);
    let prompts: Vec<Vec<u32>> =
        (0..most).map(|i| Generator::new(i as u64).ids(1 + 7 * i % 100, shape.vocab)).collect();
    let states: Vec<StateId> = (0..most).map(|_| backend.new_state(CONTEXT).expect("a state")).collect();
    let alone = steps(&mut backend, &states, &prompts, false);
    for count in counts {
        for state in &states {
            backend.reset_state(*state).expect("reset");
        }
        let together = steps(&mut backend, &states[..*count], &prompts[..*count], true);
        for (index, (together, alone)) in together.iter().zip(&alone).enumerate() {
            for (step, (together, alone)) in together.iter().zip(alone).enumerate() {
                assert!(together == alone, "{count} rows: row {index} differs in step {step}");
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_of_a_small_model_are_the_same_together() {
    rows_are_the_same_together(&Shape::DEMO, &[2, 3, 4, 5, 16, 17, 35]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_of_odd_sizes_are_the_same_together() {
    let shape = Shape {
        hidden: 768,
        vocab: 333,
        query_heads: 6,
        delta_key_heads: 1,
        delta_value_heads: 3,
        experts: 37,
        experts_per_token: 3,
        expert_width: 192,
        shared_width: 320,
        ..lily_synth::TINY
    };
    rows_are_the_same_together(&shape, &[2, 7, 16]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_of_the_published_sizes_are_the_same_together() {
    rows_are_the_same_together(&Shape { layers: 4, vocab: 4096, ..Shape::QWEN36 }, &[2, 9, 16]);
}

/// What passes together leave of a state is the whole state: for passes alone, snapshots, forks and exports.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn states_go_on_after_passes_together() {
    const ROWS: usize = 3;
    let shape = Shape::DEMO;
    let source = lily_synth::in_memory("random weights", &shape, 4).expect("weights");
    let checkpoint = Arc::new(Checkpoint::load(source).expect("a checkpoint"));
    let options = LoadOptions { max_context: Some(CONTEXT), max_chunk: Some(128), ..LoadOptions::default() };
    let mut backend = CudaBackend::load(checkpoint, &options).expect("loaded");
    let ids: Vec<Vec<u32>> = (0..ROWS).map(|i| Generator::new(i as u64).ids(STEPS, shape.vocab)).collect();
    // Logits of all rows in each of some steps.
    let logits = |backend: &mut CudaBackend, states: &[StateId], steps: Range<usize>, together: fn(usize) -> bool| {
        let mut outputs = Vec::new();
        for step in steps {
            let input = |index: usize| Input::Tokens(vec![ids[index][step]]);
            let row = |index: usize| Row { state: states[index], input: input(index), want: Want::LastLogits };
            let rows: Vec<Row> = (0..ROWS).map(row).collect();
            let results = match together(step) {
                true => feed(backend, rows),
                false => rows.into_iter().flat_map(|row| feed(backend, vec![row])).collect(),
            };
            outputs.push(format!("{results:?}"));
        }
        outputs
    };
    let new_states = |backend: &mut CudaBackend| -> Vec<StateId> {
        (0..ROWS).map(|_| backend.new_state(CONTEXT).expect("a state")).collect()
    };
    let states = new_states(&mut backend);
    let alone = logits(&mut backend, &states, 0..STEPS, |_| false);
    for before in 1..STEPS {
        let [states, forks, imports] = [(); 3].map(|()| new_states(&mut backend));
        assert!(logits(&mut backend, &states, 0..before, |_| true) == alone[..before], "{before} steps together");
        let snapshots: Vec<_> = states.iter().map(|state| backend.snapshot(*state).expect("a snapshot")).collect();
        for (index, state) in states.iter().enumerate() {
            backend.fork(*state, forks[index]).expect("a fork");
            let mut file = Vec::new();
            backend.export(*state, &mut file).expect("an export");
            backend.import(imports[index], &mut &file[..]).expect("an import");
        }
        let expected = &alone[before..];
        assert!(logits(&mut backend, &states, before..STEPS, |_| false) == expected, "alone after {before} steps");
        for (state, snapshot) in states.iter().zip(&snapshots) {
            backend.restore(*state, *snapshot).expect("restored");
            backend.free_snapshot(*snapshot).expect("freed");
        }
        assert!(logits(&mut backend, &states, before..STEPS, |_| true) == expected, "restored after {before} steps");
        assert!(logits(&mut backend, &forks, before..STEPS, |step| step % 3 != 2) == expected, "forks, {before} steps");
        assert!(logits(&mut backend, &imports, before..STEPS, |_| true) == expected, "imports, {before} steps");
        for state in states.into_iter().chain(forks).chain(imports) {
            backend.free_state(state).expect("freed");
        }
    }
}
