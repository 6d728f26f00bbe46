// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in environments that change what the library finds: with sanitizers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{Fabric, await_listener, free_port};

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
