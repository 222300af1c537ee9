//! The engine on the CPU backend with the tiny checkpoint, against the stored outputs of mlx-lm in float32.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::sync::Arc;

use lily_cpu::{CpuBackend, KvDtype, LoadOptions};
use lily_engine::{
    CancelToken, Engine, EngineOptions, Event, FinishReason, Finished, GenerateRequest, LogProbs, Prompt, Sampling,
    SessionOptions, StoreOptions, TextModel, Token, Tokenizer,
};
use lily_model::Checkpoint;
use lily_reference::golden::{Goldens, tiny_checkpoint};
use serde_json::{Value, json};

/// Top-1 minus top-2 below which rounding may choose another token.
const DECIDED: f32 = 1e-2;
/// Largest error of a logit of the CPU backend on this checkpoint, as its own tests have it.
const LOGIT_ERROR: f32 = 4e-3;

/// The tokenizer of the tiny checkpoint with a token for each of its ids, so that none is masked.
fn full_tokenizer() -> Tokenizer {
    let file = std::fs::read(tiny_checkpoint().join("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&file, None).unwrap();
    let mut json: Value = serde_json::from_slice(&file).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    let missing = (0..1024u32).filter(|id| tokenizer.token_bytes(*id).is_none());
    added.extend(missing.map(|id| json!({"id": id, "content": format!("<{id}>"), "special": false})));
    Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap()
}

fn open(max_chunk: usize) -> Engine {
    open_with(max_chunk, EngineOptions::single())
}

fn open_with(max_chunk: usize, options: EngineOptions) -> Engine {
    let checkpoint = Arc::new(Checkpoint::open(tiny_checkpoint()).unwrap());
    let mut text = TextModel::load(&checkpoint.source, &checkpoint.config).unwrap();
    text.tokenizer = full_tokenizer();
    let load = LoadOptions { kv: KvDtype::F32, max_context: Some(2048), max_chunk, ..LoadOptions::default() };
    let backend = CpuBackend::load(checkpoint, &load).unwrap();
    Engine::with_options(Box::new(backend), Arc::new(text), options).unwrap()
}

fn greedy(max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        sampling: Sampling::greedy(),
        max_tokens: Some(max_tokens),
        logprobs: Some(20),
        ignore_stop_tokens: true,
        ..GenerateRequest::default()
    }
}

fn run(engine: &mut Engine, prompt: &Prompt, request: GenerateRequest) -> (Vec<Token>, Finished) {
    let mut tokens = Vec::new();
    for event in engine.generate(prompt, request).unwrap() {
        match event.unwrap() {
            Event::PromptProgress { .. } => {}
            Event::Token(token) => tokens.push(token),
            Event::Finished(end) => return (tokens, end),
        }
    }
    panic!("no end");
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

fn logprobs(token: &Token) -> &LogProbs {
    token.logprobs.as_ref().unwrap()
}

/// Checks that two greedy answers are the same up to the first token that rounding may decide.
fn assert_same_where_decided(found: &[Token], expected: &[Token]) {
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let top = &logprobs(expected).top;
        if top[0].1 - top[1].1 < DECIDED {
            // Too early, and nothing would have been compared.
            assert!(at >= 8, "token {at} is undecided");
            return;
        }
        assert_eq!(found.id, expected.id, "token {at}");
    }
}

#[test]
fn greedy_tokens_are_those_of_the_goldens_as_long_as_they_are_decided() {
    let goldens = Goldens::tiny();
    let mut engine = open(48);
    for length in goldens.lengths() {
        let golden = goldens.prompt(length);
        let (tokens, end) = run(&mut engine, &golden.ids.clone().into(), greedy(golden.greedy.len()));
        let decided = golden.greedy_margin.iter().position(|m| *m < DECIDED).unwrap_or(golden.greedy.len());
        assert!(decided > 0);
        assert_eq!(ids(&tokens)[..decided], golden.greedy[..decided], "{length} tokens");
        assert_eq!((end.reason, end.generated_tokens), (FinishReason::Length, golden.greedy.len()));
    }
}

#[test]
fn logprobs_are_the_log_softmax_of_the_golden_logits() {
    let goldens = Goldens::tiny();
    let mut engine = open(512);
    for length in goldens.lengths() {
        let golden = goldens.prompt(length);
        let logits = &golden.logits[golden.logits.len() - 1024..];
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - highest).exp()).sum();
        let expected = |id: u32| logits[id as usize] - highest - sum.ln() as f32;
        // The report is of the raw logits, whatever the sampling.
        let sampling = Sampling { temperature: Some(2.0), seed: Some(1), ..Sampling::default() };
        let request = GenerateRequest { sampling, ..greedy(1) };
        let (tokens, _) = run(&mut engine, &golden.ids.into(), request);
        let found = logprobs(&tokens[0]);
        // Both terms of a log-probability are off by at most what a logit may be.
        let near = |id: u32, value: f32| assert!((value - expected(id)).abs() < 2.0 * LOGIT_ERROR, "{length}: {id}");
        near(tokens[0].id, found.chosen);
        assert_eq!(found.top.len(), 20);
        found.top.iter().for_each(|&(id, value)| near(id, value));
        assert!(found.top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        let twentieth = found.top[19].1 + 4.0 * LOGIT_ERROR;
        let above = (0..1024).filter(|&id| expected(id) > twentieth && found.top.iter().all(|top| top.0 != id)).count();
        assert_eq!(above, 0, "a more likely token is not in the report");
    }
}

