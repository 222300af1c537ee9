//! Causal grouped-query attention over the KV cache, with the softmax carried along block by block of keys.
//!
//! In: queries f32 `[tokens, query heads, 256]`, normed, rotated and scaled; keys and values of one layer,
//! `[kv heads, capacity, 256]`, f32 or BF16. Out: f32 `[tokens, query heads, 256]`. The work of one call is a key/value
//! head, a few tokens with all query heads that share it, and a range of keys. Bytes moved: the keys and values of the
//! range once per call.
//! Reference: `lily_reference::ops::attention`.

use half::bf16;
use lily_backend::Result;
use lily_model::Shape;

use super::{LANES, Lanes, add_product, add_scaled, exp, kernel, total};
use crate::device::{Buffer, Isa, Parts, Pool, with_scratch};

const D: usize = Shape::HEAD_DIM;
const VECTORS: usize = D / LANES;
/// Keys whose scores are held at a time; 64 keys and 64 values of f32 are 128 KB, which leaves room in the second level.
const KEYS: usize = 64;
/// Tokens that share a pass over the keys.
const TOKENS_PER_PASS: usize = 8;
/// Keys of a register tile: 4 keys x 3 queries are 12 sums, which with 3 queries and a key fill 16 registers.
const TILE_ROWS: usize = 4;
/// Queries of a register tile.
const TILE_TOKENS: usize = 3;
/// Keys that one worker takes when there is a single token.
const SPLIT: usize = 256;

/// Keys or values of one layer and one head, `[capacity, 256]`.
#[derive(Clone, Copy)]
pub(crate) enum Plane<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

impl<'a> Plane<'a> {
    /// Rows `first .. first + count` in f32, widened into `room` if they are not.
    #[inline(always)]
    fn rows<'b>(self, first: usize, count: usize, room: &'b mut [f32]) -> &'b [[Lanes; VECTORS]]
    where
        'a: 'b,
    {
        let range = first * D..(first + count) * D;
        let rows: &'b [f32] = match self {
            Plane::F32(all) => &all[range],
            Plane::Bf16(all) => {
                let room = &mut room[..count * D];
                room.iter_mut().zip(&all[range]).for_each(|(x, b)| *x = f32::from_bits(u32::from(*b) << 16));
                room
            }
        };
        rows.as_chunks::<LANES>().0.as_chunks::<VECTORS>().0
    }
}

/// Narrows to BF16, to nearest even.
pub(crate) fn narrow(from: &[f32], to: &mut [u16]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16::from_f32(*x).to_bits());
}

/// A piece of attention: one key/value head, tokens, keys.
struct Pass<'a> {
    /// `[tokens, queries per kv head, 256]` in place: token `t` has its heads at `t * stride`.
    queries: &'a [f32],
    stride: usize,
    heads: usize,
    tokens: usize,
    /// Position of the first token: it sees the keys up to and including this one.
    position: usize,
    keys: Plane<'a>,
    values: Plane<'a>,
    /// Keys of this pass.
    from: usize,
    to: usize,
}

/// What a pass leaves of a query: `sum_p exp(score_p - max) v_p`, the sum of the exponentials, and the maximum.
struct Partial<'a> {
    values: &'a mut [f32],
    sums: &'a mut [f32],
    maxima: &'a mut [f32],
}

kernel! {
    fn attend(pass: &Pass<'_>, out: Partial<'_>, room: &mut [f32]) = attend_body;
}

/// Scratch of a pass: scores, keys and values of a block.
const fn room_len(rows: usize) -> usize {
    rows * KEYS + 2 * KEYS * D
}

