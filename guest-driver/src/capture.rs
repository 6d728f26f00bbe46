// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copies of the bytes sent and received by SMC in this process, for `smc capture`.
//!
//! A capture costs each call one system call without waiting. Bytes not taken by the reader in time are
//! left out, as the positions of later bytes show. Without a capture, each call reads one word.

use std::collections::HashMap;
use std::io::{self, ErrorKind, IoSlice, Read};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ism_sys::lock;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// Bytes of the header of a record.
const HEADER: usize = 64;
/// The most bytes of a record, without its header.
const MAX_RECORD: usize = 32 << 10;
/// The attempts at the lock when a capture begins, milliseconds apart.
const LOCK_ATTEMPTS: u32 = 1000;

/// The captured process; 0: none. A child of a fork is another one.
static CAPTURED: AtomicU32 = AtomicU32::new(0);
static CAPTURE: Capture = Capture { target: Mutex::new(None) };

/// The destination of records, if any. Only the captured process takes the lock.
struct Capture {
    target: Mutex<Option<Target>>,
}

/// The destination of records, and the progress of each connection.
struct Target {
    stream: OwnedFd,
    /// The end of a record taken by the stream in part.
    rest: Vec<u8>,
    connections: HashMap<usize, Flow>,
}

/// The captured part of a connection.
#[derive(Clone, Copy)]
struct Flow {
    addresses: (SocketAddr, SocketAddr),
    /// Bytes sent and received since the capture began.
    passed: [u64; 2],
    /// Whether each way has ended.
    ended: [bool; 2],
}

/// The direction of a record's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Bytes, or their end, from this process to its peer.
    Sent,
    /// Bytes, or their end, from the peer.
    Received,
}

