//! Safetensors shards by memory map: headers checked, tensors found by name, no byte of weight data copied.
//!
//! The published shards are not aligned (their headers are not padded), so a tensor is a byte slice and is never cast
//! to a wider type.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::Value;

use crate::checkpoint::{FileBytes, MappedFile, Source};
use crate::error::ModelError;
use crate::weights::is_unused;

/// The bytes of one tensor inside a shard that stays mapped as long as any of its tensors lives.
#[derive(Clone)]
pub struct TensorBytes {
    file: Arc<FileBytes>,
    range: Range<usize>,
}

impl TensorBytes {
    /// Bytes that belong to no file, for tests and synthetic matrices.
    pub fn from_vec(bytes: Vec<u8>) -> TensorBytes {
        let range = 0..bytes.len();
        TensorBytes { file: Arc::new(FileBytes::Shared(Arc::new(bytes))), range }
    }

    /// The mapped file that holds the bytes, and at which of its bytes they begin; `None` if they are in no file.
    pub fn place(&self) -> Option<(MappedFile, usize)> {
        MappedFile::new(&self.file).map(|file| (file, self.range.start))
    }

    /// Copies the bytes from `start` on by reading the file, for a device that keeps a copy of its own: several threads that read
    /// megabytes at once are faster than the map. Panics beyond the end, as an index does.
    pub fn read_into(&self, start: usize, to: &mut [u8]) -> std::io::Result<()> {
        assert!(start + to.len() <= self.range.len(), "{} bytes from {start} on of {self:?}", to.len());
        self.file.read_into(self.range.start + start, to)
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.file[self.range.clone()]
    }
}

impl fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorBytes({} bytes)", self.range.len())
    }
}

/// A tensor as its header describes it.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type in the file.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its data.
    pub bytes: TensorBytes,
}

impl Tensor {
    /// Dtype and dimensions for messages, like `BF16 [32]`.
    pub fn describe(&self) -> String {
        format!("{:?} {:?}", self.dtype, self.shape)
    }
}

/// All tensors of a checkpoint by full name, from every shard.
#[derive(Debug)]
pub struct Tensors {
    by_name: BTreeMap<String, Tensor>,
}

/// The file that names the shards of a checkpoint that has several.
pub const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SINGLE: &str = "model.safetensors";

impl Tensors {
    /// Maps the shards that the index names, or `model.safetensors` where there is no index. Files that neither names
    /// are ignored, and so are shards that hold nothing of the text model: they may be absent. Fails on a missing
    /// shard, a damaged header, data beyond the end of the file, and a tensor that the index places in another shard
    /// than the one that holds it.
    pub fn open(source: &Source) -> Result<Tensors, ModelError> {
        Tensors::open_those(source, |name| !is_unused(name))
    }

    /// The same, but shards that hold nothing of the text model are mapped too, and may not be absent.
    pub fn open_all(source: &Source) -> Result<Tensors, ModelError> {
        Tensors::open_those(source, |_| true)
    }

    fn open_those(source: &Source, wanted: impl Fn(&str) -> bool) -> Result<Tensors, ModelError> {
        let mut by_name = BTreeMap::new();
        match source.read_optional(INDEX)? {
            None if !source.has(SINGLE) => {
                return Err(ModelError::MissingFile {
                    place: source.describe(),
                    file: SINGLE.into(),
                    needed: "model.safetensors, or model.safetensors.index.json and the shards it names",
                });
            }
            None => read_shard(source, SINGLE, |name, tensor| {
                by_name.insert(name, tensor);
                Ok(())
            })?,
            Some(index) => {
                let mut placed = read_index(&source.name_of(INDEX), &index)?;
                placed.retain(|name, _| wanted(name));
                for shard in placed.values().collect::<BTreeSet<_>>() {
                    read_shard(source, shard, |name, tensor| {
                        if !wanted(&name) || placed.get(&name) == Some(shard) {
                            by_name.insert(name, tensor);
                            return Ok(());
                        }
                        Err(ModelError::Damaged {
                            file: source.name_of(shard),
                            reason: format!("it holds {name}, which {INDEX} does not place there"),
                        })
                    })?;
                }
                if let Some((name, shard)) = placed.iter().find(|(name, _)| !by_name.contains_key(*name)) {
                    return Err(ModelError::Damaged {
                        file: source.name_of(shard),
                        reason: format!("{INDEX} places {name} there, but the shard does not hold it"),
                    });
                }
            }
        }
        Ok(Tensors { by_name })
    }

