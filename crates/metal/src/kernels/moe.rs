//! The mixture of experts for one token.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, Matrix, SIMDS, Stream, THREADS, slices, stream_groups};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = (
    "moe.metal",
    concat!(
        "#line 1 \"choice.metal\"\n",
        include_str!("choice.metal"),
        "#line 1 \"moe.metal\"\n",
        include_str!("moe.metal")
    ),
);
/// Router rows of a simdgroup, as moe.metal has it.
const ROUTER_ROWS: usize = 2;
/// Gate rows of a simdgroup, as moe.metal has it.
const PAIRS: usize = 8;

/// `gemv_q8_router`, `experts_gate_up` and `experts_down`.
pub(crate) struct Moe {
    router: Pipeline,
    gate_up: Pipeline,
    down: Pipeline,
    router_groups: usize,
    gate_up_groups: usize,
    down_groups: usize,
}

/// The matrices of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    /// `[experts + 1, hidden]`, 8 bits: the router, then the gate of the shared expert.
    pub(crate) router: Matrix,
    /// Gates of all experts, `[expert width, hidden]` each, then their ups, then gate and up of the shared expert.
    pub(crate) gate_up: Matrix,
    /// `[experts, hidden, expert width]`.
    pub(crate) down: Matrix,
    /// `[hidden, shared width]`.
    pub(crate) shared_down: Matrix,
}

/// Scratch memory of the three kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routed {
    /// `[experts + 1]` f32.
    pub(crate) logits: Slice,
    /// `[experts per token, expert width]`, then `[shared width]`, f32.
    pub(crate) act: Slice,
    /// `[experts per token]` u32.
    pub(crate) chosen: Slice,
    /// `[experts per token + 1]` f32.
    pub(crate) weights: Slice,
}

impl Moe {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Moe> {
        let row_groups = SIMDS / slices(shape.hidden);
        let pairs = row_groups * PAIRS;
        Ok(Moe {
            router: builder
                .pipeline(FILE, KernelSpec { kernel: "gemv_q8_router", constants: &[], threads: THREADS })?,
            gate_up: builder
                .pipeline(FILE, KernelSpec { kernel: "experts_gate_up", constants: &[], threads: THREADS })?,
            down: builder.pipeline(FILE, KernelSpec { kernel: "experts_down", constants: &[], threads: THREADS })?,
            router_groups: (shape.experts + 1).div_ceil(row_groups * ROUTER_ROWS),
            gate_up_groups: shape.experts_per_token * (shape.expert_width / pairs) + shape.shared_width / pairs,
            down_groups: stream_groups(shape),
        })
    }

    /// Router logits of the normed stream.
    pub(crate) fn encode_router(&self, pass: &mut Pass, experts: &Experts, stream: &Stream, routed: &Routed) {
        let mut bound = experts.router.bound().to_vec();
        bound.extend(stream.normed());
        bound.push(Bound::Write(routed.logits));
        pass.dispatch(Dispatch { pipeline: self.router, bound, groups: [self.router_groups, 1], threads: THREADS });
    }

    /// The experts' inner activations.
    pub(crate) fn encode_gate_up(&self, pass: &mut Pass, experts: &Experts, stream: &Stream, routed: &Routed) {
        let mut bound = experts.gate_up.bound().to_vec();
        bound.extend(stream.normed());
        bound.push(Bound::Read(routed.logits));
        bound.extend([routed.act, routed.chosen, routed.weights].map(Bound::Write));
        pass.dispatch(Dispatch { pipeline: self.gate_up, bound, groups: [self.gate_up_groups, 1], threads: THREADS });
    }

    /// Their sum, added to the stream; `gain` `[hidden]` is that of the next norm.
    pub(crate) fn encode_down(
        &self,
        pass: &mut Pass,
        experts: &Experts,
        routed: &Routed,
        gain: Slice,
        stream: &Stream,
    ) {
        let mut bound = experts.down.bound().to_vec();
        bound.extend(experts.shared_down.bound());
        bound.extend([routed.act, routed.chosen, routed.weights, gain].map(Bound::Read));
        bound.extend(stream.written());
        pass.dispatch(Dispatch { pipeline: self.down, bound, groups: [self.down_groups, 1], threads: THREADS });
    }
}
