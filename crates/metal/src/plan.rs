//! What is decided once, at load: that the checkpoint is one that the kernels have, where its weights lie in device memory,
//! which pipelines run, and the scratch memory between them.
//!
//! Weights keep the packed form of the checkpoint. Matrices that are read by one dispatch are stacked into one: where they lie so in
//! an aligned file, as `lily align` writes it, that is used as it is mapped; else they are read from the files, so that no second
//! copy stays in memory. Nothing in a published file is aligned.

use lily_backend::{Error, Result};
use lily_model::{AttentionWeights, Bits, Checkpoint, DeltaWeights, Mixer, MoeWeights, QuantMatrix, Shape};
use sha2::{Digest, Sha256};

use crate::LoadOptions;
use crate::device::{Buffer, Gpu, Slice, float_bytes};
use crate::kernels::attention::{Attention, MOST_SPLITS};
use crate::kernels::delta::{Delta, DeltaVectors};
use crate::kernels::embed::Embed;
use crate::kernels::gemv::{Candidates, Gemv, Head, Residual};
use crate::kernels::moe::{Experts, Moe, Routed};
use crate::kernels::{Builder, KernelReport, Matrix, Stream, stream_groups};
use crate::load::{self, Mapped, Piece};
use crate::prefill::PrefillPlan;
use crate::room;
use crate::state::KvDtype;

/// The decisions.
pub(crate) struct Plan {
    pub(crate) shape: Shape,
    pub(crate) kernels: Kernels,
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<LayerPlan>,
    /// `[hidden]` f32.
    pub(crate) final_norm: Slice,
    pub(crate) head: Matrix,
    pub(crate) scratch: Scratch,
    pub(crate) prefill: PrefillPlan,
    /// Of checkpoint and KV dtype: exports belong to one.
    pub(crate) fingerprint: [u8; 32],
    /// Of files that are used as they are mapped.
    pub(crate) mapped_bytes: usize,
    /// Of copies.
    pub(crate) weight_bytes: usize,
    pub(crate) scratch_bytes: usize,
}

/// The kernels of one token's forward pass.
pub(crate) struct Kernels {
    pub(crate) embed: Embed,
    pub(crate) delta_input: Gemv,
    pub(crate) delta: Delta,
    pub(crate) delta_out: Residual,
    pub(crate) attention_input: Gemv,
    pub(crate) attention: Attention,
    pub(crate) attention_out: Residual,
    pub(crate) moe: Moe,
    pub(crate) head: Head,
}

/// One layer's weights.
pub(crate) struct LayerPlan {
    /// `[hidden]` f32.
    pub(crate) mixer_norm: Slice,
    pub(crate) mixer: MixerPlan,
    /// `[hidden]` f32.
    pub(crate) moe_norm: Slice,
    pub(crate) experts: Experts,
}

/// One mixer's weights.
pub(crate) enum MixerPlan {
    Delta {
        /// `[conv width + delta value width + 2 * delta value heads, hidden]`: q, k, v, z, b, a.
        input: Matrix,
        vectors: DeltaVectors,
        out: Matrix,
    },
    Attention {
        /// `[2 * query width + 2 * kv width, hidden]`: queries and gates by heads, k, v.
        input: Matrix,
        /// `[256]` f32.
        query_norm: Slice,
        /// `[256]` f32.
        key_norm: Slice,
        out: Matrix,
    },
}

/// What lies between the kernels of a token; all f32 but the ids.
pub(crate) struct Scratch {
    pub(crate) stream: Stream,
    /// z, b, a.
    pub(crate) zba: Slice,
    /// `[2 * query width]`.
    pub(crate) query_gate: Slice,
    /// `[2 * kv width]`.
    pub(crate) key_value: Slice,
    /// `[query heads, MOST_SPLITS, 256]`.
    pub(crate) outputs: Slice,
    /// `[query heads, MOST_SPLITS, 2]`.
    pub(crate) maxima_sums: Slice,
    /// `[query width]`: input of an attention layer's output projection.
    pub(crate) attended: Slice,
    /// `[delta value width]`: the same of a delta layer.
    pub(crate) recalled: Slice,
    /// `[delta value heads, 4]`.
    pub(crate) head_squares: Slice,
    pub(crate) routed: Routed,
    pub(crate) candidates: Candidates,
}

