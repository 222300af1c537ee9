//! `gemm`: many tokens through rows of a packed matrix, each code unpacked once for all of them.
//!
//! In: up to [`MOST_TOKENS`] tokens of [`Inputs`]; packed codes as for [`gemv`](super::gemv). Out: f32 per token and row.
//! The work of one call is a range of rows. Bytes moved: the packed rows once, the inputs once per 16 rows from the
//! second-level cache.
//!
//! 1. Codes of 16 rows and 4 groups are unpacked to 16-bit values, rows side by side: 8 KB, which stay in the first-level
//!    cache.
//! 2. A few tokens at a time meet them: a pair of a token's inputs times a pair of codes of each row, summed over a group
//!    in integers, exactly as `gemv` does.
//! 3. Per group the sums are scaled and added up in f32.
//!
//! Reference: `lily_reference::ops::linear` on the rounded inputs.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::activations::Tokens;
use super::gemv::{Packed, gemv};
use crate::device::{Isa, Parts};

/// Most tokens of a call: with 4 KB of inputs each they stay in the second-level cache.
pub(crate) const MOST_TOKENS: usize = 96;
/// Rows that are worked on side by side.
pub(crate) const TILE_ROWS: usize = 16;

/// Where results go: those of a token are adjacent, tokens lie `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) out: &'a Parts<'a, f32>,
    /// Of the first row of the first token.
    pub(crate) first: usize,
    pub(crate) stride: usize,
}

impl Place<'_> {
    /// The results of rows `row .. row + len` of a token, both counted from those of the call.
    ///
    /// # Safety
    /// No other part with these elements is alive.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts are disjoint")]
    pub(crate) unsafe fn part(&self, token: usize, row: usize, len: usize) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.out.part(self.first + token * self.stride + row, len) }
    }
}

/// Rows `first .. first + rows` of `w` times tokens `from .. from + count` of `x`. A result depends on nothing but its row
/// and its token.
///
/// No other worker may be given the same elements of `out` at the same time.
pub(crate) fn gemm(
    isa: Isa,
    w: Packed<'_>,
    x: Tokens<'_>,
    from: usize,
    count: usize,
    first: usize,
    rows: usize,
    out: Place<'_>,
) {
    assert!(count <= MOST_TOKENS);
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx2` exists only where the CPU was found to have AVX2 and FMA.
        Isa::Avx2 => unsafe { x86::avx2(w, x, from, count, first, rows, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx512` exists only where the CPU was found to have what `avx512` enables.
        Isa::Avx512 => unsafe { x86::avx512(w, x, from, count, first, rows, out) },
        Isa::Portable => {
            for token in 0..count {
                for row in 0..rows {
                    let packed = w.rows(first + row, 1);
                    let mut product = [[[0.0; 2]]];
                    gemv(isa, w.bits, [packed, packed], &[x.row(from + token)], &mut product);
                    // SAFETY: the caller of `gemm` keeps other workers away from these rows.
                    unsafe { out.part(token, row, 1)[0] = product[0][0][0] };
                }
            }
        }
    }
}
