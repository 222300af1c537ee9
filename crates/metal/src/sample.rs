//! Choosing a token from logits on the host, which shares memory with the GPU: everything but the plain highest logit, by the
//! steps that [`SamplingParams`] lists. Reference: `lily_reference::ops::sample`.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use lily_backend::{LogProbs, SampledToken, SamplingParams};

/// Why no token was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoToken {
    /// A logit is NaN or infinite.
    BadLogits,
    /// Limit, biases and mask exclude every id.
    Excluded,
}

/// Whether the highest raw logit below the limit is what is wanted, which the GPU finds itself.
pub(crate) fn is_plain_greedy(p: &SamplingParams) -> bool {
    p.temperature == 0.0 && p.logit_bias.is_empty() && !p.masked && !has_penalties(p)
}

/// Whether earlier tokens matter.
pub(crate) fn has_penalties(p: &SamplingParams) -> bool {
    p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0
}

/// Samples the token for `position`. `penalized` are the tokens that count for penalties; `mask` is a masked row's.
pub(crate) fn sample(
    logits: &[f32],
    params: &SamplingParams,
    penalized: &[u32],
    mask: Option<&[u32]>,
    position: usize,
) -> Result<SampledToken, NoToken> {
    if !logits.iter().all(|logit| logit.is_finite()) {
        return Err(NoToken::BadLogits);
    }
    let scores = scores(logits, params, penalized);
    let limit = logits.len().min(params.vocab_limit as usize);
    let in_mask =
        |id: &usize| mask.is_none_or(|words| words.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1));
    let allowed = (0..limit).filter(in_mask).filter(|id| scores[*id] > f32::NEG_INFINITY);
    let candidates: Vec<Candidate> = allowed.map(|id| Candidate { score: scores[id], id: id as u32 }).collect();
    let chosen = match params.temperature {
        0.0 => candidates.iter().max().ok_or(NoToken::Excluded)?.id,
        _ => draw(candidates, params, position)?,
    };
    Ok(SampledToken { id: chosen, logprobs: params.logprobs.map(|top| report(logits, chosen, top as usize)) })
}

/// Log-probabilities under the raw logits.
pub(crate) fn report(logits: &[f32], chosen: u32, top: usize) -> LogProbs {
    let all = logits.iter().zip(0..).map(|(score, id)| Candidate { score: *score, id });
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let log_sum = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln();
    let log = |id: u32| (f64::from(logits[id as usize]) - max - log_sum) as f32;
    let mut falling = Falling::default();
    if top > 0 {
        falling.rest = all.collect();
    }
    let top = (0..top).map_while(|i| falling.get(i)).map(|candidate| (candidate.id, log(candidate.id))).collect();
    LogProbs { chosen: log(chosen), top }
}

/// Logits after biases and penalties.
fn scores(logits: &[f32], params: &SamplingParams, penalized: &[u32]) -> Vec<f32> {
    let mut scores = logits.to_vec();
    for (id, bias) in params.logit_bias.iter() {
        scores[*id as usize] += bias;
    }
    let mut tokens = penalized.to_vec();
    tokens.sort_unstable();
    for same in tokens.chunk_by(|a, b| a == b) {
        let score = &mut scores[same[0] as usize];
        let repeated = params.repetition_penalty;
        *score = if *score > 0.0 { *score / repeated } else { *score * repeated };
        *score -= params.presence_penalty + params.frequency_penalty * same.len() as f32;
    }
    scores
}

/// An id with its score. The greater one comes first: the higher score, the lower id on ties.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f32,
    id: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        // Adding zero makes -0 equal to 0.
        (self.score + 0.0).total_cmp(&(other.score + 0.0)).then(other.id.cmp(&self.id))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// Candidates in falling order, sorted only as far as they are asked for: a draw seldom looks at more than a few hundred of
/// a large vocabulary.
#[derive(Default)]
struct Falling {
    sorted: Vec<Candidate>,
    rest: BinaryHeap<Candidate>,
}

impl Falling {
    /// The `i`-th.
    fn get(&mut self, i: usize) -> Option<Candidate> {
        while self.sorted.len() <= i {
            self.sorted.push(self.rest.pop()?);
        }
        Some(self.sorted[i])
    }
}

