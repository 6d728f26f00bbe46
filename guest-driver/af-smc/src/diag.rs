// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets of AF_SMC (Linux: include/uapi/linux/smc_diag.h).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::FAMILY;
use crate::netlink::{Netlink, SOCK_DIAG, attributes, text};

/// SOCK_DIAG_BY_FAMILY
const BY_FAMILY: u16 = 20;
/// Bytes of struct smc_diag_msg.
const HEAD: usize = 64;
/// Attributes behind it.
const CONNECTION: u16 = 1;
const LINK_GROUP: u16 = 2;
const SHUTDOWN: u16 = 3;
const DMBS: u16 = 4;
const FALLBACK: u16 = 5;
/// Family of an address of IPv6.
const INET6: u8 = 10;

/// The protocol of a socket's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Carrier {
    /// SMC-R. Also reported for a socket without bytes yet.
    SmcR,
    /// SMC-D.
    SmcD,
    /// TCP: this end's reason and the peer's, 0 if there is none.
    Tcp(u32, u32),
}

/// A socket of AF_SMC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Socket {
    /// Number of the state: 1 is SMC_ACTIVE, 2 SMC_INIT, 10 SMC_LISTEN.
    pub state: u8,
    /// Protocol of the socket's bytes.
    pub carrier: Carrier,
    /// Own address of the TCP connection.
    pub local: SocketAddr,
    /// The peer's address.
    pub peer: SocketAddr,
    /// Index of the bound network interface, or 0.
    pub interface: u32,
    /// User of the socket.
    pub uid: u32,
    /// Number of the inode.
    pub inode: u64,
    /// Bit 0: the socket reads no more. Bit 1: the socket writes no more.
    pub shutdown: u8,
    /// Sizes and cursors of a connection.
    pub cursors: Option<Cursors>,
    /// Tokens and GIDs of SMC-D.
    pub dmbs: Option<Dmbs>,
    /// The link of SMC-R.
    pub link: Option<Link>,
}

/// Sizes of buffers, cursors (wrap sequence and offset), producer and state flags of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursors {
    /// Alert token.
    pub token: u32,
    /// Bytes of the send buffer.
    pub send_buffer: u32,
    /// Bytes of the own receive buffer.
    pub receive_buffer: u32,
    /// Bytes of the peer's receive buffer.
    pub peer_buffer: u32,
    /// Received from the peer: its producer and consumer cursor; sent to the peer: the own cursors.
    pub cursors: [(u16, u32); 4],
    /// Producer and state flags: received, then sent.
    pub flags: Option<[(u8, u8); 2]>,
    /// In the send buffer: prepared, sent, known to have arrived.
    pub send_cursors: [(u16, u32); 3],
}

/// The two DMBs of an SMC-D connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dmbs {
    /// Number of the link.
    pub link_id: u32,
    /// Own GID and its extension; the extension of a GID of 64 bits is 0.
    pub gid: (u64, u64),
    /// The peer's GID and its extension.
    pub peer_gid: (u64, u64),
    /// Own token.
    pub token: u64,
    /// The peer's token.
    pub peer_token: u64,
}

/// The first link of an SMC-R connection's link group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Number in the link group.
    pub number: u8,
    /// Name of the RNIC.
    pub rnic: String,
    /// Port of the RNIC.
    pub port: u8,
    /// Own GID.
    pub gid: String,
    /// The peer's GID.
    pub peer_gid: String,
    /// `true`: this end is the server of the link group.
    pub server: bool,
}

/// The sockets of AF_SMC in this network namespace, with all their extensions. Any user may ask.
///
/// # Errors
/// The kernel has no table of such sockets (CONFIG_SMC_DIAG).
pub fn sockets() -> io::Result<Vec<Socket>> {
    // Family, extensions, and an ignored identity of a socket.
    let mut request = [0; 52];
    (request[0], request[3]) = (FAMILY as u8, 0xff);
    let answers = Netlink::open(SOCK_DIAG)?.dump(BY_FAMILY, &request)?;
    Ok(answers.iter().filter_map(|answer| socket(answer)).collect())
}

