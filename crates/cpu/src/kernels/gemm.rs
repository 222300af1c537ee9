//! `gemm`: many tokens through rows of a packed matrix.
//!
//! In: [`Inputs`](super::Inputs) of each token; packed rows as in [`gemv`](super::gemv). Out: one f32 per token and row.
//! The work of one call is a range of rows and all tokens: a block of columns of four rows at a time is dequantized into
//! the first-level cache, then meets three tokens at a time in registers. Bytes moved: the packed rows once, the tokens
//! once per call from the second-level cache.
//! Reference: `lily_reference::ops::linear`.

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
    for group in (0..w.groups).step_by(DEPTH_GROUPS) {
        let groups = DEPTH_GROUPS.min(w.groups - group);
        let vectors = groups * Shape::GROUP / LANES;
        for row in (first..first + rows).step_by(TILE_ROWS) {
            let tile_rows = TILE_ROWS.min(first + rows - row);
            for (i, weights) in weights[..tile_rows].iter_mut().enumerate() {
                dequantize::<FUSED>(w, row + i, group, weights.as_flattened_mut(), groups);
            }
            // A missing row is computed from what stands in its place and not stored.
            let [w0, w1, w2, w3] = &weights;
            let weights = [&w0[..vectors], &w1[..vectors], &w2[..vectors], &w3[..vectors]];
            let inputs = |token: usize| {
                let from = group * Shape::GROUP / LANES;
                &x.row(token).values.as_chunks::<LANES>().0[from..from + vectors]
            };
            let store = |token: usize, sums: &[f32; TILE_ROWS]| {
                // SAFETY: the caller keeps other workers away from these rows, and no other part is alive here.
                let out = unsafe { out.part(token * stride + row, tile_rows) };
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = if group == 0 { *sum } else { *out + sum };
                }
            };
            let mut token = 0;
            while token + TILE_TOKENS <= x.len() {
                let x = [inputs(token), inputs(token + 1), inputs(token + 2)];
                let sums = tile::<FUSED, TILE_TOKENS>(x, weights);
                for (i, sums) in sums.iter().enumerate() {
                    store(token + i, sums);
                }
                token += TILE_TOKENS;
            }
            while token < x.len() {
                let [sums] = tile::<FUSED, 1>([inputs(token)], weights);
                store(token, &sums);
                token += 1;
            }
        }
    }
}

/// Dot products of each of `x` with each of `w`, all of one length. The sum of a product does not depend on `TOKENS`.
#[inline(always)]
pub(crate) fn tile<const FUSED: bool, const TOKENS: usize>(
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
