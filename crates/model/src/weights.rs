//! Tensor names to typed weights. Each tensor is consumed exactly once; what is left over is an error.

use safetensors::tensor::Dtype;

use crate::config::Config;
use crate::error::ModelError;
use crate::quant::{QuantMatrix, bf16_at};
use crate::safetensors::{Tensor, Tensors};
use crate::shape::{LayerKind, Shape};

/// All weights of the text model.
#[derive(Debug)]
pub struct Weights {
    /// `[vocab, hidden]`, one row per token.
    pub embedding: QuantMatrix,
    /// The layers in order.
    pub layers: Vec<LayerWeights>,
    /// Multiplier of the final norm, `[hidden]`.
    pub norm: Vec<f32>,
    /// `[vocab, hidden]`.
    pub head: QuantMatrix,
    /// Tensors in the opened shards that were skipped by name (vision tower, multi-token prediction), and their bytes.
    pub skipped: (usize, usize),
}

/// One layer: `h = x + mixer(norm(x)); out = h + moe(norm(h))`.
#[derive(Debug)]
pub struct LayerWeights {
    /// Multiplier of the norm before the mixer, `[hidden]`.
    pub mixer_norm: Vec<f32>,
    /// Attention or gated delta rule.
    pub mixer: Mixer,
    /// Multiplier of the norm before the MoE, `[hidden]`.
    pub moe_norm: Vec<f32>,
    /// Router, experts and shared expert.
    pub moe: MoeWeights,
}

/// The two kinds of mixer.
#[derive(Debug)]
pub enum Mixer {
    /// Gated DeltaNet.
    Delta(DeltaWeights),
    /// Grouped-query attention.
    Attention(AttentionWeights),
}

/// A gated DeltaNet mixer.
#[derive(Debug)]
pub struct DeltaWeights {
    /// `[conv_width, hidden]`: queries, keys and values end to end.
    pub qkv: QuantMatrix,
    /// `[delta_value_width, hidden]`: the output gate.
    pub z: QuantMatrix,
    /// `[delta_value_heads, hidden]`: beta before its sigmoid.
    pub b: QuantMatrix,
    /// `[delta_value_heads, hidden]`: input of the decay.
    pub a: QuantMatrix,
    /// Convolution taps `[conv_width, 4]`, the newest input last.
    pub conv: Vec<f32>,
    /// `[delta_value_heads]`.
    pub a_log: Vec<f32>,
    /// `[delta_value_heads]`.
    pub dt_bias: Vec<f32>,
    /// Multiplier of the gated norm, `[128]`, shared by the heads.
    pub norm: Vec<f32>,
    /// `[hidden, delta_value_width]`.
    pub out: QuantMatrix,
}

/// A grouped-query attention mixer.
#[derive(Debug)]
pub struct AttentionWeights {
    /// `[2 * query_width, hidden]`: per head 256 rows of query, then 256 of gate.
    pub q: QuantMatrix,
    /// `[kv_width, hidden]`.
    pub k: QuantMatrix,
    /// `[kv_width, hidden]`.
    pub v: QuantMatrix,
    /// Multiplier of the query norm, `[256]`.
    pub q_norm: Vec<f32>,
    /// Multiplier of the key norm, `[256]`.
    pub k_norm: Vec<f32>,
    /// `[hidden, query_width]`.
    pub o: QuantMatrix,
}

/// The mixture of experts of a layer.
#[derive(Debug)]
pub struct MoeWeights {
    /// `[experts, hidden]`, 8-bit in the published checkpoint.
    pub router: QuantMatrix,
    /// The routed experts, stacked.
    pub experts: Mlp,
    /// The expert that every token visits.
    pub shared: Mlp,
    /// `[1, hidden]`: the gate of the shared expert, before its sigmoid.
    pub shared_gate: QuantMatrix,
}

