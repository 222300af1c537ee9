//! The forward pass, from tokens to logits, in the order of the data: [`Reference::forward`], then the layer's three
//! blocks `attention`, `delta` and `moe`.

use lily_backend::{Part, Stage, StageOutput};
use lily_model::{AttentionWeights, Checkpoint, DeltaWeights, LayerKind, Mixer, MoeWeights, QuantMatrix, Shape};

use crate::ops::{self, DeltaInput, Ops};

/// A checkpoint and the formulas to run it with.
#[derive(Clone, Copy, Debug)]
pub struct Reference<'a> {
    /// Sizes and weights.
    pub checkpoint: &'a Checkpoint,
    /// [`Ops::SPEC`], unless a test breaks one on purpose.
    pub ops: Ops,
}

/// What a session leaves behind at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Tokens fed so far.
    pub position: usize,
    /// One entry per layer.
    pub layers: Vec<LayerState>,
}

/// The state of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerState {
    /// A KV cache: keys after rope, and values, both `[position, kv_width]`.
    Attention {
        /// `[position, kv_width]`.
        keys: Vec<f32>,
        /// `[position, kv_width]`.
        values: Vec<f32>,
    },
    /// A delta layer, of a size that does not depend on the position.
    Delta {
        /// The last inputs of the convolution, `[3, conv_width]`.
        conv: Vec<f32>,
        /// `[value head, 128 (value), 128 (key)]`.
        delta: Vec<f32>,
    },
}

/// Whose logits to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Nobody's: the state alone advances.
    Nothing,
    /// The last token's.
    Last,
    /// Every token's.
    All,
}

/// Values inside a forward pass.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The named stages, which backends record too.
    pub stages: Vec<StageOutput>,
    /// What lies between them, by the name of the module whose output it is: `layers.0.linear_attn.in_proj_qkv`. A value
    /// that belongs to heads is `[tokens, heads, width]`, one of an expert `[tokens, experts_per_token, width]` with the
    /// experts in falling order of weight.
    pub modules: Vec<(String, Vec<f32>)>,
}

impl State {
    /// The state before the first token.
    pub fn new(shape: &Shape) -> State {
        let layer = |layer| match shape.layer_kind(layer) {
            LayerKind::Attention => LayerState::Attention { keys: Vec::new(), values: Vec::new() },
            LayerKind::Delta => {
                LayerState::Delta { conv: vec![0.0; shape.conv_state_len()], delta: vec![0.0; shape.delta_state_len()] }
            }
        };
        State { position: 0, layers: (0..shape.layers).map(layer).collect() }
    }
}

