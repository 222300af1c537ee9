//! Rows of the KV cache: the 256 keys or values of a token and head, in 16 blocks of 16, f32 or BF16.
//!
//! A block widens into two vectors. Two adjacent BF16 values are the halves of a word, of which a shift makes the even
//! vector and a mask the odd one; so queries and sums meet such rows in the order even, odd of each block.

use lily_model::Shape;

use super::D;
use crate::kernels::{LANES, Lanes, prefetch};

/// Values of a block.
pub(super) const BLOCK: usize = 2 * LANES;
/// Blocks of a row.
pub(super) const BLOCKS: usize = Shape::HEAD_DIM / BLOCK;

/// One token of one head.
pub(crate) type Row<B> = [B; BLOCKS];

/// 16 values as they are stored.
pub(crate) trait Block: Copy + Send + Sync {
    /// Whether its vectors are the even and the odd values; else they are the first and the last eight.
    const EVEN_ODD: bool;

    /// One of its vectors.
    fn half(&self, half: usize) -> Lanes;

    /// As it stores these values.
    fn of(values: &[f32; BLOCK]) -> Self;
}

impl Block for [f32; BLOCK] {
    const EVEN_ODD: bool = false;

    #[inline(always)]
    fn half(&self, half: usize) -> Lanes {
        self.as_chunks().0[half]
    }

    fn of(values: &[f32; BLOCK]) -> Self {
        *values
    }
}

/// Words of two BF16 values, the even one in the low half: in memory the values are in their own order.
impl Block for [u32; LANES] {
    const EVEN_ODD: bool = true;

    #[inline(always)]
    fn half(&self, half: usize) -> Lanes {
        let mut lanes = [0.0; LANES];
        for (lane, word) in lanes.iter_mut().zip(self) {
            *lane = f32::from_bits(if half == 0 { word << 16 } else { word & 0xFFFF_0000 });
        }
        lanes
    }

    fn of(values: &[f32; BLOCK]) -> Self {
        let mut words = [0; LANES];
        for (word, [even, odd]) in words.iter_mut().zip(values.as_chunks().0) {
            *word = u32::from(narrow(*even)) | u32::from(narrow(*odd)) << 16;
        }
        words
    }
}

/// To BF16, to nearest even.
fn narrow(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

/// Writes a row.
pub(crate) fn store<B: Block>(values: &[f32; D], row: &mut Row<B>) {
    for (block, values) in row.iter_mut().zip(values.as_chunks().0) {
        *block = B::of(values);
    }
}

/// Brings 256 values into the order in which they meet rows of `B`.
#[inline(always)]
pub(super) fn to_row_order<B: Block>(values: &mut [f32]) {
    if B::EVEN_ODD {
        for block in values.as_chunks_mut::<BLOCK>().0 {
            let plain = *block;
            for i in 0..BLOCK {
                block[i / 2 + i % 2 * LANES] = plain[i];
            }
        }
    }
}

/// Back from that order.
#[inline(always)]
pub(super) fn from_row_order<B: Block>(values: &mut [f32]) {
    if B::EVEN_ODD {
        for block in values.as_chunks_mut::<BLOCK>().0 {
            let ordered = *block;
            for i in 0..BLOCK {
                block[i] = ordered[i / 2 + i % 2 * LANES];
            }
        }
    }
}

/// Asks for rows before they are needed.
#[inline(always)]
pub(super) fn prefetch_rows<B: Block>(rows: &[Row<B>]) {
    const LINE: usize = 64;
    for line in 0..size_of_val(rows) / LINE {
        prefetch(rows.as_ptr().cast::<u8>().wrapping_add(line * LINE));
    }
}
