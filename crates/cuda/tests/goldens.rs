//! The CUDA backend against the stored outputs of mlx-lm in float32.

use std::sync::Arc;

use lily_backend::{Backend, Input, Row, RowOutput, SamplingParams, StateId, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::Checkpoint;
use lily_reference::golden::{Goldens, tiny_checkpoint, wide_checkpoint};

fn load(directory: std::path::PathBuf) -> CudaBackend {
    let checkpoint = Arc::new(Checkpoint::open(directory).expect("a checkpoint"));
    let options = LoadOptions { max_context: Some(2048), max_chunk: Some(512), ..LoadOptions::default() };
    CudaBackend::load(checkpoint, &options).expect("loaded")
}

fn step(backend: &mut CudaBackend, state: StateId, input: Input, want: Want) -> RowOutput {
    let step = Step { rows: vec![Row { state, input, want }], trace: false };
    let ticket = backend.submit(step).expect("accepted");
    backend.wait(ticket).expect("an output").rows.remove(0)
}

/// Logits of every position, the prompt fed in chunks.
fn all_logits(backend: &mut CudaBackend, ids: &[u32], chunk: usize) -> Vec<f32> {
    let state = backend.new_state(ids.len()).expect("a state");
    let mut logits = Vec::new();
    for ids in ids.chunks(chunk) {
        let RowOutput::Logits(part) = step(backend, state, Input::Tokens(ids.to_vec()), Want::AllLogits) else {
            panic!("logits were wanted");
        };
        logits.extend(part);
    }
    backend.free_state(state).expect("freed");
    logits
}

/// Largest difference of the logits of a prompt's first token, which meets no rounded key but its own: softmax over one score is
/// 1 whatever the score. What is left are 16-bit inputs of linears and one rounded value. A wrong formula moves some logit by
/// more than 1.
const FIRST_TOLERANCE: f32 = 2e-2;
/// Mean difference over all positions, those behind an expert chosen otherwise included: the numeric budget of a BF16 cache,
/// which the CPU backend is held to as well.
const MEAN_TOLERANCE: f64 = 0.03;

fn logits_are_those_of_the_goldens(directory: std::path::PathBuf, goldens: &Goldens) {
    let mut backend = load(directory);
    let vocab = backend.caps().vocab;
    for length in goldens.lengths() {
        let prompt = goldens.prompt(length);
        for chunk in [512, 48, 3, 1] {
            let logits = all_logits(&mut backend, &prompt.ids, chunk);
            assert_eq!(logits.len(), prompt.logits.len());
            let differences = logits.iter().zip(&prompt.logits).map(|(got, expected)| (got - expected).abs());
            let mean = differences.clone().map(f64::from).sum::<f64>() / logits.len() as f64;
            let first = differences.take(vocab).fold(0.0, |worst: f32, x| if x <= worst { worst } else { x });
            println!("{length} tokens in chunks of {chunk}: mean difference {mean:e}, largest of the first {first:e}");
            assert!(mean < MEAN_TOLERANCE, "{length} tokens in chunks of {chunk}: mean difference {mean}");
            assert!(first < FIRST_TOLERANCE, "{length} tokens in chunks of {chunk}: first token {first}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_logits_are_those_of_the_goldens() {
    logits_are_those_of_the_goldens(tiny_checkpoint(), &Goldens::tiny());
}

#[test]
#[ignore = "needs an NVIDIA GPU and the wide goldens: cargo xtask goldens"]
fn wide_logits_are_those_of_the_goldens() {
    logits_are_those_of_the_goldens(wide_checkpoint(), &Goldens::wide());
}

/// Top-1 minus top-2 below which a rounded cache may choose another token.
const DECIDED: f32 = 5e-2;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_greedy_tokens_are_those_of_the_goldens_as_long_as_they_are_decided() {
    let goldens = Goldens::tiny();
    let mut backend = load(tiny_checkpoint());
    for length in goldens.lengths() {
        let prompt = goldens.prompt(length);
        let state = backend.new_state(length + prompt.greedy.len()).unwrap();
        for ids in prompt.ids.chunks(512).take(prompt.ids.len().div_ceil(512) - 1) {
            step(&mut backend, state, Input::Tokens(ids.to_vec()), Want::Nothing);
        }
        let last = prompt.ids.chunks(512).next_back().unwrap();
        let mut input = Input::Tokens(last.to_vec());
        for (i, (expected, margin)) in prompt.greedy.iter().zip(&prompt.greedy_margin).enumerate() {
            let RowOutput::Token(token) = step(&mut backend, state, input, Want::Token(SamplingParams::greedy(1024)))
            else {
                panic!("a token was wanted");
            };
            if *margin > DECIDED {
                assert_eq!(token.id, *expected, "{length} tokens, greedy token {i}");
            }
            // An undecided token is fed as the goldens have it.
            input = Input::Tokens(vec![*expected]);
        }
        backend.free_state(state).unwrap();
    }
}
