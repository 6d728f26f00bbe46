// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A TCP connection with the target: writes segments, and returns events.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::message::{Message, parse};

/// An event on a connection.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A whole CLC message.
    Message(Message),
    /// Bytes that begin as a CLC message without being one, and why.
    Unreadable(String),
    /// Other bytes.
    Data(Vec<u8>),
    /// FIN.
    End,
    /// RST.
    Reset,
    /// The link of SMC-R is over, and why.
    LinkDown(String),
    /// Nothing, for as long as the suite waited.
    Nothing,
}

/// The sender of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The suite.
    Suite,
    /// The implementation under test.
    Target,
}

/// The carrier of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// TCP.
    #[default]
    Tcp,
    /// The first link of SMC-R.
    Link,
}

/// Bytes of one write or read, or an event of TCP.
#[derive(Clone, Debug)]
pub struct Passed {
    /// Milliseconds since the connection began.
    pub at: u64,
    /// The sender.
    pub from: Sender,
    /// The path.
    pub path: Path,
    /// The bytes; none for an event.
    pub bytes: Vec<u8>,
    /// The event in words, or empty.
    pub event: String,
}

/// A connection, and its record of bytes and events.
#[derive(Debug)]
pub(crate) struct Link {
    tcp: TcpStream,
    began: Instant,
    /// Received bytes, part of no event yet.
    pending: Vec<u8>,
    pub(crate) passed: Vec<Passed>,
}

/// Limit of the recorded bytes of a dialogue.
const KEPT: usize = 64 << 10;
/// How long a write may block.
const WRITE: Duration = Duration::from_secs(10);

impl Link {
    pub(crate) fn new(tcp: TcpStream) -> io::Result<Link> {
        tcp.set_nodelay(true)?;
        tcp.set_write_timeout(Some(WRITE))?;
        Ok(Link { tcp, began: Instant::now(), pending: Vec::new(), passed: Vec::new() })
    }

    fn note(&mut self, from: Sender, bytes: &[u8], event: &str) {
        let kept: usize = self.passed.iter().map(|passed| passed.bytes.len()).sum();
        let bytes = bytes.get(..bytes.len().min(KEPT.saturating_sub(kept))).unwrap_or_default();
        let at = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (bytes, event) = (bytes.to_vec(), event.to_owned());
        self.passed.push(Passed { at, from, path: Path::Tcp, bytes, event });
    }

    /// Records a message of data on the link of SMC-R.
    pub(crate) fn note_cdc(&mut self, (at, from, bytes): (Instant, Sender, Vec<u8>)) {
        self.note_llc(from, &bytes, "");
        if let Some(last) = self.passed.last_mut() {
            let at = at.saturating_duration_since(self.began).as_millis();
            last.at = u64::try_from(at).unwrap_or(u64::MAX);
        }
    }

    /// Records bytes or an event on the link of SMC-R.
    pub(crate) fn note_llc(&mut self, from: Sender, bytes: &[u8], event: &str) {
        self.note(from, bytes, event);
        if let Some(last) = self.passed.last_mut() {
            last.path = Path::Link;
        }
    }

