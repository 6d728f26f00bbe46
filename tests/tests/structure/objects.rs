// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The size of objects: fields of a struct, and what belongs to a connection.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::refuse;
use super::sources::Workspace;

/// Most fields of an object. More of them want to be parts with names.
const FIELDS: usize = 16;
/// Derived by lists: arguments and reports. Layouts of the wire or the kernel are lists, too.
const DERIVED: [&str; 3] = ["Args", "Parser", "Serialize"];
/// Lists by name: settings, and values for a reader.
const NAMES: [&str; 3] = ["Config", "Limits", "Info"];
/// Objects above the limit, which may only shrink.
const ABOVE: [(&str, usize); 2] = [("LinkRecord", 17), ("Step", 20)];
/// Of a connection, all of which may only shrink: files with methods, methods, fields of all structs
/// in the folder, and the fields among them that `Conn` reaches.
const CONNECTION: [(&str, usize); 4] =
    [("files", 4), ("methods", 121), ("fields", 79), ("reachable fields", 66)];

/// The structs of a file with their numbers of fields, and the methods of `Conn`.
#[derive(Default)]
struct Objects {
    structs: Vec<(String, usize)>,
    methods: usize,
    /// Each struct and enum: its number of fields, and the names in their types.
    types: BTreeMap<String, (usize, BTreeSet<String>)>,
}

/// The names in the types of fields.
struct Names(BTreeSet<String>);

impl Visit<'_> for Names {
    fn visit_path_segment(&mut self, segment: &syn::PathSegment) {
        self.0.insert(segment.ident.to_string());
        visit::visit_path_segment(self, segment);
    }
}

fn fields<'a>(fields: impl Iterator<Item = &'a syn::Fields>) -> (usize, BTreeSet<String>) {
    let (mut number, mut names) = (0, Names(BTreeSet::new()));
    for fields in fields {
        number += fields.len();
        names.visit_fields(fields);
    }
    (number, names.0)
}

/// The number of fields of `from` and of each type behind them, once.
fn reachable(types: &BTreeMap<String, (usize, BTreeSet<String>)>, from: &str) -> usize {
    let (mut known, mut open) = (BTreeSet::new(), vec![from]);
    let mut sum = 0;
    while let Some(name) = open.pop() {
        if let Some((number, names)) = types.get(name).filter(|_| known.insert(name)) {
            sum += number;
            open.extend(names.iter().map(String::as_str));
        }
    }
    sum
}

impl Visit<'_> for Objects {
    fn visit_item_struct(&mut self, item: &syn::ItemStruct) {
        let is_list = |attribute: &syn::Attribute| match &attribute.meta {
            syn::Meta::List(list) if list.path.is_ident("derive") => {
                DERIVED.iter().any(|derived| list.tokens.to_string().contains(derived))
            }
            meta => meta.path().is_ident("repr"),
        };
        let name = item.ident.to_string();
        let is_list = item.attrs.iter().any(is_list) || NAMES.iter().any(|end| name.ends_with(end));
        self.types.insert(name.clone(), fields(std::iter::once(&item.fields)));
        if !is_list {
            self.structs.push((name, item.fields.len()));
        }
    }

    fn visit_item_enum(&mut self, item: &syn::ItemEnum) {
        let variants = item.variants.iter().map(|variant| &variant.fields);
        self.types.insert(item.ident.to_string(), fields(variants));
    }

    fn visit_item_impl(&mut self, item: &syn::ItemImpl) {
        let is_conn = matches!(&*item.self_ty, syn::Type::Path(path) if path.path.is_ident("Conn"));
        if is_conn && item.trait_.is_none() {
            let is_method = |item: &&syn::ImplItem| matches!(item, syn::ImplItem::Fn(_));
            self.methods += item.items.iter().filter(is_method).count();
        }
        visit::visit_item_impl(self, item);
    }
}

impl Objects {
    fn of(text: &str) -> Objects {
        let mut objects = Objects::default();
        objects.visit_file(&syn::parse_file(text).unwrap());
        objects
    }
}

#[test]
fn objects_have_few_fields() {
    let (mut faults, mut above) = (Vec::new(), BTreeSet::new());
    for source in Workspace::read().sources.iter().filter(|s| !s.path.contains("/testing/")) {
        for (name, fields) in Objects::of(&source.text).structs {
            let known = ABOVE.iter().find(|(known, _)| *known == name);
            above.extend(known.filter(|_| fields > FIELDS).map(|(name, _)| *name));
            let limit = known.map_or(FIELDS, |(_, limit)| *limit);
            if fields > limit {
                faults.push(format!("{}: {name} has {fields} fields of {limit}", source.path));
            }
        }
    }
    let gone = ABOVE.iter().filter(|(name, _)| !above.contains(name));
    faults.extend(gone.map(|(name, _)| format!("{name} is above the limit no more")));
    refuse(&faults);
}

#[test]
fn a_connection_does_not_grow() {
    let workspace = Workspace::read();
    let folder = |path: &str| path.starts_with("guest-driver/src/conn/");
    let objects = workspace.sources.iter().filter(|source| folder(&source.path));
    let objects: Vec<_> = objects.map(|source| Objects::of(&source.text)).collect();
    let files = objects.iter().filter(|objects| objects.methods > 0).count();
    let methods = objects.iter().map(|objects| objects.methods).sum();
    let fields =
        objects.iter().flat_map(|objects| &objects.structs).map(|(_, fields)| *fields).sum();
    let types = objects.iter().flat_map(|objects| objects.types.clone()).collect();
    let reachable = reachable(&types, "Conn");
    let mut faults = Vec::new();
    let numbers = [files, methods, fields, reachable];
    for ((what, limit), now) in CONNECTION.into_iter().zip(numbers) {
        println!("{what}: {now}");
        if now != limit {
            faults.push(format!("{now} {what} of a connection, and the limit is {limit}"));
        }
    }
    refuse(&faults);
}

#[test]
fn fields_are_counted_through_wrappers_and_variants_once() {
    let objects = Objects::of(
        "struct Conn { a: Mutex<Option<A>>, b: u8 } struct A { c: Arc<Conn>, d: B }
         enum B { C { e: u8 }, D(A, E), F } struct G { h: u8 }",
    );
    assert_eq!(reachable(&objects.types, "Conn"), 7);
}
