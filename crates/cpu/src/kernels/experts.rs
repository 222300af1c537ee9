//! The SwiGLU blocks of the experts and of the shared expert.
//!
//! [`gate_up`]. In: [`Activations`] of the tokens, the routing. Out: activations `silu(gate x) * (up x)` of every visit of
//! an expert, `[visits, width]`, and of every token for the shared expert. The work of one worker is 64 rows of gate and of
//! up of one expert with all its visitors.
//! [`down`]. In: those. Out: f32 `[tokens, hidden]`, weighted and summed. With one token, the work of one worker is a range
//! of rows of all its experts; with many, rows of one expert, and what they say is added up afterwards.
//! Bytes moved: the packed rows of visited experts once.
//! Reference: `lily_reference::ops::{expert_linear, swiglu}` and the sums of `lily_reference::forward`.

use lily_model::MoeWeights;

use super::activations::{ActivationParts, Activations, Tokens};
use super::gemm::{self, Place, TILE_ROWS, gemm};
use super::gemv::{Packed, PackedRows};
use super::linear::{INNER_ROWS, multiply, pairs, rows_per_unit, uses_gemm};
use super::moe::Routing;
use super::norm::{add_weighted, swiglu};
use crate::device::{Buffer, Isa, Parts, Pool, with_scratch};

/// Parts into which a worker's share of the rows of `down` is cut where there is one token.
const DOWN_UNITS_PER_WORKER: usize = 4;

/// What stands between the matrices of a block, for a number of visits.
pub(crate) struct Inner {
    /// `[visits, width]`.
    pub(crate) inner: Activations,
    /// `[visits, hidden]`; used by more than one token.
    pub(crate) down: Buffer<f32>,
}

impl Inner {
    /// Room for `visits`.
    pub(crate) fn new(visits: usize, width: usize, hidden: usize) -> lily_backend::Result<Inner> {
        Ok(Inner { inner: Activations::new(visits, width)?, down: Buffer::zeroed("activations", visits * hidden)? })
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.inner.bytes() + self.down.bytes()
    }
}

/// The blocks of a layer and who visits them.
pub(crate) struct Experts<'a> {
    pub(crate) weights: &'a MoeWeights,
    pub(crate) routing: &'a Routing,
    pub(crate) per_token: usize,
    pub(crate) tokens: usize,
}

/// Gate, up and SwiGLU of all visits.
pub(crate) fn gate_up(pool: &Pool, isa: Isa, e: &Experts<'_>, x: &Activations, routed: &mut Inner, shared: &mut Inner) {
    let (experts, own) = (&e.weights.experts, &e.weights.shared);
    let visited = e.routing.visited();
    let (blocks, shared_blocks) = (experts.gate.outputs.div_ceil(INNER_ROWS), own.gate.outputs.div_ceil(INNER_ROWS));
    let (routed, shared) = (routed.inner.parts(), shared.inner.parts());
    // The shared expert first: it has the most visitors.
    pool.run(shared_blocks + visited.len() * blocks, |unit| {
        let (mlp, expert, block, x, first, out) = match unit.checked_sub(shared_blocks) {
            None => (own, 0, unit, Tokens::range(x, 0, e.tokens), 0, &shared),
            Some(unit) => {
                let (expert, visits) = e.routing.visits(visited[unit / blocks]);
                let x = Tokens::list(x, &e.routing.visitors[visits.clone()]);
                (experts, expert, unit % blocks, x, visits.start, &routed)
            }
        };
        let weights = [Packed::of(&mlp.gate, expert), Packed::of(&mlp.up, expert)];
        gate_up_rows(isa, weights, x, block * INNER_ROWS, first, out);
    });
}

