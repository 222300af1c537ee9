//! Linears of one token; see `gemv.cu`.

use lily_backend::Result;

use super::gemm::WIDE_ARCH;
use super::{BLOCK4_BYTES, Kernels, Pass, Sizes, arguments, blocks};
use crate::device::{Function, Module, Pointer};

const WARPS: usize = 16;
const THREADS: usize = 32 * WARPS;
/// Blocks that a warp has on the way. More let the streams of neighbouring kernels push each other out: two CTAs must fit.
const SLOTS: usize = 2;
/// The same of [`Kernels::norm_project`].
fn project_slots(s: &Sizes) -> usize {
    3 - usize::from(s.little_shared())
}

/// Dynamic shared memory of these kernels: slots, of which one of an 8-bit block is smaller than two of 4-bit ones.
pub(super) fn shared(_: &Sizes) -> usize {
    WARPS * SLOTS * BLOCK4_BYTES
}

/// Slots, and a tile of the shared expert.
pub(super) fn shared_of_up(s: &Sizes) -> usize {
    shared(s) + blocks(s.shared_width) * BLOCK4_BYTES
}

/// Kernels of which no two CTAs fit on a processor, while one of a neighbour's does: they ask for a little more than half of its
/// shared memory. Every kernel of a token has a CTA for each processor. Where one processor had two of them it would be the last
/// by a microsecond or two, in the kernels that follow as well, because those begin where there is room.
pub(super) struct Alone {
    norm_project: (Function, u32),
    delta_output: (Function, u32),
    attention_output: (Function, u32),
}

/// What they need.
pub(super) fn shared_of_alone(s: &Sizes) -> [(&'static str, usize); 3] {
    [
        ("norm_project", WARPS * project_slots(s) * BLOCK4_BYTES),
        ("delta_output", shared(s)),
        ("attention_output", shared(s)),
    ]
}

/// More than half of the 228 KiB of Hopper, and beside it there is room for a CTA of [`shared_of_up`].
const ALONE_BYTES: usize = 118 << 10;

impl Alone {
    pub(super) fn load(module: &Module, sizes: &Sizes, arch: u32) -> Result<Alone> {
        let load = |(name, needed): (&'static str, usize)| -> Result<(Function, u32)> {
            let shared = if arch == WIDE_ARCH { needed.max(ALONE_BYTES) } else { needed } as u32;
            Ok((module.function(name, shared)?, shared))
        };
        let [norm_project, delta_output, attention_output] = shared_of_alone(sizes);
        Ok(Alone {
            norm_project: load(norm_project)?,
            delta_output: load(delta_output)?,
            attention_output: load(attention_output)?,
        })
    }
}

/// A CTA for each processor, whether it finds a tile or not.
fn grid(pass: &Pass<'_>) -> (usize, usize) {
    (pass.device.processors as usize, 1)
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
        pass.launch(self.alone.norm_project, grid(pass), THREADS, arguments![weights, count, h, norm, out])
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
        pass.launch(self.alone.delta_output, grid(pass), THREADS, arguments![weights, x, squares, h])
    }

    /// Output projection of an attention layer, added to `h`.
    pub(crate) fn attention_output(&self, pass: &Pass<'_>, weights: Pointer, x: Pointer, h: Pointer) -> Result<()> {
        pass.launch(self.alone.attention_output, grid(pass), THREADS, arguments![weights, x, h])
    }

    /// Norm of `h`, router and shared gate to `logits`, gate and up of the shared expert to `activation`.
    pub(crate) fn route_and_share(
        &self,
        pass: &Pass<'_>,
        (router, shared_up): (Pointer, Pointer),
        (h, norm): (Pointer, Pointer),
        (logits, activation): (Pointer, Pointer),
    ) -> Result<()> {
        // A CTA for each tile of the router, and others for the shared expert.
        let grid = (grid(pass).0.max(self.sizes.router_tiles + 1), 1);
        pass.launch(self.route_and_share, grid, THREADS, arguments![router, shared_up, h, norm, logits, activation])
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
        let arguments = arguments![up, shared_down, logits, h, norm, activation, shared];
        pass.launch(self.experts_up, grid(pass), THREADS, arguments)
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
        pass.launch(self.experts_down, grid(pass), THREADS, arguments![experts, logits, activation, shared, h])
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
