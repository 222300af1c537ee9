//! The mixer of an attention layer between its projections: norm and RoPE of queries and keys, the KV cache, causal
//! grouped-query attention with the softmax carried along block by block of keys, the gate on its output.
//!
//! In: queries and gates f32 `[tokens, query heads, 512]` (per head the query, then the gate), keys and values f32
//! `[tokens, kv heads, 256]`, the cache of one layer `[kv heads, capacity, 256]`, f32 or BF16. Out: activations
//! `[tokens, query width]`; the cache extended.
//!
//! 1. Keys are normed and rotated, and stored like the values. The work of one worker is a few tokens.
//! 2. [`attend`]: the work of one worker is a key/value head, a few tokens with all query heads that share it, and a range
//!    of keys. It norms and rotates its queries. Bytes moved: the keys and values of the range once.
//! 3. Few tokens: their keys are shared out among workers in ranges, and a second pass merges what they leave. Many: a
//!    worker takes all keys of its tokens.
//! 4. The gate, into the activations.
//!
//! Reference: `lily_reference::ops::{rms_norm, rope, attention, attention_gate}`.

mod rows;

use std::ops::Range;

use lily_backend::Result;
use lily_model::Shape;

use super::activations::{ActivationParts, Activations};
use super::norm::{add_weighted, rms_norm_body, sigmoid_gate};
use super::rope::Angles;
use super::{LANES, Lanes, add_product, add_scaled, exp, kernel, total};
use crate::device::{Buffer, Isa, Parts, Pool, with_scratch};
use rows::{BLOCKS, from_row_order, prefetch_rows, store, to_row_order};

pub(crate) use rows::{Block, Row};

const D: usize = Shape::HEAD_DIM;
/// Keys whose scores are held at a time: 24 KB of BF16, which stay in the first-level cache while all queries meet them.
const KEYS: usize = 48;
/// Tokens that share a pass over the keys. So few alone share out their keys.
const TOKENS_PER_PASS: usize = 8;
/// Queries of a register tile.
const TILE: usize = 4;
/// Keys of a register tile: 3 keys x 4 queries are 12 sums, which with 3 keys and a query fill 16 registers.
const TILE_KEYS: usize = 3;
/// Tokens that a worker stores at a time.
const TOKENS_PER_STORE: usize = 16;
/// Into how many ranges a context is cut, as far as [`SPLIT_KEYS`] allows.
const SPLITS: usize = 32;
/// Least and most keys of a range: below, starting it costs as much as the work; above, a range is long enough.
const SPLIT_KEYS: Range<usize> = 4 * KEYS..40 * KEYS;

/// Keys of a range. It depends on nothing but the context, or the number of threads would change results.
fn split_keys(context: usize) -> usize {
    context.div_ceil(SPLITS).next_multiple_of(KEYS).clamp(SPLIT_KEYS.start, SPLIT_KEYS.end)
}

/// Keys and values of one layer, `[kv heads, capacity]` rows each.
pub(crate) struct Planes<'a, B> {
    pub(crate) keys: &'a mut [Row<B>],
    pub(crate) values: &'a mut [Row<B>],
}

/// The same in either type.
pub(crate) enum Kv<'a> {
    F32(Planes<'a, [f32; 2 * LANES]>),
    Bf16(Planes<'a, [u32; LANES]>),
}

/// One layer and the tokens that go through it.
pub(crate) struct Attention<'a> {
    pub(crate) tokens: usize,
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    /// Position of the first token.
    pub(crate) position: usize,
    /// `[tokens, query heads, 512]`.
    pub(crate) query_gate: &'a [f32],
    /// `[tokens, kv heads, 256]`, as projected.
    pub(crate) keys: &'a [f32],
    /// `[tokens, kv heads, 256]`.
    pub(crate) values: &'a [f32],
    /// Multipliers of the norms, `[256]`.
    pub(crate) query_norm: &'a [f32],
    pub(crate) key_norm: &'a [f32],
    pub(crate) eps: f32,
    /// Per token.
    pub(crate) angles: &'a [Angles],
}

/// Extends the cache by all tokens and writes their attention, gated.
pub(crate) fn attention(
    pool: &Pool,
    isa: Isa,
    a: &Attention<'_>,
    kv: Kv<'_>,
    partials: &mut Partials,
    out: &mut Activations,
) {
    let rows = match kv {
        Kv::F32(planes) => Rows::F32(extend(pool, isa, a, planes)),
        Kv::Bf16(planes) => Rows::Bf16(extend(pool, isa, a, planes)),
    };
    let heads = a.query_heads / a.kv_heads;
    let layer = Layer { a, isa, rows, heads, out: out.parts() };
    if a.tokens <= TOKENS_PER_PASS { layer.run_split(pool, partials) } else { layer.run_passes(pool) }
}

