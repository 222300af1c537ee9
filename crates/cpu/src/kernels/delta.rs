//! The mixer of a delta layer between its projections: convolution and SiLU, unit-length queries and keys, the gated
//! delta rule token by token, the gated norm.
//!
//! [`convolve`]. In: `u` f32 `[tokens, channels]`, history `[3, channels]`. Out: f32 `[tokens, channels]`, history moved
//! on. The work of one worker is one head of 128 channels.
//! [`delta`]. In: that, z `[tokens, value width]`, a and b `[tokens, value heads]`, state `[value heads, 128, 128]`. Out:
//! activations `[tokens, value width]`, state moved on. The work of one worker is one value head. Bytes moved: 64 KB of
//! state read and written per head and step.
//! Reference: `lily_reference::ops::{conv_step, delta_query, delta_key, decay, delta_step, gated_norm}`.

use lily_model::Shape;

use super::activations::{ActivationParts, Activations};
use super::norm::{gated_norm, to_length};
use super::{LANES, Lanes, add_product, add_scaled, kernel, mul_add, sigmoid, silu, sum, total};
use crate::device::{Isa, Parts, Pool, with_scratch};

const D: usize = Shape::DELTA_HEAD_DIM;
const TAPS: usize = Shape::CONV_TAPS;
const HISTORY: usize = Shape::CONV_HISTORY;
const VECTORS: usize = D / LANES;
/// Rows of a state that meet all tokens before the next rows do: 16 KB, half of the first-level cache.
const STATE_ROWS: usize = 32;

/// The channels of one head.
type Channels = [f32; D];

/// The head that starts at `at`.
fn channels_at(all: &[f32], at: usize) -> &Channels {
    &all[at..].as_chunks().0[0]
}

/// The head that a slice of its length holds.
fn channels_mut(head: &mut [f32]) -> &mut Channels {
    &mut head.as_chunks_mut().0[0]
}

/// The convolution of one layer.
pub(crate) struct Convolution<'a> {
    /// Raw inputs `[tokens, channels]`.
    pub(crate) inputs: &'a [f32],
    pub(crate) tokens: usize,
    /// `[4, channels]`, the newest input's last.
    pub(crate) taps: &'a [f32],
    /// Heads of queries, and of keys after them; the rest are values.
    pub(crate) key_heads: usize,
}

/// Writes `out` `[tokens, channels]`: queries of length `128^-0.5`, keys of length 1, values as they are.
pub(crate) fn convolve(pool: &Pool, isa: Isa, c: &Convolution<'_>, history: &mut [f32], out: &mut [f32]) {
    let channels = history.len() / HISTORY;
    let (history, out) = (Parts::new(history), Parts::new(out));
    pool.run(channels / D, |head| {
        let place = |row: usize| row * channels + head * D;
        // SAFETY: the channels of a head belong to one unit.
        let mut past: [&mut Channels; HISTORY] =
            std::array::from_fn(|i| channels_mut(unsafe { history.part(place(i), D) }));
        let length = match head / c.key_heads {
            0 => Some((D as f32).sqrt().recip()),
            1 => Some(1.0),
            _ => None,
        };
        let input = |token: usize| channels_at(c.inputs, place(token));
        let taps: [&Channels; TAPS] = std::array::from_fn(|i| channels_at(c.taps, place(i)));
        for token in 0..c.tokens {
            let window: [&Channels; TAPS] = std::array::from_fn(|i| match (token + i).checked_sub(HISTORY) {
                Some(token) => input(token),
                None => &*past[token + i],
            });
            // SAFETY: as above.
            let out = channels_mut(unsafe { out.part(place(token), D) });
            convolve_head(isa, window, taps, length, out);
        }
        for i in 0..HISTORY {
            match (c.tokens + i).checked_sub(HISTORY) {
                Some(token) => past[i].copy_from_slice(input(token)),
                None => {
                    let (to, from) = past.split_at_mut(i + 1);
                    to[i].copy_from_slice(from[c.tokens - 1]);
                }
            }
        }
    });
}

kernel! {
    /// One head and token.
    fn convolve_head(window: [&Channels; TAPS], taps: [&Channels; TAPS], length: Option<f32>, out: &mut Channels) = convolve_body;
}

#[inline(always)]
fn convolve_body<const FUSED: bool>(
    window: [&Channels; TAPS],
    taps: [&Channels; TAPS],
    length: Option<f32>,
    out: &mut Channels,
) {
    for i in 0..D {
        let mut sum = window[0][i] * taps[0][i];
        for j in 1..TAPS {
            sum = mul_add::<FUSED>(window[j][i], taps[j][i], sum);
        }
        out[i] = silu::<FUSED>(sum);
    }
    if let Some(length) = length {
        to_length::<FUSED>(out, length);
    }
}

