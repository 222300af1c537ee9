//! Linears of several sessions' tokens, one token each; see `rows.cu`.

use lily_backend::Result;

use super::{BLOCK_INPUTS, BLOCK4_BYTES, BLOCK8_BYTES, FixedRows, Kernels, Pass, Sizes, TILE_ROWS, arguments, blocks};
use crate::device::Pointer;

/// Most rows that share a pass.
pub(crate) const ROWS: usize = 16;
/// Rows that meet an expert together.
const QUAD: usize = 4;
const WARPS: usize = 8;
const THREADS: usize = 32 * WARPS;
/// Blocks of 8 bits that a warp has on the way.
const SLOTS: usize = 2;
/// The same of 4 bits.
const SLOTS4: usize = 3;
/// Slots alone.
pub(super) fn shared_of_experts(_: &Sizes) -> usize {
    WARPS * SLOTS4 * BLOCK4_BYTES
}

/// Slots; sums of about three blocks per warp or of one tile, whichever are more; scale and sum of each row's groups for every warp.
pub(super) fn shared(s: &Sizes) -> usize {
    let most_blocks = blocks(s.hidden.max(s.value_width).max(s.query_width));
    let sums = most_blocks.max(3 * WARPS) * ROWS * TILE_ROWS * 4;
    WARPS * SLOTS * BLOCK8_BYTES + sums + WARPS * ROWS * 4 * 8
}

/// Who meets which expert, of a pass with several rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meetings {
    /// [`Meetings::BYTES`] each.
    pub(crate) list: Pointer,
    /// One number.
    pub(crate) count: Pointer,
    /// f32 `[rows, top_k + 1]`: of a row's experts and the shared one.
    pub(crate) weights: Pointer,
}

impl Meetings {
    /// Bytes of a meeting.
    pub(crate) const BYTES: usize = 32;

    /// Most of them.
    pub(crate) fn most(s: &Sizes) -> usize {
        ROWS * s.top_k
    }
}

/// What is still to be added to the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parts {
    Nothing,
    /// `[rows, 2, hidden]` by an output projection.
    Mixed,
    /// `[rows, blocks, hidden]` by experts.
    Experts,
}

/// Inputs whose norm's scale is still to be applied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normed {
    /// `[rows, hidden]`.
    pub(crate) x: FixedRows,
    /// f32 `[rows, hidden / 256]`.
    pub(crate) squares: Pointer,
}

impl Kernels {
    /// Twice as many CTAs as processors: as many as fit, and enough to stream; three times as many are slower.
    fn experts_grid(pass: &Pass<'_>) -> (usize, usize) {
        (2 * pass.device.processors as usize, 1)
    }

    /// Two CTAs share tiles, and one has several as soon as processors are fewer: its inputs are more than its weights.
    fn output_grid(&self, pass: &Pass<'_>) -> (usize, usize) {
        let tiles = self.sizes.hidden / TILE_ROWS;
        let together = (2 * tiles).div_ceil(pass.device.processors as usize);
        (2 * tiles.div_ceil(together), 1)
    }

    /// Adds `parts` to `rows` rows of `h`, and takes their norm.
    pub(crate) fn rows_norm(
        &self,
        pass: &Pass<'_>,
        h: Pointer,
        (parts, kind): (Pointer, Parts),
        norm: Pointer,
        rows: usize,
        out: Normed,
    ) -> Result<()> {
        let (grid, kind) = (rows * blocks(self.sizes.hidden), kind as i32);
        pass.launch(self.rows_norm, (grid, 1), 64, arguments![h, parts, kind, norm, out.x, out.squares])
    }

    /// Rounds `rows` rows.
    pub(crate) fn rows_fix(&self, pass: &Pass<'_>, x: Pointer, rows: usize, out: FixedRows) -> Result<()> {
        let grid = rows * out.width as usize / BLOCK_INPUTS;
        pass.launch(self.rows_fix, (grid, 1), 32, arguments![x, out])
    }

