// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Circles of files by their imports, and the size of each crate.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::refuse;
use super::sources::Workspace;

/// Files in circles, by crate: each number may only fall.
const IN_CIRCLES: [(&str, usize); 13] = [
    ("backend", 2),
    ("backend/device", 2),
    ("backend/vfio-user", 2),
    ("guest-driver", 11),
    ("guest-driver/conform", 2),
    ("guest-driver/ism", 4),
    ("guest-driver/preload", 7),
    ("guest-driver/rendezvous", 3),
    ("guest-driver/smc", 36),
    ("guest-driver/sys", 2),
    ("guest-driver/verbs", 3),
    ("smc-core", 3),
    ("xtask", 3),
];

/// The place of a file in its crate: `["conn", "send"]`.
type Module = Vec<String>;

/// The imports of one file: paths in its crate, and names re-exported for others.
#[derive(Default)]
struct Imports {
    module: Module,
    children: BTreeSet<String>,
    uses: Vec<Module>,
    /// The path behind each re-exported name.
    exports: BTreeMap<String, Module>,
}

impl Imports {
    /// The imports of the module's file.
    fn of(module: Module, text: &str) -> Imports {
        let mut imports = Imports { module, ..Imports::default() };
        let file = syn::parse_file(text).unwrap();
        for item in &file.items {
            if let syn::Item::Mod(item) = item {
                imports.children.insert(item.ident.to_string());
            }
        }
        imports.visit_file(&file);
        imports
    }

    /// The path from the root of the crate; `None`: another crate's.
    fn absolute(&self, path: &[String]) -> Option<Module> {
        let first = path.first()?;
        let mut from = match first.as_str() {
            "crate" => return Some(path.get(1..)?.to_vec()),
            "self" => self.module.clone(),
            "super" => {
                let supers = path.iter().take_while(|part| *part == "super").count();
                let parent = self.module.len().checked_sub(supers)?;
                let mut from = self.module.get(..parent)?.to_vec();
                from.extend(path.iter().skip(supers).cloned());
                return Some(from);
            }
            child if self.children.contains(child) => {
                let mut from = self.module.clone();
                from.push(child.to_owned());
                from
            }
            _ => return None,
        };
        from.extend(path.iter().skip(1).cloned());
        Some(from)
    }

    fn tree(&mut self, before: &[String], tree: &syn::UseTree, exports: bool) {
        let mut path = before.to_vec();
        let name = match tree {
            syn::UseTree::Path(part) => {
                path.push(part.ident.to_string());
                return self.tree(&path, &part.tree, exports);
            }
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.tree(before, tree, exports));
            }
            syn::UseTree::Glob(_) => String::new(),
            syn::UseTree::Name(name) if name.ident == "self" => String::new(),
            syn::UseTree::Name(name) => {
                path.push(name.ident.to_string());
                name.ident.to_string()
            }
            syn::UseTree::Rename(name) => {
                path.push(name.ident.to_string());
                name.rename.to_string()
            }
        };
        let Some(path) = self.absolute(&path) else { return };
        if exports && !name.is_empty() {
            self.exports.insert(name, path);
        } else {
            self.uses.push(path);
        }
    }
}

impl Visit<'_> for Imports {
    fn visit_item_use(&mut self, item: &syn::ItemUse) {
        let exports = !matches!(item.vis, syn::Visibility::Inherited);
        self.tree(&[], &item.tree, exports);
    }

    fn visit_item_mod(&mut self, item: &syn::ItemMod) {
        // Modules within a file have other parents.
        if item.content.is_none() {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if parts.len() > 1 {
            let path = self.absolute(&parts);
            self.uses.extend(path);
        }
        visit::visit_path(self, path);
    }
}

/// The module of a file below `src`.
fn module(path: &str) -> Module {
    let parts = path.trim_end_matches(".rs").split('/').map(str::to_owned);
    parts.filter(|part| !["mod", "lib", "main"].contains(&part.as_str())).collect()
}

