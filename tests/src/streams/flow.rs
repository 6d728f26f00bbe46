// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One stream: the bytes there, and their echo.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guest_driver::SmcStream;

use crate::bytes::{difference, fill};

/// Bytes of one write of a stream.
const BLOCK: usize = 16 << 10;
/// Pause between two writes, so an emulated processor has time for more than copies.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of a request, and of its response.
const REQUEST: usize = 64;
/// Between a response and the next request.
const THINK: Duration = Duration::from_millis(10);

/// Either kind of connection.
pub(super) trait Line: Send + Sync + 'static {
    /// Whether the connection is TCP and never anything else.
    fn is_tcp_alone(&self) -> bool;
    /// Reads; 0 at the end.
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize>;
    /// Writes every byte of `bytes`.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;
    /// Ends the own direction.
    fn end(&self) -> io::Result<()>;
}

/// Both kinds of streams have the same calls.
macro_rules! lines {
    ($($stream:ty: $is_tcp_alone:literal;)*) => {
        $(impl Line for $stream {
            fn is_tcp_alone(&self) -> bool {
                $is_tcp_alone
            }

            fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
                Read::read(&mut &*self, buf)
            }

            fn send(&self, bytes: &[u8]) -> io::Result<()> {
                Write::write_all(&mut &*self, bytes)
            }

            fn end(&self) -> io::Result<()> {
                self.shutdown(Shutdown::Write)
            }
        })*
    };
}

lines! {
    SmcStream: false;
    TcpStream: true;
}

/// The longest times without bytes, microseconds: of SMC's connections, and of TCP alone.
#[derive(Clone, Default)]
pub(super) struct Pauses(Arc<[AtomicU64; 2]>);

impl Pauses {
    fn note(&self, line: &dyn Line, pause: Duration) {
        let [smc, tcp] = &*self.0;
        let longest = if line.is_tcp_alone() { tcp } else { smc };
        longest.fetch_max(pause.as_micros() as u64, Ordering::Relaxed);
    }

    /// The pauses since the last call, as text.
    pub(super) fn take(&self) -> String {
        let [smc, tcp] = [0, 1].map(|n: usize| self.0[n].swap(0, Ordering::Relaxed) / 1000);
        format!("pauses {smc} ms, by TCP alone {tcp} ms")
    }
}

/// Echoes, up to the end of the data.
pub(super) fn echo(line: &impl Line, pauses: &Pauses) -> io::Result<()> {
    let (mut buf, mut last) = (vec![0; BLOCK], Instant::now());
    loop {
        let n = line.recv(&mut buf)?;
        pauses.note(line, last.elapsed());
        last = Instant::now();
        match n {
            0 => {
                // The client may have gone.
                let _ = line.end();
                return Ok(());
            }
            n => line.send(buf.get(..n).unwrap_or_default())?,
        }
    }
}

/// A client's use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Sends, and reads the echo in another thread.
    Stream,
    /// Sends a request and awaits the response.
    Requests,
}

/// A connection with its threads.
pub(super) struct Flow {
    kind: Kind,
    back: Arc<AtomicUsize>,
    /// None if the writing thread reads, too.
    reader: Option<JoinHandle<Result<Duration, String>>>,
    writer: JoinHandle<Result<usize, String>>,
}

impl Flow {
    pub(super) fn start(
        line: Arc<dyn Line>,
        kind: Kind,
        seed: u64,
        stop: &Arc<AtomicBool>,
        pauses: &Pauses,
    ) -> Flow {
        let (back, stop) = (Arc::new(AtomicUsize::new(0)), stop.clone());
        let reads = Reader { line: line.clone(), seed, back: back.clone(), pauses: pauses.clone() };
        let (reader, writer) = match kind {
            Kind::Stream => {
                let reader = thread::spawn(move || reads.read());
                (Some(reader), thread::spawn(move || write(&*line, seed, &stop)))
            }
            Kind::Requests => (None, thread::spawn(move || reads.ask(&stop))),
        };
        Flow { kind, back, reader, writer }
    }

    /// Bytes echoed so far.
    pub(super) fn back(&self) -> usize {
        self.back.load(Ordering::Relaxed)
    }

