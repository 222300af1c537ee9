//! The forward pass on the device: one function for one token, one for many. Numbers in comments are phases of NUMERICS.md.

use std::sync::Arc;

use lily_backend::{Part, Result, Stage};
use lily_model::{Checkpoint, Shape};

use crate::device::Pointer;
use crate::kernels::moe::Routing;
use crate::kernels::rows::{Meetings, Parts, RowImage};
use crate::kernels::{BLOCK4_BYTES, Finish, FixedRows, Gemm, Grouping, Kernels, Pass, TILE_ROWS, blocks};
use crate::plan::{DeviceWeights, LOGIT_ROWS, Layer, LayerMixer, Scratch};

/// One pass through the model; kernels go into the stream of `pass`, or into the graph that records it.
pub(crate) struct Forward<'a> {
    pub(crate) pass: Pass<'a>,
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a DeviceWeights,
    pub(crate) scratch: &'a Scratch,
    pub(crate) trace: Option<Trace>,
}

/// The stages so far. Values are taken from the residual stream between kernels, so that tracing changes no kernel.
pub(crate) struct Trace {
    checkpoint: Arc<Checkpoint>,
    /// The stream when it was last looked at.
    stream: Vec<f32>,
    pub(crate) stages: Vec<(Stage, Vec<f32>)>,
}

impl Trace {
    pub(crate) fn new(checkpoint: Arc<Checkpoint>) -> Trace {
        Trace { checkpoint, stream: Vec::new(), stages: Vec::new() }
    }
}

