//! The whole backend, on the emulator.

mod aligned;
#[expect(unsafe_code, reason = "memory and kernels of an NVIDIA GPU; each with its SAFETY note")]
mod nvidia;

use std::path::Path;

use lily_backend::conformance::Subject;
use lily_backend::{Backend, Error, Input, Row, RowOutput, SamplingParams, StateId, Step, Want};
use lily_cpu::CpuBackend;
use lily_metal_emu::Moved;
use lily_model::{Checkpoint, Shape};
use lily_reference::golden::{Goldens, compare_logits, tiny_checkpoint};

use crate::backend::MetalBackend;
use crate::device::Gpu;
use crate::emulated::Emulated;
use crate::{KernelReport, KvDtype, LoadOptions};

fn load_with(checkpoint: &Checkpoint, kv: KvDtype, order: u32) -> MetalBackend<Emulated> {
    load_on(Emulated::new(order), checkpoint, kv)
}

fn load_on<G: Gpu>(gpu: G, checkpoint: &Checkpoint, kv: KvDtype) -> MetalBackend<G> {
    let options = LoadOptions { kv, max_context: Some(1024), max_chunk: Some(160) };
    MetalBackend::load(gpu, checkpoint, &options).expect("loaded")
}

fn load(kv: KvDtype, order: u32) -> MetalBackend<Emulated> {
    load_with(&Checkpoint::open(tiny_checkpoint()).expect("the tiny checkpoint"), kv, order)
}

fn step(backend: &mut dyn Backend, state: StateId, input: Input, want: Want) -> RowOutput {
    let ticket = backend.submit(Step { rows: vec![Row { state, input, want }], trace: false }).expect("accepted");
    backend.wait(ticket).expect("an output").rows.remove(0)
}

fn logits(backend: &mut dyn Backend, state: StateId, ids: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    for ids in ids.chunks(backend.caps().max_chunk) {
        match step(backend, state, Input::Tokens(ids.to_vec()), Want::AllLogits) {
            RowOutput::Logits(logits) => all.extend(logits),
            other => panic!("logits were wanted, got {other:?}"),
        }
    }
    all
}

lily_backend::conformance_suite! {
    // Kernels of one token and of many sum f32 in other orders, so that a key or value may round to the other neighbour in BF16.
    // Measured: 6.8e-4.
    #[ignore = "needs clang-19; .ci/run installs it and runs them"]
    bf16_kv: Subject { load: &|| Box::new(load(KvDtype::Bf16, 7)), budget: 2e-3, experts_per_token: 2 };
}

/// Activations and sums are f32, whose budget is 2e-3. Measured: 2e-5, as far as the reference itself is from the goldens.
const TOLERANCE: f32 = 2e-4;

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn tiny_logits_are_those_of_the_goldens_and_the_same_in_every_order_of_work() {
    let goldens = Goldens::tiny();
    for length in goldens.lengths().into_iter().filter(|length| *length <= 65) {
        let prompt = goldens.prompt(length);
        let run = |order| {
            let mut backend = load(KvDtype::F32, order);
            let state = backend.new_state(length).expect("a state");
            logits(&mut backend, state, &prompt.ids)
        };
        let first = run(0);
        let worst = compare_logits(&first, &prompt.logits, 1024, TOLERANCE).unwrap_or_else(|e| panic!("{length}: {e}"));
        println!("{length} tokens: largest difference {worst:e}");
        if length <= 7 {
            assert!(first == run(1) && first == run(9), "{length} tokens");
        }
    }
}

