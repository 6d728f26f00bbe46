// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files of pcapng, and packets of TCP and of RoCE v2 for them.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};

/// Packets begin with an IP header (LINKTYPE_RAW).
const LINK_TYPE: u16 = 101;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Bytes of a TCP header.
const TCP_HEADER: usize = 20;
/// UDP port of RoCE v2.
const ROCE_PORT: u16 = 4791;
/// Flags of TCP.
pub(crate) const FIN_ACK: u8 = 0x11;
pub(crate) const PUSH_ACK: u8 = 0x18;

/// Begins a file.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn begin(out: &mut impl Write) -> io::Result<()> {
    let mut body = 0x1a2b_3c4d_u32.to_le_bytes().to_vec();
    body.extend([1, 0, 0, 0]);
    // The length of the section is not known.
    body.extend(u64::MAX.to_le_bytes());
    block(out, 0x0a0d_0d0a, &body)
}

/// Adds an interface. Interfaces are counted from 0.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn interface(out: &mut impl Write, name: &str) -> io::Result<()> {
    let mut body = LINK_TYPE.to_le_bytes().to_vec();
    body.extend([0; 2]);
    body.extend((256_u32 << 10).to_le_bytes());
    option(&mut body, 2, name.as_bytes());
    // Times are nanoseconds.
    option(&mut body, 9, &[9]);
    option(&mut body, 0, &[]);
    block(out, 1, &body)
}

/// Adds a packet. The time is in nanoseconds since 1970.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(
    out: &mut impl Write,
    interface: u32,
    time: u64,
    packet: &[u8],
) -> io::Result<()> {
    let mut body = interface.to_le_bytes().to_vec();
    body.extend(((time >> 32) as u32).to_le_bytes());
    body.extend((time as u32).to_le_bytes());
    body.extend((packet.len() as u32).to_le_bytes());
    body.extend((packet.len() as u32).to_le_bytes());
    body.extend(packet);
    body.resize(body.len().next_multiple_of(4), 0);
    block(out, 6, &body)
}

fn block(out: &mut impl Write, kind: u32, body: &[u8]) -> io::Result<()> {
    let length = (body.len() as u32 + 12).to_le_bytes();
    out.write_all(&kind.to_le_bytes())?;
    out.write_all(&length)?;
    out.write_all(body)?;
    out.write_all(&length)
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    body.extend(code.to_le_bytes());
    body.extend((value.len() as u16).to_le_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// A packet of TCP. `None`: the ends have addresses of two kinds, or there are more bytes than a packet has.
pub(crate) fn packet(
    (from, to): (SocketAddr, SocketAddr),
    (sequence, acknowledged): (u32, u32),
    flags: u8,
    bytes: &[u8],
) -> Option<Vec<u8>> {
    let length = u16::try_from(TCP_HEADER + bytes.len()).ok()?;
    let mut tcp = Vec::with_capacity(usize::from(length));
    tcp.extend(from.port().to_be_bytes());
    tcp.extend(to.port().to_be_bytes());
    tcp.extend(sequence.to_be_bytes());
    tcp.extend(acknowledged.to_be_bytes());
    tcp.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    tcp.extend(bytes);
    let (mut ip, addresses) = header((from.ip(), to.ip()), TCP, length)?;
    let [high, low] = length.to_be_bytes();
    let sum = checksum(&[&addresses, &[0, TCP, high, low], &tcp]);
    tcp.splice(16..18, sum.to_be_bytes());
    ip.extend(tcp);
    Some(ip)
}

/// A SEND on a reliable connection, as a packet of RoCE v2. The checksums of UDP and of InfiniBand are zero.
/// `None` as for [`packet`].
pub(crate) fn send(
    ends: (IpAddr, IpAddr),
    queue_pair: u32,
    sequence: u32,
    bytes: &[u8],
) -> Option<Vec<u8>> {
    let pad = bytes.len().next_multiple_of(4) - bytes.len();
    let length = u16::try_from(8 + 12 + bytes.len() + pad + 4).ok()?;
    let (mut ip, _) = header(ends, UDP, length)?;
    for word in [ROCE_PORT, ROCE_PORT, length, 0] {
        ip.extend(word.to_be_bytes());
    }
    // Base transport header: the only packet of a SEND, the padding, the default partition.
    ip.extend([4, 0x40 | (pad as u8) << 4, 0xff, 0xff]);
    ip.extend((queue_pair & 0xff_ffff).to_be_bytes());
    ip.extend((sequence & 0xff_ffff | 1 << 31).to_be_bytes());
    ip.extend(bytes);
    ip.resize(ip.len() + pad + 4, 0);
    Some(ip)
}

/// A header of IP for `length` bytes, and the addresses in it.
fn header((from, to): (IpAddr, IpAddr), protocol: u8, length: u16) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut ip = Vec::new();
    let addresses = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            ip.extend([0x45, 0]);
            ip.extend(length.checked_add(20)?.to_be_bytes());
            ip.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            let addresses = [from.octets(), to.octets()].concat();
            ip.extend(&addresses);
            let sum = checksum(&[&ip]);
            ip.splice(10..12, sum.to_be_bytes());
            addresses
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            ip.extend([0x60, 0, 0, 0]);
            ip.extend(length.to_be_bytes());
            ip.extend([protocol, 64]);
            let addresses = [from.octets(), to.octets()].concat();
            ip.extend(&addresses);
            addresses
        }
        _ => return None,
    };
    Some((ip, addresses))
}

