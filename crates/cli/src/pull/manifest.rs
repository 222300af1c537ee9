//! The files of the pinned checkpoint: name, size and SHA-256 of each.

use anyhow::{Context, Result, bail, ensure};

/// The repository of the checkpoint on the hub.
pub const REPO: &str = "mlx-community/Qwen3.6-35B-A3B-4bit";

/// The commit of [`REPO`] that the manifest describes. A branch could move under a user's download.
pub const REVISION: &str = "38740b847e4cb78f352aba30aa41c76e08e6eb46";

const EMBEDDED: &str = include_str!("../../assets/manifest.tsv");

/// The files of a checkpoint, smallest first: a wrong endpoint shows within seconds, and the large ones end together.
#[derive(Debug)]
pub struct Manifest {
    pub files: Vec<Entry>,
}

/// One file of a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// A plain file name, without folders.
    pub name: String,
    pub size_bytes: u64,
    /// 64 lower-case hex digits.
    pub sha256: String,
}

impl Manifest {
    /// The manifest of [`REVISION`] that the binary carries.
    pub fn embedded() -> Result<Self> {
        Self::parse(EMBEDDED).context("embedded manifest")
    }

    /// Reads lines of `name <tab> bytes <tab> sha256`; empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// Names the line and the field that is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let mut files: Vec<Entry> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = Entry::parse(line).with_context(|| format!("line {}", index + 1))?;
            ensure!(
                files.iter().all(|file| file.name != entry.name),
                "line {}: {} is listed twice",
                index + 1,
                entry.name
            );
            files.push(entry);
        }
        ensure!(!files.is_empty(), "no file is listed");
        files.sort_by_key(|file| file.size_bytes);
        Ok(Self { files })
    }
}

impl Entry {
    fn parse(line: &str) -> Result<Self> {
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, bytes, sha256] = fields[..] else {
            bail!("expected name, bytes and sha256 between tabs, found {} fields", fields.len());
        };
        // A name must stay inside the directory, and must not meet the files that `pull` keeps there for itself.
        ensure!(
            !name.is_empty() && !name.starts_with('.') && !name.ends_with(".part") && !name.contains(['/', '\\', ':']),
            "name: found `{name}`, expected a plain file name"
        );
        let size_bytes = bytes.parse().with_context(|| format!("bytes: found `{bytes}`, expected a number"))?;
        ensure!(
            sha256.len() == 64 && sha256.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')),
            "sha256: found `{sha256}`, expected 64 lower-case hex digits"
        );
        Ok(Self { name: name.to_owned(), size_bytes, sha256: sha256.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259";

    #[test]
    fn embedded_manifest_is_the_published_checkpoint() {
        let files = Manifest::embedded().unwrap().files;
        assert_eq!(files.len(), 14);
        // Sizes as the hub lists them, added up by hand: four shards and ten small files.
        let shards: u64 = 5_288_196_018 + 5_368_472_749 + 5_368_324_139 + 4_377_211_365;
        let small: u64 = 7_764 + 23_591 + 202 + 215_755 + 390 + 1_312 + 19_989_343 + 1_139 + 6_722_759 + 385;
        assert_eq!(files.iter().map(|file| file.size_bytes).sum::<u64>(), shards + small);
        assert!(files.is_sorted_by_key(|file| file.size_bytes));
        let title = EMBEDDED.lines().next().unwrap();
        assert!(title.contains(REPO) && title.contains(REVISION), "the manifest is of another revision: {title}");
    }

    #[test]
    fn a_line_becomes_an_entry_and_comments_do_not() {
        let manifest = Manifest::parse(&format!("# title\n\nb.json\t7764\t{HASH}\na.json\t3\t{HASH}\n")).unwrap();
        let expected = |name: &str, size_bytes| Entry { name: name.into(), size_bytes, sha256: HASH.into() };
        assert_eq!(manifest.files, [expected("a.json", 3), expected("b.json", 7764)]);
    }

    #[test]
    fn a_wrong_line_is_refused_with_its_number_and_field() {
        let upper = HASH.to_uppercase();
        for (text, message) in [
            (String::new(), "no file"),
            (format!("#\na\t1\t{HASH}\na\t1\t{HASH}"), "line 3: a is listed twice"),
            (format!("a 1 {HASH}"), "line 1: expected name, bytes and sha256 between tabs, found 1 fields"),
            (format!("a\t1\t{HASH}\tmore"), "found 4 fields"),
            (format!("a\t-1\t{HASH}"), "line 1: bytes: found `-1`"),
            (format!("a\t18446744073709551616\t{HASH}"), "line 1: bytes"),
            ("a\t1\tabc".to_owned(), "line 1: sha256: found `abc`"),
            (format!("a\t1\t{upper}"), "line 1: sha256"),
            (format!("../a\t1\t{HASH}"), "line 1: name: found `../a`"),
            (format!("..\t1\t{HASH}"), "line 1: name"),
            (format!("/etc/a\t1\t{HASH}"), "line 1: name"),
            (format!("\t1\t{HASH}"), "line 1: name"),
            (format!("a.part\t1\t{HASH}"), "line 1: name"),
        ] {
            let error = format!("{:#}", Manifest::parse(&text).unwrap_err());
            assert!(error.contains(message), "{text:?}: {error}");
        }
    }
}
