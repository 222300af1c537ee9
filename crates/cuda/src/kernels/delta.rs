//! The gated delta rule; see `delta.cu`, for rows that share a pass `rows_delta.cu`, and for many tokens `delta_wide.cu` and `delta_scan.cu`.

use lily_backend::Result;

use super::rows::{RowImage, slots};
use super::{Kernels, Pass, Sizes, arguments};
use crate::device::Pointer;

/// CTAs that share a value head.
const SLICES: usize = 4;
/// Tokens that [`Kernels::delta_relate`] takes together.
const CHUNK: usize = 64;
/// Bytes of most pieces of what it makes.
const PIECE: usize = 16_384;
/// Bytes of the other one: half a square of 64 tokens in fragments, and two factors of each token.
const LOWER_PIECE: usize = 20 * 512 + 2 * CHUNK * 4;
/// Pieces of [`Kernels::delta_scan`] in shared memory.
const SCAN_SLOTS: usize = 3;

/// A head of a chunk and of the three tokens before; its keys as fragments or a square of its tokens; three numbers of each token and value head, and one of each token.
pub(super) fn shared_of_relate(s: &Sizes) -> usize {
    let per_token = 4 * (128 + 4) + 4 * 128 + 12 * s.value_heads / s.key_heads + 4;
    3 * 4 * (128 + 4) + CHUNK * per_token
}

/// A ring of pieces and whether they are there, sums of eight warps, and operands of two groups of them.
pub(super) fn shared_of_scan(_: &Sizes) -> usize {
    SCAN_SLOTS * PIECE + 32 + 8 * 6 * 512 + 2 * 4 * 4 * 512
}

/// Most value heads of a CTA of [`Kernels::rows_delta_step`].
const MOST_HEADS: usize = 4;

/// A ring of states, and whether they are there.
pub(super) fn shared_of_rows(s: &Sizes) -> usize {
    slots(s) * 4 * 128 * 128 + 32
}

/// Bytes of the updates that a state keeps of one head: see `KEPT` and `Update`.
pub(crate) const KEPT_BYTES: usize = 3 * 4 * (2 * 128 + 4);

/// Bytes between [`Kernels::delta_relate`] and [`Kernels::delta_scan`] for `tokens` tokens.
pub(crate) fn related_bytes(s: &Sizes, tokens: usize) -> usize {
    tokens.div_ceil(CHUNK) * (s.key_heads * 4 * PIECE + s.value_heads * (4 * PIECE + LOWER_PIECE))
}

/// Small vectors of a delta layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaVectors {
    /// `[conv width, 4]`, the newest last.
    pub(crate) taps: Pointer,
    /// `exp(A_log)` per value head.
    pub(crate) rates: Pointer,
    /// Per value head.
    pub(crate) dt_bias: Pointer,
    /// `[128]`.
    pub(crate) norm: Pointer,
}

impl Kernels {
    /// One token through delta layer `layer`: `projected` to `out` in whole blocks, and its sums of squares.
    pub(crate) fn delta_step(
        &self,
        pass: &Pass<'_>,
        (run, layer): (Pointer, usize),
        projected: Pointer,
        v: &DeltaVectors,
        (out, squares): (Pointer, Pointer),
    ) -> Result<()> {
        // A CTA for each processor, like its neighbours: see `gemv.rs`.
        let grid = (self.sizes.value_heads * SLICES).max(pass.device.processors as usize);
        let layer = layer as i32;
        let arguments = arguments![run, layer, projected, v.taps, v.rates, v.dt_bias, v.norm, out, squares];
        pass.launch(self.delta_step, (grid, 1), 512, arguments)
    }

    /// One token of each of `rows` rows through delta layer `layer`: `projected` to `out`.
    pub(crate) fn rows_delta_step(
        &self,
        pass: &Pass<'_>,
        (runs, layer, rows): (Pointer, usize, usize),
        projected: Pointer,
        v: &DeltaVectors,
        out: RowImage,
    ) -> Result<()> {
        let (layer, keys) = (layer as i32, self.sizes.key_heads);
        // As few key heads together as leave no CTA without a processor, or as many as a CTA may have.
        let most = MOST_HEADS / (self.sizes.value_heads / keys);
        let mut splits = (1..=most).filter(|together| keys.is_multiple_of(*together)).map(|together| keys / together);
        let fewest = splits.clone().min().unwrap_or(keys);
        let ctas = splits.find(|ctas| ctas * rows <= pass.device.processors as usize).unwrap_or(fewest);
        let arguments = arguments![runs, layer, projected, v.taps, v.rates, v.dt_bias, v.norm, out];
        pass.launch(self.rows_delta_step, (ctas, rows), 512, arguments)
    }

    /// Applies what is kept of a state's updates, in all `layers` delta layers.
    pub(crate) fn apply_updates(&self, pass: &Pass<'_>, run: Pointer, layers: usize) -> Result<()> {
        pass.launch(self.apply_updates, (self.sizes.value_heads, layers), 512, arguments![run])
    }

    /// Many tokens, all that needs no state: `projected` to `related`.
    pub(crate) fn delta_relate(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        projected: Pointer,
        v: &DeltaVectors,
        related: Pointer,
    ) -> Result<()> {
        let chunks = tokens.div_ceil(CHUNK);
        // A CTA to each value head does some work twice; while there are processors for all of them that costs no time.
        let alone = chunks * self.sizes.value_heads <= 2 * pass.device.processors as usize;
        let shares = if alone { self.sizes.value_heads / self.sizes.key_heads } else { 1 };
        let grid = (chunks, self.sizes.key_heads * shares);
        let (layer, tokens, shares) = (layer as i32, tokens as i32, shares as i32);
        let arguments = arguments![run, layer, projected, v.taps, v.rates, v.dt_bias, tokens, shares, related];
        pass.launch(self.delta_relate, grid, 256, arguments)
    }

    /// Many tokens through the recurrence, to `out`; leaves the last of `projected` to the next convolution.
    pub(crate) fn delta_scan(
        &self,
        pass: &Pass<'_>,
        (run, layer, tokens): (Pointer, usize, usize),
        (projected, related): (Pointer, Pointer),
        out: Pointer,
    ) -> Result<()> {
        let (layer, tokens, grid) = (layer as i32, tokens as i32, (self.sizes.value_heads * SLICES, 1));
        let arguments = arguments![run, layer, projected, related, tokens, out];
        pass.launch(self.delta_scan, grid, 256, arguments)
    }

    /// The gated norm of up to [`ROWS`](super::rows::ROWS) tokens, as linears of rows take their inputs.
    pub(crate) fn few_delta_norm(
        &self,
        pass: &Pass<'_>,
        (o, tokens): (Pointer, usize),
        projected: Pointer,
        norm: Pointer,
        out: RowImage,
    ) -> Result<()> {
        pass.launch(self.few_delta_norm, out.grid(tokens), 32, arguments![o, projected, norm, out])
    }
}
