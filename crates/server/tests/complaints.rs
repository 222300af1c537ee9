//! `docs/complaints.md` names tests; here is looked whether they exist.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The names of all functions in Rust files below a folder.
fn functions(folder: &Path, names: &mut HashSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, names);
        } else if path.extension().is_some_and(|suffix| suffix == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let names_of =
                text.lines().filter_map(|line| line.trim_start().trim_start_matches("async ").strip_prefix("fn "));
            names.extend(names_of.filter_map(|rest| rest.split(['(', '<']).next()).map(str::to_owned));
        }
    }
}

#[test]
fn every_test_that_the_complaints_name_exists() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut existing = HashSet::new();
    for part in ["model", "engine", "server", "cli"] {
        functions(&root.join("crates").join(part), &mut existing);
    }
    let text = fs::read_to_string(root.join("docs/complaints.md")).unwrap();
    let cells = text.lines().filter_map(|row| row.strip_suffix(" |")?.rsplit_once("| ")).map(|(_, tests)| tests);
    let named: Vec<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(named.len() > 80, "{}", named.len());
    let gone: Vec<&&str> = named.iter().filter(|name| !existing.contains(**name)).collect();
    assert!(gone.is_empty(), "no longer there: {gone:?}");
}
