//! Which tensors a checkpoint has, and what they are filled with.
//!
//! Gains are those of the oracle's random checkpoints: a linear's weights have the deviation `gain / sqrt(inputs)`, so
//! that an input of deviation 1 gives an output of deviation `gain`. Whatever writes to the residual stream is scaled
//! down by the root of the number of layers, so that the stream stays near the size of an embedding row.

use lily_model::{LayerKind, Shape};

use crate::fill::Fill;

/// What stands before the names of the text model, in the files and in the quantization block alike.
pub(crate) const PREFIX: &str = "language_model.model.";

/// One tensor to write.
#[derive(Debug)]
pub struct Spec {
    /// Full name in the file.
    pub name: String,
    /// Dimensions, outermost first.
    pub dims: Vec<usize>,
    /// Its content.
    pub fill: Fill,
    /// What the content is made from; the biases of a matrix share the seed of its scales.
    pub seed_name: String,
}

impl Spec {
    /// Size of its data in bytes.
    pub fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.fill.element_bytes()
    }

    /// Element type as the header spells it.
    pub fn dtype(&self) -> &'static str {
        if matches!(self.fill, Fill::Codes) { "U32" } else { "BF16" }
    }
}

/// Every tensor of the text model, in module order.
pub fn tensors(shape: &Shape) -> Vec<Spec> {
    let mut layout = Layout { shape, specs: Vec::new() };
    let (hidden, vocab) = (shape.hidden, shape.vocab);
    layout.linear(&format!("{PREFIX}embed_tokens"), [vocab, hidden], (hidden as f32).sqrt());
    for layer in 0..shape.layers {
        layout.layer(layer);
    }
    layout.norm(&format!("{PREFIX}norm"), hidden, 1.5, 0.5);
    layout.linear("language_model.lm_head", [vocab, hidden], 2.2);
    layout.specs
}

struct Layout<'a> {
    shape: &'a Shape,
    specs: Vec<Spec>,
}

