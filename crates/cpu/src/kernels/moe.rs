//! Which experts a token visits, which tokens an expert meets, and how what the experts say is added up.
//! Reference: `lily_reference::ops::route`.

/// The choice of experts for all tokens of a step.
#[derive(Default)]
pub(crate) struct Routing {
    /// Experts of each token, falling by logit, `[tokens, experts per token]`.
    pub(crate) experts: Vec<u32>,
    /// Their weights; those of a token sum to 1.
    pub(crate) weights: Vec<f32>,
    /// Visits sorted by expert, then by token: the token of each.
    pub(crate) visitors: Vec<u32>,
    /// Where an expert's visits begin; one more entry than experts.
    pub(crate) starts: Vec<usize>,
    /// The visit of each entry of `experts`.
    pub(crate) visits: Vec<u32>,
    visited: Vec<u32>,
    /// Scratch: ids being ordered.
    order: Vec<u32>,
    /// Scratch: where an expert's next visit goes.
    next: Vec<usize>,
}

impl Routing {
    /// Chooses for router logits `[tokens, experts]` the `count` highest of each token, the lowest id first on ties. The
    /// weights are the softmax over the chosen logits: the softmax over all, divided by what the chosen ones sum to.
    pub(crate) fn choose(&mut self, logits: &[f32], experts: usize, count: usize) {
        self.experts.clear();
        self.weights.clear();
        for logits in logits.chunks_exact(experts) {
            // Adding zero makes -0 equal to 0. NaN stands first or last, as its sign has it, and spreads to the result.
            let falls =
                |a: &u32, b: &u32| (logits[*b as usize] + 0.0).total_cmp(&(logits[*a as usize] + 0.0)).then(a.cmp(b));
            self.order.clear();
            self.order.extend(0..experts as u32);
            if count < experts {
                self.order.select_nth_unstable_by(count, falls);
            }
            let chosen = &mut self.order[..count];
            chosen.sort_unstable_by(falls);
            let highest = logits[chosen[0] as usize];
            let first = self.weights.len();
            self.weights.extend(chosen.iter().map(|e| (logits[*e as usize] - highest).exp()));
            let sum: f32 = self.weights[first..].iter().sum();
            self.weights[first..].iter_mut().for_each(|w| *w /= sum);
            self.experts.extend_from_slice(chosen);
        }
        self.group(experts, count);
    }

    /// Sorts the visits by expert.
    fn group(&mut self, experts: usize, count: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for expert in &self.experts {
            self.starts[*expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.visitors.resize(self.experts.len(), 0);
        self.visits.resize(self.experts.len(), 0);
        self.visited.clear();
        let starts = &self.starts;
        self.visited.extend((0..experts as u32).filter(|e| starts[*e as usize] < starts[*e as usize + 1]));
        self.next.clear();
        self.next.extend_from_slice(&self.starts);
        for (i, expert) in self.experts.iter().enumerate() {
            let visit = &mut self.next[*expert as usize];
            self.visitors[*visit] = (i / count) as u32;
            self.visits[i] = *visit as u32;
            *visit += 1;
        }
    }

    /// The experts that have visitors.
    pub(crate) fn visited(&self) -> &[u32] {
        &self.visited
    }

    /// An expert of [`Routing::visited`] and the range of its visits.
    pub(crate) fn visits(&self, expert: u32) -> (usize, std::ops::Range<usize>) {
        let expert = expert as usize;
        (expert, self.starts[expert]..self.starts[expert + 1])
    }

    /// The visits of one token with their weights, falling.
    pub(crate) fn of_token(&self, token: usize, count: usize) -> impl Iterator<Item = (usize, f32)> {
        let range = token * count..(token + 1) * count;
        self.visits[range.clone()].iter().map(|v| *v as usize).zip(self.weights[range].iter().copied())
    }
}
