//! Linears and the choice of experts against `lily_reference::ops`, on the cases that all devices share and at the sizes of Qwen3.6's own
//! layers.

use lily_backend::conformance::cases::{Generator, LINEAR, LinearCase, Tolerance, assert_close};
use lily_model::{Bits, QuantMatrix, Shape};
use lily_reference::ops;

use super::moe::Routing;
use super::{BLOCK4_BYTES, BLOCK8_BYTES, Finish, FixedRows, Gemm, Grouping, Kernels, Pass, Source, TILE_ROWS, blocks};
use crate::compile;
use crate::device::{Buffer, Device};

/// What the layers of the published model have, with as many tokens as fill no tile, one, and several.
const PUBLISHED: &[LinearCase] = &[
    LinearCase { bits: Bits::Four, tokens: 130, inputs: 2048, outputs: 12_352, experts: 1 },
    LinearCase { bits: Bits::Four, tokens: 33, inputs: 2048, outputs: 9216, experts: 1 },
    LinearCase { bits: Bits::Four, tokens: 300, inputs: 4096, outputs: 2048, experts: 1 },
    LinearCase { bits: Bits::Four, tokens: 128, inputs: 512, outputs: 2048, experts: 1 },
    LinearCase { bits: Bits::Four, tokens: 90, inputs: 2048, outputs: 1024, experts: 1 },
    LinearCase { bits: Bits::Eight, tokens: 200, inputs: 2048, outputs: 257, experts: 1 },
];

/// 16-bit inputs are off by 2.4e-5 of the length of a row on average, and a sum by as much of its own.
const FIXED_INPUTS: Tolerance = Tolerance { value: 2e-4, reason: "inputs rounded to 16 bits" };

struct Bench {
    kernels: Kernels,
    device: Device,
}

impl Bench {
    fn new(shape: &Shape) -> Bench {
        let device = Device::open(0).expect("a GPU");
        let kernels = compile::kernels(shape, &device).expect("kernels");
        Bench { kernels, device }
    }

    fn bytes(&self, bytes: &[u8]) -> Buffer {
        let buffer = self.device.zeroed("a case", bytes.len()).expect("memory");
        self.device.upload(buffer.pointer(), bytes).expect("written");
        buffer
    }

