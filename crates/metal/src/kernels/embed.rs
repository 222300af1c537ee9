//! The first residual stream of a token.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, LANES, Matrix, Stream, stream_groups};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

/// `embed`: the token's row of the embedding.
pub(crate) struct Embed {
    pipeline: Pipeline,
    groups: usize,
}

/// What it takes.
pub(crate) struct Args<'a> {
    /// `[1]` u32; an id outside of the vocabulary counts as the last one.
    pub(crate) token: Slice,
    pub(crate) embedding: &'a Matrix,
    /// `[hidden]` of the next norm.
    pub(crate) gain: Slice,
    pub(crate) stream: Stream,
}

impl Embed {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Embed> {
        let pipeline = builder.pipeline(
            ("embed.metal", include_str!("embed.metal")),
            KernelSpec { kernel: "embed", constants: &[], threads: LANES },
        )?;
        Ok(Embed { pipeline, groups: stream_groups(shape) })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, args: &Args<'_>) {
        let mut bound = vec![Bound::Read(args.token)];
        bound.extend(args.embedding.bound());
        bound.push(Bound::Read(args.gain));
        bound.extend(args.stream.written());
        pass.dispatch(Dispatch { pipeline: self.pipeline, bound, groups: [self.groups, 1], threads: LANES });
    }
}
