//! The kernels of many tokens.

use super::*;
use crate::kernels::attention_rows::{self, AttentionRows, query_rows};
use crate::kernels::delta_rows::{self, CHUNK, DeltaRoom, DeltaRows};
use crate::kernels::gemm::{ExpertGemms, ExpertRows, Gemm, SplitGemm};
use crate::kernels::route::{Lists, Route, TILE_BYTES, TILE_ROWS, most_tiles};
use crate::kernels::rows::{Rows, StreamRows};

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn products_of_many_rows_are_those_of_the_reference() {
    for (seed, case) in LINEAR.iter().enumerate() {
        let mut g = Generator::new(seed as u64);
        // A stack of matrices is one matrix here.
        let matrix = g.matrix(case.bits, 1, case.experts * case.outputs, case.inputs);
        let (tokens, outputs) = (case.tokens, matrix.outputs);
        let x = g.values(tokens * case.inputs, 1.0);
        let expected = ops::linear(&x, &matrix);
        let both = in_both_forms(|bench| {
            let builder = &mut bench.builder(&SHAPE, KvDtype::F32);
            let kernel = match case.bits {
                Bits::Four => Gemm::plan(builder, outputs, case.inputs)?,
                Bits::Eight => Gemm::plan_q8(builder, outputs, case.inputs)?,
            };
            let (weights, x, y) = (bench.matrix(&matrix), bench.floats(&x), bench.room(4 * tokens * outputs));
            kernel.encode(&mut bench.pass, &weights, x, y, tokens);
            bench.run();
            Ok(bench.read(y))
        });
        both.iter().for_each(|y| assert_close(y, &expected, F32_SUMS, &format!("{case:?}")));
    }
}

/// 130 rows are two tiles and two rows; 70 outputs a tile and six.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn products_are_cut_in_two_or_added_to_what_is_there() {
    let (tokens, inputs, outputs, split) = (130, 192, 70, 33);
    let mut g = Generator::new(9);
    let matrix = g.matrix(Bits::Four, 1, outputs, inputs);
    let (x, stream) = (g.values(tokens * inputs, 1.0), g.values(tokens * outputs, 1.0));
    let expected = ops::linear(&x, &matrix);
    let halves = in_both_forms(|bench| {
        let kernel = SplitGemm::plan(&mut bench.builder(&SHAPE, KvDtype::F32), outputs, inputs, split)?;
        let (weights, x) = (bench.matrix(&matrix), bench.floats(&x));
        let parts = [split, outputs - split].map(|width| bench.room(4 * tokens * width));
        kernel.encode(&mut bench.pass, &weights, x, parts, tokens);
        bench.run();
        let [first, second] = parts.map(|part| bench.read(part));
        let rows = first.chunks_exact(split).zip(second.chunks_exact(outputs - split));
        Ok(rows.flat_map(|(first, second)| [first, second].concat()).collect())
    });
    halves.iter().for_each(|both| assert_close(both, &expected, F32_SUMS, "two outputs"));
    let sums: Vec<f32> = stream.iter().zip(&expected).map(|(h, y)| h + y).collect();
    let added = in_both_forms(|bench| {
        let kernel = Gemm::plan_residual(&mut bench.builder(&SHAPE, KvDtype::F32), outputs, inputs)?;
        let (weights, x, y) = (bench.matrix(&matrix), bench.floats(&x), bench.floats(&stream));
        kernel.encode(&mut bench.pass, &weights, x, y, tokens);
        bench.run();
        Ok(bench.read(y))
    });
    added.iter().for_each(|added| assert_close(added, &sums, F32_SUMS, "added"));
}

