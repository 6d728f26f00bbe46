//! The document. Fields may be added; those that are here keep their names and meaning.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use smc_core::handshake::DeclineCode;

use super::plain;
use crate::socket::{
    ConnectionInfo, ConnectionSnapshot, LinkGroupInfo, LinkInfo, RnicInfo, SmcdInfo, SmcrInfo,
    Stack, show_gid,
};
use crate::sys::tcp_counts;

/// Version of the document.
pub const VERSION: u32 = 1;
/// Connections that are listed at most; more are only counted.
const MAX_CONNECTIONS: usize = 10_000;

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
    pub devices: Vec<Device>,
    /// RNIC ports that SMC-R may use.
    pub rnics: Vec<Rnic>,
    /// Why there is no SMC-R, if there is none.
    pub no_rdma: Option<String>,
    /// Link groups of SMC-R.
    pub groups: Vec<Group>,
    /// Connections: SMC ones, and TCP ones that the library still holds.
    pub connections: Vec<Connection>,
    /// Connections that are not listed because there are too many.
    pub omitted: usize,
    /// Totals since the start.
    pub totals: Handshakes,
}

/// A virtio-ism device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Socket or PCI address.
    pub path: String,
    /// Fabric, four hexadecimal digits; none if the device is not open.
    pub chid: Option<String>,
    /// Extended GID; none if the device is not open.
    pub gid: Option<String>,
    /// Why it is not open.
    pub problem: Option<String>,
}

/// What became of handshakes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handshakes {
    /// Connections over SMC-D.
    pub smc_d: u64,
    /// Connections over SMC-R.
    pub smc_r: u64,
    /// Connections that went on as TCP.
    pub tcp: u64,
    /// Handshakes that broke the connection.
    pub broken: u64,
    /// Closed connections whose peer has not closed yet.
    pub closing: usize,
    /// Peers known on fabrics.
    pub peers: usize,
    /// DMBs kept for the next connection.
    pub pooled: usize,
    /// Why connections went on as TCP.
    pub reasons: Vec<Reason>,
}

/// Why connections are TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// Linux's number; 0 for any, where there are too many different ones.
    pub code: u32,
    /// Linux's short name for it.
    pub name: String,
    /// What it means, and what to do about it.
    pub advice: String,
    /// "here" or "peer": who did not want SMC, or could not.
    pub side: String,
    /// What this end says.
    pub says: String,
    /// Connections.
    pub count: u64,
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
    /// Bytes sent; of TCP those that the peer's kernel has acknowledged.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Bytes that wait to be read here.
    pub unread: u64,
    /// Bytes that the peer has not read; not known of TCP.
    pub unread_by_peer: Option<u64>,
    /// Own receive buffer, bytes.
    pub buffer: Option<u32>,
    /// The peer's receive buffer, bytes.
    pub peer_buffer: Option<u32>,
    /// The peer's host name, if it told one.
    pub peer_host: Option<String>,
    /// The common enterprise id.
    pub eid: Option<String>,
    /// Cursors as [wrap, offset]: written, read by the peer; written by the peer, read.
    pub cursors: Option<[(u16, u32); 4]>,
    /// Of SMC-D.
    pub smc_d: Option<SmcD>,
    /// Of SMC-R.
    pub smc_r: Option<SmcR>,
    /// Why it is TCP.
    pub reason: Option<Reason>,
}

/// What only SMC-D connections have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmcD {
    /// Fabric, four hexadecimal digits.
    pub chid: String,
    /// Own GID.
    pub gid: String,
    /// The peer's GID.
    pub peer_gid: String,
    /// "window" or "move".
    pub path: String,
    /// Whether it made the logical link.
    pub first_contact: bool,
}

/// What only SMC-R connections have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmcR {
    /// Own number of the link group.
    pub group: u32,
    /// The link that carries it.
    pub link: Link,
    /// Numbers of the elements: own, and the peer's.
    pub tokens: (u32, u32),
    /// Keys of the RMBs on this link: own, and the peer's.
    pub rkeys: (u32, u32),
    /// How often it moved to another link.
    pub failovers: u32,
    /// Whether it made the link group.
    pub first_contact: bool,
    /// Whether elements begin with an eye catcher.
    pub eye_catcher: bool,
}

