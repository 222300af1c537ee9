//! [`gemm`](super::gemm) with AVX2: 4 tokens x 16 rows, which are 8 sums; with two vectors of codes, an input and a
//! product they fill 16 registers (6 x 16 spilled and lost 10 to 25 % on Zen 3).

use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

use super::{MOST_TOKENS, Place, TILE_ROWS, gemm_for};
use crate::kernels::activations::{GROUP, Inputs, Tokens};
use crate::kernels::gemv::avx2::{multiply_add, planes};
use crate::kernels::gemv::{GROUP4, GROUP8, Packed, PackedRows, padded};
use lily_model::Bits;

/// Groups unpacked at a time.
const DEPTH: usize = 4;
/// Pairs of inputs of a group.
const PAIRS: usize = GROUP / 2;

/// 16 rows and up to [`DEPTH`] groups, unpacked: per group and pair of columns, the two codes of each row side by side.
#[repr(align(64))]
struct Tile {
    codes: [[[i16; 2 * TILE_ROWS]; PAIRS]; DEPTH],
    scales: [[f32; TILE_ROWS]; DEPTH],
    biases: [[f32; TILE_ROWS]; DEPTH],
}

impl Tile {
    const EMPTY: Tile = Tile {
        codes: [[[0; 2 * TILE_ROWS]; PAIRS]; DEPTH],
        scales: [[0.0; TILE_ROWS]; DEPTH],
        biases: [[0.0; TILE_ROWS]; DEPTH],
    };
}

gemm_for!(gemm, "avx2,fma", unpack, multiply, 4, 2);

/// Unpacks groups `group .. group + depth` of 16 rows.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack(bits: Bits, rows: &[PackedRows<'_>; TILE_ROWS], group: usize, depth: usize, tile: &mut Tile) {
    for (i, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
        widen_columns(rows.each_ref().map(|row| row.scales), group, depth, &mut tile.scales, 4 * i);
        widen_columns(rows.each_ref().map(|row| row.biases), group, depth, &mut tile.biases, 4 * i);
    }
    for (g, codes) in tile.codes[..depth].iter_mut().enumerate() {
        for (half, rows) in rows.as_chunks::<8>().0.iter().enumerate() {
            match bits {
                Bits::Four => unpack4(rows, group + g, codes, half),
                Bits::Eight => unpack8(rows, group + g, codes, half),
            }
        }
    }
}

/// The BF16 values of groups `group .. group + depth` of four rows, in f32, to columns `column ..` of `to`.
#[inline]
#[target_feature(enable = "avx2")]
fn widen_columns(rows: [&[u8]; 4], group: usize, depth: usize, to: &mut [[f32; TILE_ROWS]; DEPTH], column: usize) {
    let mut words = [_mm_setzero_si128(); 4];
    for (word, row) in words.iter_mut().zip(rows) {
        let room = padded::<{ 2 * DEPTH }>(row, group, depth);
        *word = _mm_slli_epi32::<16>(_mm_cvtepu16_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(room))));
    }
    let (a, b) = (_mm_unpacklo_epi32(words[0], words[1]), _mm_unpackhi_epi32(words[0], words[1]));
    let (c, d) = (_mm_unpacklo_epi32(words[2], words[3]), _mm_unpackhi_epi32(words[2], words[3]));
    let columns =
        [_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d), _mm_unpackhi_epi64(b, d)];
    for (to, values) in to.iter_mut().zip(columns) {
        // SAFETY: four floats of the slice.
        unsafe { _mm_storeu_si128(to[column..][..4].as_mut_ptr().cast(), values) };
    }
}

/// A group of eight rows of 4-bit codes: words of eight columns are transposed, then taken apart.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack4(rows: &[PackedRows<'_>; 8], group: usize, codes: &mut [[i16; 2 * TILE_ROWS]; PAIRS], half: usize) {
    let low = _mm256_set1_epi16(15);
    let mut words = [_mm256_setzero_si256(); 8];
    for (word, row) in words.iter_mut().zip(rows) {
        let bytes = &row.codes[group * GROUP4..][..GROUP4];
        // SAFETY: 32 bytes.
        *word = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    }
    for (v, word) in transpose(words).into_iter().enumerate() {
        let planes = [
            _mm256_and_si256(word, low),
            _mm256_and_si256(_mm256_srli_epi16::<4>(word), low),
            _mm256_and_si256(_mm256_srli_epi16::<8>(word), low),
            _mm256_srli_epi16::<12>(word),
        ];
        for (e, plane) in planes.into_iter().enumerate() {
            put(&mut codes[8 * e + v], half, plane);
        }
    }
}

