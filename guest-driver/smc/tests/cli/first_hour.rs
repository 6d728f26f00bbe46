// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events of a new user's first hour: logs in pipes, wrong names, pages, and the archive for
//! support.

use std::process::{Command, Stdio};

use crate::support::{Dir, Fabric, run, smc, text};

#[test]
fn a_log_in_a_pipe_has_no_colours() {
    let fabric = Fabric::start("first-log");
    let (_server, port, _log) = fabric.listen(&[]);
    let mut command = fabric.smc(&["check", "--timeout", "2", &format!("127.0.0.1:{port}")]);
    command.env("RUST_LOG", "trace").stdin(Stdio::null());
    let output = command.output().unwrap();
    let log = text(&output.stderr);
    assert!(log.contains("TRACE") || log.contains("DEBUG"), "{log}");
    assert!(!log.contains('\x1b') && !text(&output.stdout).contains('\x1b'), "{log}");
}

#[test]
fn a_capture_that_is_missing_is_said_to_be_missing() {
    let output = run(&["decode", "nofile.pcap"]);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("there is no file \"nofile.pcap\""), "{error}");
    // Hex is decoded, and a mistake in several words is a mistake of hex.
    assert!(text(&run(&["decode", "e2d4", "xx"]).stderr).contains("'x' is no hex digit"));
}

#[test]
fn a_list_of_devices_leads_on_to_those_of_a_daemon() {
    let output = text(&run(&["devices"]).stdout);
    let has_devices = output.contains("CHID");
    assert!(has_devices || output.contains("smc stat fabric"), "{output}");
}

#[test]
fn manual_pages_are_well_formed_and_name_values() {
    let dir = Dir::new("first-man");
    assert!(run(&["man", &dir.path("man")]).status.success());
    let page = |name: &str| std::fs::read_to_string(dir.0.join("man").join(name)).unwrap();
    let stat = page("smc-stat.1");
    for part in [
        "\\fB\\-\\-management\\fR \\fI<SOCKET>\\fR",
        ".SH EXAMPLES",
        ".SH EXIT STATUS",
        ".SH ENVIRONMENT",
        ".SH FILES",
        ".SH SEE ALSO",
        "\n  fabric  ",
    ] {
        assert!(stat.contains(part), "{part:?} in {stat}");
    }
    assert!(!page("smc.1").contains("help(1)"));
    for name in ["smc.7", "smc.toml.5", "smc-policy.5"] {
        assert!(page(name).contains(".SH DESCRIPTION"), "{name}");
    }
    for entry in std::fs::read_dir(dir.0.join("man")).unwrap().flatten() {
        let name = entry.file_name();
        assert!(!page(name.to_str().unwrap()).contains("SH EXTRA"), "{name:?}");
        let mut groff = Command::new("groff");
        groff.args(["-man", "-ww", "-Tutf8", "-z"]).arg(entry.path());
        // Not on every machine.
        let Ok(output) = groff.output() else { continue };
        assert!(output.stderr.is_empty(), "{name:?}: {}", text(&output.stderr));
    }
}

#[test]
fn an_archive_has_reports_and_no_addresses_if_they_are_masked() {
    let fabric = Fabric::start("first-debug");
    let (_server, port, _log) = fabric.listen(&[]);
    let dir = Dir::new("first-debug-files");
    let path = dir.path("a.tar");
    let output = fabric.smc(&["debug", "--mask-addresses", "--output", &path]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let tar = |options: &[&str]| {
        let output = Command::new("tar").args(options).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let list = tar(&["-tf", &path]);
    for name in ["version.txt", "config.txt", "doctor.txt", "stat.json", "log.txt", "machine.txt"] {
        assert!(list.contains(name), "{name} in {list}");
    }
    let all = tar(&["-xOf", &path]);
    assert!(all.contains(&format!("smc {}", env!("CARGO_PKG_VERSION"))), "{all}");
    assert!(all.contains("option-254") && all.contains("fabric ff00"), "{all}");
    assert!(!all.contains("10.0.0.") && port > 0);
    // Nothing is written over.
    let again = smc(&["debug", "--output", &path]).output().unwrap();
    assert!(text(&again.stderr).contains("cannot make"), "{}", text(&again.stderr));
}
