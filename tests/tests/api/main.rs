// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The public interface of each published library, compared with a list: a change of the list is
//! visible to users. `UPDATE_API=1 cargo test -p smc-tests --test api` writes the lists.
//!
//! The lists have public items of public modules and items named by a `pub use`, with public fields
//! and methods. Implementations of traits, and items hidden from the documentation, are left out.

#![allow(clippy::unwrap_used, reason = "a source that cannot be read fails the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{Attribute, Ident, ImplItem, Item, TraitItem, Visibility};

const LIBRARIES: [&str; 12] = [
    "backend/abi",
    "backend/eventfd-aio",
    "backend/device",
    "backend/vfio-user",
    "smc-core",
    "guest-driver/sys",
    "guest-driver/ism",
    "guest-driver/verbs",
    "guest-driver/rendezvous",
    "guest-driver/info",
    "guest-driver/af-smc",
    "guest-driver",
];

#[test]
fn the_public_interface_is_as_listed() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut faults = Vec::new();
    for folder in LIBRARIES {
        let is = Library::read(&tests.parent().unwrap().join(folder).join("src")).items();
        let list = tests.join("tests/api").join(folder.replace('/', "-") + ".txt");
        if std::env::var_os("UPDATE_API").is_some() {
            let lines: Vec<&str> = is.iter().map(String::as_str).collect();
            fs::write(&list, lines.join("\n") + "\n").unwrap();
        }
        let listed = fs::read_to_string(&list).unwrap_or_default();
        let listed: BTreeSet<String> = listed.lines().map(String::from).collect();
        faults.extend(listed.difference(&is).map(|line| format!("{folder}: gone: {line}")));
        faults.extend(is.difference(&listed).map(|line| format!("{folder}: new: {line}")));
    }
    assert!(faults.is_empty(), "if it should be so, see the first lines:\n{}", faults.join("\n"));
}

fn is_pub(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

/// Whether the documentation hides an item, or the item is only for tests.
fn is_left_out(attributes: &[Attribute]) -> bool {
    let is = |text: String| {
        text.contains("doc(hidden)") || text.contains("cfg(") && text.contains("test")
    };
    attributes.iter().any(|attribute| is(line(&attribute.meta)))
}

/// The source of something in one line, without its comments and attributes.
fn line(of: &impl Spanned) -> String {
    let text = of.span().source_text().unwrap_or_default();
    let is_code =
        |line: &&str| !line.trim_start().starts_with("//") && !line.trim_start().starts_with("#[");
    let words: Vec<&str> = text.lines().filter(is_code).flat_map(str::split_whitespace).collect();
    words.join(" ").replace("( ", "(").replace(", )", ")")
}

/// The modules of a crate: whether users can name the module, the users' name, and the items. Then the
/// names of every `pub use`.
#[derive(Default)]
struct Library {
    modules: Vec<(bool, String, Vec<Item>)>,
    used: BTreeSet<String>,
}

struct Names<'a>(&'a mut BTreeSet<String>);

impl Visit<'_> for Names<'_> {
    fn visit_use_name(&mut self, name: &syn::UseName) {
        self.0.insert(name.ident.to_string());
    }
    fn visit_use_rename(&mut self, name: &syn::UseRename) {
        self.0.insert(name.ident.to_string());
    }
}

impl Library {
    fn read(src: &Path) -> Library {
        let mut library = Library::default();
        library.add(&src.join("lib.rs"), src.to_owned(), true, String::new());
        library
    }

    /// Adds the module of a file, whose own modules lie in `folder`.
    fn add(&mut self, file: &Path, folder: PathBuf, public: bool, name: String) {
        let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let items = syn::parse_file(&text).unwrap().items;
        for item in &items {
            match item {
                Item::Mod(item) if item.content.is_none() && !is_left_out(&item.attrs) => {
                    let own = folder.join(item.ident.to_string());
                    let file = [own.join("mod.rs"), own.with_extension("rs")];
                    let file = file.iter().find(|file| file.exists()).unwrap();
                    let public = public && is_pub(&item.vis);
                    self.add(file, own.clone(), public, format!("{name}{}::", item.ident));
                }
                Item::Use(item) if is_pub(&item.vis) && !is_left_out(&item.attrs) => {
                    Names(&mut self.used).visit_use_tree(&item.tree);
                }
                _ => {}
            }
        }
        self.modules.push((public, name, items));
    }

