//! The laws of sampling: what [`SamplingParams`] promises, of every backend's own sampler.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::laws::{Device, Subject, feed_row, token, tokens};
use crate::{Error, Input, Row, SampledToken, SamplingParams, Want};

/// The highest logit's id below `limit`, the lowest on ties.
fn highest(logits: &[f32], limit: usize) -> u32 {
    let mut best = 0;
    for (id, logit) in logits[..limit].iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Greedy is the highest raw logit of the last token, the lowest id on ties, below the limit of the vocabulary.
pub fn greedy_takes_the_highest_logit_below_the_limit(subject: &Subject<'_>) {
    let mut device = subject.device();
    let ids = device.prompt(14, 11);
    let state = device.state();
    let logits = device.last_logits(state, &ids);
    assert_eq!(logits.len(), device.vocab());
    let top = highest(&logits, logits.len());
    for limit in [logits.len() as u32, u32::MAX, top + 1, top.max(1), 1] {
        let state = device.state();
        let token = device.sample(state, tokens(&ids), SamplingParams::greedy(limit));
        assert_eq!(token, SampledToken { id: highest(&logits, logits.len().min(limit as usize)), logprobs: None });
    }
}

/// The same seed at the same position draws the same token, alone or not; another seed another one now and then; top-k of
/// one, a tiny top-p, a min-p of one and a tiny temperature are greedy.
pub fn draws_depend_on_seed_and_position_only(subject: &Subject<'_>) {
    let mut device = subject.device();
    let limit = device.vocab() as u32;
    let ids = device.prompt(15, 6);
    let hot = |seed| SamplingParams { temperature: 1.5, seed, ..SamplingParams::greedy(limit) };
    let draw = |device: &mut Device, params: SamplingParams| {
        let state = device.state();
        let token = device.sample(state, tokens(&ids), params);
        device.0.free_state(state).expect("freed");
        token.id
    };
    let seeds = 0..24;
    let first: Vec<u32> = seeds.clone().map(|seed| draw(&mut device, hot(seed))).collect();
    let second: Vec<u32> = seeds.map(|seed| draw(&mut device, hot(seed))).collect();
    assert_eq!(first, second);
    assert!(first.iter().collect::<BTreeSet<_>>().len() > 1, "24 seeds drew one token at temperature 1.5");
    let greedy = draw(&mut device, SamplingParams::greedy(limit));
    for params in [
        SamplingParams { top_k: 1, ..hot(1) },
        SamplingParams { top_p: 1e-6, ..hot(1) },
        SamplingParams { min_p: 1.0, ..hot(1) },
        SamplingParams { temperature: 1e-30, ..hot(1) },
    ] {
        assert_eq!(draw(&mut device, params.clone()), greedy, "{params:?}");
    }
}

/// A bias lifts or bans a token; penalties count the tokens from `penalty_start` on, those of this step included.
pub fn biases_and_penalties_move_the_choice(subject: &Subject<'_>) {
    let mut device = subject.device();
    let limit = device.vocab() as u32;
    let mut ids = device.prompt(16, 10);
    let greedy = || SamplingParams::greedy(limit);
    let choose = |device: &mut Device, ids: &[u32], params: SamplingParams| {
        let state = device.state();
        device.feed(state, &ids[..4]);
        device.sample(state, tokens(&ids[4..]), params).id
    };
    let lifted = SamplingParams { logit_bias: Arc::new([(7, 1e4)]), ..greedy() };
    assert_eq!(choose(&mut device, &ids, lifted), 7);
    let top = choose(&mut device, &ids, greedy());
    let banned = SamplingParams { logit_bias: Arc::new([(top, f32::NEG_INFINITY)]), ..greedy() };
    assert_ne!(choose(&mut device, &ids, banned), top);
    // A token that is bound to win stands once before and once in the step that samples.
    (ids[1], ids[6]) = (7, 7);
    let biased = |penalty_start, frequency_penalty| SamplingParams {
        logit_bias: Arc::new([(7, 1000.0)]),
        frequency_penalty,
        penalty_start,
        ..greedy()
    };
    assert_eq!(choose(&mut device, &ids, biased(0, 0.0)), 7);
    assert_ne!(choose(&mut device, &ids, biased(0, 600.0)), 7, "two occurrences");
    assert_eq!(choose(&mut device, &ids, biased(2, 600.0)), 7, "one of them counts");
    assert_ne!(choose(&mut device, &ids, biased(2, 1200.0)), 7);
    assert_eq!(choose(&mut device, &ids, biased(7, 1200.0)), 7, "none counts");
    let presence = SamplingParams { presence_penalty: 1200.0, ..biased(0, 0.0) };
    assert_ne!(choose(&mut device, &ids, presence), 7);
    let repetition = SamplingParams { repetition_penalty: 1e6, ..biased(0, 0.0) };
    assert_ne!(choose(&mut device, &ids, repetition), 7);
}

/// Reported log-probabilities are `ln softmax` of the raw logits whatever moves the choice, falling, lowest id first.
pub fn log_probabilities_are_those_of_the_raw_logits(subject: &Subject<'_>) {
    let mut device = subject.device();
    let limit = device.vocab() as u32;
    let ids = device.prompt(17, 9);
    let state = device.state();
    let logits = device.last_logits(state, &ids);
    let max = f64::from(logits[highest(&logits, logits.len()) as usize]);
    let log_sum = logits.iter().map(|l| (f64::from(*l) - max).exp()).sum::<f64>().ln() + max;
    let expected = |id: u32| (f64::from(logits[id as usize]) - log_sum) as f32;
    for top in [0, 1, 20] {
        let params = SamplingParams {
            logprobs: Some(top),
            logit_bias: Arc::new([(3, 1e4)]),
            temperature: 0.5,
            ..SamplingParams::greedy(limit)
        };
        let state = device.state();
        let token = device.sample(state, tokens(&ids), params);
        let report = token.logprobs.expect("log-probabilities were asked for");
        assert_eq!((token.id, report.top.len()), (3, top as usize));
        // A sum of a large vocabulary in f32 may lose a few units in the last place of 10.
        assert!((report.chosen - expected(3)).abs() < 1e-4, "{} and {}", report.chosen, expected(3));
        assert!(report.top.iter().all(|(id, log)| (log - expected(*id)).abs() < 1e-4), "{report:?}");
        let falls = |pair: &[(u32, f32)]| {
            let [(a, _), (b, _)] = pair else { return true };
            let (x, y) = (logits[*a as usize], logits[*b as usize]);
            x > y || (x == y && a < b)
        };
        assert!(report.top.windows(2).all(falls), "{report:?}");
        if let Some((first, _)) = report.top.first() {
            assert_eq!(*first, highest(&logits, logits.len()));
        }
    }
}

/// A masked row samples among the allowed tokens once its mask is there; without it waiting is an error, and so is a mask
/// that allows nothing.
pub fn a_mask_decides_what_may_be_sampled(subject: &Subject<'_>) {
    let mut device = subject.device();
    let limit = device.vocab() as u32;
    let ids = device.prompt(18, 5);
    let state = device.state();
    let raw = device.last_logits(state, &ids);
    let masked = SamplingParams { masked: true, ..SamplingParams::greedy(limit) };
    let submit = |device: &mut Device| {
        let state = device.state();
        let ticket = device.submit(vec![Row { state, input: tokens(&ids), want: Want::Token(masked.clone()) }]);
        (state, ticket)
    };
    let mask_of = |allowed: &[u32]| {
        let mut mask = vec![0u32; limit.div_ceil(32) as usize];
        allowed.iter().for_each(|id| mask[*id as usize / 32] |= 1 << (id % 32));
        mask
    };
    let (state, ticket) = submit(&mut device);
    assert!(matches!(device.0.wait(ticket), Err(Error::BadStep(_))), "without the mask");
    device.0.set_mask(ticket, 1, &[]).expect_err("a row that does not exist");
    let allowed = [5, 40, 41, 300 % limit];
    device.0.set_mask(ticket, 0, &mask_of(&allowed)).expect("the mask");
    let best = allowed.iter().copied().reduce(|a, b| {
        let (x, y) = (raw[a as usize], raw[b as usize]);
        if y > x || (y == x && b < a) { b } else { a }
    });
    assert_eq!(Some(token(device.wait(ticket).rows.remove(0)).id), best);
    device.step(vec![Row { state, input: Input::PreviousSample, want: Want::Nothing }]);
    assert_eq!(device.position(state), 6);
    // Words beyond the end of a mask count as zero.
    let (_, ticket) = submit(&mut device);
    device.0.set_mask(ticket, 0, &[1 << 9]).expect("a short mask");
    assert_eq!(token(device.wait(ticket).rows.remove(0)).id, 9);
    let (_, ticket) = submit(&mut device);
    device.0.set_mask(ticket, 0, &[]).expect("an empty mask");
    assert!(matches!(device.0.wait(ticket), Err(Error::EmptyMask(0))), "nothing is allowed");
}

/// While a masked step waits for its mask its state takes no other step, and a masked step is refused while another is in
/// flight; other states are not concerned.
pub fn a_masked_step_is_alone_with_its_state(subject: &Subject<'_>) {
    let mut device = subject.device();
    let more_in_flight = device.0.caps().steps_in_flight > 1;
    let limit = device.vocab() as u32;
    let (state, other) = (device.state(), device.state());
    let masked = || {
        let params = SamplingParams { masked: true, ..SamplingParams::greedy(limit) };
        vec![Row { state, input: tokens(&[1]), want: Want::Token(params) }]
    };
    let first = device.submit(vec![feed_row(state, &[2])]);
    assert!(matches!(device.refusal(masked()), Error::BadStep(_)), "another step is in flight");
    device.wait(first);
    let ticket = device.submit(masked());
    assert!(matches!(device.refusal(vec![feed_row(state, &[2])]), Error::BadStep(_)), "the mask is not there");
    let beside = more_in_flight.then(|| device.submit(vec![feed_row(other, &[2])]));
    device.0.set_mask(ticket, 0, &[u32::MAX]).expect("the mask");
    assert!(token(device.wait(ticket).rows.remove(0)).id < 32);
    if let Some(beside) = beside {
        device.wait(beside);
    }
    device.feed(state, &[2]);
    assert_eq!((device.position(state), device.position(other)), (3, usize::from(more_in_flight)));
}
