//! The gated delta rule; see `delta.cu`.

use lily_backend::Result;

use super::{Kernels, Pass, Sizes, arguments};
use crate::device::Pointer;

/// CTAs that share a value head.
const SLICES: usize = 4;
/// Tokens of [`Kernels::delta_scan`] in shared memory at a time; two such batches.
const SCAN_BATCH: usize = 16;
/// Tokens that a CTA of [`Kernels::delta_prepare`] takes.
const PREPARED: usize = 8;

/// Two batches of queries, keys, 32 values, decay and beta.
pub(super) fn shared_of_scan(_: &Sizes) -> usize {
    2 * SCAN_BATCH * 4 * (128 + 128 + 32 + 2)
}

/// Small vectors of a delta layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaVectors {
    /// `[conv width, 4]`, the newest last.
    pub(crate) taps: Pointer,
    /// `exp(A_log)` per value head.
    pub(crate) rates: Pointer,
    /// Per value head.
    pub(crate) dt_bias: Pointer,
    /// `[128]`.
    pub(crate) norm: Pointer,
}

impl Kernels {
    /// One token of each of `rows` rows through delta layer `layer`: `projected` to `out` in whole blocks, and its sums of squares.
    pub(crate) fn delta_step(
        &self,
        pass: &Pass<'_>,
        (run, layer, rows): (Pointer, usize, usize),
        projected: Pointer,
        v: &DeltaVectors,
        (out, squares): (Pointer, Pointer),
    ) -> Result<()> {
        let needed = self.sizes.value_heads * SLICES;
        // Of one row a CTA for each processor, like its neighbours: see `gemv.rs`.
        let grid = (if rows == 1 { needed.max(pass.device.processors as usize) } else { needed }, rows);
        let layer = layer as i32;
        let arguments = arguments![run, layer, projected, v.taps, v.rates, v.dt_bias, v.norm, out, squares];
        pass.launch(if rows == 1 { self.delta_step } else { self.rows_delta_step }, grid, 512, arguments)
    }

    /// Many tokens before the recurrence: `projected` to `mixed` and `gates`.
    pub(crate) fn delta_prepare(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        projected: Pointer,
        v: &DeltaVectors,
        (mixed, gates): (Pointer, Pointer),
    ) -> Result<()> {
        let heads = self.sizes.key_heads + self.sizes.value_heads.div_ceil(2);
        let (layer, grid, tokens) = (layer as i32, (tokens.div_ceil(PREPARED), heads), tokens as i32);
        let arguments = arguments![run, layer, projected, v.taps, v.rates, v.dt_bias, tokens, mixed, gates];
        pass.launch(self.delta_prepare, grid, 256, arguments)
    }

    /// Leaves the last inputs of the convolution in the state.
    pub(crate) fn delta_history(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        projected: Pointer,
    ) -> Result<()> {
        let (layer, tokens, grid) = (layer as i32, tokens as i32, (self.sizes.conv_width.div_ceil(256), 1));
        pass.launch(self.delta_history, grid, 256, arguments![run, layer, projected, tokens])
    }

    /// Many tokens through the recurrence, to `out`.
    pub(crate) fn delta_scan(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        (mixed, gates): (Pointer, Pointer),
        out: Pointer,
    ) -> Result<()> {
        let (layer, tokens, grid) = (layer as i32, tokens as i32, (self.sizes.value_heads * SLICES, 1));
        let arguments = arguments![run, layer, mixed, gates, tokens, out];
        pass.launch(self.delta_scan, grid, 128, arguments)
    }
}