/// Stores keys and values of all tokens.
fn extend<'a, B: Block>(pool: &Pool, isa: Isa, a: &Attention<'_>, planes: Planes<'a, B>) -> [&'a [Row<B>]; 2] {
    let Planes { keys, values } = planes;
    let capacity = keys.len() / a.kv_heads;
    {
        let (keys, values) = (Parts::new(keys), Parts::new(values));
        let heads_of = |all: &'_ [f32], at: usize| all.as_chunks::<D>().0[at];
        pool.run(a.tokens.div_ceil(TOKENS_PER_STORE), |unit| {
            for token in unit * TOKENS_PER_STORE..a.tokens.min((unit + 1) * TOKENS_PER_STORE) {
                for head in 0..a.kv_heads {
                    let (from, to) = (token * a.kv_heads + head, head * capacity + a.position + token);
                    let mut key = [0.0; D];
                    turn_head(isa, &heads_of(a.keys, from), a.key_norm, a.eps, &a.angles[token], &mut key);
                    // SAFETY: a token belongs to one unit.
                    let (key_row, value_row) = unsafe { (keys.part(to, 1), values.part(to, 1)) };
                    store(&key, &mut key_row[0]);
                    store(&heads_of(a.values, from), &mut value_row[0]);
                }
            }
        });
    }
    [keys, values]
}

kernel! {
    /// Norm and RoPE of a head.
    fn turn_head(x: &[f32; D], weight: &[f32], eps: f32, angles: &Angles, out: &mut [f32; D]) = turn_head_body;
}

#[inline(always)]
fn turn_head_body<const FUSED: bool>(x: &[f32; D], weight: &[f32], eps: f32, angles: &Angles, out: &mut [f32; D]) {
    rms_norm_body::<FUSED>(x, weight, eps, out);
    angles.rotate(out);
}

/// Keys and values of one layer, stored.
#[derive(Clone, Copy)]
enum Rows<'a> {
    F32([&'a [Row<[f32; 2 * LANES]>]; 2]),
    Bf16([&'a [Row<[u32; LANES]>]; 2]),
}

/// A layer whose cache holds all tokens.
struct Layer<'a> {
    a: &'a Attention<'a>,
    isa: Isa,
    rows: Rows<'a>,
    /// Query heads per key/value head.
    heads: usize,
    out: ActivationParts<'a>,
}

impl Layer<'_> {
    /// Few tokens: workers take (head, keys), and what they leave is merged in the order of the keys.
    fn run_split(&self, pool: &Pool, partials: &mut Partials) {
        let (a, heads) = (self.a, self.heads);
        let context = a.position + a.tokens;
        let keys = split_keys(context);
        let splits = context.div_ceil(keys);
        let (rows, all_rows) = (a.tokens * heads, a.tokens * a.query_heads);
        {
            let values = Parts::new(&mut partials.values);
            let (sums, maxima) = (Parts::new(&mut partials.sums), Parts::new(&mut partials.maxima));
            pool.run(a.kv_heads * splits, |unit| {
                let (head, split) = (unit % a.kv_heads, unit / a.kv_heads);
                let pass = self.pass(head, 0..a.tokens, split * keys..context.min((split + 1) * keys));
                let row = split * all_rows + head * rows;
                // SAFETY: these rows belong to this unit alone.
                let partial = unsafe {
                    Partial {
                        values: values.part(row * D, rows * D),
                        sums: sums.part(row, rows),
                        maxima: maxima.part(row, rows),
                    }
                };
                with_scratch(room_len(rows), |room| attend(self.isa, &pass, partial, room));
            });
        }
        pool.run(all_rows, |row| {
            let mut values = [0.0; D];
            let parts = || (0..splits).map(|split| split * all_rows + row);
            let max = parts().fold(f32::NEG_INFINITY, |max, part| max.max(partials.maxima[part]));
            let mut sum = 0.0;
            for part in parts() {
                let weight = (partials.maxima[part] - max).exp();
                sum += weight * partials.sums[part];
                add_weighted(self.isa, &mut values, &partials.values[part * D..][..D], weight);
            }
            let (head, row) = (row / rows, row % rows);
            self.finish(row / heads, head * heads + row % heads, &mut values, sum);
        });
    }

    /// Many tokens: workers take (head, tokens) over all keys; those with the most keys first.
    fn run_passes(&self, pool: &Pool) {
        let (a, heads) = (self.a, self.heads);
        let blocks = a.tokens.div_ceil(TOKENS_PER_PASS);
        pool.run(a.kv_heads * blocks, |unit| {
            let (head, block) = (unit % a.kv_heads, blocks - 1 - unit / a.kv_heads);
            let first = block * TOKENS_PER_PASS;
            let tokens = first..a.tokens.min(first + TOKENS_PER_PASS);
            let rows = tokens.len() * heads;
            let pass = self.pass(head, tokens.clone(), 0..a.position + tokens.end);
            with_scratch(rows * (D + 2) + room_len(rows), |scratch| {
                let (values, scratch) = scratch.split_at_mut(rows * D);
                let (sums, scratch) = scratch.split_at_mut(rows);
                let (maxima, room) = scratch.split_at_mut(rows);
                attend(self.isa, &pass, Partial { values: &mut *values, sums: &mut *sums, maxima }, room);
                for (row, values) in values.as_chunks_mut().0.iter_mut().enumerate() {
                    self.finish(first + row / heads, head * heads + row % heads, values, sums[row]);
                }
            });
        });
    }

    fn pass(&self, head: usize, tokens: Range<usize>, keys: Range<usize>) -> Pass<'_> {
        Pass { a: self.a, rows: self.rows, head, heads: self.heads, tokens, keys }
    }

    /// Sums to attention, gated, of one query head of a token.
    fn finish(&self, token: usize, head: usize, values: &mut [f32; D], sum: f32) {
        let [_, gate] = query_and_gate(self.a, token, head);
        if let Rows::Bf16(_) = self.rows {
            from_row_order::<[u32; LANES]>(values);
        }
        for value in values.iter_mut() {
            *value /= sum;
        }
        let mut gated = [0.0; D];
        sigmoid_gate(self.isa, values, gate, &mut gated);
        // SAFETY: a query head of a token belongs to one unit.
        unsafe { self.out.arrange(self.isa, token, head * D, &gated) };
    }
}

