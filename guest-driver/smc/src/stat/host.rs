// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's account of the processes of this machine: processes with statistics sockets,
//! processes with the library of `smc run`, and the open sockets of each.
//!
//! A user sees the processes accessible in /proc: its own. Root sees all, including containers. Any
//! process may be hostile: names are bytes, read data is bounded, and anything a process can delay
//! is left to threads that may be given up (`look`).

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use guest_driver::statistics::{self, Connection, Process, Reason, TcpReasonReader};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat2};

use super::processes::{Processes, ReportRequest, Silent, ask_all};
use crate::smc_tools::tcp_table::{LISTEN, TcpSocket, TcpTable};

/// Sockets of statistics that are asked of one process at most.
const MAX_SOCKETS: usize = 8;
/// File name of the library of `smc run`, where it is installed.
const LIBRARY: &str = "libsmc_preload.so";
/// How long files that processes name may take, all together.
const BUDGET: Duration = Duration::from_secs(3);
/// State of a socket without a connection, in the kernel's table.
const CLOSED: u8 = 7;
/// The variable by which `smc run` names the directory of a process's socket.
const DIRECTORY: &[u8] = b"SMC_RUN_STATISTICS=";

/// The processes to look for, beside the processes with sockets in this user's directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The processes of all users, as far as accessible to this user.
    Host,
    /// The processes using this directory.
    Directory(PathBuf),
}

impl Scope {
    /// Every process, unless the environment names a runtime directory other than the system's:
    /// then only the processes using that directory.
    pub(crate) fn of_environment() -> Scope {
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
            Some(directory) if !directory.starts_with("/run/user") => {
                Scope::Directory(directory.join("smc"))
            }
            _ => Scope::Host,
        }
    }

    fn has(&self, pid: u32, notes: &[Mapped]) -> bool {
        let Scope::Directory(directory) = self else { return true };
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let wanted = directory.as_os_str().as_bytes();
        notes.iter().any(|one| one.path.starts_with(directory))
            || environment
                .split(|byte| *byte == 0)
                .filter_map(|variable| variable.strip_prefix(DIRECTORY))
                .any(|path| path == wanted)
    }
}

/// A file mapped by a process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Mapped {
    inode: u64,
    path: PathBuf,
}

impl Mapped {
    /// A line of /proc/PID/maps.
    fn parse(line: &str) -> Option<Mapped> {
        let path = PathBuf::from(line.get(line.find('/')?..)?);
        Some(Mapped { inode: line.split_whitespace().nth(4)?.parse().ok()?, path })
    }
}

/// A process as the kernel tells of it.
struct Seen {
    pid: u32,
    /// Its sockets: the inode of each, and the descriptors that lead there.
    sockets: BTreeMap<u64, Vec<i32>>,
    /// Whether the library of `smc run` is in it.
    has_library: bool,
    /// Files with notes that it has mapped, its own last.
    notes: Vec<Mapped>,
    /// Its network namespace.
    network: PathBuf,
}

impl Seen {
    /// `None`: it has ended, this user may not look into it, or it is none of `scope`.
    fn look(pid: u32, scope: &Scope) -> Option<Seen> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let files: BTreeSet<Mapped> = maps.lines().filter_map(Mapped::parse).collect();
        let is_library = files.iter().any(|one| one.path.ends_with(LIBRARY));
        let mut notes: Vec<_> =
            files.into_iter().filter(|one| TcpReasonReader::is_path(&one.path)).collect();
        // The library may have any name. Nothing else has such notes.
        let has_library = is_library || !notes.is_empty();
        // The file of a child is younger than that of its parent.
        notes.sort_by_key(|one| one.inode);
        if !scope.has(pid, &notes) {
            return None;
        }
        let mut sockets = BTreeMap::<u64, Vec<i32>>::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
            let inode = fs::read_link(entry.path()).ok().and_then(|target| {
                target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
            });
            let fd = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some((inode, fd)) = inode.zip(fd) {
                sockets.entry(inode).or_default().push(fd);
            }
        }
        let network = fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
        Some(Seen { pid, sockets, has_library, notes, network })
    }

    /// Its sockets of statistics, by the path at which each is bound.
    fn statistics(&self) -> Vec<PathBuf> {
        let table = fs::read_to_string(format!("/proc/{}/net/unix", self.pid)).unwrap_or_default();
        let bound = table.lines().filter_map(|line| {
            let mut fields = line.split_whitespace();
            let inode = fields.nth(6)?.parse::<u64>().ok()?;
            let path = Path::new(fields.next()?);
            let name = path.file_name()?.to_str()?;
            let is_statistics = name.starts_with("process-") && name.ends_with(".sock");
            (is_statistics && self.sockets.contains_key(&inode)).then(|| path.to_owned())
        });
        bound.take(MAX_SOCKETS).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Its TCP connections.
    fn connections(&self) -> Vec<TcpSocket> {
        let of_process = |tcp: &&TcpSocket| {
            tcp.state != LISTEN && tcp.state != CLOSED && self.sockets.contains_key(&tcp.inode)
        };
        TcpTable::of(self.pid).all().iter().filter(of_process).copied().collect()
    }

    fn program(&self) -> String {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        name.trim_end().to_owned()
    }
}

