// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the start of a program costs that makes no connection.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use common::Fabric;

/// Kilobytes of the first part of libc that the program has changed: headers and the table of symbols.
fn changed(smaps: &str) -> usize {
    let is_first = |line: &&str| line.contains(" r--p 00000000 ") && line.contains("/libc.so");
    let mut lines = smaps.lines().skip_while(|line| !is_first(line));
    let line = lines.find(|line| line.starts_with("Private_Dirty:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The memory of a program that does nothing, with the library.
fn memory() -> String {
    let fabric = Fabric::new(1);
    let output = fabric.smc("cat").arg("/proc/self/smaps").output().unwrap();
    let smaps = String::from_utf8(output.stdout).unwrap();
    assert!(smaps.contains("/libsmc_preload.so"), "{smaps}");
    smaps
}

#[test]
fn libcs_table_of_symbols_stays_as_it_is_until_the_program_opens_an_object() {
    let smaps = memory();
    assert_eq!(changed(&smaps), 0, "{smaps}");
}

#[test]
fn the_unwinder_is_not_loaded_until_somebody_needs_it() {
    let smaps = memory();
    assert!(!smaps.contains("/libgcc_s"), "{smaps}");
}
