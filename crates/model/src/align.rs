//! The same checkpoint in other shards, which a device can use where they are mapped: its matrices are aligned, and those that one
//! kernel reads together are adjacent. No byte of a tensor changes, so every program that reads the one reads the other.
//!
//! safetensors has no gaps between tensors, so alignment is a matter of order: in a shard a stack of tensors whose length is a
//! multiple of 256 bytes comes before one whose length is not. At the sizes of Qwen3.6-35B-A3B all begin at multiples of 64.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::checkpoint::{Checkpoint, Source};
use crate::error::ModelError;
use crate::quant::QuantMatrix;
use crate::safetensors::{INDEX, SINGLE, Tensor, Tensors};
use crate::weights::is_unused;

/// Where matrices begin, as far as the lengths of those before allow: a cache line of any device, and all that Metal asks of a buffer.
const ALIGNMENT: usize = 256;

/// A shard that is to be written.
#[derive(Debug)]
pub struct Shard {
    /// Its file.
    pub name: String,
    /// Everything before the data.
    pub header: Vec<u8>,
    /// The data.
    pub tensors: Vec<(String, Tensor)>,
}

impl Shard {
    /// Bytes of the file.
    pub fn bytes(&self) -> usize {
        self.header.len() + self.tensors.iter().map(|(_, tensor)| tensor.bytes.len()).sum::<usize>()
    }
}

/// The files of weights of an aligned checkpoint; all other files stay as they are.
#[derive(Debug)]
pub struct Aligned {
    /// In order.
    pub shards: Vec<Shard>,
    /// Name and content of the index, if there is more than one shard.
    pub index: Option<(&'static str, Vec<u8>)>,
}

/// Tensors that have to be adjacent.
type Stack = Vec<(String, Tensor)>;

/// Plans the checkpoint of `source` in shards of `shard_bytes`, or more where a single stack takes more. Parts of the model that lily
/// does not run come last, in shards of their own. Fails as opening it does.
pub fn align(source: &Source, shard_bytes: usize) -> Result<Aligned, ModelError> {
    let mut tensors = Tensors::open_all(source)?;
    let mut used = adjacent(&Checkpoint::load(source.clone())?);
    let stacked: BTreeSet<&String> = used.iter().flatten().collect();
    let alone = tensors.iter().map(|(name, _)| name).filter(|name| !stacked.contains(name)).cloned();
    let (unused, vectors): (Vec<String>, Vec<String>) = alone.partition(|name| is_unused(name));
    used.extend(vectors.into_iter().map(|name| vec![name]));
    let mut groups = grouped(take(&mut tensors, used)?, shard_bytes);
    let unused = unused.into_iter().map(|name| vec![name]).collect();
    groups.extend(grouped(take(&mut tensors, unused)?, shard_bytes));
    let count = groups.len();
    let name = |number: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    };
    let shards: Vec<Shard> = groups.into_iter().enumerate().map(|(i, stacks)| shard(name(i), stacks)).collect();
    let index = if count == 1 { None } else { Some((INDEX, index(source, &shards)?)) };
    Ok(Aligned { shards, index })
}

/// Names of tensors that have to be adjacent: codes, scales and biases of each stack of matrices.
fn adjacent(checkpoint: &Checkpoint) -> Vec<Vec<String>> {
    let names =
        |stack: &[&QuantMatrix], suffix| stack.iter().map(|matrix| format!("{}.{suffix}", matrix.name)).collect();
    let stacks = checkpoint.weights.stacks();
    stacks.iter().flat_map(|stack| ["weight", "scales", "biases"].map(|suffix| names(stack, suffix))).collect()
}

fn take(tensors: &mut Tensors, stacks: Vec<Vec<String>>) -> Result<Vec<Stack>, ModelError> {
    let mut one = |name: String| tensors.take(&name).map(|tensor| (name, tensor));
    stacks.into_iter().map(|names| names.into_iter().map(&mut one).collect()).collect()
}

fn bytes(stack: &Stack) -> usize {
    stack.iter().map(|(_, tensor)| tensor.bytes.len()).sum()
}

/// Stacks by shard, in their order.
fn grouped(stacks: Vec<Stack>, shard_bytes: usize) -> Vec<Vec<Stack>> {
    let mut groups: Vec<Vec<Stack>> = Vec::new();
    let mut filled = 0;
    for stack in stacks {
        let bytes = bytes(&stack);
        match groups.last_mut() {
            Some(group) if filled + bytes <= shard_bytes => {
                group.push(stack);
                filled += bytes;
            }
            _ => {
                groups.push(vec![stack]);
                filled = bytes;
            }
        }
    }
    groups
}

/// Puts the stacks of a shard in their order, and a header before them.
fn shard(name: String, mut stacks: Vec<Stack>) -> Shard {
    // The largest power of two that divides the length: behind such a stack as much stays aligned.
    stacks.sort_by_key(|stack| Reverse(bytes(stack).trailing_zeros().min(ALIGNMENT.trailing_zeros())));
    let tensors: Vec<(String, Tensor)> = stacks.into_iter().flatten().collect();
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({ "format": "mlx" }));
    let mut start = 0;
    for (name, Tensor { dtype, shape, bytes }) in &tensors {
        let end = start + bytes.len();
        entries.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }));
        start = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize((8 + json.len()).next_multiple_of(ALIGNMENT) - 8, b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Shard { name, header, tensors }
}

/// The index of these shards, with what the index of the source says beside.
fn index(source: &Source, shards: &[Shard]) -> Result<Vec<u8>, ModelError> {
    let old = source.read_optional(INDEX)?.and_then(|old| serde_json::from_slice(&old).ok());
    let mut new: Map<String, Value> = old.unwrap_or_else(|| {
        let total = shards.iter().flat_map(|shard| &shard.tensors).map(|(_, tensor)| tensor.bytes.len()).sum::<usize>();
        Map::from_iter([("metadata".into(), json!({ "total_size": total }))])
    });
    let places = shards.iter().flat_map(|shard| shard.tensors.iter().map(|(name, _)| (name, &shard.name)));
    new.insert("weight_map".into(), json!(places.collect::<BTreeMap<_, _>>()));
    Ok(Value::Object(new).to_string().into_bytes())
}
