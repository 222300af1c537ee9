//! Kernels against `lily_reference::ops`, for every instruction set of this CPU, on the cases that all devices share.

mod attention;
mod delta;

use lily_backend::conformance::cases::{F32_FORMULA, F32_SUMS, Generator, LINEAR, ROUTES, Tolerance, assert_close};
use lily_backend::{Error, SamplingParams};
use lily_model::safetensors::TensorBytes;
use lily_model::{Bits, MoeWeights, Shape};
use lily_reference::ops;

use super::activations::{Activations, Tokens};
use super::experts::{Experts, Inner, down, gate_up};
use super::gemm::Place;
use super::gemv::Packed;
use super::linear::{Target, linear, multiply};
use super::moe::Routing;
use super::norm::{add_weighted, rms_norm, sigmoid_gate, swiglu};
use super::rope::Angles;
use super::sample::{Context, NoToken, sample};
use super::{dot, exp};
use crate::device::{Isa, Parts, Pool};

const EPS: f32 = 1e-6;

/// Runs a test for each instruction set, with one worker and with three.
fn on_every_path(test: impl Fn(&Pool, Isa)) {
    for isa in Isa::all() {
        for threads in [1, 3] {
            test(&Pool::new(threads).unwrap(), isa);
        }
    }
}

fn activations(pool: &Pool, isa: Isa, x: &[f32], width: usize) -> Activations {
    let mut activations = Activations::new(x.len() / width, width).unwrap();
    activations.fill(pool, isa, x.len() / width, |i, out| out.copy_from_slice(&x[i * width..][..width]));
    activations
}

/// What the kernels are given after rounding.
fn rounded(isa: Isa, inputs: &Activations, tokens: usize) -> Vec<f32> {
    (0..tokens).flat_map(|token| inputs.plain_row(isa, token)).collect()
}

#[test]
fn linears_of_every_size_are_those_of_the_reference() {
    on_every_path(|pool, isa| {
        for (seed, case) in LINEAR.iter().enumerate() {
            let mut generator = Generator::new(seed as u64);
            let matrix = generator.matrix(case.bits, case.experts, case.outputs, case.inputs);
            let x = generator.values(case.tokens * case.inputs, 1.0);
            let inputs = activations(pool, isa, &x, case.inputs);
            let x = rounded(isa, &inputs, case.tokens);
            for expert in 0..case.experts {
                let mut got = vec![f32::NAN; case.tokens * case.outputs];
                let out = Parts::new(&mut got);
                let place = Place { out: &out, first: 0, stride: case.outputs };
                let x_of = Tokens::range(&inputs, 0, case.tokens);
                multiply(isa, Packed::of(&matrix, expert), x_of, 0, case.outputs, place);
                let expected = ops::expert_linear(&x, &matrix, &vec![expert; case.tokens]);
                assert_close(&got, &expected, F32_SUMS, &format!("{isa:?} {case:?} expert {expert}"));
            }
        }
    });
}

#[test]
fn a_group_is_an_exact_sum_of_integers() {
    const ROWS: usize = 19;
    const N: usize = Shape::GROUP;
    // Where bytes carry and change sign. They are few and small enough for every part of a sum to stay below 2^24, even
    // with codes of eight bits, so that f32 holds it exactly.
    const EDGES: [i32; 12] = [-3968, 3967, -1, 0, 1, 127, 128, -128, -129, 255, 256, -257];
    on_every_path(|pool, isa| {
        for (bits, tokens) in [(Bits::Four, 1), (Bits::Four, 3), (Bits::Four, 14), (Bits::Eight, 3), (Bits::Eight, 14)]
        {
            let mut generator = Generator::new(tokens as u64);
            let mut matrix = generator.matrix(bits, 1, ROWS, N);
            matrix.scales = TensorBytes::from_vec(1f32.to_le_bytes()[2..].repeat(ROWS));
            matrix.biases = TensorBytes::from_vec(vec![0; 2 * ROWS]);
            // The first of a group is the largest that there is, so that its scale is 1.
            let value = |i: usize| match (i / N, i % N) {
                (token, 0) => [32512, -32512][token % 2],
                (token, i) => EDGES[(7 * i + token) % EDGES.len()],
            };
            let x: Vec<f32> = (0..tokens * N).map(|i| value(i) as f32).collect();
            let inputs = activations(pool, isa, &x, N);
            assert_eq!(rounded(isa, &inputs, tokens), x, "{isa:?}");
            let mut got = vec![f32::NAN; tokens * ROWS];
            linear(pool, isa, Tokens::range(&inputs, 0, tokens), [Target { matrix: &matrix, out: &mut got }]);
            for (i, got) in got.into_iter().enumerate() {
                let (token, row) = (i / ROWS, i % ROWS);
                let codes = matrix.row_codes(row);
                let code = |i: usize| match bits {
                    Bits::Four => codes[i / 2] >> (4 * (i % 2)) & 15,
                    Bits::Eight => codes[i],
                };
                let exact: i32 = (0..N).map(|i| i32::from(code(i)) * value(token * N + i)).sum();
                assert_eq!(got, exact as f32, "{isa:?} {bits:?} token {token} of {tokens}, row {row}");
            }
        }
    });
}