/// A link group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Own number.
    pub group: u32,
    /// "SMC-R v1", "SMC-R v2.0" or "SMC-R v2.1".
    pub kind: String,
    /// "server" or "client" of the first contact.
    pub role: String,
    /// The peer's instance id, 16 hexadecimal digits.
    pub peer_id: String,
    /// "single", "symmetric" and so on.
    pub topology: String,
    /// Connections now.
    pub connections: usize,
    /// Connections at most.
    pub max_connections: u32,
    /// Links.
    pub links: Vec<Link>,
    /// Links at most.
    pub max_links: u8,
    /// Own RMBs whose keys the peer may know: in use, and kept for the next connection.
    pub rmbs: (usize, usize),
    /// Connections that were moved to another link.
    pub failovers: u64,
    /// Microseconds until the next timer is due.
    pub timer: Option<u64>,
}

/// A link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Number in the group.
    pub number: u8,
    /// RNIC and port.
    pub rnic: String,
    /// Own GID.
    pub gid: String,
    /// The peer's GID.
    pub peer_gid: String,
    /// Own queue pair.
    pub qp: u32,
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// Path MTU, bytes.
    pub mtu: u32,
    /// State, in words.
    pub state: String,
    /// Connections that it carries.
    pub connections: usize,
    /// Messages that may be sent before one has to be completed.
    pub credits: u32,
}

/// An RNIC port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rnic {
    /// RNIC and port.
    pub name: String,
    /// Whether it is usable.
    pub active: bool,
    /// Network interface.
    pub netdev: Option<String>,
    /// Physical network id.
    pub pnet: Option<String>,
    /// MTU, bytes.
    pub mtu: u32,
    /// GIDs that SMC may use.
    pub gids: Vec<String>,
    /// Links that run over it.
    pub links: usize,
}

impl Process {
    /// What there is now.
    pub fn of(stack: &Stack) -> Process {
        let mut connections: Vec<_> = stack.connections().into_iter().map(smc).collect();
        connections.extend(stack.plain().open().iter().filter_map(|socket| tcp(&**socket)));
        let omitted = connections.len().saturating_sub(MAX_CONNECTIONS);
        connections.truncate(MAX_CONNECTIONS);
        connections.sort_by_key(|connection| (connection.local, connection.peer));
        let totals = stack.totals();
        Process {
            version: VERSION,
            pid: std::process::id(),
            program: program(),
            devices: stack.device_list(),
            rnics: stack.rnics().iter().map(Rnic::from).collect(),
            no_rdma: stack.no_rdma().map(ToString::to_string),
            groups: stack.link_groups().iter().map(Group::from).collect(),
            connections,
            omitted,
            totals: Handshakes {
                smc_d: totals.smc.saturating_sub(totals.smc_r),
                smc_r: totals.smc_r,
                tcp: totals.tcp,
                broken: totals.broken,
                closing: totals.closing,
                peers: totals.peers,
                pooled: totals.pooled,
                reasons: stack.plain().reasons(),
            },
        }
    }
}

/// What `ps` shows.
fn program() -> String {
    std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim_end().to_owned()
}

impl Reason {
    pub(super) fn new(code: u32, side: &str, says: &str, count: u64) -> Reason {
        let known = DeclineCode::from(code);
        Reason {
            code,
            name: known.name().to_owned(),
            advice: known.advice().to_owned(),
            side: side.to_owned(),
            says: says.to_owned(),
            count,
        }
    }

    /// Of a connection that is TCP for this reason.
    pub fn of(why: &crate::Fallback) -> Reason {
        plain::reason(why)
    }
}

