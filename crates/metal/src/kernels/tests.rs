//! Each kernel against its function in `lily_reference::ops`, in three orders of work that have to give the same bits. Those of
//! many tokens are in `many`.

mod many;

use lily_backend::Result;
use lily_backend::conformance::cases::{
    ATTENTION, AttentionCase, DELTA, DeltaCase, F32_FORMULA, F32_RECURRENCE, F32_SUMS, Generator, LINEAR, ROUTES,
    Tolerance, assert_close, round_to_bf16,
};
use lily_model::{Bits, Mlp, MoeWeights, QuantMatrix, Shape};
use lily_reference::ops;

use super::gemv::{Candidates, Gemv, Head, NO_ID, Residual, ResidualArgs};
use super::moe::{Experts, Moe, Routed};
use super::{Builder, Matrix, Stream, attention, delta, embed, stream_groups};
use crate::device::{Gpu, Pass, Slice, float_bytes, read_words};
use crate::emulated::Emulated;
use crate::load::Mapped;
use crate::plan::{Arena, experts};
use crate::state::KvDtype;

/// Seeds of the orders of work.
const ORDERS: [u32; 3] = [0, 1, 7];

/// Small sizes, no two of them equal.
const SHAPE: Shape = Shape {
    hidden: 192,
    layers: 4,
    vocab: 100,
    query_heads: 4,
    kv_heads: 2,
    delta_key_heads: 1,
    delta_value_heads: 2,
    experts: 5,
    experts_per_token: 3,
    expert_width: 64,
    shared_width: 128,
    max_context: 1024,
    rms_eps: 1e-6,
    rope_theta: 1e7,
};

/// A device for one case.
struct Bench {
    gpu: Emulated,
    pass: Pass,
}

impl Bench {
    fn builder(&mut self, shape: &Shape, kv: KvDtype) -> Builder<'_> {
        Builder::new(&mut self.gpu, shape, kv)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Slice {
        let slice = self.room(bytes.len());
        self.gpu.write(slice, bytes).expect("written");
        slice
    }

    fn floats(&mut self, values: &[f32]) -> Slice {
        self.bytes(&float_bytes(values))
    }

    /// Memory that holds NaN, or ids that are none.
    fn room(&mut self, bytes: usize) -> Slice {
        let buffer = self.gpu.buffer(bytes, "a case").expect("memory");
        let slice = Slice { buffer, offset: 0, bytes };
        self.gpu.write(slice, &vec![0xff; bytes]).expect("written");
        slice
    }

    fn matrix(&mut self, matrix: &QuantMatrix) -> Matrix {
        let mut arena = Arena::new(&mut self.gpu, matrix.total_bytes(), "a matrix").expect("memory");
        arena.stack(&mut self.gpu, &Mapped::default(), &[matrix]).expect("placed")
    }

    /// A stream whose normed form is `x` times `scale`.
    fn normed(&mut self, shape: &Shape, x: &[f32], scale: f32) -> Stream {
        let mean = f64::from(scale).powi(-2) - f64::from(shape.rms_eps);
        let mut squares = vec![0.0; stream_groups(shape)];
        // In two parts, so that their sum is asked for.
        squares[0] = (mean * shape.hidden as f64 * 0.25) as f32;
        squares[stream_groups(shape) - 1] += (mean * shape.hidden as f64 * 0.75) as f32;
        Stream { values: self.room(4), gained: self.floats(x), squares: self.floats(&squares) }
    }

    fn stream(&mut self, shape: &Shape, values: &[f32]) -> Stream {
        Stream {
            values: self.floats(values),
            gained: self.room(4 * shape.hidden),
            squares: self.room(4 * stream_groups(shape)),
        }
    }

    fn run(&mut self) {
        let commit = self.pass.commit(&mut self.gpu).expect("accepted").expect("something to run");
        self.gpu.wait(commit).expect("run without a fault");
    }

    fn read(&self, slice: Slice) -> Vec<f32> {
        read_words(&self.gpu, slice, f32::from_le_bytes).expect("read")
    }

    fn ids(&self, slice: Slice) -> Vec<u32> {
        read_words(&self.gpu, slice, u32::from_le_bytes).expect("read")
    }

