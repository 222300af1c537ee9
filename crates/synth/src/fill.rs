//! Tensor content: each element from the tensor's key and the element's index alone.

use half::bf16;

/// What a tensor is filled with. All but `Codes` are BF16.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Packed codes, every value equally likely.
    Codes,
    /// Scales of either sign with magnitudes around `step`.
    Scales {
        /// Mean magnitude.
        step: f32,
    },
    /// The biases that centre a group of codes on 0: `-middle` times the scale of the same group.
    Biases {
        /// That of the scales.
        step: f32,
        /// Half of the highest code.
        middle: f32,
    },
    /// Uniform in `mean ± spread`.
    Uniform {
        /// The middle.
        mean: f32,
        /// Half of the width.
        spread: f32,
    },
    /// Taps `[channels, 4]` of a causal filter, heavier on the newest.
    Taps,
    /// `A_log` of decay rates from 0.05 to 16, evenly in the logarithm.
    DecayRates,
    /// `dt_bias` of time steps from 0.01 to 0.5, evenly in the logarithm; softplus undoes the inverse written here.
    TimeSteps,
}

/// Standard deviations of the four taps, those of the oracle's random checkpoints.
const TAPS: [f32; 4] = [0.25, 0.35, 0.5, 0.8];

impl Fill {
    /// Bytes of an element: a word of codes, or a BF16.
    pub fn element_bytes(self) -> usize {
        if matches!(self, Fill::Codes) { 4 } else { 2 }
    }

    /// Writes the bytes of a tensor from byte `start`, a multiple of 8, on.
    pub fn write(self, key: u64, start: usize, out: &mut [u8]) {
        if matches!(self, Fill::Codes) {
            for (word, out) in (start as u64 / 8..).zip(out.chunks_mut(8)) {
                out.copy_from_slice(&hash(key, word).to_le_bytes()[..out.len()]);
            }
        } else {
            for (index, out) in (start as u64 / 2..).zip(out.as_chunks_mut::<2>().0) {
                *out = bf16::from_f32(self.element(key, index)).to_le_bytes();
            }
        }
    }

    fn element(self, key: u64, index: u64) -> f32 {
        let x = unit(hash(key, index));
        match self {
            Fill::Codes => unreachable!("codes are not numbers"),
            Fill::Scales { step } => scale(step, x),
            Fill::Biases { step, middle } => -middle * bf16::from_f32(scale(step, x)).to_f32(),
            Fill::Uniform { mean, spread } => mean + spread * (2.0 * x - 1.0),
            Fill::Taps => TAPS[index as usize % 4] * 3f32.sqrt() * (2.0 * x - 1.0),
            Fill::DecayRates => 0.05f32.ln() + x * (16.0f32 / 0.05).ln(),
            Fill::TimeSteps => {
                let step = 0.01 * (0.5f32 / 0.01).powf(x);
                step + (-(-step).exp_m1()).ln()
            }
        }
    }
}

/// Half of the scales are negative, as the quantizer makes them; magnitudes are `step` ± 30 %.
fn scale(step: f32, x: f32) -> f32 {
    let signed = 2.0 * x - 1.0;
    step * (0.7 * signed.signum() + 0.6 * signed)
}

/// The key of a tensor, FNV-1a of its name and the seed.
pub fn key(seed: u64, name: &str) -> u64 {
    let bytes = seed.to_le_bytes();
    bytes
        .iter()
        .chain(name.as_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The output function of SplitMix64 (Steele, Lea, Flood 2014) on a counter.
pub fn hash(key: u64, index: u64) -> u64 {
    let z = key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The upper 24 bits as a number in 0 to 1.
fn unit(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1u32 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_join_to_the_whole_tensor() {
        for fill in [Fill::Codes, Fill::Scales { step: 0.1 }] {
            let (mut whole, mut parts) = ([0u8; 100], [0u8; 100]);
            fill.write(7, 0, &mut whole);
            fill.write(7, 0, &mut parts[..24]);
            fill.write(7, 24, &mut parts[24..]);
            assert_eq!(whole, parts);
        }
    }

    #[test]
    fn a_group_of_codes_is_centred_by_its_bias_whatever_the_sign_of_its_scale() {
        let step = 0.01;
        let mut negative = 0;
        for index in 0..1000 {
            let scale = bf16::from_f32(Fill::Scales { step }.element(3, index)).to_f32();
            let bias = Fill::Biases { step, middle: 7.5 }.element(3, index);
            assert_eq!(scale * 7.5 + bias, 0.0);
            assert!((0.69 * step..=1.31 * step).contains(&scale.abs()), "{scale}");
            negative += i32::from(scale < 0.0);
        }
        assert!((400..600).contains(&negative), "{negative} of 1000");
    }

    #[test]
    fn softplus_of_dt_bias_is_a_time_step() {
        for index in 0..100 {
            let x = Fill::TimeSteps.element(1, index);
            let step = x.max(0.0) + (-x.abs()).exp().ln_1p();
            assert!((0.0099..0.51).contains(&step), "{step}");
        }
    }
}