/// A record of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The direction of the bytes.
    pub direction: Direction,
    /// Whether no further bytes follow in this direction.
    pub is_last: bool,
    /// Address of this process's end.
    pub local: SocketAddr,
    /// Address of the peer's end.
    pub peer: SocketAddr,
    /// Nanoseconds since 1970.
    pub time: u64,
    /// Bytes before these, since the capture began.
    pub place: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Record {
    /// The next record of a capture; `None`: the process has ended it.
    ///
    /// # Errors
    /// The stream ends in the middle, or has an invalid record.
    pub fn read(stream: &mut impl Read) -> io::Result<Option<Record>> {
        let mut header = [0; HEADER];
        let mut done = 0;
        while done < HEADER {
            match stream.read(header.get_mut(done..).unwrap_or_default()) {
                Ok(0) if done == 0 => return Ok(None),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let mut bytes = vec![0; Record::length(&header)?];
        stream.read_exact(&mut bytes)?;
        Ok(Some(Record::parse(&header, bytes)))
    }

    /// Length of the bytes behind a header.
    fn length(header: &[u8; HEADER]) -> io::Result<usize> {
        let [a, b, c, d, ..] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > MAX_RECORD { Err(ErrorKind::InvalidData.into()) } else { Ok(length) }
    }

    /// Reads a header. The writing process may be hostile.
    fn parse(header: &[u8; HEADER], bytes: Vec<u8>) -> Record {
        let [_, _, _, _, direction, is_last, rest @ ..] = *header;
        let word = |at: usize| {
            let bytes = rest.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let port = |at: usize| {
            let bytes = rest.get(at..at + 2).and_then(|bytes| bytes.try_into().ok());
            u16::from_le_bytes(bytes.unwrap_or_default())
        };
        let ip = |at: usize| {
            let bytes = rest.get(at..at + 16).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
            IpAddr::from(Ipv6Addr::from(bytes.unwrap_or_default())).to_canonical()
        };
        Record {
            direction: if direction == 0 { Direction::Sent } else { Direction::Received },
            is_last: is_last != 0,
            local: SocketAddr::new(ip(10), port(0)),
            peer: SocketAddr::new(ip(26), port(2)),
            time: word(42),
            place: word(50),
            bytes,
        }
    }
}

/// Whether a capture of this process is on: one load.
#[inline]
pub(crate) fn is_on() -> bool {
    CAPTURED.load(Ordering::Relaxed) != 0
}

/// Sends copies to a stream from now on. An earlier capture ends.
pub(crate) fn begin(stream: OwnedFd) {
    // A thread of this process's parent may have had the lock at the fork.
    for _ in 0..LOCK_ATTEMPTS {
        if let Ok(mut target) = CAPTURE.target.try_lock() {
            *target = Some(Target { stream, rest: Vec::new(), connections: HashMap::new() });
            CAPTURED.store(std::process::id(), Ordering::Release);
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Copies bytes sent or received by a connection. `key`: a number of the connection, while it lives.
#[cold]
pub(crate) fn copy<'a>(
    key: usize,
    addresses: impl FnOnce() -> io::Result<(SocketAddr, SocketAddr)>,
    (direction, is_last): (Direction, bool),
    pieces: impl Iterator<Item = &'a [u8]>,
) {
    // In a child of a fork, another thread of the parent may have the lock for ever.
    if CAPTURED.load(Ordering::Acquire) != std::process::id() {
        CAPTURED.store(0, Ordering::Release);
        return;
    }
    let mut target = lock(&CAPTURE.target);
    let Some(now) = target.as_mut() else { return };
    let mut pieces = pieces.flat_map(|piece| piece.chunks(MAX_RECORD)).peekable();
    if pieces.peek().is_none() && !is_last {
        return;
    }
    let flow = match now.connections.get(&key) {
        Some(flow) => *flow,
        None => match addresses() {
            Ok(addresses) => Flow { addresses, passed: [0; 2], ended: [false; 2] },
            Err(_) => return,
        },
    };
    match now.write_all(flow, (direction, is_last), pieces) {
        Ok(flow) => {
            now.connections.insert(key, flow);
        }
        Err(_) => {
            // The reader has gone.
            CAPTURED.store(0, Ordering::Release);
            *target = None;
        }
    }
}

/// The connection ends: its number may be reused.
#[cold]
pub(crate) fn forget(key: usize) {
    if CAPTURED.load(Ordering::Acquire) == std::process::id()
        && let Some(target) = lock(&CAPTURE.target).as_mut()
    {
        target.connections.remove(&key);
    }
}

impl Target {
    fn write_all<'a>(
        &mut self,
        mut flow: Flow,
        (direction, is_last): (Direction, bool),
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<Flow> {
        let way = usize::from(direction == Direction::Received);
        let (Some(place), Some(ended)) = (flow.passed.get_mut(way), flow.ended.get_mut(way)) else {
            return Ok(flow);
        };
        for piece in pieces {
            self.write(&header(flow.addresses, (direction, false), *place, piece.len()), piece)?;
            *place += piece.len() as u64;
        }
        if is_last && !*ended {
            *ended = true;
            self.write(&header(flow.addresses, (direction, true), *place, 0), &[])?;
        }
        Ok(flow)
    }

    /// Writes a record, or leaves it out if the reader is behind.
    fn write(&mut self, header: &[u8; HEADER], bytes: &[u8]) -> io::Result<()> {
        while !self.rest.is_empty() {
            match self.send(&[IoSlice::new(&self.rest)])? {
                0 => return Ok(()),
                sent => drop(self.rest.drain(..sent)),
            }
        }
        let sent = self.send(&[IoSlice::new(header), IoSlice::new(bytes)])?;
        if sent > 0 {
            self.rest.extend(header.iter().chain(bytes).skip(sent));
        }
        Ok(())
    }

    /// 0: there is no room.
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&self.stream, pieces, &mut SendAncillaryBuffer::default(), flags) {
            Ok(sent) => Ok(sent),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}

fn header(
    (local, peer): (SocketAddr, SocketAddr),
    (direction, is_last): (Direction, bool),
    place: u64,
    length: usize,
) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    let octets = |address: SocketAddr| match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    let fields: [&[u8]; 9] = [
        &(length as u32).to_le_bytes(),
        &[u8::from(direction == Direction::Received), u8::from(is_last)],
        &local.port().to_le_bytes(),
        &peer.port().to_le_bytes(),
        &[0; 6],
        &octets(local),
        &octets(peer),
        &time.to_le_bytes(),
        &place.to_le_bytes(),
    ];
    let all = fields.into_iter().flatten();
    header.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
    header
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn next(stream: &mut UnixStream) -> Record {
        Record::read(stream).unwrap().unwrap()
    }

    #[test]
    fn a_reader_gets_what_passed_and_what_it_is_too_slow_for_is_a_gap() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        assert!(!is_on());
        begin(writer.into());
        let ends = ("192.0.2.1:80".parse().unwrap(), "[2001:db8::1]:9".parse().unwrap());
        let sent = |bytes: &[u8]| {
            copy(7, || Ok(ends), (Direction::Sent, false), std::iter::once(bytes));
        };
        sent(b"hello");
        copy(7, || Ok(ends), (Direction::Received, true), [&b"an"[..], b"swer"].into_iter());
        let first = next(&mut reader);
        assert_eq!((first.local, first.peer, first.place), (ends.0, ends.1, 0));
        assert_eq!((first.direction, first.bytes), (Direction::Sent, b"hello".to_vec()));
        assert_eq!((next(&mut reader).bytes, next(&mut reader).place), (b"an".to_vec(), 2));
        let last = next(&mut reader);
        assert!(last.is_last && last.place == 6 && last.direction == Direction::Received);

        // Without a reader: the writer does not wait.
        let long = vec![b'x'; 3 * MAX_RECORD];
        (0..100).for_each(|_| sent(&long));
        reader.set_nonblocking(true).unwrap();
        let mut all = Vec::new();
        assert_eq!(reader.read_to_end(&mut all).unwrap_err().kind(), ErrorKind::WouldBlock);
        let before = all.len();
        assert!(before < 100 * long.len());
        sent(b"behind");
        assert!(reader.read_to_end(&mut all).is_err());
        let last = &all[all.len() - HEADER - 6..];
        let last = Record::parse(last[..HEADER].try_into().unwrap(), last[HEADER..].to_vec());
        assert_eq!((&last.bytes[..], last.place), (&b"behind"[..], 5 + 100 * long.len() as u64));

        drop(reader);
        sent(b"to nobody");
        assert!(!is_on());
    }
}