    /// Holds a finished stream against the values that it should have.
    fn assert_stream(&self, shape: &Shape, stream: &Stream, expected: &[f32], gain: &[f32], what: &str) {
        let values = self.read(stream.values);
        assert_close(&values, expected, F32_SUMS, what);
        let scale =
            (self.read(stream.squares).iter().sum::<f32>() / shape.hidden as f32 + shape.rms_eps).sqrt().recip();
        let normed: Vec<f32> = self.read(stream.gained).iter().map(|x| x * scale).collect();
        assert_close(&normed, &ops::rms_norm(&values, gain, shape.rms_eps), F32_FORMULA, what);
    }
}

/// Runs a case in every order; what it returns has to be the same to the bit.
fn in_every_order(case: impl Fn(&mut Bench) -> Result<Vec<f32>>) -> Vec<f32> {
    in_every_order_on(Emulated::new, case)
}

/// The same without and with tensor units.
fn in_both_forms(case: impl Fn(&mut Bench) -> Result<Vec<f32>>) -> [Vec<f32>; 2] {
    [in_every_order_on(Emulated::new, &case), in_every_order_on(Emulated::with_tensor_units, &case)]
}

fn in_every_order_on(gpu: fn(u32) -> Emulated, case: impl Fn(&mut Bench) -> Result<Vec<f32>>) -> Vec<f32> {
    let run = |order| case(&mut Bench { gpu: gpu(order), pass: Pass::default() }).expect("a case without error");
    let [first, others @ ..] = ORDERS.map(run);
    for other in others {
        assert!(first.iter().map(|x| x.to_bits()).eq(other.iter().map(|x| x.to_bits())), "orders differ");
    }
    first
}

