//! How a token is chosen: the parameters that travel with a row and what comes back.

use std::sync::Arc;

/// The sampling of one row. The steps, in order:
///
/// 1. log-probabilities for the report are taken from the raw logits;
/// 2. `logit_bias` is added; ids at or above `vocab_limit`, ids outside the mask of a masked row, and those with a bias
///    of minus infinity are excluded;
/// 3. penalties over the tokens of the state at positions from `penalty_start` on, the tokens fed by this step included:
///    a token that occurs there has its logit `l` divided by `repetition_penalty` if positive, else multiplied, and
///    then lowered by `presence_penalty` and by `frequency_penalty` times its count;
/// 4. `temperature` 0: the highest logit, the lowest id on ties. Otherwise logits are divided by the temperature;
/// 5. `top_k` highest remain (lowest ids on ties), and probabilities are the softmax over these; of them, in falling
///    order of probability, the shortest prefix whose sum reaches `top_p`; of these, those with at least `min_p` times
///    the highest probability;
/// 6. the first, in the same order, with which the running sum of probabilities exceeds `u` times the sum of those that
///    are left, where `u` is the uniform number of (`seed`, position of the sampled token).
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Position in the state from which tokens count for the penalties: the end of the prompt.
    pub penalty_start: usize,
    /// Added to the logits of these ids.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Ids from here on are never sampled: the tokenizer does not know them.
    pub vocab_limit: u32,
    /// Seed of the draws.
    pub seed: u64,
    /// Whether a constraint mask will be set for this row.
    pub masked: bool,
    /// `Some(n)`: report the log-probability of the chosen token and of the `n` most likely ones.
    pub logprobs: Option<u32>,
}

impl SamplingParams {
    /// Greedy over all ids below `vocab_limit`, nothing else.
    pub fn greedy(vocab_limit: u32) -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_start: 0,
            logit_bias: Arc::new([]),
            vocab_limit,
            seed: 0,
            masked: false,
            logprobs: None,
        }
    }

    /// Whether any step of the sampling could fail or make NaN with these, in a vocabulary of `vocab`: the field and what it is.
    pub fn check(&self, vocab: usize) -> Result<(), String> {
        /// Biases beyond this could turn a finite logit into an infinite one.
        const LARGEST_BIAS: f32 = 1e30;
        let fields = [
            ("temperature", self.temperature, self.temperature >= 0.0),
            ("top_p", self.top_p, self.top_p >= f32::MIN_POSITIVE),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p)),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty >= f32::MIN_POSITIVE),
            ("presence_penalty", self.presence_penalty, self.presence_penalty.abs() <= LARGEST_BIAS),
            ("frequency_penalty", self.frequency_penalty, self.frequency_penalty.abs() <= LARGEST_BIAS),
        ];
        if let Some((name, value, _)) = fields.iter().find(|(_, value, in_range)| !in_range || !value.is_finite()) {
            return Err(format!("{name} is {value}"));
        }
        if self.vocab_limit == 0 {
            return Err("vocab_limit is 0: it allows no token".into());
        }
        let bad = |(id, bias): &&(u32, f32)| {
            *id as usize >= vocab || bias.is_nan() || (bias.abs() > LARGEST_BIAS && *bias != f32::NEG_INFINITY)
        };
        match self.logit_bias.iter().find(bad) {
            Some((id, bias)) => Err(format!("logit bias {bias} of token {id}, in a vocabulary of {vocab}")),
            None => Ok(()),
        }
    }

    /// The uniform number in `[0, 1)` for the token sampled for `position`: 24 bits of splitmix64 over seed and position,
    /// so that a draw depends on nothing but these two, on every device.
    pub fn uniform(seed: u64, position: usize) -> f32 {
        let mut z = seed.wrapping_add((position as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u32 << 24) as f32
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<LogProbs>,
}

/// Natural logarithms of probabilities under the raw logits, over the whole vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens with theirs, falling, lowest id first on ties.
    pub top: Vec<(u32, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_numbers_are_uniform_and_depend_on_seed_and_position() {
        let n = 100_000;
        let mut bins = [0usize; 10];
        for position in 0..n {
            bins[(SamplingParams::uniform(7, position) * 10.0) as usize] += 1;
        }
        // Six standard deviations of a binomial count with p = 0.1.
        let bound = 6.0 * (n as f64 * 0.09).sqrt();
        assert!(bins.iter().all(|b| (*b as f64 - n as f64 * 0.1).abs() < bound), "{bins:?}");
        assert_ne!(SamplingParams::uniform(1, 0), SamplingParams::uniform(2, 0));
        assert_ne!(SamplingParams::uniform(1, 0), SamplingParams::uniform(1, 1));
    }
}
