// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The functions of the installed libc that take descriptors: each has a hook, or is in
//! `libc/no_hooks.txt` with the reason why it needs none. So each function of a new libc fails here
//! until judged.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exported functions of an object, without their versions, and their addresses.
fn exported(object: &Path) -> BTreeMap<String, String> {
    let nm = Command::new("nm").args(["-D", "--defined-only"]).arg(object).output().unwrap();
    assert!(nm.status.success(), "{}", String::from_utf8_lossy(&nm.stderr));
    let text = String::from_utf8(nm.stdout).unwrap();
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let functions = lines.filter(|line| line.len() == 3 && matches!(line[1], "T" | "W" | "i"));
    functions
        .map(|line| {
            let name = line[2].split('@').next().unwrap_or_default();
            (name.to_owned(), line[0].to_owned())
        })
        .collect()
}

/// The libc of this process.
fn libc() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    paths.map(PathBuf::from).find(|path| path.ends_with("libc.so.6")).unwrap()
}

/// The text of libc's headers, and of others beside them.
fn headers() -> Vec<String> {
    let machine = format!("{}-linux-gnu", std::env::consts::ARCH);
    let roots = [PathBuf::from("/usr/include"), Path::new("/usr/include").join(machine)];
    let places = ["", "sys", "bits", "net", "netinet", "arpa", "rpc"];
    let dirs = roots.iter().flat_map(|root| places.map(|place| root.join(place)));
    let files = dirs.filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let headers = files.map(|file| file.path()).filter(|p| p.extension().is_some_and(|e| e == "h"));
    headers
        .filter_map(|path| std::fs::read(path).ok())
        .map(|text| without_comments(&text))
        .collect()
}

fn without_comments(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let mut parts = text.split("/*");
    let mut all = parts.next().unwrap_or_default().to_owned();
    parts.for_each(|part| all += part.split_once("*/").map_or("", |(_, behind)| behind));
    all
}

/// Whether a parameter is a descriptor, or leads to some.
fn is_descriptor(parameter: &str) -> bool {
    let leads = ["struct pollfd", "fd_set", "struct aiocb", "mqd_t"];
    if leads.iter().any(|kind| parameter.contains(kind)) {
        return true;
    }
    let Some((kind, name)) = parameter.trim().rsplit_once([' ', '*']) else { return false };
    let is_number = ["int", "unsigned int"].contains(&kind.trim());
    let name = name.trim_start_matches('_');
    let parts = ["fd", "fildes", "sock"];
    is_number && (name == "s" || parts.iter().any(|part| name.contains(part)))
}

/// The names of functions declared with a descriptor.
fn with_descriptors(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices('(') {
        let before = text[..at].trim_end();
        let name: String = before.chars().rev().take_while(|c| is_name(*c)).collect();
        let Some(end) = text[at..].find(')') else { continue };
        let parameters = &text[at + 1..at + end];
        if !name.is_empty() && parameters.split(',').any(is_descriptor) {
            found.insert(name.chars().rev().collect());
        }
    }
    found
}

/// The functions of the list. Panics on a fault in the list itself.
fn listed() -> BTreeMap<&'static str, &'static str> {
    let mut listed = BTreeMap::new();
    let mut why = "";
    for line in include_str!("libc/no_hooks.txt").lines() {
        match line.strip_prefix("  ") {
            Some(names) => {
                for name in names.split_whitespace() {
                    assert!(!why.is_empty(), "{name} has no reason");
                    assert!(listed.insert(name, why).is_none(), "{name} is listed twice");
                }
            }
            None if line.starts_with('#') => {}
            None => why = line,
        }
    }
    listed
}

#[test]
fn each_function_that_takes_a_descriptor_is_judged() {
    let (libc, hooks) = (exported(&libc()), exported(&common::library()));
    let declared: BTreeSet<_> = headers().iter().flat_map(|text| with_descriptors(text)).collect();
    assert!(
        declared.contains("read") && declared.contains("select"),
        "headers of libc are missing"
    );
    let listed = listed();
    let known = |name: &str| hooks.contains_key(name) || listed.contains_key(name);
    let of_libc = declared.iter().filter(|name| libc.contains_key(*name));
    let missing: Vec<_> = of_libc.filter(|name| !known(name)).collect();
    assert!(missing.is_empty(), "neither a hook nor a reason why there is none: {missing:?}");
    let both: Vec<_> = listed.keys().filter(|name| hooks.contains_key(**name)).collect();
    assert!(both.is_empty(), "these have hooks and are listed: {both:?}");
}

#[test]
fn each_other_name_of_a_hooked_function_has_a_hook() {
    let (libc, hooks) = (exported(&libc()), exported(&common::library()));
    let hooked: BTreeSet<_> = libc.iter().filter(|(name, _)| hooks.contains_key(*name)).collect();
    let listed = listed();
    let missing = libc.iter().filter(|(name, address)| {
        let same = hooked.iter().any(|(_, other)| other == address);
        // The names of calls compiled with _FORTIFY_SOURCE.
        let plain = name.strip_prefix("__").and_then(|name| name.strip_suffix("_chk"));
        let is_checked = plain.is_some_and(|plain| hooks.contains_key(plain));
        (same || is_checked) && !hooks.contains_key(*name) && !listed.contains_key(name.as_str())
    });
    let missing: Vec<_> = missing.map(|(name, _)| name).collect();
    assert!(missing.is_empty(), "further names of hooked functions: {missing:?}");
}
