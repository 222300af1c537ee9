//! What can be wrong with a checkpoint, by who can act on it.

/// Why a checkpoint cannot be used. Every message names the file or field, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file of the checkpoint could not be read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// Path or embedded name of the file.
        file: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file that every checkpoint needs is absent.
    #[error("{place} has no {file}: a checkpoint directory needs {needed}")]
    MissingFile {
        /// The directory that was searched.
        place: String,
        /// The absent file.
        file: String,
        /// What would make the directory complete.
        needed: &'static str,
    },
    /// A file is not what its name says: bad JSON, a broken safetensors header, a truncated shard.
    #[error("{file} is damaged: {reason}")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The configuration describes another model.
    #[error("not a model that lily runs: {field} is {found}, expected {expected}")]
    OtherModel {
        /// Path of the field in config.json.
        field: String,
        /// Its value.
        found: String,
        /// What Qwen3.6-35B-A3B has there.
        expected: String,
    },
    /// The same model in a form that lily does not read.
    #[error("unsupported checkpoint layout: {found}; {advice}")]
    Layout {
        /// What was recognised.
        found: String,
        /// Which checkpoint to use instead.
        advice: &'static str,
    },
    /// A tensor has the wrong dtype or shape.
    #[error("tensor {name}: found {found}, expected {expected}")]
    Tensor {
        /// Full name in the file.
        name: String,
        /// Its dtype and shape.
        found: String,
        /// What the configuration implies.
        expected: String,
    },
    /// A tensor that the model needs is in no shard.
    #[error("tensor {name} is missing: the checkpoint is incomplete or of another layout")]
    MissingTensor {
        /// Full name that was looked for.
        name: String,
    },
    /// Tensors that the model does not know were left over.
    #[error("{count} unknown tensor(s), the first is {first}: the checkpoint is of another model or layout")]
    UnknownTensors {
        /// The alphabetically first of them.
        first: String,
        /// How many there are.
        count: usize,
    },
}