impl Layout<'_> {
    fn layer(&mut self, layer: usize) {
        let p = format!("{PREFIX}layers.{layer}.");
        self.norm(&format!("{p}input_layernorm"), self.shape.hidden, 1.1, 0.35);
        match self.shape.layer_kind(layer) {
            LayerKind::Delta => self.delta(&format!("{p}linear_attn.")),
            LayerKind::Attention => self.attention(&format!("{p}self_attn.")),
        }
        self.norm(&format!("{p}post_attention_layernorm"), self.shape.hidden, 1.2, 0.35);
        self.moe(&format!("{p}mlp."));
    }

    fn delta(&mut self, p: &str) {
        let s = self.shape;
        let (heads, values) = (s.delta_value_heads, s.delta_value_width());
        self.plain(format!("{p}conv1d.weight"), vec![s.conv_width(), Shape::CONV_TAPS, 1], Fill::Taps);
        self.linear(&format!("{p}in_proj_qkv"), [s.conv_width(), s.hidden], 1.3);
        self.linear(&format!("{p}in_proj_z"), [values, s.hidden], 1.5);
        self.linear(&format!("{p}in_proj_b"), [heads, s.hidden], 1.2);
        self.linear(&format!("{p}in_proj_a"), [heads, s.hidden], 0.8);
        self.plain(format!("{p}dt_bias"), vec![heads], Fill::TimeSteps);
        self.plain(format!("{p}A_log"), vec![heads], Fill::DecayRates);
        self.norm(&format!("{p}norm"), Shape::DELTA_HEAD_DIM, 0.9, 0.25);
        self.linear(&format!("{p}out_proj"), [s.hidden, values], 1.2 * self.residual_gain());
    }

    fn attention(&mut self, p: &str) {
        let s = self.shape;
        self.linear(&format!("{p}q_proj"), [2 * s.query_width(), s.hidden], 1.2);
        self.linear(&format!("{p}k_proj"), [s.kv_width(), s.hidden], 1.2);
        self.linear(&format!("{p}v_proj"), [s.kv_width(), s.hidden], 1.2);
        self.linear(&format!("{p}o_proj"), [s.hidden, s.query_width()], 3.0 * self.residual_gain());
        self.norm(&format!("{p}q_norm"), Shape::HEAD_DIM, 1.4, 0.4);
        self.norm(&format!("{p}k_norm"), Shape::HEAD_DIM, 1.4, 0.4);
    }

    fn moe(&mut self, p: &str) {
        let s = self.shape;
        let residual = self.residual_gain();
        self.quantized(&format!("{p}gate"), &[s.experts, s.hidden], 2.0, 8);
        self.quantized(&format!("{p}shared_expert_gate"), &[1, s.hidden], 1.2, 8);
        for (mlp, experts, width, down) in [
            ("switch_mlp", Some(s.experts), s.expert_width, 0.6 * residual),
            ("shared_expert", None, s.shared_width, residual),
        ] {
            for (name, outputs, inputs, gain) in [
                ("gate_proj", width, s.hidden, 1.3),
                ("up_proj", width, s.hidden, 1.3),
                ("down_proj", s.hidden, width, down),
            ] {
                let dims: Vec<usize> = experts.into_iter().chain([outputs, inputs]).collect();
                self.quantized(&format!("{p}{mlp}.{name}"), &dims, gain, 4);
            }
        }
    }

    /// 0.1 for 40 layers; the oracle's 4 and 8 layers have 0.28 and 0.22.
    fn residual_gain(&self) -> f32 {
        0.62 / (self.shape.layers as f32).sqrt()
    }

    fn linear(&mut self, module: &str, dims: [usize; 2], gain: f32) {
        self.quantized(module, &dims, gain, 4);
    }

    /// The three tensors of a module of logical dimensions `dims`.
    fn quantized(&mut self, module: &str, dims: &[usize], gain: f32, bits: usize) {
        let inputs = dims[dims.len() - 1];
        let with_last = |last: usize| dims[..dims.len() - 1].iter().copied().chain([last]).collect::<Vec<_>>();
        let codes = (1 << bits) as f32;
        // A uniform integer below n has the deviation sqrt((n^2 - 1) / 12).
        let step = gain / (inputs as f32).sqrt() / ((codes * codes - 1.0) / 12.0).sqrt();
        let groups = with_last(inputs / Shape::GROUP);
        let middle = (codes - 1.0) / 2.0;
        let scales = format!("{module}.scales");
        self.plain(format!("{module}.weight"), with_last(inputs * bits / 32), Fill::Codes);
        self.plain(scales.clone(), groups.clone(), Fill::Scales { step });
        self.specs.push(Spec {
            name: format!("{module}.biases"),
            dims: groups,
            fill: Fill::Biases { step, middle },
            seed_name: scales,
        });
    }

    fn norm(&mut self, module: &str, width: usize, mean: f32, spread: f32) {
        self.plain(format!("{module}.weight"), vec![width], Fill::Uniform { mean, spread });
    }

    fn plain(&mut self, name: String, dims: Vec<usize>, fill: Fill) {
        self.specs.push(Spec { seed_name: name.clone(), name, dims, fill });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_full_size_has_the_tensors_of_the_published_text_model() {
        let published: BTreeSet<String> = include_str!("../../../testdata/qwen3.6/tensors.tsv")
            .lines()
            .skip(1)
            .filter(|line| line.starts_with("language_model."))
            .map(|line| line.rsplit_once('\t').unwrap().0.to_owned())
            .collect();
        let synthetic: BTreeSet<String> = tensors(&Shape::QWEN36)
            .iter()
            .map(|spec| {
                let dims: Vec<String> = spec.dims.iter().map(usize::to_string).collect();
                format!("{}\t{}\t{}\t{}", spec.name, spec.dtype(), dims.join("x"), spec.bytes())
            })
            .collect();
        assert_eq!(published.len(), 1757);
        assert_eq!(synthetic, published);
    }
}
