// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks in forking processes. The child has a copy of each lock in its state at the fork, and no
//! thread to release a held one, so no lock may be forgotten.
//!
//! In the driver and the sockets an owner names each of its locks in `try_hold` or `is_unlocked`
//! (`ism_sys::ForkLocks`). In the preloaded library every lock is of `sys/fork_lock.rs`: a child takes
//! such locks away from missing threads.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{Attribute, Fields, Item, ItemImpl, Type};

use super::refuse;
use super::sources::Workspace;

/// The crates with devices and connections used by a keeper, the child of a fork.
const TAKEN_OVER: [&str; 3] =
    ["guest-driver/sys/src/", "guest-driver/ism/src/", "guest-driver/src/"];

/// Locks never taken by a keeper, with the reason.
const LEFT: [(&str, &str); 10] = [
    ("guest-driver/src/capture.rs", "only the process that is captured takes it"),
    ("guest-driver/src/smcr/", "no child can take over what an RNIC keeps of a process"),
    ("guest-driver/src/socket/listener.rs", "a keeper accepts nothing"),
    ("guest-driver/src/socket/poller.rs", "pollers are the program's"),
    ("guest-driver/src/socket/tokio/", "runtimes are the program's"),
    ("guest-driver/src/socket/watch.rs", "a keeper makes a watch of its own"),
    ("guest-driver/src/reactor/poll_queue.rs", "so its connections have no queues of the parent"),
    ("guest-driver/src/socket/stream.rs", "calls of the program take them; drop needs no lock"),
    ("guest-driver/ism/src/transport/pci/", "no child can take over a function of PCI"),
    ("guest-driver/ism/src/transport/fake.rs", "only tests have it"),
];

/// A lock of a struct.
#[derive(Debug)]
struct Lock {
    file: String,
    owner: String,
    field: String,
}

/// A method naming held locks.
struct Method {
    file: String,
    owner: String,
    body: String,
}

#[derive(Default)]
struct Found {
    file: String,
    locks: Vec<Lock>,
    /// Statics of a lock type of the standard library.
    statics: Vec<String>,
    methods: Vec<Method>,
}

fn is_of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let text = list.tokens.to_string();
            text.contains("test") || text.contains("loom") && !text.contains("not")
        }
        _ => false,
    })
}

/// The text of a piece of source, without white space.
fn words(of: &impl syn::spanned::Spanned) -> String {
    let text = of.span().source_text().unwrap_or_default();
    text.split_whitespace().collect()
}

/// Whether a type is a lock, or holds one directly.
fn is_lock(of: &Type) -> bool {
    struct Locks(bool);
    impl Visit<'_> for Locks {
        fn visit_path_segment(&mut self, segment: &syn::PathSegment) {
            self.0 |= segment.ident == "Mutex" || segment.ident == "RwLock";
            visit::visit_path_segment(self, segment);
        }
    }
    let mut locks = Locks(false);
    locks.visit_type(of);
    locks.0
}

impl Visit<'_> for Found {
    fn visit_item(&mut self, item: &Item) {
        let attributes: &[Attribute] = match item {
            Item::Mod(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            _ => &[],
        };
        if !is_of_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &syn::ItemStruct) {
        self.add(&item.ident, &item.fields);
    }

    fn visit_item_enum(&mut self, item: &syn::ItemEnum) {
        item.variants.iter().for_each(|variant| self.add(&item.ident, &variant.fields));
    }

    fn visit_item_static(&mut self, item: &syn::ItemStatic) {
        if is_lock(&item.ty) {
            self.statics.push(format!("{}: {}", self.file, item.ident));
        }
    }

    fn visit_item_impl(&mut self, item: &ItemImpl) {
        let owner = words(&item.self_ty);
        let owner = owner.split('<').next().unwrap_or_default();
        for member in &item.items {
            if let syn::ImplItem::Fn(method) = member
                && (method.sig.ident == "try_hold" || method.sig.ident == "is_unlocked")
            {
                let (file, owner) = (self.file.clone(), owner.to_owned());
                self.methods.push(Method { file, owner, body: words(&method.block) });
            }
        }
        visit::visit_item_impl(self, item);
    }
}

fn read(folders: &[&str]) -> Found {
    let mut found = Found::default();
    for source in Workspace::read().sources {
        if folders.iter().any(|folder| source.path.starts_with(folder)) {
            found.file.clone_from(&source.path);
            found.visit_file(&syn::parse_file(&source.text).unwrap());
        }
    }
    found
}

