//! Rows of the residual stream of many tokens: embedding, norms, the sum over experts.

use lily_backend::Result;
use lily_model::Shape;

use super::gemm::ExpertRows;
use super::{Builder, LANES, Matrix, Stream, THREADS, stream_groups};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = ("rows.metal", include_str!("rows.metal"));

/// `embed_rows`, `norm_rows`, `combine_rows` and `take_row`.
pub(crate) struct Rows {
    embed: Pipeline,
    norm: Pipeline,
    combine: Pipeline,
    take: Pipeline,
    stream_groups: usize,
}

/// The residual stream of many tokens and its normed form, `[tokens, hidden]` f32 each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamRows {
    pub(crate) values: Slice,
    pub(crate) normed: Slice,
}

impl Rows {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Rows> {
        let mut pipeline = |kernel, threads| builder.pipeline(FILE, KernelSpec { kernel, constants: &[], threads });
        Ok(Rows {
            embed: pipeline("embed_rows", THREADS)?,
            norm: pipeline("norm_rows", THREADS)?,
            combine: pipeline("combine_rows", THREADS)?,
            take: pipeline("take_row", LANES)?,
            stream_groups: stream_groups(shape),
        })
    }

    /// Rows of the embedding for `ids` `[tokens]` u32; `gain` `[hidden]` is that of the next norm, here and below.
    pub(crate) fn encode_embed(
        &self,
        pass: &mut Pass,
        ids: Slice,
        embedding: &Matrix,
        gain: Slice,
        rows: &StreamRows,
        tokens: usize,
    ) {
        let mut bound = vec![Bound::Read(ids)];
        bound.extend(embedding.bound());
        bound.extend([Bound::Read(gain), Bound::Write(rows.values), Bound::Write(rows.normed)]);
        pass.dispatch(Dispatch { pipeline: self.embed, bound, groups: [tokens, 1], threads: THREADS });
    }

    /// The norm of the stream.
    pub(crate) fn encode_norm(&self, pass: &mut Pass, gain: Slice, rows: &StreamRows, tokens: usize) {
        let bound = vec![Bound::Read(rows.values), Bound::Read(gain), Bound::Write(rows.normed)];
        pass.dispatch(Dispatch { pipeline: self.norm, bound, groups: [tokens, 1], threads: THREADS });
    }

    /// Adds what the experts made by their `weights` `[tokens, experts per token + 1]` f32, then the norm.
    pub(crate) fn encode_combine(
        &self,
        pass: &mut Pass,
        experts: &ExpertRows,
        weights: Slice,
        gain: Slice,
        rows: &StreamRows,
        tokens: usize,
    ) {
        let mut bound = [experts.routed, experts.shared, weights, gain].map(Bound::Read).to_vec();
        bound.extend([rows.values, rows.normed].map(Bound::Write));
        pass.dispatch(Dispatch { pipeline: self.combine, bound, groups: [tokens, 1], threads: THREADS });
    }

    /// A row of the stream, `[hidden]` f32, to where the kernels of one token look for it.
    pub(crate) fn encode_take(&self, pass: &mut Pass, row: Slice, gain: Slice, stream: &Stream) {
        let mut bound = [row, gain].map(Bound::Read).to_vec();
        bound.extend(stream.written());
        pass.dispatch(Dispatch { pipeline: self.take, bound, groups: [self.stream_groups, 1], threads: LANES });
    }
}
