//! The forward pass: tokens of one session through the model, prefill and decode alike.
//!
//! Top-down: [`Forward::run`] is the model, one function per block below it. Each block is a few passes over its weights
//! ([`linear`]) with the arithmetic between them; the kernels choose by the number of tokens. Formulas: NUMERICS.md.

use lily_backend::{Part, Stage};
use lily_model::{AttentionWeights, DeltaWeights, Mixer, MoeWeights, QuantMatrix};

use crate::device::Pool;
use crate::kernels::activations::{Activations, Tokens};
use crate::kernels::attention::{Attention, attention};
use crate::kernels::delta::{Delta, delta};
use crate::kernels::experts::{self, Experts};
use crate::kernels::linear::{Target, linear};
use crate::kernels::norm::{add_weighted, rms_norm};
use crate::kernels::rope::Angles;
use crate::kernels::sigmoid;
use crate::plan::{DeltaPlan, Plan, Scratch};
use crate::state::State;

/// One row of a step on its way through the model.
pub(crate) struct Forward<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) plan: &'a Plan,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) state: &'a mut State,
    /// Number of tokens in this row.
    pub(crate) tokens: usize,
    /// Stages recorded so far, if asked for.
    pub(crate) trace: Option<Vec<(Stage, Vec<f32>)>>,
}

