//! Attention of one token over its context.

use lily_backend::Result;
use lily_model::Shape;

use super::{Builder, THREADS};
use crate::device::{Bound, Dispatch, KernelSpec, Pass, Pipeline, Slice};

const FILE: (&str, &str) = (
    "attention.metal",
    concat!(
        "#line 1 \"heads.metal\"\n",
        include_str!("heads.metal"),
        "#line 1 \"attention.metal\"\n",
        include_str!("attention.metal")
    ),
);
/// Dimensions of a head that one threadgroup of the second kernel makes, as attention.metal has it.
const COMBINED: usize = 64;
/// Keys below which a stretch is not divided: eight rounds of four.
const LEAST_KEYS: usize = 32;
/// Stretches into which a context is divided at most. With two key/value heads 128 are 256 threadgroups, a few for each core
/// of the largest GPUs; their partial results are 2 MB beside 64 MB of keys and values per layer at 32 K.
pub(crate) const MOST_SPLITS: usize = 128;

/// `attention_partials` and `attention_combine`.
pub(crate) struct Attention {
    partials: Pipeline,
    combine: Pipeline,
    query_heads: usize,
    kv_heads: usize,
}

/// What it takes.
pub(crate) struct Args {
    /// `[query heads, query and gate, 256]` f32.
    pub(crate) query_gate: Slice,
    /// k, then v, `[kv heads, 256]` each, f32.
    pub(crate) key_value: Slice,
    /// `[256]` f32.
    pub(crate) query_norm: Slice,
    /// `[256]` f32.
    pub(crate) key_norm: Slice,
    /// `[32]` pairs of cosine and sine, f32.
    pub(crate) angles: Slice,
    /// `[kv heads, capacity, 256]`.
    pub(crate) keys: Slice,
    /// The same.
    pub(crate) values: Slice,
    /// `[query heads, MOST_SPLITS, 256]` f32.
    pub(crate) outputs: Slice,
    /// `[query heads, MOST_SPLITS]` pairs of f32.
    pub(crate) maxima_sums: Slice,
    /// `[query heads, 256]` f32.
    pub(crate) out: Slice,
    pub(crate) position: usize,
    pub(crate) capacity: usize,
}

/// Stretches for a context of `tokens` tokens.
fn splits(tokens: usize) -> usize {
    tokens.div_ceil(LEAST_KEYS).min(MOST_SPLITS)
}

impl Attention {
    pub(crate) fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Attention> {
        Ok(Attention {
            partials: builder
                .pipeline(FILE, KernelSpec { kernel: "attention_partials", constants: &[], threads: THREADS })?,
            combine: builder
                .pipeline(FILE, KernelSpec { kernel: "attention_combine", constants: &[], threads: COMBINED })?,
            query_heads: shape.query_heads,
            kv_heads: shape.kv_heads,
        })
    }

    pub(crate) fn encode(&self, pass: &mut Pass, args: &Args) {
        let splits = splits(args.position + 1);
        let read = [args.query_gate, args.key_value, args.query_norm, args.key_norm, args.angles];
        let mut bound = read.map(Bound::Read).to_vec();
        bound.extend([args.keys, args.values, args.outputs, args.maxima_sums].map(Bound::Write));
        bound.push(Bound::words([args.position, splits, args.capacity]));
        let groups = [splits, self.kv_heads];
        pass.dispatch(Dispatch { pipeline: self.partials, bound, groups, threads: THREADS });
        let mut bound = [args.outputs, args.maxima_sums, args.query_gate].map(Bound::Read).to_vec();
        bound.extend([Bound::Write(args.out), Bound::word(splits)]);
        let groups = [self.query_heads * (Shape::HEAD_DIM / COMBINED), 1];
        pass.dispatch(Dispatch { pipeline: self.combine, bound, groups, threads: COMBINED });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_divided_from_33_tokens_on_and_no_further_than_128_times() {
        assert_eq!([1, 32, 33, 64, 65, 4096, 262_144].map(splits), [1, 1, 2, 2, 3, 128, 128]);
    }
}