/// The recurrence of one layer.
pub(crate) struct Delta<'a> {
    pub(crate) tokens: usize,
    pub(crate) key_heads: usize,
    pub(crate) value_heads: usize,
    /// Output of [`convolve`].
    pub(crate) qkv: &'a [f32],
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

/// Moves the state on by all tokens and writes the normed, gated output.
pub(crate) fn delta(pool: &Pool, isa: Isa, d: &Delta<'_>, state: &mut [f32], out: &mut Activations) {
    let out = out.parts();
    pool.pieces(state, D * D, |head, state| {
        with_scratch(d.tokens * (2 + D), |scratch| {
            let (decays, scratch) = scratch.split_at_mut(d.tokens);
            let (betas, outputs) = scratch.split_at_mut(d.tokens);
            for token in 0..d.tokens {
                let at = token * d.value_heads + head;
                decays[token] = decay(d.a[at] + d.dt_bias[head], d.rates[head]);
                betas[token] = sigmoid::<false>(d.b[at]);
            }
            let head = Head { d, head, decays, betas };
            delta_head(isa, &head, state, outputs);
            gate_head(isa, &head, outputs, &out);
        });
    });
}

/// `exp(-rate * softplus(x))`, softplus in the form that does not overflow.
fn decay(x: f32, rate: f32) -> f32 {
    (-rate * (x.max(0.0) + (-x.abs()).exp().ln_1p())).exp()
}

/// One value head of all tokens.
struct Head<'a> {
    d: &'a Delta<'a>,
    head: usize,
    decays: &'a [f32],
    betas: &'a [f32],
}

impl Head<'_> {
    /// Query, key and value of a token.
    #[inline(always)]
    fn inputs(&self, token: usize) -> [&[Lanes; VECTORS]; 3] {
        let Delta { key_heads, value_heads, qkv, .. } = self.d;
        let key_head = self.head / (value_heads / key_heads);
        let heads = qkv.as_chunks::<LANES>().0.as_chunks::<VECTORS>().0;
        let first = token * (2 * key_heads + value_heads);
        let head = |head: usize| &heads[first + head];
        [head(key_head), head(key_heads + key_head), head(2 * key_heads + self.head)]
    }
}

kernel! {
    fn delta_head(head: &Head<'_>, state: &mut [f32], outputs: &mut [f32]) = delta_head_body;
}

#[inline(always)]
fn delta_head_body<const FUSED: bool>(head: &Head<'_>, state: &mut [f32], outputs: &mut [f32]) {
    let rows = state.as_chunks_mut::<LANES>().0.as_chunks_mut::<VECTORS>().0;
    for (block, rows) in rows.chunks_mut(STATE_ROWS).enumerate() {
        for token in 0..head.d.tokens {
            let [query, key, value] = head.inputs(token);
            let (decay, beta) = (head.decays[token], head.betas[token]);
            let first = block * STATE_ROWS;
            let values = &value.as_flattened()[first..];
            let outputs = &mut outputs[token * D + first..];
            for ((row, value), out) in rows.iter_mut().zip(values).zip(outputs) {
                *out = delta_row::<FUSED>(row, query, key, *value, decay, beta);
            }
        }
    }
}

/// One row of the state through one token: `s = decay * s; s += beta * (v - s . k) * k`; returns `s . q`.
#[inline(always)]
fn delta_row<const FUSED: bool>(
    row: &mut [Lanes; VECTORS],
    query: &[Lanes; VECTORS],
    key: &[Lanes; VECTORS],
    value: f32,
    decay: f32,
    beta: f32,
) -> f32 {
    let mut sums = [[0.0; LANES]; 2];
    for (i, (s, k)) in row.iter_mut().zip(key).enumerate() {
        for s in s.iter_mut() {
            *s *= decay;
        }
        add_product::<FUSED>(&mut sums[i % 2], s, k);
    }
    let error = beta * (value - total(sum(sums[0], sums[1])));
    let mut sums = [[0.0; LANES]; 2];
    for (i, ((s, k), q)) in row.iter_mut().zip(key).zip(query).enumerate() {
        add_scaled::<FUSED>(s, k, error);
        add_product::<FUSED>(&mut sums[i % 2], s, q);
    }
    total(sum(sums[0], sums[1]))
}

/// Norm and gate of a head's outputs, into the activations.
fn gate_head(isa: Isa, head: &Head<'_>, outputs: &[f32], out: &ActivationParts<'_>) {
    let d = head.d;
    let width = d.value_heads * D;
    for (token, o) in outputs.chunks_exact(D).enumerate() {
        let column = head.head * D;
        let z = &d.z[token * width + column..][..D];
        let mut gated = [0.0; D];
        gate(isa, o, z, d.norm, d.eps, &mut gated);
        // SAFETY: the columns of a value head belong to one unit.
        unsafe { out.arrange(isa, token, column, &gated) };
    }
}

kernel! {
    fn gate(o: &[f32], z: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = gated_norm;
}
