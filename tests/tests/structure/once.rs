// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Owners missing in the child of a fork. If another thread was making a value during the fork, the
//! value is never made (`ism_sys::OnceBox` waits for no thread). The standard library's own locks may
//! be held for ever. A thread's variable may take the program's memory at its making.

use super::refuse;
use super::sources::{Source, Workspace};

/// Sources running in processes of forking programs.
const ROOMS: [&str; 11] = [
    "backend/abi/src/",
    "backend/eventfd-aio/src/",
    "smc-core/src/",
    "guest-driver/info/src/",
    "guest-driver/src/",
    "guest-driver/c/src/",
    "guest-driver/sys/src/",
    "guest-driver/ism/src/",
    "guest-driver/verbs/src/",
    "guest-driver/rendezvous/src/",
    "guest-driver/preload/src/",
];

/// Types, macros and functions with calls able to wait for another thread's work on the same value.
const OWNED: [&str; 16] = [
    "OnceLock",
    "LazyLock",
    "OnceCell",
    "LazyCell",
    "Lazy<",
    "sync::Once",
    "lazy_static!",
    "Condvar",
    "Barrier",
    "print!(",
    "println!(",
    "stdin()",
    "stdout()",
    "stderr()",
    "env::set_var",
    "env::remove_var",
];

/// Files with some of these all the same, and the reason for no child to wait.
const LEFT: [(&str, &str); 6] = [
    ("smc-core/src/testing/", "only tests have it"),
    ("guest-driver/ism/src/transport/fake.rs", "only tests have it"),
    ("guest-driver/ism/src/transport/pci/release.rs", "no child can take over a function of PCI"),
    ("guest-driver/ism/src/virtqueue/control.rs", "no thread waits in a queue that is handed on"),
    ("guest-driver/preload/src/hooks/escapes.rs", "a local variable of one call"),
    ("guest-driver/preload/src/hooks/init.rs", "before the program's first thread"),
];

/// Thread variables with a destructor, or made by a call, and the reason for no keeper to make them:
/// both take libc's locks and the program's memory.
const MADE_LATE: [(&str, &str); 3] = [
    ("CURRENT", "a process that makes a keeper makes it before"),
    ("RING_MEMORY", "a keeper opens no device"),
    ("LAST", "a keeper executes no program"),
];

fn sources() -> impl Iterator<Item = Source> {
    let sources = Workspace::read().sources.into_iter();
    sources.filter(|source| ROOMS.iter().any(|room| source.path.starts_with(room)))
}

#[test]
fn nothing_has_an_owner_that_the_child_of_a_fork_does_not_have() {
    let mut faults = Vec::new();
    let mut left = Vec::new();
    for source in sources() {
        let lines = source.lines_with(&OWNED);
        match LEFT.iter().find(|(place, _)| source.path.starts_with(place)) {
            Some((place, _)) if !lines.is_empty() => left.push(*place),
            _ => faults.extend(lines.iter().map(|line| {
                format!("{}:{line}: has an owner: see `ism_sys::OnceBox`", source.path)
            })),
        }
    }
    let unused = LEFT.iter().filter(|(place, _)| !left.contains(place));
    faults.extend(unused.map(|(place, _)| format!("{place} has nothing with an owner")));
    refuse(&faults);
}

/// The thread variables of a source either made by a call, or of another type than `Cell`.
fn made_late(text: &str) -> Vec<&str> {
    let lists = text.split("thread_local! {").skip(1);
    let lists = lists.map(|list| list.split("\n}").next().unwrap_or_default());
    let variables = lists.flat_map(|list| list.split("static ").skip(1));
    let parts = variables.filter_map(|variable| {
        let (name, rest) = variable.split_once(": ")?;
        let (kind, value) = rest.split_once(" = ")?;
        Some((name, kind.trim_start_matches('['), value))
    });
    let late = parts
        .filter(|(_, kind, value)| !kind.starts_with("Cell<") || !value.starts_with("const {"));
    late.map(|(name, ..)| name).collect()
}

#[test]
fn variables_of_threads_are_there_before_a_keeper_needs_them() {
    let mut faults = Vec::new();
    for source in sources() {
        let late = made_late(&source.text).into_iter();
        let unknown = late.filter(|name| MADE_LATE.iter().all(|(known, _)| known != name));
        faults.extend(unknown.map(|name| format!("{}: {name} is made late", source.path)));
    }
    refuse(&faults);
}

#[test]
fn variables_that_are_made_late_are_found() {
    let source = "
thread_local! {
    static PLAIN: Cell<u32> = const { Cell::new(0) };
    /// With a destructor.
    static OWNER: RefCell<Option<Arc<u8>>> = const { RefCell::new(None) };
    static LIST: [Cell<u32>; 2] = const { [const { Cell::new(0) }; 2] };
    static CALLED: Cell<u32> = Cell::new(f());
}
static OTHER: u32 = f();
";
    assert_eq!(made_late(source), ["OWNER", "CALLED"]);
}
