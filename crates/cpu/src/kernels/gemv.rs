//! `gemv`: a few tokens through rows of a packed matrix, each row read once.
//!
//! In: [`Inputs`] of each token, `[inputs]` f32; codes of 4 or 8 bits with BF16 scales and biases per group of 64, in the
//! bytes of the file. Out: one f32 per token and row. The work of one call is a range of rows. Bytes moved: the packed
//! rows, 36 per group of 4-bit codes.
//!
//! `y = sum_g ( scale_g * sum_i x_i code_i + bias_g * sum_i x_i )`: nothing is dequantized.
//! Reference: `lily_reference::ops::linear`.

use lily_model::{Bits, QuantMatrix, Shape};

use super::{Inputs, LANES, Lanes, TARGET_HAS_FMA, add_scaled, mul_add, sum, total};
use crate::device::Isa;

/// Bytes of 4-bit codes in a group.
pub(crate) const GROUP4: usize = Shape::GROUP / 2;
/// Bytes of 8-bit codes in a group.
pub(crate) const GROUP8: usize = Shape::GROUP;
/// How far ahead of the codes in use the next ones are asked for; between 1 and 8 KB it made no difference on Zen 3,
/// against 10 to 20 % without.
const PREFETCH_BYTES: usize = 2048;

/// The packed bytes of a matrix, or of one expert of a stack.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) bits: Bits,
    pub(crate) groups: usize,
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) biases: &'a [u8],
}

impl<'a> Packed<'a> {
    /// Expert `expert` of `matrix`; 0 for a plain one.
    pub(crate) fn of(matrix: &'a QuantMatrix, expert: usize) -> Packed<'a> {
        let (row, rows) = (expert * matrix.outputs, matrix.outputs);
        let (code_bytes, group_bytes) = (matrix.row_bytes(), 2 * matrix.groups());
        Packed {
            bits: matrix.bits,
            groups: matrix.groups(),
            codes: &matrix.codes[row * code_bytes..][..rows * code_bytes],
            scales: &matrix.scales[row * group_bytes..][..rows * group_bytes],
            biases: &matrix.biases[row * group_bytes..][..rows * group_bytes],
        }
    }

    /// Codes, scales and biases of one row.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> (&'a [u8], &'a [u8], &'a [u8]) {
        let (code_bytes, group_bytes) = (self.groups * self.bits.bytes(Shape::GROUP), 2 * self.groups);
        (
            &self.codes[row * code_bytes..][..code_bytes],
            &self.scales[row * group_bytes..][..group_bytes],
            &self.biases[row * group_bytes..][..group_bytes],
        )
    }
}

