//! What opens, what is refused, and that a refusal names its reason: layouts of weights.

use crate::parts::{HEAD, Parts, Raw, TEXT, assert_names, shard, testdata, write_index, write_shard};
use lily_model::{Bits, Checkpoint, Mixer, ModelError};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

/// All numbers of an opened checkpoint, in a fixed order.
fn content(checkpoint: &Checkpoint) -> Vec<u8> {
    let weights = &checkpoint.weights;
    let mut all = Vec::new();
    for m in weights.matrices() {
        all.extend([&m.codes[..], &m.scales[..], &m.biases[..]].concat());
    }
    let mut floats = |values: &[f32]| all.extend(values.iter().flat_map(|x| x.to_le_bytes()));
    floats(&weights.norm);
    for layer in &weights.layers {
        floats(&layer.mixer_norm);
        floats(&layer.moe_norm);
        match &layer.mixer {
            Mixer::Delta(d) => [&d.conv, &d.a_log, &d.dt_bias, &d.norm].map(|v| floats(v)),
            Mixer::Attention(a) => [&a.q_norm, &a.k_norm, &a.k_norm, &a.q_norm].map(|v| floats(v)),
        };
    }
    all
}

fn tiny() -> Checkpoint {
    Checkpoint::open(testdata("tiny")).unwrap()
}

#[test]
fn the_tiny_checkpoint_opens_and_every_text_tensor_is_used() {
    let checkpoint = tiny();
    let parts = Parts::tiny();
    let is_text = |name: &str| name.starts_with("language_model.");
    let bytes =
        |text: bool| parts.tensors.iter().filter(move |(n, _)| is_text(n) == text).map(|(_, raw)| raw.data.len());
    assert_eq!(checkpoint.weights.skipped, (bytes(false).count(), bytes(false).sum()));
    // Small vectors are widened from BF16 to f32; codes, scales and biases are seen as they are.
    let quantized = checkpoint.weights.quantized_bytes();
    let widened = content(&checkpoint).len() - quantized;
    let repeated: usize = checkpoint.weights.layers.iter().filter(|l| matches!(l.mixer, Mixer::Attention(_))).count();
    assert_eq!(quantized + (widened - repeated * 2 * 256 * 4) / 2, bytes(true).sum::<usize>());
}

#[test]
fn one_file_and_any_number_of_shards_hold_the_same_model() {
    let parts = Parts::tiny();
    let expected = content(&tiny());
    assert!(content(&parts.open().unwrap()) == expected);
    for shards in [1, 2, 203] {
        let directory = parts.write_sharded(shards);
        assert!(content(&Checkpoint::open(directory.path()).unwrap()) == expected, "{shards} shards");
    }
}

#[test]
fn files_that_nothing_names_are_ignored() {
    let directory = Parts::tiny().write_sharded(2);
    let path = directory.path();
    for file in ["model.safetensors", "consolidated.safetensors", "README.md", "mtp.safetensors"] {
        std::fs::write(path.join(file), "not weights").unwrap();
    }
    std::fs::create_dir(path.join("original")).unwrap();
    Checkpoint::open(path).unwrap();
}

#[test]
fn every_spelling_of_the_prefixes_opens() {
    let expected = content(&tiny());
    for (prefix, head) in [
        ("language_model.model.", "language_model.lm_head"),
        ("model.language_model.", "lm_head"),
        ("model.language_model.", "model.lm_head"),
        ("model.", "lm_head"),
    ] {
        // The overrides keep the published spelling: they are found all the same.
        let parts = Parts::tiny_with(|parts| {
            parts.rename(|name| {
                if let Some(rest) = name.strip_prefix(TEXT) {
                    return Some(format!("{prefix}{rest}"));
                }
                Some(name.strip_prefix(HEAD).map_or(name.into(), |rest| format!("{head}{rest}")))
            });
        });
        let checkpoint = parts.open().unwrap_or_else(|e| panic!("{prefix}, {head}: {e}"));
        assert!(content(&checkpoint) == expected, "{prefix}, {head}");
    }
}

