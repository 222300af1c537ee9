//! MLX affine quantization: how a packed matrix is read.
//!
//! `W[o, i] = scales[o, i / 64] * code(o, i) + biases[o, i / 64]`, codes unsigned, scales of either sign. Read as bytes
//! in little-endian order a row of 8-bit codes is plain bytes, and a row of 4-bit codes has the even column in the low
//! nibble. Nothing in a mapped shard is aligned, so every access here is by bytes.

use crate::safetensors::TensorBytes;
use crate::shape::Shape;

/// Width of a quantized code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bits {
    /// Two codes per byte.
    Four,
    /// One code per byte.
    Eight,
}

impl Bits {
    /// The width as a number.
    pub const fn count(self) -> usize {
        match self {
            Bits::Four => 4,
            Bits::Eight => 8,
        }
    }

    /// Bytes that `n` codes take; `n` is a multiple of the group.
    pub const fn bytes(self, n: usize) -> usize {
        n * self.count() / 8
    }
}

/// One quantized matrix `[outputs, inputs]`, or a stack of `experts` of them, in the packed form of the file.
///
/// Rows are numbered through the stack: row `o` of expert `e` is `e * outputs + o`.
#[derive(Clone, Debug)]
pub struct QuantMatrix {
    /// Name in the file, without `.weight`.
    pub name: String,
    /// Width of the codes.
    pub bits: Bits,
    /// Matrices in the stack; 1 for a plain linear.
    pub experts: usize,
    /// Rows of one matrix.
    pub outputs: usize,
    /// Columns, a multiple of [`Shape::GROUP`].
    pub inputs: usize,
    /// Packed codes, `experts * outputs` rows of `row_bytes()`.
    pub codes: TensorBytes,
    /// BF16 scales, `groups()` per row.
    pub scales: TensorBytes,
    /// BF16 biases, `groups()` per row.
    pub biases: TensorBytes,
}

impl QuantMatrix {
    /// Rows over all experts.
    pub fn rows(&self) -> usize {
        self.experts * self.outputs
    }

    /// Groups in a row.
    pub fn groups(&self) -> usize {
        self.inputs / Shape::GROUP
    }

    /// Bytes of one row of codes.
    pub fn row_bytes(&self) -> usize {
        self.bits.bytes(self.inputs)
    }

    /// Bytes of codes, scales and biases together.
    pub fn total_bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.biases.len()
    }

    /// The packed codes of `row`.
    pub fn row_codes(&self, row: usize) -> &[u8] {
        &self.codes[row * self.row_bytes()..][..self.row_bytes()]
    }

    /// The scales of `row` as BF16 bytes, two per group.
    pub fn row_scales(&self, row: usize) -> &[u8] {
        &self.scales[row * self.groups() * 2..][..self.groups() * 2]
    }

    /// The biases of `row` as BF16 bytes, two per group.
    pub fn row_biases(&self, row: usize) -> &[u8] {
        &self.biases[row * self.groups() * 2..][..self.groups() * 2]
    }

    /// Writes row `row` as f32 into `out` of length `inputs`. The product and the sum are each rounded to f32.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.inputs);
        let (codes, scales, biases) = (self.row_codes(row), self.row_scales(row), self.row_biases(row));
        let group_bytes = self.bits.bytes(Shape::GROUP);
        for (g, out) in out.chunks_exact_mut(Shape::GROUP).enumerate() {
            let (scale, bias) = (bf16_at(scales, g), bf16_at(biases, g));
            let codes = &codes[g * group_bytes..][..group_bytes];
            for (i, w) in out.iter_mut().enumerate() {
                let code = match self.bits {
                    Bits::Four => (codes[i / 2] >> (4 * (i % 2))) & 15,
                    Bits::Eight => codes[i],
                };
                *w = scale * f32::from(code) + bias;
            }
        }
    }
}

/// Element `index` of a little-endian BF16 array of any alignment, widened.
#[inline]
pub fn bf16_at(bytes: &[u8], index: usize) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(bits: Bits, codes: Vec<u8>, scales: [f32; 2], biases: [f32; 2]) -> QuantMatrix {
        let bf16 = |v: [f32; 2]| v.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect::<Vec<u8>>();
        QuantMatrix {
            name: "m".into(),
            bits,
            experts: 1,
            outputs: 1,
            inputs: 128,
            codes: TensorBytes::from_vec(codes),
            scales: TensorBytes::from_vec(bf16(scales)),
            biases: TensorBytes::from_vec(bf16(biases)),
        }
    }

    #[test]
    fn four_bit_rows_have_the_even_column_in_the_low_nibble_and_signed_scales() {
        let codes: Vec<u8> = (0..64).map(|i| (i % 16) | ((15 - i % 16) << 4)).collect();
        let m = matrix(Bits::Four, codes, [0.5, -2.0], [1.0, 3.0]);
        let mut row = [0.0; 128];
        m.dequantize_row(0, &mut row);
        assert_eq!((row[0], row[1], row[2], row[3]), (1.0, 8.5, 1.5, 8.0));
        assert_eq!((row[64], row[65]), (3.0, -27.0));
    }

    #[test]
    fn eight_bit_rows_are_plain_unsigned_bytes() {
        let m = matrix(Bits::Eight, (0..128).map(|i| i * 2).collect(), [1.0, 0.25], [0.0, -1.0]);
        let mut row = [0.0; 128];
        m.dequantize_row(0, &mut row);
        assert_eq!((row[0], row[63], row[64], row[127]), (0.0, 126.0, 31.0, 62.5));
    }
}
