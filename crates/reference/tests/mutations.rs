//! Tests of the tests: would the goldens notice a wrong formula?
//!
//! Each mutation is a mistake that somebody has made or could make. It replaces one formula ([`Ops`]) or changes the
//! weights so that the right formulas compute the wrong thing. All must miss the goldens by ten times the tolerance.

use lily_model::safetensors::TensorBytes;
use lily_model::{Bits, Checkpoint, DeltaWeights, Mixer, QuantMatrix, Shape, Weights};
use lily_reference::golden::{self, Goldens, LOGIT_TOLERANCE, compare_logits};
use lily_reference::ops::{self, DeltaInput, Ops};
use lily_reference::{Logits, Reference};

/// The prompt that mutations are tried on: longer than one chunk of 64.
const PROMPT: usize = 65;

const SPEC: Ops = Ops::SPEC;

/// A change to the weights or sizes.
type Change = fn(&mut Checkpoint);

/// The outcome of [`compare_logits`] for wrong formulas on changed weights.
fn compare(ops: Ops, change: Change, tolerance: f32) -> Result<f32, String> {
    let mut checkpoint = Checkpoint::open(golden::tiny_checkpoint()).expect("the tiny checkpoint opens");
    change(&mut checkpoint);
    let prompt = Goldens::tiny().prompt(PROMPT);
    let reference = Reference { checkpoint: &checkpoint, ops };
    let logits = reference.forward(&mut reference.new_state(), &prompt.ids, Logits::All);
    compare_logits(&logits, &prompt.logits, checkpoint.config.shape.vocab, tolerance)
}

fn formulas_are_noticed(mutations: &[(&str, Ops)]) {
    for (name, ops) in mutations {
        let outcome = compare(*ops, |_| {}, 10.0 * LOGIT_TOLERANCE);
        assert!(outcome.is_err(), "{name}: the goldens are met within {outcome:?}");
    }
}

fn changes_are_noticed(mutations: &[(&str, Change)]) {
    for (name, change) in mutations {
        let outcome = compare(SPEC, *change, 10.0 * LOGIT_TOLERANCE);
        assert!(outcome.is_err(), "{name}: the goldens are met within {outcome:?}");
    }
}

#[test]
fn nothing_broken_meets_the_goldens() {
    compare(SPEC, |_| {}, LOGIT_TOLERANCE).unwrap();
}

#[test]
fn wrong_norms_are_noticed() {
    formulas_are_noticed(&[
        ("1 added to the layer, query, key and final norms", Ops { rms_norm: zero_centred, ..SPEC }),
        (
            "1 added to the gated norm",
            Ops { gated_norm: |o, z, w, eps| ops::gated_norm(o, z, &plus_one(w), eps), ..SPEC },
        ),
    ]);
}

#[test]
fn wrong_attention_is_noticed() {
    formulas_are_noticed(&[
        ("gate with silu", Ops { attention_gate: |x, gate| zip(x, gate, |x, g| x * ops::silu(g)), ..SPEC }),
        ("no gate", Ops { attention_gate: |x, _| x.to_vec(), ..SPEC }),
        ("no rope", Ops { rope: |_, _, _| {}, ..SPEC }),
        ("rope on all 256 dimensions", Ops { rope: rope_everywhere, ..SPEC }),
        ("rope on adjacent pairs", Ops { rope: rope_adjacent, ..SPEC }),
        ("rope with theta 1e6", Ops { rope: |head, position, _| ops::rope(head, position, 1e6), ..SPEC }),
        ("query head j reads key/value head j % 2", Ops { kv_head: |head, _, shared| head % shared, ..SPEC }),
    ]);
    changes_are_noticed(&[("all queries, then all gates", split_queries_from_gates)]);
}

