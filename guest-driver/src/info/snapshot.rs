// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What there is right now, for people.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::ConnectionInfo;

/// An SMC connection as it is now.
#[derive(Clone, Debug)]
pub struct ConnectionSnapshot {
    /// Local address of the TCP connection, if it is still there.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// What carries it, and what was negotiated.
    pub info: ConnectionInfo,
    /// Whether it still uses its device; `None`: it ends with it.
    pub changes: Option<CarrierChanges>,
    /// State of RFC 7609 section 4.8, in words.
    pub state: String,
    /// Bytes sent since the start.
    pub sent: u64,
    /// Bytes received since the start.
    pub received: u64,
    /// Bytes that wait to be read here.
    pub unread: u32,
    /// Bytes that the peer has not read.
    pub unread_by_peer: u32,
    /// Bytes in the send queue.
    pub queued: usize,
    /// Where both ends stand in the two rings.
    pub cursors: Cursors,
}

/// What carries a connection that can outlive its device, and how it came to that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarrierChanges {
    /// What carries it now.
    pub now: CurrentCarrier,
    /// How often it has changed, or begun to.
    pub count: u32,
    /// Why it did so the last time.
    pub why: Option<String>,
}

/// What carries a connection that can outlive its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CurrentCarrier {
    /// Its device.
    #[default]
    Device,
    /// The ends have not agreed yet on what was received.
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
    /// Producer in the peer's ring: how far this end has written.
    pub written: (u16, u32),
    /// Consumer in the peer's ring: how far the peer says that it has read.
    pub read_by_peer: (u16, u32),
    /// Producer in the own ring: how far the peer says that it has written.
    pub written_by_peer: (u16, u32),
    /// Consumer in the own ring: how far this end has read.
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
