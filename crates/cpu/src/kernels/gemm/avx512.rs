//! [`gemm`](super::gemm) with AVX-512: 12 tokens x 16 rows, 24 sums of high and of low bytes in a wide register each, enough
//! to hide the latency of the multiply-add.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

use super::{MOST_TOKENS, Place, TILE_ROWS, gemm_for};
use crate::kernels::activations::{GROUP, Inputs, Tokens};
use crate::kernels::gemv::avx512::bytes;
use crate::kernels::gemv::{GROUP4, GROUP8, Packed, PackedRows, padded};
use lily_model::Bits;

/// Groups unpacked at a time.
pub(super) const DEPTH: usize = 4;
/// Fours of columns in a group.
const QUADS: usize = GROUP / 4;

/// 16 rows and up to [`DEPTH`] groups, unpacked: per group and four columns, in the order of [`Inputs`], the codes of each
/// row side by side. A group is what a tile register of AMX holds.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Tile {
    pub(super) codes: [[[u8; 4 * TILE_ROWS]; QUADS]; DEPTH],
    pub(super) scales: [[f32; TILE_ROWS]; DEPTH],
    pub(super) biases: [[f32; TILE_ROWS]; DEPTH],
}

impl Tile {
    pub(super) const EMPTY: Tile = Tile {
        codes: [[[0; 4 * TILE_ROWS]; QUADS]; DEPTH],
        scales: [[0.0; TILE_ROWS]; DEPTH],
        biases: [[0.0; TILE_ROWS]; DEPTH],
    };
}

gemm_for!(gemm, "avx512f,avx512bw,avx512vl,avx512vnni", unpack, multiply, 12, 4);

/// Unpacks groups `group .. group + depth` of 16 rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn unpack(bits: Bits, rows: &[PackedRows<'_>; TILE_ROWS], group: usize, depth: usize, tile: &mut Tile) {
    widen_columns(rows.each_ref().map(|row| row.scales), group, depth, &mut tile.scales);
    widen_columns(rows.each_ref().map(|row| row.biases), group, depth, &mut tile.biases);
    for (g, quads) in tile.codes[..depth].iter_mut().enumerate() {
        match bits {
            Bits::Four => unpack4(rows, group + g, quads),
            Bits::Eight => unpack8(rows, group + g, quads),
        }
    }
}

/// The BF16 values of groups `group .. group + depth` of the rows, in f32; then zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widen_columns(rows: [&[u8]; TILE_ROWS], group: usize, depth: usize, to: &mut [[f32; TILE_ROWS]; DEPTH]) {
    let fours = rows.map(|row| i64::from_le_bytes(padded::<{ 2 * DEPTH }>(row, group, depth)));
    // SAFETY: eight of 16 numbers each.
    let (low, high) =
        unsafe { (_mm512_loadu_si512(fours.as_ptr().cast()), _mm512_loadu_si512(fours[8..].as_ptr().cast())) };
    // Value g of the row of each lane into the high half of the lane.
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let first = _mm512_slli_epi32::<18>(lanes);
    for (g, to) in to.iter_mut().enumerate() {
        let order = _mm512_add_epi32(first, _mm512_set1_epi32((g as i32) << 16));
        let values = _mm512_maskz_permutex2var_epi16(0xaaaa_aaaa, low, order, high);
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), values) };
    }
}

/// A group of 4-bit codes: words of eight columns are transposed, then taken apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn unpack4(rows: &[PackedRows<'_>; TILE_ROWS], group: usize, quads: &mut [[u8; 4 * TILE_ROWS]; QUADS]) {
    let low = _mm512_set1_epi8(15);
    let words = rows.each_ref().map(|row| {
        let codes = &row.codes[group * GROUP4..][..GROUP4];
        // SAFETY: 32 bytes.
        unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
    });
    for (v, words) in transpose(words).into_iter().enumerate() {
        put(&mut quads[v], _mm512_and_si512(words, low));
        put(&mut quads[v + 8], _mm512_and_si512(_mm512_srli_epi16::<4>(words), low));
    }
}

/// The same for 8-bit codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn unpack8(rows: &[PackedRows<'_>; TILE_ROWS], group: usize, quads: &mut [[u8; 4 * TILE_ROWS]; QUADS]) {
    let rows = rows.each_ref().map(|row| {
        let codes = &row.codes[group * GROUP8..][..GROUP8];
        // SAFETY: the bytes of a group.
        unsafe { bytes::<true>(codes.as_ptr()) }
    });
    let halves = [rows.map(|row| _mm512_castsi512_si256(row)), rows.map(|row| _mm512_extracti64x4_epi64::<1>(row))];
    for (half, words) in halves.into_iter().enumerate() {
        for (v, words) in transpose(words).into_iter().enumerate() {
            put(&mut quads[8 * half + v], words);
        }
    }
}

