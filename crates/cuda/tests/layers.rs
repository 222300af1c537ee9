//! Every stage of a forward pass against the reference, at the sizes of Qwen3.6's own layers and at sizes that fill no tile; and
//! attention far from the start.

use std::sync::Arc;

use lily_backend::conformance::cases::{Generator, round_to_bf16};
use lily_backend::{Backend, Input, Part, Row, RowOutput, StageOutput, StateId, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::{Checkpoint, Shape};
use lily_reference::{LayerState, Reference};

/// No two sizes equal, none a whole number of blocks or tiles where it need not be.
const ODD: Shape = Shape {
    hidden: 768,
    layers: 4,
    vocab: 333,
    query_heads: 6,
    kv_heads: 2,
    delta_key_heads: 1,
    delta_value_heads: 3,
    experts: 37,
    experts_per_token: 3,
    expert_width: 192,
    shared_width: 320,
    max_context: 262_144,
    ..Shape::QWEN36
};
/// Layers as the published model has them, few of them.
const PUBLISHED: Shape = Shape { layers: 4, vocab: 4096, ..Shape::QWEN36 };
/// Attention as the published model has it.
const LONG: Shape = Shape { query_heads: 16, kv_heads: 2, ..lily_synth::TINY };

/// Largest difference of a value, as a share of the largest one of its stage or of 1. Inputs of linears are rounded to 2.4e-5 of their
/// length, keys and values to 2^-9; a wrong formula moves some value by a tenth.
const TOLERANCE: f32 = 4e-3;
/// Router logits this close may be ordered either way; what comes after such a choice is not compared.
const ROUTER_ERROR: f32 = 2e-3;

fn checkpoint(shape: &Shape) -> Arc<Checkpoint> {
    let source = lily_synth::in_memory("random weights", shape, 3).expect("weights");
    Arc::new(Checkpoint::load(source).expect("a checkpoint"))
}

fn load(checkpoint: &Arc<Checkpoint>, max_context: usize) -> CudaBackend {
    let options = LoadOptions { max_context: Some(max_context), max_chunk: Some(512) };
    CudaBackend::load(Arc::clone(checkpoint), &options).expect("loaded")
}

/// Logits and stages of a chunk, and its logits once more without a trace.
fn feed(backend: &mut CudaBackend, state: StateId, ids: &[u32], trace: bool) -> (Vec<f32>, Vec<StageOutput>) {
    let rows = vec![Row { state, input: Input::Tokens(ids.to_vec()), want: Want::AllLogits }];
    let ticket = backend.submit(Step { rows, trace }).expect("accepted");
    let mut output = backend.wait(ticket).expect("an output");
    let RowOutput::Logits(logits) = output.rows.remove(0) else { panic!("logits were wanted") };
    (logits, output.trace)
}

/// Tokens before the first choice of experts that rounding may change.
fn decided(expected: &[StageOutput], shape: &Shape, tokens: usize) -> usize {
    let routers = expected.iter().filter(|stage| stage.stage.part == Part::Router);
    let undecided = routers.filter_map(|stage| {
        stage.values.chunks_exact(shape.experts).position(|logits| {
            let mut falling = logits.to_vec();
            falling.sort_by(|a, b| b.total_cmp(a));
            falling[shape.experts_per_token - 1] - falling[shape.experts_per_token] < ROUTER_ERROR
        })
    });
    undecided.min().unwrap_or(tokens)
}

/// Of the first `tokens` tokens; the largest difference.
fn assert_same(got: &[f32], expected: &[f32], width: usize, tokens: usize, what: &str) -> f32 {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    let (got, expected) = (&got[..tokens * width], &expected[..tokens * width]);
    let largest = expected.iter().fold(1.0, |largest: f32, x| largest.max(x.abs()));
    let mut worst = 0.0;
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let difference = (got - expected).abs() / largest;
        assert!(
            difference <= TOLERANCE,
            "{what}: token {}, value {}: {got}, expected {expected}",
            i / width,
            i % width
        );
        worst = difference.max(worst);
    }
    worst
}