/// Prompts of eight tokens and more, whose products are made there.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn tiny_logits_are_those_of_the_goldens_on_tensor_units() {
    let goldens = Goldens::tiny();
    let checkpoint = Checkpoint::open(tiny_checkpoint()).expect("the tiny checkpoint");
    let lengths = goldens.lengths().into_iter().filter(|length| (8..=65).contains(length));
    for (index, length) in lengths.enumerate() {
        let prompt = goldens.prompt(length);
        let run = |order| {
            let mut backend = load_on(Emulated::with_tensor_units(order), &checkpoint, KvDtype::F32);
            assert_eq!(backend.caps().name, "metal (emulated, tensor units)");
            let state = backend.new_state(length).expect("a state");
            logits(&mut backend, state, &prompt.ids)
        };
        let first = run(0);
        let worst = compare_logits(&first, &prompt.logits, 1024, TOLERANCE).unwrap_or_else(|e| panic!("{length}: {e}"));
        println!("{length} tokens: largest difference {worst:e}");
        if index == 0 {
            assert!(first == run(1) && first == run(9), "{length} tokens");
        }
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn the_demo_checkpoint_answers_as_on_the_cpu() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let open = || Checkpoint::open(&demo).expect("the demo checkpoint");
    let mut metal = load_with(&open(), KvDtype::F32, 3);
    let options = lily_cpu::LoadOptions { kv: lily_cpu::KvDtype::F32, threads: Some(1), ..Default::default() };
    let mut cpu = CpuBackend::load(std::sync::Arc::new(open()), &options).expect("loaded");
    let prompt: Vec<u32> = (0..40).map(|i| (i * 97 + 11) % 4000).collect();
    let [on_metal, on_cpu] =
        [&mut metal as &mut dyn Backend, &mut cpu].map(|backend| backend.new_state(80).expect("a state"));
    let (mut a, mut b) = (logits(&mut metal, on_metal, &prompt), logits(&mut cpu, on_cpu, &prompt));
    let vocab = Shape::DEMO.vocab;
    let mut decided = 0;
    for _ in 0..16 {
        // The CPU rounds the inputs of linears to 16 bits, within 4e-3; this backend may be off by 2e-3.
        let worst = compare_logits(&a, &b, vocab, 6e-3).expect("within both budgets");
        println!("{} positions: largest difference {worst:e}", a.len() / vocab);
        let order = lily_reference::ops::falling(&b[b.len() - vocab..]);
        let last = &b[b.len() - vocab..];
        if last[order[0]] - last[order[1]] > 1e-2 {
            assert_eq!(lily_reference::ops::greedy(&a[a.len() - vocab..]), order[0]);
            decided += 1;
        }
        let next = [order[0] as u32];
        (a, b) = (logits(&mut metal, on_metal, &next), logits(&mut cpu, on_cpu, &next));
    }
    assert!(decided > 8, "{decided} of 16 tokens had a margin");
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn two_steps_in_flight_pass_the_token_on_the_device() {
    let mut backend = load(KvDtype::Bf16, 7);
    let (state, twin) = (backend.new_state(64).expect("a state"), backend.new_state(64).expect("a state"));
    let greedy = || Want::Token(SamplingParams::greedy(1024));
    let submit = |backend: &mut MetalBackend<Emulated>, input| {
        backend.submit(Step { rows: vec![Row { state, input, want: greedy() }], trace: false }).expect("accepted")
    };
    let mut ahead = vec![submit(&mut backend, Input::Tokens(vec![5, 6, 7]))];
    let mut tokens = Vec::new();
    for _ in 0..6 {
        ahead.push(submit(&mut backend, Input::PreviousSample));
        let RowOutput::Token(token) = backend.wait(ahead.remove(0)).expect("a token").rows.remove(0) else { panic!() };
        tokens.push(token.id);
    }
    backend.wait(ahead.remove(0)).expect("the last");
    let mut input = Input::Tokens(vec![5, 6, 7]);
    for token in tokens {
        let RowOutput::Token(alone) = step(&mut backend, twin, input, greedy()) else { panic!() };
        assert_eq!(alone.id, token);
        input = Input::Tokens(vec![token]);
    }
}

/// A synthetic context depends on its seed and nothing else, and a refused one leaves the state as it was.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn noise_is_seeded_and_takes_the_place_of_tokens() {
    let run = |kv, seed| {
        let mut backend = load(kv, 0);
        let state = backend.new_state(100).expect("a state");
        logits(&mut backend, state, &[1, 2]);
        backend.feed_noise(state, &[3; 50], seed).expect("noise");
        assert!(matches!(backend.feed_noise(state, &[3; 49], seed), Err(Error::ContextFull { position: 52, .. })));
        assert!(matches!(backend.feed_noise(state, &[u32::MAX], seed), Err(Error::BadStep(_))));
        assert_eq!(backend.position(state).expect("a position"), 52);
        let logits = logits(&mut backend, state, &[4]);
        assert!(logits.iter().all(|logit| logit.is_finite()));
        logits
    };
    for kv in [KvDtype::F32, KvDtype::Bf16] {
        let first = run(kv, 1);
        assert_eq!(first, run(kv, 1));
        assert_ne!(first, run(kv, 2));
    }
}

