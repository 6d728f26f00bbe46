// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc run`: its messages before the program begins. `guest-driver/preload/tests` tests the
//! program with the library.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::support::{Dir, run, smc, text};

/// Runs `smc run` without the rights for TCP option 254. None, with a message, if the rights cannot
/// be dropped.
fn without_rights(args: &[&str]) -> Option<Output> {
    let smc = env!("CARGO_BIN_EXE_smc");
    let mut command = match rustix::process::geteuid().is_root() {
        true => {
            let mut command = Command::new("setpriv");
            command.args(["--bounding-set", "-bpf,-net_admin,-sys_admin", smc]);
            command
        }
        false => Command::new(smc),
    };
    // Some loadable library. The missing report of its loading has no part in this test.
    let command = command.arg("run").args(args).env("SMC_PRELOAD", c_library());
    let output = command.env_remove("SMC_RENDEZVOUS").stdin(Stdio::null()).output();
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    match output {
        Err(error) if !ci => {
            // Directly to standard error, past the capture of the test harness.
            let _ = writeln!(std::io::stderr(), "SKIPPED, nothing was tested: {error}");
            None
        }
        output => Some(output.unwrap()),
    }
}

/// The C library of this process.
fn c_library() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("/libc.so")).unwrap();
    line[line.find('/').unwrap()..].to_owned()
}

#[test]
fn where_the_option_is_required_and_cannot_be_had_it_says_what_to_grant() {
    let Some(output) = without_rights(&["--rendezvous", "required", "echo", "it runs"]) else {
        return;
    };
    let said = text(&output.stderr);
    assert_eq!(text(&output.stdout), "it runs\n", "{said}");
    assert!(said.contains("echo stays on TCP, for there is no TCP option 254"), "{said}");
    // Unless the machine lacks more than rights.
    assert!(said.contains("setcap cap_bpf") || said.contains("cgroup v2"), "{said}");
    let strict = without_rights(&["--strict", "--rendezvous", "required", "echo", "no"]).unwrap();
    assert!(!strict.status.success() && strict.stdout.is_empty(), "{strict:?}");
}

#[test]
fn without_the_option_a_line_says_that_no_connection_can_be_smc_unless_a_rule_names_its_server() {
    for (options, lines) in [
        (&["--rendezvous", "auto"][..], 1),
        (&["--rendezvous", "auto", "--peer", "*:7"], 0),
        (&["--rendezvous", "off"], 0),
    ] {
        let Some(output) = without_rights(&[options, &["echo", "it runs"]].concat()) else {
            return;
        };
        let said = text(&output.stderr);
        assert_eq!(text(&output.stdout), "it runs\n", "{said}");
        assert_eq!(said.lines().filter(|line| line.contains("254")).count(), lines, "{said}");
    }
}

#[test]
fn a_policy_that_makes_no_sense_stops_the_program_before_it_begins() {
    let dir = Dir::new("run-policy");
    std::fs::write(dir.path("policy"), "[[rule]]\nuse = 'tcp'\nports = ['x']").unwrap();
    for policy in [dir.path("policy"), dir.path("none")] {
        let Some(output) = without_rights(&["--policy", &policy, "echo", "no"]) else { return };
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.contains(&policy), "{said}");
    }
    // A key of a later release is named, and no reason to stop.
    std::fs::write(dir.path("policy"), "[[rule]]\nuse = 'smc'\nhosts = ['a']").unwrap();
    let Some(output) = without_rights(&["--policy", &dir.path("policy"), "echo", "yes"]) else {
        return;
    };
    let said = text(&output.stderr);
    assert_eq!(text(&output.stdout), "yes\n", "{said}");
    assert!(said.contains("rule 1: the key \"hosts\" is unknown"), "{said}");
}

/// Runs `smc run` with refused options. Returns the messages.
fn refused(args: &[&str]) -> String {
    let mut command = smc(&["run"]);
    let output = command.args(args).args(["echo", "no"]).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}: {output:?}");
    text(&output.stderr)
}

#[test]
fn rules_that_make_no_sense_stop_the_program_before_it_begins() {
    for (option, rule, part) in [
        ("--peer", "10.0.0.0/8x", "10.0.0.0/8x"),
        ("--peer", "10.0.0.1/8", "10.0.0.1/8"),
        ("--peer", "typo.example", "typo.example"),
        ("--peer", "*:80,foo bar", "foo bar"),
        ("--accept", "*:70000", "70000"),
        ("--accept", "[fd00::1", "[fd00::1"),
    ] {
        let said = refused(&[option, rule]);
        assert!(said.contains(option) && said.contains("ADDRESS[/BITS][:PORT[-PORT]]"), "{said}");
        assert!(said.contains(&format!("`{part}` is no ")), "{said}");
    }
    for port in ["70000", "0", "90-80", "http", "*:80"] {
        let said = refused(&["--port", port]);
        assert!(said.contains("PORT") && said.contains(&format!("`{port}` is no port")), "{said}");
    }
}