#[test]
fn wrong_delta_rules_are_noticed() {
    formulas_are_noticed(&[
        ("value head n uses key head n % 2", Ops { key_head: |head, _, shared| head % shared, ..SPEC }),
        ("queries not scaled", Ops { delta_query: ops::delta_key, ..SPEC }),
        (
            "queries and keys not normalised",
            Ops { delta_query: |q| scaled(q, 128f32.sqrt().recip()), delta_key: |k| k.to_vec(), ..SPEC },
        ),
        ("no silu after the convolution", Ops { conv_step: conv_without_silu, ..SPEC }),
        ("decay after the error", Ops { delta_step: decay_after_error, ..SPEC }),
        ("output before the update", Ops { delta_step: output_before_update, ..SPEC }),
        ("gate before norm", Ops { gated_norm: gate_before_norm, ..SPEC }),
        ("sigmoid(z) for silu(z)", Ops { gated_norm: sigmoid_gate, ..SPEC }),
    ]);
    changes_are_noticed(&[
        ("taps reversed", |c| each_delta(c, |w| w.conv.chunks_exact_mut(Shape::CONV_TAPS).for_each(<[f32]>::reverse))),
        ("a and b swapped", |c| each_delta(c, |w| std::mem::swap(&mut w.a, &mut w.b))),
        ("no dt_bias", |c| each_delta(c, |w| w.dt_bias.fill(0.0))),
        ("A_log used as A", |c| each_delta(c, |w| w.a_log.iter_mut().for_each(|a| *a = a.abs().ln()))),
    ]);
}

#[test]
fn wrong_experts_are_noticed() {
    formulas_are_noticed(&[
        ("weights not renormalised", Ops { route: route_unnormalised, ..SPEC }),
        ("shared expert without its gate", Ops { shared_gate: |_| 1.0, ..SPEC }),
        ("no shared expert", Ops { shared_gate: |_| 0.0, ..SPEC }),
    ]);
    changes_are_noticed(&[
        ("one expert too few", |c| c.config.shape.experts_per_token -= 1),
        ("gate and up swapped", |c| {
            c.weights.layers.iter_mut().for_each(|w| std::mem::swap(&mut w.moe.experts.gate, &mut w.moe.experts.up));
        }),
    ]);
}

#[test]
fn wrong_unpacking_is_noticed() {
    changes_are_noticed(&[
        ("scales taken as positive", |c| each_matrix(&mut c.weights, drop_signs_of_scales)),
        ("high nibble first", |c| each_matrix(&mut c.weights, swap_nibbles)),
    ]);
}

/// These two the goldens cannot see, so they are read against the formulas instead (NUMERICS.md).
#[test]
fn two_mistakes_are_invisible() {
    let eps_on_the_mean = Ops {
        delta_query: |q| unit_with_mean(q, 128f32.sqrt().recip()),
        delta_key: |k| unit_with_mean(k, 1.0),
        ..SPEC
    };
    compare(eps_on_the_mean, |_| {}, LOGIT_TOLERANCE).unwrap();
    let positions_from_one = Ops { rope: |head, position, theta| ops::rope(head, position + 1, theta), ..SPEC };
    compare(positions_from_one, |_| {}, LOGIT_TOLERANCE).unwrap();
}

fn zip(a: &[f32], b: &[f32], f: fn(f32, f32) -> f32) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()
}

fn scaled(x: &[f32], factor: f32) -> Vec<f32> {
    x.iter().map(|x| x * factor).collect()
}

fn unit_with_mean(x: &[f32], length: f32) -> Vec<f32> {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    scaled(x, length / ((mean + ops::UNIT_EPS as f32) * x.len() as f32).sqrt())
}

fn plus_one(weight: &[f32]) -> Vec<f32> {
    weight.iter().map(|w| w + 1.0).collect()
}

fn zero_centred(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    ops::rms_norm(x, &plus_one(weight), eps)
}

fn rotate(head: &mut [f32], i: usize, j: usize, angle: f64) {
    let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
    (head[i], head[j]) = (head[i] * cos - head[j] * sin, head[j] * cos + head[i] * sin);
}

fn rope_everywhere(head: &mut [f32], position: usize, theta: f64) {
    let half = head.len() / 2;
    for i in 0..half {
        rotate(head, i, i + half, position as f64 * theta.powf(-(i as f64) / half as f64));
    }
}

fn rope_adjacent(head: &mut [f32], position: usize, theta: f64) {
    let half = Shape::ROTARY_DIM / 2;
    for i in 0..half {
        rotate(head, 2 * i, 2 * i + 1, position as f64 * theta.powf(-(i as f64) / half as f64));
    }
}

fn conv_without_silu(history: &mut [f32], input: &[f32], taps: &[f32]) -> Vec<f32> {
    let channels = input.len();
    let window = [history, input].concat();
    history.copy_from_slice(&window[channels..]);
    let y = |c: usize| (0..Shape::CONV_TAPS).map(|j| taps[c * Shape::CONV_TAPS + j] * window[j * channels + c]).sum();
    (0..channels).map(y).collect()
}