/// A shape with the layers of the full-size model, as narrow as kernels allow.
fn as_deep_as_qwen36() -> Shape {
    Shape {
        hidden: 64,
        vocab: 128,
        query_heads: 2,
        kv_heads: 1,
        delta_key_heads: 1,
        delta_value_heads: 1,
        experts: 9,
        expert_width: 64,
        shared_width: 64,
        ..Shape::QWEN36
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_token_takes_253_dispatches_and_252_barriers() {
    let source = lily_synth::in_memory("deep", &as_deep_as_qwen36(), 1).expect("a checkpoint");
    let mut backend = load_with(&Checkpoint::load(source).expect("loaded"), KvDtype::Bf16, 0);
    let state = backend.new_state(8).expect("a state");
    for input in [Input::Tokens(vec![3]), Input::PreviousSample] {
        step(&mut backend, state, input, Want::Token(SamplingParams::greedy(128)));
        // 30 layers of 6, 10 of 7, and embedding, head, argmax; one after the other.
        assert_eq!(backend.gpu().counts, (253, 252));
    }
}

/// Four layers of the full-size model, with a smaller vocabulary.
const WIDE: Shape = Shape { layers: 4, vocab: 1024, ..Shape::QWEN36 };

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_token_moves_what_it_has_to_and_little_more() {
    let checkpoint = Checkpoint::load(lily_synth::in_memory("wide", &WIDE, 1).expect("a checkpoint")).expect("loaded");
    let mut backend = load_with(&checkpoint, KvDtype::Bf16, 0);
    let state = backend.new_state(100).expect("a state");
    let position = 5;
    step(&mut backend, state, Input::Tokens((0..position as u32).collect()), Want::Nothing);
    backend.gpu().emulator.take_moved();
    step(&mut backend, state, Input::Tokens(vec![7]), Want::Token(SamplingParams::greedy(1024)));
    let moved: u64 = backend.gpu().emulator.take_moved().iter().map(bytes).sum();
    let weights = checkpoint.weights.bytes_per_token(&WIDE);
    let delta_state = 2 * 4 * WIDE.delta_layers() * WIDE.delta_state_len();
    // Three inputs of the convolution are read and one is written.
    let conv_state = 4 * WIDE.delta_layers() * (WIDE.conv_state_len() + WIDE.conv_width());
    let kv = (position + 1) * WIDE.kv_bytes_per_token(2);
    let floor = (weights + delta_state + conv_state + kv) as f64;
    println!("{moved} bytes, floor {floor}");
    assert!((0.999..1.05).contains(&(moved as f64 / floor)), "{moved} bytes are moved, {floor} have to be");
}

fn bytes(moved: &Moved) -> u64 {
    moved.slots.iter().map(|(_, _, read, written)| read + written).sum()
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_fault_of_the_device_is_an_error_at_wait_and_loses_the_state() {
    let mut backend = load(KvDtype::Bf16, 0);
    let state = backend.new_state(16).expect("a state");
    let scratch = backend.memory().scratch;
    // A head whose rows end too early: the kernel reads beyond them.
    backend.shorten_head();
    let rows = vec![Row { state, input: Input::Tokens(vec![1]), want: Want::LastLogits }];
    let ticket = backend.submit(Step { rows: rows.clone(), trace: false }).expect("accepted");
    let error = backend.wait(ticket).expect_err("a fault");
    assert!(matches!(&error, Error::Device(what) if what.contains("outside of every bound buffer")), "{error}");
    assert!(matches!(backend.submit(Step { rows, trace: false }), Err(Error::StateLost(_))));
    let logits = 4 * backend.caps().vocab;
    assert_eq!(backend.memory().scratch, scratch + logits, "one position's logits are kept for the next step");
    let ids = Input::Tokens(vec![1, 2, 3]);
    backend.reset_state(state).expect("reset");
    let rows = vec![Row { state, input: ids, want: Want::AllLogits }];
    let ticket = backend.submit(Step { rows, trace: false }).expect("accepted");
    backend.wait(ticket).expect_err("a fault");
    assert_eq!(backend.memory().scratch, scratch + logits, "those of a failed step are not");
    backend.reset_state(state).expect("reset");
    step(&mut backend, state, Input::Tokens(vec![1]), Want::Nothing);
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_survey_names_every_kernel_and_goes_on_after_one_that_fails() {
    let mut gpu = Emulated::new(0).refusing("delta_rows_scan");
    let reports = crate::plan::survey(&mut gpu, &lily_synth::TINY, KvDtype::Bf16).expect("a survey");
    for kernel in ["embed", "gemv_q4_head", "attention_rows", "gemm_q4_experts_swiglu INPUTS=256 OUTPUTS=128 SPLIT=128"]
    {
        assert!(reports.iter().any(|report| report.name.contains(kernel)), "{kernel} is missing in {reports:?}");
    }
    let failed = |reports: &[KernelReport], instead: Option<&str>| -> Vec<String> {
        let failed = reports.iter().filter(|report| report.error.is_some() && report.instead == instead);
        failed.map(|report| report.name.clone()).collect()
    };
    assert_eq!(failed(&reports, None), ["delta_rows.metal delta_rows_scan"]);

    let mut gpu = Emulated::with_tensor_units(0).refusing("gemm_q8");
    let reports = crate::plan::survey(&mut gpu, &lily_synth::TINY, KvDtype::Bf16).expect("a survey");
    assert_eq!(failed(&reports, None), [""; 0]);
    let router = "gemm_q8 INPUTS=256 OUTPUTS=9 SPLIT=9";
    let fallback = failed(&reports, Some("matrices of the simdgroup"));
    assert_eq!(fallback, [format!("gemm.metal for tensor units {router}")]);
    assert!(reports.iter().any(|report| report.name == format!("gemm.metal {router}") && report.error.is_none()));
}
