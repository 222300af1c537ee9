//! [`gemm`](super::gemm) with NEON: 3 tokens x 16 rows, which are 24 sums: of high and low bytes apart with `sdot`, of two
//! rows and both kinds of byte in one register with `usmmla`. With the inputs and a vector of codes they fill 31 or 28 of
//! 32 registers.
//!
//! Run on emulated processors only.

#![expect(clippy::needless_range_loop, reason = "indices say which registers meet; most loops index several arrays")]

use std::arch::aarch64::*;
use std::hint::black_box;
use std::ops::Range;

use super::{MOST_TOKENS, Place, TILE_ROWS, gemm_for};
use crate::kernels::activations::{GROUP, Inputs, Tokens};
use crate::kernels::gemv::neon::{
    centre, dot_lane, group_of, load_run, load_runs, multiply, pair_planes, planes, together, widen,
};
use crate::kernels::gemv::{GROUP4, GROUP8, Packed, PackedRows, padded};
use lily_model::Bits;

/// Groups unpacked at a time.
const DEPTH: usize = 4;
/// Vectors of 16 bytes in the codes of a group of 16 rows.
const VECTORS: usize = GROUP * TILE_ROWS / 16;
/// Rows of a vector of sums.
const QUAD: usize = 4;
/// Vectors of sums of a token.
const QUADS: usize = TILE_ROWS / QUAD;

/// 16 rows and up to [`DEPTH`] groups, unpacked to bytes in the order in which they are multiplied: of every four rows four
/// columns for `sdot`, of every two rows eight columns for `usmmla`.
#[repr(align(64))]
struct Tile {
    codes: [[[u8; 16]; VECTORS]; DEPTH],
    scales: [[f32; TILE_ROWS]; DEPTH],
    biases: [[f32; TILE_ROWS]; DEPTH],
    /// Whether 128 was taken from the codes, see [`centre`].
    centred: bool,
}

impl Tile {
    const EMPTY: Tile = Tile {
        codes: [[[0; 16]; VECTORS]; DEPTH],
        scales: [[0.0; TILE_ROWS]; DEPTH],
        biases: [[0.0; TILE_ROWS]; DEPTH],
        centred: false,
    };
}

gemm_for!(dotprod, "neon,dotprod", unpack_dotprod, multiply_dotprod, 3, 1);
gemm_for!(i8mm, "neon,i8mm", unpack_i8mm, multiply_i8mm, 3, 1);

/// Unpacks groups `group .. group + depth` of 16 rows for `sdot`.
#[target_feature(enable = "neon")]
fn unpack_dotprod(bits: Bits, rows: &[PackedRows<'_>; TILE_ROWS], group: usize, depth: usize, tile: &mut Tile) {
    unpack_scales(rows, group, depth, tile);
    tile.centred = bits == Bits::Eight;
    for (g, codes) in tile.codes[..depth].iter_mut().enumerate() {
        for (q, rows) in rows.as_chunks::<QUAD>().0.iter().enumerate() {
            let planes = rows.each_ref().map(|row| {
                let codes = group_codes(bits, row, group + g);
                // SAFETY: the bytes of a group.
                unsafe {
                    match bits {
                        Bits::Four => planes::<false>(codes.as_ptr()),
                        Bits::Eight => planes::<true>(codes.as_ptr()),
                    }
                }
            });
            for run in 0..4 {
                let words = transpose(planes.each_ref().map(|planes| vreinterpretq_u32_s8(planes[run])));
                for (w, word) in words.into_iter().enumerate() {
                    put(&mut codes[(4 * run + w) * QUADS + q], vreinterpretq_u8_u32(word));
                }
            }
        }
    }
}

/// The same for `usmmla`.
#[target_feature(enable = "neon")]
fn unpack_i8mm(bits: Bits, rows: &[PackedRows<'_>; TILE_ROWS], group: usize, depth: usize, tile: &mut Tile) {
    unpack_scales(rows, group, depth, tile);
    for (g, codes) in tile.codes[..depth].iter_mut().enumerate() {
        for (pair, rows) in rows.as_chunks::<2>().0.iter().enumerate() {
            let rows = rows.each_ref().map(|row| group_codes(bits, row, group + g).as_ptr());
            // SAFETY: the bytes of a group each.
            let planes = unsafe {
                match bits {
                    Bits::Four => pair_planes::<false>(rows),
                    Bits::Eight => pair_planes::<true>(rows),
                }
            };
            for (run, plane) in planes.into_iter().enumerate() {
                put(&mut codes[run * 2 * QUADS + pair], plane);
            }
        }
    }
}

/// The bytes of a row's group.
#[inline(always)]
fn group_codes<'a>(bits: Bits, row: &PackedRows<'a>, group: usize) -> &'a [u8] {
    let bytes = match bits {
        Bits::Four => GROUP4,
        Bits::Eight => GROUP8,
    };
    &row.codes[group * bytes..][..bytes]
}

