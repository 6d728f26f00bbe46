// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Killable processes: the program `smc-test-peer` of this package.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::watch::note;

/// A running helper. Killed when dropped.
pub struct Helper {
    child: Child,
    lines: BufReader<ChildStdout>,
    // Its end tells the helper to go.
    stdin: ChildStdin,
}

impl Helper {
    /// Starts the program with these arguments and waits for its first line.
    pub fn start<S: AsRef<OsStr>>(program: impl AsRef<Path>, args: &[S]) -> (Helper, String) {
        let mut helper = Helper::spawn(program, args);
        let first = helper.line();
        (helper, first)
    }

    /// Starts the program with these arguments.
    pub fn spawn<S: AsRef<OsStr>>(program: impl AsRef<Path>, args: &[S]) -> Helper {
        let mut child = Command::new(program.as_ref())
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let stdin = child.stdin.take().unwrap();
        Helper { child, lines, stdin }
    }

    /// The helper's next line.
    pub fn line(&mut self) -> String {
        note("waits for a helper's line");
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the helper has ended");
        line.trim_end().to_owned()
    }

    /// Writes to its standard input.
    pub fn feed(&mut self, text: &str) {
        self.stdin.write_all(text.as_bytes()).unwrap();
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGSTOP.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// Sends SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Sends SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGKILL, and returns the rest of the output.
    pub fn kill_and_read(mut self) -> String {
        let mut output = String::new();
        self.child.kill().unwrap();
        self.lines.read_to_string(&mut output).unwrap();
        output
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
