//! `gemm`: many tokens through rows of a packed matrix.
//!
//! In: [`Inputs`](super::Inputs) of each token; packed rows as in [`gemv`](super::gemv). Out: one f32 per token and row.
//! The work of one call is a range of rows and all tokens: a block of columns of four rows at a time is dequantized into
//! the first-level cache, then meets three tokens at a time in registers. Bytes moved: the packed rows once, the tokens
//! once per call from the second-level cache.
//! Reference: `lily_reference::ops::linear`.

use std::ops::Range;

use lily_model::quant::bf16_at;
use lily_model::{Bits, Shape};

use super::gemv::{GROUP4, GROUP8, Packed};
use super::linear::Tokens;
use super::{LANES, Lanes, add_product, kernel, mul_add, total};
use crate::device::Parts;

/// Rows of a register tile: 4 rows x 3 tokens are 12 sums, which with 3 inputs and a weight fill 16 registers.
pub(crate) const TILE_ROWS: usize = 4;
/// Tokens of a register tile.
pub(crate) const TILE_TOKENS: usize = 3;
/// Columns dequantized at a time: 4 rows of them are 8 KB of f32.
const DEPTH: usize = 512;
const DEPTH_GROUPS: usize = DEPTH / Shape::GROUP;
/// Up to so many tokens stay in the second-level cache with all their columns, and rows are best read to their ends; more
/// are better met a block of columns at a time.
const FEW_TOKENS: usize = 32;

kernel! {
    /// `out[token * stride + row]` for rows `first .. first + rows` of `w` and every token.
    ///
    /// No other worker may be given the same elements of `out` at the same time.
    pub(crate) fn gemm(w: Packed<'_>, x: Tokens<'_>, first: usize, rows: usize, out: &Parts<'_, f32>, stride: usize) = gemm_body;
}

#[inline(always)]
fn gemm_body<const FUSED: bool>(
    w: Packed<'_>,
    x: Tokens<'_>,
    first: usize,
    rows: usize,
    out: &Parts<'_, f32>,
    stride: usize,
) {
    let mut weights = [[[0.0; LANES]; DEPTH / LANES]; TILE_ROWS];
    let (row_blocks, column_blocks) = (rows.div_ceil(TILE_ROWS), w.groups.div_ceil(DEPTH_GROUPS));
    for block in 0..row_blocks * column_blocks {
        // The sum of an element is the same in both orders.
        let (row, column) = match x.len() <= FEW_TOKENS {
            true => (block / column_blocks, block % column_blocks),
            false => (block % row_blocks, block / row_blocks),
        };
        let row = first + row * TILE_ROWS;
        let rows = row..(row + TILE_ROWS).min(first + rows);
        gemm_block::<FUSED>(w, x, rows, column * DEPTH_GROUPS, out, stride, &mut weights);
    }
}

/// At most four rows and `DEPTH` columns, from group `group` on.
#[inline(always)]
fn gemm_block<const FUSED: bool>(
    w: Packed<'_>,
    x: Tokens<'_>,
    rows: Range<usize>,
    group: usize,
    out: &Parts<'_, f32>,
    stride: usize,
    weights: &mut [[Lanes; DEPTH / LANES]; TILE_ROWS],
) {
    let groups = DEPTH_GROUPS.min(w.groups - group);
    let (from, vectors) = (group * Shape::GROUP / LANES, groups * Shape::GROUP / LANES);
    for (row, weights) in rows.clone().zip(&mut *weights) {
        dequantize::<FUSED>(w, row, group, weights.as_flattened_mut(), groups);
    }
    // A missing row is computed from what stands in its place and not stored.
    let [w0, w1, w2, w3] = &*weights;
    let weights = [&w0[..vectors], &w1[..vectors], &w2[..vectors], &w3[..vectors]];
    // Written out instead of a loop over tiles of several sizes: a closure would not be compiled for the instruction set.
    let columns = from..from + vectors;
    let mut token = 0;
    while token + TILE_TOKENS <= x.len() {
        let inputs =
            [vectors_of(x, token, &columns), vectors_of(x, token + 1, &columns), vectors_of(x, token + 2, &columns)];
        store(&tile::<FUSED, TILE_TOKENS>(inputs, weights), token, &rows, group == 0, out, stride);
        token += TILE_TOKENS;
    }
    if token + 2 == x.len() {
        let inputs = [vectors_of(x, token, &columns), vectors_of(x, token + 1, &columns)];
        store(&tile::<FUSED, 2>(inputs, weights), token, &rows, group == 0, out, stride);
    } else if token + 1 == x.len() {
        let inputs = [vectors_of(x, token, &columns)];
        store(&tile::<FUSED, 1>(inputs, weights), token, &rows, group == 0, out, stride);
    }
}

/// Columns of a token, in vectors.
#[inline(always)]
fn vectors_of<'a>(x: Tokens<'a>, token: usize, columns: &Range<usize>) -> &'a [Lanes] {
    &x.row(token).values.as_chunks::<LANES>().0[columns.start..columns.end]
}

/// Adds the sums of a tile to the output, or begins it with them.
#[inline(always)]
fn store<const TOKENS: usize>(
    sums: &[[f32; TILE_ROWS]; TOKENS],
    token: usize,
    rows: &Range<usize>,
    begin: bool,
    out: &Parts<'_, f32>,
    stride: usize,
) {
    for (token, sums) in (token..).zip(sums) {
        // SAFETY: the caller of `gemm` keeps other workers away from these rows, and no other part is alive here.
        let out = unsafe { out.part(token * stride + rows.start, rows.len()) };
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if begin { *sum } else { *out + sum };
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

/// Writes `groups` groups of a row from `group` on, in the order of [`Inputs`](super::Inputs).
#[inline(always)]
fn dequantize<const FUSED: bool>(w: Packed<'_>, row: usize, group: usize, out: &mut [f32], groups: usize) {
    let (codes, scales, biases) = w.row(row);
    let out = &mut out.as_chunks_mut::<{ Shape::GROUP }>().0[..groups];
    for (g, out) in (group..).zip(out) {
        let (scale, bias) = (bf16_at(scales, g), bf16_at(biases, g));
        let value = |code: i32| mul_add::<FUSED>(scale, code as f32, bias);
        let (even, odd) = out.split_at_mut(GROUP4);
        match w.bits {
            Bits::Four => {
                for ((code, even), odd) in codes[g * GROUP4..][..GROUP4].iter().zip(even).zip(odd) {
                    (*even, *odd) = (value(i32::from(code & 15)), value(i32::from(code >> 4)));
                }
            }
            Bits::Eight => {
                let pairs = codes[g * GROUP8..][..GROUP8].as_chunks::<2>().0;
                for (([low, high], even), odd) in pairs.iter().zip(even).zip(odd) {
                    (*even, *odd) = (value(i32::from(*low)), value(i32::from(*high)));
                }
            }
        }
    }
}
