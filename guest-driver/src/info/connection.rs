//! What was negotiated for a connection.

use std::fmt;

use smc_core::wire::ids::Eid;
use virtio_ism_abi::{Chid, Gid};

use super::Fallback;
use super::SmcrInfo;

/// What carries a connection, and what both ends agreed on.
#[derive(Clone, Debug)]
pub enum ConnectionInfo {
    /// SMC-D: bytes travel through DMBs.
    Smcd(SmcdInfo),
    /// SMC-R: bytes travel by RDMA.
    Smcr(Box<SmcrInfo>),
    /// TCP, and why.
    Tcp(Fallback),
}

/// The negotiated info of an SMC-D connection.
#[derive(Clone, Debug)]
pub struct SmcdInfo {
    /// The fabric.
    pub chid: Chid,
    /// Our extended GID.
    pub local_gid: Gid,
    /// The peer's extended GID.
    pub peer_gid: Gid,
    /// The common enterprise id.
    pub eid: Eid,
    /// SMCv2 release: 0 for v2.0, 1 for v2.1.
    pub release: u8,
    /// Whether this connection made the logical link (first contact).
    pub first_contact: bool,
    /// Bytes of the own DMB.
    pub local_buffer: u32,
    /// Bytes of the peer's DMB.
    pub peer_buffer: u32,
    /// Whether we store into the peer's DMB ourselves (window) or the device copies (move).
    pub window: bool,
    /// The peer's host name, if it told one.
    pub peer_host: Option<String>,
}

impl ConnectionInfo {
    /// Whether SMC carries the connection.
    pub fn is_smc(&self) -> bool {
        matches!(self, ConnectionInfo::Smcd(_) | ConnectionInfo::Smcr(_))
    }
}

impl fmt::Display for ConnectionInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionInfo::Smcd(d) => write!(
                f,
                "SMC-D v2.{} over fabric {}, {} -> {}, EID {}, {}",
                d.release,
                d.chid,
                d.local_gid,
                d.peer_gid,
                d.eid,
                if d.window { "window" } else { "move" },
            ),
            ConnectionInfo::Smcr(r) => r.fmt(f),
            ConnectionInfo::Tcp(reason) => write!(f, "TCP ({reason})"),
        }
    }
}
