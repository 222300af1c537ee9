//! The kernels: sources, sizes, and one wrapper per kernel that launches it with typed arguments.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod gemm;
mod gemv;
pub(crate) mod moe;
pub(crate) mod norm;
mod repack;
pub(crate) mod rows;
pub(crate) mod sample;
#[cfg(test)]
mod tests;

use std::ffi::c_void;

use lily_backend::Result;
use lily_model::Shape;

use crate::device::{Device, Function, Launch, Module, Pointer};

pub(crate) use gemm::{Finish, Gemm, Grouping};
pub(crate) use repack::Source;

/// The files of the one translation unit, in order.
pub(crate) const SOURCES: &[(&str, &str)] = &[
    ("common.cuh", include_str!("common.cuh")),
    ("repack.cu", include_str!("repack.cu")),
    ("gemv.cu", include_str!("gemv.cu")),
    ("delta.cu", include_str!("delta.cu")),
    ("attention.cu", include_str!("attention.cu")),
    ("norm.cu", include_str!("norm.cu")),
    ("gemm.cu", include_str!("gemm.cu")),
    ("gemm_wide.cu", include_str!("gemm_wide.cu")),
    ("attention_wide.cu", include_str!("attention_wide.cu")),
    ("moe.cu", include_str!("moe.cu")),
    ("rows.cu", include_str!("rows.cu")),
    ("rows_experts.cu", include_str!("rows_experts.cu")),
    ("rows_delta.cu", include_str!("rows_delta.cu")),
    ("delta_wide.cu", include_str!("delta_wide.cu")),
    ("delta_scan.cu", include_str!("delta_scan.cu")),
    ("sample.cu", include_str!("sample.cu")),
];

/// Rows of a tile of weights.
pub(crate) const TILE_ROWS: usize = 16;
/// Inputs of a block of weights.
pub(crate) const BLOCK_INPUTS: usize = 256;
/// Bytes of a block of 4-bit weights: codes, then a scale and a bias for each row and group.
pub(crate) const BLOCK4_BYTES: usize = 2304;
/// Bytes of a block of 8-bit weights.
pub(crate) const BLOCK8_BYTES: usize = 4352;

/// Blocks that `inputs` inputs take.
pub(crate) const fn blocks(inputs: usize) -> usize {
    inputs.div_ceil(BLOCK_INPUTS)
}

/// `inputs` in whole blocks.
pub(crate) const fn padded(inputs: usize) -> usize {
    blocks(inputs) * BLOCK_INPUTS
}