/// The same for 8-bit codes: pairs of codes are transposed.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack8(rows: &[PackedRows<'_>; 8], group: usize, codes: &mut [[i16; 2 * TILE_ROWS]; PAIRS], half: usize) {
    let mut pairs = [[_mm256_setzero_si256(); 8]; 4];
    for (i, row) in rows.iter().enumerate() {
        let bytes = &row.codes[group * GROUP8..][..GROUP8];
        // SAFETY: the bytes of a group.
        let planes = unsafe { planes::<true>(bytes.as_ptr()) };
        for e in 0..4 {
            pairs[e][i] = planes[e];
        }
    }
    for (e, pairs) in pairs.into_iter().enumerate() {
        for (v, pair) in transpose(pairs).into_iter().enumerate() {
            put(&mut codes[8 * e + v], half, pair);
        }
    }
}

/// Eight rows of eight words to eight columns of them.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(a: [__m256i; 8]) -> [__m256i; 8] {
    let (mut b, mut c) = (a, a);
    for i in 0..4 {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for i in [0, 4] {
        c[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        c[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        c[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        c[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for i in 0..4 {
        b[i] = _mm256_permute2x128_si256::<0x20>(c[i], c[i + 4]);
        b[i + 4] = _mm256_permute2x128_si256::<0x31>(c[i], c[i + 4]);
    }
    b
}

#[inline]
#[target_feature(enable = "avx2")]
fn put(pair: &mut [i16; 2 * TILE_ROWS], half: usize, codes: __m256i) {
    // SAFETY: 16 values from 0 or from 16 of 32.
    unsafe { _mm256_storeu_si256(pair[16 * half..][..16].as_mut_ptr().cast(), codes) };
}

/// Adds the products of the tile with some tokens to `sums`. A product does not depend on how many they are.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply<const TOKENS: usize>(
    tile: &Tile,
    x: &[Inputs<'_>; TOKENS],
    group: usize,
    depth: usize,
    sums: &mut [[f32; TILE_ROWS]; TOKENS],
) {
    let mut held = [[_mm256_setzero_ps(); 2]; TOKENS];
    for (held, sums) in held.iter_mut().zip(&*sums) {
        // SAFETY: eight floats of 16 each.
        *held = unsafe { [_mm256_loadu_ps(sums.as_ptr()), _mm256_loadu_ps(sums.as_ptr().add(8))] };
    }
    // Unrolled as a whole, the loop over pairs would keep too much in flight and spill its sums.
    let pairs_of_group = black_box(PAIRS);
    for g in 0..depth {
        let pairs = x.each_ref().map(|x| x.values[(group + g) * GROUP..][..GROUP].as_ptr().cast::<i32>());
        let mut products = [[_mm256_setzero_si256(); 2]; TOKENS];
        let codes = tile.codes[g].as_ptr().cast::<__m256i>();
        for pair in 0..pairs_of_group {
            // SAFETY: pair `pair` of 32, two vectors each, in a tile aligned to 64 bytes.
            let (a, b) =
                unsafe { (_mm256_load_si256(codes.add(2 * pair)), _mm256_load_si256(codes.add(2 * pair + 1))) };
            for t in 0..TOKENS {
                // SAFETY: pair `pair` of the 32 of a group.
                let input = _mm256_set1_epi32(unsafe { pairs[t].add(pair).read_unaligned() });
                products[t][0] = multiply_add(products[t][0], a, input);
                products[t][1] = multiply_add(products[t][1], b, input);
            }
        }
        for i in 0..2 {
            // SAFETY: eight floats of 16.
            let (scale, bias) = unsafe {
                (
                    _mm256_loadu_ps(tile.scales[g].as_ptr().add(8 * i)),
                    _mm256_loadu_ps(tile.biases[g].as_ptr().add(8 * i)),
                )
            };
            for t in 0..TOKENS {
                let product = _mm256_mul_ps(_mm256_cvtepi32_ps(products[t][i]), _mm256_set1_ps(x[t].scales[group + g]));
                let biased = _mm256_fmadd_ps(bias, _mm256_set1_ps(x[t].sums[group + g]), held[t][i]);
                held[t][i] = _mm256_fmadd_ps(product, scale, biased);
            }
        }
    }
    for (held, sums) in held.iter().zip(sums) {
        // SAFETY: eight floats of 16 each.
        unsafe {
            _mm256_storeu_ps(sums.as_mut_ptr(), held[0]);
            _mm256_storeu_ps(sums.as_mut_ptr().add(8), held[1]);
        }
    }
}
