// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Output files of commands: none for a refused command, and no refusal after the work is done.

use std::io::ErrorKind;
use std::net::TcpListener;

use crate::support::{Dir, Fabric, run, text};

#[test]
fn cdi_writes_nothing_for_a_pool_that_is_refused() {
    let dir = Dir::new("cdi-refused");
    std::fs::create_dir(dir.0.join("lib")).unwrap();
    let library = dir.path("lib/libsmc_preload.so");
    std::fs::write(&library, "").unwrap();
    let list = dir.0.join("lib/ld.so.preload");
    let specification = dir.path("cdi/smc.json");
    let cdi = |pool: &str, more: &[&str]| {
        let args = ["cdi", "--library", &library, "--output", &specification, "--pool", pool];
        run(&[&args[..], more].concat())
    };
    let beside = dir.path("pool/any.sock");
    std::fs::create_dir(dir.0.join("pool")).unwrap();
    std::fs::write(dir.0.join("pool/management.sock"), "").unwrap();
    let (missing, named) = (dir.path("new/any.sock"), dir.path("new/a b.sock"));
    for (pool, more, says) in [
        (&missing, &[][..], "no daemon listens there"),
        (&beside, &["--later"][..], "of its own"),
        (&named, &["--later"][..], "a CDI device has letters"),
    ] {
        let output = cdi(pool, more);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{pool}: {said}");
        assert!(said.contains(says), "{pool}: {said}");
        assert!(!list.exists() && !dir.0.join("cdi").exists(), "{pool} is refused");
    }
    assert!(cdi(&missing, &["--later"]).status.success());
    let list = std::fs::read_to_string(list).unwrap();
    assert_eq!(list, "/run/smc/preload/$LIB/libsmc_preload.so\n");
    assert!(std::fs::read_to_string(specification).unwrap().contains("/new"));
}

#[test]
fn conform_opens_the_files_of_its_report_before_it_plays() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap().to_string();
    server.set_nonblocking(true).unwrap();
    for option in ["--json", "--junit", "--html"] {
        let output = run(&["conform", option, "/nonexistent/report", &address]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{option}: {said}");
        assert!(said.contains("cannot write /nonexistent/report"), "{option}: {said}");
        let connected = server.accept().map(drop).map_err(|error| error.kind());
        assert_eq!(connected, Err(ErrorKind::WouldBlock), "{option}: nothing was played");
    }
}

#[test]
fn a_report_replaces_the_last_one_only_when_there_is_another() {
    let fabric = Fabric::start("conform-report");
    let report = fabric.directory().join("report.json");
    let old = "old ".repeat(1 << 18);
    std::fs::write(&report, &old).unwrap();
    let path = report.to_str().unwrap();
    let output = run(&["conform", "--device", "/nonexistent", "--json", path, "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(&report).unwrap(), old, "there is no other report");

    let (_server, port, _said) = fabric.listen(&["--echo", "--tcp-ok", "--rnic", "none"]);
    let address = format!("127.0.0.1:{port}");
    let only = ["--level", "clc", "--only", "server-types-answer"];
    let output = run(&[&["conform", "--json", path, &address], &only[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let written = std::fs::read_to_string(&report).unwrap();
    let written: serde_json::Value = serde_json::from_str(&written).unwrap();
    assert!(written.to_string().contains("server-types-answer"), "{written}");
}

#[test]
fn completions_are_there_for_every_program_and_shell() {
    for (program, option) in [
        ("smc", "strict"),
        ("vhost-device-ism", "check-config"),
        ("smcss", "listening"),
        ("smcd", "absolute"),
        ("smcr", "absolute"),
    ] {
        for shell in ["bash", "fish", "zsh"] {
            let output = run(&["completions", shell, program]);
            let said = text(&output.stdout);
            assert!(said.contains(program) && said.contains(option), "{shell} {program}: {said}");
            assert!(output.status.success());
        }
    }
    assert_eq!(run(&["completions", "bash"]).stdout, run(&["completions", "bash", "smc"]).stdout);
}