#[inline(always)]
fn attend_body<const FUSED: bool>(pass: &Pass<'_>, out: Partial<'_>, room: &mut [f32]) {
    let rows = pass.tokens * pass.heads;
    let (scores, room) = room.split_at_mut(rows * KEYS);
    let (key_room, value_room) = room.split_at_mut(KEYS * D);
    out.values.fill(0.0);
    out.sums.fill(0.0);
    out.maxima.fill(f32::NEG_INFINITY);
    for first in (pass.from..pass.to).step_by(KEYS) {
        let count = KEYS.min(pass.to - first);
        let keys = pass.keys.rows(first, count, key_room);
        score_block::<FUSED>(pass, keys, scores);
        let values = pass.values.rows(first, count, value_room);
        for token in 0..pass.tokens {
            let visible = count.min((pass.position + token + 1).saturating_sub(first));
            let row = token * pass.heads;
            for row in row..row + pass.heads {
                let scores = &mut scores[row * KEYS..][..visible];
                let values = &mut out.values[row * D..][..D];
                soften::<FUSED>(scores, values, &mut out.sums[row], &mut out.maxima[row]);
            }
            let sums = &mut out.values[row * D..][..pass.heads * D];
            let weights = &scores[row * KEYS..][..pass.heads * KEYS];
            add_values::<FUSED>(weights, &values[..visible], sums);
        }
    }
}

/// Scores of all rows against a block of keys, `[rows, KEYS]`.
#[inline(always)]
fn score_block<const FUSED: bool>(pass: &Pass<'_>, keys: &[[Lanes; VECTORS]], scores: &mut [f32]) {
    let rows = pass.tokens * pass.heads;
    let query = |row: usize| -> &[Lanes] {
        let at = row / pass.heads * pass.stride + row % pass.heads * D;
        pass.queries[at..at + D].as_chunks::<LANES>().0
    };
    for first in (0..keys.len()).step_by(TILE_ROWS) {
        let count = TILE_ROWS.min(keys.len() - first);
        // Beyond the end the last key is scored again and not stored.
        let key = |i: usize| &keys[first + i.min(count - 1)][..];
        let keys = [key(0), key(1), key(2), key(3)];
        let mut row = 0;
        while row + TILE_TOKENS <= rows {
            let block = tile::<FUSED, TILE_TOKENS>([query(row), query(row + 1), query(row + 2)], keys);
            for (i, block) in block.iter().enumerate() {
                scores[(row + i) * KEYS + first..][..count].copy_from_slice(&block[..count]);
            }
            row += TILE_TOKENS;
        }
        while row < rows {
            let [block] = tile::<FUSED, 1>([query(row)], keys);
            scores[row * KEYS + first..][..count].copy_from_slice(&block[..count]);
            row += 1;
        }
    }
}

/// Dot products of each of `x` with each of `w`, all of one length. The sum of a product does not depend on `TOKENS`.
#[inline(always)]
fn tile<const FUSED: bool, const TOKENS: usize>(
    mut x: [&[Lanes]; TOKENS],
    mut w: [&[Lanes]; TILE_ROWS],
) -> [[f32; TILE_ROWS]; TOKENS] {
    // With equal lengths in plain sight no access in the loop is checked.
    let n = w[0].len();
    for x in &mut x {
        *x = &x[..n];
    }
    for w in &mut w {
        *w = &w[..n];
    }
    let mut sums = [[[0.0; LANES]; TILE_ROWS]; TOKENS];
    for k in 0..n {
        // In this order a weight is loaded when it is needed; the other way round all four stay in registers and two sums
        // have to leave.
        for r in 0..TILE_ROWS {
            for t in 0..TOKENS {
                add_product::<FUSED>(&mut sums[t][r], &x[t][k], &w[r][k]);
            }
        }
    }
    let mut totals = [[0.0; TILE_ROWS]; TOKENS];
    for t in 0..TOKENS {
        for r in 0..TILE_ROWS {
            totals[t][r] = total(sums[t][r]);
        }
    }
    totals
}

