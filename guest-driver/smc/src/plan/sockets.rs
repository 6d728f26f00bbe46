// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TCP connections within this host, from the kernel's tables of all reachable network namespaces.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use af_smc::{TcpCounts, TcpSocket, TcpState, for_each_tcp};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Limit of connections in memory, of all namespaces. Further ones are counted only.
const MAX_SOCKETS: usize = 250_000;
/// TIME_WAIT lasts for so many seconds.
const TIME_WAIT: f64 = 60.0;

/// A network namespace by its inode.
pub(super) type NamespaceId = u64;

/// A connected socket of one snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) cookie: u64,
    pub(super) inode: u32,
    pub(super) counts: TcpCounts,
}

/// The sockets of one network namespace.
#[derive(Debug, Default)]
struct Namespace {
    connected: HashMap<(SocketAddr, SocketAddr), End>,
    /// Inodes of the listeners, by port.
    listeners: HashMap<u16, u32>,
    addresses: HashSet<IpAddr>,
    /// Both addresses of recently ended connections, at the end that has closed first.
    waiting: Vec<(SocketAddr, SocketAddr)>,
}

/// The sockets of the host at one moment.
#[derive(Debug, Default)]
pub(super) struct SocketSnapshot {
    namespaces: BTreeMap<NamespaceId, Namespace>,
    /// Connections beyond [`MAX_SOCKETS`].
    pub(super) beyond: u64,
    /// Namespaces this user may not look into.
    pub(super) closed: usize,
}

/// Server of a connection: its namespace and port.
pub(super) type Server = (NamespaceId, u16);

/// A connection with both ends on this host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) client: End,
    pub(super) server: End,
    pub(super) at: Server,
    /// The client is in another namespace than the server.
    pub(super) crosses: bool,
}

/// The network namespaces of all visible processes, each with one of the processes.
pub(super) fn namespaces(pids: &[u32]) -> BTreeMap<NamespaceId, u32> {
    let mut found = BTreeMap::new();
    for pid in pids {
        let link = fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let id = link
            .as_deref()
            .and_then(|link| link.to_str()?.strip_prefix("net:[")?.strip_suffix(']'));
        if let Some(id) = id.and_then(|id| id.parse().ok()) {
            found.entry(id).or_insert(*pid);
        }
    }
    found
}

impl SocketSnapshot {
    /// Takes a snapshot of these namespaces.
    pub(super) fn take(namespaces: &BTreeMap<NamespaceId, u32>) -> std::io::Result<SocketSnapshot> {
        let own = self::namespaces(&[std::process::id()]).into_keys().next();
        let mut snapshot = SocketSnapshot::default();
        let mut room = MAX_SOCKETS;
        for (id, pid) in namespaces {
            let is_own = Some(*id) == own;
            // Only a thread of its own may stay in another namespace.
            let read = std::thread::scope(|scope| {
                let read = scope.spawn(|| {
                    if !is_own {
                        let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
                        let kind = Some(LinkNameSpaceType::Network);
                        move_into_link_name_space(namespace.as_fd(), kind)?;
                    }
                    Namespace::read(room)
                });
                read.join().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
            });
            match read {
                Ok((read, beyond)) => {
                    room -= read.connected.len();
                    snapshot.beyond += beyond;
                    snapshot.namespaces.insert(*id, read);
                }
                Err(error) if is_own => return Err(error),
                Err(_) => snapshot.closed += 1,
            }
        }
        Ok(snapshot)
    }

    /// The namespace with this address, seen from a namespace.
    fn namespace_of(&self, address: IpAddr, from: NamespaceId) -> Option<NamespaceId> {
        let has = |id: NamespaceId| {
            self.namespaces.get(&id).is_some_and(|namespace| namespace.addresses.contains(&address))
        };
        if address.is_loopback() || has(from) {
            return Some(from);
        }
        self.namespaces.keys().copied().find(|id| has(*id))
    }

    /// The connections with both ends here.
    pub(super) fn pairs(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for (id, namespace) in &self.namespaces {
            for ((local, peer), client) in &namespace.connected {
                // Each connection once, from its client.
                if namespace.listeners.contains_key(&local.port()) {
                    continue;
                }
                let Some(other) = self.namespace_of(peer.ip(), *id) else { continue };
                let Some(theirs) = self.namespaces.get(&other) else { continue };
                let Some(server) = theirs.connected.get(&(*peer, *local)) else { continue };
                // Without a listener any more, one end is as good as the other.
                let has_listener = theirs.listeners.contains_key(&peer.port());
                if has_listener || (peer, other) < (local, *id) {
                    let at = (other, peer.port());
                    let crosses = other != *id;
                    pairs.push(Pair { client: *client, server: *server, at, crosses });
                }
            }
        }
        pairs
    }

    /// The inode of a server's listener.
    pub(super) fn listener(&self, (namespace, port): Server) -> Option<u32> {
        self.namespaces.get(&namespace)?.listeners.get(&port).copied()
    }

    /// Recently ended connections per second and server, by the sockets in TIME_WAIT.
    pub(super) fn ended(&self) -> HashMap<Server, f64> {
        let mut ended = HashMap::new();
        for (id, namespace) in &self.namespaces {
            for (local, peer) in &namespace.waiting {
                let of_peer = self.namespace_of(peer.ip(), *id);
                let at = match namespace.listeners.contains_key(&local.port()) {
                    true => of_peer.map(|_| (*id, local.port())),
                    false => of_peer.map(|other| (other, peer.port())),
                };
                if let Some(at) = at.filter(|at| self.listener(*at).is_some()) {
                    *ended.entry(at).or_default() += 1.0 / TIME_WAIT;
                }
            }
        }
        ended
    }
}

impl Namespace {
    /// The sockets of this thread's namespace, and the number of those beyond `room`.
    fn read(room: usize) -> std::io::Result<(Namespace, u64)> {
        let (mut found, mut beyond) = (Namespace::default(), 0);
        for_each_tcp(|tcp: &TcpSocket| {
            let TcpSocket { local, peer, inode, cookie, counts, .. } = *tcp;
            match tcp.state {
                TcpState::Listen => {
                    found.listeners.insert(local.port(), inode);
                }
                TcpState::Established if found.connected.len() < room => {
                    found.connected.insert((local, peer), End { cookie, inode, counts });
                }
                TcpState::TimeWait if found.waiting.len() < room => {
                    found.waiting.push((local, peer));
                }
                TcpState::Established | TcpState::TimeWait => beyond += 1,
            }
            if !local.ip().is_unspecified() {
                found.addresses.insert(local.ip());
            }
        })?;
        Ok((found, beyond))
    }
}