/// What is not as it should be on tensor units is done without, with the same bits, and written down.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn products_fall_back_from_tensor_units_and_say_so() {
    const FILE: &str = "gemm.metal for tensor units";
    let (tokens, outputs, inputs) = (9, 70, 128);
    let mut g = Generator::new(3);
    let (matrix, x) = (g.matrix(Bits::Four, 1, outputs, inputs), g.values(tokens * inputs, 1.0));
    let product = |gpu: Emulated| {
        let mut bench = Bench { gpu, pass: Pass::default() };
        let mut builder = bench.builder(&SHAPE, KvDtype::F32);
        let kernel = Gemm::plan(&mut builder, outputs, inputs).expect("a kernel in one form");
        let (products, reports) = (builder.products(), builder.reports());
        let (weights, x, y) = (bench.matrix(&matrix), bench.floats(&x), bench.room(4 * tokens * outputs));
        kernel.encode(&mut bench.pass, &weights, x, y, tokens);
        bench.run();
        let missed = reports.into_iter().filter_map(|r| Some((r.name, r.error?, r.instead?)));
        (bench.read(y), products, missed.collect::<Vec<_>>())
    };
    let without = product(Emulated::new(0));
    let whole = "products on tensor units".to_owned();
    let instead = "matrices of the simdgroup";
    assert_eq!(without.1, None);
    assert_eq!(without.2, [(whole.clone(), "an emulator without tensor units".into(), instead)]);
    let with = product(Emulated::with_tensor_units(0));
    assert_eq!((with.1.as_deref(), with.2.len()), (Some("tensor units"), 0));
    assert_ne!(with.0, without.0, "the forms round differently");

    let refused = product(Emulated::with_tensor_units(0).refusing(FILE));
    assert_eq!((refused.0, refused.1.as_deref()), (without.0.clone(), Some("tensor units not used")));
    assert!(refused.2.len() == 1 && refused.2[0].1.contains("does not take"), "{:?}", refused.2);
    // A device that keeps fewer bits than these products rest on.
    let inexact = Emulated::with_tensor_units(0).misreading("half4(low)", "half4(rint(low * 0.125f) * 8.0f)");
    let inexact = product(inexact);
    assert_eq!((inexact.0, inexact.1.as_deref()), (without.0, Some("tensor units not used")));
    assert!(inexact.2.len() == 1 && inexact.2[0].1.contains("are not exact"), "{:?}", inexact.2);
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn rows_of_the_stream_are_embedded_normed_and_handed_over() {
    for hidden in [64, 192, 576] {
        let shape = Shape { hidden, ..SHAPE };
        let mut g = Generator::new(hidden as u64);
        let table = g.matrix(Bits::Four, 1, shape.vocab, hidden);
        let [gain, next] = [(); 2].map(|()| gain(&mut g, hidden));
        let ids = [0, 37, 99, NO_ID];
        let mut embedded = vec![0.0; ids.len() * hidden];
        for (id, row) in ids.iter().zip(embedded.chunks_exact_mut(hidden)) {
            table.dequantize_row((*id as usize).min(shape.vocab - 1), row);
        }
        let normed = |rows: &[f32], gain: &[f32]| -> Vec<f32> {
            rows.chunks_exact(hidden).flat_map(|row| ops::rms_norm(row, gain, shape.rms_eps)).collect()
        };
        in_every_order(|bench| {
            let kernels = Rows::plan(&mut bench.builder(&shape, KvDtype::F32), &shape)?;
            let [values, rows] = [(); 2].map(|()| bench.room(4 * embedded.len()));
            let rows = StreamRows { values, normed: rows };
            let id_bytes: Vec<u8> = ids.iter().flat_map(|id: &u32| id.to_le_bytes()).collect();
            let (ids, embedding, first) = (bench.bytes(&id_bytes), bench.matrix(&table), bench.floats(&gain));
            kernels.encode_embed(&mut bench.pass, ids, &embedding, first, &rows, 4);
            bench.run();
            assert_close(&bench.read(rows.values), &embedded, F32_FORMULA, "embedding");
            assert_close(&bench.read(rows.normed), &normed(&embedded, &gain), F32_FORMULA, "its norm");
            let second = bench.floats(&next);
            kernels.encode_norm(&mut bench.pass, second, &rows, 4);
            let stream = bench.stream(&shape, &vec![0.0; hidden]);
            kernels.encode_take(&mut bench.pass, rows.values.nth(2, 4 * hidden), second, &stream);
            bench.run();
            assert_close(&bench.read(rows.normed), &normed(&embedded, &next), F32_FORMULA, "norm");
            bench.assert_stream(&shape, &stream, &embedded[2 * hidden..3 * hidden], &next, "one row");
            Ok(bench.read(rows.normed))
        });
    }
}