#[test]
fn multi_token_prediction_is_skipped_in_every_layout() {
    let bf16 = |dims: &[usize]| Raw::zeros(Dtype::BF16, dims);
    let layouts: [&[(&str, Raw)]; 5] = [
        &[("mtp.layers.0.mlp.experts.gate_up_proj", bf16(&[8, 128, 256])), ("mtp.fc.weight", bf16(&[256, 512]))],
        &[("mtp.layers.0.mlp.experts.0.gate_proj.weight", bf16(&[64, 256]))],
        &[("language_model.mtp.layers.0.mlp.switch_mlp.up_proj.weight", Raw::zeros(Dtype::U32, &[8, 64, 32]))],
        &[("model.mtp.layers.0.linear_attn.conv1d.weight", bf16(&[1024, 1, 4]))],
        &[("mtp.layers.0.self_attn.q_proj.qweight", Raw::zeros(Dtype::I32, &[8, 8]))],
    ];
    let without = tiny().weights.skipped.0;
    for layout in layouts {
        let extra = layout.iter().map(|(name, raw)| (name.to_string(), raw.clone()));
        let checkpoint = Parts::tiny_with(|parts| parts.tensors.extend(extra)).open();
        let checkpoint = checkpoint.unwrap_or_else(|e| panic!("{}: {e}", layout[0].0));
        assert_eq!(checkpoint.weights.skipped.0, without + layout.len());
    }
    let configured = Parts::tiny_with(|parts| {
        parts.config["quantization"]["mtp.fc"] = json!(false);
        parts.config["quantization"]["vision_tower.merger.linear_fc1"] = json!({"group_size": 32, "bits": 6});
        parts.text_config()["mtp_num_hidden_layers"] = json!(1);
    });
    configured.open().unwrap();
}

#[test]
fn a_shard_that_holds_only_skipped_tensors_may_be_absent_or_present() {
    let parts = Parts::tiny();
    let directory = parts.write_single();
    let single = "model.safetensors";
    let mut placed: Value = parts.tensors.keys().map(|name| (name.clone(), json!(single))).collect();
    placed["mtp.fc.weight"] = json!("mtp.safetensors");
    write_index(directory.path(), &json!({"weight_map": placed}));
    Checkpoint::open(directory.path()).unwrap();
    let fc = Raw::zeros(Dtype::BF16, &[256, 512]);
    write_shard(&directory.path().join("mtp.safetensors"), &[(&"mtp.fc.weight".to_owned(), &fc)]);
    Checkpoint::open(directory.path()).unwrap();
}

#[test]
fn raw_norms_or_convolutions_are_refused() {
    let raw = Parts::tiny_with(|parts| {
        for (_, conv) in parts.tensors.iter_mut().filter(|(name, _)| name.ends_with("conv1d.weight")) {
            conv.dims.swap(1, 2);
        }
    });
    assert_names(&raw.refusal(), &["raw Hugging Face", "conv1d.weight", "[1024, 1, 4]", "lily pull"]);
    let zero_centred = Parts::tiny_with(|parts| {
        for (_, norm) in parts.tensors.iter_mut().filter(|(name, _)| name.ends_with("input_layernorm.weight")) {
            norm.data.fill(0);
        }
    });
    assert_names(&zero_centred.refusal(), &["zero-centred", "0.000", "lily pull"]);
}

#[test]
fn other_expert_layouts_and_quantizations_are_refused_by_name() {
    let mlp = format!("{TEXT}layers.0.mlp.");
    let attention = format!("{TEXT}layers.3.self_attn.");
    for (name, dtype, reason) in [
        (format!("{mlp}experts.gate_up_proj"), Dtype::BF16, "fused experts"),
        (format!("{mlp}experts.0.gate_proj.weight"), Dtype::BF16, "experts as separate tensors"),
        (format!("{TEXT}layers.0.linear_attn.in_proj_qkvz.weight"), Dtype::U32, "Qwen3-Next"),
        (format!("{attention}q_proj.qweight"), Dtype::I32, "GPTQ or AWQ"),
        (format!("{attention}q_proj.weight_packed"), Dtype::U8, "compressed-tensors"),
        (format!("{attention}q_proj.weight_scale_inv"), Dtype::F32, "FP8"),
    ] {
        let parts = Parts::tiny_with(|parts| {
            parts.tensors.insert(name.clone(), Raw::zeros(dtype, &[8, 8]));
        });
        assert_names(&parts.refusal(), &["unsupported checkpoint layout", reason, &name, "mlx_lm.convert"]);
    }
}

#[test]
fn unquantized_modules_are_refused_by_name() {
    for module in [HEAD.to_owned(), format!("{TEXT}layers.1.mlp.gate")] {
        let parts = Parts::tiny_with(|parts| {
            parts.tensors.remove(&format!("{module}.scales"));
            parts.tensors.remove(&format!("{module}.biases"));
            let weight = parts.tensors.get_mut(&format!("{module}.weight")).unwrap();
            *weight = Raw::zeros(Dtype::BF16, &[weight.dims[0], 256]);
        });
        assert_names(&parts.refusal(), &["unquantized", &module, "BF16"]);
        let named = Parts::tiny_with(|parts| parts.config["quantization"][&module] = json!(false));
        assert_names(&named.refusal(), &["unquantized module", &module]);
    }
}