#[test]
fn an_answer_after_reuse_is_that_of_a_cold_run() {
    let goldens = Goldens::tiny();
    let mut engine = open(48);
    let first = goldens.prompt(65).ids;
    let (answer, _) = run(&mut engine, &first.clone().into(), greedy(20));
    let second: Vec<u32> = [first, ids(&answer), goldens.prompt(64).ids].concat();
    let (warm, end) = run(&mut engine, &second.clone().into(), greedy(32));
    // The twentieth token was not fed.
    assert_eq!(end.cached_tokens, 65 + 19);
    let mut engine = open(512);
    let (cold, end) = run(&mut engine, &second.into(), greedy(32));
    assert_eq!(end.cached_tokens, 0);
    assert_same_where_decided(&warm, &cold);
}

#[test]
fn a_branch_continues_bit_for_bit_like_a_cold_run_with_the_same_borders() {
    let golden = Goldens::tiny().prompt(1000).ids;
    let prompt = Prompt { branches: vec![200, 600], ..golden.clone().into() };
    let other = Prompt { branches: vec![200], ..[&golden[..200], &golden[..30]].concat().into() };
    let folder = tempfile::tempdir().unwrap();
    let store = StoreOptions { folder: folder.path().to_owned(), bytes: 1 << 30 };
    let single = EngineOptions::single().sessions;
    let several = SessionOptions { most: 4, room: Some(64), ..single.clone() };
    // By going back, in a copy that then grows, and from the disk.
    for (sessions, expected) in
        [(single.clone(), 200), (several, 600), (SessionOptions { store: Some(store), ..single }, 600)]
    {
        let stored = sessions.store.is_some();
        let mut engine = open_with(48, EngineOptions { sessions, ..EngineOptions::single() });
        let (cold, end) = run(&mut engine, &prompt, greedy(80));
        assert_eq!(end.cached_tokens, 0);
        if stored {
            engine.clear_cache();
        } else {
            let (_, end) = run(&mut engine, &other, greedy(8));
            assert_eq!(end.cached_tokens, 200);
        }
        let (warm, end) = run(&mut engine, &prompt, greedy(80));
        assert_eq!(end.cached_tokens, expected);
        assert_eq!(warm, cold);
    }
}

/// Where a prompt leaves another, at every length: all layers go back there, or none.
#[test]
fn every_boundary_continues_bit_for_bit_like_a_cold_run() {
    let golden = Goldens::tiny().prompt(1000).ids;
    let mut engine = open(48);
    for boundary in 1..=300 {
        let known = &golden[..boundary];
        let first = Prompt { branches: vec![boundary], ..[known, &golden[400..403]].concat().into() };
        let second = Prompt { branches: vec![boundary], ..[known, &golden[600..605]].concat().into() };
        run(&mut engine, &first, greedy(1));
        let (warm, end) = run(&mut engine, &second, greedy(3));
        assert_eq!(end.cached_tokens, boundary);
        engine.clear_cache();
        let (cold, end) = run(&mut engine, &second, greedy(3));
        assert_eq!(end.cached_tokens, 0);
        assert_eq!(warm, cold, "{boundary}");
        engine.clear_cache();
    }
}