#[inline]
#[target_feature(enable = "neon")]
fn unpack_scales(rows: &[PackedRows<'_>; TILE_ROWS], group: usize, depth: usize, tile: &mut Tile) {
    for (i, rows) in rows.as_chunks::<QUAD>().0.iter().enumerate() {
        widen_columns(rows.each_ref().map(|row| row.scales), group, depth, &mut tile.scales, QUAD * i);
        widen_columns(rows.each_ref().map(|row| row.biases), group, depth, &mut tile.biases, QUAD * i);
    }
}

/// The BF16 values of groups `group .. group + depth` of four rows, in f32, to columns `column ..` of `to`.
#[inline]
#[target_feature(enable = "neon")]
fn widen_columns(rows: [&[u8]; QUAD], group: usize, depth: usize, to: &mut [[f32; TILE_ROWS]; DEPTH], column: usize) {
    let words = rows.map(|row| {
        let room = padded::<{ 2 * DEPTH }>(row, group, depth);
        vreinterpretq_u32_f32(widen(vcreate_u16(u64::from_le_bytes(room))))
    });
    for (to, values) in to.iter_mut().zip(transpose(words)) {
        // SAFETY: four floats of the slice.
        unsafe { vst1q_u32(to[column..][..QUAD].as_mut_ptr().cast(), values) };
    }
}

/// Four rows of four words to four columns of them.
#[inline]
#[target_feature(enable = "neon")]
fn transpose([a, b, c, d]: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    let wide = |x| vreinterpretq_u64_u32(x);
    let (even_a, odd_a) = (wide(vtrn1q_u32(a, b)), wide(vtrn2q_u32(a, b)));
    let (even_c, odd_c) = (wide(vtrn1q_u32(c, d)), wide(vtrn2q_u32(c, d)));
    let columns =
        [vtrn1q_u64(even_a, even_c), vtrn1q_u64(odd_a, odd_c), vtrn2q_u64(even_a, even_c), vtrn2q_u64(odd_a, odd_c)];
    columns.map(|column| vreinterpretq_u32_u64(column))
}

#[inline]
#[target_feature(enable = "neon")]
fn put(to: &mut [u8; 16], codes: uint8x16_t) {
    // SAFETY: 16 bytes.
    unsafe { vst1q_u8(to.as_mut_ptr(), codes) };
}

#[inline]
#[target_feature(enable = "neon")]
fn get(from: &[u8; 16]) -> uint8x16_t {
    // SAFETY: 16 bytes.
    unsafe { vld1q_u8(from.as_ptr()) }
}

/// Adds the products of the tile with some tokens to `sums`. A product does not depend on how many they are.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn multiply_dotprod<const TOKENS: usize>(
    tile: &Tile,
    x: &[Inputs<'_>; TOKENS],
    group: usize,
    depth: usize,
    sums: &mut [[f32; TILE_ROWS]; TOKENS],
) {
    // Unrolled as a whole, the loop over runs would keep too much in flight and spill its sums.
    let runs = black_box(4);
    for g in 0..depth {
        let values = group_of(x, group + g);
        let mut products = [[[vdupq_n_s32(0); 2]; QUADS]; TOKENS];
        if tile.centred {
            for t in 0..TOKENS {
                let centre = vdupq_n_s32(vaddvq_s32(centre(&load_runs(values[t]))));
                for q in 0..QUADS {
                    products[t][q][1] = centre;
                }
            }
        }
        for (run, codes) in tile.codes[g].as_chunks().0[..runs].iter().enumerate() {
            let mut inputs = [[vdupq_n_s8(0); 2]; TOKENS];
            for t in 0..TOKENS {
                inputs[t] = [load_run(values[t], 2 * run), load_run(values[t], 2 * run + 1)];
            }
            add_columns::<0, TOKENS>(codes, &inputs, &mut products);
            add_columns::<1, TOKENS>(codes, &inputs, &mut products);
            add_columns::<2, TOKENS>(codes, &inputs, &mut products);
            add_columns::<3, TOKENS>(codes, &inputs, &mut products);
        }
        for t in 0..TOKENS {
            let mut quads = [vdupq_n_s32(0); QUADS];
            for q in 0..QUADS {
                let [high, low] = products[t][q];
                quads[q] = together(high, low);
            }
            add_scaled(tile, g, &x[t], group, quads, &mut sums[t]);
        }
    }
}

/// Columns `4 LANE ..` of a run of all rows times those columns of the tokens.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_columns<const LANE: u8, const TOKENS: usize>(
    codes: &[[u8; 16]; 4 * QUADS],
    inputs: &[[int8x16_t; 2]; TOKENS],
    products: &mut [[[int32x4_t; 2]; QUADS]; TOKENS],
) {
    for q in 0..QUADS {
        let codes = vreinterpretq_s8_u8(get(&codes[usize::from(LANE) * QUADS + q]));
        for t in 0..TOKENS {
            for i in 0..2 {
                products[t][q][i] = dot_lane::<LANE>(products[t][q][i], codes, inputs[t][i]);
            }
        }
    }
}

