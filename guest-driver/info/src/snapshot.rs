// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The present state of connections, for display.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::ConnectionInfo;

/// The present state of an SMC connection.
#[derive(Clone, Debug)]
pub struct ConnectionSnapshot {
    /// Local address of the TCP connection, if still there.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// The carrier, and the negotiated values.
    pub info: ConnectionInfo,
    /// The changes of the carrier; `None`: the connection ends with its device.
    pub changes: Option<CarrierChanges>,
    /// State of RFC 7609 section 4.8, in words.
    pub state: String,
    /// Bytes sent since the start.
    pub sent: u64,
    /// Bytes received since the start.
    pub received: u64,
    /// Bytes waiting to be read here.
    pub unread: u32,
    /// Bytes not read by the peer.
    pub unread_by_peer: u32,
    /// Bytes in the send queue.
    pub queued: usize,
    /// The positions of both ends in the two rings.
    pub cursors: Cursors,
}

/// The present carrier of a connection able to outlive its device, and its last change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarrierChanges {
    /// The present carrier.
    pub now: CurrentCarrier,
    /// Number of changes, a change in progress included.
    pub count: u32,
    /// The reason for the last change.
    pub why: Option<String>,
}

/// The present carrier of a connection able to outlive its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CurrentCarrier {
    /// Its device.
    #[default]
    Device,
    /// The ends have not agreed yet on the received bytes.
    Leaving,
    /// Its TCP connection.
    Tcp,
}

impl fmt::Display for CarrierChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.now {
            CurrentCarrier::Device => "device",
            CurrentCarrier::Leaving => "leaves for TCP",
            CurrentCarrier::Tcp => "TCP",
        })?;
        match &self.why {
            Some(why) => write!(f, " ({why}; {} so far)", self.count),
            None => Ok(()),
        }
    }
}

/// Cursors of a connection, each as the wrap sequence and the offset in its ring, bytes (CDC-3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursors {
    /// Producer in the peer's ring: the write position of this end.
    pub written: (u16, u32),
    /// Consumer in the peer's ring: the read position announced by the peer.
    pub read_by_peer: (u16, u32),
    /// Producer in the own ring: the write position announced by the peer.
    pub written_by_peer: (u16, u32),
    /// Consumer in the own ring: the read position of this end.
    pub read: (u16, u32),
}

impl fmt::Display for ConnectionSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |address: Option<SocketAddr>| match address {
            Some(address) => address.to_string(),
            None => "?".into(),
        };
        write!(
            f,
            "{} -> {}: {}, {}, {} B sent ({} B unread), {} B received ({} B unread)",
            name(self.local),
            name(self.peer),
            self.info,
            self.state,
            self.sent,
            self.unread_by_peer,
            self.received,
            self.unread,
        )
    }
}
