//! The licences of what is linked: as each package brings them, or by its expression where it brings none.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cargo_metadata::Package;
use spdx::{Expression, ParseMode};

use super::packages::Packages;

/// What files of licences are named, before an ending or a dash.
const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
/// Folders of a package that are searched below its own: sources of others lie in `ring/third_party/fiat`.
const DEPTH: usize = 2;
/// The one thing that is linked and is no package.
const STANDARD_LIBRARY: (&str, &str) = ("Rust standard library", "MIT OR Apache-2.0");

/// All licences, each text once.
pub fn text(packages: &Packages) -> Result<String> {
    let mut out = String::from(
        "lily is under the Apache License 2.0, see LICENSE. The program contains the following packages.\n\n",
    );
    // Texts, and which packages have them.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut add = |package: &str, text: &str| texts.entry(tidy(text)).or_default().push(package.to_owned());
    let (name, licence) = STANDARD_LIBRARY;
    let _ = writeln!(out, "{name}: {licence}");
    by_expression(licence)?.iter().for_each(|text| add(name, text));
    for package in packages.foreign() {
        let name = format!("{} {}", package.name, package.version);
        let licence = expression(package)?;
        let _ = writeln!(out, "{name}: {licence}");
        let directory = package.manifest_path.parent().context("a manifest without a directory")?;
        let mut found = Vec::new();
        search(directory.as_std_path(), DEPTH, &mut found)?;
        if found.is_empty() {
            found = by_expression(&licence)?;
        }
        found.iter().for_each(|text| add(&name, text));
    }
    let mut texts: Vec<(String, Vec<String>)> = texts.into_iter().collect();
    for (_, packages) in &mut texts {
        packages.dedup();
    }
    texts.sort_by(|a, b| a.1.cmp(&b.1));
    for (text, packages) in texts {
        let _ = write!(out, "\n{}\n{}\n\n{text}\n", "=".repeat(80), packages.join(", "));
    }
    Ok(out)
}

/// The licence of a package as an SPDX expression.
pub fn expression(package: &Package) -> Result<String> {
    let stated = package.license.as_deref().with_context(|| format!("{} states no licence", package.name))?;
    let canonical = Expression::canonicalize(stated).with_context(|| format!("{}: {stated:?}", package.name))?;
    Ok(canonical.unwrap_or_else(|| stated.to_owned()))
}

/// The texts of all licences in an expression.
fn by_expression(expression: &str) -> Result<Vec<String>> {
    let parsed = Expression::parse_mode(expression, ParseMode::LAX).with_context(|| format!("{expression:?}"))?;
    let ids = parsed.requirements().filter_map(|part| part.req.license.id());
    let texts: Vec<String> = ids.map(|id| id.text().to_owned()).collect();
    ensure!(!texts.is_empty(), "{expression} names no known licence");
    Ok(texts)
}

/// Adds the texts of the files of licences.
fn search(directory: &Path, depth: usize, found: &mut Vec<String>) -> Result<()> {
    let mut entries = std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_dir() && depth > 0 {
            search(&path, depth - 1, found)?;
        } else if path.is_file() && is_licence(&name) {
            found.push(String::from_utf8_lossy(&std::fs::read(&path)?).into_owned());
        }
    }
    Ok(())
}

/// Whether an upper-case name is that of a licence: `LICENSE-MIT`, `COPYING.md`, not `LICENSE.RS`.
fn is_licence(name: &str) -> bool {
    let rest = NAMES.iter().find_map(|licence| name.strip_prefix(licence));
    rest.is_some_and(|rest| (rest.is_empty() || rest.starts_with(['-', '.', '_'])) && !rest.ends_with(".RS"))
}

/// Without blanks at the ends of lines and empty lines around, in which copies of a text differ.
fn tidy(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_listed_and_has_a_text() {
        let packages = Packages::linked("x86_64-unknown-linux-gnu").unwrap();
        let text = text(&packages).unwrap();
        let (list, texts) = text.split_once(&"=".repeat(80)).unwrap();
        for package in packages.foreign() {
            let name = format!("{} {}", package.name, package.version);
            assert!(list.contains(&format!("\n{name}: ")) && texts.contains(&name), "{name}");
        }
        // Of C code in a folder below its package.
        assert!(texts.contains("K.Kosako"));
    }

    #[test]
    fn names_of_licences_are_told_from_names_of_code() {
        assert!(
            ["LICENSE", "LICENSE-MIT", "COPYING.MD", "UNLICENSE", "NOTICE.TXT"].iter().all(|name| is_licence(name))
        );
        assert!(!["LICENSES", "LICENSE.RS", "README", "NOTICES.C"].iter().any(|name| is_licence(name)));
    }

    #[test]
    fn an_expression_gives_the_text_of_each_licence() {
        let texts = by_expression("MIT OR Apache-2.0").unwrap();
        assert!(texts[0].contains("MIT License") && texts[1].contains("Apache License"));
        assert!(by_expression("no licence").is_err());
    }
}