    /// The `tiles` tiles of a mixer's projections, to `out` `[rows, 16 tiles]`.
    pub(crate) fn rows_project(
        &self,
        pass: &Pass<'_>,
        (weights, tiles): (Pointer, usize),
        n: Normed,
        rows: usize,
        out: Pointer,
    ) -> Result<()> {
        // One CTA a processor: the inputs of all rows, which each of them reads, are more than its share of the weights.
        let grid = (tiles.min(pass.device.processors as usize), 1);
        let (tiles, rows) = (tiles as i32, rows as i32);
        pass.launch(self.rows_project, grid, THREADS, arguments![weights, tiles, n.x, rows, n.squares, out])
    }

    /// Output projection of a delta layer, to `parts`, see [`Parts::Mixed`].
    pub(crate) fn rows_delta_output(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        x: FixedRows,
        rows: usize,
        parts: Pointer,
    ) -> Result<()> {
        let (grid, rows) = (self.output_grid(pass), rows as i32);
        pass.launch(self.rows_delta_output, grid, THREADS, arguments![weights, x, rows, parts])
    }

    /// Output projection of an attention layer, to `parts`, see [`Parts::Mixed`].
    pub(crate) fn rows_attention_output(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        x: FixedRows,
        rows: usize,
        parts: Pointer,
    ) -> Result<()> {
        let (grid, rows) = (self.output_grid(pass), rows as i32);
        pass.launch(self.rows_attention_output, grid, THREADS, arguments![weights, x, rows, parts])
    }

    /// Router and shared gate to `logits`, gate and up of the shared expert to `activation`.
    pub(crate) fn rows_route_and_share(
        &self,
        pass: &Pass<'_>,
        (router, shared_up): (Pointer, Pointer),
        n: Normed,
        rows: usize,
        (logits, activation): (Pointer, Pointer),
    ) -> Result<()> {
        let grid = (self.sizes.router_tiles + self.sizes.shared_width / 8, 1);
        let rows = rows as i32;
        let arguments = arguments![router, shared_up, n.x, rows, n.squares, logits, activation];
        pass.launch(self.rows_route_and_share, grid, THREADS, arguments)
    }

    /// The choice of every row.
    pub(crate) fn rows_choose(&self, pass: &Pass<'_>, logits: Pointer, rows: usize, m: &Meetings) -> Result<()> {
        let rows = rows as i32;
        pass.launch(self.rows_choose, (1, 1), 32 * ROWS, arguments![logits, rows, m.list, m.count, m.weights])
    }

    /// Gate and up of the chosen experts, to `activation`.
    pub(crate) fn rows_up(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        m: &Meetings,
        n: Normed,
        activation: Pointer,
    ) -> Result<()> {
        let grid = Self::experts_grid(pass);
        pass.launch(self.rows_up, grid, THREADS, arguments![weights, m.list, m.count, n.x, n.squares, activation])
    }

    /// Down projections of the chosen experts and the shared one, weighted, to `parts` `[rows, blocks, hidden]`.
    pub(crate) fn rows_down(
        &self,
        pass: &Pass<'_>,
        (experts, shared): (Pointer, Pointer),
        m: &Meetings,
        (activation, rows): (Pointer, usize),
        parts: Pointer,
    ) -> Result<()> {
        let (grid, rows) = (Self::experts_grid(pass), rows as i32);
        let arguments = arguments![experts, shared, m.list, m.count, m.weights, activation, rows, parts];
        pass.launch(self.rows_down, grid, THREADS, arguments)
    }

    /// Head, to `logits` `[rows, vocab]`; the best of every CTA to `bests` `[rows, CTAs]`.
    pub(crate) fn rows_head(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        (runs, rows): (Pointer, usize),
        n: Normed,
        (logits, bests): (Pointer, Pointer),
    ) -> Result<()> {
        let (grid, rows) = ((self.head_grid(pass), 1), rows as i32);
        pass.launch(self.rows_head, grid, THREADS, arguments![weights, runs, n.x, rows, n.squares, logits, bests])
    }
}

const _: () = assert!(ROWS.is_multiple_of(QUAD));
