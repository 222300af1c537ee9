//! What is decided once, at load: that the weights fit the shape, which kernels run, how large the scratch memory is.
//!
//! Weights stay where they are: kernels read the packed codes from the mapped files. Owned are only small vectors in the
//! order in which kernels want them.

use std::sync::Arc;

use lily_backend::export::fingerprint;
use lily_backend::{Error, Result};
use lily_model::{Checkpoint, DeltaWeights, Mixer, QuantMatrix, Shape, Weights};

use crate::LoadOptions;
use crate::device::{Buffer, Isa, memory_bytes};
use crate::kernels::activations::Activations;
use crate::kernels::attention::Partials;
use crate::kernels::experts::Inner;
use crate::kernels::moe::Routing;
use crate::kernels::rope::Angles;
use crate::state::KvDtype;

/// The decisions.
pub(crate) struct Plan {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) isa: Isa,
    pub(crate) kv: KvDtype,
    pub(crate) max_context: usize,
    pub(crate) max_chunk: usize,
    /// Per delta layer.
    pub(crate) deltas: Vec<DeltaPlan>,
    /// Of checkpoint and KV dtype: exports belong to one.
    pub(crate) fingerprint: u64,
}

/// Small vectors of a delta layer.
pub(crate) struct DeltaPlan {
    /// `[4, conv width]`: the taps by age, so that channels are adjacent.
    pub(crate) taps: Vec<f32>,
    /// `exp(A_log)` per value head.
    pub(crate) rates: Vec<f32>,
}

impl Plan {
    pub(crate) fn new(checkpoint: Arc<Checkpoint>, options: &LoadOptions) -> Result<Plan> {
        let shape = &checkpoint.config.shape;
        check_weights(shape, &checkpoint.weights)?;
        let max_context = options.max_context.unwrap_or(shape.max_context).max(1);
        let max_chunk = options.max_chunk.clamp(1, max_context);
        let deltas = checkpoint.weights.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Delta(delta) => Some(DeltaPlan::new(delta)),
            Mixer::Attention(_) => None,
        });
        Ok(Plan {
            isa: Isa::detect(),
            kv: options.kv,
            max_context,
            max_chunk,
            deltas: deltas.collect(),
            fingerprint: fingerprint(&checkpoint, &format!(" {:?}", options.kv)),
            checkpoint,
        })
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.checkpoint.config.shape
    }

    pub(crate) fn weights(&self) -> &Weights {
        &self.checkpoint.weights
    }

    /// Bytes of the vectors it owns and of those that the checkpoint widened.
    pub(crate) fn owned_bytes(&self) -> usize {
        let owned = self.deltas.iter().map(|d| d.taps.len() + d.rates.len());
        4 * owned.sum::<usize>()
    }
}

impl DeltaPlan {
    fn new(weights: &DeltaWeights) -> DeltaPlan {
        let taps = weights.conv.as_chunks::<{ Shape::CONV_TAPS }>().0;
        DeltaPlan {
            taps: (0..Shape::CONV_TAPS).flat_map(|j| taps.iter().map(move |taps| taps[j])).collect(),
            rates: weights.a_log.iter().map(|a| a.exp()).collect(),
        }
    }
}

/// Checks what kernels rely on: sizes that are whole vectors and groups, and matrices as large as the shape says.
fn check_weights(shape: &Shape, weights: &Weights) -> Result<()> {
    let refuse = |reason: String| Err(Error::Unavailable { name: "cpu", reason });
    for (name, size) in
        [("hidden", shape.hidden), ("expert_width", shape.expert_width), ("shared_width", shape.shared_width)]
    {
        if size == 0 || !size.is_multiple_of(Shape::GROUP) {
            return refuse(format!("{name} is {size}, expected a multiple of {}", Shape::GROUP));
        }
    }
    if shape.experts_per_token == 0 || shape.experts_per_token > shape.experts {
        return refuse(format!("{} of {} experts per token", shape.experts_per_token, shape.experts));
    }
    for (name, heads, shared) in
        [("attention", shape.query_heads, shape.kv_heads), ("delta", shape.delta_value_heads, shape.delta_key_heads)]
    {
        if shared == 0 || heads == 0 || !heads.is_multiple_of(shared) {
            return refuse(format!("{heads} {name} heads cannot share {shared}"));
        }
    }
    if weights.layers.len() != shape.layers {
        return refuse(format!("{} layers of weights, expected {}", weights.layers.len(), shape.layers));
    }
    for layer in &weights.layers {
        for mlp in [&layer.moe.experts, &layer.moe.shared] {
            let (gate, up) = (mlp.gate.bits.count(), mlp.up.bits.count());
            if gate != up {
                return refuse(format!("{} has codes of {gate} bits and {} of {up}", mlp.gate.name, mlp.up.name));
            }
        }
    }
    weights.matrices().try_for_each(check_matrix)
}