#[test]
fn a_pass_over_many_matrices_gives_each_its_own_place() {
    on_every_path(|pool, isa| {
        for tokens in [1, 3, 13] {
            let mut generator = Generator::new(1);
            let matrices = [
                generator.matrix(lily_model::Bits::Four, 1, 700, 128),
                generator.matrix(lily_model::Bits::Eight, 1, 9, 128),
                generator.matrix(lily_model::Bits::Four, 1, 1, 128),
            ];
            let x = generator.values((tokens + 2) * 128, 1.0);
            let inputs = activations(pool, isa, &x, 128);
            let mut outs = matrices.each_ref().map(|matrix| vec![f32::NAN; tokens * matrix.outputs]);
            let [a, b, c] = &mut outs;
            let target = |i: usize, out| Target { matrix: &matrices[i], out };
            linear(pool, isa, Tokens::range(&inputs, 2, tokens), [target(0, a), target(1, b), target(2, c)]);
            for (matrix, out) in matrices.iter().zip(&outs) {
                let expected = ops::linear(&rounded(isa, &inputs, tokens + 2)[2 * 128..], matrix);
                assert_close(out, &expected, F32_SUMS, &format!("{isa:?} {tokens} tokens, {} rows", matrix.outputs));
            }
        }
    });
}

#[test]
fn a_token_has_the_same_bits_whatever_tokens_are_with_it() {
    on_every_path(|pool, isa| {
        let mut generator = Generator::new(2);
        let matrix = generator.matrix(lily_model::Bits::Four, 1, 41, 704);
        let x = generator.values(107 * 704, 1.0);
        let inputs = activations(pool, isa, &x, 704);
        let run = |count: usize| {
            let mut out = vec![0.0; count * 41];
            linear(pool, isa, Tokens::range(&inputs, 0, count), [Target { matrix: &matrix, out: &mut out }]);
            out
        };
        // Among few tokens and among many the kernels differ; within each the neighbours must not matter.
        for (counts, token) in [(vec![1, 2, 3, 4, 7, 11], 0), (vec![13, 14, 30, 97, 107], 12), (vec![98, 107], 97)] {
            let all: Vec<Vec<f32>> = counts.iter().map(|count| run(*count)[token * 41..][..41].to_vec()).collect();
            assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{isa:?} token {token} of {counts:?}");
        }
    });
}

