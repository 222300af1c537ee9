//! What is read at once: a passage of tokens from an empty state, in chunks, by one backend or by two side by side.

use std::ops::Range;

use anyhow::ensure;

use crate::devices::{Forward, Wanted};

/// Logits that are held at once, in bytes for each backend: chunks are cut so that those of the full vocabulary fit.
const LOGITS_BYTES: usize = 256 << 20;

/// Tokens that are read from an empty state, and which of them count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Where it lies in the tokens of its document.
    pub tokens: Range<usize>,
    /// The first token of the document that is predicted; all behind it are, too.
    pub predicted: usize,
}

impl Passage {
    /// How many tokens are predicted.
    pub fn count(&self) -> usize {
        self.tokens.end - self.predicted
    }
}

/// Windows over a document of `tokens` tokens, each `stride` behind the one before it, the last one cut: every token but the first is
/// predicted once, by the first window that has it, so with at least `window - stride` tokens before it where there are so
/// many. `stride` is at least 1 and less than `window`.
pub fn windows(tokens: usize, window: usize, stride: usize) -> Vec<Passage> {
    let mut all = Vec::new();
    let (mut start, mut predicted) = (0, 1);
    while predicted < tokens {
        let end = (start + window).min(tokens);
        all.push(Passage { tokens: start..end, predicted });
        (start, predicted) = (start + stride, end);
    }
    all
}

/// Reads a passage of `ids` with every one of `readers`. For each predicted token, `each` gets its position in `ids` and what every
/// reader expected there: logits, `[vocab]`.
pub fn read(
    readers: &mut [&mut Forward],
    ids: &[u32],
    passage: &Passage,
    vocab: usize,
    mut each: impl FnMut(usize, &[&[f32]]),
) -> anyhow::Result<()> {
    // What follows the last token is not known.
    let fed = passage.tokens.start..passage.tokens.end - 1;
    for reader in readers.iter_mut() {
        reader.start(fed.len())?;
    }
    let limits = readers.iter().map(|reader| reader.max_chunk());
    let chunk = limits.fold(LOGITS_BYTES / (4 * vocab), usize::min).max(1);
    for start in fed.clone().step_by(chunk) {
        let end = (start + chunk).min(fed.end);
        let wanted = if end < passage.predicted { Wanted::Nothing } else { Wanted::Logits };
        let outputs = readers.iter_mut().map(|reader| reader.feed(&ids[start..end], wanted));
        let logits = outputs.map(|output| Ok(output?.logits)).collect::<anyhow::Result<Vec<_>>>()?;
        for at in start.max(passage.predicted - 1)..end {
            let place = (at - start) * vocab..(at - start + 1) * vocab;
            let rows: Vec<&[f32]> = logits.iter().map(|logits| &logits[place.clone()]).collect();
            let finite = rows.iter().flat_map(|row| row.iter()).all(|logit| logit.is_finite());
            ensure!(finite, "the logits of token {at} are not finite: damaged weights or a device fault");
            each(at + 1, &rows);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_is_predicted_once_with_enough_before_it() {
        for tokens in 0..40 {
            for (window, stride) in [(2, 1), (7, 3), (8, 7), (16, 1), (64, 32)] {
                let all = windows(tokens, window, stride);
                let predicted: Vec<usize> = all.iter().flat_map(|p| p.predicted..p.tokens.end).collect();
                assert_eq!(predicted, (1..tokens).collect::<Vec<_>>(), "{tokens} tokens by {window}, {stride}");
                for passage in &all {
                    let Passage { tokens: range, predicted } = passage;
                    assert!(range.len() <= window && range.start < *predicted, "{passage:?}");
                    assert!(predicted - range.start >= (window - stride).min(*predicted), "{passage:?}");
                    assert_eq!(passage.count(), range.end - predicted);
                }
            }
        }
    }
}