/// Rows `row .. row + 64` of gate and up times the visitors, whose activations stand at `first` and after.
fn gate_up_rows(
    isa: Isa,
    [gate, up]: [Packed<'_>; 2],
    x: Tokens<'_>,
    row: usize,
    first: usize,
    out: &ActivationParts<'_>,
) {
    const N: usize = INNER_ROWS;
    let most = gemm::MOST_TOKENS.min(x.len());
    with_scratch((2 * most + 1) * N, |scratch| {
        let (products, activated) = scratch.split_at_mut(2 * most * N);
        for from in (0..x.len()).step_by(gemm::MOST_TOKENS) {
            let count = gemm::MOST_TOKENS.min(x.len() - from);
            if uses_gemm(x.len()) {
                let products = Parts::new(products);
                let place = |half: usize| Place { out: &products, first: half * N, stride: 2 * N };
                gemm(isa, gate, x, from..from + count, row..row + N, place(0));
                gemm(isa, up, x, from..from + count, row..row + N, place(1));
            } else {
                pairs(isa, gate.bits, [gate.rows(row, N), up.rows(row, N)], N, x, |row, token, pairs| {
                    let (gate, up) = products[2 * token * N..][..2 * N].split_at_mut(N);
                    let out = gate[row..].iter_mut().zip(&mut up[row..]);
                    out.zip(pairs).for_each(|((gate, up), pair)| [*gate, *up] = *pair);
                });
            }
            for (token, products) in products[..2 * count * N].as_chunks::<{ 2 * N }>().0.iter().enumerate() {
                let (gate, up) = products.split_at(N);
                swiglu(isa, gate, up, activated);
                // SAFETY: these columns of an expert's visits belong to one unit.
                unsafe { out.arrange(isa, first + from + token, row, activated) };
            }
        }
    });
}

/// Down of all visits, weighted and summed: `out` is `[tokens, hidden]`; `gates` the weights of the shared expert.
pub(crate) fn down(
    pool: &Pool,
    isa: Isa,
    e: &Experts<'_>,
    gates: &[f32],
    routed: &mut Inner,
    shared: &mut Inner,
    out: &mut [f32],
) {
    if e.tokens == 1 {
        return down_one(pool, isa, e, gates[0], &routed.inner, &shared.inner, out);
    }
    let hidden = out.len() / e.tokens;
    down_each(pool, isa, e, routed, shared);
    let (routed, shared) = (&routed.down, &shared.down);
    pool.pieces(out, hidden, |token, out| {
        out.fill(0.0);
        for (visit, weight) in e.routing.of_token(token, e.per_token) {
            add_weighted(isa, out, &routed[visit * hidden..][..hidden], weight);
        }
        add_weighted(isa, out, &shared[token * hidden..][..hidden], gates[token]);
    });
}

/// One token: each worker adds up its rows of all experts.
fn down_one(
    pool: &Pool,
    isa: Isa,
    e: &Experts<'_>,
    gate: f32,
    routed: &Activations,
    shared: &Activations,
    out: &mut [f32],
) {
    let (experts, own) = (&e.weights.experts.down, &e.weights.shared.down);
    // Few and large: in each, every expert is a new place to read from.
    let rows = out.len().div_ceil(pool.threads() * DOWN_UNITS_PER_WORKER).next_multiple_of(2);
    pool.pieces(out, rows, |unit, out| {
        out.fill(0.0);
        let (first, rows, half) = (unit * rows, out.len(), out.len().div_ceil(2));
        let mut add = |w: Packed<'_>, next: Packed<'_>, x: Tokens<'_>, weight: f32| {
            next.halves(first, rows).iter().for_each(PackedRows::prefetch);
            pairs(isa, w.bits, w.halves(first, rows), half, x, |row, _, pairs| {
                out[row..].iter_mut().zip(pairs.clone()).for_each(|(out, [a, _])| *out += weight * a);
                // Where the halves overlap, in their first row, it has been added.
                let skip = (2 * half - rows).saturating_sub(row);
                let out = &mut out[rows - half + row + skip..];
                out.iter_mut().zip(pairs.skip(skip)).for_each(|(out, [_, b])| *out += weight * b);
            });
        };
        let (own, chosen) = (Packed::of(own, 0), |i: usize| Packed::of(experts, e.routing.experts[i] as usize));
        for (i, (visit, weight)) in e.routing.of_token(0, e.per_token).enumerate() {
            let next = if i + 1 < e.per_token { chosen(i + 1) } else { own };
            add(chosen(i), next, Tokens::range(routed, visit, 1), weight);
        }
        add(own, own, Tokens::range(shared, 0, 1), gate);
    });
}

/// Many tokens: every expert with its visits, into `down` of each.
fn down_each(pool: &Pool, isa: Isa, e: &Experts<'_>, routed: &mut Inner, shared: &mut Inner) {
    let (experts, own) = (&e.weights.experts.down, &e.weights.shared.down);
    let visited = e.routing.visited();
    let hidden = experts.outputs;
    // Rows of the shared expert, which all tokens visit, and of the others.
    let rows = |bytes: usize, tokens: usize| rows_per_unit(hidden, bytes, tokens, pool.threads(), TILE_ROWS);
    let shared_rows = rows(Packed::of(own, 0).row_bytes(), e.tokens);
    let rows = rows(Packed::of(experts, 0).row_bytes(), 1);
    let (shared_units, blocks) = (hidden.div_ceil(shared_rows), hidden.div_ceil(rows));
    let (routed_out, shared_out) = (Parts::new(&mut routed.down), Parts::new(&mut shared.down));
    pool.run(shared_units + visited.len() * blocks, |unit| match unit.checked_sub(shared_units) {
        None => {
            let (first, x) = (unit * shared_rows, Tokens::range(&shared.inner, 0, e.tokens));
            let place = Place { out: &shared_out, first, stride: hidden };
            multiply(isa, Packed::of(own, 0), x, first, shared_rows.min(hidden - first), place);
        }
        Some(unit) => {
            let (expert, visits) = e.routing.visits(visited[unit / blocks]);
            let (first, x) = (unit % blocks * rows, Tokens::range(&routed.inner, visits.start, visits.len()));
            let place = Place { out: &routed_out, first: visits.start * hidden + first, stride: hidden };
            multiply(isa, Packed::of(experts, expert), x, first, rows.min(hidden - first), place);
        }
    });
}