fn lists_room(bench: &mut Bench, shape: &Shape, tokens: usize) -> Lists {
    let pairs = tokens * shape.experts_per_token;
    Lists {
        chosen: bench.room(4 * pairs),
        weights: bench.room(4 * (pairs + tokens)),
        counts: bench.room(4 * shape.experts),
        pairs: bench.room(4 * pairs),
        tiles: bench.room(most_tiles(shape.experts, shape.experts_per_token, tokens) * TILE_BYTES),
    }
}

/// Whatever the logits are, each token has as many experts as it should, each pair is on its expert's list once, in the order of
/// the tokens, and the tiles cover the lists and nothing else.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn lists_of_experts_hold_every_pair_once_in_order() {
    let mut g = Generator::new(4);
    let mut cases: Vec<(Vec<f32>, usize, usize)> = ROUTES
        .iter()
        .map(|(logits, count)| ([&logits[..], &[0.25]].concat().repeat(3), logits.len(), *count))
        .collect();
    cases.push((vec![f32::NAN; 2 * 6], 5, 3));
    cases.push((vec![1.0, f32::NAN, f32::NEG_INFINITY, f32::NAN, 0.0], 4, 3));
    // All 130 pairs of one expert; and a few among many.
    cases.push((g.values(130 * 2, 1.0), 1, 1));
    cases.push((g.values(9 * 257, 1.0), 256, 8));
    for (logits, experts, count) in cases {
        let tokens = logits.len() / (experts + 1);
        let shape = Shape { experts, experts_per_token: count, ..SHAPE };
        in_every_order(|bench| {
            let kernels = Route::plan(&mut bench.builder(&shape, KvDtype::F32), &shape)?;
            let lists = lists_room(bench, &shape, tokens);
            let on_device = bench.floats(&logits);
            kernels.encode(&mut bench.pass, on_device, &lists, tokens);
            bench.run();
            let (chosen, weights) = (bench.ids(lists.chosen), bench.read(lists.weights));
            for (token, row) in logits.chunks_exact(experts + 1).enumerate() {
                let ids = &chosen[token * count..][..count];
                let mut distinct = ids.to_vec();
                distinct.sort_unstable();
                distinct.dedup();
                assert!(distinct.len() == count && ids.iter().all(|id| (*id as usize) < experts), "{ids:?}");
                if row.iter().all(|logit| logit.is_finite()) {
                    let (expected, shares): (Vec<usize>, Vec<f32>) =
                        ops::route(&row[..experts], count).into_iter().unzip();
                    assert_eq!(ids, expected.iter().map(|id| *id as u32).collect::<Vec<_>>(), "{row:?}");
                    let shares = [shares, vec![ops::sigmoid(row[experts])]].concat();
                    assert_close(&weights[token * (count + 1)..][..count + 1], &shares, F32_FORMULA, "weights");
                }
            }
            let mut expected: Vec<u32> = (0..chosen.len() as u32).collect();
            expected.sort_by_key(|pair| chosen[*pair as usize]);
            let pairs = bench.ids(lists.pairs);
            assert_eq!(pairs, expected);
            let mut covered = 0;
            for tile in bench.ids(lists.tiles).chunks_exact(4).filter(|tile| tile[2] > 0) {
                let (expert, first, rows) = (tile[0], tile[1] as usize, tile[2] as usize);
                assert!(first == covered && rows <= TILE_ROWS, "{tile:?}");
                assert!(pairs[first..first + rows].iter().all(|pair| chosen[*pair as usize] == expert), "{tile:?}");
                covered += rows;
            }
            assert_eq!(covered, pairs.len());
            Ok(pairs.iter().map(|pair| *pair as f32).collect())
        });
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn experts_of_many_tokens_are_chosen_and_computed_as_in_the_reference() {
    for (tokens, hidden, experts, chosen, expert_width, shared_width) in
        [(1, 64, 1, 1, 192, 64), (9, 192, 5, 3, 64, 128), (70, 128, 3, 2, 128, 64), (40, 64, 70, 8, 64, 192)]
    {
        let shape = Shape { hidden, experts, experts_per_token: chosen, expert_width, shared_width, ..SHAPE };
        let mut g = Generator::new(hidden as u64);
        let weights = moe_weights(&mut g, &shape);
        let (x, residual) = (g.values(tokens * hidden, 1.0), g.values(tokens * hidden, 1.0));
        let gain = gain(&mut g, hidden);
        let rows: Vec<MoeRow> = x.chunks_exact(hidden).map(|x| moe_row(&weights, x, chosen)).collect();
        let added = rows.iter().flat_map(|row| &row.added);
        let expected: Vec<f32> = residual.iter().zip(added).map(|(h, y)| h + y).collect();
        let normed = expected.chunks_exact(hidden).flat_map(|row| ops::rms_norm(row, &gain, shape.rms_eps));
        let normed: Vec<f32> = normed.collect();
        in_both_forms(|bench| {
            let builder = &mut bench.builder(&shape, KvDtype::F32);
            let (router, route) = (Gemm::plan_q8(builder, experts + 1, hidden)?, Route::plan(builder, &shape)?);
            let (gemms, sums) = (ExpertGemms::plan(builder, &shape)?, Rows::plan(builder, &shape)?);
            let placed = placed_experts(bench, &weights)?;
            let (lists, logits) = (lists_room(bench, &shape, tokens), bench.room(4 * tokens * (experts + 1)));
            let between = ExpertRows {
                act: bench.room(4 * tokens * chosen * expert_width),
                routed: bench.room(4 * tokens * chosen * hidden),
                shared_act: bench.room(4 * tokens * shared_width),
                shared: bench.room(4 * tokens * hidden),
            };
            let (x, gain) = (bench.floats(&x), bench.floats(&gain));
            let stream = StreamRows { values: bench.floats(&residual), normed: bench.room(4 * tokens * hidden) };
            let pass = &mut bench.pass;
            router.encode(pass, &placed.router, x, logits, tokens);
            route.encode(pass, logits, &lists, tokens);
            gemms.encode_swiglu(pass, &placed.gate_up, x, &lists, &between, tokens);
            gemms.encode_down(pass, [&placed.down, &placed.shared_down], &lists, &between, tokens);
            sums.encode_combine(pass, &between, lists.weights, gain, &stream, tokens);
            bench.run();
            let what = format!("{tokens} tokens, {shape:?}");
            let got: Vec<f32> =
                bench.read(logits).chunks_exact(experts + 1).flat_map(|row| &row[..experts]).copied().collect();
            assert_close(&got, &rows.iter().flat_map(|row| row.logits.clone()).collect::<Vec<_>>(), F32_SUMS, &what);
            let ids: Vec<u32> = rows.iter().flat_map(|row| &row.ids).map(|id| *id as u32).collect();
            assert_eq!(bench.ids(lists.chosen), ids, "{what}");
            assert_close(&bench.read(stream.values), &expected, F32_SUMS, &what);
            assert_close(&bench.read(stream.normed), &normed, F32_SUMS, &what);
            Ok(bench.read(stream.normed))
        });
    }
}

/// Chunks with one token and with 64, chunks after a beginning that fills none, and what the tokens before leave behind.
#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn the_delta_rule_of_many_tokens_is_that_of_the_reference_however_they_are_cut() {
    let long = DeltaCase { key_heads: 1, value_heads: 2, tokens: 150 };
    let cuts: [&[usize]; 5] = [&[1], &[1, 1], &[2, 3], &[5, 65], &[2, 20, 128]];
    for (seed, (case, cut)) in DELTA.iter().chain([&long]).zip(cuts).enumerate() {
        let data = DeltaData::new(case, seed as u64);
        let shape = &data.shape;
        let (conv, values, heads) = (shape.conv_width(), shape.delta_value_width(), case.value_heads);
        let got = in_every_order(|bench| {
            let kernel = DeltaRows::plan(&mut bench.builder(shape, KvDtype::F32), shape)?;
            let vectors = data.vectors(bench);
            let ring = bench.floats(&vec![0.0; 4 * conv]);
            let state = bench.floats(&vec![0.0; shape.delta_state_len()]);
            let (mut got, mut position) = (Vec::new(), 0);
            for &tokens in cut {
                let [inputs, zba] = data.part(position..position + tokens).map(|part| bench.floats(part));
                let chunks = tokens.div_ceil(CHUNK);
                let rows = chunks * CHUNK;
                let room = DeltaRoom {
                    mixed: bench.room(4 * rows * conv),
                    gates: bench.room(8 * rows * heads),
                    related: bench.room(8 * chunks * heads * CHUNK * CHUNK),
                    products: bench.room(8 * chunks * heads * CHUNK),
                    recalled: bench.room(4 * rows * values),
                };
                let out = bench.room(4 * tokens * values);
                let args = delta_rows::Args {
                    inputs,
                    zba,
                    vectors: &vectors,
                    room: &room,
                    ring,
                    state,
                    out,
                    position,
                    tokens,
                };
                kernel.encode(&mut bench.pass, &args);
                bench.run();
                got.extend(bench.read(out));
                position += tokens;
            }
            assert_eq!(position, case.tokens);
            // The last inputs, each where its position says.
            for (back, u) in data.inputs.chunks_exact(conv).rev().take(4).enumerate() {
                assert_eq!(bench.read(ring.nth((position - 1 - back) % 4, 4 * conv)), u, "{case:?}, {back} back");
            }
            assert_close(&bench.read(state), &data.state, F32_RECURRENCE, &format!("{case:?}, state"));
            Ok(got)
        });
        assert_close(&got, &data.expected, F32_RECURRENCE, &format!("{case:?}"));
    }
}

