//! [`gemv`](super::gemv) with AVX2.

use std::arch::x86_64::*;

use super::{GROUP4, GROUP8, PREFETCH_BYTES, PREFETCH_SCALE_BYTES, PackedRows, Pair, checked, padded, prefetch};
use crate::kernels::activations::{GROUP, Inputs};

/// Groups whose scales are widened at a time.
const BLOCK: usize = 8;

/// A value per group of a block, on a multiple of its size: a store across two cache lines holds up the loads after it.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Block([f32; BLOCK]);

#[target_feature(enable = "avx2,fma")]
pub(super) fn gemv<const TOKENS: usize, const EIGHT: bool>(
    ranges: [PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    out: &mut [[Pair; TOKENS]],
) {
    let (groups, _) = checked::<TOKENS, EIGHT>(&ranges, x, out.len());
    let whole = groups / BLOCK * BLOCK;
    for (row, out) in out.iter_mut().enumerate() {
        let at = row * groups;
        for range in &ranges {
            for values in [range.scales, range.biases] {
                prefetch(values.as_ptr().wrapping_add(2 * at + PREFETCH_SCALE_BYTES));
            }
        }
        let mut sums = [[_mm256_setzero_ps(); TOKENS]; 2];
        for first in (0..whole).step_by(BLOCK) {
            // SAFETY: groups of a row of ranges and of tokens whose lengths were checked.
            unsafe { block::<TOKENS, EIGHT, true>(&ranges, x, at, first, BLOCK, &mut sums) };
        }
        if whole < groups {
            // SAFETY: as above.
            unsafe { block::<TOKENS, EIGHT, false>(&ranges, x, at, whole, groups - whole, &mut sums) };
        }
        for t in 0..TOKENS {
            out[t] = [total(sums[0][t]), total(sums[1][t])];
        }
    }
}

/// Groups `first .. first + count` of the rows whose groups start at `at`; `WHOLE` says that `count` is
/// [`BLOCK`], in code.
///
/// # Safety
/// Ranges and tokens have the groups, and the tokens have scales and sums for a whole block.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const TOKENS: usize, const EIGHT: bool, const WHOLE: bool>(
    ranges: &[PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    at: usize,
    first: usize,
    count: usize,
    sums: &mut [[__m256; TOKENS]; 2],
) {
    let (at, count) = (at + first, if WHOLE { BLOCK } else { count });
    let group_bytes = if EIGHT { GROUP8 } else { GROUP4 };
    // Scale of the row times scale of the token, per group.
    let mut scales = [[Block([0.0; BLOCK]); TOKENS]; 2];
    for r in 0..2 {
        // SAFETY: the caller's promise.
        let (scale, bias) = unsafe {
            (widen_block::<WHOLE>(ranges[r].scales, at, count), widen_block::<WHOLE>(ranges[r].biases, at, count))
        };
        for t in 0..TOKENS {
            // SAFETY: the caller promises a whole block.
            let (x_scale, x_sum) = unsafe {
                (_mm256_loadu_ps(x[t].scales.as_ptr().add(first)), _mm256_loadu_ps(x[t].sums.as_ptr().add(first)))
            };
            // SAFETY: a block is eight floats and lies on a multiple of their size.
            unsafe { _mm256_store_ps(scales[r][t].0.as_mut_ptr(), _mm256_mul_ps(scale, x_scale)) };
            sums[r][t] = _mm256_fmadd_ps(bias, x_sum, sums[r][t]);
        }
    }
    for i in 0..count {
        for r in 0..2 {
            // SAFETY: the caller's promise.
            let planes = unsafe {
                let codes = ranges[r].codes.as_ptr().add((at + i) * group_bytes);
                prefetch(codes.wrapping_add(PREFETCH_BYTES));
                planes::<EIGHT>(codes)
            };
            for t in 0..TOKENS {
                // SAFETY: the caller's promise.
                let product = unsafe {
                    let values = x[t].values.as_ptr().add((first + i) * GROUP).cast::<__m256i>();
                    let product = _mm256_madd_epi16(planes[0], _mm256_loadu_si256(values));
                    let product = multiply_add(product, planes[1], _mm256_loadu_si256(values.add(1)));
                    let other = _mm256_madd_epi16(planes[2], _mm256_loadu_si256(values.add(2)));
                    let other = multiply_add(other, planes[3], _mm256_loadu_si256(values.add(3)));
                    _mm256_add_epi32(product, other)
                };
                let scale = _mm256_set1_ps(scales[r][t].0[i]);
                sums[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), scale, sums[r][t]);
            }
        }
    }
}

/// `sum + a_0 b_0 + a_1 b_1` per pair of 16-bit values.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) fn multiply_add(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
}

/// The codes of a group as four vectors of 16-bit values, in the order of [`Inputs`].
///
/// # Safety
/// `codes` points to the bytes of a group.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels) unsafe fn planes<const EIGHT: bool>(codes: *const u8) -> [__m256i; 4] {
    if !EIGHT {
        let low = _mm256_set1_epi16(15);
        // SAFETY: 32 bytes, as the caller promises.
        let words = unsafe { _mm256_loadu_si256(codes.cast()) };
        return [
            _mm256_and_si256(words, low),
            _mm256_and_si256(_mm256_srli_epi16::<4>(words), low),
            _mm256_and_si256(_mm256_srli_epi16::<8>(words), low),
            _mm256_srli_epi16::<12>(words),
        ];
    }
    // Per eight columns: bytes (0 1)(4 5)(2 3)(6 7), whose low halves are columns 0 4 2 6 and high halves 1 5 3 7.
    let order = _mm256_setr_epi8(
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
    );
    let low = _mm256_set1_epi16(255);
    let half = |at: usize| {
        // SAFETY: 16 bytes from `at` and from `at + 32` of the 64 that the caller promises.
        let (first, second) =
            unsafe { (_mm_loadu_si128(codes.add(at).cast()), _mm_loadu_si128(codes.add(at + 32).cast())) };
        let pairs = _mm256_shuffle_epi8(_mm256_set_m128i(second, first), order);
        (_mm256_castsi256_ps(_mm256_and_si256(pairs, low)), _mm256_castsi256_ps(_mm256_srli_epi16::<8>(pairs)))
    };
    let ((even_a, odd_a), (even_b, odd_b)) = (half(0), half(16));
    [
        _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(even_a, even_b)),
        _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(odd_a, odd_b)),
        _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(even_a, even_b)),
        _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(odd_a, odd_b)),
    ]
}

/// BF16 values `first .. first + count` in f32, then zeros; `WHOLE` says that `count` is [`BLOCK`].
///
/// # Safety
/// There are so many values.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen_block<const WHOLE: bool>(values: &[u8], first: usize, count: usize) -> __m256 {
    let halves = if WHOLE {
        // SAFETY: 16 bytes, as the caller promises.
        unsafe { _mm_loadu_si128(values.as_ptr().add(2 * first).cast()) }
    } else {
        let from = padded::<{ 2 * BLOCK }>(values, first, count);
        // SAFETY: `from` has 16 bytes.
        unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
    };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// Sum of the lanes, by halves.
#[inline]
#[target_feature(enable = "avx2")]
fn total(x: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
