//! The forward pass of many tokens of one session, as dispatches in the order of the data: [`Prefill::tokens`] is the model, one
//! function per block below it, then the head. Formulas: NUMERICS.md. [`PrefillPlan`] is what this takes: kernels and memory.

use lily_backend::{Part, Result, Stage};
use lily_model::Shape;

use crate::device::{Gpu, Pass, Slice};
use crate::kernels::attention_rows::{self, AttentionRows, query_rows};
use crate::kernels::delta::DeltaVectors;
use crate::kernels::delta_rows::{self, CHUNK, DeltaRoom, DeltaRows};
use crate::kernels::gemm::{ExpertGemms, ExpertRows, Gemm, SplitGemm};
use crate::kernels::route::{Lists, Route, TILE_BYTES, most_tiles};
use crate::kernels::rows::{Rows, StreamRows};
use crate::kernels::{Builder, Matrix};
use crate::plan::{Arena, LayerPlan, MixerPlan, Plan};
use crate::state::State;
use crate::trace::{Marks, Normed, Views};

/// From so many tokens on they go through the model together. The kernels here take as long for eight rows as for one, about 1.5
/// times what a token takes alone by the instructions of both; below eight the chunk of the delta rule is mostly empty.
pub(crate) const MANY: usize = 8;
/// Most tokens at once: with 256 experts, of which a token has eight, each expert has 64 of 2048 on average, a full tile.
const MOST_TOKENS: usize = 2048;
/// Tokens whose logits one command buffer makes: at the sizes of the full model as much arithmetic as the experts of 2048 tokens.
const HEAD_TOKENS: usize = 128;

/// Tokens on their way through the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    /// `[count]` u32.
    pub(crate) ids: Slice,
    /// `[count, 32]` pairs of cosine and sine, f32.
    pub(crate) angles: Slice,
    /// Of the first.
    pub(crate) position: usize,
    pub(crate) count: usize,
}

/// Encodes tokens of one session.
pub(crate) struct Prefill<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) state: &'a State,
    pub(crate) pass: Pass,
    pub(crate) marks: Marks,
}