#[inline(always)]
fn query_and_gate<'a>(a: &Attention<'a>, token: usize, head: usize) -> [&'a [f32; D]; 2] {
    let pair = &a.query_gate.as_chunks::<D>().0[2 * (token * a.query_heads + head)..][..2];
    [&pair[0], &pair[1]]
}

/// A piece of attention: one key/value head, tokens, keys.
struct Pass<'a> {
    a: &'a Attention<'a>,
    rows: Rows<'a>,
    head: usize,
    /// Query heads that share it.
    heads: usize,
    tokens: Range<usize>,
    keys: Range<usize>,
}

impl Pass<'_> {
    /// Keys `first ..` up to `count` that a row sees; rows are tokens, and of each its query heads.
    #[inline(always)]
    fn visible(&self, row: usize, first: usize, count: usize) -> usize {
        let token = self.tokens.start + row / self.heads;
        count.min((self.a.position + token + 1).saturating_sub(first))
    }
}

/// What a pass leaves of each row: `sum_p exp(score_p - max) v_p`, the sum of the exponentials, and the maximum.
struct Partial<'a> {
    /// In the order in which sums meet rows of the cache.
    values: &'a mut [f32],
    sums: &'a mut [f32],
    maxima: &'a mut [f32],
}

/// Scratch of a pass: queries and scores.
const fn room_len(rows: usize) -> usize {
    rows * (D + KEYS)
}

kernel! {
    fn attend(pass: &Pass<'_>, out: Partial<'_>, room: &mut [f32]) = attend_body;
}

#[inline(always)]
fn attend_body<const FUSED: bool>(pass: &Pass<'_>, out: Partial<'_>, room: &mut [f32]) {
    match pass.rows {
        Rows::F32(rows) => attend_rows::<FUSED, _>(pass, rows, out, room),
        Rows::Bf16(rows) => attend_rows::<FUSED, _>(pass, rows, out, room),
    }
}

