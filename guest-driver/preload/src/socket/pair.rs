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
use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::sys::{borrowed, owned, raw};

/// Lowest number of the library's own descriptors, if the limit of the process allows.
pub(crate) const HIGH_FDS: c_int = 700;
/// The beginning of the abstract name. The name is text, as tools read /proc/net/unix as text:
/// numbers in hexadecimal with dashes between them.
const PREFIX: &str = "smcpair-";

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
            && let Ok(name) = SocketAddrUnix::new_abstract_name(encode(names).as_bytes())
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

fn encode((local, peer): AddressPair) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // No two pairs of a network namespace may have the same name.
    let mut name =
        format!("{PREFIX}{:x}-{:x}", raw::getpid(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut scope = 0;
    for address in [local, peer] {
        let port = address.port();
        // Writing to a string does not fail.
        let _ = match address {
            SocketAddr::V4(v4) => write!(name, "-{:08x}{port:04x}", u32::from(*v4.ip())),
            SocketAddr::V6(v6) => {
                scope = scope.max(v6.scope_id());
                write!(name, "-{:032x}{port:04x}", u128::from(*v6.ip()))
            }
        };
    }
    // The link-local addresses of a connection belong to one interface, and `sun_path` has no room
    // for two scopes.
    if scope != 0 {
        let _ = write!(name, "-{scope:x}");
    }
    name
}

fn decode(name: &[u8]) -> Option<AddressPair> {
    let name = std::str::from_utf8(name).ok()?.strip_prefix(PREFIX)?;
    let mut fields = name.split('-').skip(2);
    let (local, peer) = (fields.next()?, fields.next()?);
    let scope = fields.next().map_or(Some(0), |scope| u32::from_str_radix(scope, 16).ok())?;
    let ends = (address(local, scope)?, address(peer, scope)?);
    fields.next().is_none().then_some(ends)
}

fn address(text: &str, scope: u32) -> Option<SocketAddr> {
    let (ip, port) = text.split_at_checked(text.len().checked_sub(4)?)?;
    let port = u16::from_str_radix(port, 16).ok()?;
    match ip.len() {
        8 => Some(SocketAddr::new(Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?).into(), port)),
        32 => {
            let ip = Ipv6Addr::from(u128::from_str_radix(ip, 16).ok()?);
            let scope = if ip.is_unicast_link_local() { scope } else { 0 };
            Some(SocketAddrV6::new(ip, port, 0, scope).into())
        }
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
        let longest: AddressPair = (
            "[fe80::ffff:ffff:ffff:ffff%4294967295]:65535".parse().unwrap(),
            "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().unwrap(),
        );
        for names in [v4, v6, longest] {
            let name = encode(names);
            assert_eq!(decode(name.as_bytes()), Some(names));
            assert_ne!(encode(names), name, "each pair has a name of its own");
            let is_text = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.chars().all(is_text), "{name}");
        }
        // The largest process id and number. The name of a socket has 107 bytes after the first.
        let pid = encode(longest).len() - format!("{:x}-0", raw::getpid()).len();
        assert!(pid + "400000-ffffffff".len() <= 107, "sun_path has no room for more");
    }

    #[test]
    fn other_names_are_not_taken_for_ours() {
        let names: AddressPair = ("10.1.2.3:80".parse().unwrap(), "[::1]:40000".parse().unwrap());
        let good = encode(names);
        for other in [
            "",
            &good[1..],
            &good[..good.len() - 1],
            &format!("{good}-"),
            &format!("{good}-7-7"),
            &good.replace('a', "g"),
            &good[..good.len() - 37],
        ] {
            assert_eq!(decode(other.as_bytes()), None, "{other}");
        }
        assert_eq!(decode(b"\xff\xfe"), None);
        assert_eq!(decode("smcpair-1-2-é-é".as_bytes()), None);
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
