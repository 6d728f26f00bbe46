// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The view on a terminal: tables and sentences broken to the width.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::support::{Fabric, Running, eventually, text};

/// A shell on a terminal of `columns` columns, with `smc` as a command.
pub(crate) fn shell(fabric: &Fabric, columns: u32, line: &str) -> Command {
    let smc = env!("CARGO_BIN_EXE_smc");
    let line = format!("stty cols {columns} rows 40; smc() {{ '{smc}' \"$@\"; }}; {line}");
    // A test begun in the background ignores the signals of a terminal.
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,QUIT", "script", "-qec", &line, "/dev/null"]);
    command.env("XDG_RUNTIME_DIR", fabric.directory());
    for name in ["SMC_DEVICE", "SMC_EID", "SMC_MANAGEMENT", "SMC_CONFIG", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.env("SHELL", "/bin/sh");
    command
}

/// A terminal with a running command, and its output so far.
pub(crate) struct Screen {
    terminal: Running,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Screen {
    pub(crate) fn open(command: &mut Command) -> Screen {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut terminal = Running(command.spawn().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (mut output, all) = (terminal.0.stdout.take().unwrap(), seen.clone());
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut piece) {
                all.lock().unwrap().extend_from_slice(&piece[..n]);
            }
        });
        Screen { terminal, seen }
    }

    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    /// Does something, and waits for the later appearance of all of `what`. Pages are whole: a word
    /// of a page is there once the page is.
    pub(crate) fn after(&mut self, action: impl FnOnce(&mut Screen), what: &[&str]) -> String {
        let from = self.shown().len();
        action(self);
        eventually(&format!("{what:?} in {}", self.shown()), || {
            let now = self.shown();
            what.iter().all(|part| now.get(from..).is_some_and(|now| now.contains(part)))
        });
        self.shown().split_off(from)
    }

    /// Types something, and waits as [`Screen::after`].
    pub(crate) fn press(&mut self, keys: &[u8], what: &[&str]) {
        let typed = |screen: &mut Screen| {
            screen.terminal.0.stdin.as_mut().unwrap().write_all(keys).unwrap();
        };
        self.after(typed, what);
    }
}

#[test]
fn pages_of_a_watched_table_have_rates_and_fit_the_terminal() {
    let fabric = Fabric::start("live");
    let (mut server, port, _log) = fabric.listen(&[]);
    let client = crate::stat::client(&fabric, port, &[]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    for columns in [80, 160] {
        let line = "trap : INT; smc stat connections --watch; echo \"ended $?.\"";
        let mut screen = Screen::open(&mut shell(&fabric, columns, line));
        screen.press(b"", &[&client.0.id().to_string(), "sent/s"]);
        screen.press(b"\x03", &["ended 130."]);
        let pages = screen.shown();
        let pages = pages.split("^Cended").next().unwrap();
        for line in pages.lines() {
            let line = line.trim_end().trim_start_matches("\x1b[H\x1b[J");
            assert!(line.chars().count() <= columns as usize, "{line:?} of {columns}");
        }
    }
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

#[test]
fn a_filter_that_nothing_fits_is_not_taken_for_no_process() {
    let fabric = Fabric::start("live-filter");
    let (_server, port, _log) = fabric.listen(&[]);
    let client = crate::stat::client(&fabric, port, &[]);
    eventually("it is there", || {
        let output = fabric.smc(&["stat", "connections"]).output().unwrap();
        text(&output.stdout).contains(&client.0.id().to_string())
    });
    let output = fabric.smc(&["stat", "connections", "--port", "1"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), "No connection fits.\n");
}

/// Commands for copying are not broken.
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