impl Plan {
    pub(crate) fn new(gpu: &mut dyn Gpu, checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Plan> {
        let kv = options.kv;
        let shape = checkpoint.config.shape.clone();
        let weights = &checkpoint.weights;
        check_shape(&shape)?;
        check_bits(checkpoint)?;
        let needed = weights.quantized_bytes();
        let available = gpu.memory_bytes();
        if needed > available {
            return Err(room::no_room_for_weights(gpu, needed, ROOM_BYTES));
        }
        let kernels = Kernels::plan(&mut Builder::new(gpu, &shape, kv), &shape)?;
        let mapped = Mapped::new(gpu, weights)?;
        let mut weight_bytes = 0;
        let mut layers = Vec::with_capacity(shape.layers);
        for layer in &weights.layers {
            // Vectors of a layer, all together, are shorter than this many rows of the stream.
            let vectors = 4 * (2 * shape.hidden + 5 * shape.conv_width());
            let mut arena = Arena::new(gpu, mapped.to_copy(&layer.stacks()) + vectors, "a layer")?;
            layers.push(LayerPlan {
                mixer_norm: arena.vector(gpu, &layer.mixer_norm)?,
                mixer: match &layer.mixer {
                    Mixer::Delta(delta) => MixerPlan::delta(gpu, &mapped, &mut arena, delta, &shape)?,
                    Mixer::Attention(attention) => MixerPlan::attention(gpu, &mapped, &mut arena, attention)?,
                },
                moe_norm: arena.vector(gpu, &layer.moe_norm)?,
                experts: experts(gpu, &mapped, &mut arena, &layer.moe)?,
            });
            weight_bytes += arena.bytes;
        }
        let outside = mapped.to_copy(&[vec![&weights.embedding], vec![&weights.head]]) + 4 * shape.hidden;
        let mut arena = Arena::new(gpu, outside, "embedding and head")?;
        let embedding = arena.stack(gpu, &mapped, &[&weights.embedding])?;
        let head = arena.stack(gpu, &mapped, &[&weights.head])?;
        let final_norm = arena.vector(gpu, &weights.norm)?;
        weight_bytes += arena.bytes;
        let (scratch, scratch_bytes) = Scratch::new(gpu, &shape, kernels.head.candidates())?;
        let prefill = PrefillPlan::new(
            gpu,
            &shape,
            kv,
            options.max_chunk,
            available.saturating_sub(mapped.bytes() + weight_bytes),
        )?;
        let fingerprint = fingerprint(checkpoint, kv);
        Ok(Plan {
            shape,
            kernels,
            embedding,
            layers,
            final_norm,
            head,
            scratch,
            scratch_bytes: scratch_bytes + prefill.bytes,
            prefill,
            fingerprint,
            mapped_bytes: mapped.bytes(),
            weight_bytes,
        })
    }

    /// The gain of the norm before layer `layer`, or the final one.
    pub(crate) fn norm_before(&self, layer: usize) -> Slice {
        self.layers.get(layer).map_or(self.final_norm, |layer| layer.mixer_norm)
    }
}

/// What becomes of every pipeline for a shape.
pub(crate) fn survey(gpu: &mut dyn Gpu, shape: &Shape, kv: KvDtype) -> Result<Vec<KernelReport>> {
    check_shape(shape)?;
    let mut builder = Builder::survey(gpu, shape, kv);
    Kernels::plan(&mut builder, shape)?;
    PrefillPlan::survey(&mut builder, shape)?;
    Ok(builder.reports())
}

impl Kernels {
    fn plan(builder: &mut Builder<'_>, shape: &Shape) -> Result<Kernels> {
        let conv = shape.conv_width();
        let delta_outputs = conv + shape.delta_value_width() + 2 * shape.delta_value_heads;
        let queries = 2 * shape.query_width();
        Ok(Kernels {
            embed: Embed::plan(builder, shape)?,
            delta_input: Gemv::plan(builder, shape, delta_outputs, conv)?,
            delta: Delta::plan(builder, shape)?,
            delta_out: Residual::plan(builder, shape, shape.delta_value_width(), true)?,
            attention_input: Gemv::plan(builder, shape, queries + 2 * shape.kv_width(), queries)?,
            attention: Attention::plan(builder, shape)?,
            attention_out: Residual::plan(builder, shape, shape.query_width(), false)?,
            moe: Moe::plan(builder, shape)?,
            head: Head::plan(builder, shape)?,
        })
    }
}

impl MixerPlan {
    fn delta(
        gpu: &mut dyn Gpu,
        mapped: &Mapped,
        arena: &mut Arena,
        w: &DeltaWeights,
        shape: &Shape,
    ) -> Result<MixerPlan> {
        // By age, so that channels are adjacent.
        let taps = (0..Shape::CONV_TAPS).flat_map(|tap| w.conv.iter().skip(tap).step_by(Shape::CONV_TAPS).copied());
        let taps: Vec<f32> = taps.collect();
        assert_eq!(taps.len(), Shape::CONV_TAPS * shape.conv_width());
        let rates: Vec<f32> = w.a_log.iter().map(|a| f64::from(*a).exp() as f32).collect();
        Ok(MixerPlan::Delta {
            input: arena.stack(gpu, mapped, &w.input())?,
            vectors: DeltaVectors {
                taps: arena.vector(gpu, &taps)?,
                rates: arena.vector(gpu, &rates)?,
                dt_bias: arena.vector(gpu, &w.dt_bias)?,
                norm: arena.vector(gpu, &w.norm)?,
            },
            out: arena.stack(gpu, mapped, &[&w.out])?,
        })
    }

