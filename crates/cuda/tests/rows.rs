//! Rows of a step that share a pass have the bits that they have alone, however many they are.

use std::sync::Arc;

use lily_backend::conformance::cases::Generator;
use lily_backend::{Backend, Input, Row, RowOutput, SamplingParams, StateId, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::{Checkpoint, Shape};

const CONTEXT: usize = 200;
/// Steps that are decoded together.
const STEPS: usize = 4;

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
