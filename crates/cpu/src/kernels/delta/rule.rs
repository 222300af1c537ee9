//! The gated delta rule of one value head.
//!
//! In: queries, keys and values of some tokens, their decays `a_t` and betas, the state S `[128 (value), 128 (key)]`.
//! Out: one output per token, the state moved on.
//!
//! Few tokens, [`steps`]: the rule as it is written.
//!
//! `S <- a_t S;  e_t = beta_t (v_t - S k_t);  S <- S + e_t k_t^T;  o_t = S q_t`
//!
//! Many tokens, [`Room::chunk`]: unrolled over a chunk (the WY form of the literature), where everything is a product of
//! matrices. With `D_ij = a_{j+1} .. a_i` for `j <= i`, else 0, `c_i = a_1 .. a_i`, and the tokens as rows of E, V, K, Q, O:
//!
//! 1. `K K^T` and `Q K^T`, once for all value heads that share the keys;
//! 2. `A_ij = beta_i D_ij (k_i . k_j)` for `j < i`, and `P_ij = D_ij (q_i . k_j)` for `j <= i`;
//! 3. `(I + A) E = beta (V - c K S^T)`, solved row by row;
//! 4. `O = c Q S^T + P E`;
//! 5. `S^T <- c_n S^T + K^T diag(D_n) E`.
//!
//! Decays enter as products of numbers up to 1 and never as quotients, so they can vanish but not overflow. Columns of
//! values do not meet, so 3 to 5 run for one panel of them after the other, and a panel of S stays in the first-level cache.
//! Reference: `lily_reference::ops::delta_step`.

use lily_model::Shape;

use crate::device::Isa;
use crate::kernels::{LANES, Lanes, add_product, add_scaled, kernel, sum, total};

const D: usize = Shape::DELTA_HEAD_DIM;
pub(super) const VECTORS: usize = D / LANES;

/// Tokens of a chunk. Work between the tokens of a chunk grows with it, work per chunk on the state falls: on Zen 4 one
/// thread needs 88 us per token of 32 value heads with 32, 94 with 64, everything in this file included.
pub(super) const CHUNK: usize = 32;
/// From so many tokens on the unrolled form is used: 133 us per token against 159 by steps for 8, as much for 6, 88
/// against 172 for 512.
pub(in crate::kernels) const UNROLLED_FROM: usize = 8;
const _: () = assert!(UNROLLED_FROM <= CHUNK, "the gates of steps are those of a chunk");
/// Rows of a state that meet all tokens of a chunk before the next rows do: 16 KB, half of the first-level cache.
const STATE_ROWS: usize = 32;
/// Tokens (or key columns) of a register tile.
const TILE: usize = 4;
/// Vectors of a register tile, and the columns of values that go through a chunk together: 8 KB of state.
const WIDE: usize = 2;
const PANEL: usize = WIDE * LANES;
pub(super) const PANELS: usize = D / PANEL;
/// Row length of transposed keys: an odd number of cache lines, or a column of them would share a few cache sets.
const TRANSPOSED: usize = CHUNK / LANES + WIDE;

/// One head of one token.
pub(super) type Head = [Lanes; VECTORS];
/// The columns of a panel in one row.
type Columns = [Lanes; WIDE];
/// State of a panel, transposed: `[key column, value]`.
pub(super) type Panel = [Columns; D];

/// The first `len` values of `scratch`, which loses them.
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(len);
    *scratch = rest;
    taken
}

/// Values as whole heads.
pub(super) fn heads(values: &mut [f32]) -> &mut [Head] {
    values.as_chunks_mut().0.as_chunks_mut().0
}

/// Values as whole heads.
#[inline(always)]
pub(super) fn heads_of(values: &[f32]) -> &[Head] {
    values.as_chunks().0.as_chunks().0
}

/// States as whole panels.
pub(super) fn panels(values: &mut [f32]) -> &mut [Panel] {
    let vectors = values.as_chunks_mut::<LANES>().0;
    vectors.as_chunks_mut::<WIDE>().0.as_chunks_mut().0
}

/// Decay and beta of each token of a chunk.
pub(super) struct Gates {
    pub(super) decays: [f32; CHUNK],
    pub(super) betas: [f32; CHUNK],
}

impl Gates {
    /// Those of tokens that a chunk does not have: they leave the state alone.
    pub(super) const NONE: Gates = Gates { decays: [1.0; CHUNK], betas: [0.0; CHUNK] };
}

/// Tokens of a chunk, of one value head.
pub(super) struct Tokens<'a> {
    pub(super) queries: &'a [Head],
    pub(super) keys: &'a [Head],
    pub(super) values: &'a [Head],
    pub(super) gates: &'a Gates,
}

