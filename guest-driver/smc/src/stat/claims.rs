// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the processes' claims about connections against the kernel.
//!
//! A connection is shown once, for a process owning its socket by the kernel's account. The process
//! itself claims the carrier and the amounts. If the library is loaded in a process and no process
//! claims a connection, the connection is TCP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use guest_driver::statistics::{self, Connection, Process, Reason};

use super::host::{Holding, Host, ProcessState};
use super::look::left;
use crate::smc_tools::tcp_table::{self, LISTEN, TcpSocket};

/// State of a socket without a connection, in the kernel's table.
const CLOSED: u8 = 7;
/// Limit of the kept connections of the kernel's tables.
const MAX_TCP: usize = 150_000;
/// How often the table of a network namespace may be read again, for later connections.
const MAX_READ: usize = 8;
/// Maximum length, in characters, of the state of a connection as named by a process.
const STATE: usize = 40;

type Ends = (SocketAddr, SocketAddr);

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn ends(tcp: &TcpSocket) -> Ends {
    (canonical(tcp.local), canonical(tcp.peer))
}

/// The connections of a network namespace.
#[derive(Default)]
struct Table {
    /// Sorted by the addresses.
    connections: Vec<TcpSocket>,
    /// Indices of the connections, sorted by the inodes.
    by_inode: Vec<u32>,
    times_read: usize,
    is_whole: bool,
}

impl Table {
    /// Reads the connections accepted by `wants`. `pid`: a process of the namespace.
    fn read(pid: u32, until: Instant, room: usize, wants: impl Fn(&TcpSocket) -> bool) -> Table {
        let mut connections = Vec::new();
        let mut is_whole = true;
        let read = tcp_table::for_each(pid, |tcp| {
            if tcp.inode != 0 && tcp.state != LISTEN && tcp.state != CLOSED && wants(&tcp) {
                connections.push(tcp);
            }
            is_whole = connections.len() < room && !left(until).is_zero();
            is_whole
        });
        connections.sort_by_key(ends);
        let mut by_inode: Vec<u32> = (0..connections.len() as u32).collect();
        by_inode.sort_by_key(|at| connections.get(*at as usize).map(|tcp: &TcpSocket| tcp.inode));
        Table { connections, by_inode, times_read: 0, is_whole: is_whole && read.is_ok() }
    }

    /// The sockets with these addresses. Two sockets may have the same addresses on different
    /// devices.
    fn with_ends(&self, wanted: Ends) -> impl Iterator<Item = &TcpSocket> {
        let start = self.connections.partition_point(|tcp| ends(tcp) < wanted);
        let rest = self.connections.get(start..).unwrap_or_default();
        rest.iter().take_while(move |tcp| ends(tcp) == wanted)
    }

    fn with_inode(&self, inode: u64) -> Option<&TcpSocket> {
        let of = |at: &u32| self.connections.get(*at as usize);
        let found =
            self.by_inode.binary_search_by_key(&Some(inode), |at| of(at).map(|tcp| tcp.inode));
        found.ok().and_then(|at| self.by_inode.get(at)).and_then(of)
    }
}

/// The claims so far.
pub(super) struct ConnectionCheck<'a> {
    host: &'a Host,
    until: Instant,
    tables: BTreeMap<PathBuf, Table>,
    /// The sockets of each answer of a process, in the order of its connections.
    told: BTreeMap<usize, Vec<(PathBuf, u64)>>,
    /// Processes with an answer.
    answered: BTreeSet<u32>,
}

/// Whether a process owns a socket by the kernel's account. `holding`: the open sockets; unknown
/// for a process closed to this user. For such a process the user of the socket decides.
fn has(
    seen: Option<&ProcessState>,
    holding: Option<&Holding>,
    users: &[u32],
    tcp: &TcpSocket,
) -> bool {
    match (seen, holding) {
        (_, Some(holding)) => holding.has(tcp.inode),
        (None, None) => users.contains(&tcp.uid),
        (Some(_), None) => false,
    }
}

