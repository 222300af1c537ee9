//! The binary for a Mac, linked on a machine that is none: code for arm64 is made, and every symbol from outside is one that a Mac has.
//! It cannot be run here.
//!
//! Linker and C compiler are those of Zig, which brings a Mac's C library as a list of symbols, but not its frameworks. What the binary
//! takes from those stands below, and is written down as stub libraries: a symbol that is not listed fails the link.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::darwin::{self, TARGET};

/// Of PyPI: version 0.17.1 of Zig.
const ZIG: &str = "ziglang==0.17.1";
/// The macOS that the Metal backend needs.
const ZIG_TARGET: &str = "aarch64-macos.15.0";

/// The libraries of a Mac that the binary may take symbols from, and these.
const LIBRARIES: &str = include_str!("mac_symbols.txt");

/// Links, if there is a standard library for a Mac and Zig can be had, and says if not.
pub(super) fn run() -> Result<()> {
    let mut build = super::command(&["build", "--package", "lily-cli", "--target", TARGET]);
    if !darwin::with_std(&mut build)? {
        eprintln!("check: Mach-O NOT LINKED: {}", darwin::NO_STD);
        return Ok(());
    }
    if let Some(what) = missing()? {
        eprintln!("check: Mach-O NOT LINKED: {what}");
        return Ok(());
    }
    with_linker(&mut build)?;
    super::succeed(&mut build)?;
    eprintln!("check: Mach-O linked, {} bytes", verify(&crate::target()?.join(TARGET).join("debug/lily"))?);
    Ok(())
}

/// What this machine lacks to link for a Mac.
pub(crate) fn missing() -> Result<Option<String>> {
    let zig = zig(&directory()?)?;
    Ok(zig.is_none().then(|| format!("no {ZIG}, which pip brings into a Python with venv")))
}

/// Has cargo compile C and link for a Mac.
pub(crate) fn with_linker(build: &mut Command) -> Result<()> {
    let directory = directory()?;
    let zig = zig(&directory)?.with_context(|| format!("no {ZIG}"))?;
    write_stubs(&directory)?;
    let compiler = script(&directory.join("cc"), &compiler(&zig, &directory))?;
    let archiver = script(&directory.join("ar"), &format!("exec {zig} ar \"$@\"\n"))?;
    let caches = directory.join("zig");
    build
        .env("CC_aarch64_apple_darwin", &compiler)
        .env("AR_aarch64_apple_darwin", &archiver)
        .env("CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER", &compiler)
        // Asked for only where there is none of Apple's, and not looked into.
        .env("SDKROOT", &directory)
        .env("ZIG_GLOBAL_CACHE_DIR", &caches)
        .env("ZIG_LOCAL_CACHE_DIR", &caches);
    Ok(())
}

fn directory() -> Result<PathBuf> {
    let directory = crate::root().join("target/mach-o");
    std::fs::create_dir_all(&directory)?;
    Ok(directory)
}

/// Checks a binary that was linked so, and tells its bytes.
pub(crate) fn verify(binary: &Path) -> Result<usize> {
    let bytes = std::fs::read(binary).with_context(|| format!("{}", binary.display()))?;
    check(&bytes)?;
    Ok(bytes.len())
}

/// A Mach-O executable for arm64 that is signed, as a Mac asks of every program.
fn check(bytes: &[u8]) -> Result<()> {
    const MAGIC: u32 = 0xfeed_facf;
    const ARM64: u32 = 0x0100_000c;
    const EXECUTABLE: u32 = 2;
    const CODE_SIGNATURE: u32 = 0x1d;
    let words = bytes.as_chunks().0;
    let word = |at: usize| words.get(at / 4).map_or(0, |bytes| u32::from_le_bytes(*bytes));
    ensure!([0, 4, 12].map(word) == [MAGIC, ARM64, EXECUTABLE], "what was linked is no Mach-O executable for arm64");
    // Load commands follow a header of 32 bytes; each begins with its kind and its length.
    let mut at = 32;
    let signed = (0..word(16)).any(|_| {
        let kind = word(at);
        at += word(at + 4) as usize;
        kind == CODE_SIGNATURE
    });
    ensure!(signed, "what was linked has no signature");
    Ok(())
}

/// How Zig is called, which is installed if it has to be.
fn zig(directory: &Path) -> Result<Option<String>> {
    let venv = directory.join("venv");
    let python = venv.join("bin/python");
    let runs = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let there = || runs(Command::new(&python).args(["-c", "import ziglang"]));
    let installed = there()
        || runs(Command::new("python3").args(["-m", "venv"]).arg(&venv))
            && runs(Command::new(&python).args(["-m", "pip", "install", "--quiet", ZIG]));
    Ok(installed.then(|| format!("'{}' -m ziglang", python.display())))
}

/// A script that is Zig's C compiler and linker for a Mac. What rustc and cc say of target and SDK is said by its own target.
fn compiler(zig: &str, directory: &Path) -> String {
    let stubs = directory.join("stubs");
    format!(
        "skip=
for argument do
  shift
  if [ -n \"$skip\" ]; then skip=; continue; fi
  case $argument in
    -arch | -isysroot | -target) skip=1 ;;
    --target=* | -mmacosx-version-min=* | -mmacos-version-min=*) ;;
    *) set -- \"$@\" \"$argument\" ;;
  esac
done
exec {zig} cc -target {ZIG_TARGET} -F '{0}' -L '{0}' \"$@\"
",
        stubs.display()
    )
}

fn script(path: &Path, text: &str) -> Result<PathBuf> {
    std::fs::write(path, format!("#!/bin/sh\n{text}"))?;
    darwin::make_executable(path)?;
    Ok(path.to_path_buf())
}

/// One stub library for each that is listed; it also exports a name of its own, because none may be empty.
fn write_stubs(directory: &Path) -> Result<()> {
    let mut lines = LIBRARIES.lines().filter(|line| !line.starts_with('#')).peekable();
    while let Some(installed) = lines.next() {
        let file = installed.rsplit('/').next().unwrap_or(installed);
        let name = file.trim_start_matches("lib").split('.').next().unwrap_or(file);
        let file = match installed.contains(".framework/") {
            true => format!("stubs/{name}.framework/{name}.tbd"),
            false => format!("stubs/lib{name}.tbd"),
        };
        let file = directory.join(file);
        std::fs::create_dir_all(file.parent().unwrap_or(directory))?;
        let mut text = format!(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{installed}'\nexports:\n  - targets: [ \
             arm64-macos ]\n    symbols: [ _lily_stub_of_{name}"
        );
        while let Some(symbol) = lines.next_if(|line| line.starts_with(' ')) {
            write!(text, ", _{}", symbol.trim())?;
        }
        text.push_str(" ]\n...\n");
        std::fs::write(file, text)?;
    }
    Ok(())
}