/// A SwiGLU block or a stack of them: `down(silu(gate x) * up x)`.
#[derive(Debug)]
pub struct Mlp {
    /// `[width, hidden]` per expert.
    pub gate: QuantMatrix,
    /// `[width, hidden]` per expert.
    pub up: QuantMatrix,
    /// `[hidden, width]` per expert.
    pub down: QuantMatrix,
}

/// Spellings of (text model, head): converted by mlx-vlm, raw or wrapped, text only.
const PREFIXES: [(&str, &str); 4] = [
    ("language_model.model.", "language_model.lm_head"),
    ("model.language_model.", "lm_head"),
    ("model.language_model.", "model.lm_head"),
    ("model.", "lm_head"),
];

const USE_CONVERTED: &str = "use mlx-community/Qwen3.6-35B-A3B-4bit (`lily pull`), or convert with mlx_lm.convert";

/// Layer norms that lie nearer to 0 than to 1 on average are zero-centred, see [`Weights::take_from`].
const SMALLEST_MEAN_NORM: f32 = 0.5;

impl Weights {
    /// Types all tensors of a checkpoint. `vision_tower.*` and multi-token prediction tensors are skipped; any other
    /// tensor that the model does not have is an error.
    ///
    /// Qwen's own files store layer norms zero-centred and the convolution as `[channels, 1, 4]`; converters add the 1
    /// and transpose in one pass, so the shape of the convolution tells which it is. Raw files are refused, and so is
    /// a file whose norms contradict its convolution.
    pub fn take_from(config: &Config, mut tensors: Tensors) -> Result<Weights, ModelError> {
        refuse_known_layouts(&tensors)?;
        let skipped = tensors.skip(is_unused);
        if skipped.0 > 0 {
            tracing::info!(tensors = skipped.0, bytes = skipped.1, "vision and multi-token prediction are not used");
        }
        let (prefix, head) = spelling(&tensors);
        let shape = &config.shape;
        let mut take = Taker { config, tensors, prefix: prefix.into() };
        let embedding = take.quantized("embed_tokens", [shape.vocab, shape.hidden])?;
        let layers = (0..shape.layers).map(|layer| take.layer(layer)).collect::<Result<Vec<_>, _>>()?;
        let norm = take.vector("norm.weight", &[shape.hidden])?;
        take.prefix = String::new();
        let head = take.quantized(head, [shape.vocab, shape.hidden])?;
        refuse_zero_centred_norms(&layers)?;
        let mut left = take.tensors.iter();
        match left.next() {
            None => Ok(Weights { embedding, layers, norm, head, skipped }),
            Some((first, _)) => Err(ModelError::UnknownTensors { first: first.clone(), count: 1 + left.count() }),
        }
    }

    /// Bytes of all quantized tensors: what a backend maps or repacks.
    pub fn quantized_bytes(&self) -> usize {
        self.matrices().map(QuantMatrix::total_bytes).sum()
    }

    /// Bytes of weights that decoding one token touches: all dense matrices, the chosen experts, one row of the embedding.
    pub fn bytes_per_token(&self, shape: &Shape) -> usize {
        let touched = |m: &QuantMatrix| match m.experts {
            1 => m.total_bytes(),
            experts => m.total_bytes() / experts * shape.experts_per_token,
        };
        let embedding = &self.embedding;
        let all: usize = self.matrices().map(touched).sum();
        all - embedding.total_bytes() + embedding.total_bytes() / embedding.rows()
    }

    /// Matrices that one kernel reads as if they were one, in the order in which it has their rows; all others stand alone.
    pub fn stacks(&self) -> Vec<Vec<&QuantMatrix>> {
        let layers = self.layers.iter().flat_map(LayerWeights::stacks);
        [vec![&self.embedding]].into_iter().chain(layers).chain([vec![&self.head]]).collect()
    }

