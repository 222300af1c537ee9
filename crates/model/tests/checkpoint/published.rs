//! The layout of the published checkpoint: all of its 2090 tensors, with zeros for data.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::parts::{shard, testdata, write_index};
use lily_model::{Checkpoint, LayerKind, Mixer, Shape};
use serde_json::{Map, json};

/// Name, dtype, dimensions, bytes.
type Row<'a> = (&'a str, &'a str, Vec<usize>, u64);

/// The header and zeros, which a sparse file holds without taking disk space.
fn write_sparse(path: &Path, tensors: &[Row<'_>]) {
    let mut header = Map::new();
    let mut end = 0;
    for (name, dtype, dims, bytes) in tensors {
        let start = end;
        end += bytes;
        header.insert((*name).into(), json!({"dtype": dtype, "shape": dims, "data_offsets": [start, end]}));
    }
    let json = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&json).unwrap();
    // Multipliers of 1 where the norms come first, so that they are not taken for zero-centred ones.
    for (.., bytes) in tensors.iter().take_while(|(name, ..)| is_norm(name)) {
        file.write_all(&[0x80, 0x3f].repeat(*bytes as usize / 2)).unwrap();
    }
    file.set_len(8 + json.len() as u64 + end).unwrap();
}

fn is_norm(name: &str) -> bool {
    name.ends_with("input_layernorm.weight")
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "20 GB in sparse files, which not every file system has")]
fn every_published_tensor_is_typed_or_skipped_and_the_bytes_add_up() {
    let table = std::fs::read_to_string(testdata("qwen3.6/tensors.tsv")).unwrap();
    let mut shards: BTreeMap<usize, Vec<Row<'_>>> = BTreeMap::new();
    for line in table.lines().skip(1) {
        let [name, dtype, dims, bytes, shard] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let dims = dims.split('x').map(|dim| dim.parse().unwrap()).collect();
        shards.entry(shard.parse().unwrap()).or_default().push((name, dtype, dims, bytes.parse().unwrap()));
    }
    assert_eq!(shards.values().map(Vec::len).sum::<usize>(), 2090);
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(testdata("qwen3.6/config.json"), directory.path().join("config.json")).unwrap();
    let mut weight_map = Map::new();
    for (number, tensors) in &mut shards {
        tensors.sort_by_key(|(name, ..)| !is_norm(name));
        write_sparse(&directory.path().join(shard(*number)), tensors);
        weight_map.extend(tensors.iter().map(|(name, ..)| ((*name).to_owned(), shard(*number).into())));
    }
    write_index(directory.path(), &json!({"weight_map": weight_map}));

    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.config.shape, Shape::QWEN36);
    let weights = &checkpoint.weights;
    assert_eq!(weights.skipped, (333, 893_142_496));
    let mut vectors = weights.norm.len();
    for (i, layer) in weights.layers.iter().enumerate() {
        vectors += layer.mixer_norm.len() + layer.moe_norm.len();
        vectors += match (&layer.mixer, Shape::QWEN36.layer_kind(i)) {
            (Mixer::Delta(d), LayerKind::Delta) => d.conv.len() + d.a_log.len() + d.dt_bias.len() + d.norm.len(),
            (Mixer::Attention(a), LayerKind::Attention) => a.q_norm.len() + a.k_norm.len(),
            (mixer, kind) => panic!("layer {i} is {kind:?}, but its weights are {mixer:?}"),
        };
    }
    assert_eq!(weights.quantized_bytes() + 2 * vectors, 19_508_787_456);
}
