// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in C without the glibc of the library: static ones, and those linked with musl. The kernel
//! refuses their system calls for the library.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::path::Path;
use std::process::Command;

use common::{Fabric, compiled, load_into, run_ends};

/// Signals in the middle of calls, threads, children of all kinds, and registers. `command`: of the
/// program, an end and a port.
fn behaves(options: &[&str], command: impl Fn(&Fabric, &Path, [&str; 2]) -> Command) {
    let program = compiled("static", options);
    let fabric = Fabric::new(6);
    run_ends(|mode, port| command(&fabric, &program, [mode, port]));
    let (smc, tcp) = fabric.decided();
    assert!(smc >= 2 && tcp == 0, "{smc} on SMC, {tcp} on TCP");
    assert_eq!(fabric.broken(), Vec::<String>::new());
    std::fs::remove_file(program).unwrap();
}

fn ends(fabric: &Fabric, program: &Path, end: [&str; 2]) -> Command {
    let mut command = fabric.smc(program);
    load_into(&mut command, program);
    command.args(end);
    command
}

#[test]
fn a_static_program_of_glibc_is_on_smc_and_as_on_tcp() {
    behaves(&["-static"], ends);
}

/// libc executes the program in the child of a vfork, without a call of the library.
#[test]
fn a_static_program_started_by_a_program_of_libc_is_on_smc() {
    let starter = compiled("static", &["-DSTARTER"]);
    behaves(&["-static", "-DSTARTED"], |fabric, program, end| {
        let mut command = fabric.smc(&starter);
        command.env("SMC_RUN_GO", "true").arg("start").arg(program).args(end);
        command
    });
    std::fs::remove_file(starter).unwrap();
}

/// The options for musl. `None`: the test is left out.
fn of_musl() -> Option<[&'static str; 2]> {
    const SPECS: &str = "/usr/lib/x86_64-linux-musl/musl-gcc.specs";
    match Path::new(SPECS).exists() {
        true => Some(["-specs", SPECS]),
        false => {
            smc_test_support::leave_out("musl is not installed (Debian's musl-tools)");
            None
        }
    }
}

#[test]
fn a_static_program_of_musl_is_on_smc_and_as_on_tcp() {
    if let Some([specs, file]) = of_musl() {
        behaves(&["-static", specs, file], ends);
    }
}

#[test]
fn a_program_linked_with_musl_is_on_smc_and_as_on_tcp() {
    if let Some([specs, file]) = of_musl() {
        behaves(&[specs, file], ends);
    }
}