#[test]
fn experts_say_what_those_of_the_reference_say() {
    on_every_path(|pool, isa| {
        // The last is long enough for an expert's visits to be unpacked, and longer than one pass over them.
        for (seed, tokens) in [1, 2, 5, 40, 150].into_iter().enumerate() {
            let (hidden, width, shared_width, experts, per_token) = (192, 128, 64, 5, 2);
            let mut generator = Generator::new(seed as u64);
            let mut mlp = |experts, width| lily_model::Mlp {
                gate: generator.matrix(lily_model::Bits::Four, experts, width, hidden),
                up: generator.matrix(lily_model::Bits::Four, experts, width, hidden),
                down: generator.matrix(lily_model::Bits::Four, experts, hidden, width),
            };
            let (routed, shared) = (mlp(experts, width), mlp(1, shared_width));
            let weights = MoeWeights {
                router: generator.matrix(lily_model::Bits::Eight, 1, experts, hidden),
                experts: routed,
                shared,
                shared_gate: generator.matrix(lily_model::Bits::Eight, 1, 1, hidden),
            };
            let x = generator.values(tokens * hidden, 1.0);
            let logits = generator.values(tokens * experts, 1.0);
            let gates = generator.values(tokens, 1.0);
            let inputs = activations(pool, isa, &x, hidden);
            let mut routing = Routing::default();
            routing.choose(&logits, experts, per_token);

            let mut routed = Inner::new(tokens * per_token, width, hidden).unwrap();
            let mut own = Inner::new(tokens, shared_width, hidden).unwrap();
            let e = Experts { weights: &weights, routing: &routing, per_token, tokens };
            let mut got = vec![f32::NAN; tokens * hidden];
            gate_up(pool, isa, &e, &inputs, &mut routed, &mut own);
            down(pool, isa, &e, &gates, &mut routed, &mut own, &mut got);

            let x = rounded(isa, &inputs, tokens);
            let mut expected = Vec::new();
            for (token, x) in x.chunks_exact(hidden).enumerate() {
                let say = |mlp: &lily_model::Mlp, expert| {
                    let product = |matrix| ops::expert_linear(x, matrix, &[expert]);
                    let inner = ops::swiglu(&product(&mlp.gate), &product(&mlp.up));
                    ops::expert_linear(&inner, &mlp.down, &[expert])
                };
                let mut sum: Vec<f32> = say(&weights.shared, 0).iter().map(|y| y * gates[token]).collect();
                for (expert, weight) in ops::route(&logits[token * experts..][..experts], per_token) {
                    sum.iter_mut().zip(say(&weights.experts, expert)).for_each(|(sum, y)| *sum += weight * y);
                }
                expected.extend(sum);
            }
            assert_close(&got, &expected, ROUNDED_INNER, &format!("{isa:?} {tokens} tokens"));
        }
    });
}

/// The inputs of `down` are rounded again inside, where the test cannot see them.
const ROUNDED_INNER: Tolerance = Tolerance {
    value: 1e-4,
    reason: "inputs of down off by 1.6e-5 of the largest of their group, in sums of 128 and f32",
};

#[test]
fn activations_are_within_half_a_step_of_what_they_were_and_sums_are_of_what_they_became() {
    on_every_path(|pool, isa| {
        let mut x = Generator::new(3).values(5 * 192, 1.0);
        x[64..128].fill(0.0);
        x[192..256].iter_mut().for_each(|x| *x *= 1e-32);
        x[256..320].iter_mut().for_each(|x| *x *= 1e30);
        let inputs = activations(pool, isa, &x, 192);
        for token in 0..5 {
            let got = inputs.plain_row(isa, token);
            let groups = x[token * 192..][..192].chunks(64).zip(got.chunks(64));
            for ((x, got), sum) in groups.zip(inputs.row(token).sums) {
                let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                // Half a step and the rounding of the two products; below 1e-30 all is zero.
                let allowed = if largest < 1e-30 { largest } else { largest / 65024.0 * 1.01 };
                assert!(x.iter().zip(got).all(|(x, got)| (x - got).abs() <= allowed), "{isa:?} {x:?} {got:?}");
                let exact: f64 = got.iter().map(|x| f64::from(*x)).sum();
                assert!((f64::from(*sum) - exact).abs() <= 1e-5 * f64::from(largest), "{isa:?} {sum} {exact}");
            }
        }
    });
}

#[test]
fn what_is_not_finite_stays_so_through_a_linear() {
    on_every_path(|pool, isa| {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for tokens in [1, 20] {
                let mut generator = Generator::new(4);
                let matrix = generator.matrix(lily_model::Bits::Four, 1, 3, 128);
                let mut x = generator.values(tokens * 128, 1.0);
                x[70] = bad;
                let inputs = activations(pool, isa, &x, 128);
                let mut out = vec![0.0; tokens * 3];
                linear(pool, isa, Tokens::range(&inputs, 0, tokens), [Target { matrix: &matrix, out: &mut out }]);
                assert!(out[..3].iter().all(|y| !y.is_finite()), "{isa:?} {bad}");
                assert!(out[3..].iter().all(|y| y.is_finite()), "{isa:?} {bad}");
            }
        }
    });
}

