//! Which token goes to which expert, for many tokens, as lists that never leave the GPU.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, LANES};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = (
    "route.metal",
    concat!(
        "#line 1 \"choice.metal\"\n",
        include_str!("choice.metal"),
        "#line 1 \"route.metal\"\n",
        include_str!("route.metal")
    ),
);
/// Rows of a tile of a matrix product, as common.metal has it.
pub(crate) const TILE_ROWS: usize = 64;
/// Bytes of a tile of the list.
pub(crate) const TILE_BYTES: usize = 16;

/// `route`, `count_pairs` and `list_pairs`.
pub(crate) struct Route {
    route: Pipeline,
    count: Pipeline,
    list: Pipeline,
    experts: usize,
    experts_per_token: usize,
}

/// The lists. A pair is a token with one of its experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lists {
    /// `[tokens, experts per token]` u32.
    pub(crate) chosen: Slice,
    /// `[tokens, experts per token + 1]` f32.
    pub(crate) weights: Slice,
    /// `[experts]` u32.
    pub(crate) counts: Slice,
    /// `[pairs]` u32, by experts.
    pub(crate) pairs: Slice,
    /// `[most tiles]`: expert, first pair, pairs, 0; u32.
    pub(crate) tiles: Slice,
}

/// Tiles of at most TILE_ROWS pairs of one expert that `tokens` tokens may make: one unfinished tile per expert.
pub(crate) fn most_tiles(experts: usize, experts_per_token: usize, tokens: usize) -> usize {
    let pairs = tokens * experts_per_token;
    pairs.div_ceil(TILE_ROWS) + pairs.min(experts)
}

impl Route {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Route> {
        let mut pipeline = |kernel| builder.pipeline(FILE, KernelSpec { kernel, constants: &[], threads: LANES });
        Ok(Route {
            route: pipeline("route")?,
            count: pipeline("count_pairs")?,
            list: pipeline("list_pairs")?,
            experts: shape.experts,
            experts_per_token: shape.experts_per_token,
        })
    }

    /// Lists from router logits `[tokens, experts + 1]` f32.
    pub(crate) fn encode(&self, pass: &mut Pass, logits: Slice, lists: &Lists, tokens: usize) {
        let mut dispatch = |pipeline, bound, groups| {
            pass.dispatch(Dispatch { pipeline, bound, groups: [groups, 1], threads: LANES });
        };
        let pairs = tokens * self.experts_per_token;
        let bound = vec![Bound::Read(logits), Bound::Write(lists.chosen), Bound::Write(lists.weights)];
        dispatch(self.route, bound, tokens);
        let bound = vec![Bound::Read(lists.chosen), Bound::Write(lists.counts), Bound::word(pairs)];
        dispatch(self.count, bound, self.experts);
        let mut bound = [lists.chosen, lists.counts].map(Bound::Read).to_vec();
        bound.extend([lists.pairs, lists.tiles].map(Bound::Write));
        bound.push(Bound::words([pairs, self.tiles(tokens)]));
        dispatch(self.list, bound, self.experts);
    }

    /// Tiles for `tokens` tokens.
    pub(crate) fn tiles(&self, tokens: usize) -> usize {
        most_tiles(self.experts, self.experts_per_token, tokens)
    }
}
