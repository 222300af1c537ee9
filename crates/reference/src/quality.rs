//! How likely a text is by given logits, and how far two engines' logits for it are apart.

/// The likelihood of tokens, each by the logits of the position before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Likelihood {
    /// How many tokens.
    pub tokens: usize,
    /// Sum of their log-probabilities, in nats.
    pub sum: f64,
}

impl Likelihood {
    /// Counts the token `next` by `logits`, `[vocab]`. Panics if it is not below their number.
    pub fn add(&mut self, logits: &[f32], next: u32) {
        self.tokens += 1;
        self.sum += f64::from(logits[next as usize]) - log_sum(logits);
    }

    /// `exp(-mean log-probability)`; NaN of no tokens.
    pub fn perplexity(&self) -> f64 {
        (-self.sum / self.tokens as f64).exp()
    }
}

/// How far logits are from expected ones, over positions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Agreement {
    /// How many positions.
    pub positions: usize,
    /// Those at which the most likely token is the expected one.
    pub same_top: usize,
    /// Sum of `KL(expected || got)` in nats.
    pub divergence: f64,
    /// The largest of them.
    pub worst_divergence: f64,
}

impl Agreement {
    /// Counts a position with the logits of both, `[vocab]` each.
    pub fn add(&mut self, expected: &[f32], got: &[f32]) {
        assert_eq!(expected.len(), got.len(), "logits of two vocabularies");
        let divergence = divergence(expected, got);
        self.positions += 1;
        self.same_top += usize::from(top(expected) == top(got));
        self.divergence += divergence;
        self.worst_divergence = self.worst_divergence.max(divergence);
    }

    /// Share of the positions with the same most likely token; NaN of none.
    pub fn same_top_share(&self) -> f64 {
        self.same_top as f64 / self.positions as f64
    }

    /// Mean `KL(expected || got)` in nats; NaN of no positions.
    pub fn mean_divergence(&self) -> f64 {
        self.divergence / self.positions as f64
    }
}

/// The index of the highest logit, the lowest of equal ones: [`crate::ops::greedy`] without the order of the others.
fn top(logits: &[f32]) -> usize {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    best
}

/// `ln sum_i exp(x_i)`. In f64: what is compared differs in the last digits of an f32.
fn log_sum(logits: &[f32]) -> f64 {
    let highest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    highest + logits.iter().map(|x| (f64::from(*x) - highest).exp()).sum::<f64>().ln()
}

/// `KL(p || q) = sum_i p_i (ln p_i - ln q_i)` of the distributions of two sets of logits. Rounding can take it below zero.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (sum_p, sum_q) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(p, q)| {
        let (p, q) = (f64::from(*p) - sum_p, f64::from(*q) - sum_q);
        p.exp() * (p - q)
    });
    terms.sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;

    const LOGITS: [f32; 4] = [0.5, -1.0, 3.0, 3.0];

    #[test]
    fn perplexity_of_a_choice_among_equals_is_their_number() {
        let mut likelihood = Likelihood::default();
        for next in 0..4 {
            likelihood.add(&[7.0; 4], next);
        }
        assert_eq!(likelihood.tokens, 4);
        assert!((likelihood.perplexity() - 4.0).abs() < 1e-12);
    }

    #[test]
    fn log_probabilities_are_those_of_the_specification() {
        for (next, expected) in ops::log_probabilities(&LOGITS).into_iter().enumerate() {
            let mut likelihood = Likelihood::default();
            likelihood.add(&LOGITS, next as u32);
            // The specification rounds to f32.
            assert!((likelihood.sum - f64::from(expected)).abs() < 1e-6, "token {next}");
        }
    }

    #[test]
    fn the_most_likely_token_is_the_one_that_greedy_sampling_takes() {
        for logits in [&LOGITS[..], &[-2.0, -2.0], &[0.0, -0.0], &[1.0]] {
            assert_eq!(top(logits), ops::greedy(logits), "{logits:?}");
        }
    }

    #[test]
    fn divergence_is_that_of_the_formula_and_not_symmetric() {
        // p = (3/4, 1/4), q = (1/2, 1/2): 3/4 ln(3/2) - 1/4 ln 2, and the other way 1/2 ln(2/3) + 1/2 ln 2.
        let (p, q) = ([3f32.ln(), 0.0], [0.0, 0.0]);
        assert!((divergence(&p, &q) - 0.130_812_035_941_137).abs() < 1e-7);
        assert!((divergence(&q, &p) - 0.143_841_036_225_890).abs() < 1e-7);
    }

    #[test]
    fn logits_that_differ_by_a_constant_agree() {
        let mut agreement = Agreement::default();
        agreement.add(&LOGITS, &LOGITS.map(|x| x + 2.0));
        agreement.add(&LOGITS, &[5.0, 0.0, 0.0, 0.0]);
        assert_eq!((agreement.positions, agreement.same_top), (2, 1));
        assert_eq!(agreement.same_top_share(), 0.5);
        assert_eq!(agreement.mean_divergence(), agreement.worst_divergence / 2.0);
        assert!(agreement.worst_divergence > 1.0);
    }
}
