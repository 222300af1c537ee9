//! Attention; see `attention.cu` and, for Hopper, `attention_wide.cu`.

use lily_backend::Result;
use lily_model::Shape;

use super::gemm::WIDE_ARCH;
use super::rows::RowImage;
use super::{Kernels, Pass, Sizes, arguments};
use crate::device::{Function, Module, Pointer};

/// Tokens of keys and values of [`Kernels::attend_many`] in shared memory at a time.
const TILE: usize = 32;
const TILE_BYTES: usize = 2 * TILE * Shape::HEAD_DIM * 2;
/// Most parts of the cached tokens.
const MAX_PARTS: usize = 128;
/// Positions that a warp of [`Kernels::attend_many`] takes.
const ROWS: usize = 16;

/// Warps of [`Kernels::attend`], each with a tile of 16 tokens of its own.
const ATTEND_WARPS: usize = 8;

/// A tile of keys and one of values for each warp, or where memory is little one that has both in turn; later their partial outputs: of 8
/// heads, four numbers apart.
pub(super) fn shared_of_one(s: &Sizes) -> usize {
    let outputs = 8 * (Shape::HEAD_DIM + 4) * 4;
    ATTEND_WARPS * (TILE_BYTES / 2 / (1 + usize::from(s.little_shared()))).max(outputs)
}

/// Tiles of 64 keys and as many values; for each warpgroup 64 rows of queries in two halves; and room to begin at a multiple of 1024.
fn shared_of_wide(s: &Sizes) -> usize {
    (2 + 2 * s.queries_per_kv() / 4) * 64 * Shape::HEAD_DIM * 2 + 1024
}

/// The kernel for many tokens on the GPUs and head counts that have one of its own.
pub(super) fn load_wide(module: &Module, sizes: &Sizes, arch: u32) -> Result<Option<(Function, u32)>> {
    if arch != WIDE_ARCH || !sizes.queries_per_kv().is_multiple_of(4) {
        return Ok(None);
    }
    let shared = shared_of_wide(sizes) as u32;
    Ok(Some((module.function("attend_wide", shared)?, shared)))
}

/// Queries in two halves, and a tile.
pub(super) fn shared_of_many(s: &Sizes) -> usize {
    2 * s.heads_together() * ROWS * Shape::HEAD_DIM * 2 + TILE_BYTES
}

impl Kernels {
    /// Parts that the cached tokens of a kv head are cut into.
    pub(crate) fn attention_parts(&self, pass: &Pass<'_>) -> usize {
        (pass.device.processors as usize / self.sizes.kv_heads).clamp(1, MAX_PARTS)
    }

    /// One token of each of `rows` rows through attention layer `layer`: `projected` to partial results.
    pub(crate) fn attend(
        &self,
        pass: &Pass<'_>,
        (run, layer, rows): (Pointer, usize, usize),
        (projected, turns): (Pointer, Pointer),
        (q_norm, k_norm): (Pointer, Pointer),
        (sums, values): (Pointer, Pointer),
    ) -> Result<()> {
        let (rows, layer, parts) = (rows as i32, layer as i32, self.attention_parts(pass) as i32);
        let arguments = arguments![run, rows, layer, parts, projected, q_norm, k_norm, turns, sums, values];
        let grid = (pass.device.processors as usize, 1);
        pass.launch(self.attend, grid, 32 * ATTEND_WARPS, arguments)
    }

    /// The partial results of [`Kernels::attend`] together, gated, to `out`.
    pub(crate) fn attend_combine(
        &self,
        pass: &Pass<'_>,
        run: Pointer,
        projected: Pointer,
        (sums, values): (Pointer, Pointer),
        out: Pointer,
    ) -> Result<()> {
        let (parts, grid) = (self.attention_parts(pass) as i32, (self.sizes.query_heads * 4, 1));
        pass.launch(self.attend_combine, grid, 256, arguments![run, parts, projected, sums, values, out])
    }

    /// The same for one token of each of `rows` rows, rounded.
    pub(crate) fn rows_attend_combine(
        &self,
        pass: &Pass<'_>,
        (runs, rows): (Pointer, usize),
        projected: Pointer,
        (sums, values): (Pointer, Pointer),
        out: RowImage,
    ) -> Result<()> {
        let (parts, grid) = (self.attention_parts(pass) as i32, (self.sizes.query_heads, rows));
        pass.launch(self.rows_attend_combine, grid, 256, arguments![runs, parts, projected, sums, values, out])
    }

    /// Many tokens: keys and values to the cache, queries to `queries`.
    pub(crate) fn attention_prepare(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        projected: Pointer,
        (q_norm, k_norm): (Pointer, Pointer),
        queries: Pointer,
    ) -> Result<()> {
        let (layer, grid, tokens) = (layer as i32, (tokens, 1), tokens as i32);
        let arguments = arguments![run, layer, projected, q_norm, k_norm, tokens, queries];
        pass.launch(self.attention_prepare, grid, 256, arguments)
    }

    /// Attention of many tokens, gated, to `out`.
    pub(crate) fn attend_many(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        queries: Pointer,
        projected: Pointer,
        out: Pointer,
    ) -> Result<()> {
        if let Some(kernel) = self.attend_wide {
            let grid = (tokens.div_ceil(ROWS), self.sizes.kv_heads);
            let (layer, tokens, threads) = (layer as i32, tokens as i32, 32 * self.sizes.queries_per_kv());
            return pass.launch(kernel, grid, threads, arguments![run, layer, queries, projected, tokens, out]);
        }
        let together = self.sizes.heads_together();
        let grid = (tokens.div_ceil(ROWS), self.sizes.query_heads / together);
        let (layer, tokens) = (layer as i32, tokens as i32);
        let arguments = arguments![run, layer, queries, projected, tokens, out];
        pass.launch(self.attend_many, grid, 32 * together, arguments)
    }

    /// Seeded noise in the place of the keys and values of `count` tokens from the run's position on.
    pub(crate) fn fill_noise(&self, pass: &Pass<'_>, run: Pointer, count: usize, seed: u64) -> Result<()> {
        let planes = 2 * self.sizes.attention_layers * self.sizes.kv_heads;
        let (grid, count) = ((count, planes), count as u32);
        pass.launch(self.fill_noise, grid, Shape::HEAD_DIM, arguments![run, count, seed])
    }
}
