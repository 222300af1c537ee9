//! Mixture of experts of many tokens; see `moe.cu`.

use lily_backend::Result;

use super::{Kernels, Pass, arguments};
use crate::device::Pointer;

/// Most experts that `list_tiles` has threads for.
pub(crate) const MAX_EXPERTS: usize = 1024;

/// Where the choice of many tokens is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routing {
    /// `[tokens, top_k]`.
    pub(crate) ids: Pointer,
    /// f32 `[tokens, top_k]`.
    pub(crate) weights: Pointer,
    /// `[experts, tokens]`.
    pub(crate) list: Pointer,
    /// `[experts]`.
    pub(crate) counts: Pointer,
    /// Expert and first place.
    pub(crate) tiles: Pointer,
    /// One.
    pub(crate) tile_count: Pointer,
}

impl Kernels {
    /// Chooses the experts of `tokens` tokens and lists who meets whom.
    pub(crate) fn route(&self, pass: &Pass<'_>, logits: Pointer, tokens: usize, r: &Routing) -> Result<()> {
        let tile = self.expert_tile(tokens) as i32;
        let (grid, tokens) = ((tokens.div_ceil(8), 1), tokens as i32);
        pass.launch(self.route_many, grid, 256, arguments![logits, tokens, r.ids, r.weights])?;
        let arguments = arguments![r.ids, tokens, r.list, r.counts];
        pass.launch(self.list_pairs, (self.sizes.experts, 1), 256, arguments)?;
        pass.launch(self.list_tiles, (1, 1), MAX_EXPERTS, arguments![r.counts, tile, r.tiles, r.tile_count])
    }

    /// Adds what experts made to `h`.
    pub(crate) fn combine_experts(
        &self,
        pass: &Pass<'_>,
        tokens: usize,
        (routed, shared): (Pointer, Pointer),
        (weights, logits): (Pointer, Pointer),
        h: Pointer,
    ) -> Result<()> {
        pass.launch(self.combine_experts, (tokens, 1), 256, arguments![routed, weights, shared, logits, h])
    }
}
