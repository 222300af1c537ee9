//! Any number of packed matrices in one fork-join: the pass that a block of the forward makes over its weights.
//!
//! In: [`Activations`], f32 `[tokens, inputs]`. Out: f32 `[tokens, outputs]` per job. A job with few tokens streams its
//! rows through [`gemv`](super::gemv), one with many through [`gemm`](super::gemm).
//! Reference: `lily_reference::ops::linear`, `expert_linear`.

use lily_backend::Result;
use lily_model::{QuantMatrix, Shape};

use super::gemm::{TILE_ROWS, gemm};
use super::gemv::{Packed, gemv};
use super::{Inputs, arrange, kernel};
use crate::device::{Buffer, Isa, Parts, Pool, with_scratch};

/// Inputs of linears for a number of tokens, arranged as [`Inputs`] says.
pub(crate) struct Activations {
    width: usize,
    values: Buffer<f32>,
    sums: Buffer<f32>,
}

impl Activations {
    /// Room for `tokens` of `width` inputs.
    pub(crate) fn new(tokens: usize, width: usize) -> Result<Activations> {
        Ok(Activations {
            width,
            values: Buffer::zeroed("activations", tokens * width)?,
            sums: Buffer::zeroed("activations", tokens * width / Shape::GROUP)?,
        })
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.bytes() + self.sums.bytes()
    }

    /// The inputs of one token.
    #[inline(always)]
    pub(crate) fn row(&self, token: usize) -> Inputs<'_> {
        let groups = self.width / Shape::GROUP;
        Inputs {
            values: &self.values[token * self.width..][..self.width],
            sums: &self.sums[token * groups..][..groups],
        }
    }

    /// The inputs of one token in their own order, for a trace.
    pub(crate) fn plain_row(&self, token: usize) -> Vec<f32> {
        let groups = self.row(token).values.as_chunks::<{ Shape::GROUP }>().0;
        groups.iter().flat_map(|g| (0..Shape::GROUP).map(|i| g[i / 2 + i % 2 * (Shape::GROUP / 2)])).collect()
    }

    /// Fills the rows of `tokens` tokens: `make` writes the plain row of a token into the slice that it is given.
    pub(crate) fn fill(&mut self, pool: &Pool, isa: Isa, tokens: usize, make: impl Fn(usize, &mut [f32]) + Sync) {
        let width = self.width;
        let parts = self.parts();
        pool.run(tokens.div_ceil(TOKENS_PER_UNIT), |unit| {
            with_scratch(width, |plain| {
                for token in unit * TOKENS_PER_UNIT..tokens.min((unit + 1) * TOKENS_PER_UNIT) {
                    make(token, plain);
                    // SAFETY: each token belongs to one unit.
                    unsafe { parts.arrange(isa, token, 0, plain) };
                }
            });
        });
    }

    /// The rows, for workers that each write columns of their own.
    pub(crate) fn parts(&mut self) -> ActivationParts<'_> {
        ActivationParts { width: self.width, values: Parts::new(&mut self.values), sums: Parts::new(&mut self.sums) }
    }
}

/// Tokens that one worker takes at a time where the work per token is small.
const TOKENS_PER_UNIT: usize = 4;

/// [`Activations`] being written by several workers.
pub(crate) struct ActivationParts<'a> {
    width: usize,
    values: Parts<'a, f32>,
    sums: Parts<'a, f32>,
}

impl ActivationParts<'_> {
    /// Writes columns `first .. first + plain.len()` of a token, a whole number of groups.
    ///
    /// # Safety
    /// No two workers write the same columns of a token.
    pub(crate) unsafe fn arrange(&self, isa: Isa, token: usize, first: usize, plain: &[f32]) {
        let start = token * self.width + first;
        let (group, groups) = (start / Shape::GROUP, plain.len() / Shape::GROUP);
        // SAFETY: the caller's promise; groups are whole, so sums are as disjoint as values.
        let (values, sums) = unsafe { (self.values.part(start, plain.len()), self.sums.part(group, groups)) };
        arranged(isa, plain, values, sums);
    }
}

kernel! {
    fn arranged(row: &[f32], values: &mut [f32], sums: &mut [f32]) = arrange;
}

