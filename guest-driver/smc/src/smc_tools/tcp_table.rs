// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's TCP sockets of a process: owner and inode of a connection, and listeners.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::proc_files;

/// State of a listening socket, in the kernel's table.
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

/// Passes the TCP sockets of a process's network namespace to `each`, until `each` returns `false`.
///
/// # Errors
/// The process has ended, or this user may not look.
pub(crate) fn for_each(pid: u32, mut each: impl FnMut(TcpSocket) -> bool) -> io::Result<()> {
    let mut goes_on = true;
    for name in ["tcp", "tcp6"] {
        let read = proc_files::lines(format!("/proc/{pid}/net/{name}"), |line| {
            goes_on = parse(line).is_none_or(&mut each);
            goes_on
        });
        match read {
            // A kernel without IPv6.
            Err(error) if name == "tcp6" && error.kind() == io::ErrorKind::NotFound => {}
            read => read?,
        }
        if !goes_on {
            break;
        }
    }
    Ok(())
}

/// The TCP sockets of a process.
#[derive(Debug, Default)]
pub(crate) struct TcpTable {
    sockets: Vec<TcpSocket>,
}

impl TcpTable {
    /// The sockets of a process; none after its end.
    pub(crate) fn of(pid: u32) -> TcpTable {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
        let links = descriptors.into_iter().flatten().flatten();
        let own: HashSet<u64> =
            links.filter_map(|link| proc_files::socket_inode(link.path())).collect();
        let mut sockets = Vec::new();
        let _ = for_each(pid, |tcp| {
            if own.contains(&tcp.inode) {
                sockets.push(tcp);
            }
            true
        });
        TcpTable { sockets }
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
        self.sockets.iter().filter(|tcp| tcp.state == LISTEN).copied().collect()
    }
}

/// A line of /proc/PID/net/tcp or tcp6.
fn parse(line: &str) -> Option<TcpSocket> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    Some(TcpSocket {
        local: address(fields.next()?)?,
        peer: address(fields.next()?)?,
        state: u8::from_str_radix(fields.next()?, 16).ok()?,
        uid: fields.nth(3)?.parse().ok()?,
        inode: fields.nth(1)?.parse().ok()?,
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
