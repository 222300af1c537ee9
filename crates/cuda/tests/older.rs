//! The kernels of older GPUs, on a newer one: the bits of its own. They have less shared memory and no engine for copies, and do not overlap.

use std::sync::Arc;

use lily_backend::conformance::cases::Generator;
use lily_backend::{Backend, Input, Row, RowOutput, StateId, Step, Want};
use lily_cuda::{CudaBackend, LoadOptions};
use lily_model::{Checkpoint, Shape};

/// So many that a warp of attention has several tiles on every GPU: a part has then more than 128 tokens.
const NOISE: usize = 30_001;
const CONTEXT: usize = NOISE + 64;

/// Logits of some tokens of each of `sessions` sessions, step by step together, behind `noise` tokens of noise.
fn logits(checkpoint: &Arc<Checkpoint>, compute: Option<u32>, sessions: usize, noise: usize) -> Vec<u32> {
    let options = LoadOptions { max_context: Some(CONTEXT), max_chunk: Some(128), compute, ..LoadOptions::default() };
    let mut backend = CudaBackend::load(Arc::clone(checkpoint), &options).expect("loaded");
    let vocab = backend.caps().vocab;
    let states: Vec<StateId> = (0..sessions).map(|_| backend.new_state(CONTEXT).expect("a state")).collect();
    // A token more each: new keys come to different places of a tile.
    for (index, state) in states.iter().enumerate() {
        backend.feed_noise(*state, &vec![1; noise + index], 9).expect("noise");
    }
    let mut bits = Vec::new();
    for step in 0..5 {
        let ids = Generator::new(step).ids(sessions, vocab);
        let row = |(state, id): (&StateId, u32)| Row {
            state: *state,
            input: Input::Tokens(vec![id]),
            want: Want::LastLogits,
        };
        let rows = states.iter().zip(ids).map(row).collect();
        let ticket = backend.submit(Step { rows, trace: false }).expect("accepted");
        for output in backend.wait(ticket).expect("an output").rows {
            let RowOutput::Logits(logits) = output else { panic!("logits were wanted, not {output:?}") };
            bits.extend(logits.iter().map(|x| x.to_bits()));
        }
    }
    bits
}

fn assert_same_bits(shape: &Shape, noise: usize) {
    let source = lily_synth::in_memory("random weights", shape, 5).expect("weights");
    let checkpoint = Arc::new(Checkpoint::load(source).expect("a checkpoint"));
    for sessions in [1, 3, 5, 16] {
        let own = logits(&checkpoint, None, sessions, noise);
        for compute in [80, 86, 89] {
            let older = logits(&checkpoint, Some(compute), sessions, noise);
            assert!(older == own, "{sessions} sessions behind {noise} tokens, as sm_{compute}: logits differ");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0 or newer"]
fn kernels_of_older_gpus_change_no_bit_of_the_demo_model() {
    assert_same_bits(&Shape::DEMO, 37);
}

#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0 or newer"]
fn kernels_of_older_gpus_change_no_bit_at_the_published_sizes() {
    let shape = Shape { layers: 4, vocab: 4096, ..Shape::QWEN36 };
    assert_same_bits(&shape, 37);
    assert_same_bits(&shape, NOISE);
}
