//! `report`: the page of benchmarks and its plots, made of the records in `bench/results`.

mod page;
mod records;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use records::Records;

#[derive(clap::Args)]
pub struct Args {}

/// The page, and where its plots lie beside it.
const PAGE: &str = "docs/benchmarks.md";
const PLOTS: &str = "images";
/// What names of plots begin with; files of that form without a record go.
const PREFIX: &str = "bench-";

/// A file of the page.
struct File {
    path: PathBuf,
    text: String,
}

pub fn run(_: &Args) -> Result<()> {
    let files = make()?;
    for path in stale(&files)? {
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    for File { path, text } in &files {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!("{PAGE} and {} plots", files.len() - 1);
    Ok(())
}

/// Whether the page is what its records make of it.
pub fn check() -> Result<()> {
    let files = make()?;
    let differs = |file: &&File| std::fs::read_to_string(&file.path).ok().as_ref() != Some(&file.text);
    let mut wrong: Vec<&Path> = files.iter().filter(differs).map(|file| file.path.as_path()).collect();
    let stale = stale(&files)?;
    wrong.extend(stale.iter().map(PathBuf::as_path));
    if let Some(path) = wrong.first() {
        let path = path.strip_prefix(crate::root()).unwrap_or(path).display();
        bail!("{path} is not what bench/results make of it: run `cargo xtask report`");
    }
    Ok(())
}

fn make() -> Result<Vec<File>> {
    let records = Records::read(&crate::root().join("bench/results"))?;
    let page = page::make(&records, PLOTS, PREFIX);
    let mut files = vec![File { path: crate::root().join(PAGE), text: page.text }];
    files.extend(page.plots.into_iter().map(|(name, text)| File { path: plots().join(name), text }));
    Ok(files)
}

fn plots() -> PathBuf {
    crate::root().join(PAGE).with_file_name(PLOTS)
}

/// Plots that the page no longer has.
fn stale(files: &[File]) -> Result<Vec<PathBuf>> {
    let directory = plots();
    if !directory.is_dir() {
        return Ok(Vec::new());
    }
    let files_there = std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_stale = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(PREFIX) && files.iter().all(|file| file.path != *path)
    };
    Ok(files_there.into_iter().filter(is_stale).collect())
}
