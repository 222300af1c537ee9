//! Damaged and hostile files: each is refused with the file, what was found and what was expected.

use std::collections::BTreeMap;
use std::path::Path;

use crate::parts::{Parts, assert_names, shard, testdata, write_index};
use lily_model::safetensors::parse_header;
use lily_model::{Checkpoint, ModelError};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};

fn refusal(directory: &Path) -> String {
    Checkpoint::open(directory).map(|_| ()).unwrap_err().to_string()
}

/// A safetensors file of this header and that many zero bytes.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

fn entry(dtype: &str, shape: &[u64], start: u64, end: u64) -> Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})
}

fn reason(header: &Value, data: usize) -> String {
    parse_header(&file(&header.to_string(), data)).map(|_| ()).unwrap_err()
}

#[test]
fn every_prefix_of_a_shard_is_refused() {
    let whole = std::fs::read(testdata("tiny/model-00001-of-00005.safetensors")).unwrap();
    parse_header(&whole).unwrap();
    for length in (0..3000).chain([whole.len() - 1]) {
        assert!(parse_header(&whole[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn a_cut_shard_is_named_with_its_sizes() {
    let directory = Parts::tiny().write_sharded(3);
    let path = directory.path().join(shard(1));
    let bytes = std::fs::read(&path).unwrap();
    for (length, names) in [
        (bytes.len() - 1, ["take", "the download may be cut"]),
        (100, ["but the file has 100", "the download may be cut"]),
        (5, ["5 bytes are too few", "header"]),
        (0, ["0 bytes are too few", "header"]),
    ] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let message = refusal(directory.path());
        assert_names(&message, &["part-1.safetensors is damaged"]);
        assert_names(&message, &names);
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let ok = entry("U8", &[4], 0, 4);
    parse_header(&file(&json!({"a": ok}).to_string(), 4)).unwrap();
    for (header, data, names) in [
        (json!({"a": ok, "b": entry("U8", &[4], 2, 6)}), 6, ["tensor b overlaps", "2 to 6, expected from 4"]),
        (json!({"a": ok, "b": entry("U8", &[4], 0, 4)}), 4, ["overlaps", "0 to 4, expected from 4"]),
        (json!({"a": ok, "b": entry("U8", &[4], 6, 10)}), 10, ["tensor b leaves a gap", "6 to 10, expected from 4"]),
        (json!({"a": entry("U8", &[4], 1, 5)}), 5, ["tensor a leaves a gap", "expected from 0"]),
        (json!({"a": entry("U8", &[4], 4, 0)}), 4, ["tensor a", "4 to 0"]),
        (json!({"a": ok}), 5, ["take 4 bytes", "5 follow"]),
        (json!({"a": ok}), 3, ["take 4 bytes", "3 follow"]),
        (json!({"a": entry("U32", &[4], 0, 4)}), 4, ["tensor a is U32 [4]", "4 bytes"]),
        (json!({"a": entry("F4", &[3], 0, 1)}), 1, ["tensor a is F4 [3]", "1 bytes"]),
        (json!({"a": entry("U8", &[1 << 40, 1 << 40], 0, 4)}), 4, ["tensor a is U8", "4 bytes"]),
        (json!({"a": entry("Q4", &[4], 0, 4)}), 4, ["tensor a badly", "Q4"]),
        (json!({"a": {"dtype": "U8", "shape": [4]}}), 4, ["tensor a badly", "data_offsets"]),
        (json!({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}), 4, ["tensor a badly", "invalid number"]),
        (json!({"a": 4}), 4, ["tensor a badly", "expected"]),
        (json!([]), 0, ["not a JSON object", "expected a map"]),
    ] {
        assert_names(&reason(&header, data), &names);
    }
    let half = 1u64 << 63;
    let absurd = json!({
        "a": entry("U64", &[half / 8], 0, half),
        "b": entry("U64", &[half / 8 - 1], half, u64::MAX - 7),
        "c": entry("U8", &[7], u64::MAX - 7, u64::MAX),
    });
    assert!(parse_header(&file(&absurd.to_string(), 8)).is_err());
}

#[test]
fn header_text_that_is_not_a_header_is_refused() {
    let long = "[".repeat(1 << 20);
    for text in ["", "{", "not json", "null", "{\"a\"", "\u{feff}{}", long.as_str()] {
        assert!(parse_header(&file(text, 0)).is_err(), "{text:.20}");
    }
    let mut not_utf8 = file("{\"ab\":1}", 0);
    not_utf8[10] = 0xff;
    assert!(parse_header(&not_utf8).unwrap_err().contains("not a JSON object"));
    for length in [u64::MAX, u64::MAX - 8, 1 << 62, 100] {
        let mut file = length.to_le_bytes().to_vec();
        file.extend([b'{'; 92]);
        assert_names(&parse_header(&file).unwrap_err(), &[&length.to_string(), "the file has 100"]);
    }
}

#[test]
fn a_missing_shard_is_named() {
    let directory = Parts::tiny().write_sharded(3);
    std::fs::remove_file(directory.path().join(shard(2))).unwrap();
    let error = Checkpoint::open(directory.path()).unwrap_err();
    assert!(matches!(error, ModelError::MissingFile { .. }));
    let place = directory.path().display().to_string();
    assert_names(&error.to_string(), &[&place, "has no part-2.safetensors", "fetch it again"]);
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let directory = Parts::tiny().write_sharded(3);
    let path = directory.path().join("model.safetensors.index.json");
    let index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let changed = |name: &str, shard: Value| {
        let mut index = index.clone();
        index["weight_map"][name] = shard;
        write_index(directory.path(), &index);
        refusal(directory.path())
    };
    let head = "language_model.lm_head.weight";
    assert_names(&changed(head, json!(shard(2))), &["part-0.safetensors", head, "does not place there"]);
    assert_names(&changed("language_model.extra", json!(shard(1))), &["part-1.safetensors", "language_model.extra"]);
    for outside in ["../part-0.safetensors", "/etc/passwd", "a\\b.safetensors", "sub/part-0.safetensors", "..", ""] {
        assert_names(&changed(head, json!(outside)), &["index.json is damaged", "not the name of a safetensors file"]);
    }
    assert_names(&changed(head, json!(7)), &["index.json is damaged", "no usable weight_map"]);
    for text in ["", "{}", "[]", "{\"weight_map\": []}"] {
        std::fs::write(&path, text).unwrap();
        assert_names(&refusal(directory.path()), &["index.json is damaged", "weight_map"]);
    }
    write_index(directory.path(), &json!({"weight_map": {}}));
    assert_names(&refusal(directory.path()), &["language_model.model.embed_tokens.weight is missing"]);
}

#[test]
fn what_is_not_there_is_named() {
    let directory = Parts::tiny().write_single();
    let path = directory.path();
    assert_names(&refusal(&path.join("nowhere")), &["nowhere", "no such directory"]);
    assert_names(&refusal(&path.join("config.json")), &["config.json", "no such directory"]);
    std::fs::remove_file(path.join("model.safetensors")).unwrap();
    assert_names(&refusal(path), &["has no model.safetensors", "model.safetensors.index.json"]);
    std::fs::create_dir(path.join("model.safetensors")).unwrap();
    assert_names(&refusal(path), &["has no model.safetensors"]);
    write_index(path, &json!({"weight_map": {"language_model.lm_head.weight": "model.safetensors"}}));
    assert_names(&refusal(path), &["cannot read", "model.safetensors", "it is not a file"]);
    std::fs::remove_file(path.join("config.json")).unwrap();
    assert_names(&refusal(path), &["has no config.json", "tokenizer.json"]);
    std::fs::create_dir(path.join("config.json")).unwrap();
    assert_names(&refusal(path), &["cannot read", "config.json"]);
}

/// A header of a few tensors that is right but for what the mutations do.
fn header() -> impl Strategy<Value = Vec<u8>> {
    let dtype = prop::sample::select(vec![("U8", 1), ("BF16", 2), ("U32", 4), ("I64", 8)]);
    let tensors = prop::collection::vec((dtype, prop::collection::vec(0u64..5, 0..4)), 0..5);
    tensors.prop_map(|tensors| {
        let (mut header, mut end) = (json!({"__metadata__": {"format": "mlx"}}), 0);
        for (i, ((dtype, bytes), shape)) in tensors.iter().enumerate() {
            let start = end;
            end += shape.iter().product::<u64>() * bytes;
            header[format!("t{i}")] = entry(dtype, shape, start, end);
        }
        file(&header.to_string(), end as usize)
    })
}

/// Replaces, inserts or removes single bytes; digits become other digits more often than not.
fn mutated(bytes: impl Strategy<Value = Vec<u8>>, most: usize) -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => b'0'..=b'9', 1 => any::<u8>(), 1 => prop::sample::select(b"{}[]\",:-.eE".to_vec())];
    let mutations = prop::collection::vec((any::<prop::sample::Index>(), byte, 0..4u8), 0..most);
    (bytes, mutations).prop_map(|(mut bytes, mutations)| {
        for (at, byte, kind) in mutations {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match kind {
                0 => bytes.insert(at, byte),
                1 => drop(bytes.remove(at)),
                _ => bytes[at] = byte,
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_right_header_is_read_as_the_safetensors_crate_reads_it(file in header()) {
        let (start, ours) = parse_header(&file).unwrap();
        let (length, theirs) = SafeTensors::read_metadata(&file).unwrap();
        prop_assert_eq!(start, 8 + length);
        let tensors = |header: &Metadata| -> BTreeMap<_, _> {
            let of = |info: &TensorInfo| (info.dtype, info.shape.clone(), info.data_offsets);
            header.tensors().into_iter().map(|(name, info)| (name, of(info))).collect()
        };
        prop_assert_eq!(tensors(&ours), tensors(&theirs));
    }

    #[test]
    fn a_mutated_header_never_panics_and_what_is_accepted_lies_in_the_file(file in mutated(header(), 4)) {
        if let Ok((start, header)) = parse_header(&file) {
            prop_assert!(SafeTensors::read_metadata(&file).is_ok());
            for info in header.tensors().values() {
                prop_assert!(file.get(start + info.data_offsets.0..start + info.data_offsets.1).is_some());
            }
        }
    }

    #[test]
    fn a_mutated_configuration_never_panics(
        json in mutated(Just(std::fs::read(testdata("tiny/config.json")).unwrap()), 6),
    ) {
        if let Ok(config) = lily_model::Config::parse("config.json", &json) {
            prop_assert!(config.shape.hidden.is_multiple_of(lily_model::Shape::GROUP));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_header(&bytes);
        let _ = lily_model::Config::parse("config.json", &bytes);
        let _ = lily_model::config::eos_of("generation_config.json", &bytes);
    }
}