    /// Whether a tensor of this name is (still) there.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Takes a tensor out; what remains at the end was not understood.
    pub fn take(&mut self, name: &str) -> Result<Tensor, ModelError> {
        self.by_name.remove(name).ok_or_else(|| ModelError::MissingTensor { name: name.into() })
    }

    /// Drops the tensors whose names satisfy `unwanted`; returns how many and their bytes.
    pub fn skip(&mut self, unwanted: impl Fn(&str) -> bool) -> (usize, usize) {
        let mut skipped = (0, 0);
        self.by_name.retain(|name, tensor| {
            let drop = unwanted(name);
            if drop {
                skipped = (skipped.0 + 1, skipped.1 + tensor.bytes.len());
            }
            !drop
        });
        skipped
    }

    /// Names and tensors that are (still) there, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        self.by_name.iter()
    }
}

fn read_index(file: &str, json: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(json)
        .map_err(|e| ModelError::Damaged { file: file.into(), reason: format!("no usable weight_map: {e}") })?;
    // A shard name is a plain file name: anything else could leave the checkpoint directory.
    match index.weight_map.values().find(|s| s.contains(['/', '\\']) || !s.ends_with(".safetensors")) {
        None => Ok(index.weight_map),
        Some(shard) => Err(ModelError::Damaged {
            file: file.into(),
            reason: format!("{shard:?} is not the name of a safetensors file beside it"),
        }),
    }
}

fn read_shard(
    source: &Source,
    shard: &str,
    mut accept: impl FnMut(String, Tensor) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let file = Arc::new(source.map(shard)?);
    let damaged = |reason: String| ModelError::Damaged { file: source.name_of(shard), reason };
    let (header, metadata) = parse_header(&file).map_err(&damaged)?;
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let bytes = TensorBytes { file: Arc::clone(&file), range: header + start..header + end };
        accept(name, Tensor { dtype: info.dtype, shape: info.shape.clone(), bytes })?;
    }
    tracing::debug!(shard, bytes = file.len(), "mapped");
    Ok(())
}

/// Checks a safetensors file of any content: returns the offset of the data and the header. The reason of a refusal is
/// text for a person.
///
/// The crate's own reader checks the same, but its reasons do not say which tensor, and absurd offsets overflow in it.
pub fn parse_header(file: &[u8]) -> Result<(usize, Metadata), String> {
    let total = file.len();
    let too_short = || format!("{total} bytes are too few for a safetensors header");
    let (length, rest) = file.split_first_chunk().ok_or_else(too_short)?;
    let length = u64::from_le_bytes(*length);
    let json = usize::try_from(length).ok().and_then(|length| rest.get(..length)).ok_or_else(|| {
        format!("its header should be {length} bytes long, but the file has {total}; the download may be cut")
    })?;
    let entries: BTreeMap<String, Value> =
        serde_json::from_slice(json).map_err(|e| format!("its header is not a JSON object: {e}"))?;
    let mut tensors = entries
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, entry)| match serde_json::from_value::<TensorInfo>(entry) {
            Ok(info) => Ok((name, info)),
            Err(e) => Err(format!("its header describes tensor {name} badly: {e}")),
        })
        .collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let data = &rest[json.len()..];
    let end = tensors.iter().try_fold(0, |end, (name, info)| end_of_tensor(name, info, end))?;
    if end != data.len() {
        return Err(format!(
            "its tensors take {end} bytes, but {} follow the header; the download may be cut",
            data.len()
        ));
    }
    let metadata = Metadata::new(None, tensors).map_err(|e| format!("bad safetensors header: {e}"))?;
    Ok((total - data.len(), metadata))
}

/// Where the data of a tensor ends that should begin at `start`.
fn end_of_tensor(name: &str, info: &TensorInfo, start: usize) -> Result<usize, String> {
    let TensorInfo { dtype, shape, data_offsets: (from, to) } = info;
    if *from != start || to < from {
        let what = if *from < start { "overlaps the one before" } else { "leaves a gap" };
        return Err(format!("tensor {name} {what}: it takes bytes {from} to {to}, expected from {start} on"));
    }
    let bits = shape.iter().try_fold(dtype.bitsize(), |n, dim| n.checked_mul(*dim));
    match bits {
        Some(bits) if bits.is_multiple_of(8) && bits / 8 == to - from => Ok(*to),
        _ => Err(format!("tensor {name} is {dtype} {shape:?}, but its data is {} bytes", to - from)),
    }
}
