//! A checkpoint taken apart: changed by a test, written to a directory of its own, opened.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lily_model::{Checkpoint, ModelError};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The directory of data that tests share.
pub fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(path)
}

/// One tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    pub data: Vec<u8>,
}

impl Raw {
    /// Zeros.
    pub fn zeros(dtype: Dtype, dims: &[usize]) -> Raw {
        let bytes = dims.iter().product::<usize>() * dtype.bitsize() / 8;
        Raw { dtype, dims: dims.to_vec(), data: vec![0; bytes] }
    }
}

/// The tiny checkpoint in memory.
#[derive(Clone)]
pub struct Parts {
    pub config: Value,
    pub tensors: BTreeMap<String, Raw>,
}

pub const TEXT: &str = "language_model.model.";
pub const HEAD: &str = "language_model.lm_head";

impl Parts {
    pub fn tiny() -> Parts {
        let config = serde_json::from_slice(&std::fs::read(testdata("tiny/config.json")).unwrap()).unwrap();
        let mut tensors = BTreeMap::new();
        for shard in 1..=5 {
            let bytes = std::fs::read(testdata(&format!("tiny/model-0000{shard}-of-00005.safetensors"))).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let raw = Raw { dtype: view.dtype(), dims: view.shape().to_vec(), data: view.data().to_vec() };
                tensors.insert(name, raw);
            }
        }
        Parts { config, tensors }
    }

    /// The same after a change.
    pub fn tiny_with(change: impl FnOnce(&mut Parts)) -> Parts {
        let mut parts = Parts::tiny();
        change(&mut parts);
        parts
    }

    /// The text part of the configuration.
    pub fn text_config(&mut self) -> &mut Value {
        &mut self.config["text_config"]
    }

    /// A tensor of the text model by its name without the prefix.
    pub fn text(&mut self, name: &str) -> &mut Raw {
        self.tensors.get_mut(&format!("{TEXT}{name}")).unwrap()
    }

    /// Renames every tensor; `None` drops it.
    pub fn rename(&mut self, new_name: impl Fn(&str) -> Option<String>) {
        let old = std::mem::take(&mut self.tensors);
        self.tensors = old.into_iter().filter_map(|(name, raw)| Some((new_name(&name)?, raw))).collect();
    }

    /// Writes the quantization block, in both places where configurations have it.
    pub fn quantize_as(&mut self, block: &Value) {
        self.config["quantization"] = block.clone();
        self.config["quantization_config"] = block.clone();
    }

    /// Writes `model.safetensors` without an index.
    pub fn write_single(&self) -> TempDir {
        let directory = self.write_config();
        write_shard(&directory.path().join("model.safetensors"), &self.tensors.iter().collect::<Vec<_>>());
        directory
    }

    /// Writes `shards` shards and an index.
    pub fn write_sharded(&self, shards: usize) -> TempDir {
        let directory = self.write_config();
        let tensors: Vec<_> = self.tensors.iter().collect();
        let mut weight_map = serde_json::Map::new();
        for (i, part) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
            let file = shard(i);
            write_shard(&directory.path().join(&file), part);
            weight_map.extend(part.iter().map(|(name, _)| ((*name).clone(), file.clone().into())));
        }
        write_index(directory.path(), &json!({"metadata": {}, "weight_map": weight_map}));
        directory
    }

    fn write_config(&self) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), self.config.to_string()).unwrap();
        directory
    }

    /// Opens it as one file.
    pub fn open(&self) -> Result<Checkpoint, ModelError> {
        Checkpoint::open(self.write_single().path())
    }

    /// The message with which it is refused.
    pub fn refusal(&self) -> String {
        self.open().map(|_| ()).unwrap_err().to_string()
    }
}

/// The name of shard `i`, counted from 0.
pub fn shard(i: usize) -> String {
    format!("part-{i}.safetensors")
}

pub fn write_index(directory: &Path, index: &Value) {
    std::fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

pub fn write_shard(path: &Path, tensors: &[(&String, &Raw)]) {
    let views = tensors
        .iter()
        .map(|(name, raw)| (name.as_str(), TensorView::new(raw.dtype, raw.dims.clone(), &raw.data).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Asserts that a message holds all of `parts`.
pub fn assert_names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} does not name {part:?}");
    }
}