impl<'a> Reference<'a> {
    /// The model as specified.
    pub fn new(checkpoint: &'a Checkpoint) -> Reference<'a> {
        Reference { checkpoint, ops: Ops::SPEC }
    }

    /// A state at position 0.
    pub fn new_state(&self) -> State {
        State::new(&self.checkpoint.config.shape)
    }

    /// Feeds `tokens`, at least one, all below the vocabulary, and returns the logits asked for, `[positions, vocab]`.
    pub fn forward(&self, state: &mut State, tokens: &[u32], want: Logits) -> Vec<f32> {
        self.run(state, tokens, want, None)
    }

    /// [`Reference::forward`] with the logits of every token and all values on the way.
    pub fn traced(&self, state: &mut State, tokens: &[u32]) -> (Vec<f32>, Trace) {
        let mut trace = Trace::default();
        let logits = self.run(state, tokens, Logits::All, Some(&mut trace));
        (logits, trace)
    }

    /// Feeds `prompt`, then `count - 1` times the token of the highest logit; returns the `count` tokens chosen.
    pub fn greedy(&self, state: &mut State, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut next = prompt.to_vec();
        let choose = |_| {
            let logits = self.forward(state, &next, Logits::Last);
            next = vec![ops::greedy(&logits) as u32];
            next[0]
        };
        (0..count).map(choose).collect()
    }

    fn run(&self, state: &mut State, tokens: &[u32], want: Logits, trace: Option<&mut Trace>) -> Vec<f32> {
        let Checkpoint { config, weights, .. } = self.checkpoint;
        let mut pass =
            Pass { shape: &config.shape, ops: &self.ops, start: state.position, module: String::new(), trace };

        let mut x: Vec<f32> = vec![0.0; tokens.len() * pass.shape.hidden];
        for (x, token) in x.chunks_exact_mut(pass.shape.hidden).zip(tokens) {
            weights.embedding.dequantize_row(*token as usize, x);
        }
        pass.stage(Stage::outside(Part::Embedding), &x);

        for (layer, (w, state)) in weights.layers.iter().zip(&mut state.layers).enumerate() {
            let normed = pass.norm(&x, &w.mixer_norm);
            pass.stage(Stage::of(layer, Part::MixerNorm), &normed);
            let mixed = match (&w.mixer, state) {
                (Mixer::Attention(w), LayerState::Attention { keys, values }) => {
                    pass.module = format!("layers.{layer}.self_attn");
                    pass.attention(&normed, w, keys, values)
                }
                (Mixer::Delta(w), LayerState::Delta { conv, delta }) => {
                    pass.module = format!("layers.{layer}.linear_attn");
                    pass.delta(&normed, w, conv, delta)
                }
                _ => panic!("layer {layer}: the state is of another model"),
            };
            pass.stage(Stage::of(layer, Part::Mixer), &mixed);
            add(&mut x, &mixed);

            let normed = pass.norm(&x, &w.moe_norm);
            pass.stage(Stage::of(layer, Part::MoeNorm), &normed);
            pass.module = format!("layers.{layer}.mlp");
            let router = ops::linear(&normed, &w.moe.router);
            pass.stage(Stage::of(layer, Part::Router), &router);
            let moe = pass.moe(&normed, &router, &w.moe);
            pass.stage(Stage::of(layer, Part::Moe), &moe);
            add(&mut x, &moe);
            pass.stage(Stage::of(layer, Part::Layer), &x);
        }
        state.position += tokens.len();

        let first = match want {
            Logits::Nothing => return Vec::new(),
            Logits::Last => tokens.len() - 1,
            Logits::All => 0,
        };
        let normed = pass.norm(&x[first * pass.shape.hidden..], &weights.norm);
        pass.stage(Stage::outside(Part::FinalNorm), &normed);
        ops::linear(&normed, &weights.head)
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// One call of the forward pass.
struct Pass<'a> {
    shape: &'a Shape,
    ops: &'a Ops,
    /// Position of the first token of the call.
    start: usize,
    /// The block that is being computed, as traces call it.
    module: String,
    trace: Option<&'a mut Trace>,
}

impl Pass<'_> {
    /// `x` `[tokens, hidden]`, each token normed.
    fn norm(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        x.chunks_exact(weight.len()).flat_map(|x| (self.ops.rms_norm)(x, weight, self.shape.rms_eps)).collect()
    }

    /// Grouped-query attention over the KV cache, with an output gate.
    fn attention(
        &mut self,
        x: &[f32],
        w: &AttentionWeights,
        cached_keys: &mut Vec<f32>,
        cached_values: &mut Vec<f32>,
    ) -> Vec<f32> {
        let &Shape { query_heads, kv_heads, rope_theta, .. } = self.shape;
        const D: usize = Shape::HEAD_DIM;

        // Each head has its query and its gate side by side.
        let projected = self.linear("q_proj", x, &w.q);
        let heads = projected.chunks_exact(2 * D);
        let (queries, gates): (Vec<_>, Vec<_>) = heads.map(|head| head.split_at(D)).unzip();
        let mut queries = self.norm(&queries.concat(), &w.q_norm);
        let mut keys = self.linear("k_proj", x, &w.k);
        keys = self.norm(&keys, &w.k_norm);
        self.record("q_norm", &queries);
        self.record("k_norm", &keys);
        for (heads, x) in [(query_heads, &mut queries), (kv_heads, &mut keys)] {
            for (i, head) in x.chunks_exact_mut(D).enumerate() {
                (self.ops.rope)(head, self.start + i / heads, rope_theta);
            }
        }
        self.record("rope", &queries);
        self.record("rope#1", &keys);
        cached_keys.extend(keys);
        cached_values.extend(self.linear("v_proj", x, &w.v));

        let mut mixed = Vec::new();
        for (i, query) in queries.chunks_exact(D).enumerate() {
            let (token, head) = (i / query_heads, i % query_heads);
            let kv_head = (self.ops.kv_head)(head, query_heads, kv_heads);
            let end = (self.start + token + 1) * kv_heads * D;
            let keys: Vec<&[f32]> = cached_keys[..end].chunks_exact(D).skip(kv_head).step_by(kv_heads).collect();
            let values: Vec<&[f32]> = cached_values[..end].chunks_exact(D).skip(kv_head).step_by(kv_heads).collect();
            mixed.extend(ops::attention(query, &keys, &values));
        }
        let gated = (self.ops.attention_gate)(&mixed, &gates.concat());
        ops::linear(&gated, &w.o)
    }

    /// Gated DeltaNet: a short convolution, then one state matrix per value head.
    fn delta(&mut self, x: &[f32], w: &DeltaWeights, history: &mut [f32], states: &mut [f32]) -> Vec<f32> {
        let &Shape { delta_key_heads: key_heads, delta_value_heads: value_heads, rms_eps, .. } = self.shape;
        const D: usize = Shape::DELTA_HEAD_DIM;

        let inputs = self.linear("in_proj_qkv", x, &w.qkv);
        let z = self.linear("in_proj_z", x, &w.z);
        let b = self.linear("in_proj_b", x, &w.b);
        let a = self.linear("in_proj_a", x, &w.a);
        let beta: Vec<f32> = b.iter().map(|b| ops::sigmoid(*b)).collect();
        let heads = (0..value_heads).cycle();
        let decay: Vec<f32> = a.iter().zip(heads).map(|(a, n)| ops::decay(*a, w.a_log[n], w.dt_bias[n])).collect();

        let inputs = inputs.chunks_exact(self.shape.conv_width());
        let mixed: Vec<f32> = inputs.flat_map(|u| (self.ops.conv_step)(history, u, &w.conv)).collect();
        self.record("conv1d", &mixed);
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for token in mixed.chunks_exact(self.shape.conv_width()) {
            let (q, kv) = token.split_at(key_heads * D);
            let (k, v) = kv.split_at(key_heads * D);
            queries.extend(q.chunks_exact(D).flat_map(self.ops.delta_query));
            keys.extend(k.chunks_exact(D).flat_map(self.ops.delta_key));
            values.extend_from_slice(v);
        }
        for (name, values) in [
            ("delta.q", &queries),
            ("delta.k", &keys),
            ("delta.v", &values),
            ("delta.g", &decay),
            ("delta.beta", &beta),
        ] {
            self.record(name, values);
        }

        let mut outputs = Vec::new();
        for (i, value) in values.chunks_exact(D).enumerate() {
            let (token, head) = (i / value_heads, i % value_heads);
            let key_head = token * key_heads + (self.ops.key_head)(head, value_heads, key_heads);
            let (query, key) = (&queries[key_head * D..][..D], &keys[key_head * D..][..D]);
            let state = &mut states[head * D * D..][..D * D];
            let input = DeltaInput { query, key, value, decay: decay[i], beta: beta[i] };
            outputs.extend((self.ops.delta_step)(state, input));
        }
        self.record("delta.y", &outputs);
        let heads = outputs.chunks_exact(D).zip(z.chunks_exact(D));
        let normed: Vec<f32> = heads.flat_map(|(o, z)| (self.ops.gated_norm)(o, z, &w.norm, rms_eps)).collect();
        self.record("norm", &normed);
        ops::linear(&normed, &w.out)
    }

    /// The chosen experts, weighted, and the shared expert behind its gate.
    fn moe(&mut self, x: &[f32], router: &[f32], w: &MoeWeights) -> Vec<f32> {
        let &Shape { hidden, experts, experts_per_token, .. } = self.shape;
        let tokens = router.chunks_exact(experts);
        let routes: Vec<Vec<(usize, f32)>> = tokens.map(|logits| (self.ops.route)(logits, experts_per_token)).collect();
        // One row per token and choice.
        let (ids, weights): (Vec<usize>, Vec<f32>) = routes.iter().flatten().copied().unzip();
        let repeated = x.chunks_exact(hidden).zip(&routes).flat_map(|(x, routes)| x.repeat(routes.len()));
        let repeated: Vec<f32> = repeated.collect();
        let gate = self.expert_linear("switch_mlp.gate_proj", &repeated, &w.experts.gate, &ids);
        let up = self.expert_linear("switch_mlp.up_proj", &repeated, &w.experts.up, &ids);
        let activation = ops::swiglu(&gate, &up);
        let routed = self.expert_linear("switch_mlp", &activation, &w.experts.down, &ids);
        self.record("switch_mlp.activation", &activation);
        self.record("switch_mlp.indices", &ids.iter().map(|id| *id as f32).collect::<Vec<f32>>());

        let gate = self.linear("shared_expert.gate_proj", x, &w.shared.gate);
        let up = self.linear("shared_expert.up_proj", x, &w.shared.up);
        let shared = self.linear("shared_expert", &ops::swiglu(&gate, &up), &w.shared.down);
        let shared_gate = self.linear("shared_expert_gate", x, &w.shared_gate);

        let mut y = vec![0.0; x.len()];
        let chosen = weights.chunks(experts_per_token).zip(routed.chunks(experts_per_token * hidden));
        let shared = shared.chunks_exact(hidden).zip(shared_gate);
        for ((y, (weights, routed)), (shared, gate)) in y.chunks_exact_mut(hidden).zip(chosen).zip(shared) {
            for (weight, expert) in weights.iter().zip(routed.chunks_exact(hidden)) {
                y.iter_mut().zip(expert).for_each(|(y, e)| *y += weight * e);
            }
            let gate = (self.ops.shared_gate)(gate);
            y.iter_mut().zip(shared).for_each(|(y, s)| *y += gate * s);
        }
        y
    }

    fn linear(&mut self, name: &str, x: &[f32], matrix: &QuantMatrix) -> Vec<f32> {
        let y = ops::linear(x, matrix);
        self.record(name, &y);
        y
    }

    fn expert_linear(&mut self, name: &str, x: &[f32], matrix: &QuantMatrix, experts: &[usize]) -> Vec<f32> {
        let y = ops::expert_linear(x, matrix, experts);
        self.record(name, &y);
        y
    }

    fn stage(&mut self, stage: Stage, values: &[f32]) {
        if let Some(trace) = &mut self.trace {
            trace.stages.push(StageOutput { stage, row: 0, values: values.to_vec() });
        }
    }

    fn record(&mut self, name: &str, values: &[f32]) {
        if let Some(trace) = &mut self.trace {
            trace.modules.push((format!("{}.{name}", self.module), values.to_vec()));
        }
    }
}
