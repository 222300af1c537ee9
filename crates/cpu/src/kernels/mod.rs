//! The kernels: each file opens with what goes in and out, and names its reference function.
//!
//! A kernel in f32 is one generic function over plain slices, compiled once per instruction set by [`kernel!`]; lanes are
//! fixed arrays that the compiler keeps in vector registers. What such a kernel calls must be `inline(always)`, or it is
//! compiled for the target of the build alone; that is why inner loops are `for` loops and not `array::map`. The two that
//! multiply integers, [`gemv`] and [`gemm`], are written out for each set.
//!
//! Every output element is summed by one worker in an order that depends on nothing but the sizes of the model, so neither
//! the number of threads nor the neighbours of a row change its bits.

pub(crate) mod activations;
pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod experts;
pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod linear;
pub(crate) mod moe;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod sample;
#[cfg(test)]
mod tests;

/// Lanes of the sums that kernels carry: the width of an AVX2 register.
pub(crate) const LANES: usize = 8;
/// One vector of f32.
pub(crate) type Lanes = [f32; LANES];

/// Defines `$name(isa, args)`, which runs `$body::<FUSED>(args)` compiled for `isa`. `FUSED` says whether the set has a
/// fused multiply-add; without one, asking for it would call a library function.
macro_rules! kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::device::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body::<true>($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: values of these exist only where the CPU was found to have AVX2 and FMA.
                $crate::device::Isa::Avx2 | $crate::device::Isa::Avx512 | $crate::device::Isa::Amx => unsafe {
                    avx2($($arg),*)
                },
                // What the target guarantees: on AArch64 that is NEON, to whose f32 the other sets add nothing.
                _ => $body::<{ $crate::kernels::TARGET_HAS_FMA }>($($arg),*),
            }
        }
    };
}
pub(crate) use kernel;

/// Whether the target of the build always has a fused multiply-add.
pub(crate) const TARGET_HAS_FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

/// `a * b + c`, fused or not.
#[inline(always)]
pub(crate) fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `sum += a * b` lane by lane.
#[inline(always)]
pub(crate) fn add_product<const FUSED: bool>(sum: &mut Lanes, a: &Lanes, b: &Lanes) {
    for lane in 0..LANES {
        sum[lane] = mul_add::<FUSED>(a[lane], b[lane], sum[lane]);
    }
}

/// `sum += a * b` lane by lane, with one `b` for all.
#[inline(always)]
pub(crate) fn add_scaled<const FUSED: bool>(sum: &mut Lanes, a: &Lanes, b: f32) {
    for lane in 0..LANES {
        sum[lane] = mul_add::<FUSED>(a[lane], b, sum[lane]);
    }
}

/// `a + b` lane by lane.
#[inline(always)]
pub(crate) fn sum(mut a: Lanes, b: Lanes) -> Lanes {
    for lane in 0..LANES {
        a[lane] += b[lane];
    }
    a
}

/// Sum of the lanes, by halves.
#[inline(always)]
pub(crate) fn total(lanes: Lanes) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// `sum_i a_i b_i` for a length that is a multiple of the lanes.
#[inline(always)]
pub(crate) fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [[0.0; LANES]; 4];
    let (a, b) = (a.as_chunks::<LANES>().0, b.as_chunks::<LANES>().0);
    let mut fours = a.chunks_exact(4).zip(b.chunks_exact(4));
    for (a, b) in &mut fours {
        for i in 0..4 {
            add_product::<FUSED>(&mut sums[i], &a[i], &b[i]);
        }
    }
    let rest = a.len() / 4 * 4;
    for (a, b) in a[rest..].iter().zip(&b[rest..]) {
        add_product::<FUSED>(&mut sums[0], a, b);
    }
    let [s0, s1, s2, s3] = sums;
    total(sum(sum(s0, s1), sum(s2, s3)))
}

/// `exp(x)` within 2 units in the last place between -87 and 88, constant outside, NaN for NaN; without branches, so
/// that loops over it become vector code.
///
/// `x = n ln 2 + r`, and on `|r| <= ln 2 / 2` the Taylor series of degree 7, whose next term is below 6e-9.
#[inline(always)]
pub(crate) fn exp<const FUSED: bool>(x: f32) -> f32 {
    /// Adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first has few enough bits that its product with `n` is exact.
    const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let x = x.clamp(-87.0, 88.0);
    let shifted = mul_add::<FUSED>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FUSED>(n, -LN2[1], mul_add::<FUSED>(n, -LN2[0], x));
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = mul_add::<FUSED>(p, r, coefficient);
    }
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub(crate) fn sigmoid<const FUSED: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FUSED>(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<const FUSED: bool>(x: f32) -> f32 {
    x / (1.0 + exp::<FUSED>(-x))
}

/// Asks for the cache line at `address`, which need not be mapped.
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program could see and faults on no address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    // `_prefetch` is not stable.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
