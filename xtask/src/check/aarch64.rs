//! The CPU backend for AArch64, checked on a machine that is none: its lints, and its unit tests on emulated processors.

use anyhow::Result;

use crate::toolchain::{has_std, runs};

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Compiler and emulator, by the names that Debian gives them.
const COMPILER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64-static";
/// Where Debian puts the C library of the target.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";
/// Processors to emulate, with the test of `lily-cpu` that says which kernels each runs.
const PROCESSORS: [(&str, &str); 3] = [("cortex-a72", "portable"), ("cortex-a76", "dotprod"), ("max", "i8mm")];

/// Checks as much as there are tools for, and says what it left out.
pub(super) fn run() -> Result<()> {
    if !has_std(TARGET)? {
        eprintln!("check: AArch64 NOT CHECKED: no standard library, `rustup target add {TARGET}` brings it");
        return Ok(());
    }
    if !runs(COMPILER) {
        eprintln!(
            "check: AArch64 NOT CHECKED: no {COMPILER}, in Debian's gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"
        );
        return Ok(());
    }
    cargo(&["clippy", "--all-targets"], &["-D", "warnings"], None)?;
    if !runs(EMULATOR) {
        eprintln!("check: AArch64 LINTED, NOT RUN: no {EMULATOR}, in Debian's qemu-user-static");
        return Ok(());
    }
    for (processor, kernels) in PROCESSORS {
        eprintln!("check: AArch64 on {processor}, kernels: {kernels}");
        let detects = format!("device::tests::detects::{kernels}");
        cargo(&["test", "--lib"], &["--ignored", "--exact", &detects], Some(processor))?;
        cargo(&["test", "--lib"], &[], Some(processor))?;
    }
    eprintln!("check: AArch64 linted, and its unit tests run on {} emulated processors", PROCESSORS.len());
    Ok(())
}

/// A command of cargo on the CPU backend, and on which processor what it builds runs.
fn cargo(command: &[&str], rest: &[&str], processor: Option<&str>) -> Result<()> {
    let mut cargo = super::command(command);
    cargo.args(["--package", "lily-cpu", "--target", TARGET, "--"]).args(rest);
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER);
    if let Some(processor) = processor {
        let runner = format!("{EMULATOR} -L {LIBRARIES} -cpu {processor}");
        cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    }
    super::succeed(&mut cargo)
}