#[test]
fn an_embedding_of_8_bit_codes_is_accepted() {
    let parts = Parts::tiny_with(|parts| {
        *parts.text("embed_tokens.weight") = Raw::zeros(Dtype::U32, &[1024, 64]);
        parts.config["quantization"]["language_model.model.embed_tokens"] = json!({"group_size": 64, "bits": 8});
    });
    let checkpoint = parts.open().unwrap();
    assert_eq!(checkpoint.weights.embedding.bits, Bits::Eight);
    assert_eq!(checkpoint.weights.head.bits, Bits::Four);
}

#[test]
fn an_override_that_contradicts_its_tensor_is_refused_by_name() {
    let gate = format!("{TEXT}layers.0.mlp.gate");
    let missing = Parts::tiny_with(|parts| {
        parts.config["quantization"].as_object_mut().unwrap().shift_remove(&gate).unwrap();
    });
    assert_names(&missing.refusal(), &[&gate, "U32 [8, 64]", "U32 [8, 32]", "4-bit"]);
    let wrong = Parts::tiny_with(|parts| {
        parts.config["quantization"][HEAD] = json!({"group_size": 64, "bits": 8});
    });
    assert_names(&wrong.refusal(), &[HEAD, "U32 [1024, 32]", "U32 [1024, 64]", "8-bit"]);
}

#[test]
fn a_tensor_of_another_dtype_or_shape_is_refused_with_what_was_found_and_expected() {
    let conv = "layers.0.linear_attn.conv1d.weight";
    for (name, dtype, dims, expected) in [
        ("norm.weight", Dtype::F16, vec![256], "BF16 or F32 [256]"),
        ("norm.weight", Dtype::BF16, vec![512], "BF16 or F32 [256]"),
        ("layers.0.linear_attn.A_log", Dtype::BF16, vec![4, 1], "BF16 or F32 [4]"),
        (conv, Dtype::BF16, vec![1024, 3, 1], "BF16 or F32 [1024, 4, 1]"),
        ("embed_tokens.weight", Dtype::U32, vec![1024, 16], "U32 [1024, 32]"),
        ("embed_tokens.scales", Dtype::F16, vec![1024, 4], "BF16 [1024, 4]"),
        ("layers.2.mlp.switch_mlp.down_proj.biases", Dtype::BF16, vec![8, 256, 2], "BF16 [8, 256, 1]"),
        ("layers.3.self_attn.q_proj.weight", Dtype::U32, vec![1024, 32], "U32 [2048, 32]"),
    ] {
        let parts = Parts::tiny_with(|parts| *parts.text(name) = Raw::zeros(dtype, &dims));
        assert_names(&parts.refusal(), &[name, &format!("found {dtype:?} {dims:?}"), expected]);
    }
}

#[test]
fn float32_vectors_are_as_good_as_bf16() {
    let parts = Parts::tiny_with(|parts| {
        let norm = parts.text("norm.weight");
        let widened = norm.data.as_chunks::<2>().0.iter().flat_map(|&[low, high]| [0, 0, low, high]).collect();
        *norm = Raw { dtype: Dtype::F32, dims: vec![256], data: widened };
    });
    assert_eq!(parts.open().unwrap().weights.norm, tiny().weights.norm);
}

#[test]
fn every_text_tensor_is_needed_and_named_when_it_is_missing() {
    let whole = Parts::tiny();
    for name in whole.tensors.keys().filter(|name| name.starts_with("language_model.")) {
        let parts = Parts::tiny_with(|parts| {
            parts.tensors.remove(name);
        });
        match parts.open() {
            Err(ModelError::MissingTensor { name: missing }) => assert_eq!(missing, *name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn unknown_tensors_are_counted_and_the_first_is_named() {
    let bias = format!("{TEXT}layers.0.linear_attn.conv1d.bias");
    let parts = Parts::tiny_with(|parts| {
        parts.tensors.insert(bias.clone(), Raw::zeros(Dtype::BF16, &[1024]));
        parts.tensors.insert("visual.head".into(), Raw::zeros(Dtype::BF16, &[4]));
    });
    assert_names(&parts.refusal(), &["2 unknown tensor", &bias]);
    let layer = Parts::tiny_with(|parts| {
        let text = parts.text_config();
        text["num_hidden_layers"] = json!(3);
        text["layer_types"] = json!(["linear_attention", "linear_attention", "linear_attention"]);
    });
    assert_names(&layer.refusal(), &["unknown tensor", "layers.3."]);
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let parts = Parts::tiny();
    let directory = parts.write_sharded(2);
    let (name, raw) = parts.tensors.iter().find(|(name, _)| name.ends_with("lm_head.scales")).unwrap();
    let second: Vec<_> = parts.tensors.iter().skip(parts.tensors.len().div_ceil(2)).chain([(name, raw)]).collect();
    write_shard(&directory.path().join(shard(1)), &second);
    let message = Checkpoint::open(directory.path()).unwrap_err().to_string();
    assert_names(&message, &[&shard(1), name, "does not place there"]);
}
