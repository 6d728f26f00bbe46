// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon as its own program, in its sandbox, and its resources.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vhost_device_ism::management::{AddGuest, Client, ClientError, Guest};

/// Longest wait for its sockets.
const START: Duration = Duration::from_secs(20);
/// Lines of the daemon's log in the report of a failure.
const LINES: usize = 40;
/// Lines of its log at the start, and per second: some for each port.
const MOST_LINES: usize = 1_000;
const LINES_PER_SECOND: usize = 20;

/// Resources of the daemon's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) descriptors: usize,
    pub(super) threads: usize,
    /// Mappings of memory of guests and of slabs.
    pub(super) mappings: usize,
    /// Memory of its own, KiB.
    pub(super) anonymous: usize,
    /// Memory shared with guests, KiB.
    pub(super) shared: usize,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Held { descriptors, threads, mappings, anonymous, shared } = self;
        write!(
            f,
            "{descriptors} descriptors, {threads} threads, {mappings} mappings, \
             {anonymous} KiB of its own, {shared} KiB shared"
        )
    }
}

/// A running daemon.
#[derive(Debug)]
pub(super) struct Program {
    child: Child,
    directory: PathBuf,
    log: PathBuf,
    since: Instant,
}

impl Program {
    /// Starts the daemon with these ports, and waits for the sockets.
    pub(super) fn start(program: &Path, directory: &Path, ports: &[String]) -> io::Result<Program> {
        let log = directory.join("log");
        let mut command = Command::new(program);
        for port in ports {
            command.arg("--socket-path").arg(directory.join(port));
        }
        // A system call unknown to the sandbox ends the daemon, and so is found.
        command.args(["--sandbox=strict", "--window-size=1G", "--management"]);
        command.arg(directory.join("management"));
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(File::create(&log)?).spawn()?;
        let (directory, since) = (directory.to_owned(), Instant::now());
        let mut program = Program { child, directory, log, since };
        let end = Instant::now() + START;
        while program.list().is_err() {
            if Instant::now() > end || program.ended().is_some() {
                return Err(io::Error::other(format!("the daemon: {}", program.last_lines())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(program)
    }

    /// Describes the daemon's end, if the daemon has ended.
    pub(super) fn ended(&mut self) -> Option<String> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(format!("the daemon has ended: {status}")),
            Err(error) => Some(format!("the daemon: {error}")),
        }
    }

    fn management(&self) -> Result<Client, ClientError> {
        Client::connect(self.directory.join("management"))
    }

    /// Its guests.
    pub(super) fn list(&self) -> Result<Vec<Guest>, ClientError> {
        self.management()?.list()
    }

    /// Takes a port away and gives it back, with new quotas and counters.
    pub(super) fn renew(&self, port: &str) -> Result<(), ClientError> {
        let mut client = self.management()?;
        client.remove(port)?;
        client.add(&AddGuest { socket: self.directory.join(port), ..AddGuest::default() })
    }

    /// The resources now.
    pub(super) fn held(&self) -> Held {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let count = |what| fs::read_dir(proc.join(what)).map_or(0, Iterator::count);
        let text = |what| fs::read_to_string(proc.join(what)).unwrap_or_default();
        let status = text("status");
        let kib = |key| {
            let line = status.lines().find_map(|line: &str| line.strip_prefix(key));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        Held {
            descriptors: count("fd"),
            threads: count("task"),
            mappings: text("maps").lines().filter(|line| line.contains("memfd:")).count(),
            anonymous: kib("RssAnon:"),
            shared: kib("RssShmem:"),
        }
    }

    /// Names of the daemon's descriptors and shared mappings, for the report of a failure.
    pub(super) fn descriptors(&self) -> Vec<String> {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let links = fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
        let name = |path: PathBuf| fs::read_link(&path).unwrap_or(path).display().to_string();
        let mut all: Vec<String> = links.map(|entry| name(entry.path())).collect();
        let maps = fs::read_to_string(proc.join("maps")).unwrap_or_default();
        all.extend(maps.lines().filter(|line| line.contains("memfd:")).map(String::from));
        all.sort();
        all
    }

    /// Finds lines in the daemon's log unfit for any daemon, or too many lines.
    pub(super) fn panics(&self) -> Option<String> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let limit = MOST_LINES + LINES_PER_SECOND * self.since.elapsed().as_secs() as usize;
        let lines = log.lines().count();
        if lines > limit {
            return Some(format!("the daemon's log: {lines} lines, more than {limit}"));
        }
        let bad = |line: &&str| line.contains("panicked") || line.contains(" ERROR ");
        log.lines().find(bad).map(|line| format!("the daemon's log: {line}"))
    }

    /// The end of its log.
    pub(super) fn last_lines(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