/// Feeds chunks to both and compares every stage of each, up to the first undecided choice. Returns how many tokens it compared.
fn compare_stages(checkpoint: &Arc<Checkpoint>, seed: u64, chunks: &[usize]) -> usize {
    let shape = &checkpoint.config.shape;
    let ids = Generator::new(seed).ids(chunks.iter().sum(), shape.vocab);
    let reference = Reference::new(checkpoint);
    let mut its_state = reference.new_state();
    let mut backend = load(checkpoint, 1024);
    let (traced, plain) = (backend.new_state(1024).expect("a state"), backend.new_state(1024).expect("a state"));
    let mut first = 0;
    for chunk in chunks {
        let ids = &ids[first..][..*chunk];
        let (logits, expected) = reference.traced(&mut its_state, ids);
        let (got_logits, got) = feed(&mut backend, traced, ids, true);
        let (untraced, _) = feed(&mut backend, plain, ids, false);
        assert!(got_logits.iter().zip(&untraced).all(|(a, b)| a.to_bits() == b.to_bits()), "a trace changes logits");
        let tokens = decided(&expected.stages, shape, *chunk);
        let mut worst = (0.0, String::new());
        for (got, expected) in got.iter().zip(&expected.stages) {
            let what = format!("{} of {chunk} tokens from {first} on", expected.stage);
            assert_eq!(got.stage, expected.stage, "{what}");
            let width = expected.values.len() / chunk;
            let difference = assert_same(&got.values, &expected.values, width, tokens, &what);
            if difference > worst.0 {
                worst = (difference, expected.stage.to_string());
            }
        }
        let off = assert_same(&got_logits, &logits, shape.vocab, tokens, "logits");
        println!(
            "{chunk} tokens from {first} on, {tokens} compared: stages {:e} ({}), logits {off:e}",
            worst.0, worst.1
        );
        if tokens < *chunk {
            return first + tokens;
        }
        first += chunk;
    }
    first
}

/// Prompts of several seeds, cut in the same way; together they must have `least` tokens before undecided choices.
fn assert_stages(shape: &Shape, seeds: u64, chunks: &[usize], least: usize) {
    let checkpoint = checkpoint(shape);
    let compared: usize = (0..seeds).map(|seed| compare_stages(&checkpoint, seed, chunks)).sum();
    assert!(compared >= least, "{compared} tokens were compared, expected at least {least}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn stages_of_odd_sizes_are_those_of_the_reference() {
    assert_stages(&ODD, 8, &[1, 2, 13, 1, 17, 70, 1, 1], 40);
    assert_stages(&ODD, 8, &[70, 1], 40);
}

#[test]
#[ignore = "needs an NVIDIA GPU, and a minute of the reference"]
fn stages_of_the_published_sizes_are_those_of_the_reference_token_by_token() {
    assert_stages(&PUBLISHED, 1, &[1, 1, 1], 3);
}

#[test]
#[ignore = "needs an NVIDIA GPU, and a minute of the reference"]
fn stages_of_the_published_sizes_are_those_of_the_reference_in_chunks() {
    assert_stages(&PUBLISHED, 3, &[11, 67, 1, 40], 10);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn attention_is_that_of_the_reference_beyond_100_000_tokens() {
    const NOISE: usize = 131_003;
    let checkpoint = checkpoint(&LONG);
    let reference = Reference::new(&checkpoint);
    let mut backend = load(&checkpoint, NOISE + 64);
    let state = backend.new_state(NOISE + 64).expect("a state");
    let mut its_state = reference.new_state();
    // The noise of `feed_noise`: the same in every head, one value after the other.
    let mut noise = Generator::new(9);
    let rows: Vec<Vec<f32>> = (0..NOISE)
        .map(|_| {
            let value = |_| round_to_bf16(3f32.sqrt() * (2.0 * noise.uniform() - 1.0));
            let head: Vec<f32> = (0..Shape::HEAD_DIM).map(value).collect();
            head.repeat(LONG.kv_heads)
        })
        .collect();
    for layer in &mut its_state.layers {
        if let LayerState::Attention { keys, values } = layer {
            *keys = rows.concat();
            values.clone_from(keys);
        }
    }
    its_state.position = NOISE;
    backend.feed_noise(state, &vec![1; NOISE], 9).expect("noise");
    for chunk in [1, 1, 5] {
        let ids = Generator::new(chunk as u64).ids(chunk, LONG.vocab);
        let (logits, expected) = reference.traced(&mut its_state, &ids);
        let (got_logits, got) = feed(&mut backend, state, &ids, true);
        let tokens = decided(&expected.stages, &LONG, chunk);
        for (got, expected) in got.iter().zip(&expected.stages) {
            let width = expected.values.len() / chunk;
            let what = format!("{} of {chunk} tokens", expected.stage);
            let off = assert_same(&got.values, &expected.values, width, tokens, &what);
            if expected.stage.part == Part::Mixer {
                println!("{what}, {tokens} compared: {off:e}");
            }
        }
        assert_same(&got_logits, &logits, LONG.vocab, tokens, "logits");
        assert_eq!(tokens, chunk, "a choice is undecided; take another seed");
    }
}
