//! `gemv`: a few tokens through rows of packed matrices, each row read once.
//!
//! In: [`Inputs`] of each token; codes of 4 or 8 bits with BF16 scales and biases per group of 64, in the bytes of the
//! file. Out: one f32 per token and row. The work of one call is two ranges of rows that lie far apart, read side by side.
//! Bytes moved: the packed rows, 36 per group of 4-bit codes.
//!
//! `y = sum_g ( scale_g * scale(x)_g * sum_i q_i code_i + bias_g * sum(x)_g )`: nothing is dequantized, and the inner sum
//! is one of integers. Reference: `lily_reference::ops::linear` on the rounded inputs.
//!
//! Why two ranges: one stream of codes does not keep enough reads in flight, and rows next to each other share pages and
//! halve the speed (measured on Zen 3: 59 to 73 % of a plain read with one row, 32 to 54 % with adjacent ones, 76 to
//! 104 % with two far apart).

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;

use lily_model::{Bits, QuantMatrix, Shape};

use super::activations::{GROUP, Inputs};
use super::{LANES, prefetch};
use crate::device::Isa;

/// Bytes of 4-bit codes in a group.
pub(crate) const GROUP4: usize = Shape::GROUP / 2;
/// Bytes of 8-bit codes in a group.
pub(crate) const GROUP8: usize = Shape::GROUP;
/// How far ahead of the codes in use the next ones are asked for; between 1 and 8 KB it made no difference on Zen 3,
/// against 10 to 20 % without.
const PREFETCH_BYTES: usize = 2048;
/// The same for scales and biases: a few rows.
const PREFETCH_SCALE_BYTES: usize = 256;
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

/// Some rows of it, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) biases: &'a [u8],
}

impl<'a> PackedRows<'a> {
    /// Rows `first .. first + count` of these `rows`.
    #[inline(always)]
    pub(crate) fn part(self, rows: usize, first: usize, count: usize) -> PackedRows<'a> {
        let part = |bytes: &'a [u8]| &bytes[bytes.len() / rows * first..][..bytes.len() / rows * count];
        PackedRows { codes: part(self.codes), scales: part(self.scales), biases: part(self.biases) }
    }
}

impl PackedRows<'_> {
    /// Asks for the first lines of the rows, which a kernel that starts with them would have to wait for.
    pub(crate) fn prefetch(&self) {
        for (bytes, len) in
            [(self.codes, PREFETCH_BYTES), (self.scales, PREFETCH_SCALE_BYTES), (self.biases, PREFETCH_SCALE_BYTES)]
        {
            bytes[..len.min(bytes.len())].chunks(LINE_BYTES).for_each(|line| prefetch(line.as_ptr()));
        }
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

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

    /// Rows `first .. first + rows` in two halves, which overlap in one row if their number is odd.
    #[inline(always)]
    pub(crate) fn halves(&self, first: usize, rows: usize) -> [PackedRows<'a>; 2] {
        let half = rows.div_ceil(2);
        [self.rows(first, half), self.rows(first + rows - half, half)]
    }

    /// Codes, scales and biases of rows `first .. first + count`.
    #[inline(always)]
    pub(crate) fn rows(&self, first: usize, count: usize) -> PackedRows<'a> {
        let (code_bytes, group_bytes) = (self.groups * self.bits.bytes(GROUP), 2 * self.groups);
        PackedRows {
            codes: &self.codes[first * code_bytes..][..count * code_bytes],
            scales: &self.scales[first * group_bytes..][..count * group_bytes],
            biases: &self.biases[first * group_bytes..][..count * group_bytes],
        }
    }
}

/// Products of a row of each range with a token.
pub(crate) type Pair = [f32; 2];

