//! The laws of sampling, on distributions small enough to know by heart.

use std::collections::BTreeSet;

use lily_backend::{Error, SampledToken, SamplingParams};
use lily_reference::ops::sample;

/// Logits of these probabilities.
fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

/// At temperature 1 over a vocabulary of that size, nothing else.
fn plain(vocab: usize) -> SamplingParams {
    SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::greedy(vocab as u32) }
}

fn id(logits: &[f32], params: &SamplingParams, tokens: &[u32]) -> u32 {
    sample(logits, params, tokens, None).expect("there are tokens to choose from").id
}

/// How often each id is drawn at `draws` positions.
fn counts(logits: &[f32], params: &SamplingParams, draws: usize) -> Vec<usize> {
    let (mut counts, tokens) = (vec![0; logits.len()], vec![0; draws]);
    for position in 1..=draws {
        counts[id(logits, params, &tokens[..position]) as usize] += 1;
    }
    counts
}

/// The ids that are ever drawn; with 2000 draws one of probability 0.01 is missed once in 500 million.
fn support(logits: &[f32], params: &SamplingParams) -> BTreeSet<usize> {
    counts(logits, params, 2000).iter().enumerate().filter(|(_, n)| **n > 0).map(|(id, _)| id).collect()
}

#[test]
fn greedy_is_the_highest_logit_and_the_lowest_id_on_ties() {
    let greedy = SamplingParams::greedy(4);
    assert_eq!(id(&[0.0, 3.0, -1.0, 3.0], &greedy, &[0]), 1);
    assert_eq!(id(&[-1.0, -0.0, 0.0, -2.0], &greedy, &[0]), 1);
}

#[test]
fn draws_follow_the_softmax_at_the_temperature() {
    let weights = [0.5f64, 0.3, 0.15, 0.05];
    let draws = 20_000;
    for temperature in [0.7, 1.0, 1.8] {
        let params = SamplingParams { temperature, ..plain(4) };
        let powers = weights.map(|w| w.powf(1.0 / f64::from(temperature)));
        let counts = counts(&logits(&weights.map(|w| w as f32)), &params, draws);
        for (count, power) in counts.iter().zip(powers) {
            let p = power / powers.iter().sum::<f64>();
            // Six standard deviations of a binomial count.
            let bound = 6.0 * (draws as f64 * p * (1.0 - p)).sqrt();
            assert!((*count as f64 - draws as f64 * p).abs() < bound, "temperature {temperature}: {counts:?}");
        }
    }
}

#[test]
fn the_smallest_temperature_is_greedy_among_unequal_logits() {
    let params = SamplingParams { temperature: f32::MIN_POSITIVE, ..plain(3) };
    assert_eq!(support(&[1.0, 5.0, 4.999], &params), BTreeSet::from([1]));
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits = logits(&[0.25; 4]);
    let params = plain(4);
    let at = |params: &SamplingParams, tokens: &[u32]| id(&logits, params, tokens);
    let series = |params: &SamplingParams| (1..40).map(|n| at(params, &vec![0; n])).collect::<Vec<_>>();
    assert_eq!(series(&params), series(&params));
    assert_eq!(at(&params, &[1, 2, 3]), at(&params, &[3, 1, 0]));
    assert_ne!(series(&params), series(&SamplingParams { seed: 12, ..params.clone() }));
}

#[test]
fn ids_beyond_the_limit_outside_the_mask_or_biased_to_minus_infinity_are_never_chosen() {
    let logits = [1.0, 2.0, 3.0, 9.0, 10.0];
    for temperature in [0.0, 5.0] {
        let params = SamplingParams { temperature, masked: true, ..plain(4) };
        for n in 1..200 {
            let chosen = sample(&logits, &params, &vec![0; n], Some(&[0b10011])).expect("0 and 1 are allowed").id;
            assert!(chosen < 2, "{chosen}");
        }
        let bias = [(3, f32::NEG_INFINITY), (2, f32::NEG_INFINITY)].into();
        let params = SamplingParams { temperature, logit_bias: bias, ..plain(4) };
        assert!((1..200).all(|n| id(&logits, &params, &vec![0; n]) < 2));
    }
}

#[test]
fn a_mask_that_allows_nothing_is_an_error() {
    let outcome = |mask: &[u32]| sample(&[1.0, 2.0, 3.0], &SamplingParams::greedy(2), &[0], Some(mask));
    assert!(matches!(outcome(&[]), Err(Error::EmptyMask(0))));
    assert!(matches!(outcome(&[0b100]), Err(Error::EmptyMask(0))));
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let outcome = sample(&[0.0, bad, 1.0], &SamplingParams::greedy(1), &[0, 0, 0], None);
        assert!(matches!(outcome, Err(Error::BadLogits { row: 0, position: 2 })), "{bad}: {outcome:?}");
    }
}