/// Declares [`Sizes`] and what kernels call its fields.
macro_rules! sizes {
    ($($(#[$doc:meta])* $field:ident = $constant:literal;)+) => {
        /// The sizes of a shape as kernels use them.
        #[derive(Clone, Debug)]
        pub(crate) struct Sizes {
            $($(#[$doc])* pub(crate) $field: usize,)+
        }

        impl Sizes {
            /// Names in the kernels and values.
            pub(crate) fn constants(&self) -> Vec<(&'static str, usize)> {
                vec![$(($constant, self.$field)),+]
            }
        }
    };
}

sizes! {
    hidden = "HIDDEN";
    vocab = "VOCAB";
    query_heads = "QUERY_HEADS";
    kv_heads = "KV_HEADS";
    key_heads = "KEY_HEADS";
    value_heads = "VALUE_HEADS";
    experts = "EXPERTS";
    top_k = "TOP_K";
    expert_width = "EXPERT_WIDTH";
    shared_width = "SHARED_WIDTH";
    attention_layers = "ATTENTION_LAYERS";
    query_width = "QUERY_WIDTH";
    key_width = "KEY_WIDTH";
    value_width = "VALUE_WIDTH";
    conv_width = "CONV_WIDTH";
    /// Where the gate z begins in a delta layer's projections, behind q, k and v.
    projected_z = "PROJ_Z";
    /// Where b begins.
    projected_b = "PROJ_B";
    /// Where a begins.
    projected_a = "PROJ_A";
    /// Rows of a delta layer's projections.
    projected_delta = "PROJ_DELTA";
    /// Where keys begin in an attention layer's projections, behind queries and gates.
    projected_k = "PROJ_K";
    /// Where values begin.
    projected_v = "PROJ_V";
    /// Rows of an attention layer's projections.
    projected_attention = "PROJ_ATTENTION";
    /// Where the gate of the shared expert stands among the router's rows.
    shared_gate = "SHARED_GATE";
    /// Rows of the router and the shared gate, each in whole tiles.
    router_rows = "ROUTER_ROWS";
    router_tiles = "ROUTER_TILES";
    vocab_tiles = "VOCAB_TILES";
    /// Shared memory that a block of threads has: 99, 163 or 227 KiB.
    shared_kib = "SHARED_KIB";
}

impl Sizes {
    pub(crate) fn new(s: &Shape, shared_kib: usize) -> Sizes {
        let tiled = |rows: usize| rows.next_multiple_of(TILE_ROWS);
        let (conv_width, value_width) = (s.conv_width(), s.delta_value_width());
        let projected_b = conv_width + value_width;
        let projected_a = projected_b + tiled(s.delta_value_heads);
        let projected_k = 2 * s.query_width();
        let shared_gate = tiled(s.experts);
        Sizes {
            hidden: s.hidden,
            vocab: s.vocab,
            query_heads: s.query_heads,
            kv_heads: s.kv_heads,
            key_heads: s.delta_key_heads,
            value_heads: s.delta_value_heads,
            experts: s.experts,
            top_k: s.experts_per_token,
            expert_width: s.expert_width,
            shared_width: s.shared_width,
            attention_layers: s.attention_layers(),
            query_width: s.query_width(),
            key_width: s.delta_key_width(),
            value_width,
            conv_width,
            projected_z: conv_width,
            projected_b,
            projected_a,
            projected_delta: projected_a + tiled(s.delta_value_heads),
            projected_k,
            projected_v: projected_k + s.kv_width(),
            projected_attention: projected_k + 2 * s.kv_width(),
            shared_gate,
            router_rows: shared_gate + TILE_ROWS,
            router_tiles: (shared_gate + TILE_ROWS) / TILE_ROWS,
            vocab_tiles: tiled(s.vocab) / TILE_ROWS,
            shared_kib,
        }
    }

    /// Whether shared memory is so little that some kernels do with less.
    pub(crate) fn little_shared(&self) -> bool {
        self.shared_kib < 163
    }

    /// Blocks of the down projections of a token's experts as one linear.
    pub(crate) fn down_blocks(&self) -> usize {
        self.top_k * blocks(self.expert_width) + blocks(self.shared_width)
    }

    /// Query heads that share a key/value head.
    pub(crate) fn queries_per_kv(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Query heads that one warp or CTA of the attention kernels takes: up to 4.
    pub(crate) fn heads_together(&self) -> usize {
        match self.queries_per_kv() {
            n if n.is_multiple_of(4) => 4,
            n if n.is_multiple_of(2) => 2,
            _ => 1,
        }
    }
}

/// Declares [`Kernels`], every kernel with its dynamic shared memory.
macro_rules! kernels {
    ($($name:ident: $shared:expr;)+) => {
        /// The kernels of a loaded module.
        pub(crate) struct Kernels {
            pub(crate) sizes: Sizes,
            wide: Option<gemm::Wide>,
            alone: gemv::Alone,
            attend_wide: Option<(Function, u32)>,
            $($name: (Function, u32),)+
            // Last: functions belong to it.
            _module: Module,
        }

        impl Kernels {
            /// Kernels of every GPU and their dynamic shared memory.
            pub(crate) fn dynamic_shared(sizes: &Sizes) -> Vec<(&'static str, usize)> {
                let mut all = vec![$((stringify!($name), ($shared)(sizes))),+];
                all.extend(gemv::shared_of_alone(sizes));
                all
            }

            /// Finds every kernel in the compiled source for `sizes`.
            pub(crate) fn load(device: &Device, sizes: Sizes, code: &[u8]) -> Result<Kernels> {
                let module = device.module(code)?;
                $(let shared = ($shared)(&sizes) as u32; let $name = (module.function(stringify!($name), shared)?, shared);)+
                let wide = gemm::Wide::load(&module, device.arch)?;
                let alone = gemv::Alone::load(&module, &sizes, device.arch)?;
                let attend_wide = attention::load_wide(&module, &sizes, device.arch)?;
                Ok(Kernels { sizes, wide, alone, attend_wide, $($name,)+ _module: module })
            }
        }
    };
}

const NONE: fn(&Sizes) -> usize = |_| 0;

kernels! {
    repack_q4: NONE;
    repack_q8: NONE;
    plain_read: NONE;
    embed: NONE;
    delta_step: NONE;
    rows_delta_step: delta::shared_of_rows;
    apply_updates: NONE;
    attend: attention::shared_of_one;
    attend_combine: NONE;
    route_and_share: gemv::shared;
    experts_up: gemv::shared_of_up;
    experts_down: gemv::shared;
    head: gemv::shared;
    norm_rows: NONE;
    fix_rows: NONE;
    delta_norm: NONE;
    delta_relate: delta::shared_of_relate;
    delta_scan: delta::shared_of_scan;
    few_delta_norm: NONE;
    attention_prepare: NONE;
    attend_many: attention::shared_of_many;
    fill_noise: NONE;
    gemm_q4_store_large: |_| gemm::shared(8);
    gemm_q4_add_large: |_| gemm::shared(8);
    gemm_q4_swiglu_large: |_| gemm::shared(8);
    gemm_q4_store_small: |_| gemm::shared(2);
    gemm_q4_add_small: |_| gemm::shared(2);
    gemm_q4_swiglu_small: |_| gemm::shared(2);
    gemm_q8_store: |_| gemm::shared(4);
    route_many: NONE;
    list_pairs: NONE;
    list_tiles: NONE;
    combine_experts: NONE;
    rows_norm: NONE;
    rows_fix: NONE;
    rows_attend_combine: NONE;
    rows_project: rows::shared;
    rows_delta_output: rows::shared;
    rows_attention_output: rows::shared;
    rows_route_and_share: rows::shared;
    rows_up: rows::shared_of_up;
    rows_down: rows::shared_of_down;
    rows_head: rows::shared;
    pick_best: NONE;
    sample_begin: NONE;
    sample_mark: NONE;
    sample_scores: NONE;
    sample_level: NONE;
    sample_finish: NONE;
}

/// Where kernels go, and whether each may start before the one in front of it has ended.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) device: &'a Device,
    pub(crate) overlap: bool,
}

impl Pass<'_> {
    fn launch(
        &self,
        (function, shared): (Function, u32),
        grid: (usize, usize),
        threads: usize,
        arguments: &[*mut c_void],
    ) -> Result<()> {
        let (grid, threads) = ((grid.0 as u32, grid.1 as u32), threads as u32);
        self.device.launch(&Launch { function, grid, threads, shared, overlap: self.overlap, arguments })
    }
}

/// The addresses of a kernel's arguments.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        &[$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}
pub(crate) use arguments;

/// Fixed-point activations of many tokens, as kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedRows {
    /// High bytes `[rows, width]`.
    pub(crate) high: Pointer,
    /// Low bytes `[rows, width]`.
    pub(crate) low: Pointer,
    /// Scale and sum of each group, f32 `[rows, width / 64, 2]`.
    pub(crate) groups: Pointer,
    /// Whole blocks.
    pub(crate) width: i32,
}

impl FixedRows {
    /// Bytes that `rows` rows of `inputs` inputs take.
    pub(crate) fn bytes(rows: usize, inputs: usize) -> usize {
        rows * (2 * padded(inputs) + padded(inputs) / Shape::GROUP * 8)
    }

    /// Such rows in the memory at `pointer`.
    pub(crate) fn at(pointer: Pointer, rows: usize, inputs: usize) -> FixedRows {
        let plane = rows * padded(inputs);
        FixedRows { high: pointer, low: pointer.at(plane), groups: pointer.at(2 * plane), width: padded(inputs) as i32 }
    }
}

/// What a step's row needs on the device; the layout is that of `Run` in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) kv: Pointer,
    pub(crate) conv: Pointer,
    pub(crate) delta: Pointer,
    pub(crate) tokens: Pointer,
    pub(crate) sampled: Pointer,
    pub(crate) capacity: u32,
    pub(crate) position: u32,
    pub(crate) token: u32,
    pub(crate) slot: u32,
    pub(crate) vocab_limit: u32,
    pub(crate) top_k: u32,
    pub(crate) penalty_start: u32,
    pub(crate) masked: u32,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repetition: f32,
    pub(crate) presence: f32,
    pub(crate) frequency: f32,
    pub(crate) biases: u32,
    /// Whether the raw logits decide alone.
    pub(crate) greedy: u32,
    pub(crate) seed: u64,
    pub(crate) updates: Pointer,
    /// Tokens from the first on that are all in `delta`.
    pub(crate) applied: u64,
}

impl Run {
    /// The token to feed is the one that the state's last step sampled.
    pub(crate) const FROM_STATE: u32 = u32::MAX;
    /// Slots of the ring of results, two words each: id and status.
    pub(crate) const RESULTS: usize = 256;
    /// Status of a result: a logit is not finite.
    pub(crate) const BAD_LOGITS: u32 = 1;
    /// Status of a result: no token may be chosen.
    pub(crate) const EXCLUDED: u32 = 2;

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: a plain struct without padding, as the size below shows.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Run>()) }
    }
}

// Six addresses, sixteen words, a seed and a number of tokens.
const _: () = assert!(size_of::<Run>() == 6 * 8 + 16 * 4 + 2 * 8);
