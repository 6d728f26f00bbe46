// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The conformance suite against the kernel's AF_SMC; the cases know Linux's deviations.
//!
//! `SMC_CONFORM_REPORTS=DIR` keeps the reports.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use smc_tests::vm::Bed;

use crate::ends::{End, PORT, one};

/// The suite, built beside the daemon.
fn suite(bed: &Bed, name: &str, args: &[&str]) -> (Command, PathBuf) {
    let daemon = PathBuf::from(std::env::var_os("DAEMON").unwrap());
    let kept = std::env::var_os("SMC_CONFORM_REPORTS").map(PathBuf::from);
    let report = |end: &str| match &kept {
        Some(directory) => directory.join(format!("linux-{name}.{end}")),
        None => bed.path(&format!("linux-{name}.{end}")),
    };
    let mut command = Command::new(daemon.with_file_name("smc"));
    command.args(["conform", "--echo", "--device"]).arg(bed.port("suite"));
    for end in ["json", "html"] {
        command.arg(format!("--{end}")).arg(report(end));
    }
    // Words to the test's runner, such as for one case of a layer.
    let more = std::env::var("SMC_CONFORM_ARGS").unwrap_or_default();
    command.args(more.split_whitespace().map(OsString::from)).args(args);
    (command, report("json"))
}

/// Runs the suite. No requirement fails beyond Linux's known deviations, and `fewest` hold.
#[track_caller]
fn check((mut command, report): (Command, PathBuf), fewest: usize) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let text = std::fs::read(Path::new(&report)).unwrap_or_else(|error| panic!("{error}: {said}"));
    let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let cases = report["cases"].as_array().unwrap();
    let of =
        |verdict: &str| cases.iter().filter(|one| one["verdict"] == verdict).collect::<Vec<_>>();
    let lines = |verdict: &str| -> Vec<String> {
        of(verdict).iter().map(|one| format!("{} {}", one["id"], one["says"])).collect()
    };
    println!("facts {}; {}", report["facts"], report["summary"]);
    println!("as Linux does:\n{}", lines("DEVIATES-AS-LINUX").join("\n"));
    let failed = lines("FAIL");
    assert!(failed.is_empty(), "{} fail:\n{}", failed.len(), failed.join("\n"));
    let passed = of("PASS").len();
    assert!(passed >= fewest, "{passed} passed");
    let silent = of("DEVIATES-AS-LINUX").into_iter().find(|one| one["note"].is_null());
    assert!(silent.is_none(), "a deviation without a word why: {silent:?}");
}

#[test]
fn the_suite_knows_linux_as_a_server() {
    let bed = Bed::new();
    let mut guest = one(&bed);
    // A first contact fails while another connection has joined its group (docs/linux.md).
    guest.forgive("possible recursive locking");
    let run = ["smc-test-peer", "interop", "echo", "linux", "0.0.0.0:5000"];
    let _server = End::serve_by(&guest, run.into());
    let address = format!("{}:{PORT}", guest.ip());
    check(suite(&bed, "server", &[&address]), 600);
}

#[test]
fn the_suite_knows_linux_as_a_client() {
    let bed = Bed::new();
    let guest = one(&bed);
    // Another test listens on PORT of this host meanwhile.
    let address = format!("{}:{}", guest.host_ip(), PORT + 1);
    let run = ["smc-test-peer", "interop", "call", "linux", &address];
    let _client = guest.spawn(run);
    check(suite(&bed, "client", &["--wait", "20", "--listen", &address]), 150);
}

/// The commands of a section of docs/conformance.md.
fn commands_of(heading: &str) -> String {
    let page = include_str!("../../../docs/conformance.md");
    let (_, section) = page.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_page_can_be_followed() {
    let bed = Bed::new();
    let mut guest = one(&bed);
    guest.forgive("possible recursive locking");
    let run = ["smc-test-peer", "interop", "echo", "linux", "0.0.0.0:5000"];
    let _server = End::serve_by(&guest, run.into());
    let commands = commands_of("An hour with a kernel");
    assert!(commands.matches("smc conform ").count() >= 4, "{commands}");
    let directory = bed.path("followed");
    std::fs::create_dir_all(&directory).unwrap();
    let programs = PathBuf::from(std::env::var_os("DAEMON").unwrap());
    let mut path = OsString::from(programs.parent().unwrap());
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &commands]).current_dir(&directory).env("PATH", path);
    shell.env("GUEST", guest.ip()).env("DEVICE", bed.port("suite"));
    let output = shell.output().unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}\n{told}");
    let report = std::fs::read(directory.join("mine.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report["cases"][0]["id"], "mine-halves");
    assert_eq!(report["cases"][0]["verdict"], "PASS", "{said}");
    let page = std::fs::read_to_string(directory.join("first.html")).unwrap();
    assert!(page.contains("server-accept-eid"));
}
