//! A checkpoint directory, or one that the binary carries, opened as a whole.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::config::Config;
use crate::error::ModelError;
use crate::safetensors::Tensors;
use crate::weights::Weights;

/// Where the files of a checkpoint are.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory.
    Directory(PathBuf),
    /// Files inside the binary: name and content.
    Embedded(&'static [(&'static str, &'static [u8])]),
    /// Files that were made in memory.
    Memory(MemoryFiles),
}

/// The files of a checkpoint in memory.
#[derive(Clone)]
pub struct MemoryFiles {
    name: String,
    files: Arc<BTreeMap<String, Arc<Vec<u8>>>>,
}

impl MemoryFiles {
    /// Files by name, under the name that messages call them by.
    pub fn new(name: impl Into<String>, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> MemoryFiles {
        let files = files.into_iter().map(|(file, content)| (file.to_owned(), Arc::new(content)));
        MemoryFiles { name: name.into(), files: Arc::new(files.collect()) }
    }
}

impl fmt::Debug for MemoryFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryFiles({:?}, {:?})", self.name, self.files.keys())
    }
}

/// A whole file that is mapped, for a device that can use its pages as they are. It stays mapped while this lives.
#[derive(Clone)]
pub struct MappedFile(Arc<FileBytes>);

impl MappedFile {
    /// `None` for bytes that are in no file.
    pub(crate) fn new(file: &Arc<FileBytes>) -> Option<MappedFile> {
        matches!(**file, FileBytes::Mapped { .. }).then(|| MappedFile(Arc::clone(file)))
    }

    /// All its bytes. The first stands at the beginning of a page; what the file leaves of its last page is mapped too.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The open file, to be mapped once more.
    pub fn file(&self) -> Option<&File> {
        match &*self.0 {
            FileBytes::Mapped { file, .. } => Some(file),
            _ => None,
        }
    }
}

impl PartialEq for MappedFile {
    fn eq(&self, other: &MappedFile) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedFile({} bytes)", self.0.len())
    }
}

/// The content of one file: mapped, inside the binary, or in memory.
pub(crate) enum FileBytes {
    Mapped { map: Mmap, file: File },
    Static(&'static [u8]),
    Shared(Arc<Vec<u8>>),
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Mapped { map, .. } => map,
            FileBytes::Static(bytes) => bytes,
            FileBytes::Shared(bytes) => bytes,
        }
    }
}

impl FileBytes {
    /// Copies the bytes from `start` on. A file is read, not looked at through its map: pages of a map come one by one, and a read
    /// of some megabytes at once.
    pub(crate) fn read_into(&self, start: usize, to: &mut [u8]) -> std::io::Result<()> {
        #[cfg(unix)]
        if let FileBytes::Mapped { file, .. } = self {
            return std::os::unix::fs::FileExt::read_exact_at(file, to, start as u64);
        }
        to.copy_from_slice(&self[start..start + to.len()]);
        Ok(())
    }
}

impl Source {
    /// The source as messages call it.
    pub fn describe(&self) -> String {
        match self {
            Source::Directory(path) => path.display().to_string(),
            Source::Embedded(_) => "the checkpoint inside the binary".into(),
            Source::Memory(files) => files.name.clone(),
        }
    }

    /// The file as messages call it.
    pub fn name_of(&self, file: &str) -> String {
        match self {
            Source::Directory(path) => path.join(file).display().to_string(),
            Source::Embedded(_) => format!("{file} inside the binary"),
            Source::Memory(files) => format!("{file} of {}", files.name),
        }
    }

    /// Whether the file is there.
    pub fn has(&self, file: &str) -> bool {
        match self {
            Source::Directory(path) => path.join(file).is_file(),
            Source::Embedded(files) => files.iter().any(|(name, _)| *name == file),
            Source::Memory(memory) => memory.files.contains_key(file),
        }
    }

