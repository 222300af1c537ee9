//! The reference against mlx-lm, and against itself.

use std::collections::BTreeMap;

use lily_backend::{Part, Stage};
use lily_model::{Checkpoint, LayerKind, Shape};
use lily_reference::golden::{self, Goldens, LOGIT_TOLERANCE, compare_logits};
use lily_reference::{LayerState, Logits, Reference, State, ops};

/// Bound on values inside the pass, absolute or relative above 1. The worst is 1e-5; see NUMERICS.md.
const TRACE_TOLERANCE: f32 = 1e-4;

/// Greedy tokens are compared where the best logit leads by this much, ten times what a logit may be off.
const CLEAR_MARGIN: f32 = 1e-2;

/// The prompt whose trace is stored.
const TRACED: usize = 7;

fn tiny() -> Checkpoint {
    Checkpoint::open(golden::tiny_checkpoint()).expect("the tiny checkpoint opens")
}

fn wide() -> Checkpoint {
    Checkpoint::open(golden::wide_checkpoint()).expect("the wide checkpoint opens")
}

/// Checks every logit of every prompt and of its greedy continuation, fed token by token.
fn check_logits_and_greedy_tokens(checkpoint: &Checkpoint, goldens: &Goldens) {
    let reference = Reference::new(checkpoint);
    let vocab = checkpoint.config.shape.vocab;
    for length in goldens.lengths() {
        let prompt = goldens.prompt(length);
        let mut state = reference.new_state();
        let mut logits = reference.forward(&mut state, &prompt.ids, Logits::All);
        match compare_logits(&logits, &prompt.logits, vocab, LOGIT_TOLERANCE) {
            Ok(difference) => println!("prompt of {length}: largest difference {difference:e}"),
            Err(message) => panic!("prompt of {length}: {message}"),
        }
        for (i, (expected, margin)) in prompt.greedy.iter().zip(&prompt.greedy_margin).enumerate() {
            let chosen = ops::greedy(&logits[logits.len() - vocab..]) as u32;
            assert!(
                chosen == *expected || *margin <= CLEAR_MARGIN,
                "prompt of {length}, greedy token {i}: {chosen}, expected {expected} with margin {margin}"
            );
            logits = reference.forward(&mut state, &[*expected], Logits::Last);
        }
    }
}

#[test]
fn logits_and_greedy_tokens_of_tiny_are_those_of_mlx_lm() {
    check_logits_and_greedy_tokens(&tiny(), &Goldens::tiny());
}

#[test]
#[ignore = "needs the wide goldens: cargo xtask goldens"]
fn logits_and_greedy_tokens_of_wide_are_those_of_mlx_lm() {
    check_logits_and_greedy_tokens(&wide(), &Goldens::wide());
}

fn assert_close(name: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{name}: number of values");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let bound = TRACE_TOLERANCE * expected.abs().max(1.0);
        assert!((got - expected).abs() <= bound, "{name}, value {i}: {got}, expected {expected} within {bound:e}");
    }
}

/// `[a, b, width]` to `[b, a, width]`.
fn swap_outer(x: &[f32], a: usize, b: usize) -> Vec<f32> {
    let width = x.len() / (a * b);
    (0..a * b).flat_map(|i| &x[(i % a * b + i / a) * width..][..width]).copied().collect()
}

/// The traces of the goldens under the names of [`lily_reference::Trace::modules`], laid out as there.
fn golden_trace(goldens: &Goldens, shape: &Shape) -> BTreeMap<String, Vec<f32>> {
    let mut trace = BTreeMap::new();
    for name in goldens.names() {
        let Some(path) = name.strip_prefix("trace.language_model.model.") else { continue };
        if path.ends_with("switch_mlp.indices") {
            let ids = goldens.integers(&name).into_iter().map(|id| id as f32).collect();
            trace.insert(path.to_string(), ids);
            continue;
        }
        let mut values = goldens.floats(&name);
        if path.ends_with(".conv1d") {
            // Recorded there before the SiLU.
            values.iter_mut().for_each(|x| *x = ops::silu(*x));
        }
        if path.contains(".rope") {
            values = swap_outer(&values, values.len() / (TRACED * Shape::HEAD_DIM), TRACED);
        }
        trace.insert(path.to_string(), values);
    }
    // One activation object serves all layers there; its later calls are those of the later layers.
    for layer in 1..shape.layers {
        let stored = format!("layers.0.mlp.switch_mlp.activation#{layer}");
        let values = trace.remove(&stored).unwrap_or_else(|| panic!("the goldens have no {stored}"));
        trace.insert(format!("layers.{layer}.mlp.switch_mlp.activation"), values);
    }
    trace
}