#[test]
fn an_answer_after_cancelling_is_that_of_a_cold_run() {
    let golden = Goldens::tiny().prompt(300).ids;
    let mut engine = open(48);
    let (cold, _) = run(&mut engine, &golden.clone().into(), greedy(32));
    // Events: progress 0, 48, ..., 300, then tokens.
    for events in [3, 12] {
        let mut engine = open(48);
        let cancel = CancelToken::default();
        let request = GenerateRequest { cancel: cancel.clone(), ..greedy(32) };
        let prompt = golden.clone().into();
        let mut generation = engine.generate(&prompt, request).unwrap();
        for event in generation.by_ref().take(events) {
            event.unwrap();
        }
        cancel.cancel();
        let last = generation.last().unwrap().unwrap();
        assert!(matches!(last, Event::Finished(Finished { reason: FinishReason::Cancelled, .. })));
        // The rest of the cold run, from its 17th token on.
        let next: Vec<u32> = golden.iter().copied().chain(ids(&cold)).take(golden.len() + 16).collect();
        let (rest, end) = run(&mut engine, &next.into(), greedy(16));
        // The events: progress from 0 to 300 in steps of 48, then tokens; some steps more were on their way.
        let fed = if events == 3 { 96..=192 } else { 303..=308 };
        assert!(fed.contains(&end.cached_tokens), "{}", end.cached_tokens);
        assert_same_where_decided(&rest, &cold[16..]);
    }
}

#[test]
fn a_long_prompt_takes_memory_for_its_tokens_only() {
    let golden = Goldens::tiny().prompt(1000).ids;
    let sessions = SessionOptions { room: Some(64), ..EngineOptions::single().sessions };
    let [short, long] = [64, 1500].map(|length| {
        let mut engine = open_with(48, EngineOptions { sessions: sessions.clone(), ..EngineOptions::single() });
        let prompt: Vec<u32> = golden.iter().copied().cycle().take(length).collect();
        run(&mut engine, &prompt.into(), greedy(2));
        (engine.memory(), engine.caps().clone())
    });
    let (caps, [short, long]) = (short.1, [short.0, long.0]);
    // Rooms come in steps of 1024 tokens.
    assert_eq!(long.states - short.states, 1024 * caps.bytes_per_token);
    assert_eq!((long.scratch, long.weights_owned), (short.scratch, short.weights_owned));
    assert!(long.snapshots <= 6 * caps.bytes_per_state);
}

#[test]
fn a_seed_repeats_an_answer_and_another_does_not() {
    let prompt: Prompt = Goldens::tiny().prompt(7).ids.into();
    let mut engine = open(512);
    let mut sample = |seed| {
        let sampling = Sampling { temperature: Some(1.0), top_p: Some(0.95), seed, ..Sampling::default() };
        let (tokens, end) = run(&mut engine, &prompt, GenerateRequest { sampling, ..greedy(24) });
        (ids(&tokens), end.seed)
    };
    let (first, seed) = sample(None);
    assert_eq!(sample(Some(seed)).0, first);
    assert_ne!(sample(Some(seed + 1)).0, first);
    assert_ne!(sample(None).1, seed);
}

#[test]
fn penalties_act_on_the_answer_only() {
    let prompt: Prompt = Goldens::tiny().prompt(64).ids.into();
    let mut engine = open(512);
    let (plain, _) = run(&mut engine, &prompt, greedy(32));
    let sampling = Sampling { presence_penalty: Some(2.0), frequency_penalty: Some(2.0), ..Sampling::greedy() };
    let (tokens, _) = run(&mut engine, &prompt, GenerateRequest { sampling, ..greedy(32) });
    // The goldens' answer to 64 tokens repeats 942, 703 and 138; its first token is new whatever the prompt holds.
    assert_eq!(tokens[0].id, plain[0].id);
    assert_ne!(ids(&tokens), ids(&plain));
}

#[test]
fn tokens_that_the_tokenizer_does_not_have_are_never_sampled() {
    let checkpoint = Arc::new(Checkpoint::open(tiny_checkpoint()).unwrap());
    let text = Arc::new(TextModel::load(&checkpoint.source, &checkpoint.config).unwrap());
    let options = LoadOptions { max_context: Some(512), ..LoadOptions::default() };
    let backend = CpuBackend::load(checkpoint, &options).unwrap();
    let mut engine = Engine::new(Box::new(backend), text.clone());
    let hot = Sampling { temperature: Some(2.0), top_k: Some(0), top_p: Some(1.0), ..Sampling::default() };
    for sampling in [Sampling::greedy(), hot] {
        let request = GenerateRequest { sampling, ..greedy(100) };
        let (tokens, _) = run(&mut engine, &vec![1, 2, 3].into(), request);
        assert!(ids(&tokens).iter().all(|id| text.tokenizer.token_bytes(*id).is_some()));
    }
}
