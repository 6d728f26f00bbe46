// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks docs/architecture.md's table of crates and rooms against the sources, beyond the checks of
//! the compiler.
//!
//! By the compiler a crate uses only the crates in its Cargo.toml, without circles, and `unsafe`
//! stands only where a crate allows it. By these tests the table agrees with both, rooms within one
//! crate use the rooms named in their row, and files stay short.

#![allow(clippy::unwrap_used, reason = "a source that cannot be read fails the test")]

mod circles;
mod functions;
mod locks;
mod objects;
mod once;
mod orders;
mod sources;
mod table;

use std::collections::BTreeSet;

use sources::{Source, Workspace};
use table::{MayBeUnsafe, Row, Table};

/// Most lines of a file, still easy to hold in the head.
const LINES: usize = 700;

/// Fails with the whole list of `faults`, to show every fault of a change at once.
fn refuse(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn words(of: &BTreeSet<String>) -> String {
    match of.is_empty() {
        true => "nothing".into(),
        false => of.iter().map(String::as_str).collect::<Vec<_>>().join(", "),
    }
}

#[test]
fn every_crate_has_a_row_which_names_the_crates_that_its_cargo_toml_names() {
    let (workspace, table) = (Workspace::read(), Table::read());
    let mut faults = Vec::new();
    for package in &workspace.packages {
        let Some(row) = table.rows.iter().find(|row| row.path == package.path) else {
            faults.push(format!("{} has no row in docs/architecture.md", package.path));
            continue;
        };
        if row.may_use != package.uses {
            faults.push(format!(
                "docs/architecture.md: {} may use {}, but by its Cargo.toml {}",
                row.path,
                words(&row.may_use),
                words(&package.uses)
            ));
        }
    }
    for row in &table.rows {
        if !workspace.exists(&row.path) {
            faults.push(format!("docs/architecture.md: {} does not exist", row.path));
        }
    }
    refuse(&faults);
}

#[test]
fn rooms_use_what_their_rows_name_and_nothing_else() {
    let (workspace, table) = (Workspace::read(), Table::read());
    let mut faults = Vec::new();
    for package in &workspace.packages {
        let rooms: Vec<&Row> =
            table.rows.iter().filter(|row| row.is_room_of(&package.path)).collect();
        for room in &rooms {
            let sources = workspace.sources.iter().filter(|source| {
                let inner = rooms.iter().filter(|other| other.path.len() > room.path.len());
                room.has(&source.path) && !inner.into_iter().any(|other| other.has(&source.path))
            });
            let mut used = BTreeSet::new();
            for source in sources {
                for (line, name) in source.uses_of_crate() {
                    let other = rooms.iter().find(|other| other.name() == name);
                    let to = other.map_or("src", |other| other.name());
                    if to == room.name() {
                        continue;
                    }
                    if !room.may_use.contains(to) {
                        faults.push(format!(
                            "{}:{line}: room {} uses room {to}: move what both need below both, \
                             or name {to} in the row of docs/architecture.md",
                            source.path, room.path
                        ));
                    }
                    used.insert(to.to_owned());
                }
                faults.extend(leaves_by_super(source, room));
            }
            for word in room.may_use.difference(&used) {
                faults.push(format!(
                    "docs/architecture.md: {} may use {word}, but does not: delete the word",
                    room.path
                ));
            }
        }
    }
    refuse(&faults);
}

/// Paths by which a source leaves its room without naming the other room.
fn leaves_by_super(source: &Source, room: &Row) -> Vec<String> {
    let depth = source.depth_below(&room.path);
    let is_root = room.name() == "src";
    let leaves = |supers: usize| supers > depth && !is_root;
    source
        .supers()
        .into_iter()
        .filter(|(_, supers)| leaves(*supers))
        .map(|(line, _)| format!("{}:{line}: write `crate::` to leave a room", source.path))
        .collect()
}

/// Rooms never allowed to use each other, whatever the table says.
const NEVER: &[(&str, &[&str])] = &[
    ("smcr", &["smcd"]),
    ("smcd", &["smcr"]),
    ("handshake", &["conn"]),
    ("reactor", &["smcd", "smcr", "conn", "handshake", "socket"]),
];

#[test]
fn smc_d_and_smc_r_do_not_know_each_other_and_what_waits_knows_neither() {
    let table = Table::read();
    let mut faults = Vec::new();
    for (name, never) in NEVER {
        let path = format!("guest-driver/src/{name}");
        match table.rows.iter().find(|row| row.path == path) {
            None => faults.push(format!("no row {path}: name the room here as it is called")),
            Some(row) => faults.extend(
                never
                    .iter()
                    .filter(|other| row.may_use.contains(**other))
                    .map(|other| format!("{name} must never use {other}")),
            ),
        }
    }
    refuse(&faults);
}

#[test]
fn crates_let_the_compiler_refuse_unsafe_code_as_the_table_says() {
    let (workspace, table) = (Workspace::read(), Table::read());
    let mut faults = Vec::new();
    for package in workspace.packages.iter().filter(|package| package.has_library()) {
        let Some(row) = table.rows.iter().find(|row| row.path == package.path) else { continue };
        let level = match &row.may_be_unsafe {
            MayBeUnsafe::No => "#![forbid(unsafe_code)]",
            MayBeUnsafe::In(_) => "#![deny(unsafe_code)]",
            MayBeUnsafe::Yes => continue,
        };
        if !workspace.text(&package.root()).contains(level) {
            faults.push(format!("{}: the table of docs/architecture.md wants {level}", row.path));
        }
        let MayBeUnsafe::In(places) = &row.may_be_unsafe else { continue };
        let is_marked = |source: &&Source| {
            places.iter().any(|place| source.path.starts_with(&format!("{}/{place}", row.path)))
        };
        let sources = workspace.sources.iter().filter(|source| package.has(&source.path));
        for source in sources.filter(|source| !is_marked(source)) {
            let found = source.lines_with(&["unsafe {", "unsafe impl ", "unsafe fn "]);
            faults.extend(found.into_iter().map(|line| {
                format!("{}:{line}: `unsafe` where the table does not mark it", source.path)
            }));
        }
    }
    refuse(&faults);
}

/// Names banned from the code below a folder, with an exempt place below the folder.
const FOREIGN: &[(&str, Option<&str>, &[&str])] = &[
    (
        "smc-core/src/",
        None,
        &[
            "std::net",
            "std::fs",
            "std::io",
            "std::thread",
            "std::os",
            "std::process",
            "Instant::now",
            "SystemTime",
            "libc::",
            "rustix::",
        ],
    ),
    // Code for tests may print its actions.
    ("smc-core/src/", Some("smc-core/src/testing/"), &["std::env", "println!", "eprint"]),
    ("backend/device/src/", None, &["virtio_queue::", "vhost::", "vhost_user_backend::"]),
    // Panics on kernels with another vDSO: `ism_sys::read_clock`.
    (
        "guest-driver/",
        None,
        &[" clock_gettime}", " clock_gettime, ", "{clock_gettime, ", "time::clock_gettime"],
    ),
];

/// Code running inside other people's programs. rustix panics if a seccomp filter refuses these calls.
/// The settings ask for users all the same, and may not use ism-sys, useless to the daemon.
const IN_PROGRAMS: [&str; 7] = [
    "guest-driver/src/",
    "guest-driver/info/src/",
    "guest-driver/preload/src/",
    "guest-driver/sys/src/",
    "guest-driver/ism/src/",
    "guest-driver/rendezvous/src/",
    "guest-driver/verbs/src/",
];
const PANICS_IF_REFUSED: [&str; 9] = [
    "rustix::system::",
    "process::getegid",
    "process::geteuid",
    "process::getgid",
    "process::getpid",
    "process::getppid",
    "process::getuid",
    "process::umask",
    "thread::gettid",
];

#[test]
fn what_is_part_of_programs_names_no_call_that_panics_if_it_is_refused() {
    let workspace = Workspace::read();
    let mut faults = Vec::new();
    let within = |path: &str| IN_PROGRAMS.iter().any(|below| path.starts_with(below));
    for source in workspace.sources.iter().filter(|source| within(&source.path)) {
        let found = source.lines_with(&PANICS_IF_REFUSED).into_iter();
        faults.extend(found.map(|line| format!("{}:{line}: use ism_sys", source.path)));
    }
    refuse(&faults);
}

#[test]
fn crates_do_not_name_what_is_foreign_to_them() {
    let workspace = Workspace::read();
    let mut faults = Vec::new();
    for (below, except, names) in FOREIGN {
        let within = |source: &&Source| {
            source.path.starts_with(below)
                && !except.is_some_and(|except| source.path.starts_with(except))
        };
        for source in workspace.sources.iter().filter(within) {
            let found = source.lines_with(names).into_iter();
            faults.extend(found.map(|line| format!("{}:{line}: not in {below}", source.path)));
        }
    }
    refuse(&faults);
}

fn is_licence(line: &str) -> bool {
    line.starts_with("// SPDX-License-Identifier:")
}

#[test]
fn files_stay_small_enough_to_hold_in_the_head() {
    let workspace = Workspace::read();
    let faults: Vec<String> = workspace
        .all
        .iter()
        .map(|source| (&source.path, source.text.lines().filter(|line| !is_licence(line)).count()))
        .filter(|(_, lines)| *lines > LINES)
        .map(|(path, lines)| format!("{path} has {lines} lines, more than {LINES}"))
        .collect();
    refuse(&faults);
}