/// The file with the definition of a path, through re-exports.
fn file_of(all: &BTreeMap<Module, Imports>, path: &[String], depth: usize) -> Option<Module> {
    let len = (0..=path.len()).rev().find(|len| all.contains_key(path.get(..*len).unwrap()))?;
    let (at, rest) = path.split_at(len);
    let exports = rest.first().and_then(|name| all.get(at)?.exports.get(name));
    match exports.filter(|_| depth < 8) {
        Some(path) => file_of(all, path, depth + 1),
        None => Some(at.to_vec()),
    }
}

/// The circles of a crate: files that reach each other by imports.
fn circles(files: &[(String, String)]) -> Vec<BTreeSet<Module>> {
    let all: BTreeMap<Module, Imports> =
        files.iter().map(|(path, text)| (module(path), Imports::of(module(path), text))).collect();
    let arrows = |from: &Module| {
        let uses = all.get(from).into_iter().flat_map(|imports| &imports.uses);
        let to: BTreeSet<Module> = uses.filter_map(|path| file_of(&all, path, 0)).collect();
        to
    };
    let arrows: BTreeMap<&Module, BTreeSet<Module>> =
        all.keys().map(|from| (from, arrows(from))).collect();
    let reach = |from: &Module| {
        let mut reached: BTreeSet<Module> = BTreeSet::new();
        let mut open: Vec<&Module> = arrows[from].iter().filter(|to| *to != from).collect();
        while let Some(next) = open.pop() {
            if reached.insert(next.clone()) {
                open.extend(arrows.get(next).into_iter().flatten());
            }
        }
        reached
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        all.keys().map(|from| (from, reach(from))).collect();
    let mut circles: Vec<BTreeSet<Module>> = Vec::new();
    for (from, to) in &reached {
        if to.contains(*from) && !circles.iter().any(|circle| circle.contains(*from)) {
            let circle = to.iter().filter(|other| reached[other].contains(*from));
            circles.push(circle.cloned().collect());
        }
    }
    circles
}

#[test]
fn circles_of_files_do_not_grow() {
    let workspace = Workspace::read();
    let mut faults = Vec::new();
    for package in workspace.packages.iter().filter(|package| !package.path.starts_with("tests")) {
        let within =
            |path: &str| Some(path.strip_prefix(&package.path)?.strip_prefix("/src/")?.to_owned());
        let sources = workspace.sources.iter();
        let files: Vec<_> =
            sources.filter_map(|s| Some((within(&s.path)?, s.text.clone()))).collect();
        let circles = circles(&files);
        let now: usize = circles.iter().map(BTreeSet::len).sum();
        let lines = |text: &str| text.lines().count();
        let product: usize = files.iter().map(|(_, text)| lines(text)).sum();
        let below = format!("{}/", package.path);
        let members = |path: &str| {
            let longest =
                workspace.packages.iter().filter(|p| path.starts_with(&format!("{}/", p.path)));
            longest.max_by_key(|p| p.path.len()).is_some_and(|p| p.path == package.path)
        };
        let all = workspace.all.iter().filter(|s| s.path.starts_with(&below) && members(&s.path));
        let all: usize = all.map(|source| lines(&source.text)).sum();
        println!(
            "{}: {product} lines, {} of tests, {now} files in {} circles",
            package.path,
            all.saturating_sub(product),
            circles.len(),
        );
        let limit =
            IN_CIRCLES.iter().find(|(path, _)| *path == package.path).map_or(0, |(_, n)| *n);
        if now > limit {
            let names = circles.iter().map(|circle| {
                let names = circle.iter().map(|module| module.join("/"));
                names.collect::<Vec<_>>().join(" ")
            });
            faults.push(format!(
                "{}: {now} files in circles, and the limit is {limit}: {}",
                package.path,
                names.collect::<Vec<_>>().join("; ")
            ));
        }
    }
    refuse(&faults);
}

#[test]
fn circles_are_found_through_re_exports_and_parents() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d; pub use b::B;"),
        ("a.rs", "use crate::B; pub struct A;"),
        ("b.rs", "use super::c::C; pub struct B;"),
        ("c.rs", "pub struct C; fn f() { crate::a::g() }"),
        ("d/mod.rs", "mod e; pub(crate) use e::E;"),
        ("d/e.rs", "use crate::{a, d}; use std::io; pub struct E;"),
    ];
    let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
    let found = circles(&files);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0], [["a"], ["b"], ["c"]].map(|m| m.map(str::to_owned).to_vec()).into());
}
