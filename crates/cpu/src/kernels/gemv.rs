//! `gemv`: a few tokens through rows of a packed matrix, each row read once.
//!
//! In: [`Inputs`] of each token, `[inputs]` f32; codes of 4 or 8 bits with BF16 scales and biases per group of 64, in the
//! bytes of the file. Out: one f32 per token and row. The work of one call is a range of rows. Bytes moved: the packed
//! rows, 36 per group of 4-bit codes.
//!
//! `y = sum_g ( scale_g * sum_i x_i code_i + bias_g * sum_i x_i )`: nothing is dequantized.
//! Reference: `lily_reference::ops::linear`.

use lily_model::quant::bf16_at;
use lily_model::{Bits, QuantMatrix, Shape};

use super::{Inputs, LANES, Lanes, add_product, add_scaled, kernel, mul_add, total};

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

kernel! {
    /// `out[row - first]` for rows `first .. first + out.len()` of `w` and one token.
    pub(crate) fn gemv(w: Packed<'_>, x: Inputs<'_>, first: usize, out: &mut [f32]) = gemv_body;
}

#[inline(always)]
fn gemv_body<const FUSED: bool>(w: Packed<'_>, x: Inputs<'_>, first: usize, out: &mut [f32]) {
    for (row, out) in (first..).zip(out) {
        let (codes, scales, biases) = w.row(row);
        *out = match w.bits {
            Bits::Four => row4::<FUSED>(codes, scales, biases, x),
            Bits::Eight => row8::<FUSED>(codes, scales, biases, x),
        };
    }
}

#[inline(always)]
fn row4<const FUSED: bool>(codes: &[u8], scales: &[u8], biases: &[u8], x: Inputs<'_>) -> f32 {
    let mut sum = [0.0; LANES];
    let codes = codes.as_chunks::<GROUP4>().0;
    let values = x.values.as_chunks::<{ Shape::GROUP }>().0;
    for (g, (codes, x)) in codes.iter().zip(values).enumerate() {
        if g % 2 == 0 {
            prefetch(codes.as_ptr().wrapping_add(PREFETCH_BYTES));
        }
        add_scaled::<FUSED>(&mut sum, &group4::<FUSED>(codes, x), bf16_at(scales, g));
    }
    total(sum) + bias_sum::<FUSED>(biases, x.sums)
}

/// `sum_i x_i code_i` of one group in lanes.
#[inline(always)]
fn group4<const FUSED: bool>(codes: &[u8; GROUP4], x: &[f32; Shape::GROUP]) -> Lanes {
    let (even, odd) = x.split_at(GROUP4);
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    let (even, odd) = (even.as_chunks::<LANES>().0, odd.as_chunks::<LANES>().0);
    for ((codes, even), odd) in codes.as_chunks::<LANES>().0.iter().zip(even).zip(odd) {
        let codes: [i32; LANES] = codes.map(i32::from);
        add_product::<FUSED>(&mut a, &codes.map(|c| (c & 15) as f32), even);
        add_product::<FUSED>(&mut b, &codes.map(|c| (c >> 4) as f32), odd);
    }
    std::array::from_fn(|i| a[i] + b[i])
}

#[inline(always)]
fn row8<const FUSED: bool>(codes: &[u8], scales: &[u8], biases: &[u8], x: Inputs<'_>) -> f32 {
    let mut sum = [0.0; LANES];
    let codes = codes.as_chunks::<GROUP8>().0;
    let values = x.values.as_chunks::<{ Shape::GROUP }>().0;
    for (g, (codes, x)) in codes.iter().zip(values).enumerate() {
        add_scaled::<FUSED>(&mut sum, &group8::<FUSED>(codes, x), bf16_at(scales, g));
    }
    total(sum) + bias_sum::<FUSED>(biases, x.sums)
}

#[inline(always)]
fn group8<const FUSED: bool>(codes: &[u8; GROUP8], x: &[f32; Shape::GROUP]) -> Lanes {
    let (even, odd) = x.split_at(GROUP4);
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    let (even, odd) = (even.as_chunks::<LANES>().0, odd.as_chunks::<LANES>().0);
    let pairs = codes.as_chunks::<2>().0.as_chunks::<LANES>().0;
    for ((pairs, even), odd) in pairs.iter().zip(even).zip(odd) {
        let pairs: [i32; LANES] = pairs.map(|pair| i32::from(u16::from_le_bytes(pair)));
        add_product::<FUSED>(&mut a, &pairs.map(|c| (c & 255) as f32), even);
        add_product::<FUSED>(&mut b, &pairs.map(|c| (c >> 8) as f32), odd);
    }
    std::array::from_fn(|i| a[i] + b[i])
}

/// `sum_g bias_g * sum_g`.
#[inline(always)]
fn bias_sum<const FUSED: bool>(biases: &[u8], sums: &[f32]) -> f32 {
    let (biases, rest) = biases.as_chunks::<2>().0.as_chunks::<LANES>();
    let (sums, sums_rest) = sums.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    let widen = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
    for (biases, sums) in biases.iter().zip(sums) {
        add_product::<FUSED>(&mut lanes, &biases.each_ref().map(widen), sums);
    }
    let tail = rest.iter().zip(sums_rest).fold(0.0, |tail, (b, s)| mul_add::<FUSED>(widen(b), *s, tail));
    total(lanes) + tail
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
