// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's TCP sockets of a process: owner and inode of a connection, and listeners.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// State of a socket that listens, in the kernel's table.
pub(crate) const LISTEN: u8 = 0x0a;

/// A TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcpSocket {
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) state: u8,
    pub(crate) uid: u32,
    pub(crate) inode: u64,
}

/// The TCP sockets of a process's network namespace.
#[derive(Debug, Default)]
pub(crate) struct TcpTable {
    pid: u32,
    sockets: Vec<TcpSocket>,
}

impl TcpTable {
    /// The sockets of a process; none after its end.
    pub(crate) fn of(pid: u32) -> TcpTable {
        let read = |name| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
        let sockets = ["tcp", "tcp6"].map(read);
        let sockets = sockets.iter().flat_map(|table| table.lines().skip(1)).filter_map(parse);
        TcpTable { pid, sockets: sockets.collect() }
    }

    /// All of them.
    pub(crate) fn all(&self) -> &[TcpSocket] {
        &self.sockets
    }

    /// The socket of a connection.
    pub(crate) fn connection(&self, local: SocketAddr, peer: SocketAddr) -> Option<TcpSocket> {
        let same = |one: SocketAddr, other: SocketAddr| {
            (one.ip().to_canonical(), one.port()) == (other.ip().to_canonical(), other.port())
        };
        self.sockets.iter().copied().find(|tcp| same(tcp.local, local) && same(tcp.peer, peer))
    }

    /// The listening sockets.
    pub(crate) fn listening(&self) -> Vec<TcpSocket> {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid));
        let links = descriptors.into_iter().flatten().flatten();
        let targets = links.filter_map(|link| fs::read_link(link.path()).ok());
        let own: HashSet<String> =
            targets.map(|target| target.to_string_lossy().into_owned()).collect();
        let of_process = |tcp: &&TcpSocket| {
            tcp.state == LISTEN && own.contains(&format!("socket:[{}]", tcp.inode))
        };
        self.sockets.iter().filter(of_process).copied().collect()
    }
}

/// A line of /proc/PID/net/tcp or tcp6.
fn parse(line: &str) -> Option<TcpSocket> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    Some(TcpSocket {
        local: address(fields.get(1)?)?,
        peer: address(fields.get(2)?)?,
        state: u8::from_str_radix(fields.get(3)?, 16).ok()?,
        uid: fields.get(7)?.parse().ok()?,
        inode: fields.get(9)?.parse().ok()?,
    })
}

/// An address in the kernel's format: words of 32 bits in the machine's byte order, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |n: usize| {
        let hex = ip.get(8 * n..8 * n + 8)?;
        u32::from_str_radix(hex, 16).ok().map(u32::to_ne_bytes)
    };
    let ip = match ip.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(words.as_flattened()).ok()?))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn connections_and_listeners_of_this_process_are_found() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let table = TcpTable::of(std::process::id());
            let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let found = table.connection(local, peer).unwrap();
            assert_eq!(found.uid, rustix::process::getuid().as_raw());
            assert_ne!(found.inode, 0);
            let listening = table.listening();
            assert!(listening.iter().any(|tcp| tcp.local == peer), "{listening:?}");
        }
    }

    #[test]
    fn lines_that_make_no_sense_are_left_out() {
        let line = "0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 7 0 9";
        let found = parse(line).unwrap();
        assert_eq!((found.uid, found.inode, found.state), (7, 9, LISTEN));
        assert_eq!(found.local, "127.0.0.1:8080".parse().unwrap());
        for cut in 0..line.len() - 2 {
            assert_eq!(parse(&line[..cut]), None, "{cut}");
        }
        assert_eq!(parse(&line.replace("0100007F", "0100007")), None);
    }
}