/// The same with `usmmla`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn multiply_i8mm<const TOKENS: usize>(
    tile: &Tile,
    x: &[Inputs<'_>; TOKENS],
    group: usize,
    depth: usize,
    sums: &mut [[f32; TILE_ROWS]; TOKENS],
) {
    // As in `multiply_dotprod`.
    let runs = black_box(8);
    for g in 0..depth {
        let values = group_of(x, group + g);
        let mut products = [[vdupq_n_s32(0); 2 * QUADS]; TOKENS];
        for (run, codes) in tile.codes[g].as_chunks::<{ 2 * QUADS }>().0[..runs].iter().enumerate() {
            let mut inputs = [vdupq_n_s8(0); TOKENS];
            for t in 0..TOKENS {
                inputs[t] = load_run(values[t], run);
            }
            for pair in 0..2 * QUADS {
                let codes = get(&codes[pair]);
                for t in 0..TOKENS {
                    products[t][pair] = multiply(products[t][pair], codes, inputs[t]);
                }
            }
        }
        for t in 0..TOKENS {
            let mut quads = [vdupq_n_s32(0); QUADS];
            for q in 0..QUADS {
                let (a, b) = (products[t][2 * q], products[t][2 * q + 1]);
                quads[q] = together(vuzp1q_s32(a, b), vuzp2q_s32(a, b));
            }
            add_scaled(tile, g, &x[t], group, quads, &mut sums[t]);
        }
    }
}

/// Adds a group's products, scaled, and its bias.
#[inline]
#[target_feature(enable = "neon")]
fn add_scaled(
    tile: &Tile,
    g: usize,
    x: &Inputs<'_>,
    group: usize,
    products: [int32x4_t; QUADS],
    sums: &mut [f32; TILE_ROWS],
) {
    let (x_scale, x_sum) = (vdupq_n_f32(x.scales[group + g]), vdupq_n_f32(x.sums[group + g]));
    for (q, product) in products.into_iter().enumerate() {
        let at = QUAD * q;
        // SAFETY: four floats of 16, three times.
        let (scale, bias, sum) = unsafe {
            (
                vld1q_f32(tile.scales[g].as_ptr().add(at)),
                vld1q_f32(tile.biases[g].as_ptr().add(at)),
                vld1q_f32(sums.as_ptr().add(at)),
            )
        };
        let product = vmulq_f32(vcvtq_f32_s32(product), x_scale);
        let sum = vfmaq_f32(vfmaq_f32(sum, bias, x_sum), product, scale);
        // SAFETY: four floats of 16.
        unsafe { vst1q_f32(sums.as_mut_ptr().add(at), sum) };
    }
}