fn decay_after_error(state: &mut [f32], input: DeltaInput<'_>) -> Vec<f32> {
    let DeltaInput { query, key, value, decay, beta } = input;
    let rows = state.chunks_exact_mut(key.len()).zip(value);
    rows.map(|(row, v)| {
        let error = beta * (v - ops::dot(row, key));
        row.iter_mut().zip(key).for_each(|(s, k)| *s = decay * *s + error * k);
        ops::dot(row, query)
    })
    .collect()
}

fn output_before_update(state: &mut [f32], input: DeltaInput<'_>) -> Vec<f32> {
    let output = state.chunks_exact(input.key.len()).map(|row| input.decay * ops::dot(row, input.query)).collect();
    ops::delta_step(state, input);
    output
}

fn gate_before_norm(o: &[f32], z: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    ops::rms_norm(&zip(o, z, |o, z| o * ops::silu(z)), weight, eps)
}

fn sigmoid_gate(o: &[f32], z: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    zip(&ops::rms_norm(o, weight, eps), z, |o, z| o * ops::sigmoid(z))
}

fn route_unnormalised(logits: &[f32], count: usize) -> Vec<(usize, f32)> {
    let probabilities = ops::softmax(logits);
    ops::route(logits, count).into_iter().map(|(id, _)| (id, probabilities[id])).collect()
}

fn each_delta(checkpoint: &mut Checkpoint, change: fn(&mut DeltaWeights)) {
    for layer in &mut checkpoint.weights.layers {
        if let Mixer::Delta(w) = &mut layer.mixer {
            change(w);
        }
    }
}

fn each_matrix(weights: &mut Weights, change: fn(&mut QuantMatrix)) {
    change(&mut weights.embedding);
    change(&mut weights.head);
    for layer in &mut weights.layers {
        let mixer = match &mut layer.mixer {
            Mixer::Delta(w) => vec![&mut w.qkv, &mut w.z, &mut w.b, &mut w.a, &mut w.out],
            Mixer::Attention(w) => vec![&mut w.q, &mut w.k, &mut w.v, &mut w.o],
        };
        mixer.into_iter().for_each(change);
        [&mut layer.moe.router, &mut layer.moe.shared_gate].into_iter().for_each(change);
        for mlp in [&mut layer.moe.experts, &mut layer.moe.shared] {
            [&mut mlp.gate, &mut mlp.up, &mut mlp.down].into_iter().for_each(change);
        }
    }
}

fn drop_signs_of_scales(matrix: &mut QuantMatrix) {
    let bytes = matrix.scales.iter().enumerate().map(|(i, b)| if i % 2 == 1 { b & 0x7f } else { *b });
    matrix.scales = TensorBytes::from_vec(bytes.collect());
}

fn swap_nibbles(matrix: &mut QuantMatrix) {
    if matrix.bits == Bits::Four {
        matrix.codes = TensorBytes::from_vec(matrix.codes.iter().map(|b| b.rotate_left(4)).collect());
    }
}

/// Orders the rows of `q_proj` so that the query and gate of a head get what all queries, then all gates would be.
fn split_queries_from_gates(checkpoint: &mut Checkpoint) {
    for layer in &mut checkpoint.weights.layers {
        let Mixer::Attention(w) = &mut layer.mixer else { continue };
        let (half, q) = (w.q.outputs / 2, &w.q);
        let heads = 0..half / Shape::HEAD_DIM;
        let rows = heads.flat_map(|h| [h * Shape::HEAD_DIM, half + h * Shape::HEAD_DIM]);
        let rows: Vec<usize> = rows.flat_map(|first| first..first + Shape::HEAD_DIM).collect();
        let codes = rows.iter().flat_map(|row| q.row_codes(*row)).copied().collect();
        let scales = rows.iter().flat_map(|row| q.row_scales(*row)).copied().collect();
        let biases = rows.iter().flat_map(|row| q.row_biases(*row)).copied().collect();
        w.q.codes = TensorBytes::from_vec(codes);
        w.q.scales = TensorBytes::from_vec(scales);
        w.q.biases = TensorBytes::from_vec(biases);
    }
}
