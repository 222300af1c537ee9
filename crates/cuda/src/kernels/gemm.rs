//! Linears of many tokens; see `gemm.cu` and, for Hopper, `gemm_wide.cu`.

use lily_backend::Result;

use super::{FixedRows, Kernels, Pass, arguments};
use crate::device::{Function, Module, Pointer};

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

/// Tokens of a CTA of the wide form at most, and of the narrow one.
const WIDE_TILE: usize = 128;
const NARROW_TILE: usize = 32;
/// The most of the wide form of 8-bit weights.
const Q8_WIDE_TILE: usize = 64;
/// Up to this mean number of tokens that an expert meets the narrow form is faster: most experts have one of its tiles.
const NARROW_EXPERT_TOKENS: usize = 24;

/// Stages of 128 inputs of `tokens` tokens with their groups and of 128 rows of codes with their scales, each beginning at a multiple of
/// 1024.
const fn wide_shared(tokens: usize, stages: usize, codes: usize) -> u32 {
    let stage = 2 * 128 * tokens + 2 * 8 * tokens + WARPS * (codes + 256);
    (stages * stage.next_multiple_of(1024) + 1024) as u32
}
/// The compute capability whose tensor cores the wide forms of kernels are for.
pub(super) const WIDE_ARCH: u32 = 90;

/// The kernels of the wide form, or of the narrow one.
pub(crate) struct Forms {
    store: (Function, u32),
    add: (Function, u32),
    swiglu: (Function, u32),
    q8: (Function, u32),
}

/// Kernels for Hopper.
pub(crate) struct Wide {
    wide: Forms,
    narrow: Forms,
}

impl Wide {
    fn forms(&self, tile: usize) -> &Forms {
        if tile == NARROW_TILE { &self.narrow } else { &self.wide }
    }

    /// Those of a module for `arch`, if it is the one that has them.
    pub(super) fn load(module: &Module, arch: u32) -> Result<Option<Wide>> {
        if arch != WIDE_ARCH {
            return Ok(None);
        }
        let forms = |names: [&'static str; 4], tokens: usize, stages| -> Result<Forms> {
            let q4 = wide_shared(tokens, stages, 1024);
            let q8 = wide_shared(tokens.min(Q8_WIDE_TILE), stages, 2048);
            let [store, add, swiglu, q8_store] = names;
            Ok(Forms {
                store: (module.function(store, q4)?, q4),
                add: (module.function(add, q4)?, q4),
                swiglu: (module.function(swiglu, q4)?, q4),
                q8: (module.function(q8_store, q8)?, q8),
            })
        };
        let wide = ["gemm_q4_store_wide", "gemm_q4_add_wide", "gemm_q4_swiglu_wide", "gemm_q8_store_wide"];
        let narrow = ["gemm_q4_store_narrow", "gemm_q4_add_narrow", "gemm_q4_swiglu_narrow", "gemm_q8_store_narrow"];
        Ok(Some(Wide { wide: forms(wide, WIDE_TILE, 4)?, narrow: forms(narrow, NARROW_TILE, 3)? }))
    }
}

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
    /// Tokens of a CTA; set when it is launched.
    pub(crate) tile: i32,
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

/// Most tiles that lists of `tokens` tokens can have.
fn most_expert_tiles(tokens: usize, top_k: usize, experts: usize, tile: usize) -> usize {
    let pairs = tokens * top_k;
    experts.min(pairs) + pairs / tile
}

impl Kernels {
    /// Pairs that a tile of experts' tokens has, for `tokens` tokens.
    pub(crate) fn expert_tile(&self, tokens: usize) -> usize {
        match self.wide {
            Some(_) if tokens * self.sizes.top_k <= NARROW_EXPERT_TOKENS * self.sizes.experts => NARROW_TILE,
            Some(_) => WIDE_TILE,
            None if tokens * self.sizes.top_k >= LARGE_EXPERT_TOKENS * self.sizes.experts => LARGE_TILE,
            None => SMALL_TILE,
        }
    }