/// The checksum of the Internet (RFC 1071). All parts but the last have an even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let pairs = parts.iter().flat_map(|part| part.chunks(2));
    let word = |pair: &[u8]| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        [high] => u32::from(*high) << 8,
        _ => 0,
    };
    let sum = pairs.map(word).fold(0_u32, |sum, word| {
        let sum = sum + word;
        (sum & 0xffff) + (sum >> 16)
    });
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_has_checksums_that_add_up() {
        let ends = |from: &str, to: &str| (from.parse().unwrap(), to.parse().unwrap());
        let v4 = packet(ends("192.0.2.1:80", "192.0.2.2:81"), (1, 2), PUSH_ACK, b"odd").unwrap();
        assert_eq!(v4.len(), 43);
        assert_eq!(checksum(&[&v4[..20]]), 0);
        assert_eq!(checksum(&[&v4[12..20], &[0, TCP, 0, 23], &v4[20..]]), 0);
        let v6 = packet(ends("[::1]:80", "[::2]:81"), (1, 2), FIN_ACK, b"").unwrap();
        assert_eq!(checksum(&[&v6[8..40], &[0, TCP, 0, 20], &v6[40..]]), 0);
        assert!(packet(ends("[::1]:80", "192.0.2.2:81"), (1, 2), PUSH_ACK, b"").is_none());
        assert!(packet(ends("[::1]:80", "[::2]:81"), (1, 2), PUSH_ACK, &[0; 65_530]).is_none());
    }

    #[test]
    fn a_send_is_a_packet_of_roce_with_padding() {
        let ends = |from: &str, to: &str| (from.parse().unwrap(), to.parse().unwrap());
        let v4 = send(ends("192.0.2.1", "192.0.2.2"), 0x102, 7, b"odd").unwrap();
        assert_eq!(checksum(&[&v4[..20]]), 0);
        assert_eq!(v4[20..28], [0x12, 0xb7, 0x12, 0xb7, 0, 28, 0, 0]);
        assert_eq!(v4[28..40], [4, 0x50, 0xff, 0xff, 0, 0, 1, 2, 0x80, 0, 0, 7]);
        assert_eq!(v4[40..], *b"odd\0\0\0\0\0");
        assert!(send(ends("::1", "::2"), 1, 1, &[0; 44]).is_some_and(|v6| v6.len() == 40 + 68));
        assert!(send(ends("::1", "192.0.2.2"), 1, 1, b"").is_none());
    }
}
