// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A pair of Unix sockets in the place of a TCP connection.
//!
//! The program, or another process, has one end and uses it like any socket: the kernel carries out
//! all calls, even calls around this library. At the other end a thread of the connection's owner
//! forwards the bytes (see `relay`).
//!
//! The abstract name of the owner's end holds the addresses of the TCP connection. So any process
//! with this library and the program's end can tell the program the names of its connection.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::sys::{borrowed, owned, raw};

/// Lowest number of the library's own descriptors, if the limit of the process allows.
pub(crate) const HIGH_FDS: c_int = 700;
/// What the abstract name begins with.
const MAGIC: &[u8] = b"smc-connection\0\x01";
/// Bytes of an address in the name: family, address, port, scope.
const ADDRESS_LEN: usize = 23;
/// Bytes of the name.
const NAME_LEN: usize = MAGIC.len() + 8 + 2 * ADDRESS_LEN;

/// The local and the peer address of a TCP connection.
pub(crate) type AddressPair = (SocketAddr, SocketAddr);

/// A pair of Unix sockets.
#[derive(Debug)]
pub(crate) struct SocketPair {
    /// The end at which the owner's threads read and write.
    pub(crate) owner_end: OwnedFd,
    /// The end that replaces the program's descriptors.
    pub(crate) program_end: OwnedFd,
}

/// Moves a descriptor to a high number, out of the program's way.
pub(crate) fn high(fd: OwnedFd) -> OwnedFd {
    match raw::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH_FDS) {
        Ok(moved) => owned(moved as c_int),
        Err(_) => fd,
    }
}

impl SocketPair {
    /// Makes a pair for the TCP connection of a descriptor. `None`: no descriptors are left.
    pub(crate) fn new(tcp: c_int) -> Option<SocketPair> {
        let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
        let (owner_end, program_end) =
            rustix::net::socketpair(kind.0, kind.1, kind.2, None).ok()?;
        // The byte left in the relay's end by the relay (see `relay::owner_end`).
        rustix::net::send(&program_end, &[0], rustix::net::SendFlags::NOSIGNAL).ok()?;
        // The relay finds an urgent byte of the program by the mark.
        let _ = rustix::net::sockopt::set_socket_oobinline(&owner_end, true);
        if let Some(names) = tcp_names(tcp)
            && let Ok(name) = SocketAddrUnix::new_abstract_name(&encode(names))
        {
            // Without a name the connection works, but other processes do not know its addresses.
            let _ = rustix::net::bind(&owner_end, &name);
        }
        Some(SocketPair { owner_end: high(owner_end), program_end: high(program_end) })
    }
}

/// The addresses of a TCP connection.
pub(crate) fn tcp_names(fd: c_int) -> Option<AddressPair> {
    let local = rustix::net::getsockname(borrowed(fd)).ok()?;
    let peer = rustix::net::getpeername(borrowed(fd)).ok()??;
    Some((SocketAddr::try_from(local).ok()?, SocketAddr::try_from(peer).ok()?))
}

/// The addresses of the TCP connection that the pair replaces; `None`: the descriptor is no end of
/// a pair, or a process of another user has made the pair and may lie.
pub(crate) fn names_of(fd: impl AsFd) -> Option<AddressPair> {
    let peer = rustix::net::getpeername(&fd).ok()??;
    let name = SocketAddrUnix::try_from(peer).ok()?;
    let names = decode(name.abstract_name()?)?;
    let maker = rustix::net::sockopt::socket_peercred(&fd).ok()?;
    let user = ism_sys::effective_user();
    (maker.uid.as_raw() == user || maker.uid.is_root() || user == 0).then_some(names)
}

fn encode((local, peer): AddressPair) -> Vec<u8> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut name = Vec::with_capacity(NAME_LEN);
    name.extend_from_slice(MAGIC);
    // No two pairs of a network namespace may have the same name.
    name.extend_from_slice(&(raw::getpid() as u32).to_be_bytes());
    name.extend_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    for address in [local, peer] {
        let (family, bytes, scope) = match address {
            SocketAddr::V4(v4) => (4, v4.ip().to_ipv6_mapped().octets(), 0),
            SocketAddr::V6(v6) => (6, v6.ip().octets(), v6.scope_id()),
        };
        name.push(family);
        name.extend_from_slice(&bytes);
        name.extend_from_slice(&address.port().to_be_bytes());
        name.extend_from_slice(&scope.to_be_bytes());
    }
    name
}

fn decode(name: &[u8]) -> Option<AddressPair> {
    let addresses = name.strip_prefix(MAGIC)?.get(8..)?;
    if addresses.len() != 2 * ADDRESS_LEN {
        return None;
    }
    let (local, peer) = addresses.split_at(ADDRESS_LEN);
    Some((address(local)?, address(peer)?))
}

fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let (family, rest) = bytes.split_first()?;
    let (ip, rest) = rest.split_first_chunk::<16>()?;
    let (port, rest) = rest.split_first_chunk::<2>()?;
    let scope = u32::from_be_bytes(*rest.first_chunk::<4>()?);
    let (ip, port) = (Ipv6Addr::from(*ip), u16::from_be_bytes(*port));
    match family {
        4 => Some(SocketAddr::new(IpAddr::V4(ip.to_ipv4_mapped()?), port)),
        6 => Some(SocketAddrV6::new(ip, port, 0, scope).into()),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;

    #[test]
    fn a_name_holds_both_addresses() {
        let v4: AddressPair = ("10.1.2.3:80".parse().unwrap(), "10.9.8.7:40000".parse().unwrap());
        let v6: AddressPair =
            ("[fe80::1%7]:443".parse().unwrap(), "[::ffff:10.0.0.1]:1".parse().unwrap());
        for names in [v4, v6] {
            let name = encode(names);
            assert_eq!(name.len(), NAME_LEN);
            assert!(name.len() < 108, "sun_path has no room for more");
            assert_eq!(decode(&name), Some(names));
            assert_ne!(encode(names), name, "each pair has a name of its own");
        }
    }

    #[test]
    fn other_names_are_not_taken_for_ours() {
        let names: AddressPair =
            ("10.1.2.3:80".parse().unwrap(), "10.9.8.7:40000".parse().unwrap());
        let good = encode(names);
        assert_eq!(decode(b""), None);
        assert_eq!(decode(&good[1..]), None);
        assert_eq!(decode(&good[..good.len() - 1]), None);
        assert_eq!(decode(&[good.clone(), vec![0]].concat()), None);
        let mut family = good;
        family[MAGIC.len() + 8] = 5;
        assert_eq!(decode(&family), None);
    }

    #[test]
    fn the_programs_end_tells_the_names_and_a_plain_pair_tells_none() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let pair = SocketPair::new(client.as_raw_fd()).unwrap();
        let names = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        assert_eq!(names_of(&pair.program_end), Some(names));
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(names_of(&one), None);
    }

    #[test]
    fn a_file_has_no_names() {
        assert_eq!(names_of(std::fs::File::open("/dev/null").unwrap()), None);
    }
}
