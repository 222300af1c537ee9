//! `dist`: a release, as an archive for each target: the binary, manual pages, completions, services, the licences of all that is
//! linked into it and a bill of these materials; with checksums.

mod archive;
mod licences;
mod packages;
mod sbom;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::check::mach_o;
use crate::toolchain;
use archive::Archive;
use packages::Packages;

#[derive(clap::Args)]
pub struct Args {
    /// Only for this target; may be given several times. Default: all that this machine can build for.
    #[arg(long = "target", value_name = "TRIPLE")]
    targets: Vec<String>,
    /// Where the archives go. Default: target/dist of this tree.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// What releases are made for.
const TARGETS: [&str; 3] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin"];
/// The compiler that links for AArch64 on another Linux, by the name that Debian gives it.
const CROSS_COMPILER: (&str, &str) = ("aarch64-unknown-linux-gnu", "aarch64-linux-gnu-gcc");
/// Files of the repository that go into each archive, with their names there.
const FILES: [(&str, &str); 5] = [
    ("LICENSE", "LICENSE"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("docs/install.md", "INSTALL.md"),
    ("packaging/lily.service", "service/lily.service"),
    ("packaging/lily.plist", "service/lily.plist"),
];
const COMPLETIONS: [(&str, &str); 3] = [("bash", "lily.bash"), ("zsh", "_lily"), ("fish", "lily.fish")];

pub fn run(args: &Args) -> Result<()> {
    let host = host()?;
    let wanted: Vec<&str> = match args.targets.is_empty() {
        true => TARGETS.to_vec(),
        false => args.targets.iter().map(String::as_str).collect(),
    };
    let mut targets = Vec::new();
    for target in wanted {
        ensure!(TARGETS.contains(&target), "{target} is none of the targets of releases: {}", TARGETS.join(", "));
        match missing(target, &host)? {
            None => targets.push(target),
            Some(what) if args.targets.is_empty() => eprintln!("dist: NO ARCHIVE for {target}: {what}"),
            Some(what) => bail!("no archive for {target}: {what}"),
        }
    }
    let commit = Commit::read()?;
    if targets.iter().any(|target| target.contains("linux")) {
        crate::cubins::make()?;
    }
    // Also where no archive is made of it: it prints the manual pages and the completions of all.
    let pages = Pages::print(&build(&host, &host)?)?;
    let out = args.out.clone().unwrap_or_else(|| crate::root().join("target/dist"));
    std::fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut archives = Vec::new();
    for target in targets {
        let binary = build(target, &host)?;
        let path = pack(target, &binary, &pages, &commit, &out)?;
        if target == host {
            smoke(&path)?;
        }
        let megabytes = std::fs::metadata(&path)?.len() as f64 / 1e6;
        println!("{}: {megabytes:.1} MB{}", path.display(), needs(&binary));
        archives.push(path);
    }
    ensure!(!archives.is_empty(), "this machine can build for no target");
    let sums = archive::checksums(&archives)?;
    let path = out.join("SHA256SUMS");
    std::fs::write(&path, sums).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

/// What this tree was when it was packed.
struct Commit {
    /// Seconds since 1970: the time of everything in the archives, so that the same commit makes the same ones.
    time: u64,
}

impl Commit {
    fn read() -> Result<Commit> {
        let changes = output(Command::new("git").args(["status", "--porcelain"]))?;
        if !changes.trim().is_empty() {
            eprintln!("dist: files differ from the commit, and the binary will say so");
        }
        let time = output(Command::new("git").args(["log", "-1", "--format=%ct"]))?;
        Ok(Commit { time: time.trim().parse().context("git tells no time of the commit")? })
    }
}

/// What this machine lacks to build for a target.
fn missing(target: &str, host: &str) -> Result<Option<String>> {
    if !toolchain::has_std(target)? {
        return Ok(Some(format!("no standard library, `rustup target add {target}` brings it")));
    }
    if target == host {
        return Ok(None);
    }
    let (cross, compiler) = CROSS_COMPILER;
    Ok(match host.contains("linux") {
        true if target == cross => (!toolchain::runs(compiler))
            .then(|| format!("no {compiler}, in Debian's gcc-aarch64-linux-gnu and libc6-dev-arm64-cross")),
        true if target.contains("apple") => mach_o::missing()?,
        _ => Some(format!("cannot link for it on {host}")),
    })
}

/// Builds the binary; the paths of this machine stay out of it.
fn build(target: &str, host: &str) -> Result<PathBuf> {
    let mut cargo = crate::cargo();
    cargo.args(["build", "--release", "--locked", "--package", "lily-cli", "--target", target]);
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let home = home.map(|home| format!("--remap-path-prefix={}=cargo", home.display()));
    let here = format!("--remap-path-prefix={}=lily", crate::root().display());
    let flags: Vec<String> = home.into_iter().chain([here]).collect();
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    if target != host && target == CROSS_COMPILER.0 {
        cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", CROSS_COMPILER.1);
    }
    let mac_from_elsewhere = target != host && target.contains("apple");
    if mac_from_elsewhere {
        mach_o::with_linker(&mut cargo)?;
    }
    eprintln!("dist: building for {target}");
    ensure!(cargo.current_dir(crate::root()).status().context("cannot run cargo")?.success(), "lily does not build");
    let binary = crate::target()?.join(target).join("release/lily");
    if mac_from_elsewhere {
        mach_o::verify(&binary)?;
        eprintln!("dist: linked against lists of what a Mac has, and run by none");
    }
    Ok(binary)
}

/// What the binary prints about itself, by path in an archive.
struct Pages(Vec<(String, Vec<u8>)>);

impl Pages {
    fn print(lily: &Path) -> Result<Pages> {
        let directory = tempfile::tempdir()?;
        output(Command::new(lily).arg("man").arg(directory.path()))?;
        let mut pages = Vec::new();
        for entry in std::fs::read_dir(directory.path())? {
            let entry = entry?;
            pages.push((format!("man/man1/{}", entry.file_name().to_string_lossy()), std::fs::read(entry.path())?));
        }
        for (shell, name) in COMPLETIONS {
            let script = output(Command::new(lily).args(["completions", shell]))?;
            pages.push((format!("completions/{name}"), script.into_bytes()));
        }
        Ok(Pages(pages))
    }
}

fn pack(target: &str, binary: &Path, pages: &Pages, commit: &Commit, out: &Path) -> Result<PathBuf> {
    let packages = Packages::linked(target)?;
    let version = env!("CARGO_PKG_VERSION");
    let mut archive = Archive::new(&format!("lily-{version}-{target}"), commit.time);
    archive.add_program("lily", std::fs::read(binary).with_context(|| format!("cannot read {}", binary.display()))?);
    for (path, name) in FILES {
        let text = std::fs::read(crate::root().join(path)).with_context(|| format!("cannot read {path}"))?;
        archive.add(name, text);
    }
    for (name, text) in &pages.0 {
        archive.add(name, text.clone());
    }
    archive.add("THIRD-PARTY-LICENSES.txt", licences::text(&packages)?.into_bytes());
    archive.add("lily.cdx.json", sbom::json(&packages, version, target, commit.time)?.into_bytes());
    archive.write(out)
}

/// Unpacks an archive elsewhere and runs what is in it.
fn smoke(path: &Path) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let top = archive::unpack(path, directory.path())?;
    let mut lily = Command::new(top.join("lily"));
    lily.args(["run", "--backend", "cpu", "--no-think", "-n", "8", "Tell me a story"]);
    // The model inside the binary, not one that was pulled here.
    let answer = output(lily.env("HOME", directory.path()).env_remove("XDG_DATA_HOME"))?;
    ensure!(!answer.trim().is_empty(), "the packed binary answers nothing");
    Ok(())
}

/// The C library that a Linux binary asks for, as far as `readelf` tells it.
fn needs(binary: &Path) -> String {
    let versions = output(Command::new("readelf").arg("--version-info").arg(binary)).unwrap_or_default();
    match newest_glibc(&versions) {
        Some((major, minor)) => format!(", needs glibc {major}.{minor} or newer"),
        None => String::new(),
    }
}

fn newest_glibc(versions: &str) -> Option<(u32, u32)> {
    let numbers = versions.split("GLIBC_").skip(1).filter_map(|rest| {
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    });
    numbers.max()
}

/// The target that this machine builds for.
fn host() -> Result<String> {
    let version = toolchain::rustc(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc tells no host")?.to_owned())
}

/// What a program printed that had to succeed.
fn output(command: &mut Command) -> Result<String> {
    let output = command.current_dir(crate::root()).output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_the_c_library_is_found_by_number() {
        let text =
            "0x0010: Name: GLIBC_2.9  Flags: none\n 0x0020: Name: GLIBC_2.34\n Name: GLIBC_2.2.5\n Name: GCC_3.0";
        assert_eq!(newest_glibc(text), Some((2, 34)));
        assert_eq!(newest_glibc(""), None);
    }

    #[test]
    fn what_a_target_lacks_is_said() {
        let host = host().unwrap();
        assert_eq!(missing(&host, &host).unwrap(), None);
        assert!(missing("s390x-unknown-linux-gnu", &host).unwrap().unwrap().contains("rustup target add s390x"));
    }

    #[test]
    fn each_archive_gets_what_it_should() {
        for (path, _) in FILES {
            assert!(crate::root().join(path).is_file(), "{path}");
        }
    }
}
