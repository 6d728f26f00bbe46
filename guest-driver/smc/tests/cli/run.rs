//! `smc run`: what it says before the program begins. What becomes of the program is tested with the library,
//! in `guest-driver/preload/tests`.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::support::{Dir, text};

/// Runs `smc run` without the rights that TCP option 254 takes. None, aloud, where they cannot be dropped.
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
    // Some library that can be loaded: it does not say that it was, which has no part in this.
    let command = command.arg("run").args(args).env("SMC_PRELOAD", c_library());
    let output = command.env_remove("SMC_RENDEZVOUS").stdin(Stdio::null()).output();
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    match output {
        Err(error) if !ci => {
            // Past what the test harness keeps to itself.
            let _ = writeln!(std::io::stderr(), "SKIPPED, nothing was tested: {error}");
            None
        }
        output => Some(output.unwrap()),
    }
}

/// The C library that this process uses.
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
fn where_the_option_is_not_required_nothing_is_said() {
    for how in ["auto", "off"] {
        let Some(output) = without_rights(&["--rendezvous", how, "echo", "it runs"]) else {
            return;
        };
        let said = text(&output.stderr);
        assert_eq!(text(&output.stdout), "it runs\n", "{said}");
        assert!(!said.contains("254"), "{said}");
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
        assert!(said.contains("rule 1") || said.contains(&policy), "{said}");
    }
}
