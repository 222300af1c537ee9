//! The mixer of a delta layer between its projections: convolution and SiLU, unit-length queries and keys, the gated
//! delta rule, the gated norm.
//!
//! In: u f32 `[tokens, conv width]`, z `[tokens, value width]`, a and b `[tokens, value heads]`, history `[3, conv width]`,
//! state `[value heads, 128 (value), 128 (key)]`. Out: activations `[tokens, value width]`; history and state moved on. The
//! work of one worker is a key head with the value heads that share it. Bytes moved: u and z once, 64 KB of state read and
//! written per value head and call.
//! Reference: `lily_reference::ops::{conv_step, delta_query, delta_key, decay, delta_step, gated_norm}`.
//!
//! 1. Convolution and SiLU; queries to length `128^-0.5`, keys to length 1.
//! 2. The gated delta rule: [`rule`].
//! 3. Gated norm, into the activations.

mod rule;

use lily_model::Shape;

use super::activations::{ActivationParts, Activations};
use super::norm::{gated_norm, to_length};
use super::{LANES, Lanes, add_product, kernel, prefetch, sigmoid, silu};
use crate::device::{Isa, Parts, Pool, with_scratch};
use rule::{CHUNK, Gates, Head, PANELS, Room, Tokens, VECTORS, heads, heads_of, panels, steps, take, turn, turn_back};

pub(super) use rule::UNROLLED_FROM;

const D: usize = Shape::DELTA_HEAD_DIM;
const TAPS: usize = Shape::CONV_TAPS;
const HISTORY: usize = Shape::CONV_HISTORY;

/// Tokens between a prefetch and its use. A head's values of two tokens are a row of the layer apart, too far for the
/// prefetcher of the CPU; without it the convolution waits for memory half of the time.
const AHEAD: usize = 4;

/// One layer and the tokens that go through it.
pub(crate) struct Delta<'a> {
    pub(crate) tokens: usize,
    pub(crate) key_heads: usize,
    pub(crate) value_heads: usize,
    /// Raw inputs of the convolution, `[tokens, conv width]`: queries, keys, values.
    pub(crate) inputs: &'a [f32],
    /// `[4, conv width]`, the newest input's last.
    pub(crate) taps: &'a [f32],
    /// `[tokens, value width]`.
    pub(crate) z: &'a [f32],
    /// `[tokens, value heads]`.
    pub(crate) a: &'a [f32],
    /// `[tokens, value heads]`.
    pub(crate) b: &'a [f32],
    /// `exp(A_log)` per value head.
    pub(crate) rates: &'a [f32],
    /// Per value head.
    pub(crate) dt_bias: &'a [f32],
    /// Multiplier of the gated norm, `[128]`.
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
}

/// Moves history and state on by all tokens and writes the normed, gated output.
pub(crate) fn delta(
    pool: &Pool,
    isa: Isa,
    d: &Delta<'_>,
    history: &mut [f32],
    state: &mut [f32],
    out: &mut Activations,
) {
    let share = d.value_heads / d.key_heads;
    let (history, state, out) = (Parts::new(history), Parts::new(state), out.parts());
    pool.run(d.key_heads, |key_head| {
        // SAFETY: the value heads of a key head belong to one unit.
        let state = unsafe { state.part(key_head * share * D * D, share * D * D) };
        let unit = Unit { d, isa, key_head, share, history: &history, out: &out };
        if d.tokens < UNROLLED_FROM {
            unit.step(state)
        } else {
            unit.unroll(state)
        }
        unit.advance_history();
    });
}

/// A key head with its value heads.
struct Unit<'a> {
    d: &'a Delta<'a>,
    isa: Isa,
    key_head: usize,
    share: usize,
    history: &'a Parts<'a, f32>,
    out: &'a ActivationParts<'a>,
}