#[inline(always)]
fn attend_rows<const FUSED: bool, B: Block>(
    pass: &Pass<'_>,
    layer: [&[Row<B>]; 2],
    out: Partial<'_>,
    room: &mut [f32],
) {
    let rows = pass.tokens.len() * pass.heads;
    let (queries, scores) = room.split_at_mut(rows * D);
    let queries = queries.as_chunks_mut().0;
    prepare::<FUSED, B>(pass, queries);
    let (scores, sums) = (scores.as_chunks_mut::<KEYS>().0, out.values.as_chunks_mut::<D>().0);
    sums.as_flattened_mut().fill(0.0);
    out.sums.fill(0.0);
    out.maxima.fill(f32::NEG_INFINITY);

    let capacity = layer[0].len() / pass.a.kv_heads;
    let plane = pass.head * capacity..pass.head * capacity + pass.keys.end;
    let (keys, values) = (&layer[0][plane.clone()], &layer[1][plane]);
    for first in pass.keys.clone().step_by(KEYS) {
        let count = KEYS.min(keys.len() - first);
        // The rows of a tile meet the keys that the last of them sees.
        let mut row = 0;
        while row < rows {
            let tile = if rows - row >= TILE { TILE } else { 1 };
            let block = &keys[first..first + pass.visible(row + tile - 1, first, count)];
            let ahead = share(&values[first..first + count], row..row + tile, rows);
            let (queries, scores) = (&queries[row..], &mut scores[row..]);
            if tile == TILE {
                score::<FUSED, B, TILE>(queries, block, scores, ahead);
            } else {
                score::<FUSED, B, 1>(queries, block, scores, ahead);
            }
            row += tile;
        }
        for (row, scores) in scores.iter_mut().enumerate() {
            let seen = pass.visible(row, first, count);
            soften::<FUSED>(scores, seen, &mut sums[row], &mut out.sums[row], &mut out.maxima[row]);
        }
        let mut row = 0;
        while row < rows {
            let tile = if rows - row >= TILE { TILE } else { 1 };
            let block = &values[first..first + pass.visible(row + tile - 1, first, count)];
            let ahead = share(&keys[first + count..keys.len().min(first + 2 * KEYS)], row..row + tile, rows);
            let (weights, sums) = (&scores[row..], &mut sums[row..]);
            if tile == TILE {
                add_values::<FUSED, B, TILE>(weights, block, sums, ahead);
            } else {
                add_values::<FUSED, B, 1>(weights, block, sums, ahead);
            }
            row += tile;
        }
    }
}

/// Of what is to be asked for during `all` steps, what these steps ask for: evenly, or loads would wait behind.
#[inline(always)]
fn share<T>(ahead: &[T], steps: Range<usize>, all: usize) -> &[T] {
    &ahead[ahead.len() * steps.start / all..ahead.len() * steps.end / all]
}

/// Queries of all rows, normed and rotated. The scale of the scores is a power of two and moves to the query.
#[inline(always)]
fn prepare<const FUSED: bool, B: Block>(pass: &Pass<'_>, queries: &mut [[f32; D]]) {
    let a = pass.a;
    for (row, out) in queries.iter_mut().enumerate() {
        let (token, head) = (pass.tokens.start + row / pass.heads, pass.head * pass.heads + row % pass.heads);
        let [query, _] = query_and_gate(a, token, head);
        turn_head_body::<FUSED>(query, a.query_norm, a.eps, &a.angles[token], out);
        for x in out.iter_mut() {
            *x *= SCALE;
        }
        to_row_order::<B>(out);
    }
}

/// `256^-0.5`.
const SCALE: f32 = 1.0 / 16.0;
const _: () = assert!(D == 256, "the scale of scores");

/// Scores of `ROWS` queries against keys; the rows `ahead` are asked for meanwhile.
#[inline(always)]
fn score<const FUSED: bool, B: Block, const ROWS: usize>(
    queries: &[[f32; D]],
    keys: &[Row<B>],
    scores: &mut [[f32; KEYS]],
    ahead: &[Row<B>],
) {
    let (queries, scores) = (&queries[..ROWS], &mut scores[..ROWS]);
    for first in (0..keys.len()).step_by(TILE_KEYS) {
        prefetch_rows(share(ahead, first..keys.len().min(first + TILE_KEYS), keys.len()));
        // Beyond the end the last key is scored again; no one reads that.
        let last = keys.len() - 1;
        let tile = [&keys[first], &keys[last.min(first + 1)], &keys[last.min(first + 2)]];
        let mut sums = [[[0.0; LANES]; TILE_KEYS]; ROWS];
        add_half::<FUSED, B, ROWS, 0>(&mut sums, queries, tile);
        add_half::<FUSED, B, ROWS, 1>(&mut sums, queries, tile);
        for r in 0..ROWS {
            for k in 0..TILE_KEYS {
                scores[r][first + k] = total(sums[r][k]);
            }
        }
    }
}

