// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Static programs in C, of glibc and of musl, whose system calls the kernel refuses for the library.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use common::{Fabric, compiled, run_ends};

/// A static program on SMC.
fn loaded(fabric: &Fabric, program: &Path, mode: &str, port: &str) -> Command {
    let mut command = fabric.smc(program);
    command.args([mode, port]).env("SMC_RUN_GO", "true");
    let load = || {
        // The loader waits for the program.
        ism_sys::Loader::start().map(std::mem::forget).map_err(std::io::Error::other)
    };
    // SAFETY: the child has one thread, and its copy of the allocator is usable.
    unsafe { command.pre_exec(load) };
    command
}

/// Signals in the middle of calls, threads, children of all kinds, and registers.
fn behaves(options: &[&str]) {
    let program = compiled("static", &[&["-static"], options].concat());
    let fabric = Fabric::new(6);
    run_ends(|mode, port| loaded(&fabric, &program, mode, port));
    let (smc, tcp) = fabric.decided();
    assert!(smc >= 2 && tcp == 0, "{smc} on SMC, {tcp} on TCP");
    assert_eq!(fabric.broken(), Vec::<String>::new());
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_static_program_of_glibc_is_on_smc_and_as_on_tcp() {
    behaves(&[]);
}

#[test]
fn a_static_program_of_musl_is_on_smc_and_as_on_tcp() {
    const SPECS: &str = "/usr/lib/x86_64-linux-musl/musl-gcc.specs";
    if !Path::new(SPECS).exists() {
        return smc_test_support::leave_out("musl is not installed (Debian's musl-tools)");
    }
    behaves(&["-specs", SPECS]);
}
