// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One end's report of a connection.

use serde::{Deserialize, Serialize};

use guest_driver::ConnectionInfo;

use crate::linux;

/// How a connection was carried and how it ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The order.
    pub cell: String,
    /// The carrier, early in the connection's life.
    pub carrier: Carrier,
    /// The reason for a failure, or nothing.
    pub error: String,
    /// Bytes sent.
    pub sent: u64,
    /// Digest of the bytes sent.
    pub sent_digest: u64,
    /// Bytes received.
    pub received: u64,
    /// Digest of the bytes received.
    pub received_digest: u64,
    /// Longest time without bytes for the reader after the first ones, milliseconds.
    pub pause: u64,
    /// Milliseconds from connecting or accepting to the end of the order.
    pub millis: u64,
    /// Further remarks.
    pub note: String,
}

/// The carrier of a connection, in the end's own terms.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carrier {
    /// `smc-r`, `smc-d`, `tcp` or `unknown`.
    pub kind: String,
    /// Version of SMC.
    pub version: u8,
    /// Release of version 2.
    pub release: u8,
    /// The link group.
    pub group: u32,
    /// Connections in the group; 0 if unknown to this end.
    pub connections: u32,
    /// Usable links in the group.
    pub links: u32,
    /// Adapter of the connection's link.
    pub adapter: String,
    /// Bytes of the own and of the peer's element.
    pub elements: [u32; 2],
    /// The reason for TCP.
    pub reason: String,
}

impl Carrier {
    /// The carrier of an AF_SMC socket, found by the two TCP ports.
    pub(super) fn of_kernel(port: u16, peer_port: u16) -> Carrier {
        // A dump made while sockets come and go may be incomplete.
        let find = || {
            let sockets = af_smc::sockets().unwrap_or_default();
            sockets
                .into_iter()
                .find(|socket| (socket.local.port(), socket.peer.port()) == (port, peer_port))
        };
        let Some(socket) = (0..20).find_map(|_| find()) else {
            return Carrier { kind: "unknown".into(), ..Carrier::default() };
        };
        let mut carrier = Carrier::default();
        match (socket.carrier, &socket.link) {
            (af_smc::Carrier::Tcp(own, peer), _) => {
                carrier.kind = "tcp".into();
                carrier.reason = format!("{own:#010x}, peer {peer:#010x}");
            }
            (af_smc::Carrier::SmcD, _) => carrier.kind = "smc-d".into(),
            (af_smc::Carrier::SmcR, None) => carrier.kind = "unknown".into(),
            (af_smc::Carrier::SmcR, Some(link)) => {
                carrier.kind = "smc-r".into();
                carrier.adapter.clone_from(&link.rnic);
                let groups = linux::groups().unwrap_or_default();
                // The kernel does not name the group of a socket. Parallel groups agree in the peer
                // and in the other values needed here.
                let mut groups = groups.into_iter().filter(|group| {
                    group.client != link.server
                        && group.links.iter().any(|other| {
                            (&other.gid, &other.peer_gid) == (&link.gid, &link.peer_gid)
                        })
                });
                if let Some(group) = groups.next() {
                    carrier.version = group.version;
                    carrier.release = group.release;
                    carrier.group = group.id;
                    carrier.connections = group.connections;
                    carrier.links = group.links.len() as u32;
                }
            }
        }
        if let Some(cursors) = socket.cursors {
            carrier.elements = [cursors.receive_buffer, cursors.peer_buffer];
        }
        carrier
    }

    /// The carrier of a socket of this project.
    pub(super) fn of_connection(info: &ConnectionInfo) -> Carrier {
        match info {
            ConnectionInfo::Smcd(d) => Carrier {
                kind: "smc-d".into(),
                version: 2,
                release: d.release,
                elements: [d.local_buffer, d.peer_buffer],
                ..Carrier::default()
            },
            ConnectionInfo::Smcr(r) => Carrier {
                kind: "smc-r".into(),
                version: r.version,
                release: r.release,
                group: r.group,
                connections: 0,
                links: r.links as u32,
                adapter: r.link.rnic.clone(),
                elements: [r.local_buffer, r.peer_buffer],
                reason: String::new(),
            },
            ConnectionInfo::Tcp(reason) => {
                Carrier { kind: "tcp".into(), reason: reason.to_string(), ..Carrier::default() }
            }
        }
    }
}

/// A digest of bytes in their order, independent of the cuts. Not against malice.
#[derive(Clone, Debug, Default)]
pub struct Digest {
    state: u64,
    held: Vec<u8>,
    len: u64,
}

impl Digest {
    /// Adds bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
        if !self.held.is_empty() {
            let missing = (8 - self.held.len()).min(bytes.len());
            self.held.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if self.held.len() == 8 {
                let word = std::mem::take(&mut self.held);
                self.words(&word);
            }
        }
        let whole = bytes.len() - bytes.len() % 8;
        self.words(&bytes[..whole]);
        self.held.extend_from_slice(&bytes[whole..]);
    }

    fn words(&mut self, bytes: &[u8]) {
        let (words, _) = bytes.as_chunks();
        self.state =
            words.iter().fold(self.state, |state, word| mix(state, u64::from_le_bytes(*word)));
    }

    /// The number of bytes so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there were none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The digest of all bytes so far.
    pub fn value(&self) -> u64 {
        let mut last = [0; 8];
        last[..self.held.len()].copy_from_slice(&self.held);
        mix(mix(self.state, u64::from_le_bytes(last)), self.len)
    }
}

fn mix(state: u64, word: u64) -> u64 {
    let mixed = (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed.rotate_left(29) ^ mixed >> 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::pattern;

    fn digest(pieces: &[&[u8]]) -> u64 {
        let mut digest = Digest::default();
        pieces.iter().for_each(|piece| digest.update(piece));
        digest.value()
    }

    #[test]
    fn a_digest_does_not_depend_on_the_cuts() {
        let bytes = pattern(1, 100);
        let whole = digest(&[&bytes]);
        for cut in 0..=100 {
            for step in 1..10 {
                let (a, b) = bytes.split_at(cut);
                let pieces: Vec<&[u8]> = a.chunks(step).chain(b.chunks(step + 3)).collect();
                assert_eq!(digest(&pieces), whole);
            }
        }
    }

    #[test]
    fn a_digest_depends_on_every_byte_and_on_the_order() {
        let bytes = pattern(1, 40);
        let whole = digest(&[&bytes]);
        for at in 0..40 {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(digest(&[&other]), whole);
            let mut other = bytes.clone();
            other.rotate_left(at);
            assert!(at == 0 || digest(&[&other]) != whole);
        }
        assert_ne!(digest(&[&bytes, &[0]]), whole);
        assert_ne!(digest(&[]), digest(&[&[0]]));
    }
}