/// Scores to exponentials, and what was summed before to the new maximum.
#[inline(always)]
fn soften<const FUSED: bool>(scores: &mut [f32], values: &mut [f32], sum: &mut f32, max: &mut f32) {
    if scores.is_empty() {
        return;
    }
    let mut highest = *max;
    for score in &*scores {
        highest = if *score > highest { *score } else { highest };
    }
    if highest > *max {
        let shrink = exp::<FUSED>(*max - highest);
        for value in values {
            *value *= shrink;
        }
        *sum *= shrink;
        *max = highest;
    }
    let (vectors, rest) = scores.as_chunks_mut::<LANES>();
    let mut lanes = [0.0; LANES];
    for scores in vectors {
        for i in 0..LANES {
            scores[i] = exp::<FUSED>(scores[i] - highest);
            lanes[i] += scores[i];
        }
    }
    for score in rest {
        *score = exp::<FUSED>(*score - highest);
        *sum += *score;
    }
    *sum += total(lanes);
}

/// `sums[row] += sum_p weights[row, p] values[p]`.
#[inline(always)]
fn add_values<const FUSED: bool>(weights: &[f32], values: &[[Lanes; VECTORS]], sums: &mut [f32]) {
    let (weights, sums) = (weights.as_chunks::<KEYS>().0, sums.as_chunks_mut::<LANES>().0.as_chunks_mut::<VECTORS>().0);
    let (fours, ones) = sums.as_chunks_mut::<4>();
    let (weights4, weights1) = weights.as_chunks::<4>();
    for (sums, weights) in fours.iter_mut().zip(weights4) {
        add_values_to::<FUSED, 4, 2>(weights, values, sums);
    }
    for (sums, weights) in ones.iter_mut().zip(weights1) {
        add_values_to::<FUSED, 1, 8>(std::array::from_ref(weights), values, std::array::from_mut(sums));
    }
}

/// The same for `ROWS` rows, `WIDTH` vectors of columns at a time in registers.
#[inline(always)]
fn add_values_to<const FUSED: bool, const ROWS: usize, const WIDTH: usize>(
    weights: &[[f32; KEYS]; ROWS],
    values: &[[Lanes; VECTORS]],
    sums: &mut [[Lanes; VECTORS]; ROWS],
) {
    for column in (0..VECTORS).step_by(WIDTH) {
        let mut held = [[[0.0; LANES]; WIDTH]; ROWS];
        for (held, sums) in held.iter_mut().zip(&*sums) {
            held.copy_from_slice(&sums[column..column + WIDTH]);
        }
        for (p, value) in values.iter().enumerate() {
            for (held, weights) in held.iter_mut().zip(weights) {
                for (i, held) in held.iter_mut().enumerate() {
                    add_scaled::<FUSED>(held, &value[column + i], weights[p]);
                }
            }
        }
        for (sums, held) in sums.iter_mut().zip(&held) {
            sums[column..column + WIDTH].copy_from_slice(held);
        }
    }
}

/// Results of single-token passes over splits of the keys, before they are merged.
pub(crate) struct Partials {
    values: Buffer<f32>,
    sums: Buffer<f32>,
    maxima: Buffer<f32>,
}

impl Partials {
    /// Room for one token of `query_heads` heads over `context` keys.
    pub(crate) fn new(query_heads: usize, context: usize) -> Result<Partials> {
        let rows = query_heads * context.div_ceil(SPLIT);
        let zeroed = |len| Buffer::zeroed("attention splits", len);
        Ok(Partials { values: zeroed(rows * D)?, sums: zeroed(rows)?, maxima: zeroed(rows)? })
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.bytes() + self.sums.bytes() + self.maxima.bytes()
    }
}

/// Attention of one layer.
pub(crate) struct Attention<'a> {
    /// `[tokens, query heads, 256]`.
    pub(crate) queries: &'a [f32],
    pub(crate) tokens: usize,
    pub(crate) query_heads: usize,
    /// Position of the first token. Keys and values are stored up to the last token.
    pub(crate) position: usize,
    /// Per key/value head.
    pub(crate) keys: Vec<Plane<'a>>,
    /// Per key/value head.
    pub(crate) values: Vec<Plane<'a>>,
}

