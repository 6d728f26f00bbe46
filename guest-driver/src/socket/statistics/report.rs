// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The document. Fields may be added; present fields keep their names and meaning.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use smc_core::wire::ids::Eid;

use super::reason::Reason;
use super::report_reader::first;
use super::tcp_connections::{TcpConnections, TcpSocket};
use crate::traffic::EndpointTraffic;
use ism_sys::tcp_counts;
use smc_info::{
    CarrierChanges, ConnectionInfo, ConnectionSnapshot, LinkGroupInfo, RnicInfo, SmcdInfo, SmcrInfo,
};

/// Version of the document.
pub const VERSION: u32 = 1;
/// The most connections listed by a process; more are only counted.
pub const MAX_CONNECTIONS: usize = 10_000;

/// A process with a stack.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// [`VERSION`] of the process.
    pub version: u32,
    /// Process id, as the process itself sees it.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Devices of the configuration.
    #[serde(deserialize_with = "first::<64, _, _>")]
    pub devices: Vec<DeviceInfo>,
    /// RNIC ports usable by SMC-R.
    #[serde(deserialize_with = "first::<64, _, _>")]
    pub rnics: Vec<RnicInfo>,
    /// The reason for no SMC-R, if there is none.
    pub no_rdma: Option<String>,
    /// Link groups of SMC-R.
    #[serde(deserialize_with = "first::<256, _, _>")]
    pub groups: Vec<LinkGroupInfo>,
    /// Connections: SMC ones, and TCP ones still held by the library.
    #[serde(deserialize_with = "first::<MAX_CONNECTIONS, _, _>")]
    pub connections: Vec<Connection>,
    /// Number of connections left out of the list.
    pub omitted: usize,
    /// Statistics of the servers and listeners of the program, shared by its processes.
    #[serde(default, deserialize_with = "first::<512, _, _>")]
    pub endpoints: Vec<EndpointTraffic>,
    /// Totals since the start.
    pub totals: Handshakes,
}

/// A virtio-ism device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Socket or PCI address.
    pub path: String,
    /// Fabric, four hexadecimal digits; none if the device is not open.
    pub chid: Option<String>,
    /// Extended GID; none if the device is not open.
    pub gid: Option<String>,
    /// Why the device is not open.
    pub problem: Option<String>,
}

/// Results of handshakes, and bytes moved by the connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handshakes {
    /// Connections over SMC-D.
    pub smc_d: u64,
    /// Connections over SMC-R.
    pub smc_r: u64,
    /// Connections that are TCP or were. Of a program under `smc run`, `smc stat` also counts
    /// connections here that never came to a handshake.
    pub tcp: u64,
    /// Handshakes that broke the connection.
    pub broken: u64,
    /// Closed connections not yet closed by the peer.
    pub closing: usize,
    /// Peers known on fabrics.
    pub peers: usize,
    /// DMBs kept for the next connection.
    pub pooled: usize,
    /// The reasons for connections that continued as TCP.
    #[serde(deserialize_with = "first::<64, _, _>")]
    pub reasons: Vec<Reason>,
    /// Bytes sent by connections on SMC, ended ones included. Bytes sent over TCP after the loss of the
    /// device are among them.
    #[serde(default)]
    pub sent: u64,
    /// Bytes received by these connections.
    #[serde(default)]
    pub received: u64,
}

/// A connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// "SMC-D v2.1", "SMC-R v1", "TCP" and so on.
    pub kind: String,
    /// Own address, if it is still known.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// State of RFC 7609 section 4.8, or of TCP.
    pub state: String,
    /// Bytes sent; for TCP, bytes acknowledged by the peer's kernel.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Bytes waiting to be read here.
    pub unread: u64,
    /// Bytes not read by the peer; unknown for TCP.
    pub unread_by_peer: Option<u64>,
    /// Bytes in the send queue; unknown for TCP.
    pub queued: Option<u64>,
    /// Cursors as [wrap, offset]: written, read by the peer; written by the peer, read.
    pub cursors: Option<[(u16, u32); 4]>,
    /// The present carrier, if the connection can outlive its device.
    pub changes: Option<CarrierChanges>,
    /// The values agreed by the ends, if the connection is SMC-D.
    pub smc_d: Option<SmcdInfo>,
    /// The values agreed by the ends, if the connection is SMC-R.
    pub smc_r: Option<Box<SmcrInfo>>,
    /// The reason for TCP, if the connection is TCP.
    pub reason: Option<Reason>,
    /// Whether the connection's bytes are unknown: the program has its socket, and the kernel counts.
    #[serde(default)]
    pub uncounted: bool,
}