    fn attention(gpu: &mut dyn Gpu, mapped: &Mapped, arena: &mut Arena, w: &AttentionWeights) -> Result<MixerPlan> {
        Ok(MixerPlan::Attention {
            input: arena.stack(gpu, mapped, &w.input())?,
            query_norm: arena.vector(gpu, &w.q_norm)?,
            key_norm: arena.vector(gpu, &w.k_norm)?,
            out: arena.stack(gpu, mapped, &[&w.o])?,
        })
    }
}

/// Places the matrices of a mixture of experts.
pub(crate) fn experts(gpu: &mut dyn Gpu, mapped: &Mapped, arena: &mut Arena, w: &MoeWeights) -> Result<Experts> {
    Ok(Experts {
        router: arena.stack(gpu, mapped, &w.routers())?,
        gate_up: arena.stack(gpu, mapped, &w.gate_up())?,
        down: arena.stack(gpu, mapped, &[&w.experts.down])?,
        shared_down: arena.stack(gpu, mapped, &[&w.shared.down])?,
    })
}

impl Scratch {
    fn new(gpu: &mut dyn Gpu, shape: &Shape, candidates: usize) -> Result<(Scratch, usize)> {
        let splits = shape.query_heads * MOST_SPLITS;
        let act = shape.experts_per_token * shape.expert_width + shape.shared_width;
        let zba = shape.delta_value_width() + 2 * shape.delta_value_heads;
        let lengths = [
            shape.hidden,
            shape.hidden,
            stream_groups(shape),
            zba,
            2 * shape.query_width(),
            2 * shape.kv_width(),
            splits * Shape::HEAD_DIM,
            splits * 2,
            shape.query_width(),
            shape.delta_value_width(),
            shape.delta_value_heads * 4,
            shape.experts + 1,
            act,
            shape.experts_per_token,
            shape.experts_per_token + 1,
            candidates,
            candidates,
        ];
        let bytes = lengths.iter().map(|length| (4 * length).next_multiple_of(ALIGNMENT)).sum();
        let mut arena = Arena::new(gpu, bytes, "activations")?;
        let [values, gained, squares, zba, query_gate, key_value, outputs, maxima_sums, rest @ ..] =
            lengths.map(|length| arena.take(4 * length));
        let [attended, recalled, head_squares, logits, act, chosen, weights, best, ids] = rest;
        let scratch = Scratch {
            stream: Stream { values, gained, squares },
            zba,
            query_gate,
            key_value,
            outputs,
            maxima_sums,
            attended,
            recalled,
            head_squares,
            routed: Routed { logits, act, chosen, weights },
            candidates: Candidates { best, ids },
        };
        Ok((scratch, arena.bytes))
    }
}

/// What states and activations may need beside the weights: 1 GiB are 50,000 tokens of the full-size model.
const ROOM_BYTES: usize = 1 << 30;

/// Where everything in a buffer begins: a multiple of all that Metal asks for, and of a cache line.
const ALIGNMENT: usize = 256;

/// A buffer that is filled from its beginning.
#[derive(Clone)]
pub(crate) struct Arena {
    buffer: Buffer,
    used: usize,
    bytes: usize,
}

impl Arena {
    /// Room for `bytes` bytes in a few dozen pieces.
    pub(crate) fn new(gpu: &mut dyn Gpu, bytes: usize, what: &str) -> Result<Arena> {
        const PIECES: usize = 64;
        let bytes = bytes + PIECES * ALIGNMENT;
        Ok(Arena { buffer: gpu.buffer(bytes, what)?, used: 0, bytes })
    }