    /// Tokens of a CTA of a linear of `rows` tokens with `groups` groups of tiles: of the wide form as many as leave work for every
    /// processor.
    fn tile(&self, pass: &Pass<'_>, rows: usize, groups: usize) -> usize {
        match self.wide {
            Some(_) => {
                let fills = |tile: &usize| rows.div_ceil(*tile) * groups >= pass.device.processors as usize;
                [WIDE_TILE, 64].into_iter().find(fills).unwrap_or(NARROW_TILE)
            }
            None if rows >= LARGE_TOKENS => LARGE_TILE,
            None => SMALL_TILE,
        }
    }

    /// A linear of all rows.
    pub(crate) fn gemm_q4(&self, pass: &Pass<'_>, gemm: &Gemm, finish: Finish) -> Result<()> {
        let rows = gemm.rows as usize;
        let tile = self.tile(pass, rows, (gemm.tiles as usize).div_ceil(WARPS));
        self.gemm(pass, gemm, finish, rows.div_ceil(tile), tile)
    }

    /// Linears of the rows that experts meet, `tokens` in all.
    pub(crate) fn gemm_q4_grouped(&self, pass: &Pass<'_>, gemm: &Gemm, finish: Finish, tokens: usize) -> Result<()> {
        let tile = self.expert_tile(tokens);
        let most = most_expert_tiles(tokens, self.sizes.top_k, self.sizes.experts, tile);
        self.gemm(pass, gemm, finish, most, tile)
    }

    fn gemm(&self, pass: &Pass<'_>, gemm: &Gemm, finish: Finish, token_tiles: usize, tile: usize) -> Result<()> {
        let kernel = match (finish, tile, &self.wide) {
            (Finish::Store, tile, Some(wide)) => wide.forms(tile).store,
            (Finish::Add, tile, Some(wide)) => wide.forms(tile).add,
            (Finish::SwiGlu, tile, Some(wide)) => wide.forms(tile).swiglu,
            (Finish::Store, LARGE_TILE, None) => self.gemm_q4_store_large,
            (Finish::Store, _, None) => self.gemm_q4_store_small,
            (Finish::Add, LARGE_TILE, None) => self.gemm_q4_add_large,
            (Finish::Add, _, None) => self.gemm_q4_add_small,
            (Finish::SwiGlu, LARGE_TILE, None) => self.gemm_q4_swiglu_large,
            (Finish::SwiGlu, _, None) => self.gemm_q4_swiglu_small,
        };
        let grid = ((gemm.tiles as usize).div_ceil(WARPS), token_tiles);
        let gemm = Gemm { tile: tile as i32, ..*gemm };
        pass.launch(kernel, grid, 32 * WARPS, arguments![gemm])
    }

    /// A linear of 8-bit weights of all rows.
    pub(crate) fn gemm_q8(&self, pass: &Pass<'_>, gemm: &Gemm) -> Result<()> {
        let (rows, groups) = (gemm.rows as usize, (gemm.tiles as usize).div_ceil(WARPS));
        let (kernel, tile) = match &self.wide {
            Some(wide) => {
                let tile = self.tile(pass, rows, groups).min(Q8_WIDE_TILE);
                (wide.forms(tile).q8, tile)
            }
            None => (self.gemm_q8_store, Q8_TILE),
        };
        let gemm = Gemm { tile: tile as i32, ..*gemm };
        pass.launch(kernel, (groups, rows.div_ceil(tile)), 32 * WARPS, arguments![gemm])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_suffice_for_lists_however_they_are_spread() {
        for (tokens, top_k, experts) in [(1, 8, 256), (16, 8, 256), (4096, 8, 256), (300, 2, 8), (7, 4, 16)] {
            for tile in [SMALL_TILE, NARROW_TILE, LARGE_TILE, WIDE_TILE] {
                // The worst: as many experts as can have one pair beyond whole tiles.
                let pairs = tokens * top_k;
                let spread = experts.min(pairs);
                let worst = spread + (pairs - spread) / tile;
                let most = most_expert_tiles(tokens, top_k, experts, tile);
                assert!(worst <= most, "{tokens} tokens: {worst} tiles of {tile}, room for {most}");
            }
        }
    }
}