fn socket(answer: &[u8]) -> Option<Socket> {
    let (head, rest) = answer.split_at_checked(HEAD)?;
    let six = head[0] == INET6;
    let port = |at: usize| Some(u16::from_be_bytes(*head.get(at..)?.first_chunk()?));
    let ip = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 16] = *head.get(at..)?.first_chunk()?;
        Some(match (six, bytes.first_chunk::<4>()) {
            (false, Some(four)) => Ipv4Addr::from(*four).into(),
            _ => Ipv6Addr::from(bytes).into(),
        })
    };
    let mut socket = Socket {
        state: head[1],
        carrier: match head[2] {
            0 => Carrier::SmcR,
            2 => Carrier::SmcD,
            _ => Carrier::Tcp(0, 0),
        },
        shutdown: 0,
        local: SocketAddr::new(ip(8)?, port(4)?),
        peer: SocketAddr::new(ip(24)?, port(6)?),
        interface: word(head, 40)?,
        uid: word(head, 52)?,
        inode: long(head, 56)?,
        cursors: None,
        dmbs: None,
        link: None,
    };
    for attribute in attributes(rest) {
        let value = attribute.value;
        match attribute.kind {
            CONNECTION => socket.cursors = cursors(value),
            LINK_GROUP => socket.link = link(value),
            SHUTDOWN => socket.shutdown = value.first().copied().unwrap_or_default(),
            DMBS => socket.dmbs = dmbs(value),
            FALLBACK if matches!(socket.carrier, Carrier::Tcp(..)) => {
                let reason = |at| word(value, at).unwrap_or_default();
                socket.carrier = Carrier::Tcp(reason(0), reason(4));
            }
            _ => {}
        }
    }
    Some(socket)
}

fn cursors(value: &[u8]) -> Option<Cursors> {
    // A reserved word, the wrap sequence, the offset.
    let cursor = |at: usize| Some(((word(value, at)? >> 16) as u16, word(value, at + 4)?));
    let flags = |at: usize| Some((*value.get(at)?, *value.get(at + 1)?));
    Some(Cursors {
        token: word(value, 0)?,
        send_buffer: word(value, 4)?,
        receive_buffer: word(value, 8)?,
        peer_buffer: word(value, 12)?,
        cursors: [cursor(16)?, cursor(24)?, cursor(32)?, cursor(40)?],
        flags: Some([flags(48)?, flags(50)?]),
        send_cursors: [cursor(52)?, cursor(60)?, cursor(68)?],
    })
}

fn dmbs(value: &[u8]) -> Option<Dmbs> {
    let extension = |at: usize| long(value, at).unwrap_or_default();
    Some(Dmbs {
        link_id: word(value, 0)?,
        peer_gid: (long(value, 8)?, extension(40)),
        gid: (long(value, 16)?, extension(48)),
        token: long(value, 24)?,
        peer_token: long(value, 32)?,
    })
}

fn link(value: &[u8]) -> Option<Link> {
    let part = |at: usize, len: usize| value.get(at..at + len).map(text);
    Some(Link {
        number: *value.first()?,
        rnic: part(1, 64)?,
        port: *value.get(65)?,
        gid: part(66, 40)?,
        peer_gid: part(106, 40)?,
        // SMC_CLNT is 0, SMC_SERV 1.
        server: *value.get(146)? != 0,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer in the layout of Linux 7.2 on a machine of little endian.
    fn answer() -> Vec<u8> {
        let mut head = vec![2, 1, 2, 0, 0x13, 0x88, 0x9c, 0x40];
        head.extend([10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        head.extend([10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        head.extend([3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        head.extend(1000u32.to_ne_bytes());
        head.extend(4242u64.to_ne_bytes());
        let mut dmbs = vec![0; 56];
        dmbs[0..4].copy_from_slice(&0x100u32.to_ne_bytes());
        for (n, at) in (8..56).step_by(8).enumerate() {
            dmbs[at..at + 8].copy_from_slice(&(n as u64 + 1).to_ne_bytes());
        }
        head.extend([60, 0, DMBS as u8, 0]);
        head.extend(dmbs);
        head.extend([5, 0, SHUTDOWN as u8, 0, 2, 0, 0, 0]);
        head
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn a_socket_of_smc_d_is_read() {
        let socket = socket(&answer()).unwrap();
        assert_eq!((socket.state, socket.carrier), (1, Carrier::SmcD));
        assert_eq!(socket.local, "10.0.0.1:5000".parse().unwrap());
        assert_eq!(socket.peer, "10.0.0.2:40000".parse().unwrap());
        assert_eq!((socket.interface, socket.uid, socket.inode), (3, 1000, 4242));
        assert_eq!(socket.shutdown, 2);
        let dmbs = Dmbs { link_id: 0x100, peer_gid: (1, 5), gid: (2, 6), token: 3, peer_token: 4 };
        assert_eq!(socket.dmbs, Some(dmbs));
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn what_is_cut_off_is_left_out() {
        let answer = answer();
        for len in 0..HEAD {
            assert_eq!(socket(&answer[..len]), None, "{len}");
        }
        for len in HEAD..HEAD + 60 {
            assert_eq!(socket(&answer[..len]).unwrap().dmbs, None, "{len}");
        }
    }
}