    /// What a piece of `bytes` bytes takes.
    pub(crate) fn room(bytes: usize) -> usize {
        bytes.next_multiple_of(ALIGNMENT)
    }

    /// Room for pieces that take `bytes` bytes by [`Arena::room`].
    pub(crate) fn exact(gpu: &mut dyn Gpu, bytes: usize, what: &str) -> Result<Arena> {
        Ok(Arena { buffer: gpu.buffer(bytes, what)?, used: 0, bytes })
    }

    /// The next `bytes` bytes.
    pub(crate) fn take(&mut self, bytes: usize) -> Slice {
        let offset = self.used;
        self.used = offset + Arena::room(bytes);
        assert!(offset + bytes <= self.bytes, "an arena of {} bytes was planned too small", self.bytes);
        Slice { buffer: self.buffer, offset, bytes }
    }

    /// Places a vector.
    pub(crate) fn vector(&mut self, gpu: &mut dyn Gpu, values: &[f32]) -> Result<Slice> {
        let slice = self.take(4 * values.len());
        gpu.write(slice, &float_bytes(values))?;
        Ok(slice)
    }

    /// Places matrices of one width, one below the other, as one matrix, unless they lie so in a mapped file.
    pub(crate) fn stack(&mut self, gpu: &mut dyn Gpu, mapped: &Mapped, parts: &[&QuantMatrix]) -> Result<Matrix> {
        let inputs = parts.first().map_or(0, |matrix| matrix.inputs);
        assert!(parts.iter().all(|matrix| matrix.inputs == inputs), "stacked matrices have one width");
        let mut pieces = Vec::with_capacity(3 * parts.len());
        let [codes, scales, biases] = load::runs(parts).map(|run| {
            mapped.find(&run).unwrap_or_else(|| {
                let all = self.take(run.iter().map(|bytes| bytes.len()).sum());
                let mut to = all.offset;
                for from in run {
                    pieces.push(Piece { to, from });
                    to += from.len();
                }
                all
            })
        });
        load::fill(gpu, self.buffer, pieces)?;
        Ok(Matrix { codes, scales, biases })
    }
}

fn unavailable(reason: String) -> Error {
    Error::Unavailable { name: "metal", reason }
}

/// Holds the shape against what kernels are written for beyond the shape itself.
fn check_shape(shape: &Shape) -> Result<()> {
    // A lane holds the choice among its experts in one word; a threadgroup all query heads of a key/value head.
    for (what, found, most) in [
        ("experts", shape.experts, 1024),
        ("query heads per key/value head", shape.queries_per_kv(), 32),
        ("experts per token", shape.experts_per_token, shape.experts),
    ] {
        if found == 0 || found > most {
            return Err(unavailable(format!("the checkpoint has {found} {what}, its kernels take 1 to {most}")));
        }
    }
    Ok(())
}

/// Router and gate of the shared expert have 8 bits, all else 4, as published.
fn check_bits(checkpoint: &Checkpoint) -> Result<()> {
    let eight: Vec<*const QuantMatrix> = checkpoint
        .weights
        .layers
        .iter()
        .flat_map(|layer| [std::ptr::from_ref(&layer.moe.router), std::ptr::from_ref(&layer.moe.shared_gate)])
        .collect();
    for matrix in checkpoint.weights.matrices() {
        let expected = if eight.contains(&std::ptr::from_ref(matrix)) { Bits::Eight } else { Bits::Four };
        if matrix.bits != expected {
            let (name, found, expected) = (&matrix.name, matrix.bits.count(), expected.count());
            return Err(unavailable(format!("{name} has {found}-bit codes, its kernels take {expected}")));
        }
    }
    Ok(())
}

/// Of what tells one checkpoint from another: sizes, norms, and the scales of the embedding.
fn fingerprint(checkpoint: &Checkpoint, kv: KvDtype) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(format!("{:?} {kv:?}", checkpoint.config.shape));
    for layer in &checkpoint.weights.layers {
        hash.update(float_bytes(&layer.mixer_norm));
        hash.update(float_bytes(&layer.moe_norm));
    }
    hash.update(&*checkpoint.weights.embedding.scales);
    hash.finalize().into()
}
