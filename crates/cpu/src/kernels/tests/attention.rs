//! The mixer of an attention layer against the reference, over either type of cache.

use lily_backend::conformance::cases::{
    ATTENTION, AttentionCase, F32_FORMULA, Generator, Tolerance, assert_close, round_to_bf16,
};
use lily_model::Shape;
use lily_reference::ops;

use super::{EPS, on_every_path};
use crate::device::{Isa, Pool};
use crate::kernels::LANES;
use crate::kernels::activations::Activations;
use crate::kernels::attention::{Attention, Block, Kv, Partials, Planes, Row, attention};
use crate::kernels::rope::Angles;

const D: usize = Shape::HEAD_DIM;
const THETA: f64 = 1e7;
/// Rows after the last one in use hold this, so that reading one shows.
const LOUD: f32 = 1e30;

/// A layer and its inputs.
struct Layer {
    case: AttentionCase,
    query_gate: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
}

/// Keys and values, `[kv heads, capacity]` rows each.
#[derive(Clone)]
struct Cache<B> {
    capacity: usize,
    keys: Vec<Row<B>>,
    values: Vec<Row<B>>,
}

/// A type of cache.
trait Stored: Block {
    fn kv(planes: Planes<'_, Self>) -> Kv<'_>;
    fn rounded(x: f32) -> f32;
}

impl Stored for [f32; 2 * LANES] {
    fn kv(planes: Planes<'_, Self>) -> Kv<'_> {
        Kv::F32(planes)
    }
    fn rounded(x: f32) -> f32 {
        x
    }
}

impl Stored for [u32; LANES] {
    fn kv(planes: Planes<'_, Self>) -> Kv<'_> {
        Kv::Bf16(planes)
    }
    fn rounded(x: f32) -> f32 {
        round_to_bf16(x)
    }
}

fn row<B: Block>(values: &[f32]) -> Row<B> {
    let blocks = values.as_chunks().0;
    std::array::from_fn(|b| B::of(&blocks[b]))
}

fn values_of<B: Block>(row: &Row<B>) -> Vec<f32> {
    let value = |(block, i): (&B, usize)| match B::EVEN_ODD {
        true => block.half(i % 2)[i / 2],
        false => block.half(i / LANES)[i % LANES],
    };
    row.iter().flat_map(|block| (0..2 * LANES).map(move |i| (block, i))).map(value).collect()
}

impl Layer {
    fn new(case: AttentionCase, seed: u64) -> Layer {
        let mut generator = Generator::new(seed);
        let AttentionCase { query_heads, kv_heads, tokens, .. } = case;
        Layer {
            case,
            query_gate: generator.values(tokens * query_heads * 2 * D, 1.5),
            keys: generator.values(tokens * kv_heads * D, 1.5),
            values: generator.values(tokens * kv_heads * D, 1.0),
            query_norm: generator.values(D, 1.5),
            key_norm: generator.values(D, 1.5),
        }
    }

    /// A cache that holds the tokens before these.
    fn cache<B: Block>(&self, seed: u64) -> Cache<B> {
        let mut generator = Generator::new(seed);
        let AttentionCase { position, kv_heads, tokens, .. } = self.case;
        let capacity = position + tokens + 5;
        let mut plane = |scale| -> Vec<Row<B>> {
            let mut rows = vec![row(&[LOUD; D]); kv_heads * capacity];
            for at in (0..kv_heads).flat_map(|head| head * capacity..head * capacity + position) {
                rows[at] = row(&generator.values(D, scale));
            }
            rows
        };
        Cache { capacity, keys: plane(1.5), values: plane(1.0) }
    }

    /// Gated attention of all tokens by the kernels.
    fn by_kernels<B: Stored>(&self, pool: &Pool, isa: Isa, cache: &mut Cache<B>) -> Vec<f32> {
        let AttentionCase { query_heads, kv_heads, position, tokens } = self.case;
        let angles: Vec<Angles> = (position..position + tokens).map(|p| Angles::at(p, THETA)).collect();
        let mixer = Attention {
            tokens,
            query_heads,
            kv_heads,
            position,
            query_gate: &self.query_gate,
            keys: &self.keys,
            values: &self.values,
            query_norm: &self.query_norm,
            key_norm: &self.key_norm,
            eps: EPS,
            angles: &angles,
        };
        let mut partials = Partials::new(query_heads, cache.capacity).unwrap();
        let mut out = Activations::new(tokens, query_heads * D).unwrap();
        let kv = B::kv(Planes { keys: &mut cache.keys, values: &mut cache.values });
        attention(pool, isa, &mixer, kv, &mut partials, &mut out);
        (0..tokens).flat_map(|t| out.plain_row(isa, t)).collect()
    }

