// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's TCP sockets with their counters (Linux: include/uapi/linux/inet_diag.h, tcp.h).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::netlink::{Netlink, SOCK_DIAG, attributes};

/// SOCK_DIAG_BY_FAMILY
const BY_FAMILY: u16 = 20;
const IPPROTO_TCP: u8 = 6;
const INET: u8 = 2;
const INET6: u8 = 10;
/// INET_DIAG_INFO: struct tcp_info.
const INFO: u16 = 2;
/// Bytes of struct inet_diag_msg.
const HEAD: usize = 72;

/// State of a TCP socket, of the states with a meaning for a census.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpState {
    /// TCP_ESTABLISHED
    Established = 1,
    /// TCP_TIME_WAIT: an ended connection, for a minute.
    TimeWait = 6,
    /// TCP_LISTEN
    Listen = 10,
}

/// A TCP socket of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSocket {
    /// State of the socket.
    pub state: TcpState,
    /// Own address. IPv4 in IPv6 is shown as IPv4.
    pub local: SocketAddr,
    /// The peer's address.
    pub peer: SocketAddr,
    /// Number of the inode; 0 without an owner.
    pub inode: u32,
    /// The kernel's number of the socket, never used again.
    pub cookie: u64,
    /// Counters, of an established connection.
    pub counts: TcpCounts,
}

/// Counters of a connection since its begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounts {
    /// Bytes acknowledged by the peer.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Segments with data, sent.
    pub segments_out: u32,
    /// Segments with data, received.
    pub segments_in: u32,
}

/// Passes the TCP sockets of this thread's network namespace to `each`, without a list in memory. Any user
/// may ask.
///
/// # Errors
/// The kernel has no such table (CONFIG_INET_TCP_DIAG).
pub fn for_each_tcp(mut each: impl FnMut(&TcpSocket)) -> io::Result<()> {
    let netlink = Netlink::open(SOCK_DIAG)?;
    let states = [TcpState::Established, TcpState::TimeWait, TcpState::Listen];
    let states = states.iter().fold(0_u32, |all, state| all | 1 << *state as u32);
    for family in [INET, INET6] {
        // struct inet_diag_req_v2: family, protocol, extensions, states, and an ignored identity.
        let mut request = [0; 56];
        request[..4].copy_from_slice(&[family, IPPROTO_TCP, 1 << (INFO - 1), 0]);
        request[4..8].copy_from_slice(&states.to_ne_bytes());
        netlink.dump_each(BY_FAMILY, &request, |answer| {
            socket(answer).iter().for_each(&mut each);
        })?;
    }
    Ok(())
}

fn socket(answer: &[u8]) -> Option<TcpSocket> {
    let (head, rest) = answer.split_at_checked(HEAD)?;
    let address = |ip: usize, port: usize| {
        let port = u16::from_be_bytes(*head.get(port..)?.first_chunk()?);
        let bytes: [u8; 16] = *head.get(ip..)?.first_chunk()?;
        let ip: IpAddr = match head[0] {
            INET => Ipv4Addr::from(*bytes.first_chunk::<4>()?).into(),
            _ => Ipv6Addr::from(bytes).to_canonical(),
        };
        Some(SocketAddr::new(ip, port))
    };
    let info = attributes(rest).find(|attribute| attribute.kind == INFO);
    // The bytes of struct tcp_info known to the kernel: older ones end earlier.
    let info = info.map_or(&[][..], |attribute| attribute.value);
    let long = |at: usize| {
        info.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_ne_bytes(*b))
    };
    let word = |at: usize| {
        info.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_ne_bytes(*b))
    };
    Some(TcpSocket {
        state: match head[1] {
            1 => TcpState::Established,
            6 => TcpState::TimeWait,
            10 => TcpState::Listen,
            _ => return None,
        },
        local: address(8, 4)?,
        peer: address(24, 6)?,
        inode: u32::from_ne_bytes(*head.get(68..)?.first_chunk()?),
        cookie: u64::from_ne_bytes(*head.get(44..)?.first_chunk()?),
        counts: TcpCounts {
            sent: long(120),
            received: long(128),
            segments_in: word(152),
            segments_out: word(156),
        },
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn connections_have_their_counters_and_listeners_none() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut server = listener.accept().unwrap().0;
            client.write_all(&[7; 1000]).unwrap();
            server.read_exact(&mut [0; 1000]).unwrap();
            server.write_all(&[7; 10]).unwrap();
            client.read_exact(&mut [0; 10]).unwrap();
            let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let mut found = Vec::new();
            for_each_tcp(|tcp| {
                if tcp.local == local || tcp.local == peer {
                    found.push(*tcp);
                }
            })
            .unwrap();
            let of = |state, local| {
                let mut fitting =
                    found.iter().filter(|tcp| (tcp.state, tcp.local) == (state, local));
                *fitting.next().unwrap()
            };
            let client = of(TcpState::Established, local);
            assert_eq!((client.peer, client.counts.received), (peer, 10));
            assert!(client.counts.segments_out > 0 && client.counts.segments_in > 0);
            let server = of(TcpState::Established, peer);
            assert_eq!((server.peer, server.counts.received), (local, 1000));
            assert_ne!((server.inode, server.cookie), (client.inode, client.cookie));
            assert_eq!(of(TcpState::Listen, peer).counts, TcpCounts::default());
        }
    }

    #[test]
    fn an_answer_cut_off_is_left_out() {
        let mut answer = [0; HEAD];
        (answer[0], answer[1]) = (INET, 1);
        assert_eq!(socket(&answer).unwrap().counts, TcpCounts::default());
        for len in 0..HEAD {
            assert_eq!(socket(&answer[..len]), None);
        }
        answer[1] = 7;
        assert_eq!(socket(&answer), None);
    }
}
