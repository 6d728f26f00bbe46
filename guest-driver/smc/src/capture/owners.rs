// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decides which process may report which connection.
//!
//! A captured process names the addresses of its connections itself, and may name any. The kernel
//! knows the real connections of the process. An ended connection has no owner: any process may
//! report such a connection, without hiding records of another user's process.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use guest_driver::statistics::Record;

use crate::proc_files::Status;
use crate::smc_tools::tcp_table::{self, LISTEN, TcpSocket};
use crate::stat::Holding;

/// How long an answer of the kernel is valid.
const VALID: Duration = Duration::from_secs(5);
/// How long records of new connections are collected before the kernel is asked.
const PAUSE: Duration = Duration::from_millis(20);
/// The kernel is asked for this part of the time at most.
const PART: u32 = 5;
/// Limits, in bytes, of the records waiting for the kernel's answer: per process and in total.
pub(super) const MAX_HELD: usize = 1 << 20;
const MAX_ALL_HELD: usize = 8 << 20;
/// Limit of the remembered connections of a process.
const MAX_CONNECTIONS: usize = 250_000;

type Ends = (SocketAddr, SocketAddr);

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The kernel's answer about a process and a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The process has the connection.
    Own,
    /// There is no such connection. It may have ended.
    Gone,
}

/// The connections of a process.
struct Known {
    own: HashSet<Ends>,
    at: Instant,
}

/// The kernel's answers, and the records waiting for an answer.
pub(super) struct Owners {
    known: BTreeMap<u32, Known>,
    held: BTreeMap<u32, Vec<Record>>,
    held_bytes: usize,
    next: Instant,
}

/// Memory size of a record, in bytes.
fn size(record: &Record) -> usize {
    size_of::<Record>() + record.bytes.capacity()
}

impl Owners {
    pub(super) fn new() -> Owners {
        let (known, held) = Default::default();
        Owners { known, held, held_bytes: 0, next: Instant::now() }
    }

    /// Returns a record if the kernel is known to confirm the process. Other records wait for
    /// [`Owners::decide`]; records beyond the limits are dropped.
    pub(super) fn admit(&mut self, pid: u32, record: Record) -> Option<Record> {
        let ends = (record.local, record.peer);
        let known = self.known.get(&pid).filter(|known| known.at.elapsed() < VALID);
        let waits = self.held.contains_key(&pid);
        if !waits && known.is_some_and(|known| known.own.contains(&ends)) {
            return Some(record);
        }
        if self.held.is_empty() {
            self.next = self.next.max(Instant::now() + PAUSE);
        }
        let size = size(&record);
        let held = self.held.entry(pid).or_default();
        let own: usize = held.iter().map(self::size).sum();
        if own + size <= MAX_HELD && self.held_bytes + size <= MAX_ALL_HELD {
            self.held_bytes += size;
            held.push(record);
        }
        None
    }

    /// When the kernel is to be asked; `None`: no record waits.
    pub(super) fn next(&self) -> Option<Instant> {
        (!self.held.is_empty()).then_some(self.next)
    }

    /// Asks the kernel, and returns the waiting records confirmed for their processes, or of ended
    /// connections.
    pub(super) fn decide(&mut self) -> Vec<(u32, Owner, Record)> {
        let begin = Instant::now();
        let mut decided = Vec::new();
        for (pid, held) in std::mem::take(&mut self.held) {
            let asked: HashSet<Ends> = held.iter().map(|one| (one.local, one.peer)).collect();
            let (own, foreign) = ask(pid, &asked);
            for record in held {
                let ends = (record.local, record.peer);
                if own.contains(&ends) {
                    decided.push((pid, Owner::Own, record));
                } else if !foreign.contains(&ends) {
                    decided.push((pid, Owner::Gone, record));
                }
            }
            self.known.insert(pid, Known { own, at: begin });
        }
        self.held_bytes = 0;
        self.next = Instant::now() + PAUSE.max(begin.elapsed() * PART);
        decided
    }