fn check_matrix(m: &QuantMatrix) -> Result<()> {
    let groups = m.rows() * m.groups() * 2;
    let whole = m.inputs > 0 && m.inputs.is_multiple_of(Shape::GROUP) && m.outputs > 0;
    if whole && m.codes.len() == m.rows() * m.row_bytes() && m.scales.len() == groups && m.biases.len() == groups {
        return Ok(());
    }
    Err(Error::Unavailable {
        name: "cpu",
        reason: format!("the bytes of {} do not make {} rows of {} inputs", m.name, m.rows(), m.inputs),
    })
}

/// Memory between kernels, for one row of a step: `max_chunk` tokens of everything. Pages are occupied as far as the
/// longest chunk so far reached.
pub(crate) struct Scratch {
    /// Residual stream `[tokens, hidden]`.
    pub(crate) stream: Buffer<f32>,
    /// Output of a norm, input of the projections of a block.
    pub(crate) normed: Activations,
    /// Output of a mixer or of the MoE `[tokens, hidden]`.
    pub(crate) mixed: Buffer<f32>,
    pub(crate) attention: AttentionScratch,
    pub(crate) delta: DeltaScratch,
    pub(crate) moe: MoeScratch,
}

pub(crate) struct AttentionScratch {
    /// `[tokens, query heads, 512]`: per head the query, then the gate.
    pub(crate) query_gate: Buffer<f32>,
    /// `[tokens, kv heads, 256]`.
    pub(crate) keys: Buffer<f32>,
    /// `[tokens, kv heads, 256]`.
    pub(crate) values: Buffer<f32>,
    /// Per token.
    pub(crate) angles: Vec<Angles>,
    pub(crate) partials: Partials,
    /// Gated, input of the output projection.
    pub(crate) gated: Activations,
}

pub(crate) struct DeltaScratch {
    /// `[tokens, conv width]`.
    pub(crate) qkv: Buffer<f32>,
    /// `[tokens, value width]`.
    pub(crate) z: Buffer<f32>,
    /// `[tokens, value heads]`.
    pub(crate) a: Buffer<f32>,
    /// `[tokens, value heads]`.
    pub(crate) b: Buffer<f32>,
    /// Normed and gated, input of the output projection.
    pub(crate) gated: Activations,
}

pub(crate) struct MoeScratch {
    /// `[tokens, experts]`.
    pub(crate) router: Buffer<f32>,
    /// `[tokens]`.
    pub(crate) shared_gate: Buffer<f32>,
    pub(crate) routing: Routing,
    pub(crate) routed: Inner,
    pub(crate) shared: Inner,
}

fn zeroed(len: usize) -> Result<Buffer<f32>> {
    Buffer::zeroed("activations", len)
}

impl Scratch {
    pub(crate) fn new(plan: &Plan) -> Result<Scratch> {
        let (s, tokens) = (plan.shape(), plan.max_chunk);
        let visits = tokens * s.experts_per_token;
        let scratch = Scratch {
            stream: zeroed(tokens * s.hidden)?,
            normed: Activations::new(tokens, s.hidden)?,
            mixed: zeroed(tokens * s.hidden)?,
            attention: AttentionScratch {
                query_gate: zeroed(tokens * 2 * s.query_width())?,
                keys: zeroed(tokens * s.kv_width())?,
                values: zeroed(tokens * s.kv_width())?,
                angles: Vec::new(),
                partials: Partials::new(s.query_heads, plan.max_context)?,
                gated: Activations::new(tokens, s.query_width())?,
            },
            delta: DeltaScratch {
                qkv: zeroed(tokens * s.conv_width())?,
                z: zeroed(tokens * s.delta_value_width())?,
                a: zeroed(tokens * s.delta_value_heads)?,
                b: zeroed(tokens * s.delta_value_heads)?,
                gated: Activations::new(tokens, s.delta_value_width())?,
            },
            moe: MoeScratch {
                router: zeroed(tokens * s.experts)?,
                shared_gate: zeroed(tokens)?,
                routing: Routing::default(),
                routed: Inner::new(visits, s.expert_width, s.hidden)?,
                shared: Inner::new(tokens, s.shared_width, s.hidden)?,
            },
        };
        let (needed, available) = (scratch.bytes(), memory_bytes());
        if needed > available {
            return Err(Error::OutOfMemory { what: format!("a chunk of {tokens} tokens"), needed, available });
        }
        Ok(scratch)
    }

    /// Its size in bytes, touched or not.
    pub(crate) fn bytes(&self) -> usize {
        let (a, d, m) = (&self.attention, &self.delta, &self.moe);
        let buffers = [
            &self.stream,
            &self.mixed,
            &a.query_gate,
            &a.keys,
            &a.values,
            &d.qkv,
            &d.z,
            &d.a,
            &d.b,
            &m.router,
            &m.shared_gate,
        ];
        buffers.iter().map(|b| b.bytes()).sum::<usize>()
            + self.normed.bytes()
            + a.gated.bytes()
            + a.partials.bytes()
            + d.gated.bytes()
            + m.routed.bytes()
            + m.shared.bytes()
    }
}