impl Forward<'_> {
    /// All layers for the run's one token, which is `ids[0]` or, where that is null, what the run says.
    pub(crate) fn one(&mut self, ids: Pointer) -> Result<()> {
        let (pass, k, s) = (self.pass, self.kernels, self.scratch);
        k.embed(&pass, (s.run, 1), ids, &self.weights.embedding, (s.h, s.turns))?;
        self.record_embedding(1)?;
        let (mut delta, mut attention) = (0, 0);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            match &layer.mixer {
                LayerMixer::Delta { project, vectors, out } => {
                    let tiles = k.sizes.projected_delta / TILE_ROWS;
                    k.norm_project(&pass, (*project, tiles), s.h, layer.mixer_norm, s.projected)?;
                    k.delta_step(&pass, (s.run, delta), s.projected, vectors, (s.mixed, s.squares))?;
                    k.delta_output(&pass, *out, s.mixed, s.squares, s.h)?;
                    delta += 1;
                }
                LayerMixer::Attention { project, q_norm, k_norm, out } => {
                    let tiles = k.sizes.projected_attention / TILE_ROWS;
                    let partials = (s.part_sums, s.part_values);
                    k.norm_project(&pass, (*project, tiles), s.h, layer.mixer_norm, s.projected)?;
                    k.attend(&pass, (s.run, attention, 1), (s.projected, s.turns), (*q_norm, *k_norm), partials)?;
                    k.attend_combine(&pass, s.run, s.projected, partials, s.mixed)?;
                    k.attention_output(&pass, *out, s.mixed, s.h)?;
                    attention += 1;
                }
            }
            self.record_mixer(index, 1)?;
            let normed = (s.h, layer.moe_norm);
            k.route_and_share(&pass, (layer.router, layer.shared_up), normed, (s.router, s.activation))?;
            let inner = (s.activation, s.shared);
            k.experts_up(&pass, (layer.experts_up, layer.shared_down), s.router, normed, inner)?;
            k.experts_down(&pass, layer.experts_down, s.router, inner, s.h)?;
            self.record_moe(index, 1)?;
        }
        Ok(())
    }

    /// All layers and the head for one token of each of `rows` rows, whose runs are in the scratch memory. A row's arithmetic is that
    /// of [`Forward::one`].
    pub(crate) fn rows(&self, rows: usize) -> Result<()> {
        let (pass, k, s, w, sizes) = (&self.pass, self.kernels, self.scratch, self.weights, &self.kernels.sizes);
        let partials = (s.part_sums, s.part_values);
        let (normed, meetings) = (self.row_inputs(), self.meetings());
        k.embed(pass, (s.runs, rows), Pointer::NULL, &w.embedding, (s.h, s.turns))?;
        let (mut delta, mut attention, mut parts) = (0, 0, (s.parts, Parts::Nothing));
        for layer in &w.layers {
            k.rows_norm(pass, s.h, parts, layer.mixer_norm, (rows, &meetings), normed)?;
            match &layer.mixer {
                LayerMixer::Delta { project, vectors, out } => {
                    let x = RowImage::halves(s.fixed, sizes.value_width);
                    k.rows_project(pass, (*project, sizes.projected_delta / TILE_ROWS), normed, rows, s.projected)?;
                    k.rows_delta_step(pass, (s.runs, delta, rows), s.projected, vectors, x)?;
                    k.rows_delta_output(pass, *out, x, rows, s.parts)?;
                    delta += 1;
                }
                LayerMixer::Attention { project, q_norm, k_norm, out } => {
                    let x = RowImage::halves(s.fixed, sizes.query_width);
                    k.rows_project(pass, (*project, sizes.projected_attention / TILE_ROWS), normed, rows, s.projected)?;
                    k.attend(pass, (s.runs, attention, rows), (s.projected, s.turns), (*q_norm, *k_norm), partials)?;
                    k.rows_attend_combine(pass, (s.runs, rows), s.projected, partials, x)?;
                    k.rows_attention_output(pass, *out, x, rows, s.parts)?;
                    attention += 1;
                }
            }
            k.rows_norm(pass, s.h, (s.parts, Parts::Mixed), layer.moe_norm, (rows, &meetings), normed)?;
            self.rows_experts(layer, (normed, rows), &meetings)?;
            parts.1 = Parts::Experts;
        }
        k.rows_norm(pass, s.h, parts, w.norm, (rows, &meetings), normed)?;
        k.rows_head(pass, w.head, (s.runs, rows), normed, (s.logits, s.bests))
    }

    /// The experts of a layer for rows whose normed stream is there; what they give is left in parts.
    fn rows_experts(&self, layer: &Layer, (normed, rows): (RowImage, usize), meetings: &Meetings) -> Result<()> {
        let (pass, k, s) = (&self.pass, self.kernels, self.scratch);
        k.rows_route_and_share(pass, (layer.router, layer.shared_up), normed, rows, (s.router, s.activation))?;
        k.rows_up(pass, (layer.experts_up, s.router), (normed, rows), s.activation, meetings)?;
        k.rows_down(pass, (layer.experts_down, layer.shared_down), meetings, (s.activation, rows), s.parts)
    }

    /// Where rows that share a pass have their normed stream.
    fn row_inputs(&self) -> RowImage {
        RowImage::whole(self.scratch.fixed, self.kernels.sizes.hidden)
    }

    fn meetings(&self) -> Meetings {
        let s = self.scratch;
        Meetings { list: s.meetings, count: s.meeting_count, weights: s.meeting_weights }
    }

    /// All layers for up to [`ROWS`](crate::kernels::rows::ROWS) tokens of one row, whose ids are in the scratch memory: with the
    /// linears of [`Forward::rows`] and the mixers of [`Forward::many`].
    pub(crate) fn few(&mut self, tokens: usize) -> Result<()> {
        let (pass, k, s, w, sizes) = (&{ self.pass }, self.kernels, self.scratch, self.weights, &self.kernels.sizes);
        let (normed, meetings) = (self.row_inputs(), self.meetings());
        k.embed(pass, (s.run, tokens), s.ids, &w.embedding, (s.h, Pointer::NULL))?;
        self.record_embedding(tokens)?;
        let (mut delta, mut attention, mut parts) = (0, 0, (s.parts, Parts::Nothing));
        for (index, layer) in w.layers.iter().enumerate() {
            k.rows_norm(pass, s.h, parts, layer.mixer_norm, (tokens, &meetings), normed)?;
            if index > 0 {
                self.record_moe(index - 1, tokens)?;
            }
            match &layer.mixer {
                LayerMixer::Delta { project, vectors, out } => {
                    let (at, x) = ((s.run, delta, tokens), RowImage::halves(s.fixed, sizes.value_width));
                    k.rows_project(pass, (*project, sizes.projected_delta / TILE_ROWS), normed, tokens, s.projected)?;
                    k.delta_relate(pass, at, s.projected, vectors, s.related)?;
                    k.delta_scan(pass, at, (s.projected, s.related), s.mixed)?;
                    k.few_delta_norm(pass, (s.mixed, tokens), s.projected, vectors.norm, x)?;
                    k.rows_delta_output(pass, *out, x, tokens, s.parts)?;
                    delta += 1;
                }
                LayerMixer::Attention { project, q_norm, k_norm, out } => {
                    let (at, x) = ((s.run, attention, tokens), RowImage::halves(s.fixed, sizes.query_width));
                    let tiles = sizes.projected_attention / TILE_ROWS;
                    k.rows_project(pass, (*project, tiles), normed, tokens, s.projected)?;
                    k.attention_prepare(pass, at, s.projected, (*q_norm, *k_norm), s.queries)?;
                    k.attend_many(pass, at, s.queries, s.projected, s.mixed)?;
                    k.rows_fix(pass, s.mixed, tokens, x)?;
                    k.rows_attention_output(pass, *out, x, tokens, s.parts)?;
                    attention += 1;
                }
            }
            k.rows_norm(pass, s.h, (s.parts, Parts::Mixed), layer.moe_norm, (tokens, &meetings), normed)?;
            self.record_mixer(index, tokens)?;
            self.rows_experts(layer, (normed, tokens), &meetings)?;
            parts.1 = Parts::Experts;
        }
        // Whatever comes next takes its own norm of the stream.
        k.rows_norm(pass, s.h, parts, w.norm, (tokens, &meetings), normed)?;
        self.record_moe(w.layers.len() - 1, tokens)
    }

    /// All layers for `tokens` tokens, whose ids are in the scratch memory.
    pub(crate) fn many(&mut self, tokens: usize) -> Result<()> {
        let (pass, k, s) = (self.pass, self.kernels, self.scratch);
        k.embed(&pass, (s.run, tokens), s.ids, &self.weights.embedding, (s.h, Pointer::NULL))?;
        self.record_embedding(tokens)?;
        let (mut delta, mut attention) = (0, 0);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            match &layer.mixer {
                LayerMixer::Delta { .. } => {
                    self.delta_many(layer, delta, tokens)?;
                    delta += 1;
                }
                LayerMixer::Attention { .. } => {
                    self.attention_many(layer, attention, tokens)?;
                    attention += 1;
                }
            }
            self.record_mixer(index, tokens)?;
            self.moe_many(layer, tokens)?;
            self.record_moe(index, tokens)?;
        }
        Ok(())
    }

    /// The mixer of a delta layer, added to the stream.
    fn delta_many(&self, layer: &Layer, index: usize, tokens: usize) -> Result<()> {
        let LayerMixer::Delta { project, vectors, out } = &layer.mixer else { return Ok(()) };
        let (pass, k, s, sizes) = (&self.pass, self.kernels, self.scratch, &self.kernels.sizes);
        let at = (s.run, index, tokens);
        self.project(layer, *project, sizes.projected_delta, tokens)?;
        k.delta_relate(pass, at, s.projected, vectors, s.related)?;
        k.delta_scan(pass, at, (s.projected, s.related), s.mixed)?;
        let fixed = FixedRows::at(s.fixed, tokens, sizes.value_width);
        k.delta_norm(pass, (s.mixed, tokens), s.projected, vectors.norm, fixed)?;
        self.add_to_stream(*out, fixed, tokens)
    }

    /// The mixer of an attention layer, added to the stream.
    fn attention_many(&self, layer: &Layer, index: usize, tokens: usize) -> Result<()> {
        let LayerMixer::Attention { project, q_norm, k_norm, out } = &layer.mixer else { return Ok(()) };
        let (pass, k, s, sizes) = (&self.pass, self.kernels, self.scratch, &self.kernels.sizes);
        let at = (s.run, index, tokens);
        self.project(layer, *project, sizes.projected_attention, tokens)?;
        k.attention_prepare(pass, at, s.projected, (*q_norm, *k_norm), s.queries)?;
        k.attend_many(pass, at, s.queries, s.projected, s.mixed)?;
        let fixed = FixedRows::at(s.fixed, tokens, sizes.query_width);
        k.fix_rows(pass, s.mixed, tokens, sizes.query_width, fixed)?;
        self.add_to_stream(*out, fixed, tokens)
    }

    /// Norm and the projections of a mixer.
    fn project(&self, layer: &Layer, weights: Pointer, rows: usize, tokens: usize) -> Result<()> {
        let (s, hidden) = (self.scratch, self.kernels.sizes.hidden);
        let fixed = FixedRows::at(s.fixed, tokens, hidden);
        self.kernels.norm_rows(&self.pass, s.h, layer.mixer_norm, tokens, fixed)?;
        self.kernels.gemm_q4(&self.pass, &dense(weights, rows, fixed, tokens, (s.projected, rows)), Finish::Store)
    }

    fn add_to_stream(&self, weights: Pointer, x: FixedRows, tokens: usize) -> Result<()> {
        let (h, hidden) = (self.scratch.h, self.kernels.sizes.hidden);
        self.kernels.gemm_q4(&self.pass, &dense(weights, hidden, x, tokens, (h, hidden)), Finish::Add)
    }

    /// Router, the chosen experts and the shared one, added to the stream.
    fn moe_many(&self, layer: &Layer, tokens: usize) -> Result<()> {
        let (pass, k, s, sizes) = (&self.pass, self.kernels, self.scratch, &self.kernels.sizes);
        let normed = FixedRows::at(s.fixed, tokens, sizes.hidden);
        k.norm_rows(pass, s.h, layer.moe_norm, tokens, normed)?;
        k.gemm_q8(pass, &dense(layer.router, sizes.router_rows, normed, tokens, (s.router, sizes.router_rows)))?;
        let routing = Routing {
            ids: s.chosen,
            weights: s.chosen_weights,
            list: s.pairs,
            counts: s.pair_counts,
            tiles: s.pair_tiles,
            tile_count: s.pair_tile_count,
        };
        k.route(pass, s.router, tokens, &routing)?;
        let grouping = |share: usize| Grouping {
            list: s.pairs,
            token_tiles: s.pair_tiles,
            token_tile_count: s.pair_tile_count,
            counts: s.pair_counts,
            stride: tokens as i32,
            share: share as i32,
        };

        // Gate and up share tiles: of 16 rows of weights come 8 inner values.
        let width = sizes.expert_width;
        let up = stacked(layer.experts_up, 2 * width, normed, grouping(sizes.top_k), (s.inner, width));
        k.gemm_q4_grouped(pass, &up, Finish::SwiGlu, tokens)?;
        let inner = FixedRows::at(s.fixed_inner, tokens * sizes.top_k, width);
        k.fix_rows(pass, s.inner, tokens * sizes.top_k, width, inner)?;
        let down = stacked(layer.experts_down, sizes.hidden, inner, grouping(1), (s.routed, sizes.hidden));
        k.gemm_q4_grouped(pass, &down, Finish::Store, tokens)?;

        let width = sizes.shared_width;
        k.gemm_q4(pass, &dense(layer.shared_up, 2 * width, normed, tokens, (s.inner, width)), Finish::SwiGlu)?;
        let inner = FixedRows::at(s.fixed_inner, tokens, width);
        k.fix_rows(pass, s.inner, tokens, width, inner)?;
        let down = dense(layer.shared_down, sizes.hidden, inner, tokens, (s.shared, sizes.hidden));
        k.gemm_q4(pass, &down, Finish::Store)?;

        k.combine_experts(pass, tokens, (s.routed, s.shared), (s.chosen_weights, s.router), s.h)
    }

    /// Final norm and head of token `index` of the pass, to the first row of logits.
    pub(crate) fn head(&mut self, index: usize) -> Result<()> {
        let (s, w) = (self.scratch, self.weights);
        let h = s.h.at(4 * index * self.kernels.sizes.hidden);
        self.kernels.head(&self.pass, w.head, s.run, (h, w.norm), s.logits, s.bests)?;
        self.record_final(index, 1)
    }

    /// Final norm and head of all `tokens` tokens, to `logits` `[tokens, vocab]`.
    pub(crate) fn all_logits(&mut self, tokens: usize, logits: &mut [f32]) -> Result<()> {
        let (k, s, w, vocab) = (self.kernels, self.scratch, self.weights, self.kernels.sizes.vocab);
        for (index, logits) in logits.chunks_mut(LOGIT_ROWS * vocab).enumerate() {
            let (first, rows) = (index * LOGIT_ROWS, logits.len() / vocab);
            let fixed = FixedRows::at(s.fixed, rows, k.sizes.hidden);
            k.norm_rows(&self.pass, s.h.at(4 * first * k.sizes.hidden), w.norm, rows, fixed)?;
            k.gemm_q4(&self.pass, &dense(w.head, vocab, fixed, rows, (s.logits, vocab)), Finish::Store)?;
            self.pass.device.download_floats(logits, s.logits)?;
        }
        self.record_final(0, tokens)
    }

    fn record_embedding(&mut self, tokens: usize) -> Result<()> {
        let stream = self.stream(tokens)?;
        let Some(trace) = &mut self.trace else { return Ok(()) };
        trace.stages.push((Stage::outside(Part::Embedding), stream.clone()));
        trace.stream = stream;
        Ok(())
    }

    /// The stream, if it is traced.
    fn stream(&self, tokens: usize) -> Result<Vec<f32>> {
        if self.trace.is_none() {
            return Ok(Vec::new());
        }
        let mut stream = vec![0.0; tokens * self.kernels.sizes.hidden];
        self.pass.device.download_floats(&mut stream, self.scratch.h)?;
        Ok(stream)
    }

    /// What the mixer added, and the norm in front of it.
    fn record_mixer(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let stream = self.stream(tokens)?;
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let (shape, weights) = (&trace.checkpoint.config.shape, &trace.checkpoint.weights.layers[layer]);
        let normed = norm(&trace.stream, &weights.mixer_norm, shape);
        let mixed = difference(&stream, &trace.stream);
        trace.stages.push((Stage::of(layer, Part::MixerNorm), normed));
        trace.stages.push((Stage::of(layer, Part::Mixer), mixed));
        trace.stages.push((Stage::of(layer, Part::MoeNorm), norm(&stream, &weights.moe_norm, shape)));
        trace.stream = stream;
        Ok(())
    }

    /// The router's logits, what the experts added, and the sum.
    fn record_moe(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let stream = self.stream(tokens)?;
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let (rows, experts) = (self.kernels.sizes.router_rows, self.kernels.sizes.experts);
        let mut router = vec![0.0; tokens * rows];
        self.pass.device.download_floats(&mut router, self.scratch.router)?;
        let router = router.chunks_exact(rows).flat_map(|row| row[..experts].to_vec()).collect();
        trace.stages.push((Stage::of(layer, Part::Router), router));
        trace.stages.push((Stage::of(layer, Part::Moe), difference(&stream, &trace.stream)));
        trace.stages.push((Stage::of(layer, Part::Layer), stream.clone()));
        trace.stream = stream;
        Ok(())
    }

    fn record_final(&mut self, first: usize, tokens: usize) -> Result<()> {
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let (shape, weights) = (&trace.checkpoint.config.shape, &trace.checkpoint.weights);
        let stream = &trace.stream[first * shape.hidden..][..tokens * shape.hidden];
        let normed = norm(stream, &weights.norm, shape);
        trace.stages.push((Stage::outside(Part::FinalNorm), normed));
        Ok(())
    }
}