impl<'a> Prefill<'a> {
    pub(crate) fn new(plan: &'a Plan, state: &'a State, trace: bool) -> Prefill<'a> {
        Prefill { plan, state, pass: Pass::default(), marks: Marks::new(trace) }
    }

    /// All layers; leaves the stream of the last `wanted` tokens and its final norm in the scratch memory. Of the others the last
    /// layer only makes what the state needs. A command buffer has one block of one layer.
    pub(crate) fn tokens(&mut self, tokens: &Tokens, wanted: usize) {
        let (plan, count) = (self.plan, tokens.count);
        let PrefillPlan { kernels: k, scratch: s, .. } = &plan.prefill;
        let gain = plan.norm_before(0);
        k.rows.encode_embed(&mut self.pass, tokens.ids, &plan.embedding, gain, &s.stream, count);
        self.marks.add(&self.pass, Stage::outside(Part::Embedding));
        let (mut attention, mut delta) = (0, 0);
        for (index, layer) in plan.layers.iter().enumerate() {
            self.marks.add(&self.pass, Stage::of(index, Part::MixerNorm));
            let rows = if index + 1 < plan.layers.len() { count } else { wanted };
            let last = |all: Slice, width: usize| all.part(4 * (count - rows) * width, 4 * rows * width);
            let shape = &plan.shape;
            let values = last(s.stream.values, shape.hidden);
            let stream = StreamRows { values, normed: last(s.stream.normed, shape.hidden) };
            let (project, matrix, x) = match &layer.mixer {
                MixerPlan::Delta { input, vectors, out } => {
                    self.delta(tokens, delta, input, vectors);
                    delta += 1;
                    (&k.delta_out, out, last(s.delta.out, shape.delta_value_width()))
                }
                MixerPlan::Attention { input, query_norm, key_norm, out } => {
                    self.attention(tokens, attention, input, [*query_norm, *key_norm]);
                    attention += 1;
                    (&k.attention_out, out, last(s.attention.out, shape.query_width()))
                }
            };
            if rows == 0 {
                break;
            }
            project.encode(&mut self.pass, matrix, x, stream.values, rows);
            self.marks.add(&self.pass, Stage::of(index, Part::Mixer));
            self.pass.cut();
            k.rows.encode_norm(&mut self.pass, layer.moe_norm, &stream, rows);
            self.marks.add(&self.pass, Stage::of(index, Part::MoeNorm));
            self.moe(index, layer, &stream, rows);
            self.pass.cut();
        }
        self.marks.add(&self.pass, Stage::outside(Part::FinalNorm));
    }

    /// Grouped-query attention of the `index`-th attention layer, up to its output gate.
    fn attention(&mut self, tokens: &Tokens, index: usize, input: &Matrix, [query_norm, key_norm]: [Slice; 2]) {
        let PrefillPlan { kernels: k, scratch: s, .. } = &self.plan.prefill;
        let AttentionScratch { query_gate, key_value, queries, out } = s.attention;
        k.attention_input.encode(&mut self.pass, input, s.stream.normed, [query_gate, key_value], tokens.count);
        let [keys, values] = self.state.kv(index);
        let args = attention_rows::Args {
            query_gate,
            key_value,
            query_norm,
            key_norm,
            angles: tokens.angles,
            queries,
            keys,
            values,
            out,
            position: tokens.position,
            tokens: tokens.count,
            capacity: self.state.capacity(),
        };
        k.attention.encode(&mut self.pass, &args);
    }

    /// Gated DeltaNet of the `index`-th delta layer, up to its gated norm.
    fn delta(&mut self, tokens: &Tokens, index: usize, input: &Matrix, vectors: &DeltaVectors) {
        let PrefillPlan { kernels: k, scratch: s, .. } = &self.plan.prefill;
        let DeltaScratch { inputs, zba, room, out } = &s.delta;
        k.delta_input.encode(&mut self.pass, input, s.stream.normed, [*inputs, *zba], tokens.count);
        let (ring, state) = self.state.recurrent(index);
        let args = delta_rows::Args {
            inputs: *inputs,
            zba: *zba,
            vectors,
            room,
            ring,
            state,
            out: *out,
            position: tokens.position,
            tokens: tokens.count,
        };
        k.delta.encode(&mut self.pass, &args);
    }

    /// Router, the chosen experts and the shared expert, and the norm that comes next.
    fn moe(&mut self, index: usize, layer: &LayerPlan, stream: &StreamRows, count: usize) {
        let PrefillPlan { kernels: k, scratch: s, .. } = &self.plan.prefill;
        let (experts, MoeScratch { logits, lists, rows }) = (&layer.experts, &s.moe);
        k.router.encode(&mut self.pass, &experts.router, stream.normed, *logits, count);
        self.marks.add(&self.pass, Stage::of(index, Part::Router));
        k.route.encode(&mut self.pass, *logits, lists, count);
        k.experts.encode_swiglu(&mut self.pass, &experts.gate_up, stream.normed, lists, rows, count);
        k.experts.encode_down(&mut self.pass, [&experts.down, &experts.shared_down], lists, rows, count);
        let gain = self.plan.norm_before(index + 1);
        k.rows.encode_combine(&mut self.pass, rows, lists.weights, gain, stream, count);
        self.marks.add(&self.pass, Stage::of(index, Part::Moe));
        self.marks.add(&self.pass, Stage::of(index, Part::Layer));
    }

    /// The logits of the last of `count` tokens, `[vocab]` f32, and the best one below `limit` as a candidate for
    /// `Forward::argmax`.
    pub(crate) fn head(&mut self, count: usize, logits: Slice, limit: usize) {
        let (plan, row) = (self.plan, 4 * self.plan.shape.hidden);
        let last = plan.prefill.scratch.stream.values.nth(count - 1, row);
        let (stream, candidates) = (&plan.scratch.stream, plan.scratch.candidates);
        plan.prefill.kernels.rows.encode_take(&mut self.pass, last, plan.final_norm, stream);
        plan.kernels.head.encode(&mut self.pass, &plan.head, stream, logits, candidates, limit);
    }

    /// The logits of all `count` tokens, `[count, vocab]` f32, in several command buffers.
    pub(crate) fn all_logits(&mut self, count: usize, logits: Slice) {
        let (shape, PrefillPlan { kernels, scratch, .. }) = (&self.plan.shape, &self.plan.prefill);
        for first in (0..count).step_by(HEAD_TOKENS) {
            let tokens = HEAD_TOKENS.min(count - first);
            let rows = |all: Slice, width: usize| all.part(4 * first * width, 4 * tokens * width);
            let (x, logits) = (rows(scratch.stream.normed, shape.hidden), rows(logits, shape.vocab));
            self.pass.cut();
            kernels.head.encode(&mut self.pass, &self.plan.head, x, logits, tokens);
        }
    }

    /// The id of the highest logit to `token`, `[1]` u32.
    pub(crate) fn argmax(&mut self, token: Slice) {
        self.plan.kernels.head.encode_argmax(&mut self.pass, self.plan.scratch.candidates, token);
    }

    /// Where the stages of `count` tokens are to be found.
    pub(crate) fn views(&self, count: usize) -> Views {
        let (shape, s) = (&self.plan.shape, &self.plan.prefill.scratch);
        let rows = |slice: Slice, width: usize| slice.part(0, 4 * count * width);
        Views {
            stream: rows(s.stream.values, shape.hidden),
            normed: Normed::Rows(rows(s.stream.normed, shape.hidden)),
            router: rows(s.moe.logits, shape.experts + 1),
        }
    }
}