impl<'a> ConnectionCheck<'a> {
    pub(super) fn new(host: &'a Host, until: Instant) -> ConnectionCheck<'a> {
        let (tables, told, answered) = Default::default();
        ConnectionCheck { host, until, tables, told, answered }
    }

    fn room(&self) -> usize {
        let used: usize = self.tables.values().map(|table| table.connections.len()).sum();
        MAX_TCP.saturating_sub(used)
    }

    /// Reads the table of a network namespace for the processes with known sockets.
    fn read(&mut self, network: &Path) {
        let times_read = self.tables.remove(network).map_or(0, |table| table.times_read) + 1;
        let here: Vec<_> = self.host.seen.values().filter(|seen| seen.network == network).collect();
        let mut inodes: Vec<u64> = Vec::new();
        for holding in here.iter().filter_map(|seen| seen.holding.as_ref()) {
            inodes.extend(holding.sockets().iter().map(|(inode, _)| *inode));
        }
        inodes.sort_unstable();
        inodes.dedup();
        let wants = |tcp: &TcpSocket| inodes.binary_search(&tcp.inode).is_ok();
        let mut found = Table::default();
        // A process may have ended meanwhile: try the next.
        for seen in here {
            found = Table::read(seen.pid, self.until, self.room(), wants);
            if found.is_whole || left(self.until).is_zero() {
                break;
            }
        }
        self.tables.insert(network.to_owned(), Table { times_read, ..found });
    }

    /// Takes a process's claims, limited to the connections owned by the process. `number`: the
    /// number of the answer.
    pub(super) fn take(&mut self, number: usize, pid: u32, mut process: Process) -> Process {
        self.answered.insert(pid);
        let seen = self.host.seen.get(&pid);
        let users = crate::proc_files::Status::of(pid).map(|one| one.users).unwrap_or_default();
        let network =
            seen.map_or_else(|| format!("of process {pid}").into(), |one| one.network.clone());
        let holding = seen.and_then(|seen| seen.holding.as_ref());
        if seen.is_some() {
            if !self.tables.contains_key(&network) {
                self.read(&network);
            }
        } else {
            let wants = |tcp: &TcpSocket| users.contains(&tcp.uid);
            let table = Table::read(pid, self.until, self.room(), wants);
            self.tables.insert(network.clone(), table);
        }
        process.pid = pid;
        process.program = match seen {
            Some(seen) => seen.program.clone(),
            None => crate::proc_files::program(pid),
        };
        let sockets = holding.map_or(statistics::MAX_CONNECTIONS, |held| held.sockets().len());
        process.omitted = process.omitted.min(sockets);
        process.totals.reasons.iter_mut().for_each(|reason| *reason = reason.of_other());
        let find = |claims: &ConnectionCheck<'_>, holding: Option<&Holding>, one: &Connection| {
            let wanted = (canonical(one.local?), canonical(one.peer?));
            let mut found = claims.tables.get(&network)?.with_ends(wanted);
            found.find(|tcp| has(seen, holding, &users, tcp)).map(|tcp| tcp.inode)
        };
        let connections = std::mem::take(&mut process.connections);
        let mut kept: Vec<(Option<u64>, Connection)> = connections
            .into_iter()
            .filter_map(tidied)
            .map(|one| (find(self, holding, &one), one))
            .collect();
        let reads = self.tables.get(&network).map_or(0, |table| table.times_read);
        let is_new = kept.iter().any(|(inode, _)| inode.is_none());
        if is_new && seen.is_some() && reads < MAX_READ {
            // Connections made since the look. By now the process may have other sockets.
            if let Ok(now) = Holding::of_now(pid) {
                let wants = |tcp: &TcpSocket| now.has(tcp.inode);
                let table = Table::read(pid, self.until, self.room(), wants);
                for (inode, one) in kept.iter_mut().filter(|(inode, _)| inode.is_none()) {
                    let ends = one.local.map(canonical).zip(one.peer.map(canonical));
                    let mut found = ends.into_iter().flat_map(|ends| table.with_ends(ends));
                    *inode = found.next().map(|tcp| tcp.inode);
                }
            }
            if let Some(table) = self.tables.get_mut(&network) {
                table.times_read += 1;
            }
        }
        kept.retain(|(inode, _)| inode.is_some());
        let (inodes, connections): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
        process.connections = connections;
        let told = inodes.into_iter().flatten().map(|inode| (network.clone(), inode));
        self.told.insert(number, told.collect());
        process
    }