/// Products of one half of all blocks: both at a time would not fit into registers.
#[inline(always)]
fn add_half<const FUSED: bool, B: Block, const ROWS: usize, const HALF: usize>(
    sums: &mut [[Lanes; TILE_KEYS]; ROWS],
    queries: &[[f32; D]],
    tile: [&Row<B>; TILE_KEYS],
) {
    let mut held = *sums;
    let [k0, k1, k2] = tile;
    for (b, ((k0, k1), k2)) in k0.iter().zip(k1).zip(k2).enumerate() {
        let keys = [k0.half(HALF), k1.half(HALF), k2.half(HALF)];
        for r in 0..ROWS {
            let query = &queries[r].as_chunks::<LANES>().0[2 * b + HALF];
            for k in 0..TILE_KEYS {
                add_product::<FUSED>(&mut held[r][k], query, &keys[k]);
            }
        }
    }
    *sums = held;
}

/// The first `seen` scores to exponentials and the rest to nothing; what was summed before to the new maximum.
#[inline(always)]
fn soften<const FUSED: bool>(
    scores: &mut [f32; KEYS],
    seen: usize,
    values: &mut [f32; D],
    sum: &mut f32,
    max: &mut f32,
) {
    if seen == 0 {
        scores.fill(0.0);
        return;
    }
    // Their exponential is the smallest that there is, 1e-38.
    scores[seen..].fill(f32::NEG_INFINITY);
    let vectors = scores.as_chunks_mut::<LANES>().0;
    let mut lanes = [*max; LANES];
    for scores in &*vectors {
        for i in 0..LANES {
            lanes[i] = if scores[i] > lanes[i] { scores[i] } else { lanes[i] };
        }
    }
    let mut highest = *max;
    for lane in lanes {
        highest = if lane > highest { lane } else { highest };
    }
    if highest > *max {
        let shrink = exp::<FUSED>(*max - highest);
        for value in values {
            *value *= shrink;
        }
        *sum *= shrink;
        *max = highest;
    }
    let mut lanes = [0.0; LANES];
    for scores in vectors {
        for i in 0..LANES {
            scores[i] = exp::<FUSED>(scores[i] - highest);
            lanes[i] += scores[i];
        }
    }
    *sum += total(lanes);
}

/// `sums_r += sum_p weights_r[p] values_p` for `ROWS` rows; the rows `ahead` are asked for meanwhile.
#[inline(always)]
fn add_values<const FUSED: bool, B: Block, const ROWS: usize>(
    weights: &[[f32; KEYS]],
    values: &[Row<B>],
    sums: &mut [[f32; D]],
    ahead: &[Row<B>],
) {
    let (values, weights, sums) = (&values[..values.len().min(KEYS)], &weights[..ROWS], &mut sums[..ROWS]);
    for b in 0..BLOCKS {
        prefetch_rows(share(ahead, b..b + 1, BLOCKS));
        let mut held = [[[0.0; LANES]; 2]; ROWS];
        for (held, sums) in held.iter_mut().zip(&*sums) {
            held.copy_from_slice(&sums.as_chunks::<LANES>().0[2 * b..2 * b + 2]);
        }
        for (p, value) in values.iter().enumerate() {
            let value = [value[b].half(0), value[b].half(1)];
            for r in 0..ROWS {
                for half in 0..2 {
                    add_scaled::<FUSED>(&mut held[r][half], &value[half], weights[r][p]);
                }
            }
        }
        for (held, sums) in held.iter().zip(&mut *sums) {
            sums.as_chunks_mut::<LANES>().0[2 * b..2 * b + 2].copy_from_slice(held);
        }
    }
}

/// Results of passes over ranges of the keys, before they are merged.
pub(crate) struct Partials {
    values: Buffer<f32>,
    sums: Buffer<f32>,
    maxima: Buffer<f32>,
}

impl Partials {
    /// Room for the tokens of a pass, of `query_heads` heads over up to `context` keys.
    pub(crate) fn new(query_heads: usize, context: usize) -> Result<Partials> {
        let splits = context.div_ceil(SPLIT_KEYS.end).max(SPLITS.min(context.div_ceil(SPLIT_KEYS.start)));
        let rows = TOKENS_PER_PASS * query_heads * splits;
        let zeroed = |len| Buffer::zeroed("attention splits", len);
        Ok(Partials { values: zeroed(rows * D)?, sums: zeroed(rows)?, maxima: zeroed(rows)? })
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.bytes() + self.sums.bytes() + self.maxima.bytes()
    }
}