/// Two ranges of rows of `groups` groups, of one matrix or of two, times each of up to [`MOST_TOKENS`] tokens. Writes
/// `[rows, tokens]`, which says how many rows the ranges have.
///
/// A product does not depend on the tokens beside it.
pub(crate) fn gemv<const TOKENS: usize>(
    isa: Isa,
    bits: Bits,
    ranges: [PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    out: &mut [[Pair; TOKENS]],
) {
    match (isa, bits) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa::Avx2` exists only where the CPU was found to have AVX2 and FMA.
        (Isa::Avx2, Bits::Four) => unsafe { avx2::gemv::<TOKENS, false>(ranges, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Isa::Avx2, Bits::Eight) => unsafe { avx2::gemv::<TOKENS, true>(ranges, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: values of these exist only where the CPU was found to have what `avx512` enables.
        (Isa::Avx512 | Isa::Amx, Bits::Four) => unsafe { avx512::gemv::<TOKENS, false>(ranges, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Isa::Avx512 | Isa::Amx, Bits::Eight) => unsafe { avx512::gemv::<TOKENS, true>(ranges, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a value of `Isa::Dotprod` exists only where the CPU was found to have it.
        (Isa::Dotprod, Bits::Four) => unsafe { neon::dotprod::<TOKENS, false>(ranges, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        (Isa::Dotprod, Bits::Eight) => unsafe { neon::dotprod::<TOKENS, true>(ranges, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a value of `Isa::I8mm` exists only where the CPU was found to have it.
        (Isa::I8mm, Bits::Four) => unsafe { neon::i8mm::<TOKENS, false>(ranges, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        (Isa::I8mm, Bits::Eight) => unsafe { neon::i8mm::<TOKENS, true>(ranges, x, out) },
        (Isa::Portable, _) => {
            for (row, out) in out.iter_mut().enumerate() {
                *out = x.map(|x| ranges.map(|range| dot(bits, range, row, x)));
            }
        }
    }
}

/// Row `row` of a range times one token.
fn dot(bits: Bits, range: PackedRows<'_>, row: usize, x: Inputs<'_>) -> f32 {
    let groups = x.values.len() / GROUP;
    let at = row * groups;
    let (scales, biases) = (&range.scales.as_chunks().0[at..], &range.biases.as_chunks().0[at..]);
    let mut sum = 0.0;
    for (g, values) in x.values.as_chunks::<GROUP>().0.iter().enumerate() {
        let product = match bits {
            Bits::Four => product(&codes4(&range.codes.as_chunks().0[at + g]), values),
            Bits::Eight => product(&codes8(&range.codes.as_chunks().0[at + g]), values),
        };
        sum += widen(scales[g]) * x.scales[g] * product as f32 + widen(biases[g]) * x.sums[g];
    }
    sum
}

fn product(codes: &[i16; GROUP], x: &[i16; GROUP]) -> i32 {
    codes.iter().zip(x).map(|(code, x)| i32::from(*code) * i32::from(*x)).sum()
}

/// The codes of a group in the order of the portable [`Inputs`].
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
fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Groups of a row and bytes of a group, after a check of all lengths, on which kernels rely.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn checked<const TOKENS: usize, const EIGHT: bool>(
    ranges: &[PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    rows: usize,
) -> (usize, usize) {
    let groups = x[0].values.len() / GROUP;
    let group_bytes = if EIGHT { GROUP8 } else { GROUP4 };
    for range in ranges {
        assert!(range.codes.len() == rows * groups * group_bytes);
        assert!(range.scales.len() == rows * 2 * groups && range.biases.len() == range.scales.len());
    }
    for x in x {
        assert!(x.values.len() == groups * GROUP);
        assert!(x.scales.len() >= groups.next_multiple_of(LANES) && x.sums.len() == x.scales.len());
    }
    (groups, group_bytes)
}

/// The bytes of BF16 values `first .. first + count`, then zeros.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(super) fn padded<const BYTES: usize>(values: &[u8], first: usize, count: usize) -> [u8; BYTES] {
    let bytes = &values[2 * first..2 * (first + count)];
    // Whole blocks, which most are, are read at once.
    <[u8; BYTES]>::try_from(bytes).unwrap_or_else(|_| {
        let mut room = [0; BYTES];
        room[..bytes.len()].copy_from_slice(bytes);
        room
    })
}
