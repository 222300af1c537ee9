//! [`gemm`](super::gemm) with the tile registers of AMX: 16 tokens x 16 rows x a group of 64 columns in one instruction for
//! the high and one for the low bytes of the inputs. What bounds it are the sixteen times six wide instructions that then
//! scale the products and add them up.
//!
//! The intrinsics are not stable in Rust, so the instructions are written out.

use std::arch::asm;
use std::arch::x86_64::_mm512_loadu_si512;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::avx512::{DEPTH, Tile, add_group, load, store, unpack};
use super::{MOST_TOKENS, Place, TILE_ROWS};
use crate::kernels::activations::{GROUP, Inputs, Tokens};
use crate::kernels::gemv::{Packed, PackedRows};

/// Tokens of a tile register.
const TILE_TOKENS: usize = 16;
/// Tiles of rows that are unpacked side by side, so that the inputs are laid out once for all of them.
const BAND: usize = 4;
/// Bytes between the rows of a tile in memory.
const STRIDE: usize = 64;

/// Up to 16 tokens and [`DEPTH`] groups as tile registers take them.
#[repr(align(64))]
struct Block {
    /// High, then low bytes.
    values: [[[[i8; GROUP]; TILE_TOKENS]; 2]; DEPTH],
    scales: [[f32; TILE_TOKENS]; DEPTH],
    sums: [[f32; TILE_TOKENS]; DEPTH],
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn gemm(w: Packed<'_>, x: Tokens<'_>, tokens: Range<usize>, rows: Range<usize>, out: Place<'_>) {
    let registers = Registers::configure();
    let count = tokens.len();
    let mut band = [Tile::EMPTY; BAND];
    let mut block = Block {
        values: [[[[0; GROUP]; TILE_TOKENS]; 2]; DEPTH],
        scales: [[0.0; TILE_TOKENS]; DEPTH],
        sums: [[0.0; TILE_TOKENS]; DEPTH],
    };
    let mut sums = [[[0.0; TILE_ROWS]; MOST_TOKENS]; BAND];
    for row in (0..rows.len()).step_by(BAND * TILE_ROWS) {
        let height = rows.len() - row;
        let tiles = height.div_ceil(TILE_ROWS).min(BAND);
        for sums in &mut sums[..tiles] {
            sums[..count].fill([0.0; TILE_ROWS]);
        }
        for group in (0..w.groups).step_by(DEPTH) {
            let depth = DEPTH.min(w.groups - group);
            for (i, tile) in band[..tiles].iter_mut().enumerate() {
                // Rows beyond the last are computed from it and not stored.
                let packed: [PackedRows<'_>; TILE_ROWS] =
                    std::array::from_fn(|r| w.rows(rows.start + row + (TILE_ROWS * i + r).min(height - 1), 1));
                unpack(w.bits, &packed, group, depth, tile);
            }
            for from in (0..count).step_by(TILE_TOKENS) {
                let some = TILE_TOKENS.min(count - from);
                for t in 0..some {
                    block.set(t, x.row(tokens.start + from + t), group, depth);
                }
                for (tile, sums) in band[..tiles].iter().zip(&mut sums) {
                    let sums = &mut sums[from..];
                    // What a tail computes beyond the last token meets old inputs and is not stored.
                    match some.div_ceil(4) {
                        1 => multiply::<4>(&registers, tile, &block, depth, sums),
                        2 => multiply::<8>(&registers, tile, &block, depth, sums),
                        3 => multiply::<12>(&registers, tile, &block, depth, sums),
                        _ => multiply::<16>(&registers, tile, &block, depth, sums),
                    }
                }
            }
        }
        for token in 0..count {
            for (i, sums) in sums[..tiles].iter().enumerate() {
                let first = row + TILE_ROWS * i;
                let len = TILE_ROWS.min(rows.len() - first);
                // SAFETY: the caller of `gemm` keeps other workers away from these rows.
                unsafe { out.part(token, first, len) }.copy_from_slice(&sums[token][..len]);
            }
        }
    }
}

impl Block {
    /// Token `t` becomes groups `group .. group + depth` of `x`.
    #[inline(always)]
    fn set(&mut self, t: usize, x: Inputs<'_>, group: usize, depth: usize) {
        for g in 0..depth {
            let values = &x.values[(group + g) * GROUP..][..GROUP];
            for (i, values) in values.as_chunks::<{ GROUP / 2 }>().0.iter().enumerate() {
                // SAFETY: any bytes are bytes, and 32 pairs are 64.
                self.values[g][i][t] = unsafe { std::mem::transmute::<[i16; GROUP / 2], [i8; GROUP]>(*values) };
            }
            self.scales[g][t] = x.scales[group + g];
            self.sums[g][t] = x.sums[group + g];
        }
    }
}

/// Adds the products of the tile with the first `TOKENS` tokens of the block to `sums`.
#[inline]
#[target_feature(enable = "avx512f")]
fn multiply<const TOKENS: usize>(
    registers: &Registers,
    tile: &Tile,
    block: &Block,
    depth: usize,
    sums: &mut [[f32; TILE_ROWS]],
) {
    let sums = &mut sums[..TOKENS].as_chunks_mut::<TOKENS>().0[0];
    let mut held = load(sums);
    for g in 0..depth {
        let products = registers.multiply(&block.values[g], &tile.codes[g]);
        for t in 0..TOKENS {
            // SAFETY: 16 numbers each.
            let products = unsafe {
                [_mm512_loadu_si512(products[0][t].as_ptr().cast()), _mm512_loadu_si512(products[1][t].as_ptr().cast())]
            };
            held[t] = add_group(held[t], tile, g, products, block.scales[g][t], block.sums[g][t]);
        }
    }
    store(&held, sums);
}

/// The tile registers of this thread, each 16 rows of 64 bytes, for as long as it lives; then the thread is without them
/// again, which makes it cheaper to switch from.
struct Registers(PhantomData<*const ()>);

impl Registers {
    /// Only where [`Isa::Amx`](crate::device::Isa) was found.
    fn configure() -> Registers {
        #[repr(align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for register in 0..8 {
            config.0[16 + 2 * register] = STRIDE as u8;
            config.0[48 + register] = TILE_TOKENS as u8;
        }
        // SAFETY: reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        Registers(PhantomData)
    }

    /// The products of 16 tokens' high and low bytes with 16 rows, `[high and low, token, row]`.
    #[inline(always)]
    fn multiply(
        &self,
        [high, low]: &[[[i8; GROUP]; TILE_TOKENS]; 2],
        codes: &[[u8; 4 * TILE_ROWS]; GROUP / 4],
    ) -> [[[i32; TILE_ROWS]; TILE_TOKENS]; 2] {
        let mut products = MaybeUninit::<[[[i32; TILE_ROWS]; TILE_TOKENS]; 2]>::uninit();
        // SAFETY: the registers are configured; each load reads and each store writes 16 rows of 64 bytes.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm4, [{codes} + {stride} * 1]",
                "tileloadd tmm2, [{high} + {stride} * 1]",
                "tdpbsud tmm0, tmm2, tmm4",
                "tileloadd tmm3, [{low} + {stride} * 1]",
                "tdpbsud tmm1, tmm3, tmm4",
                "tilestored [{to} + {stride} * 1], tmm0",
                "tilestored [{to} + {stride} * 1 + 1024], tmm1",
                codes = in(reg) codes,
                high = in(reg) high,
                low = in(reg) low,
                to = in(reg) products.as_mut_ptr(),
                stride = in(reg) STRIDE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags),
            );
            products.assume_init()
        }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: nothing of this thread uses the registers any more.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