impl Forward<'_> {
    /// Moves the state on by `ids` and leaves their residual stream in the scratch memory.
    pub(crate) fn run(&mut self, ids: &[u32]) {
        let plan = self.plan;
        let (mut attention, mut delta) = (0, 0);
        self.embed(ids);
        self.angles();
        for (layer, weights) in plan.weights().layers.iter().enumerate() {
            self.norm(&weights.mixer_norm, Stage::of(layer, Part::MixerNorm));
            match &weights.mixer {
                Mixer::Attention(weights) => {
                    self.attention(weights, attention);
                    attention += 1;
                }
                Mixer::Delta(weights) => {
                    self.delta(weights, &plan.deltas[delta], delta);
                    delta += 1;
                }
            }
            self.record_mixed(Stage::of(layer, Part::Mixer));
            self.add_and_norm(&weights.moe_norm, Stage::of(layer, Part::MoeNorm));
            self.moe(&weights.moe, layer);
            self.record_mixed(Stage::of(layer, Part::Moe));
            self.add();
            self.record_stream(Stage::of(layer, Part::Layer));
        }
        self.state.tokens.extend_from_slice(ids);
    }

    /// The rows of the embedding, dequantized.
    fn embed(&mut self, ids: &[u32]) {
        let embedding = &self.plan.weights().embedding;
        let hidden = self.hidden();
        let stream = &mut self.scratch.stream[..ids.len() * hidden];
        self.pool.pieces(stream, hidden, |i, row| embedding.dequantize_row(ids[i] as usize, row));
        self.record_stream(Stage::outside(Part::Embedding));
    }

    /// The angles of all tokens, for every attention layer.
    fn angles(&mut self) {
        let (first, theta) = (self.state.position(), self.plan.shape().rope_theta);
        let angles = &mut self.scratch.attention.angles;
        angles.clear();
        angles.extend((first..first + self.tokens).map(|position| Angles::at(position, theta)));
    }

    /// Grouped-query attention with a gate on its output; `index` counts attention layers.
    fn attention(&mut self, w: &AttentionWeights, index: usize) {
        let (pool, isa, shape, tokens) = (self.pool, self.plan.isa, self.plan.shape(), self.tokens);
        let Scratch { normed, mixed, attention: s, .. } = &mut *self.scratch;
        let query_gate = &mut s.query_gate[..tokens * 2 * shape.query_width()];
        let keys = &mut s.keys[..tokens * shape.kv_width()];
        let values = &mut s.values[..tokens * shape.kv_width()];
        project(pool, self.plan, normed, tokens, [(&w.q, &mut *query_gate), (&w.k, &mut *keys), (&w.v, &mut *values)]);
        let mixer = Attention {
            tokens,
            query_heads: shape.query_heads,
            kv_heads: shape.kv_heads,
            position: self.state.position(),
            query_gate,
            keys,
            values,
            query_norm: &w.q_norm,
            key_norm: &w.k_norm,
            eps: shape.rms_eps,
            angles: &s.angles,
        };
        attention(pool, isa, &mixer, self.state.kv(index), &mut s.partials, &mut s.gated);
        project(pool, self.plan, &s.gated, tokens, [(&w.o, &mut mixed[..tokens * shape.hidden])]);
    }

    /// Gated DeltaNet; `index` counts delta layers.
    fn delta(&mut self, w: &DeltaWeights, plan: &DeltaPlan, index: usize) {
        let (pool, isa, shape, tokens) = (self.pool, self.plan.isa, self.plan.shape(), self.tokens);
        let Scratch { normed, mixed, delta: s, .. } = &mut *self.scratch;
        let qkv = &mut s.qkv[..tokens * shape.conv_width()];
        let z = &mut s.z[..tokens * shape.delta_value_width()];
        let a = &mut s.a[..tokens * shape.delta_value_heads];
        let b = &mut s.b[..tokens * shape.delta_value_heads];
        project(
            pool,
            self.plan,
            normed,
            tokens,
            [(&w.qkv, &mut *qkv), (&w.z, &mut *z), (&w.a, &mut *a), (&w.b, &mut *b)],
        );

        let (history, state) = self.state.delta_layer(index);
        let (key_heads, value_heads) = (shape.delta_key_heads, shape.delta_value_heads);
        let mixer = Delta {
            tokens,
            key_heads,
            value_heads,
            inputs: qkv,
            taps: &plan.taps,
            z,
            a,
            b,
            rates: &plan.rates,
            dt_bias: &w.dt_bias,
            norm: &w.norm,
            eps: shape.rms_eps,
        };
        delta(pool, isa, &mixer, history, state, &mut s.gated);
        project(pool, self.plan, &s.gated, tokens, [(&w.out, &mut mixed[..tokens * shape.hidden])]);
    }

    /// Router, the chosen experts and the shared expert.
    fn moe(&mut self, w: &MoeWeights, layer: usize) {
        let (pool, plan, shape, tokens) = (self.pool, self.plan, self.plan.shape(), self.tokens);
        let (hidden, per_token) = (shape.hidden, shape.experts_per_token);
        let Scratch { normed, mixed, moe: s, .. } = &mut *self.scratch;
        let router = &mut s.router[..tokens * shape.experts];
        let shared_gate = &mut s.shared_gate[..tokens];
        project(pool, plan, normed, tokens, [(&w.router, &mut *router), (&w.shared_gate, &mut *shared_gate)]);
        if let Some(trace) = &mut self.trace {
            trace.push((Stage::of(layer, Part::Router), router.to_vec()));
        }
        s.routing.choose(router, shape.experts, per_token);
        shared_gate.iter_mut().for_each(|gate| *gate = sigmoid::<false>(*gate));
        let experts = Experts { weights: w, routing: &s.routing, per_token, tokens };
        experts::gate_up(pool, plan.isa, &experts, normed, &mut s.routed, &mut s.shared);
        let mixed = &mut mixed[..tokens * hidden];
        experts::down(pool, plan.isa, &experts, shared_gate, &mut s.routed, &mut s.shared, mixed);
    }

    /// Final norm and head of tokens `first ..` into `logits`, `[tokens - first, vocab]`.
    pub(crate) fn head(&mut self, first: usize, logits: &mut [f32]) {
        let (plan, hidden, count) = (self.plan, self.hidden(), self.tokens - first);
        let weights = plan.weights();
        let Scratch { stream, normed, .. } = &mut *self.scratch;
        normed.fill(self.pool, plan.isa, count, |i, out| {
            rms_norm(plan.isa, &stream[(first + i) * hidden..][..hidden], &weights.norm, plan.shape().rms_eps, out);
        });
        if let Some(trace) = &mut self.trace {
            let values = (0..count).flat_map(|i| normed.plain_row(plan.isa, i)).collect();
            trace.push((Stage::outside(Part::FinalNorm), values));
        }
        project(self.pool, plan, normed, count, [(&weights.head, logits)]);
    }

    /// Norm of the residual stream, as input of the next projections.
    fn norm(&mut self, weight: &[f32], stage: Stage) {
        let (isa, eps, hidden) = (self.plan.isa, self.plan.shape().rms_eps, self.hidden());
        let Scratch { stream, normed, .. } = &mut *self.scratch;
        normed.fill(self.pool, isa, self.tokens, |token, out| {
            rms_norm(isa, &stream[token * hidden..][..hidden], weight, eps, out);
        });
        self.record_normed(stage);
    }

    /// Adds what a mixer made to the residual stream, and norms the sum.
    fn add_and_norm(&mut self, weight: &[f32], stage: Stage) {
        let (isa, eps, hidden) = (self.plan.isa, self.plan.shape().rms_eps, self.hidden());
        let Scratch { stream, normed, mixed, .. } = &mut *self.scratch;
        normed.fill_along(self.pool, isa, self.tokens, &mut stream[..self.tokens * hidden], |token, sum, out| {
            add_weighted(isa, sum, &mixed[token * hidden..][..hidden], 1.0);
            rms_norm(isa, sum, weight, eps, out);
        });
        self.record_normed(stage);
    }

    /// Adds what the MoE made to the residual stream.
    fn add(&mut self) {
        let (isa, hidden) = (self.plan.isa, self.hidden());
        let Scratch { stream, mixed, .. } = &mut *self.scratch;
        self.pool.pieces(&mut stream[..self.tokens * hidden], hidden, |token, sum| {
            add_weighted(isa, sum, &mixed[token * hidden..][..hidden], 1.0);
        });
    }

    /// What a mixer or the MoE made, before it is added.
    fn record_mixed(&mut self, stage: Stage) {
        let len = self.tokens * self.hidden();
        if let Some(trace) = &mut self.trace {
            trace.push((stage, self.scratch.mixed[..len].to_vec()));
        }
    }

    fn record_normed(&mut self, stage: Stage) {
        if let Some(trace) = &mut self.trace {
            let row = |token| self.scratch.normed.plain_row(self.plan.isa, token);
            trace.push((stage, (0..self.tokens).flat_map(row).collect()));
        }
    }

    fn record_stream(&mut self, stage: Stage) {
        let len = self.tokens * self.hidden();
        if let Some(trace) = &mut self.trace {
            trace.push((stage, self.scratch.stream[..len].to_vec()));
        }
    }

    fn hidden(&self) -> usize {
        self.plan.shape().hidden
    }
}

/// The first `tokens` tokens through several matrices in one pass.
fn project<const N: usize>(
    pool: &Pool,
    plan: &Plan,
    x: &Activations,
    tokens: usize,
    targets: [(&QuantMatrix, &mut [f32]); N],
) {
    let targets = targets.map(|(matrix, out)| Target { matrix, out });
    linear(pool, plan.isa, Tokens::range(x, 0, tokens), targets);
}
