// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records as packets of TCP, in a file of pcapng.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};

use guest_driver::statistics::{Direction, Record};

/// Packets begin with an IP header (LINKTYPE_RAW).
const LINK_TYPE: u16 = 101;
const TCP: u8 = 6;
/// Flags of TCP.
const FIN_ACK: u8 = 0x11;
const PUSH_ACK: u8 = 0x18;
/// Sequence number of the first byte.
const FIRST: u32 = 1;
/// Bytes of a TCP header.
const TCP_HEADER: usize = 20;

/// The name of a process's program.
pub(super) fn program(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// Writes a capture.
pub(super) struct Writer<W> {
    out: W,
    /// Numbers of interfaces, by process.
    interfaces: HashMap<u32, u32>,
    /// The next sequence numbers of a process's connection: its own, and its peer's.
    next: HashMap<(u32, SocketAddr, SocketAddr), [u32; 2]>,
    /// By the ends of a connection.
    tellers: HashMap<[SocketAddr; 2], Tellers>,
}

/// The processes that tell of a connection. If both ends are captured, one says what the other has
/// said, perhaps when that one has ended.
struct Tellers {
    /// The process that the connection is written for.
    owner: u32,
    /// The owner has ended the connection.
    has_ended: bool,
    /// Time of the owner's last record, nanoseconds since 1970.
    time: u64,
    /// The other process, and of which ways it has told the beginning.
    other: Option<(u32, [bool; 2])>,
}

impl Tellers {
    /// The first process that has told of a connection.
    fn first(owner: u32) -> Tellers {
        Tellers { owner, has_ended: false, time: 0, other: None }
    }

    /// Whether a record is for the file.
    fn wants(&mut self, pid: u32, record: &Record) -> bool {
        if pid != self.owner {
            if !self.is_another_connection(pid, record) {
                return false;
            }
            *self = Tellers::first(pid);
        }
        self.has_ended |= record.is_last;
        self.time = self.time.max(record.time);
        true
    }

    /// Whether the other process reports a new connection with the same ports.
    fn is_another_connection(&mut self, pid: u32, record: &Record) -> bool {
        if record.place != 0 || record.is_last {
            return false;
        }
        let (_, told) = self.other.filter(|(other, _)| *other == pid).unwrap_or((pid, [false; 2]));
        let way = usize::from(record.direction == Direction::Received);
        // The owner's is told of at its first byte, before the owner has seen its last.
        let is_over = self.has_ended && record.time > self.time;
        if is_over && (told == [false; 2] || told.get(way) == Some(&true)) {
            return true;
        }
        let mut told = told;
        told.iter_mut().skip(way).take(1).for_each(|told| *told = true);
        self.other = Some((pid, told));
        false
    }
}

impl<W: Write> Writer<W> {
    /// Begins the file.
    ///
    /// # Errors
    /// Errors of `out`.
    pub(super) fn new(mut out: W) -> io::Result<Writer<W>> {
        let mut body = 0x1a2b_3c4d_u32.to_le_bytes().to_vec();
        body.extend([1, 0, 0, 0]);
        // The length of the section is not known.
        body.extend(u64::MAX.to_le_bytes());
        block(&mut out, 0x0a0d_0d0a, &body)?;
        Ok(Writer {
            out,
            interfaces: HashMap::new(),
            next: HashMap::new(),
            tellers: HashMap::new(),
        })
    }

    /// # Errors
    /// Errors of `out`.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn interface(&mut self, pid: u32) -> io::Result<u32> {
        if let Some(number) = self.interfaces.get(&pid) {
            return Ok(*number);
        }
        let number = self.interfaces.len() as u32;
        let mut body = LINK_TYPE.to_le_bytes().to_vec();
        body.extend([0; 2]);
        body.extend((256_u32 << 10).to_le_bytes());
        option(&mut body, 2, format!("{} {pid}", program(pid)).as_bytes());
        // Times are nanoseconds.
        option(&mut body, 9, &[9]);
        option(&mut body, 0, &[]);
        block(&mut self.out, 1, &body)?;
        self.interfaces.insert(pid, number);
        Ok(number)
    }

    /// Whether a connection is written for this process: the first one that has told of it.
    fn is_for(&mut self, pid: u32, record: &Record) -> bool {
        let mut ends = [record.local, record.peer];
        ends.sort();
        self.tellers.entry(ends).or_insert_with(|| Tellers::first(pid)).wants(pid, record)
    }

    /// Writes a record of a process. `is_own`: the kernel has confirmed the connection of the
    /// process.
    ///
    /// # Errors
    /// Those of `out`.
    pub(super) fn record(&mut self, pid: u32, record: &Record) -> io::Result<()> {
        if !self.is_for(pid, record) {
            return Ok(());
        }
        let interface = self.interface(pid)?;
        let next = self.next.entry((pid, record.local, record.peer)).or_insert([FIRST; 2]);
        let way = usize::from(record.direction == Direction::Received);
        // Sequence numbers are counted round and round.
        let sequence = FIRST.wrapping_add(record.place as u32);
        let after = sequence.wrapping_add(record.bytes.len() as u32);
        let [own, peers] = *next;
        *next = if way == 0 { [after, peers] } else { [own, after] };
        let acknowledged = if way == 0 { peers } else { own };
        let ends = match record.direction {
            Direction::Sent => (record.local, record.peer),
            Direction::Received => (record.peer, record.local),
        };
        let flags = if record.is_last { FIN_ACK } else { PUSH_ACK };
        let Some(packet) = packet(ends, (sequence, acknowledged), flags, &record.bytes) else {
            return Ok(());
        };
        let mut body = interface.to_le_bytes().to_vec();
        body.extend(((record.time >> 32) as u32).to_le_bytes());
        body.extend((record.time as u32).to_le_bytes());
        body.extend((packet.len() as u32).to_le_bytes());
        body.extend((packet.len() as u32).to_le_bytes());
        body.extend(&packet);
        body.resize(body.len().next_multiple_of(4), 0);
        block(&mut self.out, 6, &body)
    }
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

/// A packet. `None`: the ends have addresses of two kinds, or there are more bytes than a packet has.
fn packet(
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
    let mut ip = Vec::new();
    let addresses = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            ip.extend([0x45, 0]);
            ip.extend(length.checked_add(20)?.to_be_bytes());
            ip.extend([0, 0, 0x40, 0, 64, TCP, 0, 0]);
            let addresses = [from.octets(), to.octets()].concat();
            ip.extend(&addresses);
            let sum = checksum(&[&ip]);
            ip.splice(10..12, sum.to_be_bytes());
            addresses
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            ip.extend([0x60, 0, 0, 0]);
            ip.extend(length.to_be_bytes());
            ip.extend([TCP, 64]);
            let addresses = [from.octets(), to.octets()].concat();
            ip.extend(&addresses);
            addresses
        }
        _ => return None,
    };
    let [high, low] = length.to_be_bytes();
    let sum = checksum(&[&addresses, &[0, TCP, high, low], &tcp]);
    tcp.splice(16..18, sum.to_be_bytes());
    ip.extend(tcp);
    Some(ip)
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
    fn a_connection_whose_ends_are_both_captured_is_written_once() {
        let mut writer = Writer::new(Vec::new()).unwrap();
        let [a, b] = ["192.0.2.1:80", "192.0.2.2:81"].map(|end| end.parse().unwrap());
        let record = |ends: (SocketAddr, SocketAddr), direction, time, is_last| Record {
            direction,
            is_last,
            local: ends.0,
            peer: ends.1,
            time,
            place: 0,
            bytes: Vec::new(),
        };
        use Direction::{Received, Sent};
        assert!(writer.is_for(7, &record((a, b), Received, 10, false)));
        assert!(!writer.is_for(8, &record((b, a), Sent, 9, false)));
        assert!(writer.is_for(7, &record((a, b), Sent, 11, false)));
        assert!(writer.is_for(7, &record((a, b), Sent, 12, true)));
        assert!(
            !writer.is_for(8, &record((b, a), Received, 13, false)),
            "the end comes later here"
        );
        assert!(!writer.is_for(8, &record((b, a), Sent, 14, true)));
        assert!(writer.is_for(8, &record((b, a), Sent, 20, false)), "the ports are used again");
        assert!(!writer.is_for(7, &record((a, b), Received, 21, false)));
    }

    #[test]
    fn a_connection_that_has_ended_at_one_end_is_not_written_again_for_the_other() {
        let mut writer = Writer::new(Vec::new()).unwrap();
        let [a, b] = ["192.0.2.1:80", "192.0.2.2:81"].map(|end| end.parse().unwrap());
        let record = |pid: u32, direction, time, is_last| {
            let (local, peer) = if pid == 7 { (a, b) } else { (b, a) };
            Record { direction, is_last, local, peer, time, place: 0, bytes: Vec::new() }
        };
        for (pid, direction, time, is_last, written) in [
            (7, Direction::Received, 10, false, true),
            (7, Direction::Sent, 11, false, true),
            (7, Direction::Sent, 12, true, true),
            // All of the other end's, which was read later.
            (8, Direction::Sent, 9, false, false),
            (8, Direction::Received, 13, false, false),
            (8, Direction::Received, 14, true, false),
            (8, Direction::Sent, 30, false, true),
        ] {
            let record = record(pid, direction, time, is_last);
            assert_eq!(writer.is_for(pid, &record), written, "{record:?}");
        }
    }

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
}
