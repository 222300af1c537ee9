//! `gemm`: many tokens through rows of a packed matrix, each code unpacked once for all of them.
//!
//! In: up to [`MOST_TOKENS`] tokens of [`Inputs`](super::activations::Inputs); packed codes as for
//! [`gemv`](super::gemv). Out: f32 per token and row. The work of one call is a range of rows. Bytes moved: the packed rows once, the inputs once per 16 rows from the
//! second-level cache.
//!
//! 1. Codes of 16 rows and 4 groups are unpacked to 16-bit values or bytes, rows side by side: 8 KB or 4, which stay in the
//!    first-level cache.
//! 2. A few tokens at a time meet them: some inputs of a token times as many codes of each row, summed over a group in
//!    integers, exactly as `gemv` does.
//! 3. Per group the sums are scaled and added up in f32.
//!
//! Reference: `lily_reference::ops::linear` on the rounded inputs.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use std::ops::Range;

use super::activations::Tokens;
use super::gemv::{Packed, gemv};
use crate::device::{Isa, Parts};

/// Most tokens of a call: with 4 KB of inputs each they stay in the second-level cache.
pub(crate) const MOST_TOKENS: usize = 96;
/// Rows that are worked on side by side.
pub(crate) const TILE_ROWS: usize = 16;

/// Makes the loop over rows, groups and tokens around what unpacks `DEPTH` groups to a `Tile` and what multiplies that, which
/// is given `$many` tokens at a time, and of the last ones `$few`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! gemm_for {
    ($name:ident, $features:literal, $unpack:ident, $multiply:ident, $many:expr, $few:expr) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name(w: Packed<'_>, x: Tokens<'_>, tokens: Range<usize>, rows: Range<usize>, out: Place<'_>) {
            let (count, first, rows) = (tokens.len(), rows.start, rows.len());
            let mut tile = Tile::EMPTY;
            let mut sums = [[0.0; TILE_ROWS]; MOST_TOKENS];
            // Tokens and rows beyond the last are computed from it and not stored.
            let inputs: [Inputs<'_>; MOST_TOKENS] = std::array::from_fn(|i| x.row(tokens.start + i.min(count - 1)));
            for row in (0..rows).step_by(TILE_ROWS) {
                let height = TILE_ROWS.min(rows - row);
                let packed: [PackedRows<'_>; TILE_ROWS] =
                    std::array::from_fn(|i| w.rows(first + row + i.min(height - 1), 1));
                sums[..count].fill([0.0; TILE_ROWS]);
                for group in (0..w.groups).step_by(DEPTH) {
                    let depth = DEPTH.min(w.groups - group);
                    $unpack(w.bits, &packed, group, depth, &mut tile);
                    let many = count / $many * $many;
                    let tiles = inputs[..many].as_chunks().0.iter().zip(sums[..many].as_chunks_mut().0);
                    for (x, sums) in tiles {
                        $multiply::<$many>(&tile, x, group, depth, sums);
                    }
                    let tiles = inputs[many..].as_chunks().0.iter().zip(sums[many..].as_chunks_mut().0);
                    for (x, sums) in tiles.take((count - many).div_ceil($few)) {
                        $multiply::<$few>(&tile, x, group, depth, sums);
                    }
                }
                for (token, sums) in sums[..count].iter().enumerate() {
                    // SAFETY: the caller of `gemm` keeps other workers away from these rows.
                    unsafe { out.part(token, row, height) }.copy_from_slice(&sums[..height]);
                }
            }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use gemm_for;

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

/// Rows `rows` of `w` times tokens `tokens` of `x`. A result depends on nothing but its row and its token.
///
/// No other worker may be given the same elements of `out` at the same time.
pub(crate) fn gemm(isa: Isa, w: Packed<'_>, x: Tokens<'_>, tokens: Range<usize>, rows: Range<usize>, out: Place<'_>) {
    assert!(tokens.len() <= MOST_TOKENS);
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx2` exists only where the CPU was found to have AVX2 and FMA.
        Isa::Avx2 => unsafe { avx2::gemm(w, x, tokens, rows, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx512` exists only where the CPU was found to have what `avx512` enables.
        Isa::Avx512 => unsafe { avx512::gemm(w, x, tokens, rows, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Amx` exists only where the CPU was found to have that too, and the process may use it.
        Isa::Amx => unsafe { amx::gemm(w, x, tokens, rows, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a value of `Isa::Dotprod` exists only where the CPU was found to have it.
        Isa::Dotprod => unsafe { neon::dotprod(w, x, tokens, rows, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a value of `Isa::I8mm` exists only where the CPU was found to have it.
        Isa::I8mm => unsafe { neon::i8mm(w, x, tokens, rows, out) },
        Isa::Portable => {
            for (i, token) in tokens.enumerate() {
                for (j, row) in rows.clone().enumerate() {
                    let packed = w.rows(row, 1);
                    let mut product = [[[0.0; 2]]];
                    gemv(isa, w.bits, [packed, packed], &[x.row(token)], &mut product);
                    // SAFETY: the caller of `gemm` keeps other workers away from these rows.
                    unsafe { out.part(i, j, 1)[0] = product[0][0][0] };
                }
            }
        }
    }
}
