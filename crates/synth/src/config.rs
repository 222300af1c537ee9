//! The configuration of a synthetic checkpoint: the published one with other sizes.

use lily_model::{Config, LayerKind, ModelError, Shape};
use serde_json::{Map, Value, json};

use crate::layout::PREFIX;

/// A synthetic configuration differs from this one in sizes and token ids only.
const PUBLISHED: &str = include_str!("../../../testdata/qwen3.6/config.json");

/// The published configuration with other sizes, checked as the engine checks it: a shape that no loader takes is an
/// error here.
pub fn config(shape: &Shape) -> Result<Value, ModelError> {
    const FILE: &str = "the synthetic config.json";
    let damaged = |reason: String| ModelError::Damaged { file: FILE.into(), reason };
    let mut config: Value = serde_json::from_str(PUBLISHED).map_err(|e| damaged(e.to_string()))?;
    for (key, size) in [
        ("hidden_size", shape.hidden),
        ("num_hidden_layers", shape.layers),
        ("vocab_size", shape.vocab),
        ("num_attention_heads", shape.query_heads),
        ("num_key_value_heads", shape.kv_heads),
        ("linear_num_key_heads", shape.delta_key_heads),
        ("linear_num_value_heads", shape.delta_value_heads),
        ("num_experts", shape.experts),
        ("num_experts_per_tok", shape.experts_per_token),
        ("moe_intermediate_size", shape.expert_width),
        ("shared_expert_intermediate_size", shape.shared_width),
    ] {
        config["text_config"][key] = size.into();
    }
    let kinds = (0..shape.layers).map(|layer| match shape.layer_kind(layer) {
        LayerKind::Delta => "linear_attention",
        LayerKind::Attention => "full_attention",
    });
    config["text_config"]["layer_types"] = kinds.collect();
    if shape.vocab < Shape::QWEN36.vocab {
        special_tokens(&mut config, shape.vocab);
    }
    for key in ["quantization", "quantization_config"] {
        config[key] = quantization(shape.layers);
    }
    let read = Config::parse(FILE, config.to_string().as_bytes())?.shape;
    if read == *shape { Ok(config) } else { Err(damaged(format!("it says {read:?}, not {shape:?}"))) }
}

/// Moves the special tokens to the top of a smaller vocabulary.
fn special_tokens(config: &mut Value, vocab: usize) {
    let from_top = |below: usize| json!(vocab.saturating_sub(below));
    config["eos_token_id"] = json!([from_top(1), from_top(2)]);
    for key in ["bos_token_id", "eos_token_id"] {
        config["text_config"][key] = from_top(2);
    }
    let images = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"];
    for (below, key) in (3..).zip(images) {
        config[key] = from_top(below);
    }
}

/// 4 bits everywhere but in the two gates of each MoE.
fn quantization(layers: usize) -> Value {
    let mut map: Map<String, Value> = [("group_size", json!(64)), ("bits", json!(4)), ("mode", json!("affine"))]
        .map(|(key, value)| (key.to_owned(), value))
        .into_iter()
        .collect();
    for layer in 0..layers {
        for gate in ["gate", "shared_expert_gate"] {
            map.insert(format!("{PREFIX}layers.{layer}.mlp.{gate}"), json!({"group_size": 64, "bits": 8}));
        }
    }
    map.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_of_the_full_size_is_the_published_one() {
        assert_eq!(config(&Shape::QWEN36).unwrap(), serde_json::from_str::<Value>(PUBLISHED).unwrap());
    }

    #[test]
    fn a_shape_that_no_loader_takes_is_refused_by_field() {
        let error = config(&Shape { hidden: 100, ..Shape::DEMO }).unwrap_err().to_string();
        assert!(error.contains("hidden_size is 100"), "{error}");
    }
}
