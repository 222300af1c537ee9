//! Choosing a token from logits f32 `[vocab]`, by the steps that [`SamplingParams`] lists.
//!
//! One worker does it: a pass over a vocabulary of 248,320 takes a tenth of a millisecond, and only the head of the
//! falling order is ever sorted.
//! Reference: `lily_reference::ops::sample`.

use lily_backend::{LogProbs, SampledToken, SamplingParams};

use super::norm::all_finite;
use super::{LANES, exp, kernel};
use crate::device::Isa;

/// Why no token was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoToken {
    /// A logit is NaN or infinite.
    BadLogits,
    /// Limit, biases and mask exclude every id.
    Excluded,
}

/// What a row's sampling needs beside its parameters.
pub(crate) struct Context<'a> {
    /// Tokens that count for the penalties.
    pub(crate) penalized: &'a [u32],
    /// Constraint of a masked row.
    pub(crate) mask: Option<&'a [u32]>,
    /// Position of the token to be sampled.
    pub(crate) position: usize,
}

/// Samples one token.
pub(crate) fn sample(
    isa: Isa,
    logits: &[f32],
    params: &SamplingParams,
    context: &Context<'_>,
) -> Result<SampledToken, NoToken> {
    if !all_finite(isa, logits) {
        return Err(NoToken::BadLogits);
    }
    let id = if is_plain_greedy(params) {
        let limit = logits.len().min(params.vocab_limit as usize);
        highest(&logits[..limit]).ok_or(NoToken::Excluded)?
    } else {
        let scores = scores(logits, params, context);
        if params.temperature == 0.0 {
            highest(&scores).filter(|id| scores[*id as usize] != f32::NEG_INFINITY).ok_or(NoToken::Excluded)?
        } else {
            draw(isa, &scores, params, context.position)?
        }
    };
    let logprobs = params.logprobs.map(|top| report(isa, logits, id, top as usize));
    Ok(SampledToken { id, logprobs })
}

/// Whether the raw logits decide alone.
fn is_plain_greedy(p: &SamplingParams) -> bool {
    p.temperature == 0.0 && p.logit_bias.is_empty() && !p.masked && !has_penalties(p)
}

/// Whether earlier tokens matter.
pub(crate) fn has_penalties(p: &SamplingParams) -> bool {
    p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0
}

/// The first index of the highest value.
fn highest(values: &[f32]) -> Option<u32> {
    let max = values.chunks(1024).map(|c| c.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m }));
    let (chunk, max) = max.enumerate().fold(None, |best: Option<(usize, f32)>, (i, max)| match best {
        Some((_, m)) if max <= m => best,
        _ => Some((i, max)),
    })?;
    let first = chunk * 1024;
    values[first..].iter().position(|x| *x == max).map(|i| (first + i) as u32)
}

