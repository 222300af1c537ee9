//! Inputs for kernels: sizes that hide mistakes when they are equal or round, tails, ties and extremes, each with the
//! tolerance that a kernel is held to and its reason. Expected values come from `lily_reference::ops`.

use lily_model::safetensors::TensorBytes;
use lily_model::{Bits, QuantMatrix, Shape};

/// Prompt lengths: one token, a few, around the sizes of tiles (3, 4, 8, 16, 64) and of chunks.
pub const PROMPTS: &[usize] = &[1, 2, 3, 5, 17, 64, 65, 130];

/// Chunk lengths into which a prompt is cut.
pub const CHUNKS: &[usize] = &[1, 2, 3, 7, 16, 63, 64, 149];

/// How far a kernel may be from the reference: `|got - expected| <= value * max(1, largest |expected|)`.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// The bound.
    pub value: f32,
    /// Why it is what it is.
    pub reason: &'static str,
}

/// Sums of up to 4096 products in f32 in any order; the reference sums in f64.
pub const F32_SUMS: Tolerance =
    Tolerance { value: 2e-5, reason: "up to 4096 f32 products summed in f32, which loses a few dozen units of 6e-8" };

/// Elementwise formulas with a sum over one head or row before them.
pub const F32_FORMULA: Tolerance = Tolerance {
    value: 2e-6,
    reason: "a sum of at most 2048 squares and an exponential, each within a few units of 6e-8",
};

/// The delta rule over a number of tokens.
pub const F32_RECURRENCE: Tolerance =
    Tolerance { value: 2e-5, reason: "f32 rounding of a state that is carried through up to 70 tokens" };

/// A linear: `tokens` through a stack of `experts` matrices `[outputs, inputs]`.
#[derive(Clone, Copy, Debug)]
pub struct LinearCase {
    /// Width of the codes.
    pub bits: Bits,
    /// Rows of the input.
    pub tokens: usize,
    /// Columns, a multiple of 64.
    pub inputs: usize,
    /// Rows of one matrix.
    pub outputs: usize,
    /// Matrices in the stack.
    pub experts: usize,
}

const fn linear(bits: Bits, tokens: usize, inputs: usize, outputs: usize, experts: usize) -> LinearCase {
    LinearCase { bits, tokens, inputs, outputs, experts }
}

/// One group and many, no whole number of anything else; one row, as the gate of the shared expert has.
pub const LINEAR: &[LinearCase] = &[
    linear(Bits::Four, 1, 64, 1, 1),
    linear(Bits::Four, 1, 2048, 37, 1),
    linear(Bits::Four, 2, 576, 67, 1),
    linear(Bits::Four, 3, 512, 130, 3),
    linear(Bits::Four, 4, 4096, 6, 1),
    linear(Bits::Four, 7, 704, 129, 2),
    linear(Bits::Four, 65, 192, 70, 1),
    linear(Bits::Eight, 1, 64, 1, 1),
    linear(Bits::Eight, 1, 2048, 31, 1),
    linear(Bits::Eight, 5, 576, 33, 2),
    linear(Bits::Eight, 64, 128, 66, 1),
];

/// Attention of `tokens` tokens from `position` on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase {
    /// Query heads.
    pub query_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Tokens before the first.
    pub position: usize,
    /// Tokens.
    pub tokens: usize,
}

const fn attention(query_heads: usize, kv_heads: usize, position: usize, tokens: usize) -> AttentionCase {
    AttentionCase { query_heads, kv_heads, position, tokens }
}

/// Alone at the start, block borders, head counts that fill no tile, one head, long contexts with one token.
pub const ATTENTION: &[AttentionCase] = &[
    attention(1, 1, 0, 1),
    attention(4, 2, 0, 7),
    attention(16, 2, 63, 1),
    attention(16, 2, 64, 2),
    attention(8, 1, 60, 9),
    attention(6, 2, 255, 1),
    attention(6, 2, 256, 1),
    attention(3, 3, 700, 1),
    attention(4, 1, 130, 66),
];

