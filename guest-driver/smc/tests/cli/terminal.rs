// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a terminal shows: sums of connections, and sentences that fit.

use std::io::Read;
use std::process::{Command, Stdio};

use crate::support::{Fabric, text};

/// A shell on a terminal of so many columns, in which `smc` is the command.
fn shell(fabric: &Fabric, columns: u32, line: &str) -> Command {
    let smc = env!("CARGO_BIN_EXE_smc");
    let line = format!("stty cols {columns} rows 40; smc() {{ '{smc}' \"$@\"; }}; {line}");
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).env("XDG_RUNTIME_DIR", fabric.directory());
    for name in ["SMC_DEVICE", "SMC_EID", "SMC_MANAGEMENT", "SMC_CONFIG", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.env("SHELL", "/bin/sh");
    command
}

#[test]
fn sums_are_asked_for_by_an_option() {
    let fabric = Fabric::start("live-by");
    let (mut server, port, _log) = fabric.listen(&[]);
    let client = crate::stat::client(&fabric, port, &[]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    let by = |what: &str| {
        let output = fabric.smc(&["stat", "connections", "--by", what]).output().unwrap();
        text(&output.stdout)
    };
    let shown = by("process");
    let name = format!("smc {} ", client.0.id());
    let line = shown.lines().find(|line| line.starts_with(&name)).unwrap();
    let words: Vec<_> = line.split_whitespace().skip(2).collect();
    assert_eq!(words, ["1", "0", "5", "B", "0", "B"], "{shown}");
    let shown = by("peer");
    let line = shown.lines().find(|line| line.starts_with("127.0.0.1 ")).unwrap();
    let words: Vec<_> = line.split_whitespace().skip(1).collect();
    assert_eq!(words, ["2", "0", "5", "B", "5", "B"], "both ends: {shown}");
}

/// Commands that are to be copied are not broken.
#[test]
fn sentences_of_doctor_and_check_fit_80_columns() {
    let fabric = Fabric::start("live-doctor");
    let (_server, port, _log) = fabric.listen(&[]);
    for line in ["smc doctor".to_owned(), format!("smc check --propose answered 127.0.0.1:{port}")]
    {
        let output = shell(&fabric, 80, &line).stdin(Stdio::null()).output().unwrap();
        let shown = text(&output.stdout);
        assert!(shown.lines().count() >= 3, "{shown}");
        for line in shown.lines().map(str::trim_end).filter(|line| !line.contains("  > ")) {
            assert!(line.chars().count() <= 80, "{line:?} in {shown}");
        }
    }
}
