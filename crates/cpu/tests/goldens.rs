//! The CPU backend against the stored outputs of mlx-lm in float32.

use std::sync::Arc;

use lily_backend::{Backend, Input, Row, RowOutput, SamplingParams, StateId, Step, Want};
use lily_cpu::{CpuBackend, KvDtype, LoadOptions};
use lily_model::Checkpoint;
use lily_reference::golden::{Goldens, compare_logits, tiny_checkpoint, wide_checkpoint};

fn load(directory: std::path::PathBuf, max_chunk: usize) -> CpuBackend {
    load_with(directory, max_chunk, KvDtype::F32)
}

fn load_with(directory: std::path::PathBuf, max_chunk: usize, kv: KvDtype) -> CpuBackend {
    let checkpoint = Arc::new(Checkpoint::open(directory).expect("a checkpoint"));
    let options = LoadOptions { kv, max_context: Some(2048), max_chunk, ..LoadOptions::default() };
    CpuBackend::load(checkpoint, &options).expect("loaded")
}

fn step(backend: &mut CpuBackend, state: StateId, input: Input, want: Want) -> RowOutput {
    let step = Step { rows: vec![Row { state, input, want }], trace: false };
    let ticket = backend.submit(step).expect("accepted");
    backend.wait(ticket).expect("an output").rows.remove(0)
}

/// Logits of every position, the prompt fed in chunks.
fn all_logits(backend: &mut CpuBackend, ids: &[u32], chunk: usize) -> Vec<f32> {
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

/// Largest difference of a logit. Inputs of linears are rounded to 16 bits, 2.4e-5 of their length in every one of a
/// dozen linears on the way; in weights drawn at random nothing damps that. Measured: 1.4e-3 on `tiny`, 1.6e-3 on `wide`. A
/// wrong formula moves some logit by more than 1.
const TOLERANCE: f32 = 4e-3;

/// This backend's error on a router logit: its logits are 1.6e-3 apart, and router logits have passed fewer layers. Below
/// it another expert may be chosen.
const ROUTER_ERROR: f32 = 1e-3;

#[test]
fn tiny_logits_of_every_prompt_are_those_of_the_goldens_where_the_experts_are_decided() {
    let goldens = Goldens::tiny();
    let mut backend = load(tiny_checkpoint(), 512);
    for length in goldens.lengths() {
        let prompt = goldens.prompt(length);
        let vocab = backend.caps().vocab;
        for chunk in [512, 48, 3, 1] {
            let mut logits = all_logits(&mut backend, &prompt.ids, chunk);
            // Where another expert may be chosen one token's logits say nothing; those behind it must fit again.
            for (at, _) in prompt.router_margin.iter().enumerate().filter(|(_, margin)| **margin < ROUTER_ERROR) {
                logits[at * vocab..][..vocab].copy_from_slice(&prompt.logits[at * vocab..][..vocab]);
            }
            let worst = compare_logits(&logits, &prompt.logits, vocab, TOLERANCE);
            let worst = worst.unwrap_or_else(|e| panic!("{length} tokens in chunks of {chunk}: {e}"));
            println!("{length} tokens in chunks of {chunk}: largest difference {worst:e}");
        }
        let undecided = prompt.router_margin.iter().filter(|margin| **margin < ROUTER_ERROR).count();
        assert!(undecided <= length / 100, "{undecided} of {length} tokens were not compared");
    }
}

/// Top-1 minus top-2 below which rounding may choose another token.
const DECIDED: f32 = 1e-2;

#[test]
fn tiny_greedy_tokens_are_those_of_the_goldens_as_long_as_they_are_decided() {
    let goldens = Goldens::tiny();
    let mut backend = load(tiny_checkpoint(), 512);
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

/// Mean difference over all positions, those behind an expert chosen otherwise included: the numeric budget.
const MEAN_TOLERANCE: f64 = 0.03;

fn mean_difference(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let differences = got.iter().zip(expected).map(|(got, expected)| f64::from((got - expected).abs()));
    differences.sum::<f64>() / got.len() as f64
}

fn logits_over_a_bf16_cache_are_within_the_budget_on_average(directory: std::path::PathBuf, goldens: &Goldens) {
    let mut backend = load_with(directory, 512, KvDtype::Bf16);
    for length in goldens.lengths() {
        let prompt = goldens.prompt(length);
        let mean = mean_difference(&all_logits(&mut backend, &prompt.ids, 512), &prompt.logits);
        println!("{length} tokens over a BF16 cache: mean difference {mean:e}");
        assert!(mean < MEAN_TOLERANCE, "{length} tokens over a BF16 cache: mean difference {mean}");
    }
}

#[test]
fn tiny_logits_over_a_bf16_cache_are_within_the_budget_on_average() {
    logits_over_a_bf16_cache_are_within_the_budget_on_average(tiny_checkpoint(), &Goldens::tiny());
}

#[test]
#[ignore = "needs the wide goldens: cargo xtask goldens"]
fn wide_logits_over_a_bf16_cache_are_within_the_budget_on_average() {
    logits_over_a_bf16_cache_are_within_the_budget_on_average(wide_checkpoint(), &Goldens::wide());
}

#[test]
#[ignore = "needs the wide goldens: cargo xtask goldens"]
fn wide_logits_are_those_of_the_goldens_up_to_the_first_undecided_expert_and_close_after_it() {
    let goldens = Goldens::wide();
    let mut backend = load(wide_checkpoint(), 512);
    let vocab = backend.caps().vocab;
    let mut compared = 0;
    for length in goldens.lengths() {
        let prompt = goldens.prompt(length);
        let positions = prompt.comparable_positions(ROUTER_ERROR);
        compared += positions;
        for chunk in [512, 48, 1] {
            let logits = all_logits(&mut backend, &prompt.ids, chunk);
            let (got, expected) = (&logits[..positions * vocab], &prompt.logits[..positions * vocab]);
            let worst = compare_logits(got, expected, vocab, TOLERANCE);
            let worst = worst.unwrap_or_else(|e| panic!("{length} tokens in chunks of {chunk}: {e}"));
            let mean = mean_difference(&logits, &prompt.logits);
            println!(
                "{positions} of {length} positions in chunks of {chunk}: largest difference {worst:e}; mean of all {mean:e}"
            );
            assert!(mean < MEAN_TOLERANCE, "{length} tokens in chunks of {chunk}: mean difference {mean}");
        }
    }
    assert!(compared >= 64, "{compared} positions were comparable");
}