/// 16 rows of eight words to eight columns of them.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(a: [__m256i; TILE_ROWS]) -> [__m512i; 8] {
    let zero = _mm512_setzero_si512();
    let (mut b, mut c) = ([zero; 8], [zero; 8]);
    // Rows whose values meet in the same 16 bytes at last lie in the same half.
    for i in 0..4 {
        b[i] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a[i]), a[i + 4]);
        b[i + 4] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a[i + 8]), a[i + 12]);
    }
    for i in 0..4 {
        c[2 * i] = _mm512_unpacklo_epi32(b[2 * i], b[2 * i + 1]);
        c[2 * i + 1] = _mm512_unpackhi_epi32(b[2 * i], b[2 * i + 1]);
    }
    for i in [0, 4] {
        b[i] = _mm512_unpacklo_epi64(c[i], c[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(c[i], c[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(c[i + 1], c[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(c[i + 1], c[i + 3]);
    }
    for i in 0..4 {
        c[i] = _mm512_shuffle_i64x2::<0b10_00_10_00>(b[i], b[i + 4]);
        c[i + 4] = _mm512_shuffle_i64x2::<0b11_01_11_01>(b[i], b[i + 4]);
    }
    c
}

#[inline]
#[target_feature(enable = "avx512f")]
fn put(quad: &mut [u8; 4 * TILE_ROWS], codes: __m512i) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(quad.as_mut_ptr().cast(), codes) };
}

/// Adds the products of the tile with some tokens to `sums`. A product does not depend on how many they are.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn multiply<const TOKENS: usize>(
    tile: &Tile,
    x: &[Inputs<'_>; TOKENS],
    group: usize,
    depth: usize,
    sums: &mut [[f32; TILE_ROWS]; TOKENS],
) {
    let mut held = [_mm512_setzero_ps(); TOKENS];
    for t in 0..TOKENS {
        // SAFETY: 16 floats.
        held[t] = unsafe { _mm512_loadu_ps(sums[t].as_ptr()) };
    }
    // Unrolled as a whole, the loop over columns would keep too much in flight and spill its sums.
    let quads_of_group = black_box(QUADS);
    for g in 0..depth {
        let quads = x.each_ref().map(|x| x.values[(group + g) * GROUP..][..GROUP].as_ptr().cast::<i32>());
        let mut products = [[_mm512_setzero_si512(); 2]; TOKENS];
        let codes = tile.codes[g].as_ptr().cast::<__m512i>();
        for quad in 0..quads_of_group {
            // SAFETY: four columns of the 64 of a group, a vector each, in a tile aligned to 64 bytes.
            let codes = unsafe { _mm512_load_si512(codes.add(quad)) };
            for t in 0..TOKENS {
                // SAFETY: high bytes of the same columns, and low ones as many bytes later as a group has columns.
                let (high, low) =
                    unsafe { (quads[t].add(quad).read_unaligned(), quads[t].add(QUADS + quad).read_unaligned()) };
                products[t][0] = _mm512_dpbusd_epi32(products[t][0], codes, _mm512_set1_epi32(high));
                products[t][1] = _mm512_dpbusd_epi32(products[t][1], codes, _mm512_set1_epi32(low));
            }
        }
        for t in 0..TOKENS {
            let (scale, sum) = (x[t].scales[group + g], x[t].sums[group + g]);
            held[t] = add_group(held[t], tile, g, products[t], scale, sum);
        }
    }
    for t in 0..TOKENS {
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(sums[t].as_mut_ptr(), held[t]) };
    }
}

/// Adds the products of group `g` of the tile with the high and the low bytes of a token, whose scale and sum these are.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn add_group(
    held: __m512,
    tile: &Tile,
    g: usize,
    [high, low]: [__m512i; 2],
    scale: f32,
    sum: f32,
) -> __m512 {
    // SAFETY: 16 floats each.
    let (scales, biases) =
        unsafe { (_mm512_loadu_ps(tile.scales[g].as_ptr()), _mm512_loadu_ps(tile.biases[g].as_ptr())) };
    let product = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
    let biased = _mm512_fmadd_ps(biases, _mm512_set1_ps(sum), held);
    _mm512_fmadd_ps(_mm512_mul_ps(product, _mm512_set1_ps(scale)), scales, biased)
}