    /// Every quantized matrix, in the order in which a forward pass needs them.
    pub fn matrices(&self) -> impl Iterator<Item = &QuantMatrix> {
        let layers = self.layers.iter().flat_map(|layer| {
            let mixer = match &layer.mixer {
                Mixer::Delta(d) => vec![&d.qkv, &d.z, &d.b, &d.a, &d.out],
                Mixer::Attention(a) => vec![&a.q, &a.k, &a.v, &a.o],
            };
            let MoeWeights { router, experts, shared, shared_gate } = &layer.moe;
            let moe = [
                router,
                shared_gate,
                &experts.gate,
                &experts.up,
                &experts.down,
                &shared.gate,
                &shared.up,
                &shared.down,
            ];
            mixer.into_iter().chain(moe)
        });
        std::iter::once(&self.embedding).chain(layers).chain(std::iter::once(&self.head))
    }
}

impl LayerWeights {
    /// Those of [`Weights::stacks`] that are this layer's.
    pub fn stacks(&self) -> Vec<Vec<&QuantMatrix>> {
        let [input, out] = match &self.mixer {
            Mixer::Delta(delta) => [delta.input().to_vec(), vec![&delta.out]],
            Mixer::Attention(attention) => [attention.input().to_vec(), vec![&attention.o]],
        };
        let moe = &self.moe;
        let down = [vec![&moe.experts.down], vec![&moe.shared.down]];
        [input, out, moe.routers().to_vec(), moe.gate_up().to_vec()].into_iter().chain(down).collect()
    }
}

impl DeltaWeights {
    /// What a kernel reads together: queries, keys and values, the output gate, beta, the input of the decay.
    pub fn input(&self) -> [&QuantMatrix; 4] {
        [&self.qkv, &self.z, &self.b, &self.a]
    }
}

impl AttentionWeights {
    /// What a kernel reads together: queries with their gates, keys, values.
    pub fn input(&self) -> [&QuantMatrix; 3] {
        [&self.q, &self.k, &self.v]
    }
}

impl MoeWeights {
    /// What a kernel reads together: the router and the gate of the shared expert.
    pub fn routers(&self) -> [&QuantMatrix; 2] {
        [&self.router, &self.shared_gate]
    }

    /// What a kernel reads together: gates of all experts, their ups, gate and up of the shared expert.
    pub fn gate_up(&self) -> [&QuantMatrix; 4] {
        [&self.experts.gate, &self.experts.up, &self.shared.gate, &self.shared.up]
    }
}

/// The spelling that fits best; the first if none does, so that a missing tensor is named as it is published.
fn spelling(tensors: &Tensors) -> (&'static str, &'static str) {
    let fit = |(prefix, head): &(&str, &str)| {
        let found = [format!("{prefix}norm.weight"), format!("{head}.weight")].map(|name| tensors.contains(&name));
        found.into_iter().filter(|found| *found).count()
    };
    let [published, others @ ..] = PREFIXES;
    others.into_iter().fold(published, |best, other| if fit(&other) > fit(&best) { other } else { best })
}

/// Whether the name, of a tensor or of a module, is of a part that lily does not run.
pub(crate) fn is_unused(name: &str) -> bool {
    name.starts_with("vision_tower.") || name.starts_with("mtp.") || name.contains(".mtp.")
}

/// Names a layout that lily does not read before a missing tensor would be reported for it.
fn refuse_known_layouts(tensors: &Tensors) -> Result<(), ModelError> {
    let refuse = |found: String| Err(ModelError::Layout { found, advice: USE_CONVERTED });
    for (name, tensor) in tensors.iter() {
        if is_unused(name) {
            continue;
        }
        if name.ends_with("conv1d.weight") && tensor.shape.last() != Some(&1) {
            return refuse(format!(
                "raw Hugging Face weights ({name} is {:?}, its last dimension not 1)",
                tensor.shape
            ));
        }
        if name.contains(".mlp.experts.gate_up_proj") {
            return refuse(format!("fused experts ({name})"));
        }
        if name.contains(".mlp.experts.") {
            return refuse(format!("experts as separate tensors ({name})"));
        }
        if name.contains("in_proj_qkvz") || name.contains("in_proj_ba") {
            return refuse(format!("the fused projections of Qwen3-Next ({name})"));
        }
        for (suffix, method) in
            [(".qweight", "GPTQ or AWQ"), (".weight_packed", "compressed-tensors"), (".weight_scale_inv", "FP8")]
        {
            if name.ends_with(suffix) {
                return refuse(format!("{method} quantization ({name})"));
            }
        }
    }
    Ok(())
}

