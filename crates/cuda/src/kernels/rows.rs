//! Linears and experts of several sessions' tokens, one token each; see `rows.cu` and `rows_experts.cu`.

use lily_backend::Result;

use super::{BLOCK_INPUTS, BLOCK4_BYTES, Kernels, Pass, Sizes, TILE_ROWS, arguments, blocks};
use crate::device::Pointer;

/// Most rows that share a pass.
pub(crate) const ROWS: usize = 16;
/// Rows that meet an expert together.
const QUAD: usize = 4;
/// Warps of a team.
const WARPS: usize = 8;
const TEAM_THREADS: usize = 32 * WARPS;
/// Blocks of 4 bits that a warp of the down projections has on the way.
const DOWN_SLOTS: usize = 4;

/// Teams of a CTA, which share its inputs.
fn teams(s: &Sizes) -> usize {
    2 - usize::from(s.little_shared())
}

fn threads(s: &Sizes) -> usize {
    teams(s) * TEAM_THREADS
}

/// Blocks whose sums for all rows stand beside each other, in each team.
fn chunk_blocks(s: &Sizes) -> usize {
    if s.shared_kib >= 227 { 2 * WARPS } else { WARPS }
}

/// Blocks of 4 bits that a warp has on the way, and states that a CTA of the delta step has.
pub(super) fn slots(s: &Sizes) -> usize {
    match s.shared_kib {
        227.. => 3,
        163.. => 2,
        _ => 1,
    }
}

/// Slots of all teams, rows of `blocks` blocks, and of each team sums of so many blocks, or of a tile, for `rows` rows.
fn shared_of(s: &Sizes, blocks: usize, (rows, sums): (usize, usize)) -> usize {
    let slots = slots(s);
    let sums = sums.max(blocks) * rows * TILE_ROWS * 4;
    teams(s) * (WARPS * slots * BLOCK4_BYTES + sums) + ROWS * RowImage::stride(blocks)
}

/// For the linears that all rows meet.
pub(super) fn shared(s: &Sizes) -> usize {
    let halves = [s.value_width, s.query_width].map(|inputs| blocks(inputs).div_ceil(2));
    let most = halves.into_iter().fold(blocks(s.hidden), usize::max);
    shared_of(s, most, (ROWS, chunk_blocks(s)))
}

/// For gate and up of the experts.
pub(super) fn shared_of_up(s: &Sizes) -> usize {
    shared_of(s, blocks(s.hidden), (QUAD, 3 * chunk_blocks(s)))
}

/// For the down projections: slots alone.
pub(super) fn shared_of_down(_: &Sizes) -> usize {
    WARPS * DOWN_SLOTS * BLOCK4_BYTES
}

/// Inputs of rows that share a pass, in fixed point; `rows.cu` has the layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowImage {
    at: Pointer,
    /// Of 256 inputs.
    blocks: i32,
    /// 1, or 2: even blocks and odd ones.
    parts: i32,
}

impl RowImage {
    /// Bytes between rows of so many blocks: bytes of the inputs, scale and sum of each group; of each block its sum of squares.
    const fn stride(blocks: usize) -> usize {
        blocks * (2 * BLOCK_INPUTS + 4 * 8) + (blocks.div_ceil(4) | 1) * 16
    }

    /// Bytes that rows of `inputs` inputs take in either form.
    pub(crate) fn bytes(inputs: usize) -> usize {
        let blocks = blocks(inputs);
        ROWS * RowImage::stride(blocks).max(2 * RowImage::stride(blocks.div_ceil(2)))
    }

    /// Whole rows of `inputs` inputs.
    pub(crate) fn whole(at: Pointer, inputs: usize) -> RowImage {
        RowImage { at, blocks: blocks(inputs) as i32, parts: 1 }
    }

    /// Rows of which the output projections take even and odd blocks apart.
    pub(crate) fn halves(at: Pointer, inputs: usize) -> RowImage {
        RowImage { at, blocks: blocks(inputs) as i32, parts: 2 }
    }

    /// CTAs that have a block of a row each.
    pub(super) fn grid(&self, rows: usize) -> (usize, usize) {
        (rows * self.blocks as usize, 1)
    }
}

/// Who meets which expert, of a pass with several rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meetings {
    /// [`Meetings::BYTES`] each.
    pub(crate) list: Pointer,
    /// One number: how many there are, or 0 until they are there.
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

impl Kernels {
    /// A CTA a processor, or fewer where teams are enough: the inputs of all rows, which each CTA reads, are more than its share of
    /// the weights.
    fn teams_grid(&self, pass: &Pass<'_>, tiles: usize) -> (usize, usize) {
        (tiles.div_ceil(teams(&self.sizes)).min(pass.device.processors as usize), 1)
    }

    /// Two CTAs share tiles.
    fn output_grid(&self, pass: &Pass<'_>) -> (usize, usize) {
        let tiles = self.sizes.hidden / TILE_ROWS;
        let together = (2 * tiles).div_ceil(pass.device.processors as usize).next_multiple_of(teams(&self.sizes));
        (2 * tiles.div_ceil(together), 1)
    }