fn gain(g: &mut Generator, count: usize) -> Vec<f32> {
    g.values(count, 0.2).iter().map(|x| 1.0 + x).collect()
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn embedding_rows_are_dequantized_and_an_id_that_is_none_is_the_last() {
    let mut g = Generator::new(1);
    let table = g.matrix(Bits::Four, 1, SHAPE.vocab, SHAPE.hidden);
    let gain = gain(&mut g, SHAPE.hidden);
    for (token, row) in [(0u32, 0), (37, 37), (99, 99), (NO_ID, 99)] {
        let mut expected = vec![0.0; SHAPE.hidden];
        table.dequantize_row(row, &mut expected);
        in_every_order(|bench| {
            let kernel = embed::Embed::plan(&mut bench.builder(&SHAPE, KvDtype::F32), &SHAPE)?;
            let stream = bench.stream(&SHAPE, &vec![0.0; SHAPE.hidden]);
            let (id, embedding) = (bench.bytes(&token.to_le_bytes()), bench.matrix(&table));
            let args = embed::Args { token: id, embedding: &embedding, gain: bench.floats(&gain), stream };
            kernel.encode(&mut bench.pass, &args);
            bench.run();
            bench.assert_stream(&SHAPE, &stream, &expected, &gain, &format!("token {token}"));
            Ok(bench.read(stream.gained))
        });
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn projections_are_those_of_the_reference() {
    for (seed, case) in LINEAR.iter().enumerate().filter(|(_, case)| case.bits == Bits::Four) {
        let mut g = Generator::new(seed as u64);
        // A stack of matrices is one matrix here.
        let matrix = g.matrix(Bits::Four, 1, case.experts * case.outputs, case.inputs);
        let x = g.values(case.inputs, 1.0);
        let outputs = matrix.outputs;
        let split = outputs / 3 + 1;
        let y = in_every_order(|bench| {
            let shape = Shape { hidden: case.inputs, ..SHAPE };
            let kernel = Gemv::plan(&mut bench.builder(&shape, KvDtype::F32), &shape, outputs, split)?;
            let (weights, stream) = (bench.matrix(&matrix), bench.normed(&shape, &x, 0.5));
            let (first, second) = (bench.room(4 * split), bench.room(4 * (outputs - split).max(1)));
            kernel.encode(&mut bench.pass, &weights, &stream, [first, second]);
            bench.run();
            let mut y = bench.read(first);
            y.extend(bench.read(second));
            y.truncate(outputs);
            Ok(y)
        });
        let expected: Vec<f32> = ops::linear(&x, &matrix).iter().map(|y| y * 0.5).collect();
        assert_close(&y, &expected, F32_SUMS, &format!("{case:?}"));
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn additions_to_the_stream_are_those_of_the_reference() {
    for (hidden, inputs, gated) in
        [(64, 64, false), (192, 576, false), (64, 4096, false), (128, 8256, false), (192, 256, true), (64, 4096, true)]
    {
        let heads = inputs / Shape::DELTA_HEAD_DIM;
        let shape = Shape { hidden, delta_value_heads: heads.max(1), ..SHAPE };
        let mut g = Generator::new(inputs as u64);
        let matrix = g.matrix(Bits::Four, 1, hidden, inputs);
        let (x, stream) = (g.values(inputs, 1.0), g.values(hidden, 1.0));
        let gain = gain(&mut g, hidden);
        let squares: Vec<f32> = g.values(4 * heads, 30.0).iter().map(|x| x * x).collect();
        let mut normed = x.clone();
        if gated {
            for (head, squares) in normed.chunks_exact_mut(Shape::DELTA_HEAD_DIM).zip(squares.chunks_exact(4)) {
                let mean = squares.iter().map(|x| f64::from(*x)).sum::<f64>() / Shape::DELTA_HEAD_DIM as f64;
                head.iter_mut().for_each(|x| *x = (f64::from(*x) / (mean + f64::from(shape.rms_eps)).sqrt()) as f32);
            }
        }
        let added = ops::linear(&normed, &matrix);
        let expected: Vec<f32> = stream.iter().zip(added).map(|(h, y)| h + y).collect();
        in_every_order(|bench| {
            let kernel = Residual::plan(&mut bench.builder(&shape, KvDtype::F32), &shape, inputs, gated)?;
            let stream = bench.stream(&shape, &stream);
            let weights = bench.matrix(&matrix);
            let head_squares = gated.then(|| bench.floats(&squares));
            let args =
                ResidualArgs { matrix: &weights, x: bench.floats(&x), gain: bench.floats(&gain), stream, head_squares };
            kernel.encode(&mut bench.pass, &args);
            bench.run();
            bench.assert_stream(&shape, &stream, &expected, &gain, &format!("[{hidden}, {inputs}], gated: {gated}"));
            Ok(bench.read(stream.gained))
        });
    }
}

/// Runs the head over `x` and returns the logits, with the chosen id at their end.
fn head(bench: &mut Bench, shape: &Shape, matrix: &QuantMatrix, x: &[f32], limit: usize) -> Result<(Vec<f32>, u32)> {
    let kernel = Head::plan(&mut bench.builder(shape, KvDtype::F32), shape)?;
    let (weights, stream) = (bench.matrix(matrix), bench.normed(shape, x, 1.0));
    let (logits, token) = (bench.room(4 * shape.vocab), bench.room(4));
    let places = 4 * kernel.candidates();
    let candidates = Candidates { best: bench.room(places), ids: bench.room(places) };
    kernel.encode(&mut bench.pass, &weights, &stream, logits, candidates, limit);
    kernel.encode_argmax(&mut bench.pass, candidates, token);
    bench.run();
    Ok((bench.read(logits), bench.ids(token)[0]))
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn the_head_finds_the_highest_logit_below_the_limit_the_lowest_id_on_ties() {
    for (seed, (hidden, vocab)) in [(192, 100), (1088, 1), (64, 4097)].into_iter().enumerate() {
        let shape = Shape { hidden, vocab, ..SHAPE };
        let mut g = Generator::new(seed as u64);
        let matrix = g.matrix(Bits::Four, 1, vocab, hidden);
        let x = g.values(hidden, 1.0);
        let expected = ops::linear(&x, &matrix);
        let top = ops::greedy(&expected);
        for limit in [vocab, top.max(1), 1, (top + 1).min(vocab)] {
            let y = in_every_order(|bench| {
                let (mut y, id) = head(bench, &shape, &matrix, &x, limit)?;
                assert_eq!(id as usize, ops::greedy(&y[..limit]), "{hidden}, {vocab}, below {limit}");
                y.push(id as f32);
                Ok(y)
            });
            assert_close(&y[..vocab], &expected, F32_SUMS, &format!("[{vocab}, {hidden}]"));
        }
        let ties = in_every_order(|bench| Ok(vec![head(bench, &shape, &matrix, &vec![0.0; hidden], vocab)?.1 as f32]));
        assert_eq!(ties, [0.0], "all logits are equal");
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn a_logit_that_is_not_finite_is_no_token() {
    let mut g = Generator::new(3);
    let shape = Shape { vocab: 3000, ..SHAPE };
    let matrix = g.matrix(Bits::Four, 1, shape.vocab, shape.hidden);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = g.values(shape.hidden, 1.0);
        x[100] = bad;
        in_every_order(|bench| {
            assert_eq!(head(bench, &shape, &matrix, &x, 5)?.1, NO_ID);
            Ok(Vec::new())
        });
    }
}

/// The weights of a mixture of experts.
fn moe_weights(g: &mut Generator, shape: &Shape) -> MoeWeights {
    let &Shape { hidden, experts, expert_width, shared_width, .. } = shape;
    let mut mlp = |experts, width| Mlp {
        gate: g.matrix(Bits::Four, experts, width, hidden),
        up: g.matrix(Bits::Four, experts, width, hidden),
        down: g.matrix(Bits::Four, experts, hidden, width),
    };
    let (routed, shared) = (mlp(experts, expert_width), mlp(1, shared_width));
    MoeWeights {
        router: g.matrix(Bits::Eight, 1, experts, hidden),
        experts: routed,
        shared,
        shared_gate: g.matrix(Bits::Eight, 1, 1, hidden),
    }
}

/// What becomes of one token in a mixture of experts.
struct MoeRow {
    logits: Vec<f32>,
    ids: Vec<usize>,
    shares: Vec<f32>,
    /// `[chosen experts, expert width]`.
    routed_act: Vec<f32>,
    shared_act: Vec<f32>,
    /// `[hidden]`.
    added: Vec<f32>,
}

fn moe_row(weights: &MoeWeights, x: &[f32], chosen: usize) -> MoeRow {
    let logits = ops::linear(x, &weights.router);
    let shared_gate = ops::linear(x, &weights.shared_gate)[0];
    let (ids, shares): (Vec<usize>, Vec<f32>) = ops::route(&logits, chosen).into_iter().unzip();
    let inner = |mlp: &Mlp, x: &[f32], ids: &[usize]| {
        ops::swiglu(&ops::expert_linear(x, &mlp.gate, ids), &ops::expert_linear(x, &mlp.up, ids))
    };
    let routed_act = inner(&weights.experts, &x.repeat(chosen), &ids);
    let shared_act = inner(&weights.shared, x, &[0]);
    let mut added = vec![0.0; x.len()];
    let outputs = ops::expert_linear(&routed_act, &weights.experts.down, &ids);
    let outputs = outputs.chunks_exact(x.len()).zip(shares.iter().copied());
    let shared = ops::linear(&shared_act, &weights.shared.down);
    for (y, share) in outputs.chain([(&shared[..], ops::sigmoid(shared_gate))]) {
        added.iter_mut().zip(y).for_each(|(h, y)| *h += share * y);
    }
    MoeRow { logits, ids, shares, routed_act, shared_act, added }
}

fn placed_experts(bench: &mut Bench, weights: &MoeWeights) -> Result<Experts> {
    let all = weights.experts.gate.total_bytes() * 3 + weights.shared.gate.total_bytes() * 3;
    let routers = weights.router.total_bytes() + weights.shared_gate.total_bytes();
    let mut arena = Arena::new(&mut bench.gpu, all + routers, "experts")?;
    experts(&mut bench.gpu, &Mapped::default(), &mut arena, weights)
}

fn routed_room(bench: &mut Bench, shape: &Shape) -> Routed {
    Routed {
        logits: bench.room(4 * (shape.experts + 1)),
        act: bench.room(4 * (shape.experts_per_token * shape.expert_width + shape.shared_width)),
        chosen: bench.room(4 * shape.experts_per_token),
        weights: bench.room(4 * (shape.experts_per_token + 1)),
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn experts_are_chosen_and_computed_as_in_the_reference() {
    for (hidden, experts_count, chosen, expert_width, shared_width) in [
        (192, 5, 3, 64, 128),
        (64, 1, 1, 192, 64),
        (1088, 33, 8, 512, 256),
        (2112, 70, 2, 64, 1088),
        (128, 256, 8, 320, 576),
    ] {
        let shape =
            Shape { hidden, experts: experts_count, experts_per_token: chosen, expert_width, shared_width, ..SHAPE };
        let mut g = Generator::new(hidden as u64);
        let weights = moe_weights(&mut g, &shape);
        let (x, residual) = (g.values(hidden, 1.0), g.values(hidden, 1.0));
        let gain = gain(&mut g, hidden);
        let MoeRow { logits, ids, shares, routed_act, shared_act, added } = moe_row(&weights, &x, chosen);
        let expected: Vec<f32> = residual.iter().zip(&added).map(|(h, y)| h + y).collect();
        in_every_order(|bench| {
            let kernel = Moe::plan(&mut bench.builder(&shape, KvDtype::F32), &shape)?;
            let experts = placed_experts(bench, &weights)?;
            let (stream, routed) = (bench.normed(&shape, &x, 1.0), routed_room(bench, &shape));
            let after = bench.stream(&shape, &residual);
            let gain_slice = bench.floats(&gain);
            kernel.encode_router(&mut bench.pass, &experts, &stream, &routed);
            kernel.encode_gate_up(&mut bench.pass, &experts, &stream, &routed);
            kernel.encode_down(&mut bench.pass, &experts, &routed, gain_slice, &after);
            bench.run();
            let what = format!("{shape:?}");
            assert_close(&bench.read(routed.logits)[..experts_count], &logits, F32_SUMS, &what);
            assert_eq!(bench.ids(routed.chosen), ids.iter().map(|id| *id as u32).collect::<Vec<_>>(), "{what}");
            // The exponential of a logit passes the logit's own error on.
            assert_close(&bench.read(routed.weights)[..chosen], &shares, F32_SUMS, &what);
            let act = [&routed_act[..], &shared_act].concat();
            assert_close(&bench.read(routed.act), &act, F32_SUMS, &what);
            bench.assert_stream(&shape, &after, &expected, &gain, &what);
            Ok(bench.read(after.gained))
        });
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn ties_and_damaged_router_logits_choose_experts_that_exist() {
    let cases = ROUTES.iter().map(|(logits, count)| (logits.to_vec(), *count));
    let damaged = [(vec![f32::NAN; 5], 3), (vec![1.0, f32::NAN, f32::NEG_INFINITY, f32::NAN], 3)];
    for (logits, count) in cases.chain(damaged) {
        let shape = Shape { experts: logits.len(), experts_per_token: count, hidden: 64, ..SHAPE };
        let mut g = Generator::new(5);
        let weights = moe_weights(&mut g, &shape);
        let is_sound = logits.iter().all(|logit| logit.is_finite());
        in_every_order(|bench| {
            let kernel = Moe::plan(&mut bench.builder(&shape, KvDtype::F32), &shape)?;
            let experts = placed_experts(bench, &weights)?;
            let stream = bench.normed(&shape, &[0.5; 64], 1.0);
            let mut routed = routed_room(bench, &shape);
            routed.logits = bench.floats(&[&logits[..], &[0.25]].concat());
            kernel.encode_gate_up(&mut bench.pass, &experts, &stream, &routed);
            bench.run();
            let (ids, shares) = (bench.ids(routed.chosen), bench.read(routed.weights));
            let mut distinct = ids.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert!(distinct.len() == count && distinct.iter().all(|id| (*id as usize) < logits.len()), "{ids:?}");
            if is_sound {
                let (expected, weights): (Vec<usize>, Vec<f32>) = ops::route(&logits, count).into_iter().unzip();
                assert_eq!(ids, expected.iter().map(|id| *id as u32).collect::<Vec<_>>(), "{logits:?}");
                assert_close(&shares[..count], &weights, F32_FORMULA, "weights");
                assert_close(&shares[count..], &[ops::sigmoid(0.25)], F32_FORMULA, "shared gate");
            }
            Ok(ids.iter().map(|id| *id as f32).collect())
        });
    }
}

/// A case of the delta rule with what should come of it.
struct DeltaData {
    shape: Shape,
    /// `[4, conv width]`, the newest tap last.
    taps: Vec<f32>,
    rates: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    /// `[tokens, conv width]`.
    inputs: Vec<f32>,
    /// `[tokens, value width + 2 * value heads]`.
    zba: Vec<f32>,
    /// `[tokens, value width]`: normed and gated.
    expected: Vec<f32>,
    state: Vec<f32>,
}

impl DeltaData {
    fn new(case: &DeltaCase, seed: u64) -> DeltaData {
        const D: usize = Shape::DELTA_HEAD_DIM;
        let shape = Shape { delta_key_heads: case.key_heads, delta_value_heads: case.value_heads, ..SHAPE };
        let (conv, values, heads) = (shape.conv_width(), shape.delta_value_width(), case.value_heads);
        let mut g = Generator::new(seed);
        let (taps, norm) = (g.values(4 * conv, 0.5), gain(&mut g, D));
        let (a_log, dt_bias) = (g.values(heads, 1.0), g.values(heads, 1.0));
        let inputs = g.values(case.tokens * conv, 1.0);
        let zba = g.values(case.tokens * (values + 2 * heads), 2.0);
        let mut history = vec![0.0; 3 * conv];
        let mut state = vec![0.0; shape.delta_state_len()];
        let mut expected = Vec::new();
        for (u, zba) in inputs.chunks_exact(conv).zip(zba.chunks_exact(values + 2 * heads)) {
            let mixed = ops::conv_step(&mut history, u, &taps);
            let (z, ba) = zba.split_at(values);
            for head in 0..heads {
                let key_head = ops::shared_head(head, heads, case.key_heads) * D;
                let input = ops::DeltaInput {
                    query: &ops::delta_query(&mixed[key_head..][..D]),
                    key: &ops::delta_key(&mixed[shape.delta_key_width() + key_head..][..D]),
                    value: &mixed[2 * shape.delta_key_width() + head * D..][..D],
                    decay: ops::decay(ba[heads + head], a_log[head], dt_bias[head]),
                    beta: ops::sigmoid(ba[head]),
                };
                let o = ops::delta_step(&mut state[head * D * D..][..D * D], input);
                expected.extend(ops::gated_norm(&o, &z[head * D..][..D], &norm, shape.rms_eps));
            }
        }
        let taps = (0..4).flat_map(|tap| taps.iter().skip(tap).step_by(4).copied()).collect();
        let rates = a_log.iter().map(|a| a.exp()).collect();
        DeltaData { shape, taps, rates, dt_bias, norm, inputs, zba, expected, state }
    }

    fn vectors(&self, bench: &mut Bench) -> delta::DeltaVectors {
        delta::DeltaVectors {
            taps: bench.floats(&self.taps),
            rates: bench.floats(&self.rates),
            dt_bias: bench.floats(&self.dt_bias),
            norm: bench.floats(&self.norm),
        }
    }

    /// Inputs and z, b, a of some tokens.
    fn part(&self, tokens: std::ops::Range<usize>) -> [&[f32]; 2] {
        let (conv, zba) = (self.shape.conv_width(), self.shape.delta_value_width() + 2 * self.shape.delta_value_heads);
        [&self.inputs[tokens.start * conv..tokens.end * conv], &self.zba[tokens.start * zba..tokens.end * zba]]
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn the_delta_rule_is_that_of_the_reference_token_after_token() {
    const D: usize = Shape::DELTA_HEAD_DIM;
    for (seed, case) in DELTA.iter().enumerate() {
        let data = DeltaData::new(case, seed as u64);
        let shape = &data.shape;
        let (conv, values, heads) = (shape.conv_width(), shape.delta_value_width(), case.value_heads);
        let got = in_every_order(|bench| {
            let kernel = delta::Delta::plan(&mut bench.builder(shape, KvDtype::F32), shape)?;
            let vectors = data.vectors(bench);
            let ring = bench.floats(&vec![0.0; 4 * conv]);
            let state = bench.floats(&vec![0.0; shape.delta_state_len()]);
            let (out, squares) = (bench.room(4 * values), bench.room(16 * heads));
            let mut got = Vec::new();
            for position in 0..case.tokens {
                let [u, zba] = data.part(position..position + 1);
                let zba = bench.floats(zba);
                bench.gpu.write(ring.nth(position % 4, 4 * conv), &float_bytes(u))?;
                kernel.encode(
                    &mut bench.pass,
                    &delta::Args { ring, vectors: &vectors, zba, state, out, squares, position },
                );
                bench.run();
                // What the output projection makes of it.
                let squares = bench.read(squares);
                for (o, squares) in bench.read(out).chunks_exact(D).zip(squares.chunks_exact(4)) {
                    let scale = (squares.iter().sum::<f32>() / D as f32 + shape.rms_eps).sqrt().recip();
                    got.extend(o.iter().map(|o| o * scale));
                }
            }
            assert_close(&bench.read(state), &data.state, F32_RECURRENCE, &format!("{case:?}, state"));
            Ok(got)
        });
        assert_close(&got, &data.expected, F32_RECURRENCE, &format!("{case:?}"));
    }
}

/// A case of attention with what should come of it.
struct AttentionData {
    shape: Shape,
    capacity: usize,
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
    /// Keys and values `[tokens before, kv heads, 256]`.
    context: [Vec<f32>; 2],
    /// `[tokens, query heads, query and gate, 256]`.
    query_gate: Vec<f32>,
    /// `[tokens, k and v, kv heads, 256]`.
    key_value: Vec<f32>,
    /// `[tokens, query heads, 256]`.
    expected: Vec<f32>,
}

/// A new key may round to the other neighbour: 2^-9 of one key's part in a score.
const BF16_KEYS: Tolerance = Tolerance { value: 2e-3, reason: "BF16 keys" };

fn kv_tolerance(kv: KvDtype) -> Tolerance {
    match kv {
        KvDtype::F32 => F32_SUMS,
        KvDtype::Bf16 => BF16_KEYS,
    }
}

impl AttentionData {
    fn new(case: &AttentionCase, kv: KvDtype, seed: u64) -> AttentionData {
        const D: usize = Shape::HEAD_DIM;
        let shape = Shape { query_heads: case.query_heads, kv_heads: case.kv_heads, ..SHAPE };
        let mut g = Generator::new(seed);
        let (query_norm, key_norm) = (gain(&mut g, D), gain(&mut g, D));
        let rounded = |x: Vec<f32>| match kv {
            KvDtype::F32 => x,
            KvDtype::Bf16 => x.into_iter().map(round_to_bf16).collect(),
        };
        // Rows [token, kv head, 256] of the context; those of the new tokens are computed.
        let mut keys = rounded(g.values(case.position * shape.kv_width(), 1.0));
        let mut values = rounded(g.values(case.position * shape.kv_width(), 1.0));
        let context = [keys.clone(), values.clone()];
        let query_gate = g.values(case.tokens * 2 * shape.query_width(), 1.0);
        let key_value = g.values(case.tokens * 2 * shape.kv_width(), 1.0);
        let mut expected = Vec::new();
        for token in 0..case.tokens {
            let position = case.position + token;
            let normed = |head: &[f32], weight: &[f32]| {
                let mut head = ops::rms_norm(head, weight, shape.rms_eps);
                ops::rope(&mut head, position, shape.rope_theta);
                head
            };
            let (k, v) = key_value[token * 2 * shape.kv_width()..][..2 * shape.kv_width()].split_at(shape.kv_width());
            keys.extend(rounded(k.chunks_exact(D).flat_map(|head| normed(head, &key_norm)).collect()));
            values.extend(rounded(v.to_vec()));
            let rows = |all: &[f32], head: usize| -> Vec<Vec<f32>> {
                all.chunks_exact(D).skip(head).step_by(case.kv_heads).map(<[f32]>::to_vec).collect()
            };
            let own = &query_gate[token * 2 * shape.query_width()..][..2 * shape.query_width()];
            for (head, own) in own.chunks_exact(2 * D).enumerate() {
                let kv_head = ops::shared_head(head, case.query_heads, case.kv_heads);
                let (k, v) = (rows(&keys, kv_head), rows(&values, kv_head));
                let k: Vec<&[f32]> = k.iter().map(Vec::as_slice).collect();
                let v: Vec<&[f32]> = v.iter().map(Vec::as_slice).collect();
                let out = ops::attention(&normed(&own[..D], &query_norm), &k, &v);
                expected.extend(ops::attention_gate(&out, &own[D..]));
            }
        }
        let capacity = case.position + case.tokens + 3;
        AttentionData { shape, capacity, query_norm, key_norm, context, query_gate, key_value, expected }
    }

    /// Caches with the context, NaN wherever no key is.
    fn caches(&self, bench: &mut Bench, kv: KvDtype) -> Result<[Slice; 2]> {
        let row = Shape::HEAD_DIM * kv.bytes();
        let plane = self.capacity * row;
        let caches = [(); 2].map(|()| bench.room(self.shape.kv_heads * plane));
        for (cache, rows) in caches.iter().zip(&self.context) {
            for (i, values) in rows.chunks_exact(Shape::HEAD_DIM).enumerate() {
                let (token, head) = (i / self.shape.kv_heads, i % self.shape.kv_heads);
                let bytes: Vec<u8> = match kv {
                    KvDtype::F32 => float_bytes(values),
                    KvDtype::Bf16 => values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
                };
                bench.gpu.write(cache.part(head * plane + token * row, row), &bytes)?;
            }
        }
        Ok(caches)
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn attention_is_that_of_the_reference_over_keys_that_are_there() {
    const D: usize = Shape::HEAD_DIM;
    for (seed, case) in ATTENTION.iter().enumerate() {
        for kv in [KvDtype::F32, KvDtype::Bf16] {
            let data = AttentionData::new(case, kv, seed as u64);
            let shape = &data.shape;
            let got = in_every_order(|bench| {
                let kernel = attention::Attention::plan(&mut bench.builder(shape, kv), shape)?;
                let [keys, values] = data.caches(bench, kv)?;
                let splits = case.query_heads * attention::MOST_SPLITS;
                let (outputs, maxima_sums) = (bench.room(4 * splits * D), bench.room(8 * splits));
                let (query_norm, key_norm) = (bench.floats(&data.query_norm), bench.floats(&data.key_norm));
                let mut got = Vec::new();
                let own = data.query_gate.chunks_exact(2 * shape.query_width());
                for (token, (query_gate, key_value)) in
                    own.zip(data.key_value.chunks_exact(2 * shape.kv_width())).enumerate()
                {
                    let position = case.position + token;
                    let out = bench.room(4 * shape.query_width());
                    let args = attention::Args {
                        query_gate: bench.floats(query_gate),
                        key_value: bench.floats(key_value),
                        query_norm,
                        key_norm,
                        angles: bench.floats(&crate::step::angles(position, shape.rope_theta)),
                        keys,
                        values,
                        outputs,
                        maxima_sums,
                        out,
                        position,
                        capacity: data.capacity,
                    };
                    kernel.encode(&mut bench.pass, &args);
                    bench.run();
                    // Each key and value is read once for all query heads, and one of each is written.
                    let moved = bench.gpu.emulator.take_moved();
                    let row = (case.kv_heads * D * kv.bytes()) as u64;
                    for (slot, _, read, written) in &moved[0].slots[5..7] {
                        assert_eq!((*read, *written), (position as u64 * row, row), "slot {slot} at {position}");
                    }
                    got.extend(bench.read(out));
                }
                Ok(got)
            });
            assert_close(&got, &data.expected, kv_tolerance(kv), &format!("{case:?}, {kv:?}"));
        }
    }
}
