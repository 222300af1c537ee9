//! The laws of the backend contract, for both KV types, on the tiny checkpoint.

use std::sync::Arc;

use lily_backend::Backend;
use lily_backend::conformance::Subject;
use lily_cpu::{CpuBackend, KvDtype, LoadOptions};
use lily_model::Checkpoint;
use lily_reference::golden::tiny_checkpoint;

fn load(kv: KvDtype) -> Box<dyn Backend> {
    let checkpoint = Arc::new(Checkpoint::open(tiny_checkpoint()).expect("the tiny checkpoint"));
    let options = LoadOptions { kv, threads: Some(2), max_context: Some(1024), max_chunk: 128 };
    Box::new(CpuBackend::load(checkpoint, &options).expect("loaded"))
}

lily_backend::conformance_suite! {
    // An input of a linear that lies between two 16-bit values may become either, so two paths are as far from each other
    // as each is from f32: 1.4e-3 in the logits of the tiny checkpoint. An expert chosen otherwise at a near tie would be
    // 1e-1.
    f32_kv: Subject { load: &|| load(KvDtype::F32), budget: 4e-3, experts_per_token: 2 };
    // A key or value that rounds to the other neighbour in BF16 moves logits by up to 2^-9 of what it adds.
    bf16_kv: Subject { load: &|| load(KvDtype::Bf16), budget: 2e-2, experts_per_token: 2 };
}

/// The number of threads changes no bit.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    use lily_backend::{Input, Row, RowOutput, Step, Want};
    let run = |threads| {
        let checkpoint = Arc::new(Checkpoint::open(tiny_checkpoint()).expect("the tiny checkpoint"));
        let options = LoadOptions { threads: Some(threads), max_context: Some(512), ..LoadOptions::default() };
        let mut backend = CpuBackend::load(checkpoint, &options).unwrap();
        let state = backend.new_state(400).unwrap();
        let mut all = Vec::new();
        for ids in [(0..300).collect::<Vec<u32>>(), vec![5], vec![6, 7]] {
            let rows = vec![Row { state, input: Input::Tokens(ids), want: Want::AllLogits }];
            let ticket = backend.submit(Step { rows, trace: false }).unwrap();
            let RowOutput::Logits(logits) = backend.wait(ticket).unwrap().rows.remove(0) else {
                panic!("logits were wanted");
            };
            all.extend(logits.into_iter().map(f32::to_bits));
        }
        all
    };
    let one = run(1);
    assert!(one == run(2), "two threads");
    assert!(one == run(7), "seven threads");
}

/// A synthetic context depends on its seed and nothing else, and a refused one leaves the state as it was.
#[test]
fn noise_is_seeded_and_takes_the_place_of_tokens() {
    use lily_backend::{Error, Input, Row, RowOutput, Step, Want};
    let logits = |seed| {
        let mut backend = load(KvDtype::F32);
        let state = backend.new_state(100).unwrap();
        let feed = |backend: &mut dyn Backend, ids: &[u32]| {
            let rows = vec![Row { state, input: Input::Tokens(ids.to_vec()), want: Want::LastLogits }];
            let ticket = backend.submit(Step { rows, trace: false }).unwrap();
            backend.wait(ticket).unwrap().rows.remove(0)
        };
        feed(&mut *backend, &[1, 2]);
        backend.feed_noise(state, &[3; 50], seed).unwrap();
        assert_eq!(backend.position(state).unwrap(), 52);
        assert!(matches!(backend.feed_noise(state, &[3; 49], seed), Err(Error::ContextFull { position: 52, .. })));
        assert!(matches!(backend.feed_noise(state, &[u32::MAX], seed), Err(Error::BadStep(_))));
        assert_eq!(backend.position(state).unwrap(), 52);
        let RowOutput::Logits(logits) = feed(&mut *backend, &[4]) else { panic!("logits were wanted") };
        logits
    };
    assert_eq!(logits(1), logits(1));
    assert_ne!(logits(1), logits(2));
}