fn smc(info: ConnectionSnapshot) -> Connection {
    let cursors = info.cursors;
    let base = Connection {
        local: info.local,
        peer: info.peer,
        state: info.state,
        sent: info.sent,
        received: info.received,
        unread: info.unread.into(),
        unread_by_peer: Some(info.unread_by_peer.into()),
        cursors: Some([
            cursors.written,
            cursors.read_by_peer,
            cursors.written_by_peer,
            cursors.read,
        ]),
        ..Connection::default()
    };
    match info.info {
        ConnectionInfo::Smcd(info) => of_smc_d(base, info),
        ConnectionInfo::Smcr(info) => of_smc_r(base, *info),
        ConnectionInfo::Tcp(why) => {
            Connection { kind: "TCP".into(), reason: Some(Reason::of(&why)), ..base }
        }
    }
}

fn of_smc_d(base: Connection, info: SmcdInfo) -> Connection {
    let path = if info.window { "window" } else { "move" };
    Connection {
        kind: format!("SMC-D v2.{}", info.release),
        buffer: Some(info.local_buffer),
        peer_buffer: Some(info.peer_buffer),
        peer_host: info.peer_host,
        eid: Some(info.eid.to_string()),
        smc_d: Some(SmcD {
            chid: info.chid.to_string(),
            gid: info.local_gid.to_string(),
            peer_gid: info.peer_gid.to_string(),
            path: path.to_owned(),
            first_contact: info.first_contact,
        }),
        ..base
    }
}

fn of_smc_r(base: Connection, info: SmcrInfo) -> Connection {
    Connection {
        kind: kind_of_r(info.version, info.release),
        buffer: Some(info.local_buffer),
        peer_buffer: Some(info.peer_buffer),
        peer_host: info.peer_host,
        eid: info.eid.map(|eid| eid.to_string()),
        smc_r: Some(SmcR {
            group: info.group,
            link: Link::from(&info.link),
            tokens: info.tokens,
            rkeys: info.rkeys,
            failovers: info.failovers,
            first_contact: info.first_contact,
            eye_catcher: info.eye_catcher,
        }),
        ..base
    }
}

fn kind_of_r(version: u8, release: u8) -> String {
    match version {
        1 => "SMC-R v1".into(),
        _ => format!("SMC-R v2.{release}"),
    }
}

fn tcp(socket: &dyn super::Described) -> Option<Connection> {
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

fn tcp_state(state: u8) -> &'static str {
    match state {
        1 => "Established",
        2 | 3 | 12 => "Opening",
        4..=6 | 11 => "Closing",
        7 => "Closed",
        8 | 9 => "ClosedByPeer",
        _ => "?",
    }
}

impl From<&LinkInfo> for Link {
    fn from(info: &LinkInfo) -> Link {
        Link {
            number: info.number,
            rnic: format!("{}/{}", info.rnic, info.port),
            gid: show_gid(info.local_gid),
            peer_gid: show_gid(info.peer_gid),
            qp: info.local_qp,
            peer_qp: info.peer_qp,
            mtu: info.mtu,
            state: info.state.to_owned(),
            connections: info.connections,
            credits: info.credits,
        }
    }
}

impl From<&LinkGroupInfo> for Group {
    fn from(info: &LinkGroupInfo) -> Group {
        Group {
            group: info.group,
            kind: kind_of_r(info.version, info.release),
            role: if info.server { "server" } else { "client" }.to_owned(),
            peer_id: info.peer_id.iter().map(|byte| format!("{byte:02x}")).collect(),
            topology: info.kind.to_owned(),
            connections: info.connections,
            max_connections: info.max_connections,
            links: info.links.iter().map(Link::from).collect(),
            max_links: info.max_links,
            rmbs: info.rmbs,
            failovers: info.failovers,
            timer: info.timer,
        }
    }
}

impl From<&RnicInfo> for Rnic {
    fn from(info: &RnicInfo) -> Rnic {
        Rnic {
            name: format!("{}/{}", info.name, info.port),
            active: info.active,
            netdev: info.netdev.clone(),
            pnet: info.pnet.clone(),
            mtu: info.mtu,
            gids: info.gids.iter().map(|gid| show_gid(*gid)).collect(),
            links: info.links,
        }
    }
}
