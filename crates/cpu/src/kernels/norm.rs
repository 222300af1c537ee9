//! RMSNorm, unit length, SwiGLU and the sums of the residual stream: one token (or one head of it) per call, f32.
//! Reference: `lily_reference::ops::{rms_norm, delta_query, delta_key, gated_norm, swiglu, attention_gate}`.

use super::{LANES, dot, kernel, mul_add, sigmoid, silu};

/// Added to the sum of squares where delta queries and keys are brought to unit length.
pub(crate) const UNIT_EPS: f32 = 1e-6;

kernel! {
    /// `out_i = x_i / sqrt(mean(x^2) + eps) * weight_i`.
    pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm_body;
}

#[inline(always)]
pub(crate) fn rms_norm_body<const FUSED: bool>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale::<FUSED>(x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

#[inline(always)]
fn rms_scale<const FUSED: bool>(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot::<FUSED>(x, x) / x.len() as f32 + eps).sqrt()
}

/// `x_i * length / sqrt(sum(x^2) + 1e-6)`, in place.
#[inline(always)]
pub(crate) fn to_length<const FUSED: bool>(x: &mut [f32], length: f32) {
    let scale = length / (dot::<FUSED>(x, x) + UNIT_EPS).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
}

/// `out_i = o_i / sqrt(mean(o^2) + eps) * weight_i * silu(z_i)`.
#[inline(always)]
pub(crate) fn gated_norm<const FUSED: bool>(o: &[f32], z: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale::<FUSED>(o, eps);
    for (((out, o), z), w) in out.iter_mut().zip(o).zip(z).zip(weight) {
        *out = o * scale * w * silu::<FUSED>(*z);
    }
}

kernel! {
    /// `out_i = silu(gate_i) * up_i`.
    pub(crate) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu_body;
}

#[inline(always)]
fn swiglu_body<const FUSED: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
        *out = silu::<FUSED>(*g) * u;
    }
}

kernel! {
    /// `out_i = x_i * sigmoid(gate_i)`.
    pub(crate) fn sigmoid_gate(x: &[f32], gate: &[f32], out: &mut [f32]) = sigmoid_gate_body;
}

#[inline(always)]
fn sigmoid_gate_body<const FUSED: bool>(x: &[f32], gate: &[f32], out: &mut [f32]) {
    for ((out, x), g) in out.iter_mut().zip(x).zip(gate) {
        *out = x * sigmoid::<FUSED>(*g);
    }
}

kernel! {
    /// `sum_i += weight * x_i`.
    pub(crate) fn add_weighted(sum: &mut [f32], x: &[f32], weight: f32) = add_weighted_body;
}

#[inline(always)]
fn add_weighted_body<const FUSED: bool>(sum: &mut [f32], x: &[f32], weight: f32) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = mul_add::<FUSED>(weight, *x, *sum);
    }
}

kernel! {
    /// Whether every value is a finite number.
    pub(crate) fn all_finite(x: &[f32]) -> bool = all_finite_body;
}

#[inline(always)]
fn all_finite_body<const FUSED: bool>(x: &[f32]) -> bool {
    // A product with zero is zero exactly for finite values, and a sum of zeros stays one.
    let (lanes, rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for x in lanes {
        (0..LANES).for_each(|i| sums[i] += x[i] * 0.0);
    }
    sums.iter().chain(rest).all(|x| x.is_finite())
}
