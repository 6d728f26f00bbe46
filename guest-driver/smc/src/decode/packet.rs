// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From a captured frame to the TCP segment or the RoCEv2 packet in it.
//!
//! Other frames yield `None`: a capture is full of other things. Lengths are taken from the
//! headers, but limited to the captured bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// UDP port of RoCEv2.
const ROCE_PORT: u16 = 4791;

/// A packet able to carry SMC.
pub(super) enum Packet<'a> {
    /// A TCP segment.
    Tcp(Segment<'a>),
    /// A UDP datagram to the RoCEv2 port, without the IP addresses' ports.
    Roce {
        /// Sender.
        from: IpAddr,
        /// Receiver.
        to: IpAddr,
        /// InfiniBand headers, payload and checksum.
        data: &'a [u8],
    },
}

/// A TCP segment.
pub(super) struct Segment<'a> {
    /// Sender.
    pub(super) from: (IpAddr, u16),
    /// Receiver.
    pub(super) to: (IpAddr, u16),
    /// Sequence number of the first byte, or of the SYN.
    pub(super) seq: u32,
    /// SYN flag.
    pub(super) syn: bool,
    /// ACK flag.
    pub(super) ack: bool,
    /// RST flag.
    pub(super) rst: bool,
    /// Experimental options: kind 253 or 254 with the bytes behind the length byte.
    pub(super) experiments: Vec<(u8, &'a [u8])>,
    /// Payload.
    pub(super) payload: &'a [u8],
}

/// Bytes to take from the front.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }
}

/// The packet in this frame, if able to carry SMC.
pub(super) fn dissect(link: u32, frame: &[u8]) -> Option<Packet<'_>> {
    let mut bytes = Bytes(frame);
    match link {
        // NULL and LOOP: an address family in the byte order of the capturing machine. The IP
        // version shows the family as well.
        0 | 108 => {
            bytes.take(4)?;
            ip(bytes)
        }
        1 => ethernet(bytes),
        // RAW under its several numbers, IPV4, IPV6.
        12 | 14 | 101 | 228 | 229 => ip(bytes),
        // LINUX_SLL ends with the protocol.
        113 => {
            bytes.take(14)?;
            let kind = bytes.u16()?;
            ether_type(kind, bytes)
        }
        // LINUX_SLL2 begins with the protocol.
        276 => {
            let kind = bytes.u16()?;
            bytes.take(18)?;
            ether_type(kind, bytes)
        }
        _ => None,
    }
}

