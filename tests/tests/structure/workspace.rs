//! What the tests read: the crates of the workspace, the table of rooms and the listed circles.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::names::{self, Crate, Map};
use crate::rooms::Rooms;

pub(crate) struct Workspace {
    root: PathBuf,
    /// Folders of the packages.
    pub(crate) packages: Vec<String>,
    /// The sources that belong to rooms, by path.
    pub(crate) texts: BTreeMap<String, String>,
    pub(crate) map: Map,
    pub(crate) rooms: Rooms,
    pub(crate) circles: Circles,
}

/// The circles that are there for a reason; the file circles.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Circles {
    /// Parent modules that use their own children, which use them.
    #[serde(default, rename = "parent")]
    pub(crate) parents: Vec<Circle>,
    #[serde(default)]
    pub(crate) files: Vec<Circle>,
    #[serde(default)]
    pub(crate) folders: Vec<Circle>,
    #[serde(default)]
    pub(crate) rooms: Vec<Circle>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Circle {
    pub(crate) members: Vec<String>,
    #[allow(dead_code, reason = "for people; the file is refused without it")]
    pub(crate) reason: String,
}

impl Circle {
    pub(crate) fn same(&self, members: &[String]) -> bool {
        let mut own = self.members.clone();
        own.sort();
        own == members
    }
}

/// The package whose every crate is tests.
const SUITES: &str = "tests";

impl Workspace {
    pub(crate) fn read() -> Result<Self, String> {
        // cargo names the sources to look at; a program that is run by hand uses those it was built from.
        let package = std::env::var_os("CARGO_MANIFEST_DIR");
        let root = package.map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from).join("..");
        let text = |path: &str| {
            fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"))
        };
        let toml = |path: &str| -> Result<toml::Table, String> {
            text(path)?.parse().map_err(|error| format!("{path}: {error}"))
        };
        let manifest = toml("Cargo.toml")?;
        let members = manifest["workspace"]["members"].as_array().cloned().unwrap_or_default();
        let packages: Vec<String> =
            members.iter().filter_map(|member| member.as_str()).map(str::to_owned).collect();
        let mut crates = Vec::new();
        let mut texts = BTreeMap::new();
        for package in &packages {
            crates.extend(crates_of(&root, package, &toml(&format!("{package}/Cargo.toml"))?));
            let dirs: &[&str] = if package == SUITES { &["src", "tests", "vm"] } else { &["src"] };
            for dir in dirs {
                read_sources(&root, &format!("{package}/{dir}"), &mut texts);
            }
        }
        let map = names::read(&crates, &texts)?;
        let rooms = Rooms::read(&text("docs/architecture.md")?, &packages)
            .map_err(|error| format!("docs/architecture.md: {error}"))?;
        let circles = "tests/tests/structure/circles.toml";
        let circles =
            toml::from_str(&text(circles)?).map_err(|error| format!("{circles}: {error}"))?;
        Ok(Self { root, packages, texts, map, rooms, circles })
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// The sources of the rooms, and those of all other tests.
    pub(crate) fn all_sources(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for package in &self.packages {
            read_sources(&self.root, package, &mut all);
        }
        all
    }
}

/// The crates of a package: its library and its programs, of the suites also each test.
fn crates_of(root: &Path, package: &str, manifest: &toml::Table) -> Vec<Crate> {
    let is_tests = package == SUITES;
    let at = |path: &str| format!("{package}/{path}");
    let lib = manifest.get("lib").and_then(toml::Value::as_table);
    let lib_value = |key: &str| lib.and_then(|lib| lib.get(key)).and_then(toml::Value::as_str);
    let package_name = manifest["package"]["name"].as_str().unwrap_or_default();
    let mut crates = Vec::new();
    let lib_root = at(lib_value("path").unwrap_or("src/lib.rs"));
    if root.join(&lib_root).exists() {
        let name = lib_value("name").unwrap_or(package_name).replace('-', "_");
        crates.push(Crate { name: Some(name), root: lib_root, is_tests });
    }
    let mut roots = Vec::new();
    roots.push(at("src/main.rs"));
    for kind in ["bin", "test", "example"] {
        let targets = manifest.get(kind).and_then(toml::Value::as_array);
        for target in targets.into_iter().flatten() {
            roots.extend(target.get("path").and_then(toml::Value::as_str).map(at));
        }
    }
    let dirs: &[&str] = if is_tests { &["src/bin", "tests"] } else { &["src/bin"] };
    for dir in dirs {
        let Ok(entries) = fs::read_dir(root.join(package).join(dir)) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if entry.path().is_dir() { format!("{name}/main.rs") } else { name };
            roots.push(at(&format!("{dir}/{path}")));
        }
    }
    roots.retain(|path| path.ends_with(".rs") && root.join(path).exists());
    roots.sort();
    roots.dedup();
    crates.extend(roots.into_iter().map(|root| Crate { name: None, root, is_tests }));
    crates
}

/// Adds all Rust sources under `dir`.
fn read_sources(root: &Path, dir: &str, out: &mut BTreeMap<String, String>) {
    let Ok(entries) = fs::read_dir(root.join(dir)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{dir}/{name}");
        if entry.path().is_dir() {
            if name != "target" {
                read_sources(root, &path, out);
            }
        } else if name.ends_with(".rs")
            && let Ok(text) = fs::read_to_string(entry.path())
        {
            out.insert(path, text);
        }
    }
}