    /// Writes one segment. A connection ended by the target is no error: the following steps show
    /// the end.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let event = match self.tcp.write_all(bytes) {
            Ok(()) => String::new(),
            Err(error) => format!("not sent: {error}"),
        };
        self.note(Sender::Suite, bytes, &event);
    }

    /// Ends the own direction.
    pub(crate) fn finish(&mut self) {
        let _ = self.tcp.shutdown(Shutdown::Write);
        self.note(Sender::Suite, &[], "FIN");
    }

    /// Ends with RST.
    pub(crate) fn reset(&mut self) {
        let _ = socket2::SockRef::from(&self.tcp).set_linger(Some(Duration::ZERO));
        self.note(Sender::Suite, &[], "RST");
    }

    /// The next event, or `Event::Nothing` after `limit`.
    pub(crate) fn next(&mut self, limit: Duration) -> Event {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(event) = self.take_message() {
                return event;
            }
            match self.fill(deadline) {
                Filled::Bytes => {}
                Filled::Nothing if self.pending.is_empty() => return Event::Nothing,
                Filled::Nothing => return Event::Data(std::mem::take(&mut self.pending)),
                Filled::End if !self.pending.is_empty() => {
                    let bytes = std::mem::take(&mut self.pending);
                    return Event::Unreadable(format!("it ends after {} bytes", bytes.len()));
                }
                Filled::End => return Event::End,
                Filled::Reset => return Event::Reset,
            }
        }
    }

    /// The next `len` bytes of any content, or fewer after `limit`.
    pub(crate) fn data(&mut self, len: usize, limit: Duration) -> Vec<u8> {
        let deadline = Instant::now() + limit;
        while self.pending.len() < len && self.fill(deadline) == Filled::Bytes {}
        let len = len.min(self.pending.len());
        self.pending.drain(..len).collect()
    }

    fn take_message(&mut self) -> Option<Event> {
        let is_eye = |eye: &[u8]| self.pending.iter().zip(eye).all(|(got, want)| got == want);
        match self.pending.as_slice() {
            [] => None,
            _ if !is_eye(&[0xe2, 0xd4, 0xc3, 0xd9]) && !is_eye(&[0xe2, 0xd4, 0xc3, 0xc4]) => {
                Some(Event::Data(std::mem::take(&mut self.pending)))
            }
            [_, _, _, _, _, high, low, ..] => {
                let len = usize::from(u16::from_be_bytes([*high, *low]));
                if len < 8 {
                    self.pending.clear();
                    return Some(Event::Unreadable(format!("its length is {len}")));
                }
                if self.pending.len() < len {
                    return None;
                }
                let bytes: Vec<u8> = self.pending.drain(..len).collect();
                Some(parse(&bytes).map_or_else(Event::Unreadable, Event::Message))
            }
            _ => None,
        }
    }

    fn fill(&mut self, deadline: Instant) -> Filled {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || self.tcp.set_read_timeout(Some(left)).is_err() {
            return Filled::Nothing;
        }
        let mut buffer = [0; 16 << 10];
        match self.tcp.read(&mut buffer) {
            Ok(0) => {
                self.note(Sender::Target, &[], "FIN");
                Filled::End
            }
            Ok(n) => {
                let bytes = buffer.get(..n).unwrap_or_default();
                self.note(Sender::Target, bytes, "");
                self.pending.extend_from_slice(bytes);
                Filled::Bytes
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Filled::Bytes,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Filled::Nothing
            }
            Err(_) => {
                self.note(Sender::Target, &[], "RST");
                Filled::Reset
            }
        }
    }
}

#[derive(PartialEq, Eq)]
enum Filled {
    Bytes,
    Nothing,
    End,
    Reset,
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::value::hex_of;

    fn pair() -> (TcpStream, Link) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (tcp, Link::new(listener.accept().unwrap().0).unwrap())
    }

    use smc_test_support::TIMEOUT as SOON;

    #[test]
    fn messages_are_told_from_data_whatever_the_segments() {
        let (mut tcp, mut link) = pair();
        let decline = hex_of("e2d4c3d9 04 001c 10 00*16 e2d4c3d9").unwrap();
        let writer = std::thread::spawn(move || {
            for byte in decline.iter().chain(b"data") {
                tcp.write_all(&[*byte]).unwrap();
            }
            tcp
        });
        assert!(matches!(link.next(SOON), Event::Message(message) if message.bytes.len() == 28));
        assert_eq!(link.data(4, SOON), b"data");
        drop(writer.join().unwrap());
        assert!(matches!(link.next(SOON), Event::End));
        let came: usize = link.passed.iter().map(|passed| passed.bytes.len()).sum();
        assert_eq!(came, 32);
    }

    #[test]
    fn an_end_within_a_message_and_silence_are_told() {
        let (mut tcp, mut link) = pair();
        assert!(matches!(link.next(Duration::from_millis(20)), Event::Nothing));
        tcp.write_all(&[0xe2, 0xd4, 0xc3, 0xd9, 2]).unwrap();
        drop(tcp);
        assert!(matches!(link.next(SOON), Event::Unreadable(_)));
        let (mut tcp, mut link) = pair();
        tcp.write_all(b"GET /").unwrap();
        assert!(matches!(link.next(SOON), Event::Data(data) if data == b"GET /"));
    }
}