impl Unit<'_> {
    /// Heads of a row of inputs.
    fn row_heads(&self) -> usize {
        2 * self.d.key_heads + self.d.value_heads
    }

    /// Place of the queries in a row of inputs, and of the keys.
    fn shared_heads(&self) -> [usize; 2] {
        [self.key_head, self.d.key_heads + self.key_head]
    }

    /// Its value heads.
    fn value_heads(&self) -> std::ops::Range<usize> {
        self.key_head * self.share..(self.key_head + 1) * self.share
    }

    /// Place of a value head in a row of inputs.
    fn value_place(&self, head: usize) -> usize {
        2 * self.d.key_heads + head
    }

    /// Token by token.
    fn step(&self, state: &mut [f32]) {
        let tokens = self.d.tokens;
        with_scratch(4 * tokens * D, |mut scratch| {
            let [queries, keys, values, outputs] = [(); 4].map(|()| heads(take(&mut scratch, tokens * D)));
            self.convolve_shared(0, queries, keys);
            for (head, state) in self.value_heads().zip(state.chunks_exact_mut(D * D)) {
                self.convolve(0, self.value_place(head), None, values);
                let gates = self.gates(head, 0, tokens);
                steps(self.isa, &Tokens { queries, keys, values, gates: &gates }, state, outputs);
                self.finish(head, 0, outputs);
            }
        });
    }

    /// Chunk by chunk, unrolled.
    fn unroll(&self, state: &mut [f32]) {
        let isa = self.isa;
        with_scratch(4 * CHUNK * D + state.len() + Room::LEN, |mut scratch| {
            let [queries, keys, values, outputs] = [(); 4].map(|()| heads(take(&mut scratch, CHUNK * D)));
            let turned = panels(take(&mut scratch, state.len()));
            let mut room = Room::new(scratch);
            turn(isa, state, turned);
            for first in (0..self.d.tokens).step_by(CHUNK) {
                let count = CHUNK.min(self.d.tokens - first);
                for all in [&mut *queries, &mut *keys, &mut *values] {
                    all[count..].fill([[0.0; LANES]; VECTORS]);
                }
                self.convolve_shared(first, &mut queries[..count], &mut keys[..count]);
                room.relate(isa, queries, keys, count);
                for (head, state) in self.value_heads().zip(turned.chunks_exact_mut(PANELS)) {
                    self.convolve(first, self.value_place(head), None, &mut values[..count]);
                    let gates = self.gates(head, first, count);
                    let tokens = Tokens { queries, keys, values, gates: &gates };
                    room.chunk(isa, &tokens, count, state, outputs);
                    self.finish(head, first, &outputs[..count]);
                }
            }
            turn_back(isa, turned, state);
        });
    }

    /// Queries and keys of tokens `first ..`.
    fn convolve_shared(&self, first: usize, queries: &mut [Head], keys: &mut [Head]) {
        let [query_place, key_place] = self.shared_heads();
        self.convolve(first, query_place, Some((D as f32).sqrt().recip()), queries);
        self.convolve(first, key_place, Some(1.0), keys);
    }

    /// The head at `place` of tokens `first ..`, brought to a length if one is given.
    fn convolve(&self, first: usize, place: usize, length: Option<f32>, out: &mut [Head]) {
        let stride = self.row_heads();
        let (inputs, taps) = (heads_of(self.d.inputs), heads_of(self.d.taps));
        let head = ConvolvedHead {
            inputs: &inputs[place..],
            stride,
            past: &self.past(place),
            taps: std::array::from_fn(|i| &taps[i * stride + place]),
            length,
        };
        convolve(self.isa, &head, first, out);
    }

    /// The history of the head at `place`.
    fn past(&self, place: usize) -> [Head; HISTORY] {
        std::array::from_fn(|i| {
            // SAFETY: the channels of a head belong to one unit, and this part is gone when that unit writes them.
            let row = unsafe { self.history.part((i * self.row_heads() + place) * D, D) };
            heads_of(row)[0]
        })
    }

    /// The last raw inputs become the history.
    fn advance_history(&self) {
        let (tokens, stride) = (self.d.tokens, self.row_heads());
        let values = self.value_heads().map(|head| self.value_place(head));
        for place in self.shared_heads().into_iter().chain(values) {
            let past = self.past(place);
            for i in 0..HISTORY {
                let row = match (tokens + i).checked_sub(HISTORY) {
                    Some(token) => &heads_of(self.d.inputs)[token * stride + place],
                    None => &past[i + tokens],
                };
                // SAFETY: the channels of a head belong to one unit.
                unsafe { self.history.part((i * stride + place) * D, D) }.copy_from_slice(row.as_flattened());
            }
        }
    }

    /// Decays and betas of a value head for tokens `first .. first + count`.
    fn gates(&self, head: usize, first: usize, count: usize) -> Gates {
        let (d, mut gates) = (self.d, Gates::NONE);
        for i in 0..count {
            let at = (first + i) * d.value_heads + head;
            gates.decays[i] = decay(d.a[at] + d.dt_bias[head], d.rates[head]);
            gates.betas[i] = sigmoid::<false>(d.b[at]);
        }
        gates
    }

    /// Norm and gate of a head's outputs for tokens `first ..`, into the activations.
    fn finish(&self, head: usize, first: usize, outputs: &[Head]) {
        let (d, column) = (self.d, head * D);
        let z = &heads_of(d.z)[head..];
        for (token, o) in (first..).zip(outputs) {
            if let Some(later) = z.get((token + AHEAD) * d.value_heads) {
                prefetch_head(later);
            }
            let z = z[token * d.value_heads].as_flattened();
            let mut gated = [0.0; D];
            gate(self.isa, o.as_flattened(), z, d.norm, d.eps, &mut gated);
            // SAFETY: the columns of a value head belong to one unit.
            unsafe { self.out.arrange(self.isa, token, column, &gated) };
        }
    }
}

