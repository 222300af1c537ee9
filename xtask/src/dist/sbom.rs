//! The bill of materials in CycloneDX 1.6.

use anyhow::Result;
use cargo_metadata::Package;
use serde_json::{Value, json};

use super::licences;
use super::packages::Packages;

/// The bill of the binary for `target`, made at `time` in seconds since 1970.
pub fn json(packages: &Packages, version: &str, target: &str, time: u64) -> Result<String> {
    let is_binary = |package: &&Package| package.name == "lily-cli";
    let parts = packages.all.iter().filter(|package| !is_binary(package));
    let components = parts.map(|package| component(packages, package)).collect::<Result<Vec<_>>>()?;
    let dependencies: Vec<Value> = packages
        .all
        .iter()
        .map(|package| {
            let needs = packages.all.iter().filter(|other| packages.needs[&package.id].contains(&other.id));
            json!({"ref": reference(package), "dependsOn": needs.map(reference).collect::<Vec<_>>()})
        })
        .collect();
    let binary = packages.all.iter().find(is_binary).map_or_else(String::new, reference);
    let bill = json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + std::time::Duration::from_secs(time)).to_string(),
            "component": {
                "type": "application", "bom-ref": binary, "name": "lily", "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [{"name": "lily:target", "value": target}],
            },
        },
        "components": components,
        "dependencies": dependencies,
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

fn component(packages: &Packages, package: &Package) -> Result<Value> {
    let mut component = json!({
        "type": "library", "bom-ref": reference(package), "name": *package.name, "version": package.version.to_string(),
        "licenses": [{"expression": licences::expression(package)?}],
    });
    if package.source.is_some() {
        component["purl"] = reference(package).into();
    }
    if let Some(sum) = packages.checksums.get(&(package.name.to_string(), package.version.to_string())) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    if let Some(repository) = package.repository.as_deref().filter(|address| address.starts_with("https://")) {
        component["externalReferences"] = json!([{"type": "vcs", "url": repository}]);
    }
    Ok(component)
}

/// A package URL, by which tools look up what is known about a package; lily's own are published nowhere.
fn reference(package: &Package) -> String {
    match package.source {
        Some(_) => format!("pkg:cargo/{}@{}", package.name, package.version),
        None => format!("{}@{}", package.name, package.version),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_reference_leads_to_a_part_and_every_part_is_needed() {
        let packages = Packages::linked("x86_64-unknown-linux-gnu").unwrap();
        let bill: Value = serde_json::from_str(&json(&packages, "1.2.3", "a-target", 86_400).unwrap()).unwrap();
        assert_eq!(bill["metadata"]["timestamp"], "1970-01-02T00:00:00Z");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let parts: HashSet<String> =
            bill["components"].as_array().unwrap().iter().map(|part| text(&part["bom-ref"])).collect();
        let dependencies = bill["dependencies"].as_array().unwrap();
        let needed: HashSet<String> =
            dependencies.iter().flat_map(|entry| entry["dependsOn"].as_array().unwrap()).map(text).collect();
        assert_eq!(parts, needed);
        assert_eq!(dependencies.len(), parts.len() + 1);
        assert!(parts.iter().any(|part| part.starts_with("pkg:cargo/tokenizers@")));
    }
}
