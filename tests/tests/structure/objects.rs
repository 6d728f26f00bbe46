// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The size of objects: fields of a struct, and what belongs to a connection.

use std::collections::BTreeSet;

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
/// Of a connection, all of which may only shrink: files with methods, methods, and fields of all
/// structs in the folder.
const CONNECTION: [(&str, usize); 3] = [("files", 21), ("methods", 236), ("fields", 144)];

/// The structs of a file with their numbers of fields, and the methods of `Conn`.
#[derive(Default)]
struct Objects {
    structs: Vec<(String, usize)>,
    methods: usize,
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
        if !is_list {
            self.structs.push((name, item.fields.len()));
        }
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
    let mut faults = Vec::new();
    for ((what, limit), now) in CONNECTION.into_iter().zip([files, methods, fields]) {
        println!("{what}: {now}");
        if now != limit {
            faults.push(format!("{now} {what} of a connection, and the limit is {limit}"));
        }
    }
    refuse(&faults);
}
