//! The mixer of a delta layer against the reference, and its two forms against each other.

use lily_backend::conformance::cases::{DELTA, DeltaCase, F32_RECURRENCE, Generator, Tolerance, assert_close};
use lily_model::Shape;
use lily_reference::ops;

use super::{EPS, on_every_path};
use crate::device::{Isa, Pool};
use crate::kernels::activations::Activations;
use crate::kernels::delta::{Delta, UNROLLED_FROM, delta};

const D: usize = Shape::DELTA_HEAD_DIM;

/// A layer, its inputs, and what it has kept of earlier tokens.
#[derive(Clone)]
struct Layer {
    key_heads: usize,
    value_heads: usize,
    tokens: usize,
    inputs: Vec<f32>,
    /// `[channels, 4]`.
    taps: Vec<f32>,
    z: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    history: Vec<f32>,
    state: Vec<f32>,
}

impl Layer {
    fn new(case: DeltaCase, seed: u64) -> Layer {
        let DeltaCase { key_heads, value_heads, tokens } = case;
        let mut generator = Generator::new(seed);
        let channels = (2 * key_heads + value_heads) * D;
        Layer {
            key_heads,
            value_heads,
            tokens,
            inputs: generator.values(tokens * channels, 1.0),
            taps: generator.values(channels * 4, 0.5),
            z: generator.values(tokens * value_heads * D, 1.0),
            a: generator.values(tokens * value_heads, 2.0),
            b: generator.values(tokens * value_heads, 2.0),
            a_log: generator.values(value_heads, 1.0),
            dt_bias: generator.values(value_heads, 1.0),
            norm: generator.values(D, 1.0),
            history: generator.values(3 * channels, 1.0),
            state: generator.values(value_heads * D * D, 0.1),
        }
    }

    fn channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * D
    }

    /// Outputs of all tokens by the reference.
    fn by_reference(&mut self) -> Vec<f32> {
        let mut outputs = Vec::new();
        for t in 0..self.tokens {
            let channels = self.channels();
            let y = ops::conv_step(&mut self.history, &self.inputs[t * channels..][..channels], &self.taps);
            for head in 0..self.value_heads {
                let key_head = ops::shared_head(head, self.value_heads, self.key_heads);
                let part = |index: usize| &y[index * D..][..D];
                let (query, key) = (ops::delta_query(part(key_head)), ops::delta_key(part(self.key_heads + key_head)));
                let at = t * self.value_heads + head;
                let input = ops::DeltaInput {
                    query: &query,
                    key: &key,
                    value: part(2 * self.key_heads + head),
                    decay: ops::decay(self.a[at], self.a_log[head], self.dt_bias[head]),
                    beta: ops::sigmoid(self.b[at]),
                };
                let o = ops::delta_step(&mut self.state[head * D * D..][..D * D], input);
                outputs.extend(ops::gated_norm(&o, &self.z[at * D..][..D], &self.norm, EPS));
            }
        }
        outputs
    }

    /// Outputs of all tokens by the kernels, `per_call` of them at a time.
    fn by_kernels(&mut self, pool: &Pool, isa: Isa, per_call: usize) -> Vec<f32> {
        let taps: Vec<f32> = (0..4).flat_map(|j| self.taps.chunks(4).map(move |taps| taps[j])).collect();
        let rates: Vec<f32> = self.a_log.iter().map(|a| a.exp()).collect();
        let (channels, heads) = (self.channels(), self.value_heads);
        let mut out = Activations::new(per_call, heads * D).unwrap();
        let mut outputs = Vec::new();
        for first in (0..self.tokens).step_by(per_call) {
            let tokens = per_call.min(self.tokens - first);
            let mixer = Delta {
                tokens,
                key_heads: self.key_heads,
                value_heads: heads,
                inputs: &self.inputs[first * channels..],
                taps: &taps,
                z: &self.z[first * heads * D..],
                a: &self.a[first * heads..],
                b: &self.b[first * heads..],
                rates: &rates,
                dt_bias: &self.dt_bias,
                norm: &self.norm,
                eps: EPS,
            };
            delta(pool, isa, &mixer, &mut self.history, &mut self.state, &mut out);
            outputs.extend((0..tokens).flat_map(|t| out.plain_row(isa, t)));
        }
        outputs
    }
}

/// Around the sizes of tiles, panels and chunks, and the number of tokens where the form changes.
fn cases() -> impl Iterator<Item = DeltaCase> {
    let lengths = [UNROLLED_FROM - 1, UNROLLED_FROM, UNROLLED_FROM + 1, 31, 63, 64, 65, 130];
    DELTA.iter().copied().chain(lengths.map(|tokens| DeltaCase { key_heads: 1, value_heads: 2, tokens }))
}

/// State in f32, then outputs in 16 bits.
const OUTPUT: Tolerance =
    Tolerance { value: F32_RECURRENCE.value + 1.6e-5, reason: "that of the state, and 16 bits of output, 1.5e-5" };

#[test]
fn the_delta_mixer_is_that_of_the_reference_and_so_is_the_state_it_leaves() {
    on_every_path(|pool, isa| {
        for (case, seed) in cases().zip(0..) {
            let mut expected = Layer::new(case, seed);
            let mut got = expected.clone();
            let (outputs, expected_outputs) = (got.by_kernels(pool, isa, case.tokens), expected.by_reference());
            assert_eq!(got.history, expected.history, "{case:?}: history");
            assert_close(&got.state, &expected.state, F32_RECURRENCE, &format!("{isa:?} {case:?}: state"));
            assert_close(&outputs, &expected_outputs, OUTPUT, &format!("{isa:?} {case:?}: output"));
        }
    });
}

/// A decay of zero forgets all that was before and one of 1 nothing; betas of 0 and 1 write nothing and everything.
#[test]
fn chunks_equal_steps_also_with_decays_and_betas_at_their_ends() {
    const TOLERANCE: Tolerance = Tolerance {
        value: 5e-5,
        reason: "150 tokens of f32 sums in two orders, with keys that repeat and nothing forgotten in between",
    };
    on_every_path(|pool, isa| {
        for (ends, seed) in [[-200.0, -200.0], [200.0, 200.0], [-200.0, 200.0], [-20.0, 3.0]].into_iter().zip(0..) {
            let mut steps = Layer::new(DeltaCase { key_heads: 1, value_heads: 2, tokens: 150 }, seed);
            let mut generator = Generator::new(seed);
            steps.a.iter_mut().for_each(|a| *a = ends[generator.bits() as usize % 7 / 6]);
            steps.b.iter_mut().for_each(|b| *b = [-200.0, 0.0, 200.0][generator.bits() as usize % 3]);
            let mut chunks = steps.clone();
            let expected = steps.by_kernels(pool, isa, 1);
            let got = chunks.by_kernels(pool, isa, 150);
            assert_eq!(chunks.history, steps.history, "{ends:?}: history");
            assert_close(&chunks.state, &steps.state, TOLERANCE, &format!("{isa:?} {ends:?}: state"));
            assert_close(&got, &expected, TOLERANCE, &format!("{isa:?} {ends:?}: output"));
        }
    });
}