/// `out[row - first]` for rows `first .. first + out.len()` of `w` and one token.
pub(crate) fn gemv(isa: Isa, w: Packed<'_>, x: Inputs<'_>, first: usize, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx2` exists only where the CPU was found to have AVX2 and FMA.
        Isa::Avx2 => unsafe { avx2::gemv(w, x, first, out) },
        Isa::Portable => rows::<TARGET_HAS_FMA>(w, x, first, out, |codes, scales, x| match w.bits {
            Bits::Four => scaled_sum(codes, scales, x, dot4::<TARGET_HAS_FMA>),
            Bits::Eight => scaled_sum(codes, scales, x, dot8::<TARGET_HAS_FMA>),
        }),
    }
}

/// All rows; `scaled_sum` is `sum_g scale_g * sum_i x_i code_i` of a row's codes and scales.
#[inline(always)]
fn rows<const FUSED: bool>(
    w: Packed<'_>,
    x: Inputs<'_>,
    first: usize,
    out: &mut [f32],
    scaled_sum: impl Fn(&[u8], &[u8], Inputs<'_>) -> f32,
) {
    for (row, out) in (first..).zip(out) {
        let (codes, scales, biases) = w.row(row);
        *out = scaled_sum(codes, scales, x) + bias_sum::<FUSED>(biases, x.sums);
    }
}

/// The groups of a row: codes, inputs, scale.
#[inline(always)]
fn groups<'a, const GROUP_BYTES: usize>(
    codes: &'a [u8],
    scales: &'a [u8],
    x: Inputs<'a>,
) -> impl Iterator<Item = (&'a [u8; GROUP_BYTES], &'a [f32; Shape::GROUP], f32)> {
    let codes = codes.as_chunks::<GROUP_BYTES>().0.iter();
    let scaled = x.values.as_chunks::<{ Shape::GROUP }>().0.iter().zip(scales.as_chunks::<2>().0);
    codes.zip(scaled).map(|(codes, (x, scale))| {
        prefetch(codes.as_ptr().wrapping_add(PREFETCH_BYTES));
        (codes, x, widen(*scale))
    })
}

/// The scaled sum with the dot product of a group that every CPU of the target has.
#[inline(always)]
fn scaled_sum<const GROUP_BYTES: usize>(
    codes: &[u8],
    scales: &[u8],
    x: Inputs<'_>,
    dot: impl Fn(&[u8; GROUP_BYTES], &[f32; Shape::GROUP]) -> Lanes,
) -> f32 {
    let mut lanes = [0.0; LANES];
    for (codes, x, scale) in groups(codes, scales, x) {
        add_scaled::<TARGET_HAS_FMA>(&mut lanes, &dot(codes, x), scale);
    }
    total(lanes)
}

/// `sum_i x_i code_i` of one group of 4-bit codes in lanes.
#[inline(always)]
fn dot4<const FUSED: bool>(codes: &[u8; GROUP4], x: &[f32; Shape::GROUP]) -> Lanes {
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    let (even, odd) = x.split_at(GROUP4);
    let (even, odd) = (even.as_chunks::<LANES>().0, odd.as_chunks::<LANES>().0);
    for ((codes, even), odd) in codes.as_chunks::<LANES>().0.iter().zip(even).zip(odd) {
        for i in 0..LANES {
            let code = i32::from(codes[i]);
            a[i] = mul_add::<FUSED>((code & 15) as f32, even[i], a[i]);
            b[i] = mul_add::<FUSED>((code >> 4) as f32, odd[i], b[i]);
        }
    }
    sum(a, b)
}

/// The same for 8-bit codes.
#[inline(always)]
fn dot8<const FUSED: bool>(codes: &[u8; GROUP8], x: &[f32; Shape::GROUP]) -> Lanes {
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    let (even, odd) = x.split_at(GROUP4);
    let (even, odd) = (even.as_chunks::<LANES>().0, odd.as_chunks::<LANES>().0);
    let pairs = codes.as_chunks::<2>().0.as_chunks::<LANES>().0;
    for ((pairs, even), odd) in pairs.iter().zip(even).zip(odd) {
        for i in 0..LANES {
            let pair = i32::from(u16::from_le_bytes(pairs[i]));
            a[i] = mul_add::<FUSED>((pair & 255) as f32, even[i], a[i]);
            b[i] = mul_add::<FUSED>((pair >> 8) as f32, odd[i], b[i]);
        }
    }
    sum(a, b)
}

/// `sum_g bias_g * sum_g`.
#[inline(always)]
fn bias_sum<const FUSED: bool>(biases: &[u8], sums: &[f32]) -> f32 {
    let (biases, rest) = biases.as_chunks::<2>().0.as_chunks::<LANES>();
    let (sums, sums_rest) = sums.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (biases, sums) in biases.iter().zip(sums) {
        for i in 0..LANES {
            lanes[i] = mul_add::<FUSED>(widen(biases[i]), sums[i], lanes[i]);
        }
    }
    let mut tail = 0.0;
    for (bias, sum) in rest.iter().zip(sums_rest) {
        tail = mul_add::<FUSED>(widen(*bias), *sum, tail);
    }
    total(lanes) + tail
}

/// A BF16 value.
#[inline(always)]
fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The dot products of a group with AVX2 and FMA, eight codes at a time: left to the compiler they come out two at a time.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{Bits, GROUP4, GROUP8, Inputs, LANES, Lanes, Packed, Shape, groups, total};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn gemv(w: Packed<'_>, x: Inputs<'_>, first: usize, out: &mut [f32]) {
        super::rows::<true>(w, x, first, out, |codes, scales, x| {
            let mut sum = _mm256_setzero_ps();
            match w.bits {
                Bits::Four => groups(codes, scales, x).for_each(|(codes, x, scale)| {
                    sum = _mm256_fmadd_ps(dot4(codes, x), _mm256_set1_ps(scale), sum);
                }),
                Bits::Eight => groups(codes, scales, x).for_each(|(codes, x, scale)| {
                    sum = _mm256_fmadd_ps(dot8(codes, x), _mm256_set1_ps(scale), sum);
                }),
            }
            total(lanes(sum))
        });
    }

    /// `sum_i x_i code_i` of one group of 4-bit codes.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn dot4(codes: &[u8; GROUP4], x: &[f32; Shape::GROUP]) -> __m256 {
        let low = _mm256_set1_epi32(15);
        let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for i in (0..GROUP4).step_by(LANES) {
            // SAFETY: eight bytes of 32 from `i`, and eight floats of 64 from `i` and from 32 + `i`.
            let (bytes, x_even, x_odd) = unsafe {
                (
                    _mm_loadl_epi64(codes.as_ptr().add(i).cast()),
                    _mm256_loadu_ps(x.as_ptr().add(i)),
                    _mm256_loadu_ps(x.as_ptr().add(GROUP4 + i)),
                )
            };
            let pairs = _mm256_cvtepu8_epi32(bytes);
            even = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(pairs, low)), x_even, even);
            odd = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(pairs)), x_odd, odd);
        }
        _mm256_add_ps(even, odd)
    }

    /// The same for 8-bit codes.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn dot8(codes: &[u8; GROUP8], x: &[f32; Shape::GROUP]) -> __m256 {
        let low = _mm256_set1_epi32(255);
        let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for i in (0..Shape::GROUP / 2).step_by(LANES) {
            // SAFETY: sixteen bytes of 64 from `2 i`, and eight floats of 64 from `i` and from 32 + `i`.
            let (words, x_even, x_odd) = unsafe {
                (
                    _mm_loadu_si128(codes.as_ptr().add(2 * i).cast()),
                    _mm256_loadu_ps(x.as_ptr().add(i)),
                    _mm256_loadu_ps(x.as_ptr().add(Shape::GROUP / 2 + i)),
                )
            };
            let pairs = _mm256_cvtepu16_epi32(words);
            even = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(pairs, low)), x_even, even);
            odd = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32::<8>(pairs)), x_odd, odd);
        }
        _mm256_add_ps(even, odd)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn lanes(x: __m256) -> Lanes {
        let mut lanes = [0.0; LANES];
        // SAFETY: eight floats are written to eight floats.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), x) };
        lanes
    }
}

/// Asks for the cache line at `address`, which need not be mapped.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program could see and faults on no address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