/// Time for files that processes name. A process may have them in a filesystem of its own (FUSE), which
/// answers when it likes.
struct TimeBudget(Cell<Duration>);

impl TimeBudget {
    /// What `look` finds, if it does in time.
    fn wait_for<T: Send + 'static>(&self, look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        if self.0.get().is_zero() {
            return None;
        }
        let (sender, found) = mpsc::channel();
        let begun = Instant::now();
        // It ends with this process.
        let thread = std::thread::Builder::new().spawn(move || {
            let _ = sender.send(look());
        });
        let found = thread.ok().and_then(|_| found.recv_timeout(self.0.get()).ok());
        self.0.set(self.0.get().saturating_sub(begun.elapsed()));
        found
    }
}

/// Opens a path as seen by a process, confined to the root of the process.
fn open_of(pid: u32, path: &Path) -> io::Result<OwnedFd> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, format!("/proc/{pid}/root"), directory, Mode::empty())?;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let named = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // O_PATH has no side effects, whatever the file.
    Ok(openat2(root, path, named, Mode::empty(), inside)?)
}

fn expect(named: &OwnedFd, kind: FileType) -> io::Result<PathBuf> {
    if FileType::from_raw_mode(fstat(named)?.st_mode) != kind {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(PathBuf::from(format!("/proc/self/fd/{}", named.as_raw_fd())))
}

/// The notes in a file that a process has mapped.
fn notes(pid: u32, mapped: &Mapped) -> io::Result<TcpReasonReader> {
    let named = open_of(pid, &mapped.path)?;
    if fstat(&named)?.st_ino != mapped.inode {
        return Err(io::ErrorKind::NotFound.into());
    }
    TcpReasonReader::read(File::open(expect(&named, FileType::RegularFile)?)?)
}

fn look_at_all(scope: &Scope) -> Vec<Seen> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let pids = pids.filter(|pid| *pid != own);
    pids.filter_map(|pid| Seen::look(pid, scope)).collect()
}

/// Adds the processes that no directory of this user leads to, and the TCP connections of all that
/// have the library.
pub(super) fn add(processes: &mut Processes, scope: &Scope) {
    let seen = look_at_all(scope);
    let budget = TimeBudget(Cell::new(BUDGET));
    add_reports(processes, &seen, &budget);
    let listed = listed(processes, &seen);
    for process in seen.iter().filter(|process| process.has_library) {
        add_tcp(processes, process, &listed, &budget);
    }
    processes.list.sort_by_key(|process| process.pid);
}

/// The sockets of the processes that are not known.
fn requests(
    seen: &[Seen],
    is_known: impl Fn(u32) -> bool,
    budget: &TimeBudget,
) -> Vec<ReportRequest> {
    let mut found = Vec::new();
    for process in seen.iter().filter(|process| !is_known(process.pid)) {
        for path in process.statistics() {
            let (pid, named) = (process.pid, path.clone());
            let opened = budget.wait_for(move || open_of(pid, &named));
            let Some(Ok(file)) = opened else { continue };
            if expect(&file, FileType::Socket).is_ok() {
                found.push(ReportRequest { socket: path, pid: Some(pid), file: Some(file) });
            }
        }
    }
    found
}

/// The sockets of the processes of `scope` that are not known.
pub(super) fn sockets(scope: &Scope, is_known: impl Fn(u32) -> bool) -> Vec<ReportRequest> {
    requests(&look_at_all(scope), is_known, &TimeBudget(Cell::new(BUDGET)))
}

/// Whether a process still has its socket of statistics, as far as this user may see.
pub(crate) fn has_socket(pid: u32, socket: &Path) -> bool {
    let seen = Seen::look(pid, &Scope::Host);
    seen.is_some_and(|seen| seen.statistics().iter().any(|path| path == socket))
}