/// Tokens through the mixer of a delta layer.
#[derive(Clone, Copy, Debug)]
pub struct DeltaCase {
    /// Key heads.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Tokens.
    pub tokens: usize,
}

/// Fewer tokens than the convolution has taps, one value head per key head and several, more than a block of 64.
pub const DELTA: &[DeltaCase] = &[
    DeltaCase { key_heads: 1, value_heads: 1, tokens: 1 },
    DeltaCase { key_heads: 2, value_heads: 4, tokens: 2 },
    DeltaCase { key_heads: 1, value_heads: 3, tokens: 5 },
    DeltaCase { key_heads: 2, value_heads: 2, tokens: 70 },
];

/// Router logits and how many are chosen: ties across the border of the choice, all equal, zeros of either sign, one expert.
pub const ROUTES: &[(&[f32], usize)] = &[
    (&[0.5], 1),
    (&[1.0, 3.0, 3.0, 2.0, 3.0], 2),
    (&[2.0; 9], 4),
    (&[-0.0, 0.0, -0.0, 0.0], 2),
    (&[-50.0, 40.0, -3.0, 39.5, 1e-3, 7.0], 6),
];

/// Seeded inputs that are the same everywhere.
#[derive(Clone, Debug)]
pub struct Generator(u64);

impl Generator {
    /// From a seed.
    pub fn new(seed: u64) -> Generator {
        Generator(seed)
    }

    /// 64 bits of splitmix64.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Token ids below `vocab`.
    pub fn ids(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| (self.bits() % vocab as u64) as u32).collect()
    }

    /// Values like activations: bell-shaped around 0 with deviation `scale` (a sum of four uniform numbers).
    pub fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let mut value = || (0..4).map(|_| self.uniform() - 0.5).sum::<f32>() * 3f32.sqrt() * scale;
        (0..count).map(|_| value()).collect()
    }

    /// The same, rounded to BF16 as a cache of that type holds them.
    pub fn bf16_values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        self.values(count, scale).into_iter().map(round_to_bf16).collect()
    }

    /// A packed matrix with scales of both signs.
    pub fn matrix(&mut self, bits: Bits, experts: usize, outputs: usize, inputs: usize) -> QuantMatrix {
        let rows = experts * outputs;
        let codes = (0..rows * bits.bytes(inputs)).map(|_| self.bits() as u8).collect();
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        let levels = (1u32 << bits.count()) as f32;
        for _ in 0..rows * inputs / Shape::GROUP {
            let sign = if self.bits() & 1 == 0 { 1.0 } else { -1.0 };
            let scale = sign * (0.5 + self.uniform()) / levels / (inputs as f32).sqrt();
            let bias = -scale * levels * (0.4 + 0.2 * self.uniform());
            scales.extend(bf16_bytes(scale));
            biases.extend(bf16_bytes(bias));
        }
        QuantMatrix {
            name: format!("{experts} x [{outputs}, {inputs}], {} bits", bits.count()),
            bits,
            experts,
            outputs,
            inputs,
            codes: TensorBytes::from_vec(codes),
            scales: TensorBytes::from_vec(scales),
            biases: TensorBytes::from_vec(biases),
        }
    }
}

/// To the nearest BF16 value, to even on ties.
pub fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000)
}

fn bf16_bytes(x: f32) -> [u8; 2] {
    ((round_to_bf16(x).to_bits() >> 16) as u16).to_le_bytes()
}

/// Panics where `got` is further from `expected` than the tolerance allows.
pub fn assert_close(got: &[f32], expected: &[f32], tolerance: Tolerance, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    let largest = expected.iter().fold(1.0, |largest: f32, x| largest.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let difference = (got - expected).abs();
        // NaN is within no tolerance.
        assert!(
            difference <= tolerance.value * largest,
            "{what}: element {i} is {got:e}, expected {expected:e}; off by {difference:e}, allowed are {:e} of {largest} \
             because of {}",
            tolerance.value,
            tolerance.reason
        );
    }
}