/// Logits after biases, exclusions (minus infinity) and penalties.
fn scores(logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Vec<f32> {
    let mut scores = logits.to_vec();
    for (id, bias) in params.logit_bias.iter() {
        scores[*id as usize] += bias;
    }
    if has_penalties(params) {
        let mut tokens = context.penalized.to_vec();
        tokens.sort_unstable();
        for same in tokens.chunk_by(|a, b| a == b) {
            let score = &mut scores[same[0] as usize];
            let repeated = params.repetition_penalty;
            *score = if *score > 0.0 { *score / repeated } else { *score * repeated };
            *score -= params.presence_penalty + params.frequency_penalty * same.len() as f32;
        }
    }
    let limit = scores.len().min(params.vocab_limit as usize);
    scores[limit..].fill(f32::NEG_INFINITY);
    if let Some(mask) = context.mask {
        for (i, scores) in scores.chunks_mut(32).enumerate() {
            let allowed = mask.get(i).copied().unwrap_or(0);
            for (bit, score) in scores.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
    }
    scores
}

/// Ids in falling order of their values, the lowest id first on ties; sorted only as far as it is asked for.
struct Falling<'a> {
    values: &'a [f32],
    ids: Vec<u32>,
    sorted: usize,
}

impl<'a> Falling<'a> {
    fn new(values: &'a [f32], ids: Vec<u32>) -> Falling<'a> {
        Falling { values, ids, sorted: 0 }
    }

    /// The `i`-th, for `i` that grow.
    fn get(&mut self, i: usize) -> Option<u32> {
        /// Sorted at first; four times as many whenever these did not suffice.
        const FIRST: usize = 256;
        if i >= self.sorted && self.sorted < self.ids.len() {
            let more = (self.sorted * 4).max(FIRST).min(self.ids.len());
            let values = self.values;
            let falls =
                |a: &u32, b: &u32| (values[*b as usize] + 0.0).total_cmp(&(values[*a as usize] + 0.0)).then(a.cmp(b));
            let rest = &mut self.ids[self.sorted..];
            let count = more - self.sorted;
            if count < rest.len() {
                rest.select_nth_unstable_by(count, falls);
            }
            rest[..count].sort_unstable_by(falls);
            self.sorted = more;
        }
        self.ids.get(i).copied()
    }
}

/// Draws at a temperature above 0.
fn draw(isa: Isa, scores: &[f32], params: &SamplingParams, position: usize) -> Result<u32, NoToken> {
    let ids: Vec<u32> = (0..scores.len() as u32).filter(|id| scores[*id as usize] != f32::NEG_INFINITY).collect();
    let count = match params.top_k as usize {
        0 => ids.len(),
        k => k.min(ids.len()),
    };
    let mut falling = Falling::new(scores, ids);
    let first = falling.get(0).ok_or(NoToken::Excluded)?;
    // The highest score is subtracted before the division, so that no temperature is too small for it.
    let max = scores[first as usize];
    let weight = |id: u32| f64::from(((scores[id as usize] - max) / params.temperature).exp());
    // Softmax over what top-k left.
    let total: f64 = if count < falling.ids.len() {
        (0..count).filter_map(|i| falling.get(i)).map(weight).sum()
    } else {
        exp_sum(isa, scores, max, params.temperature)
    };
    // The shortest prefix that reaches top-p; of it, what reaches min-p, a prefix again because the order falls. Both
    // tests use the rounded probabilities, as the steps are written.
    let probability = |id: u32| (weight(id) / total) as f32;
    let least = params.min_p * probability(first);
    let (mut kept, mut prefix, mut sum) = (0, 0f64, 0f64);
    let needs_prefix = params.top_p < 1.0 || params.min_p > 0.0;
    if needs_prefix {
        while kept < count
            && let Some(id) = falling.get(kept)
        {
            let p = probability(id);
            if p < least {
                break;
            }
            prefix += f64::from(p);
            sum += f64::from(p);
            kept += 1;
            if params.top_p < 1.0 && sum >= f64::from(params.top_p) {
                break;
            }
        }
    } else {
        (kept, prefix) = (count, 1.0);
    }
    let target = f64::from(SamplingParams::uniform(params.seed, position)) * prefix;
    let (mut sum, mut last) = (0f64, first);
    for i in 0..kept {
        let Some(id) = falling.get(i) else { break };
        sum += f64::from(probability(id));
        last = id;
        if sum > target {
            break;
        }
    }
    Ok(last)
}

kernel! {
    /// `sum_i exp((x_i - max) / temperature)`.
    fn exp_sum(x: &[f32], max: f32, temperature: f32) -> f64 = exp_sum_body;
}

#[inline(always)]
fn exp_sum_body<const FUSED: bool>(x: &[f32], max: f32, temperature: f32) -> f64 {
    // Below this an exponential is less than 1e-37 of the highest and would only be rounded away; it also keeps minus
    // infinity, which stands for an excluded id, out of the sum.
    const NOTHING: f32 = -85.0;
    let term = |x: f32| {
        let x = (x - max) / temperature;
        if x < NOTHING { 0.0 } else { exp::<FUSED>(x) }
    };
    let mut total = 0f64;
    for block in x.chunks(LANES * 64) {
        let (vectors, rest) = block.as_chunks::<LANES>();
        let mut sums = [0.0f32; LANES];
        for x in vectors {
            (0..LANES).for_each(|i| sums[i] += term(x[i]));
        }
        total += sums.iter().map(|s| f64::from(*s)).sum::<f64>();
        total += rest.iter().map(|x| f64::from(term(*x))).sum::<f64>();
    }
    total
}

/// Log-probabilities under the raw logits.
fn report(isa: Isa, logits: &[f32], chosen: u32, top: usize) -> LogProbs {
    let max = highest(logits).map_or(0.0, |id| logits[id as usize]);
    let log_sum = exp_sum(isa, logits, max, 1.0).ln();
    let log = |id: u32| (f64::from(logits[id as usize]) - f64::from(max) - log_sum) as f32;
    let mut falling = Falling::new(logits, if top == 0 { Vec::new() } else { (0..logits.len() as u32).collect() });
    let top = (0..top).map_while(|i| falling.get(i)).map(|id| (id, log(id))).collect();
    LogProbs { chosen: log(chosen), top }
}
