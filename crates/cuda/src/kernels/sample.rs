//! Choosing a token on the device; see `sample.cu`.

use lily_backend::Result;

use super::{Kernels, Pass, arguments};
use crate::device::Pointer;

/// Levels of a selection, the first shared by three of them.
const LEVELS: usize = 7;
/// Bytes of the selection's memory, `Sampler` in `sample.cu`: two histograms of counts and sums, best scores of 1024 CTAs.
pub(crate) const SAMPLER_BYTES: usize = 2 * 2048 * 12 + 4 * 4096 + 512;
const THREADS: usize = 256;

/// Where sampling keeps its numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleScratch {
    /// f32 `[vocab]`.
    pub(crate) scores: Pointer,
    /// u32 `[vocab]`.
    pub(crate) counts: Pointer,
    /// [`SAMPLER_BYTES`].
    pub(crate) sampler: Pointer,
    /// Id and f32 of each bias.
    pub(crate) biases: Pointer,
    /// Bits of allowed ids.
    pub(crate) mask: Pointer,
}

impl Kernels {
    /// Largest vocabulary that [`Kernels::sample`] has memory for: 1024 CTAs.
    pub(crate) const MAX_VOCAB: usize = 1024 * THREADS;

    /// The best of the head's `ctas` CTAs to the ring of results, for each of `rows` runs that is greedy.
    pub(crate) fn pick_best(
        &self,
        pass: &Pass<'_>,
        (run, rows): (Pointer, usize),
        (bests, ctas): (Pointer, usize),
        results: Pointer,
    ) -> Result<()> {
        let count = ctas as i32;
        pass.launch(self.pick_best, (rows, 1), THREADS, arguments![run, bests, count, results])
    }

    /// Samples from `logits` as the run says.
    pub(crate) fn sample(
        &self,
        pass: &Pass<'_>,
        run: Pointer,
        logits: Pointer,
        s: &SampleScratch,
        results: Pointer,
    ) -> Result<()> {
        // These read what the kernel in front of them wrote from their first line on.
        let pass = Pass { overlap: false, ..*pass };
        let all = (self.sizes.vocab.div_ceil(THREADS), 1);
        let some = (pass.device.processors as usize, 1);
        pass.launch(self.sample_begin, all, THREADS, arguments![logits, s.scores, s.counts, s.sampler])?;
        pass.launch(self.sample_mark, some, THREADS, arguments![run, s.biases, s.scores, s.counts])?;
        let arguments = arguments![run, logits, s.counts, s.mask, s.scores, s.sampler];
        pass.launch(self.sample_scores, all, THREADS, arguments)?;
        for _ in 0..LEVELS {
            pass.launch(self.sample_level, some, THREADS, arguments![run, s.scores, s.sampler])?;
        }
        pass.launch(self.sample_finish, some, THREADS, arguments![run, s.scores, s.sampler, results])
    }
}
