// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Words of names, and the glossary.

use std::collections::BTreeSet;
use std::fs;

use syn::visit::Visit;

use super::text::{Document, files, root};

/// Parts of a name in lower case: `RmbElement` and `rmb_element` have two.
pub(crate) fn parts(name: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let chars: Vec<char> = name.chars().collect();
    for (at, c) in chars.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|at| chars.get(at));
        let after = chars.get(at + 1);
        let begins = match before {
            None => true,
            Some(before) => {
                !before.is_alphabetic()
                    || c.is_uppercase() && before.is_lowercase()
                    || c.is_uppercase() && after.is_some_and(|after| after.is_lowercase())
            }
        };
        if !c.is_alphabetic() {
            continue;
        }
        match parts.last_mut().filter(|_| !begins) {
            Some(part) => part.extend(c.to_lowercase()),
            None => parts.push(c.to_lowercase().collect()),
        }
    }
    parts
}

fn words_of(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.flat_map(parts).collect()
}

/// Words of the first columns of the glossary.
pub(crate) fn glossary() -> BTreeSet<String> {
    let page = Document::read(&root().join("docs/glossary.md")).unwrap();
    let rows = page.text.lines().filter(|line| line.starts_with('|'));
    let mut words: BTreeSet<String> =
        rows.filter_map(|row| row.split('|').nth(1)).flat_map(words_of).collect();
    for word in words.clone() {
        words.insert(format!("{word}s"));
    }
    words
}

/// The list of ordinary words and terms, in its own order.
pub(crate) fn standard_lines() -> Vec<String> {
    let path = root().join("tests/tests/documents/standard.txt");
    fs::read_to_string(path).unwrap().lines().map(String::from).collect()
}

pub(crate) fn standard() -> BTreeSet<String> {
    standard_lines().into_iter().collect()
}

/// Names of types visible to other modules.
#[derive(Default)]
struct Types(Vec<String>);

impl Types {
    fn add(&mut self, vis: &syn::Visibility, name: &syn::Ident) {
        if !matches!(vis, syn::Visibility::Inherited) {
            self.0.push(name.to_string());
        }
    }
}

impl<'ast> Visit<'ast> for Types {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.vis, &item.ident);
    }
    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.vis, &item.ident);
    }
    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.vis, &item.ident);
    }
    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.vis, &item.ident);
    }
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let is_test = item.attrs.iter().any(|attr| attr.path().is_ident("cfg"));
        if !is_test {
            syn::visit::visit_item_mod(self, item);
        }
    }
}

fn is_test(name: &str) -> bool {
    name.split('/').any(|part| part == "tests") || name.ends_with("tests.rs")
}

/// Sources of the workspace by path from the root.
pub(crate) fn sources() -> Vec<(String, String)> {
    let mut paths = Vec::new();
    for folder in ["backend", "guest-driver", "smc-core", "tests", "xtask"] {
        files(&root().join(folder), "rs", &mut paths);
    }
    let named = paths.into_iter().map(|path| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        (name, fs::read_to_string(path).unwrap())
    });
    named.collect()
}

/// Words of the names of public types: word, name, file.
pub(crate) fn of_public_types() -> Vec<(String, String, String)> {
    let mut found = Vec::new();
    for (file, text) in sources() {
        if is_test(&file) {
            continue;
        }
        let mut types = Types::default();
        types.visit_file(&syn::parse_file(&text).unwrap());
        for name in types.0 {
            found.extend(parts(&name).into_iter().map(|word| (word, name.clone(), file.clone())));
        }
    }
    found
}