/// Adds the reports of those that no directory leads to.
fn add_reports(processes: &mut Processes, seen: &[Seen], budget: &TimeBudget) {
    let known: BTreeSet<_> = processes.list.iter().map(|known| known.pid).collect();
    let mut asked = requests(seen, |pid| known.contains(&pid), budget);
    let is_silent = |silent: &Silent, one: &ReportRequest| {
        (silent.pid, &silent.socket) == (one.process(), &one.socket)
    };
    asked.retain(|one| !processes.silent.iter().any(|silent| is_silent(silent, one)));
    for (asked, answer) in asked.iter().zip(ask_all(&asked)) {
        match answer {
            Ok(process) => processes.list.push(process),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                processes.silent.push(Silent::new(asked, &error));
            }
            // It has just ended, or is not that process's.
            Err(_) => {}
        }
    }
}

/// Network namespace and addresses of a connection.
type Key = (PathBuf, Option<SocketAddr>, Option<SocketAddr>);

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn key(network: &Path, ends: [Option<SocketAddr>; 2]) -> Key {
    let [local, peer] = ends.map(|address| address.map(canonical));
    (network.to_owned(), local, peer)
}

/// The connections that reports have. A child of a fork may have the socket of one, too.
fn listed(processes: &Processes, seen: &[Seen]) -> BTreeSet<Key> {
    let network = |pid| seen.iter().find(|seen| seen.pid == pid).map(|seen| &seen.network);
    let of = |process: &Process| {
        let network = network(process.pid).cloned().unwrap_or_default();
        let ends = process.connections.iter().map(|known| [known.local, known.peer]);
        ends.map(|ends| key(&network, ends)).collect::<Vec<_>>()
    };
    processes.list.iter().flat_map(of).collect()
}

/// Adds the TCP connections of a process that are not listed.
fn add_tcp(processes: &mut Processes, seen: &Seen, listed: &BTreeSet<Key>, budget: &TimeBudget) {
    let is_listed =
        |tcp: &TcpSocket| listed.contains(&key(&seen.network, [Some(tcp.local), Some(tcp.peer)]));
    let missing: Vec<_> = seen.connections().into_iter().filter(|tcp| !is_listed(tcp)).collect();
    if missing.is_empty() {
        return;
    }
    let (pid, mapped) = (seen.pid, seen.notes.clone());
    let read = move || mapped.iter().filter_map(|one| notes(pid, one).ok()).collect::<Vec<_>>();
    let notes = budget.wait_for(read).unwrap_or_default();
    let reason = |tcp: &TcpSocket| {
        let descriptors = seen.sockets.get(&tcp.inode)?;
        let noted =
            |notes: &TcpReasonReader| descriptors.iter().find_map(|fd| notes.reason(*fd).cloned());
        notes.iter().rev().find_map(noted)
    };
    let found = missing.into_iter().map(|tcp| Connection {
        kind: "TCP".into(),
        local: Some(canonical(tcp.local)),
        peer: Some(canonical(tcp.peer)),
        state: statistics::tcp_state(tcp.state).to_owned(),
        reason: Some(reason(&tcp).unwrap_or_else(Reason::unnoted)),
        uncounted: true,
        ..Connection::default()
    });
    match processes.list.iter_mut().find(|process| process.pid == seen.pid) {
        Some(process) => process.connections.extend(found),
        None => processes.list.push(Process {
            version: statistics::VERSION,
            pid: seen.pid,
            program: seen.program(),
            connections: found.collect(),
            ..Process::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_answer_costs_the_budget_once() {
        let budget = TimeBudget(Cell::new(Duration::from_millis(50)));
        assert_eq!(budget.wait_for(|| 7), Some(7));
        assert_eq!(budget.wait_for(|| std::thread::sleep(Duration::from_secs(600))), None);
        assert_eq!(budget.wait_for(|| 7), None);
    }

    #[test]
    fn a_mapped_file_has_an_inode_and_a_path_with_spaces() {
        let line = "7f00-7f01 rw-s 00000000 00:1a 4711      /run/user/0/smc/a b/process-7.tcp";
        let found = Mapped::parse(line).unwrap();
        assert_eq!(found.inode, 4711);
        assert_eq!(found.path, PathBuf::from("/run/user/0/smc/a b/process-7.tcp"));
        assert_eq!(Mapped::parse("7f00-7f01 rw-p 00000000 00:00 0 [heap]"), None);
    }
}
