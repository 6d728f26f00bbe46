// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cells of the matrix: the acts of a client and its server on one connection.
//!
//! In a cell with a direction, the client acts first, and then the server does the same.

use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::net::Line;
use super::report::{Digest, Report};
use crate::bytes;

/// Names of the cells, and their meanings.
///
/// More words are orders: `hold` (bytes there and back, then both ends wait for the other's end),
/// `flood` (the client sends until an error), `pour` (the server does), `until` (bytes there and back
/// until the client finds the file [`ENOUGH`]), `stay` (the client does nothing and does not close),
/// and `many`, `connects` and `failing` (see `programs`). Two more measure without checking the bytes:
/// `stream` and `rounds` (messages of 64 bytes there and back, as many as ordered).
pub const CELLS: [(&str, &str); 8] = [
    ("ping", "bytes there and back"),
    ("byte", "single bytes there and back"),
    ("bulk", "many bytes there, then as many back"),
    ("wrap", "odd pieces there and back, several times around the ring"),
    ("window", "the reader sleeps until the writer must wait, then reads"),
    ("half", "bytes and the end of data there, then bytes and the end of data back"),
    ("abort", "closed while there is something to read: the other end is reset"),
    ("urgent", "an urgent byte among others"),
];

/// The file for the end of `until`.
pub const ENOUGH: &str = "/tmp/enough";
/// How long any call may take.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a piece in bulk.
const PIECE: usize = 64 << 10;
/// Bytes of a call of a measured stream.
const STREAM: usize = 256 << 10;
/// Bytes of a piece; does not divide the ring.
const ODD: usize = 7777;
/// How long a writer must have been unable to write to be taken for waiting.
const STUCK: Duration = Duration::from_millis(500);
/// How long a reader sleeps meanwhile.
const ASLEEP: Duration = Duration::from_millis(1500);
/// More than all buffers between two ends.
const FLOOD: usize = 1 << 20;
/// Pause of a writer before an urgent byte. AF_SMC takes the byte for an ordinary one if the kernel is
/// just reading earlier announced bytes (`docs/linux.md`).
const BEFORE_URGENT: Duration = Duration::from_millis(100);
/// Small reads of a reader after its sleep; each takes `SIP` bytes.
const SIPS: usize = 40;
const SIP: usize = 1000;

/// An end of a connection, with digests of the bytes both ways.
pub(super) struct Talk<'a> {
    pub(super) line: &'a Line,
    pub(super) seed: u64,
    sent: Digest,
    received: Digest,
    last: Option<Instant>,
    pause: Duration,
    pub(super) note: String,
}

impl<'a> Talk<'a> {
    pub(super) fn new(line: &'a Line, seed: u64) -> Talk<'a> {
        let (sent, received) = (Digest::default(), Digest::default());
        let (last, pause) = (None, Duration::ZERO);
        Talk { line, seed, sent, received, last, pause, note: String::new() }
    }

    pub(super) fn into_report(self, report: &mut Report) {
        (report.sent, report.sent_digest) = (self.sent.len(), self.sent.value());
        (report.received, report.received_digest) = (self.received.len(), self.received.value());
        report.pause = self.pause.as_millis() as u64;
        report.note = self.note;
    }

    fn pattern(&self, len: usize) -> Vec<u8> {
        let mut piece = vec![0; len];
        bytes::fill(self.seed, self.sent.len() as usize, &mut piece);
        piece
    }

    /// Sends the next `len` bytes of the pattern.
    pub(super) fn send(&mut self, len: usize) -> io::Result<()> {
        let mut left = len;
        while left > 0 {
            let piece = self.pattern(left.min(PIECE));
            let mut rest = piece.as_slice();
            while !rest.is_empty() {
                let n = self.line.send(rest)?;
                self.sent.update(&rest[..n]);
                rest = &rest[n..];
            }
            left -= piece.len();
        }
        Ok(())
    }

    /// Receives some bytes, at most `most`, and checks them against the next of the pattern.
    pub(super) fn recv(&mut self, most: usize) -> io::Result<usize> {
        let mut buf = vec![0; most.min(PIECE)];
        let n = self.line.recv(&mut buf)?;
        let mut expected = vec![0; n];
        bytes::fill(self.seed, self.received.len() as usize, &mut expected);
        if let Some((at, ..)) = bytes::difference(&buf[..n], &expected) {
            let at = self.received.len() as usize + at;
            return Err(io::Error::other(format!("byte {at} is not what was sent")));
        }
        self.received.update(&expected);
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            self.pause = self.pause.max(now - last);
        }
        Ok(n)
    }