#[test]
fn biases_are_added_before_penalties() {
    // Raised from -1 to 2, divided by 4: 0.5 beats 0.4. Divided first, -4 + 3 would lose to it.
    let params = SamplingParams { logit_bias: [(0, 3.0)].into(), repetition_penalty: 4.0, ..SamplingParams::greedy(2) };
    assert_eq!(id(&[-1.0, 0.4], &params, &[0]), 0);
    assert_eq!(id(&[-1.0, 0.6], &params, &[0]), 1);
}

#[test]
fn repetition_divides_positive_logits_and_multiplies_the_others() {
    let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy(2) };
    assert_eq!(id(&[3.0, 1.6], &params, &[0]), 1);
    assert_eq!(id(&[3.0, 1.4], &params, &[0, 0]), 0);
    assert_eq!(id(&[-1.0, -1.9], &params, &[0]), 1);
    assert_eq!(id(&[-1.0, -2.1], &params, &[0]), 0);
}

#[test]
fn presence_counts_once_and_frequency_every_time() {
    let presence = SamplingParams { presence_penalty: 1.0, ..SamplingParams::greedy(2) };
    assert_eq!(id(&[2.0, 0.9], &presence, &[0, 0, 0]), 0);
    assert_eq!(id(&[2.0, 1.1], &presence, &[0, 0, 0]), 1);
    let frequency = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::greedy(2) };
    assert_eq!(id(&[2.0, 0.9], &frequency, &[0, 0]), 0);
    assert_eq!(id(&[2.0, 0.9], &frequency, &[0, 0, 0]), 1);
}

#[test]
fn tokens_of_the_prompt_are_not_penalised() {
    let params = SamplingParams { presence_penalty: 5.0, penalty_start: 2, ..SamplingParams::greedy(2) };
    assert_eq!(id(&[2.0, 1.0], &params, &[0, 0]), 0);
    assert_eq!(id(&[2.0, 1.0], &params, &[0, 0, 0]), 1);
}

#[test]
fn top_k_keeps_the_highest_and_the_lowest_ids_on_ties() {
    let params = SamplingParams { top_k: 2, ..plain(4) };
    assert_eq!(support(&logits(&[0.1, 0.3, 0.3, 0.3]), &params), BTreeSet::from([1, 2]));
    assert_eq!(support(&logits(&[0.1, 0.3, 0.3, 0.3]), &SamplingParams { top_k: 9, ..plain(4) }).len(), 4);
}

#[test]
fn top_p_is_the_shortest_prefix_that_reaches_it() {
    let logits = logits(&[0.15, 0.5, 0.05, 0.3]);
    for (top_p, expected) in [(1e-6, vec![1]), (0.45, vec![1]), (0.55, vec![1, 3]), (0.85, vec![0, 1, 3])] {
        let params = SamplingParams { top_p, ..plain(4) };
        assert_eq!(support(&logits, &params), BTreeSet::from_iter(expected), "top_p {top_p}");
    }
}

#[test]
fn top_p_sees_the_probabilities_that_top_k_left() {
    // 0.5 of 0.8 is above 0.6, of 1 it is below.
    let params = SamplingParams { top_k: 2, top_p: 0.6, ..plain(3) };
    assert_eq!(support(&logits(&[0.5, 0.3, 0.2]), &params), BTreeSet::from([0]));
}

#[test]
fn min_p_is_relative_to_the_highest_probability() {
    let params = SamplingParams { min_p: 0.25, ..plain(4) };
    assert_eq!(support(&logits(&[0.6, 0.2, 0.14, 0.06]), &params), BTreeSet::from([0, 1]));
}

#[test]
fn reported_probabilities_are_those_of_the_raw_logits() {
    let params =
        SamplingParams { logit_bias: [(2, 100.0)].into(), temperature: 0.3, top_k: 1, logprobs: Some(2), ..plain(3) };
    // A vocabulary beyond the limit takes part in the report.
    let logits = logits(&[0.1, 0.2, 0.3, 0.4]);
    let SampledToken { id, logprobs } = sample(&logits, &params, &[0], None).expect("2 is allowed");
    let report = logprobs.expect("it was asked for");
    assert_eq!(id, 2);
    let is_log_of = |log: f32, p: f32| (log - p.ln()).abs() < 1e-6;
    assert!(is_log_of(report.chosen, 0.3), "{report:?}");
    let [(first, p_first), (second, p_second)] = report.top[..] else { panic!("{report:?}") };
    assert_eq!((first, second), (3, 2));
    assert!(is_log_of(p_first, 0.4) && is_log_of(p_second, 0.3), "{report:?}");
}
