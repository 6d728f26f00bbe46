// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The resources of a process, as listed by the kernel.
#![allow(unreachable_pub, reason = "each test is a crate of its own")]
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

/// The resources of a process.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub descriptors: usize,
    /// Mappings of memory shared by processes.
    pub mappings: usize,
    pub threads: usize,
    /// Memory of the process itself, KiB; without memory shared with devices.
    pub memory: u64,
}

impl Held {
    /// Counts the present resources.
    pub fn by(pid: u32) -> Held {
        let entries = |dir| fs::read_dir(format!("/proc/{pid}/{dir}")).map_or(0, Iterator::count);
        let read = |file| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let status = read("status");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let memory = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        Held {
            descriptors: entries("fd"),
            mappings: read("maps").lines().filter(|line| line.contains("memfd:")).count(),
            threads: entries("task"),
            memory: memory.unwrap_or(0),
        }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Held { descriptors, mappings, threads, memory } = self;
        write!(f, "{descriptors} fds {mappings} maps {threads} threads {memory} KiB")
    }
}

/// The kinds of a process's descriptors, and the number of each, to show the growing kind.
pub fn kinds(pid: u32) -> String {
    let mut kinds = BTreeMap::<String, usize>::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        let kind = target.split_once(":[").map_or(&*target, |(kind, _)| kind);
        *kinds.entry(kind.to_owned()).or_default() += 1;
    }
    kinds.iter().map(|(kind, n)| format!("    {n:4} {kind}\n")).collect()
}

/// The mappings of shared memory, to show the growing one.
pub fn mappings(pid: u32) -> String {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains("memfd:")).map(|line| format!("{line}\n")).collect()
}