    /// Leaves each connection to one process, the first by its id, and adds the unclaimed TCP
    /// connections of processes with the library.
    pub(super) fn finish(mut self, list: &mut Vec<(usize, Process)>) {
        list.sort_by_key(|(number, process)| (process.pid, *number));
        let mut shown: BTreeSet<(PathBuf, u64)> = BTreeSet::new();
        for (number, process) in list.iter_mut() {
            let mut keys = self.told.remove(number).unwrap_or_default().into_iter();
            process.connections.retain(|_| keys.next().is_some_and(|key| shown.insert(key)));
        }
        let host = self.host;
        for seen in host.seen.values().filter(|seen| seen.has_library) {
            self.add_tcp(list, seen, &mut shown);
        }
        list.sort_by_key(|(number, process)| (process.pid, *number));
    }

    fn add_tcp(
        &mut self,
        list: &mut Vec<(usize, Process)>,
        seen: &ProcessState,
        shown: &mut BTreeSet<(PathBuf, u64)>,
    ) {
        let Some(holding) = &seen.holding else { return };
        if !self.tables.contains_key(&seen.network) {
            self.read(&seen.network);
        }
        let Some(table) = self.tables.get(&seen.network) else { return };
        // For a silent process, the carrier of a connection without a note is unknown.
        let is_known = self.answered.contains(&seen.pid) || seen.is_mute;
        let mut found = Vec::new();
        for (inode, reason) in holding.sockets() {
            if let Some(tcp) = table.with_inode(*inode)
                && (is_known || reason.is_some())
                && shown.insert((seen.network.clone(), *inode))
            {
                let reason = reason.as_deref().cloned().unwrap_or_else(Reason::unnoted);
                found.push(of_tcp(tcp, reason));
            }
        }
        if found.is_empty() && holding.counts().is_empty() {
            return;
        }
        let known = list.iter().position(|(_, process)| process.pid == seen.pid);
        let at = known.unwrap_or_else(|| {
            let (pid, program) = (seen.pid, seen.program.clone());
            let new = Process { version: statistics::VERSION, pid, program, ..Process::default() };
            list.push((usize::MAX, new));
            list.len() - 1
        });
        let Some((_, process)) = list.get_mut(at) else { return };
        process.connections.extend(found);
        if !holding.counts().is_empty() {
            // The counts include every connection, even without a handshake.
            let mut reasons: Vec<_> =
                holding.counts().iter().map(|reason| reason.clone().of_other()).collect();
            reasons.sort_by_key(|reason| std::cmp::Reverse(reason.count));
            process.totals.tcp =
                reasons.iter().fold(0, |sum: u64, one| sum.saturating_add(one.count));
            process.totals.reasons = reasons;
        }
    }
}

fn of_tcp(tcp: &TcpSocket, reason: Reason) -> Connection {
    let (local, peer) = ends(tcp);
    Connection {
        kind: "TCP".into(),
        local: Some(local),
        peer: Some(peer),
        state: statistics::tcp_state(tcp.state).to_owned(),
        reason: Some(reason),
        uncounted: true,
        ..Connection::default()
    }
}

/// A connection ready to be shown. `None`: the kind is unknown.
fn tidied(mut one: Connection) -> Option<Connection> {
    let is_version = |version: &str| version.len() < 8 && version.starts_with('v');
    let versions = ["SMC-D ", "SMC-R "].iter().filter_map(|kind| one.kind.strip_prefix(kind));
    if one.kind != "TCP" && !versions.into_iter().any(is_version) {
        return None;
    }
    if one.state.chars().nth(STATE).is_some() {
        one.state = one.state.chars().take(STATE).collect();
    }
    one.reason = one.reason.map(|reason| reason.of_other());
    Some(one)
}