    /// Receives exactly `len` bytes.
    pub(super) fn receive(&mut self, len: usize) -> io::Result<()> {
        let mut left = len;
        while left > 0 {
            match self.recv(left)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => left -= n,
            }
        }
        Ok(())
    }

    /// Receives until the end of data: how many bytes.
    pub(super) fn drain(&mut self) -> io::Result<u64> {
        let before = self.received.len();
        while self.recv(PIECE)? > 0 {}
        Ok(self.received.len() - before)
    }

    fn end(&mut self) -> io::Result<()> {
        match self.recv(PIECE)? {
            0 => Ok(()),
            n => Err(io::Error::other(format!("{n} bytes instead of the end of data"))),
        }
    }

    /// Carries out the order; `first` is the client.
    pub(super) fn play(&mut self, cell: &str, len: usize, first: bool) -> io::Result<()> {
        match cell {
            "ping" | "many" => self.echo(len, len, first)?,
            "byte" => (0..20).try_for_each(|_| self.echo(1, 1, first))?,
            "bulk" => self.both(first, |talk, acts| talk.bulk(len, acts))?,
            "wrap" => self.echo(len, ODD, first)?,
            "window" => self.both(first, |talk, acts| talk.window(acts))?,
            "half" => return self.half(len, first),
            // Each of these ends its own connection.
            "abort" => return self.abort(first),
            "turned-abort" => return self.abort(!first),
            "urgent" => self.both(first, |talk, acts| talk.urgent(acts))?,
            "hold" => {
                self.echo(len, len, first)?;
                return self.end();
            }
            "until" => self.until(first)?,
            "stream" => self.stream(len, first)?,
            "rounds" => self.rounds(len, first)?,
            "stay" if first => {
                thread::sleep(LIMIT);
                return Ok(());
            }
            "stay" => return self.end(),
            "flood" => return self.flow(first),
            "pour" => return self.flow(!first),
            _ => return Err(io::Error::other(format!("no cell {cell:?}"))),
        }
        self.part(first)
    }

    /// The client ends the connection, and the server follows.
    fn part(&mut self, first: bool) -> io::Result<()> {
        if first {
            self.line.shutdown(Shutdown::Write)?;
            self.end()
        } else {
            self.end()?;
            self.line.shutdown(Shutdown::Write)
        }
    }

    /// One end acts, then the other.
    fn both(
        &mut self,
        first: bool,
        mut act: impl FnMut(&mut Self, bool) -> io::Result<()>,
    ) -> io::Result<()> {
        act(self, first)?;
        act(self, !first)
    }

    fn echo(&mut self, len: usize, piece: usize, first: bool) -> io::Result<()> {
        let mut left = len;
        while left > 0 {
            let now = left.min(piece);
            if first {
                self.send(now)?;
                self.receive(now)?;
            } else {
                self.receive(now)?;
                self.send(now)?;
            }
            left -= now;
        }
        Ok(())
    }

    /// Bytes there and back until the client finds [`ENOUGH`].
    fn until(&mut self, first: bool) -> io::Result<()> {
        if first {
            while !Path::new(ENOUGH).exists() {
                self.echo(PIECE, PIECE, true)?;
            }
            return Ok(());
        }
        loop {
            match self.recv(PIECE)? {
                0 => return Ok(()),
                n => self.send(n)?,
            }
        }
    }

    /// Bytes in one direction, confirmed by a byte in the other.
    fn bulk(&mut self, len: usize, acts: bool) -> io::Result<()> {
        let start = Instant::now();
        // A pause in the other direction is none in this one.
        self.last = None;
        if acts {
            self.send(len)?;
            self.receive(1)?;
            let rate = len as f64 / start.elapsed().as_secs_f64() / 1e6;
            self.note += &format!("{rate:.1} MB/s ");
            return Ok(());
        }
        self.receive(len)?;
        self.send(1)
    }

    /// The writer writes until the ring is full, while the reader sleeps.
    fn window(&mut self, acts: bool) -> io::Result<()> {
        if !acts {
            thread::sleep(ASLEEP);
            for _ in 0..SIPS {
                self.receive(SIP)?;
                thread::sleep(Duration::from_millis(1));
            }
            self.receive(FLOOD - SIPS * SIP)?;
            return self.send(1);
        }
        self.line.hold_nothing_back();
        self.line.set_nonblocking(true)?;
        let (mut count, mut since) = (0, Instant::now());
        while since.elapsed() < STUCK && count < FLOOD {
            let piece = self.pattern(PIECE.min(FLOOD - count));
            match self.line.send(&piece) {
                Ok(n) => {
                    self.sent.update(&piece[..n]);
                    (count, since) = (count + n, Instant::now());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error),
            }
        }
        self.line.set_nonblocking(false)?;
        if count == FLOOD {
            return Err(io::Error::other("the writer never had to wait"));
        }
        self.note += &format!("waits after {} KiB ", count >> 10);
        self.send(FLOOD - count)?;
        self.receive(1)
    }

    fn half(&mut self, len: usize, first: bool) -> io::Result<()> {
        if first {
            self.send(len)?;
            self.line.shutdown(Shutdown::Write)?;
            // Nothing can be sent any more.
            if self.line.send(b"x").is_ok() {
                return Err(io::Error::other("sent after the end of data"));
            }
            let n = self.drain()?;
            return if n == len as u64 { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) };
        }
        let n = self.drain()? as usize;
        // The other direction lives on independently.
        thread::sleep(Duration::from_millis(100));
        self.send(n)?;
        self.line.shutdown(Shutdown::Write)
    }

    /// One end goes away with unread bytes.
    fn abort(&mut self, acts: bool) -> io::Result<()> {
        if acts {
            self.receive(1)?;
            // The other bytes have come with the first one, or come now. Dropping the line closes the
            // connection.
            thread::sleep(Duration::from_millis(300));
            return Ok(());
        }
        self.send(10_000)?;
        let start = Instant::now();
        let ended = self.drain();
        self.note += &format!("after {} ms ", start.elapsed().as_millis());
        // AF_SMC reports "end of data" to a reader, and keeps the error.
        let error = match ended {
            Err(error) => Some(error),
            Ok(_) => self.line.take_error()?,
        };
        match error {
            Some(error) if error.kind() == ErrorKind::ConnectionReset => Ok(()),
            Some(error) => Err(error),
            None => Err(io::Error::other("the end of data instead of a reset")),
        }
    }

    fn urgent(&mut self, acts: bool) -> io::Result<()> {
        if acts {
            self.send(3)?;
            thread::sleep(BEFORE_URGENT);
            self.line.send_urgent(b'!')?;
            self.send(1000)?;
            return self.receive(1);
        }
        let end = Instant::now() + LIMIT;
        let byte = loop {
            match self.line.recv_urgent()? {
                Some(byte) => break byte,
                None if Instant::now() > end => return Err(ErrorKind::TimedOut.into()),
                None => thread::sleep(Duration::from_millis(2)),
            }
        };
        if byte != b'!' {
            return Err(io::Error::other(format!("{byte:#04x} is not the urgent byte")));
        }
        self.receive(1003)?;
        self.send(1)
    }

    /// Bytes from the client to the server.
    fn stream(&mut self, len: usize, first: bool) -> io::Result<()> {
        let mut piece = vec![7; STREAM];
        let (mut left, start) = (len, Instant::now());
        while left > 0 {
            let most = left.min(STREAM);
            left -= match first {
                true => self.line.send(&piece[..most])?,
                false => self.line.recv(&mut piece[..most])?,
            };
        }
        if !first {
            return self.send(1);
        }
        self.receive(1)?;
        self.note = format!("{:.2}", len as f64 / start.elapsed().as_secs_f64() / 1e6);
        Ok(())
    }

    /// Messages there and back: the median and the 99th percentile, microseconds.
    fn rounds(&mut self, count: usize, first: bool) -> io::Result<()> {
        let mut message = [7; 64];
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            if first {
                self.line.send(&message)?;
            }
            let mut got = 0;
            while got < message.len() {
                match self.line.recv(&mut message[got..])? {
                    0 => return Err(ErrorKind::UnexpectedEof.into()),
                    n => got += n,
                }
            }
            if !first {
                self.line.send(&message)?;
            }
            times.push(start.elapsed());
        }
        times.sort_unstable();
        let at = |percent: usize| times.get(count * percent / 100).map_or(0.0, micros);
        self.note = format!("{:.1} {:.1}", at(50), at(99));
        Ok(())
    }

    /// One end sends and the other receives, up to an error. Never returns without an error.
    fn flow(&mut self, sends: bool) -> io::Result<()> {
        let mut last = Instant::now();
        let error = loop {
            let moved = if sends {
                self.send(PIECE)
            } else {
                match self.recv(PIECE) {
                    Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                    other => other.map(drop),
                }
            };
            match moved {
                Ok(()) => last = Instant::now(),
                Err(error) => break error,
            }
        };
        self.note += &format!("{} ms after the last byte ", last.elapsed().as_millis());
        Err(error)
    }
}

fn micros(time: &Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
