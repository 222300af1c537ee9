//! `goldens`: the wide checkpoint and what mlx-lm computes on it, too large to keep in the repository.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What `make_checkpoint.py wide` prints with the pinned versions: a digest of all names, dtypes, shapes and bytes.
const WIDE: &str = "04ce88b07c87caa06dc9ebaa1322a3dea2a22a0179e22f7383b1d47d4318a659";

#[derive(clap::Args)]
pub struct Args {
    /// Python 3.11 or later, for which MLX has a package.
    #[arg(long, default_value = "python3")]
    python: String,
    /// Make them again where they are.
    #[arg(long)]
    force: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let target = crate::root().join("target/goldens");
    let scripts = crate::root().join("tools/oracle");
    let goldens = target.join("wide.safetensors");
    if goldens.is_file() && !args.force {
        println!("{} is there; --force makes it again", goldens.display());
        return Ok(());
    }
    std::fs::create_dir_all(&target).with_context(|| format!("cannot make {}", target.display()))?;
    let venv = target.join("venv");
    let python = venv.join("bin/python");
    if !python.is_file() {
        call(&args.python, [OsStr::new("-m"), OsStr::new("venv"), venv.as_os_str()])?;
    }
    let requirements = scripts.join("requirements.txt");
    let pip = ["-m", "pip", "install", "--quiet", "--requirement"].map(OsStr::new);
    call(&python, pip.into_iter().chain([requirements.as_os_str()]))?;

    let wide = target.join("wide");
    let script = |name: &str| scripts.join(name).into_os_string();
    let size = OsStr::new("wide");
    let printed = call(&python, [&*script("make_checkpoint.py"), size, wide.as_os_str()])?;
    ensure!(printed.contains(WIDE), "the wide checkpoint should have the digest {WIDE}, but it was made as: {printed}");
    // Moved at the end, so that goldens of an interrupted run are not taken for whole ones.
    let unfinished = target.join("unfinished");
    call(&python, [&*script("make_goldens.py"), size, wide.as_os_str(), unfinished.as_os_str()])?;
    std::fs::rename(unfinished.join("wide.safetensors"), &goldens)?;
    std::fs::remove_dir_all(&unfinished)?;
    println!("{}, {}", wide.display(), goldens.display());
    Ok(())
}

/// Runs a program to its successful end and returns what it printed.
fn call<A: AsRef<OsStr> + Debug>(program: impl AsRef<Path>, args: impl IntoIterator<Item = A>) -> Result<String> {
    let mut command = Command::new(program.as_ref());
    command.args(args).stderr(Stdio::inherit());
    eprintln!("{command:?}");
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
