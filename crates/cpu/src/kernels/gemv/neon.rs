//! [`gemv`](super::gemv) with NEON: with the dot products of bytes (`sdot`), or with the products of 2x8 by 8x2 bytes
//! (`usmmla`).
//!
//! Inputs come taken apart into signed bytes, `256 high + low`; the products of either kind are summed apart and put
//! together per group. Run on emulated processors only, so nothing here is tuned: the form is that of x86.

#![expect(clippy::needless_range_loop, reason = "indices say which registers meet; most loops index several arrays")]

use std::arch::aarch64::*;
use std::arch::asm;

use super::{PREFETCH_BYTES, PREFETCH_SCALE_BYTES, PackedRows, Pair, checked, padded, prefetch};
use crate::kernels::activations::{GROUP, Inputs};

/// Groups whose scales are widened at a time: two vectors.
const BLOCK: usize = 8;

/// A row of each range, one after the other: four products of bytes to a lane.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn dotprod<const TOKENS: usize, const EIGHT: bool>(
    ranges: [PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    out: &mut [[Pair; TOKENS]],
) {
    let (groups, group_bytes) = checked::<TOKENS, EIGHT>(&ranges, x, out.len());
    for (row, out) in out.iter_mut().enumerate() {
        prefetch_scales(&ranges, row, groups);
        let mut sums = [[vdupq_n_f32(0.0); TOKENS]; 2];
        for block in (0..groups).step_by(BLOCK) {
            let (at, count) = (row * groups + block, BLOCK.min(groups - block));
            // Scale of the row times scale of the token, per group.
            let mut scales = [[[0f32; BLOCK]; TOKENS]; 2];
            for r in 0..2 {
                let (scale, bias) = widen_scales(ranges[r], at, count);
                for t in 0..TOKENS {
                    let (x_scale, x_sum) = (load_block(x[t].scales, block), load_block(x[t].sums, block));
                    for i in 0..2 {
                        // SAFETY: four floats of eight.
                        unsafe { vst1q_f32(scales[r][t].as_mut_ptr().add(4 * i), vmulq_f32(scale[i], x_scale[i])) };
                        sums[r][t] = vfmaq_f32(sums[r][t], bias[i], x_sum[i]);
                    }
                }
            }
            for g in 0..count {
                let values = group_of(x, block + g);
                let mut inputs = [[[vdupq_n_s8(0); 2]; 4]; TOKENS];
                let mut start = [vdupq_n_s32(0); TOKENS];
                for t in 0..TOKENS {
                    inputs[t] = load_runs(values[t]);
                    if EIGHT {
                        start[t] = centre(&inputs[t]);
                    }
                }
                for r in 0..2 {
                    // SAFETY: a group of a range whose length was checked.
                    let planes = unsafe {
                        let codes = ranges[r].codes.as_ptr().add((at + g) * group_bytes);
                        prefetch(codes.wrapping_add(PREFETCH_BYTES));
                        planes::<EIGHT>(codes)
                    };
                    for t in 0..TOKENS {
                        let (mut high, mut low) = (vdupq_n_s32(0), start[t]);
                        for run in 0..4 {
                            high = dot(high, planes[run], inputs[t][run][0]);
                            low = dot(low, planes[run], inputs[t][run][1]);
                        }
                        let product = vcvtq_f32_s32(together(high, low));
                        sums[r][t] = vfmaq_n_f32(sums[r][t], product, scales[r][t][g]);
                    }
                }
            }
        }
        for t in 0..TOKENS {
            out[t] = [vaddvq_f32(sums[0][t]), vaddvq_f32(sums[1][t])];
        }
    }
}

