//! What config.json may say, and how a refusal names the field, what was found and what was expected.

use crate::parts::{Parts, assert_names, testdata};
use lily_model::config::eos_of;
use lily_model::{Bits, Config, ModelError, Shape};
use serde_json::{Value, json};

fn tiny() -> Value {
    serde_json::from_slice(&std::fs::read(testdata("tiny/config.json")).unwrap()).unwrap()
}

fn published() -> Value {
    serde_json::from_slice(&std::fs::read(testdata("qwen3.6/config.json")).unwrap()).unwrap()
}

fn parse(config: &Value) -> Result<Config, ModelError> {
    Config::parse("config.json", config.to_string().as_bytes())
}

/// The message for a published configuration with one field of the text part changed; null counts as absent.
fn refusal(key: &str, value: Value) -> String {
    let mut config = published();
    config["text_config"][key] = value;
    parse(&config).unwrap_err().to_string()
}

#[test]
fn the_published_configuration_is_qwen36() {
    let config = parse(&published()).unwrap();
    assert_eq!(config.shape, Shape::QWEN36);
    assert_eq!(Vec::from_iter(config.eos_token_ids), [248_044, 248_046]);
    let quantization = config.quantization;
    for (module, bits) in [
        ("language_model.model.embed_tokens", Bits::Four),
        ("language_model.lm_head", Bits::Four),
        ("language_model.model.layers.39.mlp.gate", Bits::Eight),
        ("model.language_model.layers.0.mlp.shared_expert_gate", Bits::Eight),
        ("model.layers.7.mlp.gate", Bits::Eight),
        ("language_model.model.layers.0.mlp.shared_expert.gate_proj", Bits::Four),
        ("language_model.model.layers.0.mlp.switch_mlp.gate_proj", Bits::Four),
    ] {
        assert_eq!(quantization.bits(module), bits, "{module}");
    }
}

#[test]
fn a_flat_configuration_says_the_same_as_a_nested_one() {
    let nested = published();
    let mut flat = nested["text_config"].clone();
    flat["quantization"] = nested["quantization"].clone();
    flat["eos_token_id"] = nested["eos_token_id"].clone();
    assert_eq!(parse(&flat).unwrap(), parse(&nested).unwrap());
    flat["head_dim"] = json!(64);
    assert_names(&parse(&flat).unwrap_err().to_string(), &["head_dim is 64"]);
}

#[test]
fn a_flat_checkpoint_opens() {
    let mut parts = Parts::tiny_with(|parts| {
        parts.rename(|name| Some(name.strip_prefix("language_model.")?.to_owned()));
        let quantization = parts.config["quantization"].take();
        parts.config = parts.config["text_config"].take();
        parts.config["quantization"] = quantization;
    });
    parts.open().unwrap();
    parts.config["model_type"] = json!("qwen3_5_moe_text");
    parts.open().unwrap();
}

#[test]
fn expert_weights_are_renormalised_when_the_field_is_absent_and_other_models_are_refused() {
    assert!(published()["text_config"].get("norm_topk_prob").is_none());
    assert_names(&refusal("norm_topk_prob", json!(false)), &["text_config.norm_topk_prob is false", "expected true"]);
    let mut config = published();
    config["text_config"]["norm_topk_prob"] = json!(true);
    parse(&config).unwrap();
}

#[test]
fn stop_tokens_are_the_union_of_ints_and_lists_in_every_place() {
    let mut config = tiny();
    for (top, text, expected) in [
        (json!(7), json!(7), vec![7]),
        (json!([9, 8]), json!(7), vec![7, 8, 9]),
        (json!([]), json!([5, 5]), vec![5]),
        (json!(null), json!(6), vec![6]),
        (json!(null), json!(null), vec![]),
    ] {
        config["eos_token_id"] = top;
        config["text_config"]["eos_token_id"] = text;
        assert_eq!(Vec::from_iter(parse(&config).unwrap().eos_token_ids), expected);
    }
    let generation = br#"{"eos_token_id": [248046, 248044], "top_k": 20}"#;
    assert_eq!(Vec::from_iter(eos_of("generation_config.json", generation).unwrap()), [248_044, 248_046]);
    assert!(eos_of("generation_config.json", b"{}").unwrap().is_empty());
    for bad in [json!(-1), json!("<|im_end|>"), json!([1.5]), json!([4_294_967_296u64])] {
        config["eos_token_id"] = bad;
        assert_names(&parse(&config).unwrap_err().to_string(), &["eos_token_id", "a token id"]);
    }
}

