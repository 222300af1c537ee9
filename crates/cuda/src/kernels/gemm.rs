//! Linears of many tokens; see `gemm.cu`.

use lily_backend::Result;

use super::{FixedRows, Kernels, Pass, arguments};
use crate::device::Pointer;

/// Warps of a CTA.
const WARPS: usize = 8;
/// From this number of tokens on the large form is faster: below it most of its 64 columns would be empty.
const LARGE_TOKENS: usize = 33;
/// The same for the mean number of tokens that an expert meets.
const LARGE_EXPERT_TOKENS: usize = 17;
/// Tokens of a CTA of the large and of the small form, and of the 8-bit one.
const LARGE_TILE: usize = 64;
const SMALL_TILE: usize = 16;
const Q8_TILE: usize = 32;

/// Two stages of fixed-point inputs: 256 inputs of `8 * columns` tokens.
pub(super) fn shared(columns: usize) -> usize {
    2 * 8 * columns * (2 * 256 + 4 * 8)
}

/// One linear or a stack of them; the layout is that of `Gemm` in `gemm.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    /// `[experts, tiles, blocks]`.
    pub(crate) weights: Pointer,
    /// From one expert's weights to the next.
    pub(crate) expert_bytes: u64,
    pub(crate) tiles: i32,
    pub(crate) blocks: i32,
    pub(crate) x: FixedRows,
    pub(crate) grouping: Grouping,
    /// Rows, where no list says which.
    pub(crate) rows: i32,
    /// f32 `[rows, stride]`.
    pub(crate) out: Pointer,
    pub(crate) stride: i32,
    /// Outputs of a row that are stored.
    pub(crate) outputs: i32,
}

/// Who meets which expert; the layout is that of the fields in `Gemm` of `gemm.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouping {
    /// `[experts, stride]`, or null.
    pub(crate) list: Pointer,
    pub(crate) token_tiles: Pointer,
    pub(crate) token_tile_count: Pointer,
    pub(crate) counts: Pointer,
    pub(crate) stride: i32,
    /// Entries of the list that share a row of inputs.
    pub(crate) share: i32,
}

impl Grouping {
    /// Every row meets the one matrix.
    pub(crate) const NONE: Grouping = Grouping {
        list: Pointer::NULL,
        token_tiles: Pointer::NULL,
        token_tile_count: Pointer::NULL,
        counts: Pointer::NULL,
        stride: 0,
        share: 1,
    };
}

/// What becomes of the outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Store,
    /// Added to what is there.
    Add,
    /// Tiles hold 8 rows of gate and 8 of up.
    SwiGlu,
}

/// Whether `tokens` tokens go through the large form.
fn is_large(tokens: usize) -> bool {
    tokens >= LARGE_TOKENS
}

/// Pairs that a tile of experts' tokens has, for `tokens` tokens that meet `top_k` of `experts`.
pub(crate) fn expert_tile(tokens: usize, top_k: usize, experts: usize) -> usize {
    if tokens * top_k >= LARGE_EXPERT_TOKENS * experts { LARGE_TILE } else { SMALL_TILE }
}

/// Most tiles that the lists of `tokens` tokens can have.
pub(crate) fn most_expert_tiles(tokens: usize, top_k: usize, experts: usize) -> usize {
    let (pairs, tile) = (tokens * top_k, expert_tile(tokens, top_k, experts));
    experts.min(pairs) + pairs / tile
}

impl Kernels {
    /// A linear of all rows.
    pub(crate) fn gemm_q4(&self, pass: &Pass<'_>, gemm: &Gemm, finish: Finish) -> Result<()> {
        let rows = gemm.rows as usize;
        let tile = if is_large(rows) { LARGE_TILE } else { SMALL_TILE };
        self.gemm(pass, gemm, finish, rows.div_ceil(tile), tile)
    }

    /// Linears of the rows that experts meet, `tokens` in all.
    pub(crate) fn gemm_q4_grouped(&self, pass: &Pass<'_>, gemm: &Gemm, finish: Finish, tokens: usize) -> Result<()> {
        let (top_k, experts) = (self.sizes.top_k, self.sizes.experts);
        let tile = expert_tile(tokens, top_k, experts);
        self.gemm(pass, gemm, finish, most_expert_tiles(tokens, top_k, experts), tile)
    }

    fn gemm(&self, pass: &Pass<'_>, gemm: &Gemm, finish: Finish, token_tiles: usize, tile: usize) -> Result<()> {
        let large = tile == LARGE_TILE;
        let kernel = match (finish, large) {
            (Finish::Store, true) => self.gemm_q4_store_large,
            (Finish::Store, false) => self.gemm_q4_store_small,
            (Finish::Add, true) => self.gemm_q4_add_large,
            (Finish::Add, false) => self.gemm_q4_add_small,
            (Finish::SwiGlu, true) => self.gemm_q4_swiglu_large,
            (Finish::SwiGlu, false) => self.gemm_q4_swiglu_small,
        };
        let grid = ((gemm.tiles as usize).div_ceil(WARPS), token_tiles);
        pass.launch(kernel, grid, 32 * WARPS, arguments![*gemm])
    }

    /// A linear of 8-bit weights of all rows.
    pub(crate) fn gemm_q8(&self, pass: &Pass<'_>, gemm: &Gemm) -> Result<()> {
        let grid = ((gemm.tiles as usize).div_ceil(WARPS), (gemm.rows as usize).div_ceil(Q8_TILE));
        pass.launch(self.gemm_q8_store, grid, 32 * WARPS, arguments![*gemm])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_suffice_for_lists_however_they_are_spread() {
        for (tokens, top_k, experts) in [(1, 8, 256), (16, 8, 256), (4096, 8, 256), (300, 2, 8), (7, 4, 16)] {
            let (tile, most) = (expert_tile(tokens, top_k, experts), most_expert_tiles(tokens, top_k, experts));
            // The worst: as many experts as can have one pair beyond whole tiles.
            let pairs = tokens * top_k;
            let spread = experts.min(pairs);
            let worst = spread + (pairs - spread) / tile;
            assert!(worst <= most, "{tokens} tokens: {worst} tiles, room for {most}");
        }
    }
}
