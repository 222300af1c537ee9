//! Linears of one token; see `gemv.cu`.

use lily_backend::Result;

use super::{BLOCK_INPUTS, BLOCK4_BYTES, Kernels, Pass, Sizes, TILE_ROWS, arguments};
use crate::device::Pointer;

const WARPS: usize = 16;
const THREADS: usize = 32 * WARPS;
/// Blocks that a warp has on the way. More let the streams of neighbouring kernels push each other out: two CTAs must fit.
const SLOTS: usize = 2;
/// CTAs for the shared expert beside those of the others. With more there is no room for the next kernel to begin early.
const SHARED_DOWN_CTAS: usize = 16;

/// Dynamic shared memory of these kernels: slots, of which one of an 8-bit block is smaller than two of 4-bit ones, and each
/// warp's part of a norm's weights.
pub(super) fn shared(_: &Sizes) -> usize {
    WARPS * (SLOTS * BLOCK4_BYTES + 4 * BLOCK_INPUTS)
}

/// Tiles over the processors.
fn grid(pass: &Pass<'_>, tiles: usize) -> (usize, usize) {
    (tiles.min(pass.device.processors as usize), 1)
}

impl Kernels {
    /// Norm of `h` and the `tiles` tiles of a mixer's projections, to `out`.
    pub(crate) fn norm_project(
        &self,
        pass: &Pass<'_>,
        (weights, tiles): (Pointer, usize),
        h: Pointer,
        norm: Pointer,
        out: Pointer,
    ) -> Result<()> {
        let count = tiles as i32;
        pass.launch(self.norm_project, grid(pass, tiles), THREADS, arguments![weights, count, h, norm, out])
    }

    /// Output projection of a delta layer, added to `h`.
    pub(crate) fn delta_output(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        x: Pointer,
        squares: Pointer,
        h: Pointer,
    ) -> Result<()> {
        let grid = grid(pass, self.sizes.hidden / TILE_ROWS);
        pass.launch(self.delta_output, grid, THREADS, arguments![weights, x, squares, h])
    }

    /// Output projection of an attention layer, added to `h`.
    pub(crate) fn attention_output(&self, pass: &Pass<'_>, weights: Pointer, x: Pointer, h: Pointer) -> Result<()> {
        let grid = grid(pass, self.sizes.hidden / TILE_ROWS);
        pass.launch(self.attention_output, grid, THREADS, arguments![weights, x, h])
    }

    /// Norm of `h`, router and shared gate to `logits`, gate and up of the shared expert to `activation`. Meanwhile
    /// `bytes` bytes at `later`, which are streamed next, go into the cache.
    pub(crate) fn route_and_share(
        &self,
        pass: &Pass<'_>,
        (router, shared_up): (Pointer, Pointer),
        (h, norm): (Pointer, Pointer),
        (logits, activation): (Pointer, Pointer),
        (later, bytes): (Pointer, usize),
    ) -> Result<()> {
        let (tiled, bytes) = (self.sizes.router_tiles + self.sizes.shared_width / 8, bytes as u32);
        let grid = (tiled + (pass.device.processors as usize).saturating_sub(tiled).max(1), 1);
        let arguments = arguments![router, shared_up, h, norm, logits, activation, later, bytes];
        pass.launch(self.route_and_share, grid, THREADS, arguments)
    }

    /// Gate and up of the experts that `logits` choose, to `activation`; down projection of the shared one, weighted, to `shared`.
    pub(crate) fn experts_up(
        &self,
        pass: &Pass<'_>,
        (up, shared_down): (Pointer, Pointer),
        logits: Pointer,
        (h, norm): (Pointer, Pointer),
        (activation, shared): (Pointer, Pointer),
    ) -> Result<()> {
        let (grid, _) = grid(pass, self.sizes.top_k * self.sizes.expert_width / 8);
        let arguments = arguments![up, shared_down, logits, h, norm, activation, shared];
        pass.launch(self.experts_up, (grid + SHARED_DOWN_CTAS, 1), THREADS, arguments)
    }

    /// Down projections of the chosen experts, weighted, and `shared`, added to `h`.
    pub(crate) fn experts_down(
        &self,
        pass: &Pass<'_>,
        experts: Pointer,
        logits: Pointer,
        (activation, shared): (Pointer, Pointer),
        h: Pointer,
    ) -> Result<()> {
        let grid = grid(pass, self.sizes.hidden / TILE_ROWS);
        pass.launch(self.experts_down, grid, THREADS, arguments![experts, logits, activation, shared, h])
    }

    /// CTAs of [`Kernels::head`], each with a best logit: two per processor, which are enough to stream at full speed.
    pub(crate) fn head_grid(&self, pass: &Pass<'_>) -> usize {
        self.sizes.vocab_tiles.min(2 * pass.device.processors as usize)
    }

    /// Final norm of `h` and the head, to `logits`; the best of every CTA to `bests`.
    pub(crate) fn head(
        &self,
        pass: &Pass<'_>,
        weights: Pointer,
        run: Pointer,
        (h, norm): (Pointer, Pointer),
        logits: Pointer,
        bests: Pointer,
    ) -> Result<()> {
        let grid = (self.head_grid(pass), 1);
        pass.launch(self.head, grid, THREADS, arguments![weights, run, h, norm, logits, bests])
    }
}
