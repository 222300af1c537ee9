//! Laws of chunk borders: how a prompt is cut changes what it comes to by rounding alone.

use std::collections::BTreeSet;
use std::fmt;

use super::cases::{CHUNKS, PROMPTS};
use super::laws::{CONTEXT, Device, Subject, tokens};
use crate::{Part, Row, Step, Want};

/// The logits of every position are the same, within the budget, whether a prompt comes at once or token by token.
pub fn prefill_equals_repeated_decode(subject: &Subject<'_>) {
    let mut device = subject.device();
    for length in PROMPTS.iter().copied().filter(|n| *n <= CONTEXT) {
        let ids = device.prompt(length as u64, length);
        assert_same_logits(&mut device, subject, ids, length, &[1]);
    }
}

/// The logits of every position are the same, within the budget, wherever a prompt is cut.
pub fn one_chunk_equals_many_chunks(subject: &Subject<'_>) {
    let mut device = subject.device();
    let ids = device.prompt(1, 150);
    assert_same_logits(&mut device, subject, ids, 150, CHUNKS);
}

impl Device {
    /// Logits of all `ids`, fed in chunks of `chunk` to a state of their own.
    fn fresh_logits(&mut self, ids: &[u32], chunk: usize) -> Vec<f32> {
        let state = self.state();
        let logits = self.all_logits(state, ids, chunk);
        assert_eq!(self.position(state), ids.len());
        self.0.free_state(state).expect("freed");
        logits
    }

    /// Logits of the routers for `ids`, fed in chunks of `chunk`: `[layers]` of `[positions, experts]`.
    fn routers(&mut self, ids: &[u32], chunk: usize) -> Vec<Vec<Vec<f32>>> {
        let state = self.state();
        let chunk = chunk.min(self.0.caps().max_chunk);
        let mut layers: Vec<Vec<Vec<f32>>> = Vec::new();
        for ids in ids.chunks(chunk) {
            let row = Row { state, input: tokens(ids), want: Want::AllLogits };
            let ticket = self.0.submit(Step { rows: vec![row], trace: true }).expect("an accepted step");
            let stages = self.wait(ticket).trace.into_iter().filter(|stage| stage.stage.part == Part::Router);
            for (layer, stage) in stages.enumerate() {
                layers.resize_with(layers.len().max(layer + 1), Vec::new);
                layers[layer].extend(stage.values.chunks(stage.values.len() / ids.len()).map(<[f32]>::to_vec));
            }
        }
        self.0.free_state(state).expect("freed");
        layers
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    // NaN is beyond every budget.
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |worst, d| if d.is_nan() || d > worst { d } else { worst })
}

/// Tokens that one law may change before it gives up.
const MOST_CHANGED: usize = 8;

/// Holds the logits of all positions of `ids`, fed in chunks of `whole`, against those in chunks of each of `others`.
///
/// An expert that is chosen by a hair's breadth in one and not in the other moves logits by far more than rounding does, there and,
/// through the state, at all positions behind. So where logits differ by more than the budget, the routers tell: if its logits are
/// within the budget in the first layer that chose otherwise, neither choice is wrong, and the prompt is tried again with another token
/// in this place; otherwise the law is broken.
fn assert_same_logits(device: &mut Device, subject: &Subject<'_>, mut ids: Vec<u32>, whole: usize, others: &[usize]) {
    let (vocab, length) = (device.vocab(), ids.len());
    let mut expected = device.fresh_logits(&ids, whole);
    let mut changed = 0;
    for chunk in others {
        while let Some((position, difference)) =
            first_beyond(&expected, &device.fresh_logits(&ids, *chunk), vocab, subject.budget)
        {
            let [a, b] = [whole, *chunk].map(|chunk| device.routers(&ids, chunk));
            let split = first_split(&a, &b, subject.experts_per_token);
            let undecided = split.as_ref().filter(|s| s.position <= position && s.difference <= subject.budget);
            let Some(undecided) = undecided.filter(|_| changed < MOST_CHANGED) else {
                panic!(
                    "{length} tokens in chunks of {chunk}: largest difference {difference:e} at position {position}, budget {:e}; \
                     other experts are chosen {}, after {changed} other tokens",
                    subject.budget,
                    split.map_or("nowhere".into(), |split| split.to_string())
                )
            };
            ids[undecided.position] = (ids[undecided.position] + 1) % vocab as u32;
            changed += 1;
            expected = device.fresh_logits(&ids, whole);
        }
    }
}

/// The first position whose logits differ by more than the budget, and by how much.
fn first_beyond(a: &[f32], b: &[f32], vocab: usize, budget: f32) -> Option<(usize, f32)> {
    assert_eq!(a.len(), b.len(), "lengths");
    let differences = a.chunks(vocab).zip(b.chunks(vocab)).map(|(a, b)| largest_difference(a, b));
    differences.enumerate().find(|(_, difference)| difference.is_nan() || *difference > budget)
}

/// Where two ways through the model choose other experts.
#[derive(Debug)]
struct Split {
    position: usize,
    layer: usize,
    /// Largest difference of the router's logits there.
    difference: f32,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Split { position, layer, difference } = self;
        write!(f, "first at position {position} in layer {layer}, by router logits {difference:e} apart")
    }
}

/// The first position, and the first layer there, at which other experts have the highest logits; of layers `[positions, experts]`.
fn first_split(a: &[Vec<Vec<f32>>], b: &[Vec<Vec<f32>>], experts_per_token: usize) -> Option<Split> {
    let chosen = |logits: &[f32]| -> BTreeSet<usize> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|i, j| logits[*j].total_cmp(&logits[*i]));
        order.into_iter().take(experts_per_token).collect()
    };
    let positions = a.first().map_or(0, Vec::len);
    let mut places = (0..positions).flat_map(|position| (0..a.len()).map(move |layer| (position, layer)));
    let (position, layer) = places.find(|(position, layer)| {
        let [a, b] = [a, b].map(|routers| chosen(&routers[*layer][*position]));
        a != b
    })?;
    Some(Split { position, layer, difference: largest_difference(&a[layer][position], &b[layer][position]) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first of two layers agrees; in the second, at position 1, other experts are chosen, by 0.01.
    #[test]
    fn a_split_is_the_first_place_where_other_experts_are_chosen() {
        let same = vec![vec![3.0, 1.0, 2.0], vec![0.0, 5.0, 1.0]];
        let a = [same.clone(), vec![vec![1.0, 2.0, 0.0], vec![1.0, 1.01, 7.0]]];
        let b = [same, vec![vec![1.5, 1.6, 0.0], vec![1.015, 1.01, 7.0]]];
        let split = first_split(&a, &b, 2).expect("a split");
        assert_eq!((split.position, split.layer), (1, 1));
        assert!((split.difference - 0.015).abs() < 1e-6, "{split:?}");
        assert!(first_split(&a, &a, 2).is_none() && first_split(&a, &b, 3).is_none());
    }
}