fn refuse_zero_centred_norms(layers: &[LayerWeights]) -> Result<(), ModelError> {
    let (mut sum, mut count) = (0.0, 0);
    for layer in layers {
        sum += layer.mixer_norm.iter().sum::<f32>();
        count += layer.mixer_norm.len();
    }
    let mean = sum / count as f32;
    if mean >= SMALLEST_MEAN_NORM {
        return Ok(());
    }
    Err(ModelError::Layout {
        found: format!(
            "zero-centred norms (mean of input_layernorm {mean:.3}, not near 1) beside a converted convolution"
        ),
        advice: USE_CONVERTED,
    })
}

/// Takes tensors out of the checkpoint one by one, checking dtype and shape.
struct Taker<'a> {
    config: &'a Config,
    tensors: Tensors,
    prefix: String,
}

impl Taker<'_> {
    fn layer(&mut self, layer: usize) -> Result<LayerWeights, ModelError> {
        let shape = &self.config.shape;
        let p = format!("layers.{layer}.");
        Ok(LayerWeights {
            mixer_norm: self.vector(&format!("{p}input_layernorm.weight"), &[shape.hidden])?,
            mixer: match shape.layer_kind(layer) {
                LayerKind::Delta => Mixer::Delta(self.delta(&format!("{p}linear_attn."))?),
                LayerKind::Attention => Mixer::Attention(self.attention(&format!("{p}self_attn."))?),
            },
            moe_norm: self.vector(&format!("{p}post_attention_layernorm.weight"), &[shape.hidden])?,
            moe: self.moe(&format!("{p}mlp."))?,
        })
    }

    fn delta(&mut self, p: &str) -> Result<DeltaWeights, ModelError> {
        let s = &self.config.shape;
        let (heads, values) = (s.delta_value_heads, s.delta_value_width());
        Ok(DeltaWeights {
            qkv: self.quantized(&format!("{p}in_proj_qkv"), [s.conv_width(), s.hidden])?,
            z: self.quantized(&format!("{p}in_proj_z"), [values, s.hidden])?,
            b: self.quantized(&format!("{p}in_proj_b"), [heads, s.hidden])?,
            a: self.quantized(&format!("{p}in_proj_a"), [heads, s.hidden])?,
            conv: self.vector(&format!("{p}conv1d.weight"), &[s.conv_width(), Shape::CONV_TAPS, 1])?,
            a_log: self.vector(&format!("{p}A_log"), &[heads])?,
            dt_bias: self.vector(&format!("{p}dt_bias"), &[heads])?,
            norm: self.vector(&format!("{p}norm.weight"), &[Shape::DELTA_HEAD_DIM])?,
            out: self.quantized(&format!("{p}out_proj"), [s.hidden, values])?,
        })
    }

    fn attention(&mut self, p: &str) -> Result<AttentionWeights, ModelError> {
        let s = &self.config.shape;
        Ok(AttentionWeights {
            q: self.quantized(&format!("{p}q_proj"), [2 * s.query_width(), s.hidden])?,
            k: self.quantized(&format!("{p}k_proj"), [s.kv_width(), s.hidden])?,
            v: self.quantized(&format!("{p}v_proj"), [s.kv_width(), s.hidden])?,
            q_norm: self.vector(&format!("{p}q_norm.weight"), &[Shape::HEAD_DIM])?,
            k_norm: self.vector(&format!("{p}k_norm.weight"), &[Shape::HEAD_DIM])?,
            o: self.quantized(&format!("{p}o_proj"), [s.hidden, s.query_width()])?,
        })
    }

    fn moe(&mut self, p: &str) -> Result<MoeWeights, ModelError> {
        let s = &self.config.shape;
        Ok(MoeWeights {
            router: self.quantized(&format!("{p}gate"), [s.experts, s.hidden])?,
            experts: self.mlp(&format!("{p}switch_mlp."), Some(s.experts), s.expert_width)?,
            shared: self.mlp(&format!("{p}shared_expert."), None, s.shared_width)?,
            shared_gate: self.quantized(&format!("{p}shared_expert_gate"), [1, s.hidden])?,
        })
    }

    fn mlp(&mut self, p: &str, experts: Option<usize>, width: usize) -> Result<Mlp, ModelError> {
        let hidden = self.config.shape.hidden;
        Ok(Mlp {
            gate: self.matrix(&format!("{p}gate_proj"), experts, [width, hidden])?,
            up: self.matrix(&format!("{p}up_proj"), experts, [width, hidden])?,
            down: self.matrix(&format!("{p}down_proj"), experts, [hidden, width])?,
        })
    }

    fn quantized(&mut self, module: &str, size: [usize; 2]) -> Result<QuantMatrix, ModelError> {
        self.matrix(module, None, size)
    }

    /// The three tensors of a quantized module; with `experts` they have that many matrices in a leading dimension.
    fn matrix(&mut self, module: &str, experts: Option<usize>, size: [usize; 2]) -> Result<QuantMatrix, ModelError> {
        let name = format!("{}{module}", self.prefix);
        let [outputs, inputs] = size;
        let weight = self.tensors.take(&format!("{name}.weight"))?;
        if weight.dtype != Dtype::U32 {
            return Err(ModelError::Layout {
                found: format!("unquantized {name}.weight ({})", weight.describe()),
                advice: USE_CONVERTED,
            });
        }
        let bits = self.config.quantization.bits(&name);
        let dims = |last: usize| experts.into_iter().chain([outputs, last]).collect::<Vec<usize>>();
        let words = bits.bytes(inputs) / 4;
        if weight.shape != dims(words) {
            return Err(ModelError::Tensor {
                name: format!("{name}.weight"),
                found: weight.describe(),
                expected: format!("U32 {:?} ({}-bit codes as config.json says)", dims(words), bits.count()),
            });
        }
        let groups = dims(inputs / Shape::GROUP);
        let scales = self.typed(&format!("{name}.scales"), &groups, &[Dtype::BF16])?;
        let biases = self.typed(&format!("{name}.biases"), &groups, &[Dtype::BF16])?;
        Ok(QuantMatrix {
            name,
            bits,
            experts: experts.unwrap_or(1),
            outputs,
            inputs,
            codes: weight.bytes,
            scales: scales.bytes,
            biases: biases.bytes,
        })
    }

    /// A small unquantized tensor, widened to f32.
    fn vector(&mut self, name: &str, dims: &[usize]) -> Result<Vec<f32>, ModelError> {
        let name = format!("{}{name}", self.prefix);
        let tensor = self.typed(&name, dims, &[Dtype::BF16, Dtype::F32])?;
        let bytes: &[u8] = &tensor.bytes;
        Ok(match tensor.dtype {
            Dtype::BF16 => (0..bytes.len() / 2).map(|i| bf16_at(bytes, i)).collect(),
            _ => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        })
    }

    fn typed(&mut self, name: &str, dims: &[usize], dtypes: &[Dtype]) -> Result<Tensor, ModelError> {
        let tensor = self.tensors.take(name)?;
        if tensor.shape == dims && dtypes.contains(&tensor.dtype) {
            return Ok(tensor);
        }
        let dtypes: Vec<String> = dtypes.iter().map(|d| format!("{d:?}")).collect();
        Err(ModelError::Tensor {
            name: name.into(),
            found: tensor.describe(),
            expected: format!("{} {dims:?}", dtypes.join(" or ")),
        })
    }
}