/// Kernels and memory of a prefill.
pub(crate) struct PrefillPlan {
    kernels: Kernels,
    scratch: Scratch,
    /// Most tokens at once.
    pub(crate) most_tokens: usize,
    pub(crate) bytes: usize,
    /// How products are made, if that is worth a word.
    pub(crate) how: Option<String>,
}

struct Kernels {
    rows: Rows,
    delta_input: SplitGemm,
    delta: DeltaRows,
    delta_out: Gemm,
    attention_input: SplitGemm,
    attention: AttentionRows,
    attention_out: Gemm,
    router: Gemm,
    route: Route,
    experts: ExpertGemms,
    head: Gemm,
}

impl Kernels {
    fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Kernels> {
        let (hidden, conv, queries) = (shape.hidden, shape.conv_width(), 2 * shape.query_width());
        let delta_outputs = conv + shape.delta_value_width() + 2 * shape.delta_value_heads;
        Ok(Kernels {
            rows: Rows::plan(builder, shape)?,
            delta_input: SplitGemm::plan(builder, delta_outputs, hidden, conv)?,
            delta: DeltaRows::plan(builder, shape)?,
            delta_out: Gemm::plan_residual(builder, hidden, shape.delta_value_width())?,
            attention_input: SplitGemm::plan(builder, queries + 2 * shape.kv_width(), hidden, queries)?,
            attention: AttentionRows::plan(builder, shape)?,
            attention_out: Gemm::plan_residual(builder, hidden, shape.query_width())?,
            router: Gemm::plan_q8(builder, shape.experts + 1, hidden)?,
            route: Route::plan(builder, shape)?,
            experts: ExpertGemms::plan(builder, shape)?,
            head: Gemm::plan(builder, shape.vocab, hidden)?,
        })
    }
}

/// What lies between the kernels. Mixers and experts never need theirs at the same time: it is the same memory.
struct Scratch {
    stream: StreamRows,
    delta: DeltaScratch,
    attention: AttentionScratch,
    moe: MoeScratch,
}

#[derive(Clone, Copy)]
struct DeltaScratch {
    /// `[tokens, conv width]`.
    inputs: Slice,
    /// `[tokens, value width + 2 * value heads]`.
    zba: Slice,
    room: DeltaRoom,
    /// `[tokens, value width]`.
    out: Slice,
}

#[derive(Clone, Copy)]
struct AttentionScratch {
    /// `[tokens, query heads, query and gate, 256]`.
    query_gate: Slice,
    /// `[tokens, k and v, kv heads, 256]`.
    key_value: Slice,
    /// `[kv heads, query rows, 256]`.
    queries: Slice,
    /// `[tokens, query heads, 256]`.
    out: Slice,
}

#[derive(Clone, Copy)]
struct MoeScratch {
    /// `[tokens, experts + 1]`.
    logits: Slice,
    lists: Lists,
    rows: ExpertRows,
}

/// Bytes of each piece of scratch memory for `tokens` tokens, in the order of their fields.
struct Sizes {
    stream: [usize; 2],
    delta: [usize; 8],
    attention: [usize; 4],
    moe: [usize; 10],
}

