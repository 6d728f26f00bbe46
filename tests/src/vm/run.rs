// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands for guests, and their results.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::wire::Start;

/// Default time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);

/// A command for a guest: program and arguments, or a line for its shell.
///
/// ```
/// # use smc_tests::vm::Run;
/// Run::from(["smc", "devices"]);
/// Run::from("cat /proc/meminfo | head");
/// Run::from(["cat"]).stdin("text").env("A", "b");
/// ```
#[derive(Debug)]
pub struct Run {
    pub(super) start: Start,
    pub(super) limit: Duration,
}

impl Run {
    /// A command of program and arguments.
    pub fn new<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Run {
        let run = words.into_iter().map(Into::into).collect();
        Run { start: Start { run, env: BTreeMap::new(), stdin: None, open: false }, limit: LIMIT }
    }

    /// With a variable in its environment.
    pub fn env(mut self, name: &str, value: &str) -> Run {
        self.start.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// With this text as the standard input, empty by default.
    pub fn stdin(mut self, text: &str) -> Run {
        self.start.stdin = Some(text.to_owned());
        self
    }

    /// With a standard input open for [`Job::feed`](super::Job::feed).
    pub fn open_stdin(mut self) -> Run {
        self.start.open = true;
        self
    }

    /// With a limit other than a minute.
    pub fn within(mut self, limit: Duration) -> Run {
        self.limit = limit;
        self
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.start.run.join(" "))
    }
}

impl From<&str> for Run {
    fn from(line: &str) -> Run {
        Run::new(["sh", "-c", line])
    }
}

impl From<String> for Run {
    fn from(line: String) -> Run {
        Run::from(line.as_str())
    }
}

impl<S: Into<String>, const N: usize> From<[S; N]> for Run {
    fn from(words: [S; N]) -> Run {
        Run::new(words)
    }
}

impl From<&[&str]> for Run {
    fn from(words: &[&str]) -> Run {
        Run::new(words.iter().copied())
    }
}

impl From<Vec<String>> for Run {
    fn from(words: Vec<String>) -> Run {
        Run::new(words)
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// Together with its guest, or the connection to the guest.
    Gone,
}

/// A command's output and end.
#[derive(Clone, Debug)]
pub struct Output {
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// How the command ended.
    pub end: End,
    pub(super) what: String,
}

impl Output {
    /// The exit code; panics without one.
    #[track_caller]
    pub fn code(&self) -> i32 {
        match self.end {
            End::Code(code) => code,
            _ => panic!("no exit code: {self}"),
        }
    }

    /// The standard output; panics unless the command succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.end == End::Code(0), "failed: {self}");
        self.out
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.what, self.end)?;
        for (name, text) in [("out", &self.out), ("err", &self.err)] {
            if !text.is_empty() {
                write!(f, "\n-- {name}\n{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}
