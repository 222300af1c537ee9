//! The mixer of a delta layer for one token.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, SIMDS, THREADS};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

/// `delta_step`.
pub(crate) struct Delta {
    pipeline: Pipeline,
    groups: usize,
}

/// The small vectors of one layer, f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaVectors {
    /// `[4, conv width]`, the newest tap last.
    pub(crate) taps: Slice,
    /// `[delta value heads]`: `exp(A_log)`.
    pub(crate) rates: Slice,
    /// `[delta value heads]`.
    pub(crate) dt_bias: Slice,
    /// `[128]`: the weight of the gated norm.
    pub(crate) norm: Slice,
}

/// What it takes.
pub(crate) struct Args<'a> {
    /// `[4, conv width]` f32: the last inputs of the convolution, that of position p in row p % 4, with this token's.
    pub(crate) ring: Slice,
    pub(crate) vectors: &'a DeltaVectors,
    /// z, b and a end to end, f32.
    pub(crate) zba: Slice,
    /// `[delta value heads, 128, 128]` f32.
    pub(crate) state: Slice,
    /// `[delta value width]` f32: still to be normed.
    pub(crate) out: Slice,
    /// `[delta value heads, 4]` f32: by what.
    pub(crate) squares: Slice,
    pub(crate) position: usize,
}

impl Delta {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Delta> {
        let pipeline = builder.pipeline(
            ("delta.metal", include_str!("delta.metal")),
            KernelSpec { kernel: "delta_step", constants: &[], threads: THREADS },
        )?;
        Ok(Delta { pipeline, groups: shape.delta_value_heads * SIMDS })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, args: &Args<'_>) {
        let DeltaVectors { taps, rates, dt_bias, norm } = *args.vectors;
        let mut bound = [args.ring, taps, args.zba, rates, dt_bias, norm].map(Bound::Read).to_vec();
        bound.extend([args.state, args.out, args.squares].map(Bound::Write));
        bound.push(Bound::word(args.position));
        pass.dispatch(Dispatch { pipeline: self.pipeline, bound, groups: [self.groups, 1], threads: THREADS });
    }
}