impl Sizes {
    fn new(shape: &Shape, tokens: usize) -> Sizes {
        let (chunks, pairs) = (tokens.div_ceil(CHUNK), tokens * shape.experts_per_token);
        let (rows, values, heads) = (chunks * CHUNK, shape.delta_value_width(), shape.delta_value_heads);
        let queries = shape.kv_heads * query_rows(shape, tokens) * Shape::HEAD_DIM;
        let tiles = most_tiles(shape.experts, shape.experts_per_token, tokens) * (TILE_BYTES / 4);
        let words = |length: usize| 4 * length;
        Sizes {
            stream: [tokens * shape.hidden; 2].map(words),
            delta: [
                tokens * shape.conv_width(),
                tokens * (values + 2 * heads),
                rows * shape.conv_width(),
                rows * 2 * heads,
                chunks * heads * 2 * CHUNK * CHUNK,
                chunks * heads * 2 * CHUNK,
                rows * values,
                tokens * values,
            ]
            .map(words),
            attention: [
                tokens * 2 * shape.query_width(),
                tokens * 2 * shape.kv_width(),
                queries,
                tokens * shape.query_width(),
            ]
            .map(words),
            moe: [
                tokens * (shape.experts + 1),
                pairs,
                tokens * (shape.experts_per_token + 1),
                shape.experts,
                pairs,
                tiles,
                pairs * shape.expert_width,
                pairs * shape.hidden,
                tokens * shape.shared_width,
                tokens * shape.hidden,
            ]
            .map(words),
        }
    }

    /// Of a buffer that holds the stream, and beside it any one of the others.
    fn total(&self) -> usize {
        let sum = |sizes: &[usize]| sizes.iter().map(|size| Arena::room(*size)).sum::<usize>();
        sum(&self.stream) + sum(&self.delta).max(sum(&self.attention)).max(sum(&self.moe))
    }
}

/// Tokens at once for what is left of the device's memory beside the weights: scratch memory may take a quarter of it.
fn tokens_at_once(shape: &Shape, free_bytes: usize) -> usize {
    let halves =
        std::iter::successors(Some(MOST_TOKENS), |tokens| Some(tokens / 2)).take_while(|tokens| *tokens > CHUNK);
    let fits = |tokens: &usize| Sizes::new(shape, *tokens).total() <= free_bytes / 4;
    halves.into_iter().find(fits).unwrap_or(CHUNK)
}

impl PrefillPlan {
    /// Asks for every pipeline, and keeps none.
    pub(crate) fn survey(builder: &mut Builder<'_>, shape: &Shape) -> Result<()> {
        Kernels::plan(builder, shape).map(|_| ())
    }

    /// For at most `max_chunk` tokens at once, or as many as `free_bytes` are good for.
    pub(crate) fn new(
        gpu: &mut dyn Gpu,
        shape: &Shape,
        kv: crate::KvDtype,
        max_chunk: Option<usize>,
        free_bytes: usize,
    ) -> Result<PrefillPlan> {
        let mut builder = Builder::new(gpu, shape, kv);
        let kernels = Kernels::plan(&mut builder, shape)?;
        let how = builder.products();
        let most_tokens = max_chunk.unwrap_or_else(|| tokens_at_once(shape, free_bytes)).max(1);
        let sizes = Sizes::new(shape, most_tokens);
        let mut arena = Arena::exact(gpu, sizes.total(), "activations of a prompt")?;
        let [values, normed] = sizes.stream.map(|size| arena.take(size));
        let shared = arena.clone();
        let [inputs, zba, mixed, gates, related, products, recalled, out] = sizes.delta.map(|size| arena.take(size));
        let room = DeltaRoom { mixed, gates, related, products, recalled };
        let delta = DeltaScratch { inputs, zba, room, out };
        arena = shared.clone();
        let [query_gate, key_value, queries, out] = sizes.attention.map(|size| arena.take(size));
        let attention = AttentionScratch { query_gate, key_value, queries, out };
        arena = shared;
        let moe = sizes.moe.map(|size| arena.take(size));
        let [logits, chosen, weights, counts, pairs, tiles, act, routed, shared_act, shared] = moe;
        let moe = MoeScratch {
            logits,
            lists: Lists { chosen, weights, counts, pairs, tiles },
            rows: ExpertRows { act, routed, shared_act, shared },
        };
        let stream = StreamRows { values, normed };
        let scratch = Scratch { stream, delta, attention, moe };
        Ok(PrefillPlan { kernels, scratch, most_tokens, bytes: sizes.total(), how })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_tokens_go_at_once_as_memory_is_left_for() {
        let tokens = |free: usize| tokens_at_once(&Shape::QWEN36, free);
        // 150 KB a token.
        assert_eq!(
            [0, 100 << 20, 500 << 20, 1 << 30, 2 << 30, 100 << 30].map(tokens),
            [64, 128, 512, 1024, 2048, 2048]
        );
    }
}