#[test]
#[ignore = "needs clang-19; .ci/run installs it and runs them"]
fn attention_of_many_tokens_is_that_of_the_reference_over_keys_that_are_there() {
    const D: usize = Shape::HEAD_DIM;
    for (seed, case) in ATTENTION.iter().enumerate() {
        for kv in [KvDtype::F32, KvDtype::Bf16] {
            let data = AttentionData::new(case, kv, seed as u64);
            let (shape, tokens) = (&data.shape, case.tokens);
            let angles = |token| crate::step::angles(case.position + token, shape.rope_theta);
            let angles: Vec<f32> = (0..tokens).flat_map(angles).collect();
            let got = in_every_order(|bench| {
                let kernel = AttentionRows::plan(&mut bench.builder(shape, kv), shape)?;
                let [keys, values] = data.caches(bench, kv)?;
                let out = bench.room(4 * data.expected.len());
                let args = attention_rows::Args {
                    query_gate: bench.floats(&data.query_gate),
                    key_value: bench.floats(&data.key_value),
                    query_norm: bench.floats(&data.query_norm),
                    key_norm: bench.floats(&data.key_norm),
                    angles: bench.floats(&angles),
                    queries: bench.room(4 * shape.kv_heads * query_rows(shape, tokens) * D),
                    keys,
                    values,
                    out,
                    position: case.position,
                    tokens,
                    capacity: data.capacity,
                };
                kernel.encode(&mut bench.pass, &args);
                bench.run();
                Ok(bench.read(out))
            });
            assert_close(&got, &data.expected, kv_tolerance(kv), &format!("{case:?}, {kv:?}"));
        }
    }
}
