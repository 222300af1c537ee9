//! Attention against the reference.

use lily_backend::conformance::cases::{ATTENTION, Generator, Tolerance, assert_close};
use lily_model::Shape;
use lily_reference::ops;

use super::on_every_path;
use crate::kernels::attention::{Attention, Partials, Plane, narrow};

const D: usize = Shape::HEAD_DIM;
/// Rows after the last one in use hold this, so that reading one shows.
const LOUD: f32 = 1e30;

#[test]
fn attention_over_either_cache_is_that_of_the_reference() {
    /// The kernel gets rounded keys and values, and so does the reference.
    const TOLERANCE: Tolerance =
        Tolerance { value: 1e-5, reason: "scores of 256 f32 products, then exponentials and sums over the context" };
    on_every_path(|pool, isa| {
        for (seed, case) in ATTENTION.iter().enumerate() {
            let mut generator = Generator::new(seed as u64);
            let context = case.position + case.tokens;
            let capacity = context + 5;
            let mut rows = |scale| -> Vec<Vec<f32>> {
                let plane = |_| {
                    let mut plane = generator.bf16_values(context * D, scale);
                    plane.resize(capacity * D, LOUD);
                    plane
                };
                (0..case.kv_heads).map(plane).collect()
            };
            let (keys, values) = (rows(1.5), rows(1.0));
            let queries = Generator::new(99).values(case.tokens * case.query_heads * D, 1.5);
            let mut expected = Vec::new();
            for (i, query) in queries.chunks_exact(D).enumerate() {
                let (token, head) = (i / case.query_heads, i % case.query_heads);
                let kv = ops::shared_head(head, case.query_heads, case.kv_heads);
                let visible = (case.position + token + 1) * D;
                let of = |planes: &[Vec<f32>]| -> Vec<Vec<f32>> {
                    planes[kv][..visible].chunks_exact(D).map(<[f32]>::to_vec).collect()
                };
                let (keys, values) = (of(&keys), of(&values));
                let refs = |rows: &[Vec<f32>]| rows.iter().map(|row| row.as_slice().to_vec()).collect::<Vec<_>>();
                let (keys, values) = (refs(&keys), refs(&values));
                let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                expected.extend(ops::attention(query, &keys, &values));
            }
            let scaled: Vec<f32> = queries.iter().map(|q| q / 16.0).collect();
            let narrowed = |planes: &[Vec<f32>]| -> Vec<Vec<u16>> {
                let to = |plane: &Vec<f32>| {
                    let mut narrow_plane = vec![0; plane.len()];
                    narrow(plane, &mut narrow_plane);
                    narrow_plane
                };
                planes.iter().map(to).collect()
            };
            let (keys16, values16) = (narrowed(&keys), narrowed(&values));
            let mut partials = Partials::new(case.query_heads, context).unwrap();
            for bf16 in [false, true] {
                let planes = |wide: &'_ [Vec<f32>], narrow: &'_ [Vec<u16>]| -> Vec<Plane<'static>> {
                    // Leaked: planes of both types share one lifetime here, and the test ends soon.
                    match bf16 {
                        true => narrow.iter().map(|p| Plane::Bf16(p.clone().leak())).collect(),
                        false => wide.iter().map(|p| Plane::F32(p.clone().leak())).collect(),
                    }
                };
                let attention = Attention {
                    queries: &scaled,
                    tokens: case.tokens,
                    query_heads: case.query_heads,
                    position: case.position,
                    keys: planes(&keys, &keys16),
                    values: planes(&values, &values16),
                };
                let mut got = vec![f32::NAN; expected.len()];
                attention.run(pool, isa, &mut partials, &mut got);
                assert_close(&got, &expected, TOLERANCE, &format!("{isa:?} {case:?} bf16 {bf16}"));
            }
        }
    });
}