kernel! {
    /// Moves a state on token by token.
    pub(super) fn steps(tokens: &Tokens<'_>, state: &mut [f32], outputs: &mut [Head]) = steps_body;
}

#[inline(always)]
fn steps_body<const FUSED: bool>(tokens: &Tokens<'_>, state: &mut [f32], outputs: &mut [Head]) {
    let rows = state.as_chunks_mut::<LANES>().0.as_chunks_mut::<VECTORS>().0;
    for (block, rows) in rows.chunks_mut(STATE_ROWS).enumerate() {
        for (token, output) in outputs.iter_mut().enumerate() {
            let (query, key) = (&tokens.queries[token], &tokens.keys[token]);
            let (decay, beta) = (tokens.gates.decays[token], tokens.gates.betas[token]);
            let first = block * STATE_ROWS;
            let values = &tokens.values[token].as_flattened()[first..];
            let outputs = &mut output.as_flattened_mut()[first..];
            for ((row, value), out) in rows.iter_mut().zip(values).zip(outputs) {
                *out = step_row::<FUSED>(row, query, key, *value, decay, beta);
            }
        }
    }
}

/// One row of the state through one token: `s = decay * s; s += beta * (v - s . k) * k`; returns `s . q`.
#[inline(always)]
fn step_row<const FUSED: bool>(row: &mut Head, query: &Head, key: &Head, value: f32, decay: f32, beta: f32) -> f32 {
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

kernel! {
    /// States `[value, key]` to panels.
    pub(super) fn turn(state: &[f32], panels: &mut [Panel]) = turn_body;
}

#[inline(always)]
fn turn_body<const FUSED: bool>(state: &[f32], panels: &mut [Panel]) {
    for (rows, panel) in heads_of(state).chunks_exact(PANEL).zip(panels) {
        for v in 0..WIDE {
            for k in 0..VECTORS {
                for value in 0..LANES {
                    for key in 0..LANES {
                        panel[k * LANES + key][v][value] = rows[v * LANES + value][k][key];
                    }
                }
            }
        }
    }
}

kernel! {
    /// Panels to states `[value, key]`.
    pub(super) fn turn_back(panels: &[Panel], state: &mut [f32]) = turn_back_body;
}

#[inline(always)]
fn turn_back_body<const FUSED: bool>(panels: &[Panel], state: &mut [f32]) {
    let rows = state.as_chunks_mut::<LANES>().0.as_chunks_mut::<VECTORS>().0;
    for (rows, panel) in rows.chunks_exact_mut(PANEL).zip(panels) {
        for v in 0..WIDE {
            for k in 0..VECTORS {
                for value in 0..LANES {
                    for key in 0..LANES {
                        rows[v * LANES + value][k][key] = panel[k * LANES + key][v][value];
                    }
                }
            }
        }
    }
}

/// Working memory of the unrolled form.
pub(super) struct Room<'a> {
    /// `K^T`.
    transposed: &'a mut [[Lanes; TRANSPOSED]],
    /// `K K^T` and `Q K^T` up to the diagonal.
    related: [&'a mut [Square]; 2],
    /// `-A` and P.
    weights: [&'a mut [Square]; 2],
    /// Columns of E.
    errors: &'a mut [Columns],
}

/// A row of a matrix between the tokens of a chunk.
type Square = [f32; CHUNK];

impl<'a> Room<'a> {
    /// Values that it needs.
    pub(super) const LEN: usize = D * TRANSPOSED * LANES + 4 * CHUNK * CHUNK + CHUNK * PANEL;

    /// In `scratch` of that length and any content.
    pub(super) fn new(mut scratch: &'a mut [f32]) -> Room<'a> {
        Room {
            transposed: take(&mut scratch, D * TRANSPOSED * LANES).as_chunks_mut().0.as_chunks_mut().0,
            related: [(); 2].map(|()| take(&mut scratch, CHUNK * CHUNK).as_chunks_mut().0),
            weights: [(); 2].map(|()| take(&mut scratch, CHUNK * CHUNK).as_chunks_mut().0),
            errors: take(&mut scratch, CHUNK * PANEL).as_chunks_mut().0.as_chunks_mut().0,
        }
    }

    /// Step 1 for `count` tokens; those after them are zero.
    pub(super) fn relate(&mut self, isa: Isa, queries: &[Head], keys: &[Head], count: usize) {
        relate(isa, [keys, queries], count.next_multiple_of(TILE), self.transposed, &mut self.related);
    }

    /// Steps 2 to 5 for `count` tokens of one value head; those after them are zero. `state` is in panels.
    pub(super) fn chunk(
        &mut self,
        isa: Isa,
        tokens: &Tokens<'_>,
        count: usize,
        state: &mut [Panel],
        outputs: &mut [Head],
    ) {
        let products = weigh(isa, tokens.gates, &self.related, &mut self.weights);
        let [solve, apply] = &self.weights;
        let rows = count.next_multiple_of(TILE);
        let chunk = Chunk { tokens, rows, products, transposed: self.transposed, solve, apply };
        chunk_head(isa, &chunk, state, self.errors, outputs);
    }
}

kernel! {
    /// Keys transposed, and the dot products of keys and of queries with keys up to their own.
    fn relate(
        keys_queries: [&[Head]; 2],
        rows: usize,
        transposed: &mut [[Lanes; TRANSPOSED]],
        related: &mut [&mut [Square]; 2],
    ) = relate_body;
}

#[inline(always)]
fn relate_body<const FUSED: bool>(
    keys_queries: [&[Head]; 2],
    rows: usize,
    transposed: &mut [[Lanes; TRANSPOSED]],
    related: &mut [&mut [Square]; 2],
) {
    let keys = &keys_queries[0][..rows.next_multiple_of(PANEL)];
    for (t, keys) in keys.chunks_exact(LANES).enumerate() {
        for k in 0..VECTORS {
            for key in 0..LANES {
                for token in 0..LANES {
                    transposed[k * LANES + key][t][token] = keys[token][k][key];
                }
            }
        }
    }
    for (x, related) in keys_queries.into_iter().zip(related) {
        for first in (0..rows).step_by(TILE) {
            let tile = tile_rows(x, first);
            for column in (0..first + TILE).step_by(PANEL) {
                let mut sums = [[[0.0; LANES]; WIDE]; TILE];
                add_products::<FUSED, TRANSPOSED>(&mut sums, tile, transposed, column / LANES);
                for (sums, row) in sums.iter().zip(&mut related[first..]) {
                    row[column..column + PANEL].copy_from_slice(sums.as_flattened());
                }
            }
        }
    }
}

/// Products of decays.
struct Products {
    /// From the start of the chunk to each token, `c_i`.
    from_start: [f32; CHUNK],
    /// From after each token to the end, `D_nj`.
    to_end: [f32; CHUNK],
}

kernel! {
    /// Step 2.
    fn weigh(gates: &Gates, related: &[&mut [Square]; 2], weights: &mut [&mut [Square]; 2]) -> Products = weigh_body;
}

#[inline(always)]
fn weigh_body<const FUSED: bool>(
    gates: &Gates,
    related: &[&mut [Square]; 2],
    weights: &mut [&mut [Square]; 2],
) -> Products {
    let ([key_key, query_key], [solve, apply]) = (related, weights);
    let mut products = Products { from_start: [1.0; CHUNK], to_end: [0.0; CHUNK] };
    let mut product = 1.0;
    for i in 0..CHUNK {
        let (decay, beta) = (gates.decays[i], gates.betas[i]);
        product *= decay;
        products.from_start[i] = product;
        // Row i of D from row i - 1; beyond the diagonal it is 0.
        let row = &mut products.to_end;
        for to_end in row.iter_mut() {
            *to_end *= decay;
        }
        row[i] = 1.0;
        let (kk, qk, solve, apply) = (&key_key[i], &query_key[i], &mut solve[i], &mut apply[i]);
        for j in 0..CHUNK {
            solve[j] = -beta * row[j] * kk[j];
            apply[j] = row[j] * qk[j];
        }
    }
    products
}

/// A chunk of one value head.
struct Chunk<'a> {
    tokens: &'a Tokens<'a>,
    /// Tokens, up to a whole number of tiles.
    rows: usize,
    products: Products,
    /// `K^T`.
    transposed: &'a [[Lanes; TRANSPOSED]],
    /// `-A`.
    solve: &'a [Square],
    /// P.
    apply: &'a [Square],
}

kernel! {
    /// Steps 3 to 5; `errors` is room for columns of E.
    fn chunk_head(chunk: &Chunk<'_>, state: &mut [Panel], errors: &mut [Columns], outputs: &mut [Head]) = chunk_body;
}

#[inline(always)]
fn chunk_body<const FUSED: bool>(chunk: &Chunk<'_>, state: &mut [Panel], errors: &mut [Columns], outputs: &mut [Head]) {
    for (p, panel) in state.iter_mut().enumerate() {
        for first in (0..chunk.rows).step_by(TILE) {
            solve_tile::<FUSED>(chunk, p, panel, first, errors);
            output_tile::<FUSED>(chunk, p, panel, first, errors, outputs);
        }
        let Products { from_start, to_end } = &chunk.products;
        for (error, to_end) in errors[..chunk.rows].iter_mut().zip(to_end) {
            scale(error, *to_end);
        }
        for first in (0..D).step_by(TILE) {
            let mut sums = [[[0.0; LANES]; WIDE]; TILE];
            sums.copy_from_slice(&panel[first..first + TILE]);
            for sums in &mut sums {
                scale(sums, from_start[CHUNK - 1]);
            }
            add_products::<FUSED, WIDE>(&mut sums, tile_keys(chunk.transposed, first), &errors[..chunk.rows], 0);
            panel[first..first + TILE].copy_from_slice(&sums);
        }
    }
}

/// Step 3 for one tile of tokens.
#[inline(always)]
fn solve_tile<const FUSED: bool>(chunk: &Chunk<'_>, p: usize, panel: &Panel, first: usize, errors: &mut [Columns]) {
    let Tokens { keys, values, gates, .. } = chunk.tokens;
    let mut sums = [[[0.0; LANES]; WIDE]; TILE];
    add_products::<FUSED, WIDE>(&mut sums, tile_rows(keys, first), panel, 0);
    for (sums, row) in sums.iter_mut().zip(first..) {
        let (beta, product) = (gates.betas[row], chunk.products.from_start[row]);
        for (sums, values) in sums.iter_mut().zip(&values[row][p * WIDE..]) {
            for lane in 0..LANES {
                sums[lane] = beta * (values[lane] - product * sums[lane]);
            }
        }
    }
    add_products::<FUSED, WIDE>(&mut sums, tile_weights(chunk.solve, first), &errors[..first], 0);
    for r in 1..TILE {
        for s in 0..r {
            let earlier = sums[s];
            for (sum, earlier) in sums[r].iter_mut().zip(&earlier) {
                add_scaled::<FUSED>(sum, earlier, chunk.solve[first + r][first + s]);
            }
        }
    }
    errors[first..first + TILE].copy_from_slice(&sums);
}

/// Step 4 for one tile of tokens.
#[inline(always)]
fn output_tile<const FUSED: bool>(
    chunk: &Chunk<'_>,
    p: usize,
    panel: &Panel,
    first: usize,
    errors: &[Columns],
    outputs: &mut [Head],
) {
    let mut sums = [[[0.0; LANES]; WIDE]; TILE];
    add_products::<FUSED, WIDE>(&mut sums, tile_rows(chunk.tokens.queries, first), panel, 0);
    for (sums, product) in sums.iter_mut().zip(&chunk.products.from_start[first..]) {
        scale(sums, *product);
    }
    add_products::<FUSED, WIDE>(&mut sums, tile_weights(chunk.apply, first), &errors[..first + TILE], 0);
    for (sums, output) in sums.iter().zip(&mut outputs[first..]) {
        output[p * WIDE..][..WIDE].copy_from_slice(sums);
    }
}

#[inline(always)]
fn scale(columns: &mut Columns, by: f32) {
    for v in columns {
        for lane in v {
            *lane *= by;
        }
    }
}

/// Heads of the tokens of a tile.
#[inline(always)]
fn tile_rows(heads: &[Head], first: usize) -> [&[f32]; TILE] {
    let rows = &heads[first..first + TILE];
    [rows[0].as_flattened(), rows[1].as_flattened(), rows[2].as_flattened(), rows[3].as_flattened()]
}

/// Rows of `-A` or P of a tile.
#[inline(always)]
fn tile_weights(weights: &[Square], first: usize) -> [&[f32]; TILE] {
    let rows = &weights[first..first + TILE];
    [&rows[0], &rows[1], &rows[2], &rows[3]]
}

/// Rows of `K^T` of a tile.
#[inline(always)]
fn tile_keys(transposed: &[[Lanes; TRANSPOSED]], first: usize) -> [&[f32]; TILE] {
    let rows = &transposed[first..first + TILE];
    [rows[0].as_flattened(), rows[1].as_flattened(), rows[2].as_flattened(), rows[3].as_flattened()]
}

/// `sums_r += sum_p a_r[p] b_p`, of each `b_p` the vectors from `at` on.
#[inline(always)]
fn add_products<const FUSED: bool, const ROW: usize>(
    sums: &mut [Columns; TILE],
    mut a: [&[f32]; TILE],
    b: &[[Lanes; ROW]],
    at: usize,
) {
    // With equal lengths in plain sight no access in the loop is checked.
    let n = b.len();
    for a in &mut a {
        *a = &a[..n];
    }
    let mut held = *sums;
    for p in 0..n {
        let row = &b[p][at..at + WIDE];
        for r in 0..TILE {
            for v in 0..WIDE {
                add_scaled::<FUSED>(&mut held[r][v], &row[v], a[r][p]);
            }
        }
    }
    *sums = held;
}
