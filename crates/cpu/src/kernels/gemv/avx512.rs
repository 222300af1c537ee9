//! [`gemv`](super::gemv) with AVX-512: the codes of a group fill a register, once as bytes, and meet the high and the low
//! bytes of its inputs.

use std::arch::x86_64::*;

use super::{GROUP4, GROUP8, PREFETCH_BYTES, PREFETCH_SCALE_BYTES, PackedRows, Pair, checked, prefetch};
use crate::kernels::activations::{GROUP, Inputs};

/// Groups whose scales are widened at a time.
const BLOCK: usize = 16;

/// A value per group of a block, on a multiple of its size: a store across two cache lines holds up the loads after it.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Block([f32; BLOCK]);

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn gemv<const TOKENS: usize, const EIGHT: bool>(
    ranges: [PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    out: &mut [[Pair; TOKENS]],
) {
    let (groups, _) = checked::<TOKENS, EIGHT>(&ranges, x, out.len());
    for (row, out) in out.iter_mut().enumerate() {
        let at = row * groups;
        for range in &ranges {
            for values in [range.scales, range.biases] {
                prefetch(values.as_ptr().wrapping_add(2 * at + PREFETCH_SCALE_BYTES));
            }
        }
        let mut sums = [[_mm512_setzero_ps(); TOKENS]; 2];
        for first in (0..groups).step_by(BLOCK) {
            // SAFETY: groups of a row of ranges and of tokens whose lengths were checked.
            unsafe { block::<TOKENS, EIGHT>(&ranges, x, at, first, BLOCK.min(groups - first), &mut sums) };
        }
        for t in 0..TOKENS {
            out[t] = [_mm512_reduce_add_ps(sums[0][t]), _mm512_reduce_add_ps(sums[1][t])];
        }
    }
}

/// Groups `first .. first + count`, at most a block, of the rows whose groups start at `at`.
///
/// # Safety
/// Ranges and tokens have the groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn block<const TOKENS: usize, const EIGHT: bool>(
    ranges: &[PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    at: usize,
    first: usize,
    count: usize,
    sums: &mut [[__m512; TOKENS]; 2],
) {
    let at = at + first;
    let group_bytes = if EIGHT { GROUP8 } else { GROUP4 };
    let mask = first_lanes(count);
    // Scale of the row times scale of the token, per group.
    let mut scales = [[Block([0.0; BLOCK]); TOKENS]; 2];
    for r in 0..2 {
        // SAFETY: the caller's promise; what the mask leaves out is not read.
        let (scale, bias) = unsafe { (widen(mask, ranges[r].scales, at), widen(mask, ranges[r].biases, at)) };
        for t in 0..TOKENS {
            // SAFETY: as above.
            let (x_scale, x_sum) = unsafe {
                (
                    _mm512_maskz_loadu_ps(mask, x[t].scales.as_ptr().add(first)),
                    _mm512_maskz_loadu_ps(mask, x[t].sums.as_ptr().add(first)),
                )
            };
            // SAFETY: a block is 16 floats and lies on a multiple of their size.
            unsafe { _mm512_store_ps(scales[r][t].0.as_mut_ptr(), _mm512_mul_ps(scale, x_scale)) };
            sums[r][t] = _mm512_fmadd_ps(bias, x_sum, sums[r][t]);
        }
    }
    for i in 0..count {
        for r in 0..2 {
            // SAFETY: the caller's promise.
            let codes = unsafe {
                let codes = ranges[r].codes.as_ptr().add((at + i) * group_bytes);
                prefetch(codes.wrapping_add(PREFETCH_BYTES));
                bytes::<EIGHT>(codes)
            };
            for t in 0..TOKENS {
                // SAFETY: the caller's promise.
                let product = unsafe {
                    let values = x[t].values.as_ptr().add((first + i) * GROUP).cast::<__m512i>();
                    let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, _mm512_loadu_si512(values));
                    _mm512_dpbusd_epi32(_mm512_slli_epi32::<8>(high), codes, _mm512_loadu_si512(values.add(1)))
                };
                let scale = _mm512_set1_ps(scales[r][t].0[i]);
                sums[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, sums[r][t]);
            }
        }
    }
}

/// The first `count` of 16 lanes.
#[inline(always)]
fn first_lanes(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

/// The codes of a group as bytes, those of even columns before those of odd ones: the order of
/// [`Inputs`] for this set.
///
/// # Safety
/// `codes` points to the bytes of a group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::kernels) unsafe fn bytes<const EIGHT: bool>(codes: *const u8) -> __m512i {
    if !EIGHT {
        // SAFETY: 32 bytes, as the caller promises.
        let twice = unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(codes.cast())) };
        let shifts = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(4));
        return _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi8(15));
    }
    // Within 16 bytes, then of 16 bytes each the first eight.
    let split = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    // SAFETY: 64 bytes, as the caller promises.
    let columns = unsafe { _mm512_loadu_si512(codes.cast()) };
    _mm512_permutexvar_epi64(order, _mm512_shuffle_epi8(columns, split))
}

/// The BF16 values from `first` on that the mask names, in f32; zeros beside them.
///
/// # Safety
/// There are such values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn widen(mask: __mmask16, values: &[u8], first: usize) -> __m512 {
    // SAFETY: the caller's promise.
    let halves = unsafe { _mm256_maskz_loadu_epi16(mask, values.as_ptr().add(2 * first).cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}
