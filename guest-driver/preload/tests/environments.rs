// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in environments that change what the library finds: with sanitizers, and with another
//! clock.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{Fabric, Running, await_listener, free_port};

/// A program of `tests/contract`, compiled with these options. The file is of this process.
fn compiled(name: &str, options: &[&str]) -> PathBuf {
    let tag = options.concat().replace(['=', '-'], "");
    let file = std::env::temp_dir().join(format!("smc-{name}-{tag}-{}", std::process::id()));
    let source = format!("{}/tests/contract/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.env_remove("LD_PRELOAD").args(["-O1", "-g", "-pthread", "-o"]).arg(&file).arg(source);
    assert!(cc.args(options).status().unwrap().success());
    file
}

/// Where libfaketime is.
fn libfaketime() -> PathBuf {
    let directory = format!("/usr/lib/{}-linux-gnu/faketime", std::env::consts::ARCH);
    let library = PathBuf::from(directory).join("libfaketimeMT.so.1");
    assert!(library.is_file(), "the package faketime is missing");
    library
}

#[test]
fn time_limits_pass_although_the_programs_clock_stands_still_or_goes_wrong() {
    let (program, wrapper) = (compiled("clock", &[]), libfaketime());
    // A clock that stands still, one that is ahead, and one that goes slowly.
    for clock in ["2020-01-01 00:00:00", "+2d", "+0 x0.5"] {
        for (smc, is_first) in [(false, false), (true, false), (true, true)] {
            let fabric = Fabric::new(4);
            let port = free_port().to_string();
            let command = |mode: &str| {
                let mut command = fabric.on(smc, &program);
                let own = common::library();
                let order = match (smc, is_first) {
                    (false, _) => vec![&wrapper],
                    (true, true) => vec![&wrapper, &own],
                    (true, false) => vec![&own, &wrapper],
                };
                command.env("LD_PRELOAD", std::env::join_paths(order).unwrap());
                command.env("FAKETIME", clock).args([mode, &port]).stdout(Stdio::piped());
                command
            };
            let server = command("server").spawn().unwrap();
            await_listener(port.parse().unwrap());
            let client = Running::start(&mut command("client")).finish();
            assert_eq!(client, "in time\n", "{clock}, smc: {smc}");
            let server = server.wait_with_output().unwrap();
            assert_eq!(String::from_utf8_lossy(&server.stdout), "end\n");
            assert!(!smc || fabric.decided().0 > 0, "the connections were on TCP");
        }
    }
    std::fs::remove_file(program).unwrap();
}

/// Runs both ends, directly and as children of a shell.
fn run_with(sanitizer: &str) {
    let program = compiled("sanitized", &[sanitizer]);
    for (smc, is_child) in [(false, false), (true, false), (true, true)] {
        let fabric = Fabric::new(4);
        let port = free_port().to_string();
        let command = |mode: &str| {
            let mut command = match is_child {
                false => fabric.on(smc, &program),
                true => {
                    let mut shell = fabric.on(smc, "sh");
                    shell.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(&program);
                    shell
                }
            };
            command.env_remove("ASAN_OPTIONS").env_remove("TSAN_OPTIONS");
            command.args([mode, &port]).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let server = command("server").spawn().unwrap();
        await_listener(port.parse().unwrap());
        let client = command("client").output().unwrap();
        for output in [client, server.wait_with_output().unwrap()] {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{sanitizer}, smc: {smc}: {}\n{said}", output.status);
            assert_eq!(String::from_utf8_lossy(&output.stdout), "all bytes\n", "{said}");
        }
        assert!(!smc || fabric.decided().0 > 0, "the connections were on TCP");
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_program_with_the_address_sanitizer_runs_on_smc() {
    run_with("-fsanitize=address");
}

#[test]
fn a_program_with_the_thread_sanitizer_runs_on_smc() {
    run_with("-fsanitize=thread");
}

#[test]
fn a_program_with_the_sanitizer_of_undefined_behaviour_runs_on_smc() {
    run_with("-fsanitize=undefined");
}
