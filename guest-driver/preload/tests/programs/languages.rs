// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs whose language brings its own way of doing network IO.

use smc_test_support::TestDir;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bed::{Net, Place, Program, are_installed};
use crate::case::{Carried, Case, after, seconds, times};

/// Runs a compiler.
pub fn compile(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A web server and its client, one program of two roles.
fn web(name: &str, needs: &[&str], program: &str, colon: &str, carried: Carried, net: &Net) {
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        Program::new(format!("{program} serve {address}{colon}{port}"))
    };
    let client = |place: &Place| {
        let Place { address, port, .. } = place;
        let pad = if colon == ":" { "-" } else { "" };
        Program::new(format!("{program} ask {address}{colon}{port} {pad} {}", seconds()))
    };
    Case {
        name,
        needs,
        server: &server,
        client: &client,
        figure: &|text| after(text, "requests:"),
        seen_by: (carried == Carried::Both).then_some("root"),
        carried,
        wanted: 0.9,
    }
    .run(net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn node() {
    let net = Net::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code/web.js");
    web("Node.js, HTTP", &["node"], &format!("node {script}"), " ", Carried::Both, &net);
}

/// Bun waits for an epoll set of libc's by its own instructions. `smc run` prints that and leaves the
/// program on TCP.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn bun_stays_on_tcp() {
    let net = Net::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code/web.js");
    web("Bun, HTTP", &["bun"], &format!("bun {script}"), " ", Carried::Never, &net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn java() {
    if !are_installed("Java", &["java", "javac"]) {
        return;
    }
    let net = Net::new();
    let dir = TestDir::new();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code/Web.java");
    compile(Command::new("javac").arg("-d").arg(&*dir).arg(source));
    let program = format!("java -XX:TieredStopAtLevel=1 -cp {} Web", dir.display());
    web("Java, HTTP", &["java"], &program, " ", Carried::Both, &net);
}

/// Builds a program in Rust outside the workspace, and keeps the build: the crates take a minute.
fn build(name: &str) -> PathBuf {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap());
    let dir = home.join(".cache/vhost-device-ism/programs").join(name);
    let code = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code")).join(name);
    std::fs::create_dir_all(dir.join("src")).unwrap();
    for file in ["Cargo.toml", "src/main.rs"] {
        let text = std::fs::read(code.join(file)).unwrap();
        // Cargo builds newer files.
        if std::fs::read(dir.join(file)).ok().as_ref() != Some(&text) {
            std::fs::write(dir.join(file), text).unwrap();
        }
    }
    let mut cargo = Command::new(env!("CARGO"));
    compile(cargo.current_dir(&dir).args(["build", "--release", "--target-dir", "target"]));
    dir.join("target/release").join(format!("smc-{name}-echo"))
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn hyper_and_reqwest() {
    let net = Net::new();
    let program = build("hyper").display().to_string();
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        Program::new(format!("{program} server {address}:{port}"))
    };
    let client = |place: &Place| {
        let Place { address, port, .. } = place;
        let requests = times(200, 2000);
        Program::new(format!("{program} client {address}:{port} 8 {requests}"))
    };
    Case {
        name: "hyper and reqwest",
        needs: &[],
        server: &server,
        client: &client,
        figure: &|text| after(text, "per second:"),
        seen_by: None,
        carried: Carried::Both,
        wanted: 0.9,
    }
    .run(&net);
}

/// How a program in Go is linked: with libc, with a dynamic linker only, or without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linked {
    Cgo,
    Pie,
    Static,
}

/// Builds a program in Go, of one file. `go`: the command of a version of Go.
fn build_go(dir: &TestDir, go: &str, source: &str, linked: Linked) -> String {
    let code = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code")).join(source);
    let program = dir.path(format!("{source}.{linked:?}.{go}"));
    let mut build = Command::new(go);
    let mode = if linked == Linked::Pie { "pie" } else { "default" };
    build.args(["build", "-buildmode", mode, "-o"]).arg(&program).arg(code);
    let cgo = if linked == Linked::Cgo { "1" } else { "0" };
    build.env("CGO_ENABLED", cgo).env("GOCACHE", dir.path("cache"));
    compile(build.env("GOFLAGS", "-mod=mod").current_dir(dir));
    assert_eq!(is_dynamic(&program), linked != Linked::Static);
    program.display().to_string()
}

/// The system calls of the program are taken over.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn go_web() {
    let net = Net::new();
    let dir = TestDir::for_programs();
    // No other machine than x86-64 has the door.
    let carried = if cfg!(target_arch = "x86_64") { Carried::Both } else { Carried::Never };
    for (name, go, linked) in [
        ("Go, HTTP, static", "go", Linked::Static),
        ("Go, HTTP, dynamic", "go", Linked::Cgo),
        ("Go 1.27, HTTP, static", "go-newest", Linked::Static),
    ] {
        if are_installed(name, &[go]) {
            web(name, &[], &build_go(&dir, go, "web.go", linked), ":", carried, &net);
        }
    }
}

/// Each byte is checked while garbage is collected, goroutines are preempted, signals come and children
/// are executed. Python at the other end uses libc.
#[cfg(target_arch = "x86_64")]
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn go_checked() {
    if !are_installed("Go and Python", &["go", "python3"]) {
        return;
    }
    let net = Net::new();
    let dir = TestDir::for_programs();
    let [go, pie, linked] = [Linked::Cgo, Linked::Pie, Linked::Static]
        .map(|linked| build_go(&dir, "go", "checked.go", linked));
    let code = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code");
    let python = format!("python3 {code}/checked.py");
    // A program of libc executes a static one, and a static one starts itself again by vfork.
    let executed = format!("python3 {code}/executes.py {linked}");
    let started = format!("{linked} start");
    for (name, server, client, requests) in [
        ("Go, every byte", &go, &go, times(10_000, 100_000)),
        ("Go, client in Python", &go, &python, 3000),
        ("Go, server in Python", &python, &go, 3000),
        ("Go without cgo, every byte", &pie, &pie, times(10_000, 100_000)),
        ("Go, static, every byte", &linked, &linked, times(10_000, 100_000)),
        ("Go, static, server in Python", &python, &linked, 3000),
        ("Go, static, executed", &executed, &started, 3000),
    ] {
        echoes_checked(name, server, client, requests, &net);
    }
}

/// The echo server and client of checked.go, in one language or in two.
pub fn echoes_checked(name: &str, server: &str, client: &str, requests: u32, net: &Net) {
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        Program::new(format!("{server} serve {address}:{port}"))
    };
    let client = |place: &Place| {
        let Place { address, port, .. } = place;
        Program::new(format!("{client} ask {address}:{port} 20 {requests}"))
    };
    Case {
        name,
        needs: &[],
        server: &server,
        client: &client,
        figure: &|text| after(text, "per second:"),
        seen_by: None,
        carried: Carried::Both,
        wanted: 0.9,
    }
    .run(net);
}

/// Whether a program names a dynamic linker.
fn is_dynamic(program: &Path) -> bool {
    std::fs::read(program).unwrap().windows(8).any(|bytes| bytes == b"ld-linux")
}