    /// A small file, read whole; `None` if it does not exist.
    pub fn read_optional(&self, file: &str) -> Result<Option<Vec<u8>>, ModelError> {
        match self {
            Source::Directory(path) => match std::fs::read(path.join(file)) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(source) => Err(ModelError::Read { file: self.name_of(file), source }),
            },
            Source::Embedded(files) => {
                Ok(files.iter().find(|(name, _)| *name == file).map(|(_, bytes)| bytes.to_vec()))
            }
            Source::Memory(memory) => Ok(memory.files.get(file).map(|bytes| bytes.to_vec())),
        }
    }

    /// A small file that the checkpoint cannot do without.
    pub fn read(&self, file: &str) -> Result<Vec<u8>, ModelError> {
        self.read_optional(file)?.ok_or_else(|| ModelError::MissingFile {
            place: self.describe(),
            file: file.into(),
            needed: "config.json, tokenizer.json, a chat template and the weights",
        })
    }

    /// A large file, mapped read-only.
    #[expect(unsafe_code, reason = "memory mapping is unsafe by nature; see the SAFETY note")]
    pub(crate) fn map(&self, file: &str) -> Result<FileBytes, ModelError> {
        let missing_shard = || ModelError::MissingFile {
            place: self.describe(),
            file: file.into(),
            needed: "every shard that its index names",
        };
        match self {
            Source::Directory(path) => {
                let read = |source| ModelError::Read { file: self.name_of(file), source };
                let opened = File::open(path.join(file)).map_err(|e| match e.kind() {
                    std::io::ErrorKind::NotFound => ModelError::MissingFile {
                        place: self.describe(),
                        file: file.into(),
                        needed: "every shard that model.safetensors.index.json names; fetch it again",
                    },
                    _ => read(e),
                })?;
                if !opened.metadata().map_err(read)?.is_file() {
                    return Err(read(std::io::Error::other("it is not a file")));
                }
                // SAFETY: the map is read-only and handed out as bytes, for which every value is valid. A file that
                // another program shortens while it is mapped ends this process by SIGBUS, as for every mapping
                // reader; README says not to change a checkpoint in use.
                let map = unsafe { Mmap::map(&opened) }.map_err(read)?;
                // The file is then read in large pages, which decoding streams through up to a tenth faster. A file
                // system that has none refuses, and small ones do as well.
                #[cfg(target_os = "linux")]
                let _ = map.advise(memmap2::Advice::HugePage);
                Ok(FileBytes::Mapped { map, file: opened })
            }
            Source::Embedded(files) => files
                .iter()
                .find(|(name, _)| *name == file)
                .map(|(_, bytes)| FileBytes::Static(bytes))
                .ok_or_else(missing_shard),
            Source::Memory(memory) => {
                memory.files.get(file).map(|bytes| FileBytes::Shared(Arc::clone(bytes))).ok_or_else(missing_shard)
            }
        }
    }
}

/// An opened checkpoint: configuration checked, weights found and typed, nothing copied but the small vectors.
#[derive(Debug)]
pub struct Checkpoint {
    /// Where it came from.
    pub source: Source,
    /// Its sizes, quantization and stop tokens.
    pub config: Config,
    /// Its weights in packed form.
    pub weights: Weights,
}

impl Checkpoint {
    /// Opens the checkpoint in a directory.
    pub fn open(directory: impl AsRef<Path>) -> Result<Checkpoint, ModelError> {
        Checkpoint::load(Source::Directory(directory.as_ref().to_path_buf()))
    }

    /// Opens a checkpoint from any source.
    pub fn load(source: Source) -> Result<Checkpoint, ModelError> {
        if let Source::Directory(path) = &source
            && !path.is_dir()
        {
            return Err(ModelError::Read {
                file: path.display().to_string(),
                source: std::io::Error::new(std::io::ErrorKind::NotFound, "no such directory"),
            });
        }
        let config = Config::parse(&source.name_of("config.json"), &source.read("config.json")?)?;
        let weights = Weights::take_from(&config, Tensors::open(&source)?)?;
        Ok(Checkpoint { source, config, weights })
    }
}