/// The tokens that take part in a job.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    x: &'a Activations,
    which: Which<'a>,
}

#[derive(Clone, Copy)]
enum Which<'a> {
    Range(usize, usize),
    List(&'a [u32]),
}

impl<'a> Tokens<'a> {
    /// Rows `first .. first + count`.
    pub(crate) fn range(x: &'a Activations, first: usize, count: usize) -> Tokens<'a> {
        Tokens { x, which: Which::Range(first, count) }
    }

    /// The rows that `list` names.
    pub(crate) fn list(x: &'a Activations, list: &'a [u32]) -> Tokens<'a> {
        Tokens { x, which: Which::List(list) }
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        match self.which {
            Which::Range(_, count) => count,
            Which::List(list) => list.len(),
        }
    }

    /// Inputs of the `i`-th.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> Inputs<'a> {
        match self.which {
            Which::Range(first, _) => self.x.row(first + i),
            Which::List(list) => self.x.row(list[i] as usize),
        }
    }
}

/// One matrix and the tokens that go through it.
pub(crate) struct Job<'a> {
    /// The matrix or the stack.
    pub(crate) matrix: &'a QuantMatrix,
    /// Which matrix of the stack, 0 for a plain one.
    pub(crate) expert: usize,
    /// The tokens.
    pub(crate) x: Tokens<'a>,
    /// `[tokens, outputs]`.
    pub(crate) out: &'a mut [f32],
}

/// Jobs with at least this many tokens dequantize blocks of rows instead of multiplying codes. With 2 instead, prompts
/// of 16 to 512 tokens took the same time on Zen 3 within noise.
const GEMM_TOKENS: usize = 4;
/// Packed bytes that a worker streams per claim: a few microseconds of work.
const UNIT_BYTES: usize = 48 * 1024;
/// Most rows per claim where tokens are many: as many as meet a block of tokens while that is in the second-level cache.
const GEMM_ROWS: usize = 64;
/// Claims per worker and job below which shares would be uneven.
const CLAIMS_PER_WORKER: usize = 4;

/// Whether a job of this many tokens goes through `gemm`.
fn uses_gemm(tokens: usize) -> bool {
    tokens >= GEMM_TOKENS
}

/// Rows that a worker takes at a time.
fn rows_per_unit(matrix: &QuantMatrix, tokens: usize, threads: usize) -> usize {
    let most = if uses_gemm(tokens) { GEMM_ROWS } else { UNIT_BYTES / matrix.row_bytes() };
    let even = matrix.outputs.div_ceil(threads * CLAIMS_PER_WORKER);
    even.clamp(1, most.max(1)).next_multiple_of(TILE_ROWS)
}

/// Runs all jobs in one pass.
pub(crate) fn linear(pool: &Pool, isa: Isa, jobs: Vec<Job<'_>>) {
    struct Share<'a> {
        first_unit: usize,
        rows: usize,
        weights: Packed<'a>,
        outputs: usize,
        x: Tokens<'a>,
        out: Parts<'a, f32>,
    }
    let mut units = 0;
    let mut shares = Vec::with_capacity(jobs.len());
    for Job { matrix, expert, x, out } in jobs {
        if x.len() == 0 {
            continue;
        }
        assert_eq!(out.len(), x.len() * matrix.outputs, "output of {}", matrix.name);
        let rows = rows_per_unit(matrix, x.len(), pool.threads());
        let outputs = matrix.outputs;
        shares.push(Share {
            first_unit: units,
            rows,
            weights: Packed::of(matrix, expert),
            outputs,
            x,
            out: Parts::new(out),
        });
        units += outputs.div_ceil(rows);
    }
    pool.run(units, |unit| {
        let share = &shares[shares.partition_point(|share| share.first_unit <= unit) - 1];
        let first = (unit - share.first_unit) * share.rows;
        let rows = share.rows.min(share.outputs - first);
        if uses_gemm(share.x.len()) {
            gemm(isa, share.weights, share.x, first, rows, &share.out, share.outputs);
            return;
        }
        for token in 0..share.x.len() {
            // SAFETY: these rows belong to this unit, and each unit is run once.
            let out = unsafe { share.out.part(token * share.outputs + first, rows) };
            gemv(isa, share.weights, share.x.row(token), first, out);
        }
    });
}
