//! Archives that depend on nothing but what is in them, and their checksums.

use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder, read::GzDecoder};
use sha2::{Digest, Sha256};

/// A directory in an archive, before it is written.
pub struct Archive {
    name: String,
    time: u64,
    files: Vec<(String, u32, Vec<u8>)>,
}

impl Archive {
    /// An empty directory of this name, in which everything is of this time, in seconds since 1970.
    pub fn new(name: &str, time: u64) -> Archive {
        Archive { name: name.into(), time, files: Vec::new() }
    }

    pub fn add(&mut self, name: &str, content: Vec<u8>) {
        self.files.push((name.into(), 0o644, content));
    }

    pub fn add_program(&mut self, name: &str, content: Vec<u8>) {
        self.files.push((name.into(), 0o755, content));
    }

    /// Writes `NAME.tar.gz`, with files in the order of their names, of no owner.
    pub fn write(mut self, directory: &Path) -> Result<PathBuf> {
        self.files.sort();
        let path = directory.join(format!("{}.tar.gz", self.name));
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut tar = tar::Builder::new(GzBuilder::new().mtime(0).write(file, Compression::best()));
        for (name, mode, content) in &self.files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(*mode);
            header.set_mtime(self.time);
            header.set_uid(0);
            header.set_gid(0);
            tar.append_data(&mut header, format!("{}/{name}", self.name), &content[..])?;
        }
        tar.into_inner()?.finish()?;
        Ok(path)
    }
}

/// Unpacks into a directory, and gives the one that was made in it.
pub fn unpack(archive: &Path, to: &Path) -> Result<PathBuf> {
    tar::Archive::new(GzDecoder::new(File::open(archive)?)).unpack(to)?;
    let first = std::fs::read_dir(to)?.next().context("an empty archive")??;
    Ok(first.path())
}

/// A line for each file, as `sha256sum --check` takes them in their directory.
pub fn checksums(files: &[PathBuf]) -> Result<String> {
    let mut sums = String::new();
    for path in files {
        let digest = Sha256::digest(std::fs::read(path)?);
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = writeln!(sums, "{digest}  {}", path.file_name().unwrap_or_default().to_string_lossy());
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_and_the_hour_of_packing_leave_no_trace() {
        let pack = |names: [&str; 2], directory: &Path| {
            let mut archive = Archive::new("lily", 1_000_000_000);
            for name in names {
                archive.add(name, name.as_bytes().to_vec());
            }
            archive.add_program("lily", vec![7; 1 << 16]);
            archive.write(directory).unwrap()
        };
        let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let first = pack(["a", "b/c"], one.path());
        let second = pack(["b/c", "a"], two.path());
        assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
        let top = unpack(&first, one.path().join("out").as_path()).unwrap();
        assert_eq!(std::fs::read(top.join("b/c")).unwrap(), b"b/c");
    }

    #[test]
    fn checksums_are_those_of_sha256() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        // The example of FIPS 180-2.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  abc\n";
        assert_eq!(checksums(&[path]).unwrap(), expected);
    }
}
