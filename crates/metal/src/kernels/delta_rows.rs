//! The mixer of a delta layer for many tokens.

use lily_backend::Result;
use lily_model::Shape;

use super::delta::DeltaVectors;
use super::{Builder, LANES, THREADS};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = ("delta_rows.metal", include_str!("delta_rows.metal"));
/// Tokens that the delta rule takes at a time, as common.metal has it.
pub(crate) const CHUNK: usize = 64;
/// Values of a head that one threadgroup of the scan has, as delta_rows.metal has it.
const SLICE: usize = 16;

/// `delta_rows_prepare`, `_ring`, `_relate`, `_scan` and `_norm`.
pub(crate) struct DeltaRows {
    prepare: Pipeline,
    ring: Pipeline,
    relate: Pipeline,
    scan: Pipeline,
    norm: Pipeline,
    conv_heads: usize,
    value_heads: usize,
}

/// Memory between the kernels, f32; tokens are up to whole chunks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaRoom {
    /// `[tokens, conv width]`.
    pub(crate) mixed: Slice,
    /// `[tokens, 2 * value heads]`.
    pub(crate) gates: Slice,
    /// `[chunks, value heads, 2, 64, 64]`.
    pub(crate) related: Slice,
    /// `[chunks, value heads, 2, 64]`.
    pub(crate) products: Slice,
    /// `[tokens, value width]`.
    pub(crate) recalled: Slice,
}

/// What it takes, f32.
pub(crate) struct Args<'a> {
    /// `[tokens, conv width]`: raw inputs of the convolution.
    pub(crate) inputs: Slice,
    /// `[tokens, value width + 2 * value heads]`: z, b, a.
    pub(crate) zba: Slice,
    pub(crate) vectors: &'a DeltaVectors,
    pub(crate) room: &'a DeltaRoom,
    /// `[4, conv width]`: inputs of the tokens before, that of position p in row p % 4; moved on.
    pub(crate) ring: Slice,
    /// `[delta value heads, 128, 128]`; moved on.
    pub(crate) state: Slice,
    /// `[tokens, value width]`: normed and gated.
    pub(crate) out: Slice,
    /// Of the first token.
    pub(crate) position: usize,
    pub(crate) tokens: usize,
}

impl DeltaRows {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<DeltaRows> {
        let mut pipeline = |kernel, threads| builder.pipeline(FILE, KernelSpec { kernel, constants: &[], threads });
        Ok(DeltaRows {
            prepare: pipeline("delta_rows_prepare", LANES)?,
            ring: pipeline("delta_rows_ring", Shape::DELTA_HEAD_DIM)?,
            relate: pipeline("delta_rows_relate", THREADS)?,
            scan: pipeline("delta_rows_scan", THREADS)?,
            norm: pipeline("delta_rows_norm", LANES)?,
            conv_heads: shape.conv_width() / Shape::DELTA_HEAD_DIM,
            value_heads: shape.delta_value_heads,
        })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, args: &Args<'_>) {
        let Args { inputs, zba, vectors, room, ring, state, out, position, tokens } = *args;
        let mut dispatch = |pipeline, bound, groups, threads| {
            pass.dispatch(Dispatch { pipeline, bound, groups, threads });
        };
        let chunks = tokens.div_ceil(CHUNK);
        let read = [inputs, ring, vectors.taps, zba, vectors.rates, vectors.dt_bias];
        let mut bound = read.map(Bound::Read).to_vec();
        bound.extend([room.mixed, room.gates].map(Bound::Write));
        bound.push(Bound::words([position, tokens]));
        dispatch(self.prepare, bound, [self.conv_heads + 1, chunks * CHUNK], LANES);

        let bound = vec![Bound::Read(inputs), Bound::Write(ring), Bound::words([position, tokens])];
        dispatch(self.ring, bound, [self.conv_heads, Shape::CONV_TAPS], Shape::DELTA_HEAD_DIM);
        let mut bound = [room.mixed, room.gates].map(Bound::Read).to_vec();
        bound.extend([room.related, room.products].map(Bound::Write));
        dispatch(self.relate, bound, [self.value_heads, chunks], THREADS);

        let mut bound = [room.mixed, room.gates, room.related, room.products].map(Bound::Read).to_vec();
        bound.extend([state, room.recalled].map(Bound::Write));
        bound.push(Bound::word(chunks));
        dispatch(self.scan, bound, [self.value_heads * (Shape::DELTA_HEAD_DIM / SLICE), 1], THREADS);

        let bound = vec![Bound::Read(room.recalled), Bound::Read(zba), Bound::Read(vectors.norm), Bound::Write(out)];
        dispatch(self.norm, bound, [self.value_heads, tokens], LANES);
    }
}