    fn words(&self, words: &[u32]) -> Buffer {
        self.bytes(&words.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    fn floats(&self, values: &[f32]) -> Buffer {
        self.bytes(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    fn read(&self, from: &Buffer, count: usize) -> Vec<f32> {
        let mut values = vec![0.0; count];
        self.device.download_floats(&mut values, from.pointer()).expect("read");
        values
    }

    /// One expert after the other, in tiles of their own.
    fn matrix(&self, pass: &Pass<'_>, matrix: &QuantMatrix) -> (Buffer, usize) {
        let tiles = matrix.outputs.div_ceil(TILE_ROWS);
        let block = if matrix.bits == Bits::Four { BLOCK4_BYTES } else { BLOCK8_BYTES };
        let bytes = tiles * blocks(matrix.inputs) * block;
        let packed = self.device.zeroed("tiles", matrix.experts * bytes).expect("memory");
        let parts = [&matrix.codes, &matrix.scales, &matrix.biases];
        for expert in 0..matrix.experts {
            let [codes, scales, biases] = parts
                .map(|part| self.bytes(&part[part.len() / matrix.experts * expert..][..part.len() / matrix.experts]));
            let source = Source { codes: codes.pointer(), scales: scales.pointer(), biases: biases.pointer() };
            let sizes = (matrix.outputs, matrix.inputs, tiles);
            let to = packed.pointer().at(expert * bytes);
            self.kernels.repack(pass, matrix.bits, (source, None), sizes, to).expect("repacked");
            self.device.synchronize().expect("done");
        }
        (packed, bytes)
    }

    /// A stack of matrices: every expert meets each token whose number is one of its multiples, so that lists differ in length.
    fn stacked(&self, case: &LinearCase, seed: u64) -> (Vec<f32>, Vec<f32>) {
        let pass = Pass { device: &self.device, overlap: false };
        let mut generator = Generator::new(seed);
        let matrix = generator.matrix(case.bits, case.experts, case.outputs, case.inputs);
        let x = generator.values(case.tokens * case.inputs, 1.0);
        let (weights, expert_bytes) = self.matrix(&pass, &matrix);
        let fixed = self.device.zeroed("inputs", FixedRows::bytes(case.tokens, case.inputs)).expect("memory");
        let fixed = (FixedRows::at(fixed.pointer(), case.tokens, case.inputs), fixed);
        let plain = self.floats(&x);
        self.kernels.fix_rows(&pass, plain.pointer(), case.tokens, case.inputs, fixed.0).expect("launched");
        let rows = case.tokens * case.experts;
        let out = self.floats(&vec![f32::NAN; rows * case.outputs]);
        let gemm = Gemm {
            weights: weights.pointer(),
            expert_bytes: expert_bytes as u64,
            tiles: case.outputs.div_ceil(TILE_ROWS) as i32,
            blocks: blocks(case.inputs) as i32,
            x: fixed.0,
            grouping: Grouping::NONE,
            rows: case.tokens as i32,
            tile: 0,
            out: out.pointer(),
            stride: case.outputs as i32,
            outputs: case.outputs as i32,
        };
        let meets = |expert: usize, token: usize| token.is_multiple_of(expert + 1);
        if case.experts == 1 {
            match case.bits {
                Bits::Four => self.kernels.gemm_q4(&pass, &gemm, Finish::Store).expect("launched"),
                Bits::Eight => self.kernels.gemm_q8(&pass, &gemm).expect("launched"),
            }
        } else {
            // Pair `token * experts + expert`; tiles of any size cover the lists.
            let tile = self.kernels.expert_tile(case.tokens);
            let (mut list, mut counts, mut tiles) = (vec![0u32; rows], Vec::new(), Vec::new());
            for expert in 0..case.experts {
                let own: Vec<u32> = (0..case.tokens)
                    .filter(|token| meets(expert, *token))
                    .map(|token| (token * case.experts + expert) as u32)
                    .collect();
                list[expert * case.tokens..][..own.len()].copy_from_slice(&own);
                counts.push(own.len() as u32);
                tiles.extend((0..own.len()).step_by(tile).flat_map(|first| [expert as u32, first as u32]));
            }
            let count = self.words(&[tiles.len() as u32 / 2]);
            let (list, counts, tiles) = (self.words(&list), self.words(&counts), self.words(&tiles));
            let grouping = Grouping {
                list: list.pointer(),
                token_tiles: tiles.pointer(),
                token_tile_count: count.pointer(),
                counts: counts.pointer(),
                stride: case.tokens as i32,
                share: case.experts as i32,
            };
            let gemm = Gemm { grouping, ..gemm };
            self.kernels.gemm_q4_grouped(&pass, &gemm, Finish::Store, case.tokens).expect("launched");
            self.device.synchronize().expect("done");
        }
        let got = self.read(&out, rows * case.outputs);
        let mut expected = vec![f32::NAN; rows * case.outputs];
        for expert in 0..case.experts {
            let linear = ops::expert_linear(&x, &matrix, &vec![expert; case.tokens]);
            for token in (0..case.tokens).filter(|token| meets(expert, *token)) {
                let at = (token * case.experts + expert) * case.outputs;
                expected[at..][..case.outputs].copy_from_slice(&linear[token * case.outputs..][..case.outputs]);
            }
        }
        // Rows that meet no expert are not written.
        let written = |values: Vec<f32>, expected: &[f32]| -> Vec<f32> {
            values.into_iter().zip(expected).filter(|(_, expected)| !expected.is_nan()).map(|(x, _)| x).collect()
        };
        assert!(got.iter().zip(&expected).all(|(got, expected)| got.is_nan() == expected.is_nan()), "{case:?}");
        (written(got, &expected), written(expected.clone(), &expected))
    }

    /// The ids that each of some tokens chooses by its logits, and their weights.
    fn choices(&self, logits: &[Vec<f32>]) -> Vec<(Vec<usize>, Vec<f32>)> {
        let pass = Pass { device: &self.device, overlap: false };
        let (sizes, tokens) = (&self.kernels.sizes, logits.len());
        let mut rows = vec![f32::NAN; tokens * sizes.router_rows];
        for (row, logits) in rows.chunks_exact_mut(sizes.router_rows).zip(logits) {
            row[..logits.len()].copy_from_slice(logits);
        }
        let logits = self.floats(&rows);
        let pairs = tokens * sizes.top_k;
        let [ids, weights] = [(); 2].map(|()| self.words(&vec![0; pairs]));
        let [list, counts, tiles, tile_count] = [sizes.experts * tokens, sizes.experts, 2 * (pairs + sizes.experts), 1]
            .map(|words| self.words(&vec![0; words]));
        let routing = Routing {
            ids: ids.pointer(),
            weights: weights.pointer(),
            list: list.pointer(),
            counts: counts.pointer(),
            tiles: tiles.pointer(),
            tile_count: tile_count.pointer(),
        };
        self.kernels.route(&pass, logits.pointer(), tokens, &routing).expect("launched");
        self.device.synchronize().expect("done");
        let ids: Vec<usize> = self.read(&ids, pairs).into_iter().map(|id| id.to_bits() as usize).collect();
        let weights = self.read(&weights, pairs);
        ids.chunks_exact(sizes.top_k)
            .zip(weights.chunks_exact(sizes.top_k))
            .map(|(i, w)| (i.to_vec(), w.to_vec()))
            .collect()
    }
}

/// Logits of 256 experts as they come, with many equal ones, all equal, that differ in their last bits, and zeros of either sign.
fn router_logits() -> Vec<Vec<f32>> {
    let mut generator = Generator::new(3);
    let mut all = Vec::new();
    for _ in 0..50 {
        let plain = generator.values(256, 4.0);
        all.push(plain.iter().map(|x| x.round()).collect());
        all.push(plain.iter().map(|x| (x * 8.0).round() / 8.0).collect());
        all.push(plain.iter().map(|x| f32::from_bits(3.0f32.to_bits() + (x.abs() * 16.0) as u32)).collect());
        all.push(plain.iter().map(|x| f32::from_bits((-3.0f32).to_bits() + (x.abs() * 4.0) as u32)).collect());
        all.push(plain.iter().map(|x| if *x < 0.0 { -0.0 } else { 0.0 }).collect());
        all.push(plain);
    }
    all.push(vec![2.5; 256]);
    all
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn choices_are_those_of_the_reference() {
    let shape = Shape { layers: 4, vocab: 4096, ..Shape::QWEN36 };
    let logits = router_logits();
    for (case, ((ids, weights), logits)) in Bench::new(&shape).choices(&logits).into_iter().zip(&logits).enumerate() {
        let (expected, expected_weights): (Vec<usize>, Vec<f32>) =
            ops::route(logits, shape.experts_per_token).into_iter().unzip();
        assert_eq!(ids, expected, "case {case}");
        let softmax = Tolerance { value: 1e-6, reason: "another exponential and order of sums" };
        assert_close(&weights, &expected_weights, softmax, &format!("case {case}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn linears_of_many_tokens_are_those_of_the_reference() {
    let bench = Bench::new(&Shape::DEMO);
    for (seed, case) in LINEAR.iter().chain(PUBLISHED).enumerate() {
        // Stacks are of 4 bits only.
        let case = LinearCase { experts: if case.bits == Bits::Eight { 1 } else { case.experts }, ..*case };
        let (got, expected) = bench.stacked(&case, seed as u64);
        assert_close(&got, &expected, FIXED_INPUTS, &format!("{case:?}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_token_has_the_same_bits_whatever_tokens_are_with_it() {
    let bench = Bench::new(&Shape::DEMO);
    let run = |tokens| {
        let case = LinearCase { bits: Bits::Four, tokens, inputs: 704, outputs: 129, experts: 1 };
        // The matrix comes first out of the generator, then the inputs, token by token.
        bench.stacked(&case, 8).0
    };
    let all = run(300);
    for tokens in [1, 15, 17, 33, 65, 97, 129] {
        let got = run(tokens);
        let same = got.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{tokens} tokens");
    }
}