#[test]
fn strict_fails_where_no_device_can_be_had() {
    let dir = Dir::new("run-strict");
    std::fs::create_dir(dir.path("empty")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(dir.path("stale.sock")).unwrap());
    for (device, why) in [
        ("none.sock", "No such file"),
        ("empty", "no device is at"),
        ("stale.sock", "Connection refused"),
    ] {
        let library = c_library();
        let mut command = smc(&["run", "--strict", "--device", &dir.path(device), "echo", "no"]);
        let output = command.env("SMC_PRELOAD", library).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.contains(why) && said.contains(&dir.path(device)), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn strict_does_not_mind_that_the_device_is_in_use_now() {
    let dir = Dir::new("run-in-use");
    let socket = dir.path("a.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waiting = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    // The C library does not report its loading, so the watcher ends the program later.
    let mut command = smc(&["run", "--strict", "--device", &socket, "echo", "it runs"]);
    let output = command.env("SMC_PRELOAD", c_library()).stdin(Stdio::null()).output().unwrap();
    assert!(!text(&output.stderr).contains(&socket), "{output:?}");
}

#[test]
fn a_library_that_is_missing_is_said_with_the_way_to_get_it() {
    // The command alone, as left by `cargo install`.
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("smc-alone");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let alone = dir.join("smc");
    std::fs::hard_link(env!("CARGO_BIN_EXE_smc"), &alone).unwrap();
    let run = |strict: &[&str], named: Option<&str>| {
        let mut command = Command::new(&alone);
        command.arg("run").args(strict).args(["echo", "it runs"]).env_remove("SMC_PRELOAD");
        command.envs(named.map(|named| ("SMC_PRELOAD", named))).stdin(Stdio::null());
        command.output().unwrap()
    };
    let output = run(&[], None);
    let said = text(&output.stderr);
    assert_eq!(text(&output.stdout), "it runs\n", "{said}");
    assert!(said.contains("cargo build --release -p smc-preload"), "{said}");
    assert!(said.contains(&dir.display().to_string()) && said.contains("/usr/lib"), "{said}");
    let strict = run(&["--strict"], None);
    assert!(!strict.status.success() && strict.stdout.is_empty(), "{strict:?}");
    assert_eq!(text(&strict.stderr).lines().count(), 1, "{strict:?}");
    let named = run(&["--strict"], Some("/none.so"));
    assert!(text(&named.stderr).contains("SMC_PRELOAD names /none.so"), "{named:?}");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_program_that_cannot_be_run_has_the_exit_status_of_a_shell() {
    let directory = Dir::new("run-status");
    let file = directory.path("data");
    std::fs::write(&file, "no program").unwrap();
    for (program, status, says) in [
        ("/no/such/program", 127, "no such program"),
        ("no-such-program", 127, "no such program"),
        (file.as_str(), 126, "it is no executable file"),
        ("/tmp", 126, "it is a directory"),
    ] {
        let output = run(&["run", program]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{program}: {said}");
        assert!(said.contains(says), "{program}: {said}");
    }
    let output = run(&["run", "--strict", "--device", "/no/such.sock", "true"]);
    assert_eq!(output.status.code(), Some(125), "{}", text(&output.stderr));
}

/// Without a library the kernel itself has to make sockets of AF_SMC.
#[test]
fn without_a_library_the_kernel_makes_the_sockets_or_a_line_says_what_is_missing() {
    const AF_SMC: u16 = 43;
    let run = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_smc"));
        command.args(["run", "--stack", "kernel"]).args(options).args(["echo", "it runs"]);
        command.env("SMC_PRELOAD", "/nonexistent").stdin(Stdio::null()).output().unwrap()
    };
    let output = run(&[]);
    let said = text(&output.stderr);
    assert_eq!(text(&output.stdout), "it runs\n", "{said}");
    let family = rustix::net::AddressFamily::from_raw(AF_SMC);
    if rustix::net::socket(family, rustix::net::SocketType::STREAM, None).is_err() {
        assert!(said.contains("echo stays on TCP"), "{said}");
        assert!(said.contains("and without a library: the kernel has no IPPROTO_SMC"), "{said}");
        let strict = run(&["--strict"]);
        assert!(!strict.status.success() && strict.stdout.is_empty(), "{strict:?}");
    }
}