/// A row of each range in one register: a product has those of either with the high and with the low bytes.
#[target_feature(enable = "neon,i8mm")]
pub(super) fn i8mm<const TOKENS: usize, const EIGHT: bool>(
    ranges: [PackedRows<'_>; 2],
    x: &[Inputs<'_>; TOKENS],
    out: &mut [[Pair; TOKENS]],
) {
    let (groups, group_bytes) = checked::<TOKENS, EIGHT>(&ranges, x, out.len());
    let [a, b] = ranges;
    for (row, out) in out.iter_mut().enumerate() {
        prefetch_scales(&ranges, row, groups);
        // Lanes: even groups of the two rows, odd groups of the two rows.
        let mut sums = [vdupq_n_f32(0.0); TOKENS];
        for block in (0..groups).step_by(BLOCK) {
            let (at, count) = (row * groups + block, BLOCK.min(groups - block));
            // Scale of the row times scale of the token, per pair of groups.
            let mut scales = [[vdupq_n_f32(0.0); BLOCK / 2]; TOKENS];
            let ((a_scale, a_bias), (b_scale, b_bias)) = (widen_scales(a, at, count), widen_scales(b, at, count));
            let (scale, bias) = (interleave(a_scale, b_scale), interleave(a_bias, b_bias));
            for t in 0..TOKENS {
                let (x_scale, x_sum) = (load_block(x[t].scales, block), load_block(x[t].sums, block));
                let (x_scale, x_sum) = (interleave(x_scale, x_scale), interleave(x_sum, x_sum));
                for i in 0..BLOCK / 2 {
                    scales[t][i] = vmulq_f32(scale[i], x_scale[i]);
                    sums[t] = vfmaq_f32(sums[t], bias[i], x_sum[i]);
                }
            }
            for pair in 0..count.div_ceil(2) {
                let mut products = [[vdupq_n_s32(0); 2]; TOKENS];
                for i in 0..2.min(count - 2 * pair) {
                    let g = 2 * pair + i;
                    // SAFETY: a group of ranges whose lengths were checked.
                    let planes = unsafe {
                        let codes = (at + g) * group_bytes;
                        let (a, b) = (a.codes.as_ptr().add(codes), b.codes.as_ptr().add(codes));
                        prefetch(a.wrapping_add(PREFETCH_BYTES));
                        prefetch(b.wrapping_add(PREFETCH_BYTES));
                        pair_planes::<EIGHT>([a, b])
                    };
                    let values = group_of(x, block + g);
                    for t in 0..TOKENS {
                        for run in 0..8 {
                            products[t][i] = multiply(products[t][i], planes[run], load_run(values[t], run));
                        }
                    }
                }
                for t in 0..TOKENS {
                    let [a, b] = products[t];
                    let product = vcvtq_f32_s32(together(vuzp1q_s32(a, b), vuzp2q_s32(a, b)));
                    sums[t] = vfmaq_f32(sums[t], product, scales[t][pair]);
                }
            }
        }
        for t in 0..TOKENS {
            let both = vadd_f32(vget_low_f32(sums[t]), vget_high_f32(sums[t]));
            out[t] = [vget_lane_f32::<0>(both), vget_lane_f32::<1>(both)];
        }
    }
}

/// `sum + a . b` per four signed bytes; `vdotq_s32`, which is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction is there, as the feature says, and touches these registers alone.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// `sum + a . b_LANE`, one four of signed bytes of `b` for all; `vdotq_laneq_s32`, which is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(in crate::kernels) fn dot_lane<const LANE: u8>(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as for `dot`.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// `sum` plus the four products of two rows of eight unsigned bytes with two of signed ones; `vusmmlaq_s32`, which is not
/// stable.
#[inline]
#[target_feature(enable = "neon,i8mm")]
pub(in crate::kernels) fn multiply(mut sum: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as for `dot`.
    unsafe {
        asm!(
            "usmmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Asks for scales and biases ahead of those of row `row`.
#[inline(always)]
fn prefetch_scales(ranges: &[PackedRows<'_>; 2], row: usize, groups: usize) {
    for range in ranges {
        for values in [range.scales, range.biases] {
            prefetch(values.as_ptr().wrapping_add(row * 2 * groups + PREFETCH_SCALE_BYTES));
        }
    }
}

/// `256 high + low`.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn together(high: int32x4_t, low: int32x4_t) -> int32x4_t {
    vaddq_s32(vshlq_n_s32::<8>(high), low)
}

/// The codes of a group in the runs of 16 of [`Inputs`]; those of eight bits less 128, see [`centre`].
///
/// # Safety
/// `codes` points to the bytes of a group.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) unsafe fn planes<const EIGHT: bool>(codes: *const u8) -> [int8x16_t; 4] {
    let mut planes = [vdupq_n_u8(0); 4];
    for i in 0..2 {
        // SAFETY: of the 64 bytes that the caller promises 32 from `32 i`, of 32 bytes 16 from `16 i`.
        (planes[2 * i], planes[2 * i + 1]) = unsafe {
            if EIGHT {
                let (a, b) = (vld1q_u8(codes.add(32 * i)), vld1q_u8(codes.add(32 * i + 16)));
                let sign = vdupq_n_u8(128);
                (veorq_u8(vuzp1q_u8(a, b), sign), veorq_u8(vuzp2q_u8(a, b), sign))
            } else {
                nibbles(vld1q_u8(codes.add(16 * i)))
            }
        };
    }
    planes.map(|plane| vreinterpretq_s8_u8(plane))
}

/// The codes of a group of two rows in the runs of 8 of [`Inputs`]: those of one row, then those of the other.
///
/// # Safety
/// Both point to the bytes of a group.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) unsafe fn pair_planes<const EIGHT: bool>(codes: [*const u8; 2]) -> [uint8x16_t; 8] {
    let mut planes = [vdupq_n_u8(0); 8];
    for i in 0..if EIGHT { 4 } else { 2 } {
        // SAFETY: 16 bytes from `16 i` of the 64 or 32 that the caller promises.
        let [a, b] = unsafe { codes.map(|codes| vld1q_u8(codes.add(16 * i))) };
        if EIGHT {
            (planes[2 * i], planes[2 * i + 1]) = (vuzp1q_u8(a, b), vuzp2q_u8(a, b));
        } else {
            let [a, b] = [vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)];
            (planes[4 * i], planes[4 * i + 1]) = nibbles(vreinterpretq_u8_u64(vzip1q_u64(a, b)));
            (planes[4 * i + 2], planes[4 * i + 3]) = nibbles(vreinterpretq_u8_u64(vzip2q_u64(a, b)));
        }
    }
    planes
}

/// The codes of even and of odd columns.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(bytes: uint8x16_t) -> (uint8x16_t, uint8x16_t) {
    (vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes))
}

