// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals to the live view: the terminal's modes are restored after every signal.

use std::process::{Command, Stdio};

use crate::support::{Fabric, eventually, text};
use crate::terminal::{Screen, shell};

/// Signals ending a program, with the exit status in a shell.
const ENDING: [(&str, u32); 14] = [
    ("HUP", 129),
    ("INT", 130),
    ("QUIT", 131),
    ("TRAP", 133),
    ("ABRT", 134),
    ("USR1", 138),
    ("USR2", 140),
    ("ALRM", 142),
    ("TERM", 143),
    ("XCPU", 152),
    ("XFSZ", 153),
    ("VTALRM", 154),
    ("PROF", 155),
    ("SYS", 159),
];

/// A live view: its process id, and its terminal.
struct View {
    pid: String,
    terminal: String,
}

impl View {
    /// Waits for the next view on the screen.
    fn next(screen: &mut Screen, action: impl FnOnce(&mut Screen)) -> View {
        let shown = screen.after(action, &["view ", " ready", "q quit"]);
        let (_, line) = shown.split_once("view ").unwrap();
        let mut words = line.split_whitespace().map(str::to_owned);
        let mut word = || words.next().unwrap();
        let view = View { pid: word(), terminal: word() };
        eventually("keys are not shown", || !view.shows_keys());
        view
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.pid]).status();
        assert!(sent.unwrap().success());
    }

    /// Whether the terminal echoes typed characters, and works by lines.
    fn shows_keys(&self) -> bool {
        let stty = Command::new("stty").args(["-a", "-F", &self.terminal]).output().unwrap();
        let modes = text(&stty.stdout);
        let has = |mode: &str| modes.split_whitespace().any(|word| word == mode);
        assert_eq!(has("echo"), has("icanon"), "{modes}");
        has("echo")
    }

    fn is_stopped(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        status.contains("State:\tT")
    }
}

/// A terminal with one view after the other, each in the foreground.
fn views(fabric: &Fabric, number: usize) -> Command {
    let smc = env!("CARGO_BIN_EXE_smc");
    // The shell gets the signal of a key, too. Without core files even for signals that dump core.
    let line = format!(
        "trap : INT QUIT; ulimit -c 0; for i in $(seq {number}); do \
         sh -c 'echo view $$ $(tty) ready; exec \"{smc}\" stat connections --watch=1'; \
         echo \"ended $?.\"; stty -a; done"
    );
    let mut command = shell(fabric, 80, &line);
    command.stderr(Stdio::null());
    command
}

#[test]
fn a_signal_that_ends_the_view_leaves_the_terminal_as_it_was() {
    let fabric = Fabric::start("signals");
    let mut screen = Screen::open(&mut views(&fabric, ENDING.len() + 1));
    let mut view = View::next(&mut screen, |_| ());
    for (signal, status) in ENDING {
        let ended = format!("ended {status}.");
        let send = |screen: &mut Screen| {
            screen.after(|_| view.signal(signal), &[&ended, "\nisig icanon iexten echo "]);
        };
        view = View::next(&mut screen, send);
    }
    // By a key.
    screen.press(b"\x03", &["ended 130.", "\nisig icanon iexten echo "]);
    assert!(screen.shown().matches("-echo ").count() == 0, "{}", screen.shown());
}

#[test]
fn a_view_that_is_stopped_gives_the_terminal_back_for_as_long() {
    let fabric = Fabric::start("signals-stop");
    let mut screen = Screen::open(&mut views(&fabric, 1));
    let view = View::next(&mut screen, |_| ());
    for _ in 0..2 {
        view.signal("TSTP");
        eventually("it is stopped", || view.is_stopped());
        assert!(view.shows_keys());
        // A page at once, and keys again.
        screen.after(|_| view.signal("CONT"), &["q quit"]);
        eventually("keys are not shown", || !view.shows_keys());
    }
    // SIGSTOP cannot be caught. A shell sets the modes meanwhile.
    view.signal("STOP");
    eventually("it is stopped", || view.is_stopped());
    let stty = Command::new("stty").args(["-F", &view.terminal, "icanon", "echo"]).status();
    assert!(stty.unwrap().success() && view.shows_keys());
    screen.after(|_| view.signal("CONT"), &["q quit"]);
    eventually("keys are not shown", || !view.shows_keys());
    screen.press(b"v", &["lines: process"]);
    screen.press(b"q", &["ended 0.", "\nisig icanon iexten echo "]);
}