#[test]
fn other_models_are_refused_by_field() {
    for (change, names) in [
        (json!({"model_type": "qwen3_5"}), ["model_type is \"qwen3_5\"", "qwen3_5_moe"]),
        (json!({"model_type": "qwen3_next"}), ["model_type is \"qwen3_next\"", "qwen3_5_moe"]),
        (json!({"model_type": null}), ["model_type is absent", "qwen3_5_moe"]),
        (json!({"text_config": 3}), ["text_config is 3", "an object"]),
        (json!({"tie_word_embeddings": true}), ["tie_word_embeddings is true", "expected false"]),
    ] {
        let mut config = published();
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        assert_names(&parse(&config).unwrap_err().to_string(), &names);
    }
    for (key, value, expected) in [
        ("model_type", json!("qwen3_5_text"), "qwen3_5_moe"),
        ("head_dim", json!(128), "256"),
        ("head_dim", json!(null), "256"),
        ("linear_key_head_dim", json!(64), "128"),
        ("linear_value_head_dim", json!(256), "128"),
        ("linear_conv_kernel_dim", json!(3), "4"),
        ("hidden_act", json!("gelu"), "silu"),
        ("attention_bias", json!(true), "false"),
        ("attn_output_gate", json!(false), "true"),
        ("tie_word_embeddings", json!(true), "false"),
        ("decoder_sparse_step", json!(2), "1"),
        ("mlp_only_layers", json!([0]), "[]"),
        ("full_attention_interval", json!(2), "4"),
        ("partial_rotary_factor", json!(1), "0.25"),
        ("hidden_size", json!(2000), "a multiple of the quantization group 64"),
        ("moe_intermediate_size", json!(96), "a multiple of the quantization group 64"),
        ("num_hidden_layers", json!(36), "40 layer_types"),
        ("num_hidden_layers", json!(0), "an integer from 1"),
        ("num_experts", json!(null), "an integer from 1"),
        ("num_experts", json!("256"), "an integer from 1"),
        ("vocab_size", json!(1u64 << 40), "an integer from 1"),
        ("num_key_value_heads", json!(3), "a divisor of num_attention_heads = 16"),
        ("linear_num_key_heads", json!(5), "a divisor of linear_num_value_heads = 32"),
        ("num_experts_per_tok", json!(257), "an integer from 1 to 256"),
        ("rms_norm_eps", json!(0), "a positive number"),
        ("rms_norm_eps", json!(1e-60), "a positive number"),
        ("rope_parameters", json!([]), "an object"),
        ("rope_parameters", json!({"rope_type": "yarn", "rope_theta": 1e7}), "default"),
        ("rope_parameters", json!({"rope_theta": -1}), "a positive number"),
        ("rope_parameters", json!({"rope_theta": 1e7, "partial_rotary_factor": 0.5}), "0.25"),
        ("layer_types", json!("full_attention"), "full_attention in every fourth layer"),
        ("layer_types", json!(vec!["full_attention"; 40]), "full_attention in every fourth layer"),
    ] {
        assert_names(&refusal(key, value), &["not a model that lily runs: text_config.", key, expected]);
    }
}

#[test]
fn more_chosen_experts_than_there_are_is_refused() {
    let mut config = tiny();
    config["text_config"]["num_experts_per_tok"] = json!(9);
    let message = parse(&config).unwrap_err().to_string();
    assert_names(&message, &["text_config.num_experts_per_tok is 9", "at most num_experts = 8"]);
}

#[test]
fn rotary_parameters_may_stand_beside_or_inside() {
    let mut config = published();
    let text = config["text_config"].as_object_mut().unwrap();
    text.shift_remove("rope_parameters").unwrap();
    text.insert("rope_theta".into(), json!(10_000_000.0));
    assert_eq!(parse(&config).unwrap().shape, Shape::QWEN36);
    let text = config["text_config"].as_object_mut().unwrap();
    text.shift_remove("partial_rotary_factor").unwrap();
    let message = parse(&config).unwrap_err().to_string();
    assert_names(&message, &["text_config.partial_rotary_factor is absent", "0.25"]);
    config["text_config"]["rope_parameters"] = json!({"partial_rotary_factor": 0.25});
    assert_eq!(parse(&config).unwrap().shape, Shape::QWEN36);
}

#[test]
fn rope_theta_is_needed() {
    assert_names(&refusal("rope_parameters", json!({})), &["text_config.rope_theta is absent", "a positive number"]);
}

#[test]
fn other_quantizations_are_refused_by_name() {
    let layout = "unsupported checkpoint layout";
    for (block, names) in [
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 128}), [layout, "gptq"]),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 64}), [layout, "awq"]),
        (json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}), [layout, "fp8"]),
        (
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            [layout, "compressed-tensors"],
        ),
        (json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}), [layout, "mxfp4"]),
        (json!({"group_size": 32, "bits": 8, "mode": "mxfp8"}), [layout, "mxfp8"]),
        (json!({"group_size": 16, "bits": 4, "mode": "nvfp4"}), [layout, "nvfp4"]),
        (json!({"group_size": 64, "bits": 3, "mode": "affine"}), ["quantization.bits is 3", "4 or 8"]),
        (json!({"group_size": 32, "bits": 4}), ["quantization.group_size is 32", "64"]),
        (json!({"bits": 4}), ["quantization.group_size is null", "64"]),
        (
            json!({"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 6}}),
            ["lm_head.bits is 6", "4 or 8"],
        ),
        (
            json!({"group_size": 64, "bits": 4, "lm_head": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}),
            [layout, "quantization.lm_head.mode \"nvfp4\""],
        ),
        (json!(null), [layout, "unquantized weights"]),
        (json!("4bit"), ["quantization is \"4bit\"", "an object"]),
    ] {
        let parts = Parts::tiny_with(|parts| parts.quantize_as(&block));
        assert_names(&parts.refusal(), &names);
    }
    let only_second = Parts::tiny_with(|parts| parts.config["quantization"] = json!(null));
    only_second.open().unwrap();
}

#[test]
fn a_long_value_is_cut_in_a_message() {
    let message = refusal("layer_types", json!(vec!["full_attention"; 40]));
    assert!(message.len() < 300, "{message}");
}

#[test]
fn broken_json_is_damage_of_the_named_file() {
    for json in ["", "{", "[]", "null", "{\"model_type\": }", "\u{feff}{}", "{\"a\":\"\\ud800\"}", "nan"] {
        let error = Config::parse("dir/config.json", json.as_bytes()).unwrap_err();
        assert_names(&error.to_string(), &["dir/config.json is damaged"]);
    }
    let nested = "[".repeat(100_000);
    assert!(Config::parse("config.json", nested.as_bytes()).is_err());
    assert!(Config::parse("config.json", b"{\"model_type\": \"\xff\"}").is_err());
}
