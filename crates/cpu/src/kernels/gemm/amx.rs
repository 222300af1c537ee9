//! [`gemm`](super::gemm) with the tile registers of AMX: 16 tokens x 16 rows x a group of 64 columns in one instruction for
//! the high and one for the low bytes of the inputs. What bounds it are the sixteen times six wide instructions that then
//! scale the products and add them up.
//!
//! The intrinsics are not stable in Rust, so the instructions are written out.

use std::arch::asm;
use std::arch::x86_64::{_mm512_loadu_ps, _mm512_loadu_si512, _mm512_storeu_ps};
use std::marker::PhantomData;
use std::ops::Range;

use super::avx512::{DEPTH, Tile, add_group, unpack};
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

/// # Safety
/// [`Isa::Amx`](crate::device::Isa) was found.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn gemm(w: Packed<'_>, x: Tokens<'_>, tokens: Range<usize>, rows: Range<usize>, out: Place<'_>) {
    // SAFETY: the caller's promise.
    let registers = unsafe { Registers::configure() };
    let count = tokens.len();
    let mut band = [Tile::EMPTY; BAND];
    let mut block = Block {
        values: [[[[0; GROUP]; TILE_TOKENS]; 2]; DEPTH],
        scales: [[0.0; TILE_TOKENS]; DEPTH],
        sums: [[0.0; TILE_TOKENS]; DEPTH],
    };
    let mut products = [Products([[[0; TILE_ROWS]; TILE_TOKENS]; 2]); DEPTH];
    let mut sums = [[[0.0; TILE_ROWS]; MOST_TOKENS]; BAND];
    for row in (0..rows.len()).step_by(BAND * TILE_ROWS) {
        let height = rows.len() - row;
        let tiles = height.div_ceil(TILE_ROWS).min(BAND);
        // Rows beyond the last are computed from it and not stored.
        let packed: [[PackedRows<'_>; TILE_ROWS]; BAND] = std::array::from_fn(|i| {
            std::array::from_fn(|r| w.rows(rows.start + row + (TILE_ROWS * i + r).min(height - 1), 1))
        });
        for sums in &mut sums[..tiles] {
            sums[..count].fill([0.0; TILE_ROWS]);
        }
        for group in (0..w.groups).step_by(DEPTH) {
            let depth = DEPTH.min(w.groups - group);
            for (tile, packed) in band[..tiles].iter_mut().zip(&packed) {
                unpack(w.bits, packed, group, depth, tile);
            }
            for from in (0..count).step_by(TILE_TOKENS) {
                let some = TILE_TOKENS.min(count - from);
                for t in 0..some {
                    block.set(t, x.row(tokens.start + from + t), group, depth);
                }
                for (tile, sums) in band[..tiles].iter().zip(&mut sums) {
                    let groups = block.values.iter().zip(&tile.codes).zip(&mut products);
                    for ((values, codes), products) in groups.take(depth) {
                        registers.multiply(values, codes, products);
                    }
                    add(&products, tile, &block, &mut sums[from..from + some]);
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
    /// Token `t` becomes groups `group .. group + depth` of `x`; groups beyond them count for nothing.
    #[inline(always)]
    fn set(&mut self, t: usize, x: Inputs<'_>, group: usize, depth: usize) {
        for g in depth..DEPTH {
            (self.scales[g][t], self.sums[g][t]) = (0.0, 0.0);
        }
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

/// Adds the products of a tile with the tokens of a block to the sums of the tokens.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(products: &[Products; DEPTH], tile: &Tile, block: &Block, sums: &mut [[f32; TILE_ROWS]]) {
    for (t, sums) in sums.iter_mut().enumerate() {
        // SAFETY: 16 floats.
        let mut sum = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
        for g in 0..DEPTH {
            // SAFETY: 16 numbers each.
            let products = products[g].0.each_ref().map(|rows| unsafe { _mm512_loadu_si512(rows[t].as_ptr().cast()) });
            sum = add_group(sum, tile, g, products, block.scales[g][t], block.sums[g][t]);
        }
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sum) };
    }
}

/// Of a group of 16 tokens with 16 rows: `[high and low bytes, token, row]`.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Products([[[i32; TILE_ROWS]; TILE_TOKENS]; 2]);

/// The tile registers of this thread, each 16 rows of 64 bytes, for as long as it lives; then the thread is without them
/// again, which makes it cheaper to switch from.
struct Registers(PhantomData<*const ()>);

impl Registers {
    /// # Safety
    /// [`Isa::Amx`](crate::device::Isa) was found.
    unsafe fn configure() -> Registers {
        #[repr(align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for register in 0..8 {
            config.0[16 + 2 * register] = STRIDE as u8;
            config.0[48 + register] = TILE_TOKENS as u8;
        }
        // SAFETY: the caller promises the instruction, which reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        Registers(PhantomData)
    }

    /// The products of 16 tokens' high and low bytes with 16 rows.
    #[inline(always)]
    fn multiply(
        &self,
        [high, low]: &[[[i8; GROUP]; TILE_TOKENS]; 2],
        codes: &[[u8; 4 * TILE_ROWS]; GROUP / 4],
        products: &mut Products,
    ) {
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
                "tilestored [{products_high} + {stride} * 1], tmm0",
                "tilestored [{products_low} + {stride} * 1], tmm1",
                codes = in(reg) codes,
                high = in(reg) high,
                low = in(reg) low,
                products_high = in(reg) &mut products.0[0],
                products_low = in(reg) &mut products.0[1],
                stride = in(reg) STRIDE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags),
            );
        }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: nothing of this thread uses the registers any more.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
