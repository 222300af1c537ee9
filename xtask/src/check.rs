//! `check`: what every change must pass.

mod aarch64;
mod darwin;
pub(crate) mod mach_o;
mod markdown;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::{CommandFactory, ValueEnum};

#[derive(clap::Args)]
pub struct Args {
    /// Only these, in this order; without any, all but the last.
    #[arg(value_enum)]
    stages: Vec<Stage>,
    /// The program whose commands the Markdown files may show; built if not given.
    #[arg(long, value_name = "FILE")]
    lily: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Stage {
    /// The code is formatted.
    Fmt,
    /// Clippy has nothing to say.
    Clippy,
    /// The tests pass.
    Test,
    /// The documentation builds, all its links lead somewhere.
    Doc,
    /// Links of the Markdown files lead somewhere, and the commands they show exist.
    Markdown,
    /// The page of benchmarks is what its records make of it.
    Report,
    /// The CPU backend for AArch64: lints, and unit tests on emulated processors. Says what it lacks tools for.
    Aarch64,
    /// The workspace for a Mac: lints against Apple's interfaces. Says if it lacks a standard library.
    Darwin,
    /// The binary for a Mac, linked against stub libraries; some minutes. Says what it lacks.
    MachO,
}

impl Stage {
    /// Those that run when none is named.
    const USUAL: [Stage; 7] =
        [Stage::Fmt, Stage::Clippy, Stage::Test, Stage::Doc, Stage::Markdown, Stage::Aarch64, Stage::Darwin];
}

pub fn run(args: &Args) -> Result<()> {
    let stages = if args.stages.is_empty() { &Stage::USUAL[..] } else { &args.stages };
    for stage in stages {
        eprintln!("check: {stage:?}");
        match stage {
            Stage::Fmt => {
                cargo(&["fmt", "--all", "--check"])?;
                cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])?;
            }
            Stage::Clippy => cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?,
            Stage::Test => cargo(&["test", "--workspace"])?,
            Stage::Doc => {
                let mut doc = command(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
                succeed(doc.env("RUSTDOCFLAGS", "-D warnings"))?;
            }
            Stage::Markdown => markdown(args.lily.as_deref())?,
            Stage::Report => crate::report::check()?,
            Stage::Aarch64 => aarch64::run()?,
            Stage::Darwin => darwin::run()?,
            Stage::MachO => mach_o::run()?,
        }
    }
    Ok(())
}

fn cargo(args: &[&str]) -> Result<()> {
    succeed(&mut command(args))
}

fn command(args: &[&str]) -> Command {
    let mut command = crate::cargo();
    command.args(args).current_dir(crate::root());
    command
}

fn succeed(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = command.status().with_context(|| format!("cannot run {shown}"))?;
    ensure!(status.success(), "{shown} failed");
    Ok(())
}

fn markdown(program: Option<&Path>) -> Result<()> {
    let program = program.map(std::path::absolute).transpose()?;
    let mut wrong = Vec::new();
    let (mut lily, mut xtask) = (Vec::new(), Vec::new());
    for path in tracked_markdown()? {
        let text = std::fs::read_to_string(crate::root().join(&path))?;
        for link in markdown::relative_links(&text) {
            let directory = Path::new(&path).parent().unwrap_or(Path::new(""));
            if !crate::root().join(directory).join(&link).exists() {
                wrong.push(format!("{path} links to {link}, which does not exist"));
            }
        }
        let commands = markdown::commands(&text);
        lily.extend(commands.lily.into_iter().map(|command| (path.clone(), command)));
        xtask.extend(commands.xtask.into_iter().map(|command| (path.clone(), command)));
    }
    let known = crate::Command::command();
    for (path, command) in xtask {
        if known.find_subcommand(&command).is_none() {
            wrong.push(format!("{path} shows cargo xtask {command}, which does not exist"));
        }
    }
    lily.sort_by(|a, b| a.1.cmp(&b.1));
    lily.dedup_by(|a, b| a.1 == b.1);
    for (path, subcommand) in lily {
        let mut lily = match &program {
            Some(program) => Command::new(program),
            None => command(&["run", "--quiet", "--package", "lily-cli", "--"]),
        };
        let output = lily.args([&subcommand, "--help"]).output().with_context(|| format!("cannot run {lily:?}"))?;
        if !output.status.success() {
            wrong.push(format!("{path} shows lily {subcommand}, which does not exist"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("{}", wrong.join("\n")) }
}

fn tracked_markdown() -> Result<Vec<String>> {
    let output = Command::new("git").args(["ls-files", "*.md"]).current_dir(crate::root()).output()?;
    ensure!(output.status.success(), "git ls-files failed");
    Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
}