/// A linear of all `tokens` rows of `x` to `rows` outputs each.
fn dense(weights: Pointer, rows: usize, x: FixedRows, tokens: usize, (out, stride): (Pointer, usize)) -> Gemm {
    Gemm {
        weights,
        expert_bytes: 0,
        tiles: rows.div_ceil(TILE_ROWS) as i32,
        blocks: blocks(x.width as usize) as i32,
        x,
        grouping: Grouping::NONE,
        rows: tokens as i32,
        tile: 0,
        out,
        stride: stride as i32,
        outputs: rows as i32,
    }
}

/// One linear per expert, of `rows` rows of 4-bit weights each.
fn stacked(weights: Pointer, rows: usize, x: FixedRows, grouping: Grouping, out: (Pointer, usize)) -> Gemm {
    let one = dense(weights, rows, x, 0, out);
    let expert_bytes = one.tiles as u64 * one.blocks as u64 * BLOCK4_BYTES as u64;
    Gemm { expert_bytes, grouping, ..one }
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// RMSNorm for a trace.
fn norm(x: &[f32], weight: &[f32], shape: &Shape) -> Vec<f32> {
    let row = |x: &[f32]| {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = (mean + f64::from(shape.rms_eps)).sqrt().recip();
        x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32).collect::<Vec<f32>>()
    };
    x.chunks_exact(shape.hidden).flat_map(row).collect()
}