    /// A process is not captured any more.
    pub(super) fn forget(&mut self, pid: u32) {
        self.known.remove(&pid);
    }
}

/// The open connections of a process, and the connections in `asked` owned by others.
fn ask(pid: u32, asked: &HashSet<Ends>) -> (HashSet<Ends>, HashSet<Ends>) {
    let (mut own, mut foreign) = (HashSet::new(), HashSet::new());
    // If this user may not inspect the process, compare the user of the socket instead.
    let holding = Holding::of_now(pid).ok();
    let users = Status::of(pid).map(|status| status.users).unwrap_or_default();
    let mut look = |tcp: TcpSocket| {
        let ends = (canonical(tcp.local), canonical(tcp.peer));
        let has = match &holding {
            Some(holding) => holding.has(tcp.inode),
            None => users.contains(&tcp.uid),
        };
        let is_open = tcp.inode != 0 && tcp.state != LISTEN;
        if is_open && has {
            own.insert(ends);
        } else if is_open && asked.contains(&ends) {
            foreign.insert(ends);
        }
        own.len() < MAX_CONNECTIONS
    };
    if tcp_table::for_each(pid, &mut look).is_err() {
        // The process has ended. Look at the connections of others in the own namespace.
        let _ = tcp_table::for_each(std::process::id(), &mut look);
    }
    (own, foreign)
}

/// Users of processes, for as long as these are captured.
#[derive(Default)]
pub(super) struct Users(HashMap<u32, Option<u32>>);

impl Users {
    pub(super) fn is_same(&mut self, one: u32, other: u32) -> bool {
        let mut user = |pid| {
            let of_now = || Status::of(pid)?.users.get(1).copied();
            *self.0.entry(pid).or_insert_with(of_now)
        };
        user(one).is_some() && user(one) == user(other)
    }

    pub(super) fn forget(&mut self, pid: u32) {
        self.0.remove(&pid);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use guest_driver::statistics::Direction;

    use super::*;

    fn record(local: SocketAddr, peer: SocketAddr) -> Record {
        let (direction, bytes) = (Direction::Sent, vec![0; 100]);
        Record { direction, is_last: false, local, peer, time: 1, place: 0, bytes }
    }

    #[test]
    fn the_kernel_says_which_process_may_tell_of_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let gone: Ends = ("192.0.2.1:1".parse().unwrap(), "192.0.2.2:2".parse().unwrap());
        let (own, child) =
            (std::process::id(), std::process::Command::new("sleep").arg("60").spawn());
        let mut child = child.unwrap();
        let mut owners = Owners::new();
        assert_eq!(owners.next(), None);
        for pid in [own, child.id()] {
            assert_eq!(owners.admit(pid, record(ends.0, ends.1)), None, "it is not known yet");
            assert_eq!(owners.admit(pid, record(gone.0, gone.1)), None);
        }
        assert!(owners.next().is_some());
        let decided: Vec<_> = owners.decide();
        let told = |pid, ends: Ends| {
            let found = decided.iter().find(|(of, _, record)| (*of, record.local) == (pid, ends.0));
            found.map(|(_, owner, _)| *owner)
        };
        assert_eq!((told(own, ends), told(own, gone)), (Some(Owner::Own), Some(Owner::Gone)));
        assert_eq!(told(child.id(), ends), None, "another process has it");
        assert!(owners.admit(own, record(ends.0, ends.1)).is_some(), "it is known now");
        assert_eq!(owners.admit(child.id(), record(ends.0, ends.1)), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_tells_of_ever_new_connections_fills_no_memory() {
        let mut owners = Owners::new();
        for n in 0..50_000_u32 {
            let peer = SocketAddr::new(n.to_be_bytes().into(), 7);
            assert_eq!(owners.admit(1 + n % 20, record(peer, peer)), None);
        }
        assert!(owners.held_bytes <= MAX_ALL_HELD);
        assert!(owners.held.values().all(|held| held.len() <= MAX_HELD / 100));
    }
}