#[test]
fn norms_and_gates_are_those_of_the_reference() {
    for isa in Isa::all() {
        for n in [64, 256, 320, 2048] {
            let mut generator = Generator::new(n as u64);
            let (x, y, w) = (generator.values(n, 3.0), generator.values(n, 5.0), generator.values(n, 1.0));
            let mut got = vec![0.0; n];
            rms_norm(isa, &x, &w, EPS, &mut got);
            assert_close(&got, &ops::rms_norm(&x, &w, EPS), F32_FORMULA, "rms_norm");
            rms_norm(isa, &vec![0.0; n], &w, EPS, &mut got);
            assert_eq!(got, vec![0.0; n], "rms_norm of zeros");
            swiglu(isa, &x, &y, &mut got);
            assert_close(&got, &ops::swiglu(&x, &y), F32_FORMULA, "swiglu");
            sigmoid_gate(isa, &x, &y, &mut got);
            assert_close(&got, &ops::attention_gate(&x, &y), F32_FORMULA, "attention gate");
            let mut sum = y.clone();
            add_weighted(isa, &mut sum, &x, 0.3);
            let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 0.3 * x + y).collect();
            assert_close(&sum, &expected, F32_FORMULA, "add_weighted");
        }
        // Gates far from zero saturate instead of overflowing.
        let mut got = [0.0; 4];
        swiglu(isa, &[-1e4, 1e4, -80.0, 80.0], &[2.0; 4], &mut got);
        assert!(got[0].abs() < 1e-30 && got[1] == 2e4 && got[2].abs() < 1e-30 && got[3] == 160.0, "{got:?}");
    }
}

#[test]
fn rope_is_that_of_the_reference_up_to_the_longest_context() {
    for position in [0, 1, 63, 1000, 262_143] {
        let mut head = Generator::new(4).values(Shape::HEAD_DIM, 1.0);
        let mut expected = head.clone();
        ops::rope(&mut expected, position, 1e7);
        Angles::at(position, 1e7).rotate(&mut head);
        assert_close(&head, &expected, F32_FORMULA, &format!("position {position}"));
    }
}

#[test]
fn routes_are_those_of_the_reference_and_visits_are_sorted_by_expert() {
    let mut routing = Routing::default();
    for (logits, count) in ROUTES {
        let two_tokens = [*logits, *logits].concat();
        routing.choose(&two_tokens, logits.len(), *count);
        let expected = ops::route(logits, *count);
        for token in 0..2 {
            let range = token * count..(token + 1) * count;
            let experts: Vec<usize> = routing.experts[range.clone()].iter().map(|e| *e as usize).collect();
            assert_eq!(experts, expected.iter().map(|(e, _)| *e).collect::<Vec<_>>(), "{logits:?}");
            let weights: Vec<f32> = expected.iter().map(|(_, w)| *w).collect();
            assert_close(&routing.weights[range], &weights, F32_FORMULA, &format!("{logits:?}"));
            for (visit, (expert, _)) in routing.of_token(token, *count).map(|(visit, _)| visit).zip(&expected) {
                assert_eq!(routing.visitors[visit] as usize, token);
                let own =
                    routing.visited().iter().map(|e| routing.visits(*e)).find(|(_, visits)| visits.contains(&visit));
                assert_eq!(own.map(|(expert, _)| expert), Some(*expert));
            }
        }
    }
}