/// Reorders the values of chosen experts so that each token's experts come in the order `to`.
fn reorder_experts(values: &[f32], from: &[f32], to: &[f32], per_token: usize) -> Vec<f32> {
    let width = values.len() / from.len();
    let place = |(i, id): (usize, &f32)| {
        let token = i / per_token * per_token;
        let at = from[token..][..per_token].iter().position(|other| other == id);
        token + at.unwrap_or_else(|| panic!("token {}: expert {id} is not among mlx-lm's", i / per_token))
    };
    to.iter().enumerate().map(place).flat_map(|at| &values[at * width..][..width]).copied().collect()
}

fn stage_path(stage: Stage, shape: &Shape) -> String {
    let Some(layer) = stage.layer else {
        return if stage.part == Part::Embedding { "embed_tokens" } else { "norm" }.to_string();
    };
    let module = match (stage.part, shape.layer_kind(layer)) {
        (Part::MixerNorm, _) => ".input_layernorm",
        (Part::Mixer, LayerKind::Attention) => ".self_attn",
        (Part::Mixer, LayerKind::Delta) => ".linear_attn",
        (Part::MoeNorm, _) => ".post_attention_layernorm",
        (Part::Router, _) => ".mlp.gate",
        (Part::Moe, _) => ".mlp",
        (Part::Layer, _) => "",
        (Part::Embedding | Part::FinalNorm, _) => panic!("{stage} is of no layer"),
    };
    format!("layers.{layer}{module}")
}

#[test]
fn values_inside_the_pass_are_those_of_mlx_lm() {
    let (checkpoint, goldens) = (tiny(), Goldens::tiny());
    let shape = &checkpoint.config.shape;
    let reference = Reference::new(&checkpoint);
    let (_, trace) = reference.traced(&mut reference.new_state(), &goldens.prompt(TRACED).ids);
    let stages = trace.stages.into_iter().map(|stage| (stage_path(stage.stage, shape), stage.values));
    let got: BTreeMap<String, Vec<f32>> = stages.chain(trace.modules).collect();
    let expected = golden_trace(&goldens, shape);
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());

    for (name, values) in &expected {
        match name.split_once("switch_mlp") {
            Some((block, _)) => {
                let indices = format!("{block}switch_mlp.indices");
                let (from, to) = (&expected[&indices], &got[&indices]);
                assert_close(name, &got[name], &reorder_experts(values, from, to, shape.experts_per_token));
            }
            None => assert_close(name, &got[name], values),
        }
    }
}

#[test]
fn caches_after_a_prompt_are_those_of_mlx_lm() {
    let (checkpoint, goldens) = (tiny(), Goldens::tiny());
    let reference = Reference::new(&checkpoint);
    let mut state = reference.new_state();
    reference.forward(&mut state, &goldens.prompt(TRACED).ids, Logits::Nothing);
    let kv_heads = checkpoint.config.shape.kv_heads;
    for (layer, state) in state.layers.iter().enumerate() {
        let [first, second] = [0, 1].map(|part| goldens.floats(&format!("trace.cache.{layer}.{part}")));
        match state {
            LayerState::Attention { keys, values } => {
                assert_close(&format!("keys of layer {layer}"), keys, &swap_outer(&first, kv_heads, TRACED));
                assert_close(&format!("values of layer {layer}"), values, &swap_outer(&second, kv_heads, TRACED));
            }
            LayerState::Delta { conv, delta } => {
                assert_close(&format!("convolution history of layer {layer}"), conv, &first);
                assert_close(&format!("delta state of layer {layer}"), delta, &second);
            }
        }
    }
}

#[test]
fn greedy_continues_a_prompt_with_its_own_tokens() {
    let (checkpoint, prompt) = (tiny(), Goldens::tiny().prompt(TRACED));
    // Its smallest margin is 0.04: every token is clear.
    assert!(prompt.greedy_margin.iter().all(|margin| *margin > CLEAR_MARGIN));
    let reference = Reference::new(&checkpoint);
    let tokens = reference.greedy(&mut reference.new_state(), &prompt.ids, prompt.greedy.len());
    assert_eq!(tokens, prompt.greedy);
}

#[test]
fn chunk_borders_change_no_bit() {
    let checkpoint = tiny();
    let reference = Reference::new(&checkpoint);
    let ids = Goldens::tiny().prompt(65).ids;
    let run = |chunk: usize| -> (Vec<f32>, State) {
        let mut state = reference.new_state();
        let logits = ids.chunks(chunk).flat_map(|ids| reference.forward(&mut state, ids, Logits::All)).collect();
        (logits, state)
    };
    let whole = run(ids.len());
    assert!(run(1) == whole, "token by token");
    assert!(run(17) == whole, "chunks of 17");
}