/// Whether `body` has `before.field`, and not only a longer name.
fn names(body: &str, before: &str, field: &str) -> bool {
    let name = format!("{before}.{field}");
    body.match_indices(&name).any(|(at, _)| {
        let after = body.as_bytes().get(at + name.len()).copied().unwrap_or(b' ');
        !after.is_ascii_alphanumeric() && after != b'_'
    })
}

impl Found {
    fn add(&mut self, owner: &syn::Ident, fields: &Fields) {
        for (at, field) in fields.iter().enumerate() {
            // A guard refers to a lock of another owner.
            if is_lock(&field.ty) && !matches!(field.ty, Type::Reference(_)) {
                let name = field.ident.as_ref().map_or_else(|| at.to_string(), ToString::to_string);
                let (file, owner) = (self.file.clone(), owner.to_string());
                self.locks.push(Lock { file, owner, field: name });
            }
        }
    }

    /// Whether the lock is named by its owner, or by an owner in the same folder with the lock in a
    /// part of its own.
    fn has_named(&self, lock: &Lock) -> bool {
        let folder = |file: &str| file.rsplit_once('/').map(|(folder, _)| folder.to_owned());
        self.methods.iter().any(|method| {
            let is_near = folder(&method.file) == folder(&lock.file);
            let own = method.owner == lock.owner && is_near;
            let part = || {
                let parts = method.body.split("self.").skip(1).filter_map(|rest| {
                    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
                });
                is_near
                    && parts
                        .into_iter()
                        .any(|part| names(&method.body, &format!("self.{part}"), &lock.field))
            };
            own && names(&method.body, "self", &lock.field) || part()
        })
    }
}

#[test]
fn each_lock_of_devices_and_connections_is_held_or_looked_at_around_a_fork() {
    let found = read(&TAKEN_OVER);
    assert!(found.locks.len() > 20, "the locks are found: {:?}", found.locks);
    let is_left = |file: &str| LEFT.iter().any(|(place, _)| file.starts_with(place));
    let forgotten = found.locks.iter().filter(|lock| !is_left(&lock.file));
    let mut faults: Vec<String> = forgotten
        .filter(|lock| !found.has_named(lock))
        .map(|Lock { file, owner, field }| {
            format!("{file}: no try_hold and no is_unlocked names {owner}.{field}")
        })
        .collect();
    faults.extend(found.statics);
    let files: BTreeSet<&str> = found.locks.iter().map(|lock| lock.file.as_str()).collect();
    let is_used = |place: &str| files.iter().any(|file| file.starts_with(place));
    let unused = LEFT.iter().filter(|(place, _)| !is_used(place) && !place.ends_with("fake.rs"));
    faults.extend(unused.map(|(place, _)| format!("{place} has no locks")));
    refuse(&faults);
}

#[test]
fn the_preloaded_library_has_no_lock_that_a_child_could_find_held_for_ever() {
    let found = read(&["guest-driver/preload/src/"]);
    let mut faults = found.statics;
    faults.extend(found.locks.iter().map(|lock| format!("{lock:?}")));
    refuse(&faults);
}

#[test]
fn a_lock_that_its_owner_forgets_is_found() {
    let source = "
        struct Owner { one: Mutex<u8>, other: Mutex<u8>, part: Part, plain: u8 }
        struct Part { inner: std::sync::RwLock<u8>, forgotten: Mutex<Vec<u8>> }
        struct Tuple(Mutex<u8>);
        static GLOBAL: Mutex<u8> = Mutex::new(0);
        impl ForkLocks for Owner {
            fn is_unlocked(&self) -> bool { is_free(&self.one) && is_free(&self.part.inner) }
        }
        impl Tuple { fn try_hold(&self) -> bool { try_hold(&self.0) } }
        #[cfg(test)]
        mod tests { struct Other { lock: Mutex<u8> } }
    ";
    let mut found = Found { file: "room/file.rs".into(), ..Found::default() };
    found.visit_file(&syn::parse_file(source).unwrap());
    let forgotten: Vec<_> = found.locks.iter().filter(|lock| !found.has_named(lock)).collect();
    let fields: Vec<_> = forgotten.iter().map(|lock| lock.field.as_str()).collect();
    assert_eq!(fields, ["other", "forgotten"]);
    assert_eq!(found.statics, ["room/file.rs: GLOBAL"]);
}