/// The inputs of a group, for [`load_run`].
#[inline(always)]
pub(in crate::kernels) fn group_of<'a, const TOKENS: usize>(
    x: &[Inputs<'a>; TOKENS],
    group: usize,
) -> [&'a [i16; GROUP]; TOKENS] {
    x.each_ref().map(|x| &x.values.as_chunks().0[group])
}

/// Bytes `16 run .. 16 run + 16` of a group's inputs.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn load_run(values: &[i16; GROUP], run: usize) -> int8x16_t {
    // SAFETY: 16 bytes.
    unsafe { vld1q_s8(values.as_chunks::<8>().0[run].as_ptr().cast()) }
}

/// All of them in runs of 16: high and low bytes of each.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn load_runs(values: &[i16; GROUP]) -> [[int8x16_t; 2]; 4] {
    let mut runs = [[vdupq_n_s8(0); 2]; 4];
    for i in 0..4 {
        runs[i] = [load_run(values, 2 * i), load_run(values, 2 * i + 1)];
    }
    runs
}

/// What [`planes`] took from the products with 8-bit codes: 128 times the sum of a group's inputs, in parts.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(in crate::kernels) fn centre(inputs: &[[int8x16_t; 2]; 4]) -> int32x4_t {
    let ones = vdupq_n_s8(1);
    let (mut high, mut low) = (vdupq_n_s32(0), vdupq_n_s32(0));
    for run in inputs {
        high = dot(high, ones, run[0]);
        low = dot(low, ones, run[1]);
    }
    vshlq_n_s32::<7>(together(high, low))
}

/// Scales and biases `first .. first + count`.
#[inline]
#[target_feature(enable = "neon")]
fn widen_scales(range: PackedRows<'_>, first: usize, count: usize) -> ([float32x4_t; 2], [float32x4_t; 2]) {
    (widen_block(range.scales, first, count), widen_block(range.biases, first, count))
}

/// BF16 values `first .. first + count` in f32, then zeros.
#[inline]
#[target_feature(enable = "neon")]
fn widen_block(values: &[u8], first: usize, count: usize) -> [float32x4_t; 2] {
    let from = padded::<{ 2 * BLOCK }>(values, first, count);
    // SAFETY: `from` has 16 bytes.
    let halves = vreinterpretq_u16_u8(unsafe { vld1q_u8(from.as_ptr()) });
    [widen(vget_low_u16(halves)), widen(vget_high_u16(halves))]
}

/// BF16 values in f32.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn widen(halves: uint16x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshll_n_u16::<16>(halves))
}

/// Values `block .. block + 8`.
#[inline]
#[target_feature(enable = "neon")]
fn load_block(values: &[f32], block: usize) -> [float32x4_t; 2] {
    let values = values[block..][..BLOCK].as_ptr();
    // SAFETY: eight floats.
    unsafe { [vld1q_f32(values), vld1q_f32(values.add(4))] }
}

/// `a_0 b_0 a_1 b_1` and so on.
#[inline]
#[target_feature(enable = "neon")]
fn interleave(a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; BLOCK / 2] {
    [vzip1q_f32(a[0], b[0]), vzip2q_f32(a[0], b[0]), vzip1q_f32(a[1], b[1]), vzip2q_f32(a[1], b[1])]
}
