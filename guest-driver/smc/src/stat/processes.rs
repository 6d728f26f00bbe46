// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The processes with a statistics socket or with the library of `smc run`, at one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use guest_driver::statistics::{MAX_CONNECTIONS, Process};
use serde::Serialize;

use super::claims::ConnectionCheck;
use super::host::{Host, Scope};
use super::requests::{self, ReportRequest, in_directories};

/// Ends of the parts of a look, after its begin: finding the processes, finding their sockets,
/// sending requests, and receiving answers. A look takes that long only if processes delay it.
const SEEN: Duration = Duration::from_millis(1500);
const SOCKETS: Duration = Duration::from_millis(2700);
const ASKED: Duration = Duration::from_millis(3200);
const ANSWERED: Duration = Duration::from_millis(4300);
/// Limit of the listed connections of all processes.
const MAX_LISTED: usize = 20_000;

/// The answers of processes, and the kernel's account of the processes.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Processes {
    #[serde(rename = "processes")]
    pub(crate) list: Vec<Process>,
    /// Processes without an answer.
    pub(crate) silent: Vec<Silent>,
    /// Number of processes skipped for lack of time.
    pub(crate) missed: usize,
}

/// A process without an answer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Silent {
    pub(super) pid: u32,
    pub(crate) socket: PathBuf,
    pub(crate) problem: String,
}

impl Silent {
    fn new(asked: &ReportRequest, error: &io::Error) -> Silent {
        let (pid, socket) = asked.key();
        let problem = match error.kind() {
            io::ErrorKind::WouldBlock => "its queue is full".to_owned(),
            io::ErrorKind::InvalidData => "its answer is none".to_owned(),
            io::ErrorKind::FileTooLarge => "its answer is too long".to_owned(),
            _ => error.to_string(),
        };
        Silent { pid, socket, problem }
    }
}

impl Processes {
    /// Whether there is no process.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.silent.is_empty()
    }

    /// Keeps at most `most` connections. Processes with few keep theirs.
    fn shorten(&mut self, most: usize) {
        let mut lengths: Vec<_> = self.list.iter().map(|one| one.connections.len()).collect();
        lengths.sort_unstable();
        let (mut room, mut left, mut each) = (most, lengths.len(), usize::MAX);
        for length in lengths {
            if length > room / left {
                each = room / left;
                break;
            }
            room -= length;
            left -= 1;
        }
        for process in self.list.iter_mut().filter(|one| one.connections.len() > each) {
            process.omitted += process.connections.len() - each;
            process.connections.truncate(each);
        }
    }
}

/// Asks the processes of this user, or for root the processes of all users.
pub(crate) fn all() -> Processes {
    of(&Scope::of_environment())
}

/// Asks the processes of this user's directories and of `scope`.
pub(super) fn of(scope: &Scope) -> Processes {
    let begin = Instant::now();
    let own = in_directories();
    let (host, requests) = look(scope, &own, |seen| seen.has_library, &BTreeSet::new(), begin);
    let mut processes = Processes { missed: host.missed, ..Processes::default() };
    let connections = |pid: u32| {
        let holding = host.seen.get(&pid).and_then(|seen| seen.holding.as_ref());
        holding.map_or(MAX_CONNECTIONS, |holding| holding.sockets().len().min(MAX_CONNECTIONS))
    };
    let mut claims = ConnectionCheck::new(&host, begin + ANSWERED);
    let mut list = Vec::new();
    requests::ask_all(requests, connections, begin + ANSWERED, |(asked, answer)| match answer {
        Ok(process) => {
            let number = list.len();
            list.push((number, claims.take(number, asked.pid, process)));
        }
        Err(error) if has_ended(&asked, &error) => {}
        Err(error) => processes.silent.push(Silent::new(&asked, &error)),
    });
    claims.finish(&mut list);
    processes.list = list.into_iter().map(|(_, process)| process).collect();
    processes.silent.sort_by_key(|one| (one.pid, one.socket.clone()));
    processes.shorten(MAX_LISTED);
    processes
}

/// Whether an error means that the process has just ended.
fn has_ended(asked: &ReportRequest, error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound};
    matches!(error.kind(), ConnectionRefused | ConnectionReset | NotFound)
        || crate::proc_files::Status::of(asked.pid).is_none()
}

/// The processes of `scope`, and the statistics sockets to ask, without the processes in `known`.
/// `wants`: whether to look at the sockets of a process without a statistics socket.
fn look(
    scope: &Scope,
    own: &BTreeMap<u32, Vec<PathBuf>>,
    wants: impl Fn(&super::host::ProcessState) -> bool,
    known: &BTreeSet<u32>,
    begin: Instant,
) -> (Host, Vec<ReportRequest>) {
    let mut host = Host::look(scope, &own.keys().copied().collect(), begin + SEEN);
    host.seen.retain(|pid, _| !known.contains(pid));
    let mut pids = host.named(begin + SEEN + (SOCKETS - SEEN) / 4);
    let others =
        host.seen.values().filter(|seen| wants(seen) || own.contains_key(&seen.status.own_pid));
    pids.extend(others.map(|seen| seen.pid));
    host.look_at_sockets(&pids, begin + SOCKETS);
    let bound = host.paths(begin + SOCKETS + (ASKED - SOCKETS) / 2);
    let requests = requests::requests(&host, own, bound, begin + ASKED);
    (host, requests)
}

/// The sockets of unknown processes, in this user's directories and in `scope`.
pub(crate) fn sockets(scope: &Scope, known: &BTreeSet<u32>) -> Vec<ReportRequest> {
    look(scope, &in_directories(), |_| false, known, Instant::now()).1
}

#[cfg(test)]
mod tests {
    use guest_driver::statistics::Connection;

    use super::*;

    #[test]
    fn processes_with_few_connections_keep_theirs_beside_those_with_many() {
        let process = |count| Process {
            connections: vec![Connection::default(); count],
            ..Process::default()
        };
        for (counts, most, kept) in [
            (vec![3, 100, 90, 0], 50, vec![3, 23, 23, 0]),
            (vec![3, 4], 50, vec![3, 4]),
            (vec![30, 30], 10, vec![5, 5]),
            (vec![], 10, vec![]),
        ] {
            let list = counts.iter().copied().map(process).collect();
            let mut all = Processes { list, ..Processes::default() };
            all.shorten(most);
            let left: Vec<_> = all.list.iter().map(|one| one.connections.len()).collect();
            assert_eq!(left, kept);
            let omitted: Vec<_> = all.list.iter().map(|one| one.omitted).collect();
            let lost: Vec<_> = counts.iter().zip(&kept).map(|(all, kept)| all - kept).collect();
            assert_eq!(omitted, lost);
        }
    }
}
