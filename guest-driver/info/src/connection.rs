// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The negotiated values of a connection.

use std::fmt;

use serde::{Deserialize, Serialize};
use smc_core::wire::ids::Eid;
use virtio_ism_abi::{Chid, Gid};

use super::{Fallback, SmcrInfo, text};

/// The carrier of a connection, and the values agreed by both ends.
#[derive(Clone, Debug)]
pub enum ConnectionInfo {
    /// SMC-D: bytes travel through DMBs.
    Smcd(SmcdInfo),
    /// SMC-R: bytes travel by RDMA.
    Smcr(Box<SmcrInfo>),
    /// TCP, and the reason.
    Tcp(Fallback),
}

/// The values agreed by both ends of an SMC-D connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmcdInfo {
    /// The fabric.
    #[serde(with = "text::chid")]
    pub chid: Chid,
    /// The extended GID of this end.
    #[serde(with = "text::smcd_gid")]
    pub local_gid: Gid,
    /// The peer's extended GID.
    #[serde(with = "text::smcd_gid")]
    pub peer_gid: Gid,
    /// The common enterprise id.
    #[serde(with = "text::eid")]
    pub eid: Eid,
    /// SMCv2 release: 0 for v2.0, 1 for v2.1.
    pub release: u8,
    /// Whether this connection made the logical link (first contact).
    pub first_contact: bool,
    /// Bytes of the own DMB.
    pub local_buffer: u32,
    /// Bytes of the peer's DMB.
    pub peer_buffer: u32,
    /// Whether this end stores into the peer's DMB through the window. Otherwise the device moves the
    /// bytes. In JSON `path`: "window" or "move".
    #[serde(rename = "path", with = "text::path")]
    pub window: bool,
    /// The peer's host name, if Confirm or Accept had one.
    pub peer_host: Option<String>,
}

impl SmcdInfo {
    /// The protocol: "SMC-D v2.1" or "SMC-D v2.0".
    pub fn protocol(&self) -> String {
        format!("SMC-D v2.{}", self.release)
    }
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
                "{} over fabric {}, {} -> {}, EID {}, {}",
                d.protocol(),
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
