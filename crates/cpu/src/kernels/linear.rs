//! Passes over packed matrices: which worker takes which rows, and which kernel multiplies them.
//!
//! In: [`Activations`](super::activations::Activations). Out: f32 `[tokens, outputs]` per matrix. Few tokens stream the
//! rows through [`gemv`](super::gemv), many go through [`gemm`](super::gemm).
//! Reference: `lily_reference::ops::linear`.

use lily_model::{QuantMatrix, Shape};

use super::activations::{Inputs, Tokens};
use super::gemm::{self, Place, TILE_ROWS, gemm};
use super::gemv::{self, Packed, PackedRow, gemv};
use crate::device::{Isa, Parts, Pool};

/// From so many tokens on, rows are unpacked for all of them.
const GEMM_TOKENS: usize = 12;
/// Packed bytes that a worker streams per claim.
const UNIT_BYTES: usize = 128 * 1024;
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
            let count = gemm::MOST_TOKENS.min(x.len() - from);
            gemm(isa, w, x, from, count, first, rows, Place { first: out.first + from * out.stride, ..out });
        }
        return;
    }
    // The second of an odd number of rows is its own neighbour.
    let half = rows.div_ceil(2);
    for row in 0..half {
        let other = (row + half).min(rows - 1);
        pair(isa, w.bits, [w.row(first + row), w.row(first + other)], x, |token, [a, b]| {
            // SAFETY: the caller keeps other workers away from these rows.
            unsafe {
                out.part(token, row, 1)[0] = a;
                out.part(token, other, 1)[0] = b;
            }
        });
    }
}

/// Two rows times every token; `take` gets each token's products.
#[inline]
pub(crate) fn pair(
    isa: Isa,
    bits: lily_model::Bits,
    rows: [PackedRow<'_>; 2],
    x: Tokens<'_>,
    mut take: impl FnMut(usize, [f32; 2]),
) {
    let mut at = |from: usize, products: [&[f32]; 2]| {
        for (i, (a, b)) in products[0].iter().zip(products[1]).enumerate() {
            take(from + i, [*a, *b]);
        }
    };
    for from in (0..x.len()).step_by(gemv::MOST_TOKENS) {
        let inputs = |i: usize| -> Inputs<'_> { x.row(from + i) };
        match x.len() - from {
            1 => at(from, gemv(isa, bits, rows, &[inputs(0)]).each_ref().map(|p| &p[..])),
            2 => at(from, gemv(isa, bits, rows, &[inputs(0), inputs(1)]).each_ref().map(|p| &p[..])),
            3 => at(from, gemv(isa, bits, rows, &[inputs(0), inputs(1), inputs(2)]).each_ref().map(|p| &p[..])),
            _ => at(
                from,
                gemv(isa, bits, rows, &[inputs(0), inputs(1), inputs(2), inputs(3)]).each_ref().map(|p| &p[..]),
            ),
        }
    }
}
