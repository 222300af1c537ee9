//! Attention of many tokens over their context.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, LANES, SIMDS, THREADS};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = (
    "attention_rows.metal",
    concat!(
        "#line 1 \"heads.metal\"\n",
        include_str!("heads.metal"),
        "#line 1 \"attention_rows.metal\"\n",
        include_str!("attention_rows.metal")
    ),
);
/// Query rows of a threadgroup, as attention_rows.metal has it.
const BLOCK_ROWS: usize = SIMDS * 8;
/// Pairs of a token and a key that one command buffer may have. A pair takes 16 K operations in the full-size model, so this is
/// a tenth of a second at 1 TFLOP/s, which every Apple GPU from M1 on should pass; a display waits no longer.
const MOST_PAIRS: usize = 6 << 20;

/// `attention_rows_prepare` and `attention_rows`.
pub(crate) struct AttentionRows {
    prepare: Pipeline,
    attend: Pipeline,
    query_heads: usize,
    kv_heads: usize,
}

/// What it takes; f32 but the caches.
pub(crate) struct Args {
    /// `[tokens, query heads, query and gate, 256]`.
    pub(crate) query_gate: Slice,
    /// `[tokens, k and v, kv heads, 256]`.
    pub(crate) key_value: Slice,
    /// `[256]`.
    pub(crate) query_norm: Slice,
    /// `[256]`.
    pub(crate) key_norm: Slice,
    /// `[tokens, 32]` pairs of cosine and sine.
    pub(crate) angles: Slice,
    /// `[kv heads, query rows, 256]`, see [`query_rows`].
    pub(crate) queries: Slice,
    /// `[kv heads, capacity, 256]`.
    pub(crate) keys: Slice,
    /// The same.
    pub(crate) values: Slice,
    /// `[tokens, query heads, 256]`.
    pub(crate) out: Slice,
    /// Of the first token.
    pub(crate) position: usize,
    pub(crate) tokens: usize,
    pub(crate) capacity: usize,
}

/// Rows of queries of one key/value head: whole blocks.
pub(crate) fn query_rows(shape: &Shape, tokens: usize) -> usize {
    (tokens * shape.queries_per_kv()).next_multiple_of(BLOCK_ROWS)
}

/// Blocks of query rows that go into one command buffer where the last token sees `length` keys.
fn blocks_at_once(queries_per_kv: usize, length: usize) -> usize {
    (MOST_PAIRS / length * queries_per_kv / BLOCK_ROWS).max(1)
}

impl AttentionRows {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<AttentionRows> {
        let mut pipeline = |kernel, threads| builder.pipeline(FILE, KernelSpec { kernel, constants: &[], threads });
        Ok(AttentionRows {
            prepare: pipeline("attention_rows_prepare", LANES)?,
            attend: pipeline("attention_rows", THREADS)?,
            query_heads: shape.query_heads,
            kv_heads: shape.kv_heads,
        })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, args: &Args) {
        let queries_per_kv = self.query_heads / self.kv_heads;
        let blocks = (args.tokens * queries_per_kv).div_ceil(BLOCK_ROWS);
        let span = |first_block| Bound::words([args.position, args.tokens, args.capacity, first_block]);
        let read = [args.query_gate, args.key_value, args.query_norm, args.key_norm, args.angles];
        let mut bound = read.map(Bound::Read).to_vec();
        bound.extend([args.queries, args.keys, args.values].map(Bound::Write));
        bound.push(span(0));
        let groups = [self.query_heads + self.kv_heads, (blocks * BLOCK_ROWS).div_ceil(queries_per_kv)];
        pass.dispatch(Dispatch { pipeline: self.prepare, bound, groups, threads: LANES });
        let at_once = blocks_at_once(queries_per_kv, args.position + args.tokens);
        for first in (0..blocks).step_by(at_once) {
            if first > 0 {
                pass.cut();
            }
            let mut bound = [args.queries, args.keys, args.values, args.query_gate].map(Bound::Read).to_vec();
            bound.extend([Bound::Write(args.out), span(first)]);
            let groups = [at_once.min(blocks - first), self.kv_heads];
            pass.dispatch(Dispatch { pipeline: self.attend, bound, groups, threads: THREADS });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_context_is_met_in_pieces() {
        // 2048 tokens of the full-size model are 512 blocks.
        assert_eq!(
            [2048, 4096, 131_072, 262_144, 1 << 30].map(|length| blocks_at_once(8, length)),
            [768, 384, 12, 6, 1]
        );
    }
}