impl Process {
    /// The report of this process, without its connections and totals.
    pub(in crate::socket) fn new() -> Process {
        Process {
            version: VERSION,
            pid: std::process::id(),
            program: program(),
            ..Process::default()
        }
    }

    /// Adds the connections, sorted by address. Lists this many at most, and counts the others.
    pub(in crate::socket) fn set_connections(
        &mut self,
        smc: Vec<ConnectionSnapshot>,
        tcp: &TcpConnections,
    ) {
        let mut connections: Vec<_> = smc.into_iter().map(of_smc).collect();
        connections.extend(tcp.open().iter().filter_map(|socket| of_tcp(&**socket)));
        self.omitted = connections.len().saturating_sub(MAX_CONNECTIONS);
        connections.truncate(MAX_CONNECTIONS);
        connections.sort_by_key(|connection| (connection.local, connection.peer));
        self.connections = connections;
    }
}

/// The name of the program as `ps` shows it.
fn program() -> String {
    let _making = ism_sys::making();
    std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim_end().to_owned()
}

impl Connection {
    /// Bytes of the receive buffers, this end's and the peer's, if SMC carries the connection.
    pub fn buffers(&self) -> Option<(u32, u32)> {
        let of_d = |info: &SmcdInfo| (info.local_buffer, info.peer_buffer);
        let of_r = |info: &SmcrInfo| (info.local_buffer, info.peer_buffer);
        self.smc_d.as_ref().map(of_d).or_else(|| self.smc_r.as_deref().map(of_r))
    }

    /// The common enterprise id.
    pub fn eid(&self) -> Option<Eid> {
        let of_d = self.smc_d.as_ref().map(|info| info.eid);
        of_d.or_else(|| self.smc_r.as_ref().and_then(|info| info.eid))
    }

    /// The peer's host name.
    pub fn peer_host(&self) -> Option<&str> {
        let of_d = self.smc_d.as_ref().and_then(|info| info.peer_host.as_deref());
        of_d.or_else(|| self.smc_r.as_ref().and_then(|info| info.peer_host.as_deref()))
    }
}

fn of_smc(snapshot: ConnectionSnapshot) -> Connection {
    let cursors = snapshot.cursors;
    let base = Connection {
        local: snapshot.local,
        peer: snapshot.peer,
        changes: snapshot.changes,
        state: snapshot.state,
        sent: snapshot.sent,
        received: snapshot.received,
        unread: snapshot.unread.into(),
        unread_by_peer: Some(snapshot.unread_by_peer.into()),
        queued: u64::try_from(snapshot.queued).ok(),
        cursors: Some([
            cursors.written,
            cursors.read_by_peer,
            cursors.written_by_peer,
            cursors.read,
        ]),
        ..Connection::default()
    };
    match snapshot.info {
        ConnectionInfo::Smcd(info) => {
            Connection { kind: info.protocol(), smc_d: Some(info), ..base }
        }
        ConnectionInfo::Smcr(info) => {
            Connection { kind: info.protocol(), smc_r: Some(info), ..base }
        }
        ConnectionInfo::Tcp(why) => {
            Connection { kind: "TCP".into(), reason: Some(Reason::of(&why)), ..base }
        }
    }
}

fn of_tcp(socket: &dyn TcpSocket) -> Option<Connection> {
    let (tcp, why) = socket.tcp()?;
    let counts = tcp_counts(tcp).ok();
    Some(Connection {
        kind: "TCP".into(),
        local: tcp.local_addr().ok(),
        peer: tcp.peer_addr().ok(),
        state: tcp_state(counts.map_or(0, |counts| counts.state)).to_owned(),
        sent: counts.map_or(0, |counts| counts.acknowledged),
        received: counts.map_or(0, |counts| counts.received),
        unread: rustix::io::ioctl_fionread(tcp).unwrap_or(0),
        reason: Some(Reason::of(why)),
        ..Connection::default()
    })
}

/// The word for a state of TCP, by the kernel's numbering.
pub fn tcp_state(state: u8) -> &'static str {
    match state {
        1 => "Established",
        2 | 3 | 12 => "Opening",
        4..=6 | 11 => "Closing",
        7 => "Closed",
        8 | 9 => "ClosedByPeer",
        _ => "?",
    }
}
