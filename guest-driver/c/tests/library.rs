// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `libsmc.so` from the view of programs in C: the header, the symbols, the example, and every call.
//!
//! The tests compile `examples/echo.c` and `calls.c` by `cc`, and run them against a daemon in this
//! process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};

use common::{Bed, SONAME, STRICT, here, libraries, output};

/// A server, killed at the end of the test.
struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    port: String,
}

impl Server {
    fn start(mut command: Command) -> Server {
        let mut child = command.args(["server", "127.0.0.1", "0"]).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("listening on port ").unwrap().to_owned();
        Server { child, out, port }
    }

    /// Ends the server, and returns its output about connections.
    fn end(mut self) -> String {
        self.child.kill().unwrap();
        let mut said = String::new();
        self.out.read_to_string(&mut said).unwrap();
        said
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs both ends of the example, compiled by `compiler`.
fn echo(compiler: &[&str]) {
    let bed = Bed::new();
    let program = bed.compile(compiler, "examples/echo.c");
    for (server_has, client_has, carried) in
        [(true, true, "SMC-D v2.1 over fabric"), (true, false, "TCP ("), (false, true, "TCP (")]
    {
        let command = |has_device: bool| {
            let mut command = bed.command(&program);
            if has_device {
                command.env("SMC_DEVICE", bed.path("any.sock"));
            }
            command
        };
        let server = Server::start(command(server_has));
        let mut client = command(client_has);
        let said = output(client.args(["client", "127.0.0.1", &server.port]));
        let [info, bytes] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
        assert!(info.starts_with(carried), "{said}");
        assert_eq!(bytes, "1048576 bytes came back");
        let said = server.end();
        assert!(said.starts_with(carried) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn the_example_in_c_echoes_by_smc_d_or_by_tcp() {
    echo(&["cc", "-std=c99"]);
}

#[test]
fn the_example_is_a_program_in_cpp_too() {
    if Command::new("c++").arg("--version").output().is_err() {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "there is no c++");
        eprintln!("there is no c++: NOT TESTED");
        return;
    }
    echo(&["c++", "-std=c++11", "-x", "c++"]);
}

#[test]
fn the_header_compiles_by_itself_in_old_and_new_dialects() {
    let bed = Bed::new();
    let source = bed.path("only.c");
    std::fs::write(&source, "#include <smc.h>\nstruct smc_options options = SMC_OPTIONS_INIT;\n")
        .unwrap();
    for dialect in [["cc", "-std=c99"], ["cc", "-std=c17"], ["c++", "-std=c++11"]] {
        let [compiler, dialect] = dialect;
        if Command::new(compiler).arg("--version").output().is_err() {
            continue;
        }
        let mut cc = Command::new(compiler);
        cc.args([dialect, "-fsyntax-only"]).args(STRICT);
        cc.args(["-x", if compiler == "cc" { "c" } else { "c++" }]);
        output(cc.arg("-I").arg(here("include")).arg(&source));
    }
}

/// The functions declared in the header.
fn declared() -> BTreeSet<String> {
    let text = std::fs::read_to_string(here("include/smc.h")).unwrap();
    let mut code = String::new();
    for part in text.split("/*") {
        code.push_str(part.split_once("*/").map_or(part, |(_, code)| code));
    }
    let names = code.match_indices("smc_").map(|(at, _)| &code[at..]);
    names
        .filter_map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
            rest[end..].starts_with('(').then(|| rest[..end].to_owned())
        })
        .collect()
}

/// The exported symbols of a library.
fn symbols(library: &str) -> BTreeSet<String> {
    let mut nm = Command::new("nm");
    let text = output(nm.args(["-D", "--defined-only"]).arg(libraries().join(library)));
    text.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect()
}

#[test]
fn the_library_exports_what_the_header_declares_and_nothing_else() {
    let (declared, exported) = (declared(), symbols("libsmc.so"));
    assert_eq!(declared, exported);
    assert!(declared.len() > 20 && declared.contains("smc_connect"), "{declared:?}");
}

#[test]
fn the_debian_package_lists_the_symbols_that_the_library_exports() {
    let list = include_str!("../../../packaging/debian/libsmc0.symbols");
    let (head, lines) = list.split_once('\n').unwrap();
    assert_eq!(head, format!("{SONAME} libsmc0 #MINVER#"));
    // A line has the version of the first package with the symbol.
    let names = lines.lines().map(|line| {
        let (name, since) = line.trim_start().split_once("@Base ").unwrap();
        assert!(since.split('.').all(|part| part.parse::<u32>().is_ok()), "{line}");
        name.to_owned()
    });
    assert_eq!(names.collect::<BTreeSet<_>>(), symbols("libsmc.so"));
}

#[test]
fn no_symbol_is_one_of_the_library_of_smc_run() {
    let preloaded = symbols("libsmc_preload.so");
    assert!(preloaded.contains("connect"), "{preloaded:?}");
    let both: Vec<_> = preloaded.intersection(&symbols("libsmc.so")).cloned().collect();
    assert!(both.is_empty(), "{both:?}");
}

#[test]
fn the_library_has_a_name_with_a_version_and_stays_mapped() {
    let mut readelf = Command::new("readelf");
    let text = output(readelf.args(["-dW"]).arg(libraries().join("libsmc.so")));
    assert!(text.contains(&format!("[{SONAME}]")), "{text}");
    assert!(text.contains("NODELETE"), "{text}");
}

/// Runs a case of `calls.c` on SMC and on TCP.
fn check(case: &str) {
    let bed = Bed::new();
    let program = bed.compile(&["cc", "-std=c11"], "tests/calls.c");
    for carrier in ["smc", "tcp"] {
        let mut command = bed.command(&program);
        command.args([case, carrier]).arg(bed.path("any.sock")).arg(bed.path("a.sock"));
        output(&mut command);
    }
}

smc_test_support::tests_of! {
    check:
    fn null_is_refused_by_every_call("null");
    fn wrong_arguments_and_a_client_that_lies_have_errors_of_their_own("wrong");
    fn a_device_that_is_in_use_is_busy("busy");
    fn bytes_come_whole_in_pieces_urgent_or_peeked("bytes");
    fn non_blocking_sockets_are_ready_when_their_descriptor_says_so("nonblocking");
    fn waits_end_by_time_signal_and_shutdown("waits");
    fn a_forked_child_cannot_use_what_its_parent_has_open("forks");
    fn sockets_and_stacks_whose_descriptors_the_program_has_closed_can_be_closed("closed");
    fn sockets_outlive_their_stack_and_a_closed_peer_raises_no_signal("closes");
}

#[test]
fn connections_outlive_the_daemon_and_later_ones_are_tcp() {
    for carrier in ["smc", "tcp"] {
        let mut bed = Bed::new();
        let program = bed.compile(&["cc", "-std=c11"], "tests/calls.c");
        let mut command = bed.command(&program);
        command.args(["gone", carrier]).arg(bed.path("any.sock")).arg(bed.path("a.sock"));
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        bed.stop_daemon();
        drop(child.stdin.take());
        // SIGPIPE would have ended the child.
        assert!(child.wait().unwrap().success(), "{carrier}");
    }
}
