// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's tables of this process's descriptors, and of the clients of a listener not accepted
//! yet by any process.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::sys::raw;

/// Number of descriptors tried without a list of them.
const MOST: c_int = 4096;

// The states of TCP in the tables.
const ESTABLISHED: u8 = 1;
const SYN_RECV: u8 = 3;
const CLOSE_WAIT: u8 = 8;

/// The descriptors of this process. A program may have no /proc.
pub(crate) fn open_descriptors() -> Vec<c_int> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return (0..MOST).filter(|fd| raw::fcntl(*fd, libc::F_GETFD, 0).is_ok()).collect();
    };
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.flatten().filter_map(number).collect()
}

/// Clients in the queue of the listeners at an address, not accepted yet by any process.
pub(crate) fn queued_clients(local: &SocketAddr) -> Vec<SocketAddr> {
    clients(local, &[ESTABLISHED, CLOSE_WAIT])
}

/// Clients whose three-way handshakes with the listeners at an address are under way.
pub(crate) fn connecting_clients(local: &SocketAddr) -> Vec<SocketAddr> {
    clients(local, &[SYN_RECV])
}

fn clients(local: &SocketAddr, states: &[u8]) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for table in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| client(line, local, states)));
    }
    found
}

/// The client in a line of a table, if its connection is to the address, is in one of the states,
/// and belongs to no process.
fn client(line: &str, local: &SocketAddr, states: &[u8]) -> Option<SocketAddr> {
    let mut words = line.split_whitespace().skip(1);
    let own = address(words.next()?)?;
    let any = local.ip().is_unspecified();
    if own.port() != local.port() || !any && own.ip().to_canonical() != local.ip().to_canonical() {
        return None;
    }
    let address = address(words.next()?)?;
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    // The inode of a socket without a process is 0.
    (states.contains(&state) && words.nth(5)? == "0").then_some(address)
}

/// An address in the form of the tables: words of four bytes in the order of the machine, and the
/// port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| -> Option<[u8; 4]> {
        Some(u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes())
    };
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, place) in bytes.chunks_exact_mut(4).enumerate() {
                place.copy_from_slice(&word(at)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn a_line_of_the_table_is_a_client_in_the_queue() {
        let line = "   3: 0100007F:1770 0200007F:C35A 01 00000000:00000000 00:00000000 00000000  \
                    0        0 0 1 0000000000000000 20 0 0 10 -1";
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let found = client(line, &at("127.0.0.1:6000"), &[ESTABLISHED]).unwrap();
        assert_eq!(found, at("127.0.0.2:50010"));
        assert!(client(line, &at("[::]:6000"), &[ESTABLISHED]).is_some());
        assert!(client(line, &at("127.0.0.9:6000"), &[ESTABLISHED]).is_none());
        assert!(client(line, &at("127.0.0.1:6001"), &[ESTABLISHED]).is_none());
        assert!(client(line, &at("127.0.0.1:6000"), &[SYN_RECV]).is_none());
        let accepted = line.replace("        0 0 1", "        0 4711 1");
        assert!(client(&accepted, &at("127.0.0.1:6000"), &[ESTABLISHED]).is_none());
        let six = "0000000000000000FFFF00000100007F:0016";
        assert_eq!(address(six), Some(at("127.0.0.1:22")));
        assert_eq!(address("local_address"), None);
    }

    #[test]
    fn clients_that_nobody_has_accepted_are_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        assert!(queued_clients(&local).is_empty());
        let client = std::net::TcpStream::connect(local).unwrap();
        let address = client.local_addr().unwrap();
        assert_eq!(queued_clients(&local), [address]);
        let _accepted = listener.accept().unwrap();
        assert!(queued_clients(&local).is_empty());
    }
}
