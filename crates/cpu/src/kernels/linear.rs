//! Passes over packed matrices: which worker takes which rows, and which kernel multiplies them.
//!
//! In: [`Activations`](super::activations::Activations). Out: f32 `[tokens, outputs]` per matrix. Few tokens stream the
//! rows through `gemv`, many go through `gemm`.
//! Reference: `lily_reference::ops::linear`.

use std::iter::StepBy;
use std::slice::Iter;

use lily_model::{Bits, QuantMatrix, Shape};

use super::activations::{Inputs, Tokens};
use super::gemm::{self, Place, TILE_ROWS, gemm};
use super::gemv::{MOST_TOKENS, Packed, PackedRows, Pair, gemv};
use crate::device::{Isa, Parts, Pool};

/// From so many tokens on, rows are unpacked for all of them.
const GEMM_TOKENS: usize = 12;
/// Packed bytes that a worker streams per claim: with half of them the jumps cost 5 % (Zen 3), with more ends are uneven.
const UNIT_BYTES: usize = 256 * 1024;
/// Most rows per claim where tokens are many.
const GEMM_ROWS: usize = 64;
/// Rows of an expert's inner width that a worker makes at a time: they become a whole group of the next inputs.
pub(crate) const INNER_ROWS: usize = Shape::GROUP;
/// Claims per worker and matrix below which shares would be uneven.
const CLAIMS_PER_WORKER: usize = 4;

/// A matrix and where its products go, `[tokens, outputs]`.
pub(crate) struct Target<'a> {
    pub(crate) matrix: &'a QuantMatrix,
    pub(crate) out: &'a mut [f32],
}

/// Whether a pass of this many tokens unpacks rows.
pub(crate) fn uses_gemm(tokens: usize) -> bool {
    tokens >= GEMM_TOKENS
}

/// Rows of `outputs` that a worker takes at a time, a multiple of `step` but for the last.
pub(crate) fn rows_per_unit(outputs: usize, row_bytes: usize, tokens: usize, threads: usize, step: usize) -> usize {
    let most = if uses_gemm(tokens) { GEMM_ROWS } else { UNIT_BYTES / row_bytes };
    let even = outputs.div_ceil(threads * CLAIMS_PER_WORKER);
    even.clamp(1, most.max(1)).next_multiple_of(step)
}

/// All tokens through all matrices in one pass.
pub(crate) fn linear<const N: usize>(pool: &Pool, isa: Isa, x: Tokens<'_>, targets: [Target<'_>; N]) {
    struct Share<'a> {
        first_unit: usize,
        rows: usize,
        weights: Packed<'a>,
        outputs: usize,
        out: Parts<'a, f32>,
    }
    let mut units = 0;
    let shares = targets.map(|Target { matrix, out }| {
        assert_eq!(out.len(), x.len() * matrix.outputs, "output of {}", matrix.name);
        let weights = Packed::of(matrix, 0);
        let rows = rows_per_unit(matrix.outputs, weights.row_bytes(), x.len(), pool.threads(), TILE_ROWS);
        let first_unit = units;
        units += matrix.outputs.div_ceil(rows);
        Share { first_unit, rows, weights, outputs: matrix.outputs, out: Parts::new(out) }
    });
    pool.run(units, |unit| {
        let share = &shares[shares.partition_point(|share| share.first_unit <= unit) - 1];
        let first = (unit - share.first_unit) * share.rows;
        let rows = share.rows.min(share.outputs - first);
        // The rows of a unit belong to it alone.
        multiply(isa, share.weights, x, first, rows, Place { out: &share.out, first, stride: share.outputs });
    });
}

/// Rows `first .. first + rows` of `w` times every token.
///
/// No other worker may be given the same elements of `out` at the same time.
pub(crate) fn multiply(isa: Isa, w: Packed<'_>, x: Tokens<'_>, first: usize, rows: usize, out: Place<'_>) {
    if uses_gemm(x.len()) {
        for from in (0..x.len()).step_by(gemm::MOST_TOKENS) {
            let tokens = from..x.len().min(from + gemm::MOST_TOKENS);
            gemm(isa, w, x, tokens, first..first + rows, Place { first: out.first + from * out.stride, ..out });
        }
        return;
    }
    let half = rows.div_ceil(2);
    pairs(isa, w.bits, w.halves(first, rows), half, x, |row, token, pairs| {
        // One after the other: the halves may overlap in one row.
        for (i, first) in [row, rows - half + row].into_iter().enumerate() {
            // SAFETY: the caller keeps other workers away from these rows.
            let out = unsafe { out.part(token, first, pairs.len()) };
            out.iter_mut().zip(pairs.clone()).for_each(|(out, pair)| *out = pair[i]);
        }
    });
}

/// Rows of a range that are multiplied before their products are taken.
const ROWS_PER_CALL: usize = 16;

/// The products of some rows of two ranges with one token.
pub(crate) type Pairs<'a> = StepBy<Iter<'a, Pair>>;

/// Two ranges of `rows` rows times every token; `take` gets the first of some rows, the token and the products.
#[inline]
pub(crate) fn pairs(
    isa: Isa,
    bits: Bits,
    ranges: [PackedRows<'_>; 2],
    rows: usize,
    x: Tokens<'_>,
    mut take: impl FnMut(usize, usize, Pairs<'_>),
) {
    for first in (0..rows).step_by(ROWS_PER_CALL) {
        let count = ROWS_PER_CALL.min(rows - first);
        let ranges = ranges.map(|range| range.part(rows, first, count));
        // All tokens before the next rows: these stay in the first-level cache.
        for from in (0..x.len()).step_by(MOST_TOKENS) {
            let mut take = |token, pairs: Pairs<'_>| take(first, from + token, pairs);
            match x.len() - from {
                1 => some::<1>(isa, bits, ranges, count, x, from, &mut take),
                2 => some::<2>(isa, bits, ranges, count, x, from, &mut take),
                3 => some::<3>(isa, bits, ranges, count, x, from, &mut take),
                _ => some::<4>(isa, bits, ranges, count, x, from, &mut take),
            }
        }
    }
}

/// The same for tokens `from .. from + TOKENS` and few rows.
#[inline]
fn some<const TOKENS: usize>(
    isa: Isa,
    bits: Bits,
    ranges: [PackedRows<'_>; 2],
    rows: usize,
    x: Tokens<'_>,
    from: usize,
    take: &mut impl FnMut(usize, Pairs<'_>),
) {
    let inputs: [Inputs<'_>; TOKENS] = std::array::from_fn(|i| x.row(from + i));
    let mut products = [[[0.0; 2]; TOKENS]; ROWS_PER_CALL];
    gemv(isa, bits, ranges, &inputs, &mut products[..rows]);
    for token in 0..TOKENS {
        take(token, products[..rows].as_flattened()[token..].iter().step_by(TOKENS));
    }
}
