//! One token through a 4-bit matrix: projections of the normed stream, additions to the stream, the head.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, LANES, Matrix, SIMDS, Stream, THREADS, slices, stream_groups};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = ("gemv.metal", include_str!("gemv.metal"));
const RESIDUAL_FILE: (&str, &str) = ("residual.metal", include_str!("residual.metal"));
/// Rows of a simdgroup, as gemv.metal has it.
const ROWS: usize = 16;
/// Threads of `argmax`.
const ARGMAX_THREADS: usize = LANES * LANES;

/// Threadgroups for a matrix, and the values of the file's function constants.
fn grid(outputs: usize, inputs: usize, split: usize) -> (usize, [(&'static str, usize); 4]) {
    let slices = slices(inputs);
    let groups = outputs.div_ceil(SIMDS / slices * ROWS);
    (groups, [("INPUTS", inputs), ("OUTPUTS", outputs), ("SLICES", slices), ("SPLIT", split)])
}

/// `gemv_q4`: `y = W rms_norm(h)`, cut into two outputs.
pub(crate) struct Gemv {
    pipeline: Pipeline,
    groups: usize,
}

impl Gemv {
    /// For a matrix `[outputs, hidden]` whose first `split` rows go to the first output.
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape, outputs: usize, split: usize) -> Result<Gemv> {
        let (groups, constants) = grid(outputs, shape.hidden, split);
        Ok(Gemv {
            pipeline: builder
                .pipeline(FILE, KernelSpec { kernel: "gemv_q4", constants: &constants, threads: THREADS })?,
            groups,
        })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, matrix: &Matrix, stream: &Stream, outputs: [Slice; 2]) {
        let mut bound = matrix.bound().to_vec();
        bound.extend(stream.normed());
        bound.extend(outputs.map(Bound::Write));
        pass.dispatch(Dispatch { pipeline: self.pipeline, bound, groups: [self.groups, 1], threads: THREADS });
    }
}

/// `gemv_q4_residual` and `gemv_q4_residual_gated`: `h += W x`.
pub(crate) struct Residual {
    pipeline: Pipeline,
    groups: usize,
}

/// What it takes.
pub(crate) struct ResidualArgs<'a> {
    pub(crate) matrix: &'a Matrix,
    /// `[inputs]` f32.
    pub(crate) x: Slice,
    /// `[hidden]` of the next norm.
    pub(crate) gain: Slice,
    pub(crate) stream: Stream,
    /// `[delta value heads, 4]` f32, where the input still has to be normed by heads.
    pub(crate) head_squares: Option<Slice>,
}

impl Residual {
    /// For matrices `[hidden, inputs]`; `gated`: the input is a delta layer's.
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape, inputs: usize, gated: bool) -> Result<Residual> {
        let kernel = if gated { "gemv_q4_residual_gated" } else { "gemv_q4_residual" };
        let pipeline = builder
            .pipeline(RESIDUAL_FILE, KernelSpec { kernel, constants: &[("INPUTS", inputs)], threads: THREADS })?;
        Ok(Residual { pipeline, groups: stream_groups(shape) })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, args: &ResidualArgs<'_>) {
        let mut bound = args.matrix.bound().to_vec();
        bound.extend([args.x, args.gain].map(Bound::Read));
        bound.extend(args.stream.written());
        bound.extend(args.head_squares.map(Bound::Read));
        pass.dispatch(Dispatch { pipeline: self.pipeline, bound, groups: [self.groups, 1], threads: THREADS });
    }
}

/// `gemv_q4_head` and `argmax`: logits and the best of them.
pub(crate) struct Head {
    logits: Pipeline,
    argmax: Pipeline,
    groups: usize,
}

/// Scratch memory of the head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidates {
    /// `[groups]` f32.
    pub(crate) best: Slice,
    /// `[groups]` u32.
    pub(crate) ids: Slice,
}

/// The id that stands where a logit is not finite, as gemv.metal has it.
pub(crate) const NO_ID: u32 = u32::MAX;

impl Head {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Head> {
        let (groups, constants) = grid(shape.vocab, shape.hidden, 0);
        let logits =
            builder.pipeline(FILE, KernelSpec { kernel: "gemv_q4_head", constants: &constants, threads: THREADS })?;
        Ok(Head {
            logits,
            argmax: builder
                .pipeline(FILE, KernelSpec { kernel: "argmax", constants: &constants, threads: ARGMAX_THREADS })?,
            groups,
        })
    }

    /// Threadgroups of the first kernel, each of which leaves one candidate.
    pub(crate) fn candidates(&self) -> usize {
        self.groups
    }

    /// Logits `[vocab]` f32, and the candidates among ids below `limit`.
    pub(crate) fn encode(
        &self,
        pass: &mut Pass,
        head: &Matrix,
        stream: &Stream,
        logits: Slice,
        candidates: Candidates,
        limit: usize,
    ) {
        let mut bound = head.bound().to_vec();
        bound.extend(stream.normed());
        bound.extend([logits, candidates.best, candidates.ids].map(Bound::Write));
        bound.push(Bound::word(limit));
        pass.dispatch(Dispatch { pipeline: self.logits, bound, groups: [self.groups, 1], threads: THREADS });
    }

    /// The best candidate's id to `token` `[1]` u32, [`NO_ID`] where a logit is not finite.
    pub(crate) fn encode_argmax(&self, pass: &mut Pass, candidates: Candidates, token: Slice) {
        let bound = vec![
            Bound::Read(candidates.best),
            Bound::Read(candidates.ids),
            Bound::Write(token),
            Bound::word(self.groups),
        ];
        pass.dispatch(Dispatch { pipeline: self.argmax, bound, groups: [1, 1], threads: ARGMAX_THREADS });
    }
}
