//! The packages that are linked into the binary.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, MetadataCommand, Node, Package, PackageId, TargetKind};

/// The binary's package, everything linked into it, and who needs whom.
pub struct Packages {
    /// Sorted by name and version.
    pub all: Vec<Package>,
    /// Direct dependencies among `all`.
    pub needs: HashMap<PackageId, Vec<PackageId>>,
    /// SHA-256 of a published package, by name and version.
    pub checksums: BTreeMap<(String, String), String>,
}

impl Packages {
    /// Those of a build for `target`. What only runs while it is built, tested or expanded is not linked.
    pub fn linked(target: &str) -> Result<Packages> {
        let options = ["--locked", "--filter-platform", target].map(str::to_owned);
        let mut command = MetadataCommand::new();
        let metadata = command.manifest_path(crate::root().join("Cargo.toml")).other_options(options).exec()?;
        let nodes = metadata.resolve.context("cargo resolved nothing")?.nodes;
        let nodes: HashMap<PackageId, Node> = nodes.into_iter().map(|node| (node.id.clone(), node)).collect();
        let packages: HashMap<PackageId, Package> =
            metadata.packages.into_iter().map(|package| (package.id.clone(), package)).collect();
        let binary = packages.values().find(|package| package.name == "lily-cli").context("no package lily-cli")?;
        let mut needs = HashMap::new();
        let mut waiting = vec![binary.id.clone()];
        while let Some(id) = waiting.pop() {
            if needs.contains_key(&id) {
                continue;
            }
            let node = nodes.get(&id).with_context(|| format!("cargo did not resolve {id}"))?;
            let normal =
                node.deps.iter().filter(|dep| dep.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal));
            let linked = normal.filter(|dep| packages.get(&dep.pkg).is_some_and(|package| !is_macro(package)));
            let linked: Vec<PackageId> = linked.map(|dep| dep.pkg.clone()).collect();
            waiting.extend(linked.iter().cloned());
            needs.insert(id, linked);
        }
        let used: HashSet<&PackageId> = needs.keys().collect();
        let mut all: Vec<Package> = packages.into_values().filter(|package| used.contains(&package.id)).collect();
        all.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        let lock = std::fs::read_to_string(crate::root().join("Cargo.lock"))?;
        Ok(Packages { all, needs, checksums: checksums(&lock) })
    }

    /// Those that others published.
    pub fn foreign(&self) -> impl Iterator<Item = &Package> {
        self.all.iter().filter(|package| package.source.is_some())
    }
}

fn is_macro(package: &Package) -> bool {
    package.targets.iter().any(|target| target.kind.contains(&TargetKind::ProcMacro))
}

/// `checksum` of the packages of a `Cargo.lock`, which cargo writes a key to a line.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut sums = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
            Some(line.trim_matches('"').to_owned())
        };
        if let (Some(name), Some(version), Some(sum)) = (value("name"), value("version"), value("checksum")) {
            sums.insert((name, version), sum);
        }
    }
    sums
}

#[cfg(test)]
pub mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_what_cargo_tree_shows() {
        let linked = Packages::linked("x86_64-unknown-linux-gnu").unwrap();
        let names: Vec<&str> = linked.all.iter().map(|package| package.name.as_str()).collect();
        // Of lily and of others, by way of others, and from C.
        assert!(["lily-cli", "lily-model", "tokenizers", "onig_sys", "rustls"].iter().all(|name| names.contains(name)));
        // A macro, something for builds, for tests, for developers, and for another system.
        assert!(!["serde_derive", "cc", "roxmltree", "xtask", "objc2-metal"].iter().any(|name| names.contains(name)));
        for package in linked.foreign() {
            assert!(linked.checksums.contains_key(&(package.name.to_string(), package.version.to_string())));
        }
    }
}
