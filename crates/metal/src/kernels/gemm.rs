//! Many tokens through quantized matrices.

use lily_backend::Result;
use lily_model::Shape;

use super::route::{Lists, TILE_ROWS, most_tiles};
use super::{Builder, Matrix, THREADS, tile};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

/// Outputs of a threadgroup, as common.metal has it.
pub(super) const TILE_OUTPUTS: usize = 64;

/// A kernel of gemm.metal for one matrix: its pipeline and how many threadgroups share a row.
struct Tiled {
    pipeline: Pipeline,
    output_tiles: usize,
}

impl Tiled {
    fn plan(
        builder: &mut Builder<'_>,
        kernel: &'static str,
        [outputs, inputs]: [usize; 2],
        split: usize,
    ) -> Result<Tiled> {
        let constants = [("INPUTS", inputs), ("OUTPUTS", outputs), ("SPLIT", split)];
        Ok(Tiled {
            pipeline: tile::pipeline(builder, &KernelSpec { kernel, constants: &constants, threads: THREADS })?,
            output_tiles: outputs.div_ceil(TILE_OUTPUTS),
        })
    }

    fn encode(&self, pass: &mut Pass, bound: Vec<Bound>, row_tiles: usize) {
        let groups = [self.output_tiles, row_tiles];
        pass.dispatch(Dispatch { pipeline: self.pipeline, bound, groups, threads: THREADS });
    }
}

/// `gemm_q4`, `gemm_q8` and `gemm_q4_residual`: `y = x W^T` and `y += x W^T`.
pub(crate) struct Gemm(Tiled);

impl Gemm {
    /// For 4-bit matrices `[outputs, inputs]`.
    pub(crate) fn plan(builder: &mut Builder<'_>, outputs: usize, inputs: usize) -> Result<Gemm> {
        Ok(Gemm(Tiled::plan(builder, "gemm_q4", [outputs, inputs], outputs)?))
    }

    /// For 8-bit matrices.
    pub(crate) fn plan_q8(builder: &mut Builder<'_>, outputs: usize, inputs: usize) -> Result<Gemm> {
        Ok(Gemm(Tiled::plan(builder, "gemm_q8", [outputs, inputs], outputs)?))
    }

    /// For 4-bit matrices whose products are added to what is there.
    pub(crate) fn plan_residual(builder: &mut Builder<'_>, outputs: usize, inputs: usize) -> Result<Gemm> {
        Ok(Gemm(Tiled::plan(builder, "gemm_q4_residual", [outputs, inputs], outputs)?))
    }

    /// x `[tokens, inputs]`, y `[tokens, outputs]`, f32.
    pub(crate) fn encode(&self, pass: &mut Pass, matrix: &Matrix, x: Slice, y: Slice, tokens: usize) {
        let mut bound = matrix.bound().to_vec();
        bound.extend([Bound::Read(x), Bound::Write(y), Bound::word(tokens)]);
        self.0.encode(pass, bound, tokens.div_ceil(TILE_ROWS));
    }
}

/// `gemm_q4_split`: `y = x W^T`, cut into two outputs.
pub(crate) struct SplitGemm(Tiled);

impl SplitGemm {
    /// For a matrix `[outputs, inputs]` whose first `split` rows go to the first output.
    pub(crate) fn plan(builder: &mut Builder<'_>, outputs: usize, inputs: usize, split: usize) -> Result<SplitGemm> {
        Ok(SplitGemm(Tiled::plan(builder, "gemm_q4_split", [outputs, inputs], split)?))
    }

    /// x `[tokens, inputs]`; outputs `[tokens, split]` and `[tokens, the rest]`, f32.
    pub(crate) fn encode(&self, pass: &mut Pass, matrix: &Matrix, x: Slice, outputs: [Slice; 2], tokens: usize) {
        let mut bound = matrix.bound().to_vec();
        bound.push(Bound::Read(x));
        bound.extend(outputs.map(Bound::Write));
        bound.push(Bound::word(tokens));
        self.0.encode(pass, bound, tokens.div_ceil(TILE_ROWS));
    }
}

/// `gemm_q4_experts_swiglu` and `gemm_q4_experts`, and the same for the shared expert.
pub(crate) struct ExpertGemms {
    swiglu: Tiled,
    down: Tiled,
    shared_swiglu: Tiled,
    shared_down: Gemm,
    /// First row of the shared expert in the stack of gates and ups.
    shared_row: usize,
    experts: usize,
    experts_per_token: usize,
}

/// What lies between and behind them, f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertRows {
    /// `[pairs, expert width]` in the order of the lists.
    pub(crate) act: Slice,
    /// `[pairs, hidden]` in the order of the tokens.
    pub(crate) routed: Slice,
    /// `[tokens, shared width]`.
    pub(crate) shared_act: Slice,
    /// `[tokens, hidden]`.
    pub(crate) shared: Slice,
}

impl ExpertGemms {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<ExpertGemms> {
        let &Shape { hidden, expert_width, shared_width, .. } = shape;
        let mut tiled = |kernel, sizes: [usize; 2]| Tiled::plan(builder, kernel, sizes, sizes[0]);
        Ok(ExpertGemms {
            swiglu: tiled("gemm_q4_experts_swiglu", [2 * expert_width, hidden])?,
            down: tiled("gemm_q4_experts", [hidden, expert_width])?,
            shared_swiglu: tiled("gemm_q4_shared_swiglu", [2 * shared_width, hidden])?,
            shared_down: Gemm(tiled("gemm_q4", [hidden, shared_width])?),
            shared_row: shape.experts * 2 * expert_width,
            experts: shape.experts,
            experts_per_token: shape.experts_per_token,
        })
    }

    fn tiles(&self, tokens: usize) -> usize {
        most_tiles(self.experts, self.experts_per_token, tokens)
    }

    /// Inner activations of normed rows `x` `[tokens, hidden]`: of the chosen experts by the lists, and of the shared one.
    pub(crate) fn encode_swiglu(
        &self,
        pass: &mut Pass,
        gate_up: &Matrix,
        x: Slice,
        lists: &Lists,
        rows: &ExpertRows,
        tokens: usize,
    ) {
        let mut bound = gate_up.bound().to_vec();
        bound.extend([x, lists.pairs, lists.tiles].map(Bound::Read));
        bound.push(Bound::Write(rows.act));
        self.swiglu.encode(pass, bound, self.tiles(tokens));
        let mut bound = gate_up.bound().to_vec();
        bound.extend([Bound::Read(x), Bound::Write(rows.shared_act), Bound::words([tokens, self.shared_row])]);
        self.shared_swiglu.encode(pass, bound, tokens.div_ceil(TILE_ROWS));
    }

    /// Their outputs.
    pub(crate) fn encode_down(
        &self,
        pass: &mut Pass,
        [down, shared_down]: [&Matrix; 2],
        lists: &Lists,
        rows: &ExpertRows,
        tokens: usize,
    ) {
        let mut bound = down.bound().to_vec();
        bound.extend([rows.act, lists.pairs, lists.tiles].map(Bound::Read));
        bound.push(Bound::Write(rows.routed));
        self.down.encode(pass, bound, self.tiles(tokens));
        self.shared_down.encode(pass, shared_down, rows.shared_act, rows.shared, tokens);
    }
}