/// Draws at a temperature above 0.
fn draw(candidates: Vec<Candidate>, params: &SamplingParams, position: usize) -> Result<u32, NoToken> {
    let max = candidates.iter().max().ok_or(NoToken::Excluded)?.score;
    // The highest is subtracted first, so that no temperature is too small.
    let weight = |candidate: &Candidate| f64::from((candidate.score - max) / params.temperature).exp();
    let (all, mut total) = (candidates.len(), candidates.iter().map(weight).sum::<f64>());
    let mut falling = Falling { sorted: Vec::new(), rest: candidates.into() };
    let mut count = all;
    if params.top_k > 0 && (params.top_k as usize) < all {
        count = params.top_k as usize;
        total = (0..count).map_while(|i| falling.get(i)).map(|candidate| weight(&candidate)).sum();
    }
    // Rounded as probabilities are reported: the tests against top-p and min-p are on these.
    let probability = |candidate: &Candidate| (weight(candidate) / total) as f32;
    let mut kept_sum = 1.0;
    if params.top_p < 1.0 || params.min_p > 0.0 {
        let (mut kept, mut sum, mut least) = (0, 0.0, 0.0);
        while kept < count && sum < f64::from(params.top_p) {
            let Some(candidate) = falling.get(kept) else { break };
            let p = probability(&candidate);
            if kept == 0 {
                least = params.min_p * p;
            }
            if p < least {
                break;
            }
            sum += f64::from(p);
            kept += 1;
        }
        (count, kept_sum) = (kept, sum);
    }
    let target = f64::from(SamplingParams::uniform(params.seed, position)) * kept_sum;
    let (mut sum, mut i) = (0.0, 0);
    loop {
        let candidate = falling.get(i).ok_or(NoToken::Excluded)?;
        sum += f64::from(probability(&candidate));
        i += 1;
        // The last one takes what rounding has left.
        if sum > target || i >= count {
            return Ok(candidate.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_backend::Error;
    use lily_backend::conformance::cases::Generator;
    use lily_reference::ops;

    #[test]
    fn choices_and_reports_are_those_of_the_reference() {
        let mut g = Generator::new(11);
        let mut logits = g.values(500, 3.0);
        (logits[17], logits[40], logits[41]) = (2.0, 2.0, -0.0);
        let tokens = g.ids(30, 500);
        let mask: Vec<u32> = (0..12).map(|i| 0xA5A5_5A5A ^ i).collect();
        let mut drawn = 0;
        for seed in 0..60 {
            let pick = |values: &[f32], n: u64| values[(n % values.len() as u64) as usize];
            let n = g.bits();
            let params = SamplingParams {
                temperature: pick(&[0.0, 0.3, 1.0, 2.0], n),
                top_k: [0, 1, 7, 600][(n >> 8) as usize % 4],
                top_p: pick(&[1.0, 0.9, 0.3, 1e-6], n >> 16),
                min_p: pick(&[0.0, 0.05, 1.0], n >> 24),
                repetition_penalty: pick(&[1.0, 1.3], n >> 32),
                presence_penalty: pick(&[0.0, 0.5], n >> 36),
                frequency_penalty: pick(&[0.0, 0.25], n >> 40),
                penalty_start: 10,
                logit_bias: [(3, 4.0), (9, f32::NEG_INFINITY)].into(),
                vocab_limit: [500, 77][(n >> 44) as usize % 2],
                seed,
                masked: n >> 48 & 1 == 1,
                logprobs: Some(5),
            };
            let mask = params.masked.then_some(&mask[..]);
            let expected = ops::sample(&logits, &params, &tokens, mask).expect("a token");
            let penalized = if has_penalties(&params) { &tokens[10..] } else { &[] };
            let got = sample(&logits, &params, penalized, mask, tokens.len()).expect("a token");
            assert_eq!(got.id, expected.id, "{params:?}");
            let (got, expected) = (got.logprobs.expect("asked for"), expected.logprobs.expect("asked for"));
            assert_eq!(
                got.top.iter().map(|(id, _)| id).collect::<Vec<_>>(),
                expected.top.iter().map(|(id, _)| id).collect::<Vec<_>>()
            );
            assert!((got.chosen - expected.chosen).abs() < 1e-6);
            drawn += usize::from(params.temperature > 0.0);
        }
        assert!(drawn > 20);
    }

    #[test]
    fn what_cannot_be_sampled_is_an_error() {
        let greedy = SamplingParams::greedy(4);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(sample(&[1.0, bad], &greedy, &[], None, 1), Err(NoToken::BadLogits));
            assert!(matches!(ops::sample(&[1.0, bad], &greedy, &[0], None), Err(Error::BadLogits { .. })));
        }
        let masked = SamplingParams { masked: true, temperature: 1.0, ..greedy };
        assert_eq!(sample(&[1.0; 4], &masked, &[], Some(&[0]), 1), Err(NoToken::Excluded));
    }
}
