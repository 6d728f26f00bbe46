// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A command running in a guest.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::run::{End, Output, Run};
use super::wire::Ask;

const SIGKILL: i32 = 9;

/// A running command. Killed when dropped.
pub struct Job {
    channel: Arc<Channel>,
    id: u64,
    what: String,
    limit: Duration,
    /// Bytes of output already returned by `line`.
    handed_out: usize,
}

impl Job {
    pub(super) fn start(channel: &Arc<Channel>, run: Run) -> Job {
        let what = format!("{}: {run}", channel.guest());
        let id = channel.enter();
        channel.ask(id, Ask::Run(run.start));
        Job { channel: Arc::clone(channel), id, what, limit: run.limit, handed_out: 0 }
    }

    /// Output and end of the command so far.
    fn report(&self) -> String {
        self.channel.with_command(self.id, |known| {
            let Output { out, err, .. } = self.output(&known.out, &known.err, End::Gone);
            format!("{:?}\n-- out\n{}\n-- err\n{}", known.end, out.trim_end(), err.trim_end())
        })
    }

    fn output(&self, out: &str, err: &str, end: End) -> Output {
        Output { out: out.to_owned(), err: err.to_owned(), end, what: self.what.clone() }
    }

    /// The next line of its standard output.
    #[track_caller]
    pub fn line(&mut self) -> String {
        let line = self.next_line();
        line.unwrap_or_else(|| panic!("{} has ended: {}", self.what, self.report()))
    }

    /// The next line of standard output, or none after the end.
    #[track_caller]
    pub fn next_line(&mut self) -> Option<String> {
        let handed_out = self.handed_out;
        let line = self.channel.wait(self.id, self.limit, |known| {
            let rest = &known.out[handed_out..];
            match rest.split_once('\n') {
                Some((line, _)) => Some(Some(line.to_owned())),
                None => known.end.map(|_| None),
            }
        });
        let Some(line) = line else {
            panic!("no line from {} within {:?}: {}", self.what, self.limit, self.report())
        };
        self.handed_out += line.as_ref().map_or(0, |line| line.len() + 1);
        line
    }

    /// Whether the command writes a further line, or ends, within this time.
    pub fn has_line_within(&self, limit: Duration) -> bool {
        let handed_out = self.handed_out;
        let found = self.channel.wait(self.id, limit, |known| {
            (known.out[handed_out..].contains('\n') || known.end.is_some()).then_some(())
        });
        found.is_some()
    }

    /// Waits until `text` is in its standard output or error.
    #[track_caller]
    pub fn wait_for(&self, text: &str) {
        let found = self.channel.wait(self.id, self.limit, |known| {
            let found = known.out.contains(text) || known.err.contains(text);
            if found { Some(true) } else { known.end.map(|_| false) }
        });
        if found != Some(true) {
            panic!("{} does not say {text:?}: {}", self.what, self.report());
        }
    }

    /// Standard output so far.
    pub fn out(&self) -> String {
        self.channel.with_command(self.id, |known| known.out.clone())
    }

    /// Standard error so far.
    pub fn err(&self) -> String {
        self.channel.with_command(self.id, |known| known.err.clone())
    }

    /// How the command ended, if ended.
    pub fn ended(&self) -> Option<End> {
        self.channel.with_command(self.id, |known| known.end)
    }

    /// Waits for the command's end.
    #[track_caller]
    pub fn wait(&self) -> Output {
        self.wait_within(self.limit)
    }

    /// Waits for the command's end, for at most `limit`.
    #[track_caller]
    pub fn wait_within(&self, limit: Duration) -> Output {
        let done = self.channel.wait(self.id, limit, |known| {
            known.end.map(|end| self.output(&known.out, &known.err, end))
        });
        done.unwrap_or_else(|| {
            panic!("{} has not ended within {limit:?}: {}", self.what, self.report())
        })
    }

    /// Sends a signal to the command's process group.
    pub fn signal(&self, signal: i32) {
        self.channel.ask(self.id, Ask::Kill { kill: signal });
    }

    /// Kills the command, and waits for its end. Returns the time taken.
    #[track_caller]
    pub fn kill(&self) -> Duration {
        let start = Instant::now();
        self.signal(SIGKILL);
        self.wait();
        start.elapsed()
    }

    /// Feeds more standard input. Only for [`Run::open_stdin`].
    pub fn feed(&self, text: &str) {
        self.channel.ask(self.id, Ask::Feed { feed: text.to_owned() });
    }

    /// Ends its standard input. Only for [`Run::open_stdin`].
    pub fn close_stdin(&self) {
        self.channel.ask(self.id, Ask::Eof { eof: true });
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.channel.leave(self.id).end.is_none() {
            self.signal(SIGKILL);
        }
    }
}
