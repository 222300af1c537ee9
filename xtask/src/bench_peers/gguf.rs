//! A GGUF file of random Q4_0 weights, for the peer's speed: as many bytes per token as lily's checkpoint of the shape.
//!
//! Matrices are Q4_0 (32 weights in 18 bytes: an f16 scale and 4-bit codes around 8), vectors, routers and the small
//! delta projections F32, as llama.cpp's own converter leaves them. The format is version 3 of
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use half::f16;
use lily_model::{LayerKind, Shape};
use lily_synth::{hash, key};

/// Standard deviation of all weights: an input of deviation 1 and width 2048 gives an output near 1.
const DEVIATION: f32 = 0.02;
/// That of a code, uniform over 16 values.
const CODE_DEVIATION: f32 = 4.61;
/// Of every tensor and of the data as a whole.
const ALIGNMENT: u64 = 32;
const BLOCK_WEIGHTS: usize = 32;
const BLOCK_BYTES: usize = 18;

/// Numbers of the format.
mod code {
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const TENSOR_F32: u32 = 0;
    pub const TENSOR_Q4_0: u32 = 2;
    /// "mostly Q4_0" of `general.file_type`.
    pub const FILE_Q4_0: u32 = 2;
}

#[derive(Clone, Copy, PartialEq)]
enum Content {
    Q4,
    Ones,
    /// Uniform around 0 with [`DEVIATION`].
    Weights,
    /// Minus the decay rates, `-exp(-3 to 1)`.
    Decays,
}

struct Tensor {
    name: String,
    /// Innermost first.
    dims: Vec<usize>,
    content: Content,
}

impl Tensor {
    fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    fn bytes(&self) -> u64 {
        let n = self.elements();
        (if self.content == Content::Q4 { n / BLOCK_WEIGHTS * BLOCK_BYTES } else { n * 4 }) as u64
    }

    /// Writes the data, a piece at a time.
    fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        let key = key(0, &self.name);
        let unit = |i: usize| (hash(key, i as u64) >> 40) as f32 / (1 << 24) as f32;
        let number = |i: usize| match self.content {
            Content::Ones => 1.0,
            Content::Decays => -(4.0 * unit(i) - 3.0).exp(),
            Content::Weights | Content::Q4 => DEVIATION * 3f32.sqrt() * (2.0 * unit(i) - 1.0),
        };
        if self.content != Content::Q4 {
            return (0..self.elements()).try_for_each(|i| to.write_all(&number(i).to_le_bytes()));
        }
        let mut block = [0; BLOCK_BYTES];
        block[..2].copy_from_slice(&f16::from_f32(DEVIATION / CODE_DEVIATION).to_le_bytes());
        (0..(self.elements() / BLOCK_WEIGHTS) as u64).try_for_each(|i| {
            block[2..10].copy_from_slice(&hash(key, 2 * i).to_le_bytes());
            block[10..].copy_from_slice(&hash(key, 2 * i + 1).to_le_bytes());
            to.write_all(&block)
        })
    }
}

/// Writes the file; an unfinished one never has its name.
pub fn write(path: &Path, shape: &Shape) -> Result<()> {
    let unfinished = path.with_extension("unfinished");
    let file = File::create(&unfinished).with_context(|| format!("cannot write {}", unfinished.display()))?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    write_to(&mut file, shape)
        .and_then(|()| file.flush())
        .with_context(|| format!("cannot write {}", unfinished.display()))?;
    Ok(std::fs::rename(&unfinished, path)?)
}

fn write_to(to: &mut impl Write, shape: &Shape) -> std::io::Result<()> {
    let tensors = tensors(shape);
    let mut header = Header::default();
    header.metadata(shape);
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(header.entries.to_le_bytes());
    out.append(&mut header.bytes);
    let mut offset = 0u64;
    for tensor in &tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
        let kind = if tensor.content == Content::Q4 { code::TENSOR_Q4_0 } else { code::TENSOR_F32 };
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    let padding = [0; ALIGNMENT as usize];
    let pad = |written: u64| &padding[..(written.next_multiple_of(ALIGNMENT) - written) as usize];
    to.write_all(&out)?;
    to.write_all(pad(out.len() as u64))?;
    for tensor in &tensors {
        tensor.write(to)?;
        to.write_all(pad(tensor.bytes()))?;
    }
    Ok(())
}

/// Key-value pairs.
#[derive(Default)]
struct Header {
    entries: u64,
    bytes: Vec<u8>,
}