    /// The same by the reference, over what the cache holds.
    fn by_reference<B: Block>(&self, cache: &Cache<B>) -> Vec<f32> {
        let AttentionCase { query_heads, kv_heads, position, .. } = self.case;
        let mut outputs = Vec::new();
        for (i, pair) in self.query_gate.chunks_exact(2 * D).enumerate() {
            let (token, head) = (i / query_heads, i % query_heads);
            let mut query = ops::rms_norm(&pair[..D], &self.query_norm, EPS);
            ops::rope(&mut query, position + token, THETA);
            let first = ops::shared_head(head, query_heads, kv_heads) * cache.capacity;
            let seen = first..first + position + token + 1;
            let keys: Vec<Vec<f32>> = cache.keys[seen.clone()].iter().map(values_of).collect();
            let values: Vec<Vec<f32>> = cache.values[seen].iter().map(values_of).collect();
            let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
            let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
            outputs.extend(ops::attention_gate(&ops::attention(&query, &keys, &values), &pair[D..]));
        }
        outputs
    }
}

/// The kernels' cases, and ranges of keys that start after the first tokens of a step.
fn cases() -> impl Iterator<Item = AttentionCase> {
    let more = [(16, 2, 400, 8), (8, 1, 190, 5), (4, 2, 300, 20), (2, 2, 0, 50)];
    let more =
        more.map(|(query_heads, kv_heads, position, tokens)| AttentionCase { query_heads, kv_heads, position, tokens });
    ATTENTION.iter().copied().chain(more)
}

fn attention_over_what_is_stored_is_that_of_the_reference<B: Stored>() {
    const TOLERANCE: Tolerance = Tolerance {
        value: 3e-5,
        reason: "scores of 256 f32 products, exponentials and sums over the context, 1e-5; 16 bits of output, 1.5e-5",
    };
    on_every_path(|pool, isa| {
        for (case, seed) in cases().zip(0..) {
            let layer = Layer::new(case, seed);
            let mut cache = layer.cache::<B>(seed + 100);
            let got = layer.by_kernels(pool, isa, &mut cache);
            assert_close(&got, &layer.by_reference(&cache), TOLERANCE, &format!("{isa:?} {case:?}"));
        }
    });
}

#[test]
fn attention_over_f32_is_that_of_the_reference() {
    attention_over_what_is_stored_is_that_of_the_reference::<[f32; 2 * LANES]>();
}

#[test]
fn attention_over_bf16_is_that_of_the_reference() {
    attention_over_what_is_stored_is_that_of_the_reference::<[u32; LANES]>();
}

fn rows_are_stored_normed_rotated_and_rounded_where_they_belong<B: Stored>(tolerance: Tolerance) {
    let case = AttentionCase { query_heads: 4, kv_heads: 2, position: 30, tokens: 37 };
    on_every_path(|pool, isa| {
        let layer = Layer::new(case, 1);
        let before = layer.cache::<B>(2);
        let mut cache = before.clone();
        layer.by_kernels(pool, isa, &mut cache);
        for at in 0..cache.keys.len() {
            let (head, place) = (at / cache.capacity, at % cache.capacity);
            let (mut key, mut value) = (values_of(&before.keys[at]), values_of(&before.values[at]));
            if let Some(token) = place.checked_sub(case.position).filter(|token| *token < case.tokens) {
                let from = (token * case.kv_heads + head) * D;
                key = ops::rms_norm(&layer.keys[from..][..D], &layer.key_norm, EPS);
                ops::rope(&mut key, place, THETA);
                value = layer.values[from..][..D].iter().map(|x| B::rounded(*x)).collect();
            }
            assert_close(&values_of(&cache.keys[at]), &key, tolerance, &format!("{isa:?}: key {place} of {head}"));
            assert_eq!(values_of(&cache.values[at]), value, "{isa:?}: value {place} of {head}");
        }
    });
}

#[test]
fn rows_are_stored_normed_rotated_and_rounded_where_they_belong_in_f32() {
    rows_are_stored_normed_rotated_and_rounded_where_they_belong::<[f32; 2 * LANES]>(F32_FORMULA);
}

#[test]
fn rows_are_stored_normed_rotated_and_rounded_where_they_belong_in_bf16() {
    const HALF_A_UNIT: Tolerance = Tolerance { value: 2.0 / 512.0, reason: "rounding to 8 bits is off by 2^-9" };
    rows_are_stored_normed_rotated_and_rounded_where_they_belong::<[u32; LANES]>(HALF_A_UNIT);
}