/// Asks for a head before it is needed.
#[inline(always)]
fn prefetch_head(head: &Head) {
    const LINE: usize = 64 / size_of::<Lanes>();
    for line in (0..VECTORS).step_by(LINE) {
        prefetch(head[line].as_ptr().cast());
    }
}

/// `exp(-rate * softplus(x))`, softplus in the form that does not overflow.
fn decay(x: f32, rate: f32) -> f32 {
    (-rate * (x.max(0.0) + (-x.abs()).exp().ln_1p())).exp()
}

/// A head's way through the convolution.
struct ConvolvedHead<'a> {
    /// The head of token `t` is at `t * stride`.
    inputs: &'a [Head],
    stride: usize,
    past: &'a [Head; HISTORY],
    taps: [&'a Head; TAPS],
    length: Option<f32>,
}

kernel! {
    /// Tokens `first ..` of one head.
    fn convolve(head: &ConvolvedHead<'_>, first: usize, out: &mut [Head]) = convolve_body;
}

#[inline(always)]
fn convolve_body<const FUSED: bool>(head: &ConvolvedHead<'_>, first: usize, out: &mut [Head]) {
    for (token, out) in (first..).zip(out) {
        let mut window = [&head.inputs[token * head.stride]; TAPS];
        for (i, row) in window[..HISTORY].iter_mut().enumerate() {
            *row = match (token + i).checked_sub(HISTORY) {
                Some(token) => &head.inputs[token * head.stride],
                None => &head.past[token + i],
            };
        }
        if let Some(later) = head.inputs.get((token + AHEAD) * head.stride) {
            prefetch_head(later);
        }
        for v in 0..VECTORS {
            let mut sum = [0.0; LANES];
            for (row, taps) in window.iter().zip(&head.taps) {
                add_product::<FUSED>(&mut sum, &row[v], &taps[v]);
            }
            for lane in 0..LANES {
                out[v][lane] = silu::<FUSED>(sum[lane]);
            }
        }
        if let Some(length) = head.length {
            to_length::<FUSED>(out.as_flattened_mut(), length);
        }
    }
}

kernel! {
    fn gate(o: &[f32], z: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = gated_norm;
}