impl Header {
    fn put(&mut self, name: &str, kind: u32, value: &[u8]) {
        self.entries += 1;
        string(&mut self.bytes, name);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    fn text(&mut self, name: &str, value: &str) {
        let mut bytes = Vec::new();
        string(&mut bytes, value);
        self.put(name, code::STRING, &bytes);
    }

    fn number(&mut self, name: &str, value: usize) {
        self.put(name, code::U32, &(value as u32).to_le_bytes());
    }

    fn metadata(&mut self, s: &Shape) {
        self.text("general.architecture", "qwen35moe");
        self.text("general.name", "synthetic");
        self.number("general.quantization_version", 2);
        self.number("general.file_type", code::FILE_Q4_0 as usize);
        for (name, value) in [
            ("block_count", s.layers),
            ("context_length", s.max_context),
            ("embedding_length", s.hidden),
            ("feed_forward_length", s.expert_width),
            ("attention.head_count", s.query_heads),
            ("attention.head_count_kv", s.kv_heads),
            ("attention.key_length", Shape::HEAD_DIM),
            ("attention.value_length", Shape::HEAD_DIM),
            ("rope.dimension_count", Shape::ROTARY_DIM),
            ("expert_count", s.experts),
            ("expert_used_count", s.experts_per_token),
            ("expert_feed_forward_length", s.expert_width),
            ("expert_shared_feed_forward_length", s.shared_width),
            ("ssm.conv_kernel", Shape::CONV_TAPS),
            ("ssm.inner_size", s.delta_value_width()),
            ("ssm.state_size", Shape::DELTA_HEAD_DIM),
            ("ssm.time_step_rank", s.delta_value_heads),
            ("ssm.group_count", s.delta_key_heads),
            ("full_attention_interval", Shape::ATTENTION_INTERVAL),
            ("vocab_size", s.vocab),
        ] {
            self.number(&format!("qwen35moe.{name}"), value);
        }
        for (name, value) in [("attention.layer_norm_rms_epsilon", s.rms_eps), ("rope.freq_base", s.rope_theta as f32)]
        {
            self.put(&format!("qwen35moe.{name}"), code::F32, &value.to_le_bytes());
        }
        // How the rotary pairs divide among time, height and width; text has the same position in all three.
        let mut sections = code::I32.to_le_bytes().to_vec();
        sections.extend(4u64.to_le_bytes());
        [11i32, 11, 10, 0].iter().for_each(|n| sections.extend(n.to_le_bytes()));
        self.put("qwen35moe.rope.dimension_sections", code::ARRAY, &sections);
        self.text("tokenizer.ggml.model", "no_vocab");
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Every tensor under the names of llama.cpp's architecture `qwen35moe`.
fn tensors(s: &Shape) -> Vec<Tensor> {
    use Content::{Decays, Ones, Q4, Weights};
    let mut all = Vec::new();
    let mut add = |name: String, content, dims: &[usize]| all.push(Tensor { name, dims: dims.to_vec(), content });
    add("token_embd.weight".into(), Q4, &[s.hidden, s.vocab]);
    add("output_norm.weight".into(), Ones, &[s.hidden]);
    add("output.weight".into(), Q4, &[s.hidden, s.vocab]);
    for layer in 0..s.layers {
        let mut add = |name: &str, content, dims: &[usize]| add(format!("blk.{layer}.{name}"), content, dims);
        add("attn_norm.weight", Ones, &[s.hidden]);
        add("post_attention_norm.weight", Ones, &[s.hidden]);
        match s.layer_kind(layer) {
            LayerKind::Attention => {
                add("attn_q.weight", Q4, &[s.hidden, 2 * s.query_width()]);
                add("attn_k.weight", Q4, &[s.hidden, s.kv_width()]);
                add("attn_v.weight", Q4, &[s.hidden, s.kv_width()]);
                add("attn_output.weight", Q4, &[s.query_width(), s.hidden]);
                add("attn_q_norm.weight", Ones, &[Shape::HEAD_DIM]);
                add("attn_k_norm.weight", Ones, &[Shape::HEAD_DIM]);
            }
            LayerKind::Delta => {
                add("attn_qkv.weight", Q4, &[s.hidden, s.conv_width()]);
                add("attn_gate.weight", Q4, &[s.hidden, s.delta_value_width()]);
                add("ssm_conv1d.weight", Weights, &[Shape::CONV_TAPS, s.conv_width()]);
                add("ssm_dt.bias", Weights, &[s.delta_value_heads]);
                add("ssm_a", Decays, &[s.delta_value_heads]);
                add("ssm_beta.weight", Weights, &[s.hidden, s.delta_value_heads]);
                add("ssm_alpha.weight", Weights, &[s.hidden, s.delta_value_heads]);
                add("ssm_norm.weight", Ones, &[Shape::DELTA_HEAD_DIM]);
                add("ssm_out.weight", Q4, &[s.delta_value_width(), s.hidden]);
            }
        }
        add("ffn_gate_inp.weight", Weights, &[s.hidden, s.experts]);
        add("ffn_gate_inp_shexp.weight", Weights, &[s.hidden]);
        for (suffix, width, experts) in [("exps", s.expert_width, Some(s.experts)), ("shexp", s.shared_width, None)] {
            for (name, dims) in [("gate", [s.hidden, width]), ("up", [s.hidden, width]), ("down", [width, s.hidden])] {
                let dims: Vec<usize> = dims.into_iter().chain(experts).collect();
                add(&format!("ffn_{name}_{suffix}.weight"), Q4, &dims);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_length_its_header_promises() {
        let mut file = Vec::new();
        write_to(&mut file, &lily_synth::TINY).unwrap();
        assert_eq!(&file[..4], b"GGUF");
        let data: u64 = tensors(&lily_synth::TINY).iter().map(|t| t.bytes().next_multiple_of(ALIGNMENT)).sum();
        let header = file.len() as u64 - data;
        assert!(header.is_multiple_of(ALIGNMENT));
        // What stands last before the data: the infos of the last tensors with rising, aligned offsets.
        let last = tensors(&lily_synth::TINY).pop().unwrap();
        let name = file.windows(last.name.len()).position(|w| w == last.name.as_bytes()).unwrap();
        let offset = name + last.name.len() + 4 + 8 * last.dims.len() + 4;
        let offset = u64::from_le_bytes(file[offset..][..8].try_into().unwrap());
        assert_eq!(offset + last.bytes().next_multiple_of(ALIGNMENT), data);
    }

    #[test]
    fn a_token_touches_as_many_bytes_as_in_lilys_checkpoint() {
        let q4: u64 = tensors(&Shape::QWEN36).iter().filter(|t| t.content == Content::Q4).map(Tensor::bytes).sum();
        let lily = lily_synth::total_bytes(&Shape::QWEN36) as f64;
        // Both spend 4.5 bits on a weight; lily has the small projections among its quantized ones.
        assert!((q4 as f64 / lily - 1.0).abs() < 0.01, "{q4} {lily}");
    }
}