impl Attention<'_> {
    fn pass(&self, head: usize, first: usize, tokens: usize, keys: std::ops::Range<usize>) -> Pass<'_> {
        let heads = self.query_heads / self.keys.len();
        Pass {
            queries: &self.queries[(first * self.query_heads + head * heads) * D..],
            stride: self.query_heads * D,
            heads,
            tokens,
            position: self.position + first,
            keys: self.keys[head],
            values: self.values[head],
            from: keys.start,
            to: keys.end,
        }
    }

    /// Writes `out`, `[tokens, query heads, 256]`.
    pub(crate) fn run(&self, pool: &Pool, isa: Isa, partials: &mut Partials, out: &mut [f32]) {
        if self.tokens == 1 { self.run_split(pool, isa, partials, out) } else { self.run_passes(pool, isa, out) }
    }

    /// Many tokens: workers take (head, tokens) over all keys.
    fn run_passes(&self, pool: &Pool, isa: Isa, out: &mut [f32]) {
        let (kv_heads, heads) = (self.keys.len(), self.query_heads / self.keys.len());
        let out = Parts::new(out);
        pool.run(kv_heads * self.tokens.div_ceil(TOKENS_PER_PASS), |unit| {
            let (head, first) = (unit % kv_heads, unit / kv_heads * TOKENS_PER_PASS);
            let tokens = TOKENS_PER_PASS.min(self.tokens - first);
            let rows = tokens * heads;
            let pass = self.pass(head, first, tokens, 0..self.position + first + tokens);
            with_scratch(rows * (D + 2) + room_len(rows), |scratch| {
                let (values, scratch) = scratch.split_at_mut(rows * D);
                let (sums, scratch) = scratch.split_at_mut(rows);
                let (maxima, room) = scratch.split_at_mut(rows);
                attend(isa, &pass, Partial { values: &mut *values, sums: &mut *sums, maxima }, room);
                for (row, values) in values.chunks_exact(D).enumerate() {
                    let at = ((first + row / heads) * self.query_heads + head * heads + row % heads) * D;
                    // SAFETY: this head of this token belongs to this unit alone.
                    let out = unsafe { out.part(at, D) };
                    out.iter_mut().zip(values).for_each(|(out, v)| *out = v / sums[row]);
                }
            });
        });
    }

    /// One token: workers take (head, keys), and what they leave is merged in the order of the keys.
    fn run_split(&self, pool: &Pool, isa: Isa, partials: &mut Partials, out: &mut [f32]) {
        let (kv_heads, heads) = (self.keys.len(), self.query_heads / self.keys.len());
        let context = self.position + 1;
        let splits = context.div_ceil(SPLIT);
        {
            let values = Parts::new(&mut partials.values);
            let (sums, maxima) = (Parts::new(&mut partials.sums), Parts::new(&mut partials.maxima));
            pool.run(kv_heads * splits, |unit| {
                let (head, split) = (unit % kv_heads, unit / kv_heads);
                let keys = split * SPLIT..context.min((split + 1) * SPLIT);
                let pass = self.pass(head, 0, 1, keys);
                let row = split * self.query_heads + head * heads;
                // SAFETY: these rows belong to this unit alone.
                let partial = unsafe {
                    Partial {
                        values: values.part(row * D, heads * D),
                        sums: sums.part(row, heads),
                        maxima: maxima.part(row, heads),
                    }
                };
                with_scratch(room_len(heads), |room| attend(isa, &pass, partial, room));
            });
        }
        for (head, out) in out.chunks_exact_mut(D).enumerate() {
            let rows = || (0..splits).map(|split| split * self.query_heads + head);
            let max = rows().fold(f32::NEG_INFINITY, |max, row| max.max(partials.maxima[row]));
            let mut sum = 0.0;
            out.fill(0.0);
            for row in rows() {
                let weight = (partials.maxima[row] - max).exp();
                sum += weight * partials.sums[row];
                super::norm::add_weighted(isa, out, &partials.values[row * D..][..D], weight);
            }
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }
}
