//! Embedding, norms, fixed-point rows; see `norm.cu`.

use lily_backend::Result;

use super::{FixedRows, Kernels, Pass, arguments};
use crate::device::Pointer;

/// The embedding as it is in the file: codes, scales, biases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Embedding {
    pub(crate) codes: Pointer,
    pub(crate) scales: Pointer,
    pub(crate) biases: Pointer,
}

impl Kernels {
    /// `tokens` tokens, from `ids` or the run's own, to `h`.
    pub(crate) fn embed(
        &self,
        pass: &Pass<'_>,
        (run, tokens): (Pointer, usize),
        ids: Pointer,
        e: &Embedding,
        (h, turns): (Pointer, Pointer),
    ) -> Result<()> {
        pass.launch(self.embed, (tokens, 1), 256, arguments![run, ids, e.codes, e.scales, e.biases, h, turns])
    }

    /// Norm of `rows` rows of `h`.
    pub(crate) fn norm_rows(
        &self,
        pass: &Pass<'_>,
        h: Pointer,
        norm: Pointer,
        rows: usize,
        out: FixedRows,
    ) -> Result<()> {
        pass.launch(self.norm_rows, (rows, 1), 256, arguments![h, norm, out])
    }

    /// `rows` rows of `inputs` values as they are.
    pub(crate) fn fix_rows(
        &self,
        pass: &Pass<'_>,
        x: Pointer,
        rows: usize,
        inputs: usize,
        out: FixedRows,
    ) -> Result<()> {
        let (grid, rows, inputs) = (team_grid(rows, out), rows as i32, inputs as i32);
        pass.launch(self.fix_rows, grid, 256, arguments![x, rows, inputs, out])
    }

    /// Gated norm of a delta layer's `rows` outputs.
    pub(crate) fn delta_norm(
        &self,
        pass: &Pass<'_>,
        (o, rows): (Pointer, usize),
        projected: Pointer,
        norm: Pointer,
        out: FixedRows,
    ) -> Result<()> {
        let (grid, rows) = (team_grid(rows, out), rows as i32);
        pass.launch(self.delta_norm, grid, 256, arguments![o, projected, norm, rows, out])
    }
}

/// Four values a thread.
fn team_grid(rows: usize, out: FixedRows) -> (usize, usize) {
    ((rows * out.width as usize).div_ceil(4 * 256), 1)
}
