//! `gemv`: a few tokens through rows of packed matrices, each row read once.
//!
//! In: [`Inputs`] of each token; codes of 4 or 8 bits with BF16 scales and biases per group of 64, in the bytes of the
//! file. Out: one f32 per token and row. The work of one call is two rows that lie far apart. Bytes moved: the packed
//! rows, 36 per group of 4-bit codes.
//!
//! `y = sum_g ( scale_g * scale(x)_g * sum_i q_i code_i + bias_g * sum(x)_g )`: nothing is dequantized, and the inner sum
//! is one of integers. Reference: `lily_reference::ops::linear` on the rounded inputs.
//!
//! Why two rows: one stream of codes does not keep enough reads in flight, and rows next to each other share pages and
//! halve the speed (measured on Zen 3: 59 to 73 % of a plain read with one row, 32 to 54 % with adjacent ones, 76 to
//! 104 % with two far apart).

#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use lily_model::{Bits, QuantMatrix, Shape};

use super::activations::{GROUP, Inputs};
use crate::device::Isa;

/// Bytes of 4-bit codes in a group.
pub(crate) const GROUP4: usize = Shape::GROUP / 2;
/// Bytes of 8-bit codes in a group.
pub(crate) const GROUP8: usize = Shape::GROUP;
/// Most tokens of a call.
pub(crate) const MOST_TOKENS: usize = 4;

/// The packed bytes of a matrix, or of one expert of a stack.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) bits: Bits,
    pub(crate) groups: usize,
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) biases: &'a [u8],
}

/// One row of it.
#[derive(Clone, Copy)]
pub(crate) struct PackedRow<'a> {
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

    /// Bytes of a row with its scales and biases.
    pub(crate) fn row_bytes(&self) -> usize {
        self.groups * (self.bits.bytes(GROUP) + 4)
    }

    /// Codes, scales and biases of one row.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> PackedRow<'a> {
        let (code_bytes, group_bytes) = (self.groups * self.bits.bytes(GROUP), 2 * self.groups);
        PackedRow {
            codes: &self.codes[row * code_bytes..][..code_bytes],
            scales: &self.scales[row * group_bytes..][..group_bytes],
            biases: &self.biases[row * group_bytes..][..group_bytes],
        }
    }
}

/// Two rows of equal length, of one matrix or of two, times each of up to [`MOST_TOKENS`] tokens: `[row][token]`.
///
/// A product does not depend on the tokens beside it.
pub(crate) fn gemv<const TOKENS: usize>(
    isa: Isa,
    bits: Bits,
    rows: [PackedRow<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
) -> [[f32; TOKENS]; 2] {
    match (isa, bits) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx2` exists only where the CPU was found to have AVX2 and FMA.
        (Isa::Avx2, Bits::Four) => unsafe { x86::avx2::gemv::<TOKENS, false>(rows, x) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Isa::Avx2, Bits::Eight) => unsafe { x86::avx2::gemv::<TOKENS, true>(rows, x) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx512` exists only where the CPU was found to have what `avx512` enables.
        (Isa::Avx512, Bits::Four) => unsafe { x86::avx512::gemv::<TOKENS, false>(rows, x) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Isa::Avx512, Bits::Eight) => unsafe { x86::avx512::gemv::<TOKENS, true>(rows, x) },
        (Isa::Portable, _) => rows.map(|row| x.map(|x| dot(bits, row, x))),
    }
}

/// One row and one token.
fn dot(bits: Bits, row: PackedRow<'_>, x: Inputs<'_>) -> f32 {
    let mut sum = 0.0;
    let groups = row.scales.as_chunks().0.iter().zip(row.biases.as_chunks().0).zip(x.values.as_chunks::<GROUP>().0);
    for (g, ((scale, bias), x_values)) in groups.enumerate() {
        let product = match bits {
            Bits::Four => product(&codes4(&row.codes.as_chunks().0[g]), x_values),
            Bits::Eight => product(&codes8(&row.codes.as_chunks().0[g]), x_values),
        };
        sum += widen(*scale) * x.scales[g] * product as f32 + widen(*bias) * x.sums[g];
    }
    sum
}

fn product(codes: &[i16; GROUP], x: &[i16; GROUP]) -> i32 {
    codes.iter().zip(x).map(|(code, x)| i32::from(*code) * i32::from(*x)).sum()
}

/// The codes of a group in the order of [`Inputs`].
fn codes4(bytes: &[u8; GROUP4]) -> [i16; GROUP] {
    let mut codes = [0; GROUP];
    for (v, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_le_bytes(*word);
        for e in 0..4 {
            codes[16 * e + 2 * v] = (word >> (4 * e) & 15) as i16;
            codes[16 * e + 2 * v + 1] = (word >> (4 * e + 16) & 15) as i16;
        }
    }
    codes
}

/// The same for 8-bit codes.
fn codes8(bytes: &[u8; GROUP8]) -> [i16; GROUP] {
    let mut codes = [0; GROUP];
    for (v, eight) in bytes.as_chunks::<8>().0.iter().enumerate() {
        for e in 0..4 {
            codes[16 * e + 2 * v] = i16::from(eight[e]);
            codes[16 * e + 2 * v + 1] = i16::from(eight[e + 4]);
        }
    }
    codes
}

/// A BF16 value.
#[inline(always)]
pub(crate) fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}