    fn items(&self) -> BTreeSet<String> {
        let (mut found, mut types) = (BTreeSet::new(), BTreeSet::new());
        for (public, module, items) in &self.modules {
            for item in items {
                let Some((name, vis, attributes)) = head(item) else { continue };
                let named = *public || self.used.contains(&name.to_string());
                if named && is_pub(vis) && !is_left_out(attributes) {
                    types.insert(name.to_string());
                    let of = if *public { format!("{module}{name}") } else { name.to_string() };
                    found.extend(describe(item).into_iter().map(|text| format!("{of}{text}")));
                }
            }
        }
        for item in self.modules.iter().flat_map(|(_, _, items)| items) {
            let Item::Impl(item) = item else { continue };
            let of = line(&item.self_ty);
            let is_listed = types.contains(of.split('<').next().unwrap_or_default());
            if item.trait_.is_some() || !is_listed || is_left_out(&item.attrs) {
                continue;
            }
            found.extend(item.items.iter().filter_map(|member| match member {
                ImplItem::Fn(member) if is_pub(&member.vis) && !is_left_out(&member.attrs) => {
                    Some(format!("{of}::{}", line(&member.sig)))
                }
                ImplItem::Const(member) if is_pub(&member.vis) => {
                    Some(format!("{of}::const {}: {}", member.ident, line(&member.ty)))
                }
                _ => None,
            }));
        }
        found
    }
}

fn head(item: &Item) -> Option<(&Ident, &Visibility, &[Attribute])> {
    match item {
        Item::Fn(item) => Some((&item.sig.ident, &item.vis, &item.attrs)),
        Item::Const(item) => Some((&item.ident, &item.vis, &item.attrs)),
        Item::Static(item) => Some((&item.ident, &item.vis, &item.attrs)),
        Item::Type(item) => Some((&item.ident, &item.vis, &item.attrs)),
        Item::Struct(item) => Some((&item.ident, &item.vis, &item.attrs)),
        Item::Enum(item) => Some((&item.ident, &item.vis, &item.attrs)),
        Item::Trait(item) => Some((&item.ident, &item.vis, &item.attrs)),
        _ => None,
    }
}

/// The rest of an item's entry behind the name, a line for each part.
fn describe(item: &Item) -> Vec<String> {
    match item {
        Item::Fn(item) => vec![format!(": {}", line(&item.sig))],
        Item::Const(item) => vec![format!(": const {}", line(&item.ty))],
        Item::Static(item) => vec![format!(": static {}", line(&item.ty))],
        Item::Type(item) => vec![format!(" = {}", line(&item.ty))],
        Item::Struct(item) => {
            let fields = item.fields.iter().filter(|field| is_pub(&field.vis));
            let name =
                |field: &syn::Field| field.ident.as_ref().map_or("0".into(), Ident::to_string);
            let fields = fields.map(|field| format!(".{}: {}", name(field), line(&field.ty)));
            [format!(": struct{}", line(&item.generics))].into_iter().chain(fields).collect()
        }
        Item::Enum(item) => {
            let variants = item.variants.iter();
            variants
                .map(|of| format!("::{} {}", of.ident, line(&of.fields)).trim().into())
                .collect()
        }
        Item::Trait(item) => {
            let methods = item.items.iter().filter_map(|member| match member {
                TraitItem::Fn(member) => Some(format!("::{}", line(&member.sig))),
                _ => None,
            });
            [": trait".to_owned()].into_iter().chain(methods).collect()
        }
        _ => Vec::new(),
    }
}
