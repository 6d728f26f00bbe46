// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs that can have no socket: those that a program starts run without the library, unless
//! somebody would miss it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use combinations::{connect, exchange_as_client, exchange_as_server};
use common::{Fabric, await_listener, free_port, my_role, role};

const LIBRARY: &str = "/libsmc_preload.so";
const STATUS: &str = "SMC_RUN_STATUS";
/// A shell that goes on behind a program that shows its objects.
const SHOW: &str = "/bin/cat /proc/self/maps; :";

/// A program with the library, of which nobody asks a file about each process.
fn quiet(fabric: &Fabric, program: impl AsRef<Path>) -> Command {
    let mut command = fabric.smc(program);
    command.env_remove(STATUS);
    command
}

/// What a shell says.
fn shell(sh: &mut Command, script: &str) -> String {
    let output = sh.args(["-c", script]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_program_that_can_have_no_socket_runs_without_the_library() {
    let fabric = Fabric::new(1);
    let maps = shell(&mut quiet(&fabric, "/bin/sh"), SHOW);
    assert!(maps.contains("/libc.so") && !maps.contains(LIBRARY), "{maps}");
    // The shell itself has it, so what it starts next can have sockets.
    let script = "/bin/true; /usr/bin/printenv LD_PRELOAD";
    let environment = shell(&mut quiet(&fabric, "/bin/sh"), script);
    assert!(environment.contains(LIBRARY), "{environment}");
}

#[test]
fn a_program_of_which_somebody_wants_to_know_has_the_library() {
    let fabric = Fabric::new(1);
    let with_log = shell(quiet(&fabric, "/bin/sh").env("SMC_LOG", "error"), SHOW);
    assert!(with_log.contains(LIBRARY), "{with_log}");
    let with_status = shell(&mut fabric.smc("/bin/sh"), SHOW);
    assert!(with_status.contains(LIBRARY), "{with_status}");
}

/// The other one may call anything.
#[test]
fn a_program_that_has_another_library_too_has_this_one() {
    let fabric = Fabric::new(1);
    let script = format!("LD_PRELOAD=\"$LD_PRELOAD:libm.so.6\" {SHOW}");
    let maps = shell(&mut quiet(&fabric, "/bin/sh"), &script);
    assert!(maps.contains(LIBRARY), "{maps}");
}

/// The objects of a `cat` that this process starts by posix_spawn.
fn shows_library(input: Stdio) -> bool {
    let mut cat = Command::new("/bin/cat");
    let output = cat.arg("/proc/self/maps").stdin(input).output().unwrap();
    let maps = String::from_utf8(output.stdout).unwrap();
    assert!(maps.contains("/libc.so"), "{maps}");
    maps.contains(LIBRARY)
}

#[test]
fn a_program_that_inherits_a_connection_has_the_library() {
    const TEST: &str = "a_program_that_inherits_a_connection_has_the_library";
    if let Some((name, port)) = my_role() {
        if name == "server" {
            let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            exchange_as_server(&mut stream);
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
            return;
        }
        let mut stream = connect(port);
        exchange_as_client(&mut stream);
        // Exec closes the connection.
        assert!(!shows_library(Stdio::null()));
        let copy = OwnedFd::from(stream.try_clone().unwrap());
        assert!(shows_library(copy.into()));
        return;
    }
    let fabric = Fabric::new(6);
    let (port, this) = (free_port(), std::env::current_exe().unwrap());
    let server = role(&mut fabric.smc(&this), TEST, "server", port);
    await_listener(port);
    let client = role(&mut quiet(&fabric, &this), TEST, "client", port);
    client.finish_beside(&[&server]);
    server.finish();
    assert_eq!(fabric.decided(), (1, 0), "the server's end");
}