fn ethernet(mut bytes: Bytes<'_>) -> Option<Packet<'_>> {
    bytes.take(12)?;
    let kind = bytes.u16()?;
    ether_type(kind, bytes)
}

fn ether_type(mut kind: u16, mut bytes: Bytes<'_>) -> Option<Packet<'_>> {
    // Two VLAN tags at most: customer and provider.
    for _ in 0..2 {
        if matches!(kind, 0x8100 | 0x88a8) {
            bytes.take(2)?;
            kind = bytes.u16()?;
        }
    }
    matches!(kind, 0x0800 | 0x86dd).then_some(())?;
    ip(bytes)
}

fn ip(bytes: Bytes<'_>) -> Option<Packet<'_>> {
    match bytes.0.first()? >> 4 {
        4 => ipv4(bytes),
        6 => ipv6(bytes),
        _ => None,
    }
}

fn ipv4(mut bytes: Bytes<'_>) -> Option<Packet<'_>> {
    let [version_ihl, _, l0, l1, _, _, f0, f1, _, protocol, _, _] = bytes.array::<12>()?;
    let from = Ipv4Addr::from(bytes.u32()?);
    let to = Ipv4Addr::from(bytes.u32()?);
    let header = usize::from(version_ihl & 0xf) * 4;
    bytes.take(header.checked_sub(20)?)?;
    // Fragments are not put together: neither MSS-sized segments nor RoCE packets are fragmented.
    if u16::from_be_bytes([f0, f1]) & 0x3fff != 0 {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([l0, l1]));
    // Segmentation offload leaves 0 in captures made before the length was known.
    if total != 0 {
        bytes.0 = bytes.0.get(..total.checked_sub(header)?).unwrap_or(bytes.0);
    }
    transport(protocol, from.into(), to.into(), bytes)
}

fn ipv6(mut bytes: Bytes<'_>) -> Option<Packet<'_>> {
    bytes.take(4)?;
    let length = usize::from(bytes.u16()?);
    let mut next = bytes.u8()?;
    bytes.take(1)?;
    let from = Ipv6Addr::from(bytes.array::<16>()?);
    let to = Ipv6Addr::from(bytes.array::<16>()?);
    if length != 0 {
        bytes.0 = bytes.0.get(..length).unwrap_or(bytes.0);
    }
    // Hop-by-hop, routing and destination options, each with its length in 8-byte units.
    for _ in 0..8 {
        if !matches!(next, 0 | 43 | 60) {
            break;
        }
        next = bytes.u8()?;
        let units = usize::from(bytes.u8()?);
        bytes.take(6 + 8 * units)?;
    }
    transport(next, from.into(), to.into(), bytes)
}

fn transport(protocol: u8, from: IpAddr, to: IpAddr, mut bytes: Bytes<'_>) -> Option<Packet<'_>> {
    match protocol {
        6 => tcp(from, to, bytes).map(Packet::Tcp),
        17 => {
            bytes.take(2)?;
            let port = bytes.u16()?;
            let length = usize::from(bytes.u16()?);
            bytes.take(2)?;
            let data = bytes.0.get(..length.checked_sub(8)?).unwrap_or(bytes.0);
            (port == ROCE_PORT).then_some(Packet::Roce { from, to, data })
        }
        _ => None,
    }
}

fn tcp(from: IpAddr, to: IpAddr, mut bytes: Bytes<'_>) -> Option<Segment<'_>> {
    let (source, target) = (bytes.u16()?, bytes.u16()?);
    let seq = bytes.u32()?;
    bytes.take(4)?;
    let [offset, flags] = bytes.array()?;
    bytes.take(6)?;
    let options = bytes.take((usize::from(offset >> 4) * 4).checked_sub(20)?)?;
    Some(Segment {
        from: (from, source),
        to: (to, target),
        seq,
        syn: flags & 0x02 != 0,
        ack: flags & 0x10 != 0,
        rst: flags & 0x04 != 0,
        experiments: experiments(options),
        payload: bytes.0,
    })
}

/// Options 253 and 254 among at most 40 bytes.
fn experiments(options: &[u8]) -> Vec<(u8, &[u8])> {
    let mut found = Vec::new();
    let mut bytes = Bytes(options);
    while let Some(kind) = bytes.u8() {
        match kind {
            0 => break,
            1 => continue,
            _ => {}
        }
        let Some(length) = bytes.u8() else { break };
        let Some(data) = usize::from(length).checked_sub(2).and_then(|n| bytes.take(n)) else {
            break;
        };
        if matches!(kind, 253 | 254) {
            found.push((kind, data));
        }
    }
    found
}

#[cfg(test)]
pub(super) mod build {
    //! Frames for tests.

    /// A TCP segment over IPv4: option bytes are padded to a multiple of four.
    pub(in super::super) fn tcp(
        from: (u8, u16),
        to: (u8, u16),
        seq: u32,
        flags: u8,
        options: &[u8],
        payload: &[u8],
    ) -> Vec<u8> {
        let mut options = options.to_vec();
        options.resize(options.len().next_multiple_of(4), 0);
        let mut bytes = Vec::new();
        bytes.extend(from.1.to_be_bytes());
        bytes.extend(to.1.to_be_bytes());
        bytes.extend(seq.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend([((20 + options.len()) / 4 * 16) as u8, flags]);
        bytes.extend([0; 6]);
        bytes.extend(options);
        bytes.extend(payload);
        ipv4(from.0, to.0, 6, &bytes)
    }

    /// A RoCEv2 packet: base transport header, payload padded, checksum of zeros.
    pub(in super::super) fn roce(
        from: u8,
        to: u8,
        opcode: u8,
        psn: u32,
        payload: &[u8],
    ) -> Vec<u8> {
        let pad = payload.len().next_multiple_of(4) - payload.len();
        let mut bytes = vec![0xc0, 0, 0x12, 0xb7];
        bytes.extend(((8 + 12 + payload.len() + pad + 4) as u16).to_be_bytes());
        bytes.extend([0; 2]);
        bytes.extend([opcode, (pad as u8) << 4, 0xff, 0xff, 0, 0, 0, 0x11, 0]);
        bytes.extend(&psn.to_be_bytes()[1..]);
        bytes.extend(payload);
        bytes.resize(bytes.len() + pad + 4, 0);
        ipv4(from, to, 17, &bytes)
    }

    fn ipv4(from: u8, to: u8, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x45, 0];
        bytes.extend(((20 + payload.len()) as u16).to_be_bytes());
        bytes.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
        bytes.extend([10, 9, 0, from, 10, 9, 0, to]);
        bytes.extend(payload);
        bytes
    }

    /// A file of big-endian pcap with these frames of Ethernet.
    pub(in super::super) fn pcap<const N: usize>(frames: [Vec<u8>; N]) -> Vec<u8> {
        let mut file: Vec<u8> =
            [0xa1b2_c3d4_u32, 0x0002_0004, 0, 0, 0xffff, 1].map(u32::to_be_bytes).concat();
        for frame in frames {
            let length = (frame.len() as u32).to_be_bytes();
            file.extend([[0; 4], [0; 4], length, length].concat());
            file.extend(frame);
        }
        file
    }

    /// In front of an IP packet: addresses and type.
    pub(in super::super) fn ethernet(ip: &[u8]) -> Vec<u8> {
        [&[0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 8, 0][..], ip].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTION: [u8; 6] = [0xfe, 6, 0xe2, 0xd4, 0xc3, 0xd9];

    #[test]
    fn the_same_segment_is_found_under_every_link_type() {
        let ip = build::tcp((1, 40000), (2, 5000), 7, 0x02, &[&[1, 1][..], &OPTION].concat(), b"");
        let ethernet = build::ethernet(&ip);
        let vlan = [&ethernet[..12], &[0x81, 0, 0, 5, 8, 0], &ip].concat();
        let sll = [&[0; 14][..], &[8, 0], &ip].concat();
        let sll2 = [&[8, 0][..], &[0; 18], &ip].concat();
        let null = [&[2, 0, 0, 0][..], &ip].concat();
        for (link, frame) in
            [(1, ethernet), (1, vlan), (113, sll), (276, sll2), (0, null), (101, ip)]
        {
            let Some(Packet::Tcp(segment)) = dissect(link, &frame) else {
                panic!("link type {link}")
            };
            assert_eq!((segment.from.1, segment.to.1, segment.seq), (40000, 5000, 7));
            assert!(segment.syn && !segment.ack && !segment.rst);
            assert_eq!(segment.experiments, [(254, &OPTION[2..])]);
        }
    }

    #[test]
    fn padding_of_a_short_ethernet_frame_is_no_payload() {
        let mut frame = build::ethernet(&build::tcp((1, 1), (2, 2), 0, 0x10, &[], b"ab"));
        frame.resize(80, 0);
        let Some(Packet::Tcp(segment)) = dissect(1, &frame) else { panic!() };
        assert_eq!(segment.payload, b"ab");
    }

    #[test]
    fn every_prefix_of_a_frame_is_harmless() {
        let segment = build::ethernet(&build::tcp((1, 1), (2, 2), 0, 0x02, &OPTION, b"abcdef"));
        let roce = build::ethernet(&build::roce(1, 2, 4, 0, &[7; 44]));
        for frame in [segment, roce] {
            for end in 0..frame.len() {
                dissect(1, &frame[..end]);
            }
        }
    }

    #[test]
    fn ipv6_extension_headers_are_skipped() {
        let tcp = &build::tcp((1, 40000), (2, 5000), 9, 0x10, &[], b"x")[20..];
        let mut frame = vec![0x60, 0, 0, 0];
        frame.extend(((8 + tcp.len()) as u16).to_be_bytes());
        frame.extend([0, 64]);
        frame.extend([0; 32]);
        frame.extend([6, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend(tcp);
        let Some(Packet::Tcp(segment)) = dissect(229, &frame) else { panic!() };
        assert_eq!((segment.seq, segment.payload), (9, &b"x"[..]));
    }

    #[test]
    fn fragments_and_other_ports_are_nothing() {
        let mut fragment = build::tcp((1, 1), (2, 2), 0, 0x10, &[], b"ab");
        fragment[6] = 0x20;
        assert!(dissect(101, &fragment).is_none());
        let mut other = build::roce(1, 2, 4, 0, &[7; 44]);
        other[23] = 0xb8;
        assert!(dissect(101, &other).is_none());
    }
}