    /// Bytes enough to show a working connection.
    pub(super) fn some(&self) -> usize {
        match self.kind {
            Kind::Stream => 128 << 10,
            Kind::Requests => 8 * REQUEST,
        }
    }

    /// Whether the flow has ended, by itself or by a failure.
    pub(super) fn is_over(&self) -> bool {
        self.writer.is_finished() || self.reader.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Waits for the flow's end. Returns the number of echoed bytes, equal to the bytes sent, and the
    /// longest time without any.
    pub(super) fn end(self) -> Result<(usize, Duration), String> {
        let ended = |what: &str| format!("{what} has panicked");
        let sent = self.writer.join().map_err(|_| ended("a writer"))??;
        let pause = match self.reader {
            Some(reader) => reader.join().map_err(|_| ended("a reader"))??,
            None => Duration::ZERO,
        };
        match self.back.load(Ordering::Relaxed) {
            received if received == sent => Ok((sent, pause)),
            received => Err(format!("{received} bytes of {sent} came back")),
        }
    }
}

fn write(line: &dyn Line, seed: u64, stop: &AtomicBool) -> Result<usize, String> {
    let (mut block, mut done) = (vec![0; BLOCK], 0);
    while !stop.load(Ordering::Relaxed) {
        fill(seed, done, &mut block);
        line.send(&block).map_err(|error| format!("stream {seed}: write: {error}"))?;
        done += block.len();
        thread::sleep(PAUSE);
    }
    line.end().map_err(|error| format!("stream {seed}: shutdown: {error}"))?;
    Ok(done)
}

/// Reads and checks the echo.
struct Reader {
    line: Arc<dyn Line>,
    seed: u64,
    back: Arc<AtomicUsize>,
    pauses: Pauses,
}

impl Reader {
    /// Reads to the end. Returns the longest time without any bytes.
    fn read(&self) -> Result<Duration, String> {
        let mut buf = vec![0; BLOCK];
        let (mut done, mut last, mut longest) = (0, Instant::now(), Duration::ZERO);
        loop {
            let n = self.some(&mut buf, done)?;
            let pause = last.elapsed();
            self.pauses.note(&*self.line, pause);
            (longest, last) = (longest.max(pause), Instant::now());
            if n == 0 {
                return Ok(longest);
            }
            done += n;
        }
    }

    /// Sends requests and awaits the responses, one after the other, until the stop. Returns the bytes
    /// echoed.
    fn ask(&self, stop: &AtomicBool) -> Result<usize, String> {
        let (mut buf, mut done) = ([0; REQUEST], 0);
        let failed = |what: &str, error| format!("requests {}: {what}: {error}", self.seed);
        while !stop.load(Ordering::Relaxed) {
            fill(self.seed, done, &mut buf);
            let asked = Instant::now();
            self.line.send(&buf).map_err(|error| failed("write", error))?;
            let end = done + REQUEST;
            while done < end {
                match self.some(buf.get_mut(..end - done).unwrap_or_default(), done)? {
                    0 => return Err(format!("requests {}: the end after {done}", self.seed)),
                    n => done += n,
                }
            }
            self.pauses.note(&*self.line, asked.elapsed());
            thread::sleep(THINK);
        }
        self.line.end().map_err(|error| failed("shutdown", error))?;
        match self.some(&mut buf, done)? {
            0 => Ok(done),
            n => Err(format!("requests {}: {n} bytes too many", self.seed)),
        }
    }

    /// Reads some bytes and checks them against the pattern at a place.
    fn some(&self, buf: &mut [u8], at: usize) -> Result<usize, String> {
        let (line, seed) = (&self.line, self.seed);
        let n = line.recv(buf);
        let n = n.map_err(|error| format!("stream {seed}: read after {at} bytes: {error}"))?;
        let got = buf.get(..n).unwrap_or_default();
        let mut expected = vec![0; got.len()];
        fill(seed, at, &mut expected);
        if let Some((place, byte, wanted)) = difference(got, &expected) {
            return Err(format!("stream {seed}: byte {} is {byte}, not {wanted}", at + place));
        }
        self.back.store(at + n, Ordering::Relaxed);
        Ok(n)
    }
}