#[test]
fn samples_are_those_of_the_reference() {
    let base = SamplingParams { temperature: 0.8, ..SamplingParams::greedy(900) };
    let biases: std::sync::Arc<[(u32, f32)]> = [(3, 4.0), (899, -2.0), (17, f32::NEG_INFINITY)].into();
    let variants = [
        SamplingParams::greedy(900),
        base.clone(),
        SamplingParams { temperature: 3.0, ..base.clone() },
        SamplingParams { top_k: 1, ..base.clone() },
        SamplingParams { top_k: 300, ..base.clone() },
        SamplingParams { top_p: 0.7, ..base.clone() },
        SamplingParams { top_p: 0.95, top_k: 20, min_p: 0.05, ..base.clone() },
        SamplingParams { min_p: 0.2, ..base.clone() },
        SamplingParams { logit_bias: biases.clone(), ..base.clone() },
        SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.2, ..base.clone() },
        SamplingParams { repetition_penalty: 1.5, logit_bias: biases, penalty_start: 4, ..SamplingParams::greedy(900) },
        SamplingParams { logprobs: Some(7), ..base.clone() },
        SamplingParams { masked: true, ..base.clone() },
    ];
    let mask: Vec<u32> = (0..20).map(|i| 0x1111_0000 << (i % 4)).collect();
    for isa in Isa::all() {
        for (v, params) in variants.iter().enumerate() {
            for seed in 0..40u64 {
                let mut generator = Generator::new(seed);
                let mut logits = generator.values(1000, 3.0);
                // Ties at the top and elsewhere.
                (logits[500], logits[400]) = (9.0, 9.0);
                logits[seed as usize] = logits[seed as usize + 1];
                let tokens = generator.ids(6 + seed as usize, 1000);
                let params = SamplingParams { seed, ..params.clone() };
                let mask = params.masked.then_some(mask.as_slice());
                let penalized = &tokens[params.penalty_start.min(tokens.len())..];
                let context = Context { penalized, mask, position: tokens.len() };
                let got = sample(isa, &logits, &params, &context).unwrap();
                let expected = ops::sample(&logits, &params, &tokens, mask).unwrap();
                assert_eq!(got.id, expected.id, "{isa:?} variant {v}, seed {seed}");
                assert_eq!(got.logprobs.is_some(), expected.logprobs.is_some());
                if let (Some(got), Some(expected)) = (got.logprobs, expected.logprobs) {
                    assert_close(&[got.chosen], &[expected.chosen], F32_FORMULA, "chosen");
                    let ids = |top: &[(u32, f32)]| top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
                    let logs = |top: &[(u32, f32)]| top.iter().map(|(_, log)| *log).collect::<Vec<_>>();
                    assert_eq!(ids(&got.top), ids(&expected.top));
                    assert_close(&logs(&got.top), &logs(&expected.top), F32_FORMULA, "top");
                }
            }
        }
    }
}

#[test]
fn bad_logits_and_empty_choices_are_told_apart() {
    for isa in Isa::all() {
        let context = |mask| Context { penalized: &[], mask, position: 1 };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // In a whole vector and in the tail.
            for at in [3, 42] {
                let mut logits = vec![0.5; 43];
                logits[at] = bad;
                let got = sample(isa, &logits, &SamplingParams::greedy(2), &context(None));
                assert_eq!(got, Err(NoToken::BadLogits), "{bad} at {at}");
                let reference = ops::sample(&logits, &SamplingParams::greedy(2), &[1], None);
                assert!(matches!(reference, Err(Error::BadLogits { .. })));
            }
        }
        for temperature in [0.0, 1.0] {
            let masked = SamplingParams { masked: true, temperature, ..SamplingParams::greedy(43) };
            assert_eq!(sample(isa, &[0.5; 43], &masked, &context(Some(&[]))), Err(NoToken::Excluded));
            let beyond = SamplingParams { vocab_limit: 32, ..masked };
            assert_eq!(sample(isa, &[0.5; 43], &beyond, &context(Some(&[0, 1]))), Err(NoToken::Excluded));
        }
    }
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let mut worst = 0f64;
    for i in -87_000..=88_000 {
        let x = i as f32 / 1000.0;
        for got in [exp::<false>(x), exp::<true>(x)] {
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(got) / exact - 1.0).abs());
        }
    }
    // One unit in the last place is at most 1.2e-7 of the value.
    assert!(worst < 2.4e-7, "{worst:e}");
}

#[test]
fn exp_keeps_nan_and_saturates() {
    assert!(exp::<false>(f32::NAN).is_nan());
    assert!(exp::<false>(f32::NEG_INFINITY) < 1e-37);
    assert!(exp::<false>(f32::INFINITY) > 1e38);
    assert_eq!(exp::<false>(0.0), 1.0);
}

#[test]
fn dot_sums_every_lane() {
    for n in [8, 32, 40, 128, 264] {
        let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let b = vec![1.0; n];
        assert_eq!(dot::<false>(&a, &b), (n * (n - 1) / 2) as f32);
    }
}
