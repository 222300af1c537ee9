//! Embeds the cubins that `cargo xtask cubins` left in `target/cubins`, if any, but for a Mac, which has no such GPU.

use std::fmt::Write as _;
use std::path::Path;

fn main() -> std::io::Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/cubins");
    // Cargo takes a path that is not there for changed, and would build all that uses this crate at every command.
    let _ = std::fs::create_dir_all(&directory);
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", directory.display());
    let mut list = String::from("/// Cubins by key.\nstatic EMBEDDED: &[(&str, &[u8])] = &[\n");
    let mut files: Vec<_> = match std::fs::read_dir(&directory) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => Vec::new(),
    };
    files.sort();
    let mac = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "macos");
    files.retain(|file| !mac && file.extension().is_some_and(|extension| extension == "cubin"));
    for file in &files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let _ = writeln!(list, "    ({name:?}, include_bytes!({:?})),", file.canonicalize()?);
    }
    list.push_str("];\n");
    let out = std::env::var_os("OUT_DIR").unwrap_or_default();
    std::fs::write(Path::new(&out).join("embedded.rs"), list)
}
