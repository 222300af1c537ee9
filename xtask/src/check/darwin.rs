//! The workspace for a Mac, linted on a machine that is none. Nothing is linked or run.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::toolchain::{has_std, rustc};

pub(super) const TARGET: &str = "aarch64-apple-darwin";
/// Crates of the standard library that are built from source where the target has none.
const STD: &str = "-Zbuild-std=core,alloc,std,panic_unwind,test";

/// What to do where there is no standard library.
pub(super) const NO_STD: &str = "no standard library, `rustup target add aarch64-apple-darwin` brings it, or its source as \
                                 `rustup component add rust-src` and Debian's rust-src bring it";

/// Checks, if the standard library for a Mac is there or can be built, and says if not.
pub(super) fn run() -> Result<()> {
    let mut clippy = super::command(&["clippy", "--workspace", "--all-targets", "--target", TARGET]);
    if !with_std(&mut clippy)? {
        eprintln!("check: Darwin NOT CHECKED: {NO_STD}");
        return Ok(());
    }
    let compiler = stand_in_compiler()?;
    clippy.env("CC_aarch64_apple_darwin", &compiler).env("AR_aarch64_apple_darwin", "true");
    super::succeed(clippy.args(["--", "-D", "warnings"]))?;
    eprintln!("check: Darwin linted");
    Ok(())
}

/// Has cargo build the standard library for a Mac if there is none; false if its source is not there either.
pub(super) fn with_std(cargo: &mut Command) -> Result<bool> {
    if has_std(TARGET)? {
        return Ok(true);
    }
    let Some(source) = std_source()? else { return Ok(false) };
    // Building it is refused by stable without the first, and looked for elsewhere without the second.
    cargo.arg(STD).env("RUSTC_BOOTSTRAP", "1").env("__CARGO_TESTS_ONLY_SRC_ROOT", source);
    Ok(true)
}

/// The source of this compiler's standard library: where rustup puts it, or Debian's package, unpacked by its version.
fn std_source() -> Result<Option<PathBuf>> {
    let version = rustc(&["--version"])?;
    let release = version.split_whitespace().nth(1).unwrap_or_default();
    let places = [
        PathBuf::from(rustc(&["--print", "sysroot"])?).join("lib/rustlib/src/rust/library"),
        PathBuf::from(format!("/usr/src/rustc-{release}/library")),
    ];
    Ok(places.into_iter().find(|place| place.join("std").is_dir()))
}

/// A C compiler that leaves empty files. Dependencies of dependencies compile C, whose objects only a linker would miss.
fn stand_in_compiler() -> Result<PathBuf> {
    let path = crate::root().join("target/darwin-cc");
    std::fs::create_dir_all(crate::root().join("target"))?;
    std::fs::write(&path, "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ \"$1\" = -o ] && : > \"$2\"; shift; done\n")?;
    make_executable(&path)?;
    Ok(path)
}

pub(super) fn make_executable(path: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