    /// Adds `parts` to `rows` rows of `h`, and takes their norm, whose scale the linears behind it apply; empties the list of meetings.
    pub(crate) fn rows_norm(
        &self,
        pass: &Pass<'_>,
        h: Pointer,
        (parts, kind): (Pointer, Parts),
        norm: Pointer,
        (rows, m): (usize, &Meetings),
        out: RowImage,
    ) -> Result<()> {
        let (grid, kind) = (rows * blocks(self.sizes.hidden), kind as i32);
        pass.launch(self.rows_norm, (grid, 1), 64, arguments![h, parts, kind, norm, out, m.count])
    }

    /// Rounds `rows` rows.
    pub(crate) fn rows_fix(&self, pass: &Pass<'_>, x: Pointer, rows: usize, out: RowImage) -> Result<()> {
        pass.launch(self.rows_fix, out.grid(rows), 32, arguments![x, out])
    }

    /// The `tiles` tiles of a mixer's projections, to `out` `[rows, 16 tiles]`.
    pub(crate) fn rows_project(
        &self,
        pass: &Pass<'_>,
        (weights, tiles): (Pointer, usize),
        x: RowImage,
        rows: usize,
        out: Pointer,
    ) -> Result<()> {
        let (grid, threads) = (self.teams_grid(pass, tiles), threads(&self.sizes));
        let (tiles, rows) = (tiles as i32, rows as i32);
        pass.launch(self.rows_project, grid, threads, arguments![weights, tiles, x, rows, out])
    }

    /// Output projection of a delta layer, to `parts`, see [`Parts::Mixed`].
    pub(crate) fn rows_delta_output(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        x: RowImage,
        rows: usize,
        parts: Pointer,
    ) -> Result<()> {
        let (grid, rows) = (self.output_grid(pass), rows as i32);
        pass.launch(self.rows_delta_output, grid, threads(&self.sizes), arguments![weights, x, rows, parts])
    }

    /// Output projection of an attention layer, to `parts`, see [`Parts::Mixed`].
    pub(crate) fn rows_attention_output(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        x: RowImage,
        rows: usize,
        parts: Pointer,
    ) -> Result<()> {
        let (grid, rows) = (self.output_grid(pass), rows as i32);
        pass.launch(self.rows_attention_output, grid, threads(&self.sizes), arguments![weights, x, rows, parts])
    }

    /// Router and shared gate to `logits`, gate and up of the shared expert to `activation`.
    pub(crate) fn rows_route_and_share(
        &self,
        pass: &Pass<'_>,
        (router, shared_up): (Pointer, Pointer),
        x: RowImage,
        rows: usize,
        (logits, activation): (Pointer, Pointer),
    ) -> Result<()> {
        // Of either kind as many CTAs as its tiles need.
        let teams = teams(&self.sizes);
        let grid = (self.sizes.router_tiles.div_ceil(teams) + (self.sizes.shared_width / 8).div_ceil(teams), 1);
        let rows = rows as i32;
        let arguments = arguments![router, shared_up, x, rows, logits, activation];
        pass.launch(self.rows_route_and_share, grid, threads(&self.sizes), arguments)
    }

    /// Gate and up of the experts that `logits` choose, to `activation`; who meets whom to `m`.
    pub(crate) fn rows_up(
        &self,
        pass: &Pass<'_>,
        (weights, logits): (Pointer, Pointer),
        (x, rows): (RowImage, usize),
        activation: Pointer,
        m: &Meetings,
    ) -> Result<()> {
        let (grid, rows) = ((pass.device.processors as usize, 1), rows as i32);
        let arguments = arguments![weights, logits, x, rows, activation, m.list, m.count, m.weights];
        pass.launch(self.rows_up, grid, threads(&self.sizes), arguments)
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
        // Twice as many CTAs as processors: as many as fit, and enough to stream; three times as many are slower.
        let (grid, rows) = ((2 * pass.device.processors as usize, 1), rows as i32);
        let arguments = arguments![experts, shared, m.list, m.count, m.weights, activation, rows, parts];
        pass.launch(self.rows_down, grid, TEAM_THREADS, arguments)
    }

    /// CTAs of [`Kernels::rows_head`], no more than of [`Kernels::head`](Kernels::head_grid).
    pub(crate) fn rows_head_grid(&self, pass: &Pass<'_>) -> usize {
        self.sizes.vocab_tiles.min(pass.device.processors as usize)
    }

    /// Head, to `logits` `[rows, vocab]`; the best of every CTA to `bests` `[rows, CTAs]`.
    pub(crate) fn rows_head(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        (runs, rows): (Pointer, usize),
        x: RowImage,
        (logits, bests): (Pointer, Pointer),
    ) -> Result<()> {
        let (grid, rows) = ((self.rows_head_grid(pass), 1), rows as i32);
        pass.launch(self.rows_head, grid, threads(&self.sizes), arguments![weights, runs, x, rows, logits, bests])
    }
}

const _: () = assert!(ROWS.is_multiple_of(QUAD));
