// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The limit: a ring of bytes in memory shared by two processes, and nothing around it. No
//! handshake, no wake-up, no check of the other side's words; both sides spin.
//!
//! One memory file holds two rings of [`CAPACITY`] bytes, one per direction:
//!
//! ```text
//! 0 connected | per direction: head (written by the sender), tail (written by the receiver), closed
//! 4096 bytes towards the server | bytes towards the client
//! ```

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ism_sys::{OutOfBounds, SharedMem, SharedSlice, sealed_memfd};
use rustix::fd::OwnedFd;

use super::{AsyncStream, NoPoll, Stream, Transport};

/// Bytes of a ring, as many as the largest DMB has.
pub(crate) const CAPACITY: usize = 1 << 20;
/// Where the rings start.
const RINGS: usize = 4096;
/// Bytes of the memory file.
const SIZE: usize = RINGS + 2 * CAPACITY;
/// Rounds of spinning before yielding the processor. The number matters only if there are fewer
/// processors than spinning threads.
const SPINS: u32 = 1_000;

/// Raw rings.
pub(crate) struct Ring;

/// A memory file before the client's arrival.
pub(crate) struct RingListener {
    fd: OwnedFd,
}

/// One end of a pair of rings.
pub(crate) struct RingStream {
    out: Direction,
    back: Direction,
}

/// One ring, seen from one end. Words written by different sides are 128 bytes apart, so no cache
/// line (or pair of lines) is shared.
struct Direction {
    words: SharedSlice,
    bytes: SharedSlice,
    /// Own position: head for the sender, tail for the receiver.
    at: u64,
    /// The other side's position when last seen.
    seen: u64,
}

const HEAD: usize = 0;
const TAIL: usize = 128;
const CLOSED: usize = 256;

fn bug(error: OutOfBounds) -> io::Error {
    io::Error::other(error)
}

impl Direction {
    fn new(memory: &SharedSlice, index: usize) -> io::Result<Direction> {
        let words = memory.slice(512 + 512 * index, 512).map_err(bug)?;
        let bytes = memory.slice(RINGS + CAPACITY * index, CAPACITY).map_err(bug)?;
        Ok(Direction { words, bytes, at: 0, seen: 0 })
    }

    fn word(&self, offset: usize) -> io::Result<&AtomicU64> {
        self.words.atomic_u64(offset).map_err(bug)
    }

    /// Position in the ring, and bytes up to its end.
    fn place(&self) -> (usize, usize) {
        let place = (self.at % CAPACITY as u64) as usize;
        (place, CAPACITY - place)
    }

    fn send(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.used() + buf.len() > CAPACITY {
            let mut spins = 0;
            loop {
                // Acquire: partner of the receiver's Release of the tail, after copying out.
                self.seen = self.word(TAIL)?.load(Ordering::Acquire);
                if self.used() < CAPACITY {
                    break;
                }
                relax(&mut spins);
            }
        }
        let n = buf.len().min(CAPACITY - self.used());
        let (place, rest) = self.place();
        let (first, second) = buf.split_at(n.min(rest));
        let second = second.get(..n - first.len()).unwrap_or_default();
        self.bytes.copy_in(place, first).map_err(bug)?;
        self.bytes.copy_in(0, second).map_err(bug)?;
        self.at += n as u64;
        // Release: the bytes are visible before the head.
        self.word(HEAD)?.store(self.at, Ordering::Release);
        Ok(n)
    }

    fn receive(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut spins = 0;
        while self.seen == self.at {
            // Acquire: partners of the sender's Release stores. CLOSED is read before HEAD, so the
            // last bytes are visible once the end is.
            let closed = self.word(CLOSED)?.load(Ordering::Acquire) != 0;
            self.seen = self.word(HEAD)?.load(Ordering::Acquire);
            if self.seen != self.at {
                break;
            }
            if closed {
                return Ok(0);
            }
            relax(&mut spins);
        }
        let n = buf.len().min(self.used());
        let (place, rest) = self.place();
        let (first, second) = buf.split_at_mut(n.min(rest));
        let second = second.get_mut(..n - first.len()).unwrap_or_default();
        self.bytes.copy_out(place, first).map_err(bug)?;
        self.bytes.copy_out(0, second).map_err(bug)?;
        self.at += n as u64;
        // Release: the copy is over before the space is free.
        self.word(TAIL)?.store(self.at, Ordering::Release);
        Ok(n)
    }

    /// Bytes between the two positions.
    fn used(&self) -> usize {
        (self.at.abs_diff(self.seen) as usize).min(CAPACITY)
    }

    fn close(&self) -> io::Result<()> {
        // Release: all heads before are visible when the end is.
        self.word(CLOSED)?.store(1, Ordering::Release);
        Ok(())
    }
}

fn relax(spins: &mut u32) {
    *spins += 1;
    if spins.is_multiple_of(SPINS) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

impl Transport for Ring {
    type Listener = RingListener;
    type Stream = RingStream;
    type Poll = NoPoll;

    fn listen(&self) -> io::Result<(RingListener, String)> {
        let fd = sealed_memfd("smc-perf-ring", SIZE as u64)?;
        let address = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        Ok((RingListener { fd }, address))
    }

    fn accept(&self, listener: &RingListener) -> io::Result<RingStream> {
        let memory = SharedMem::from_fd(&listener.fd, SIZE)?.slice(0, SIZE).map_err(bug)?;
        let connected = memory.atomic_u64(0).map_err(bug)?;
        while connected.load(Ordering::Acquire) == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        let (out, back) = (Direction::new(&memory, 1)?, Direction::new(&memory, 0)?);
        Ok(RingStream { out, back })
    }

    fn connect(&self, address: &str) -> io::Result<RingStream> {
        let file = std::fs::File::options().read(true).write(true).open(address)?;
        let memory = SharedMem::from_fd(&file, SIZE)?.slice(0, SIZE).map_err(bug)?;
        memory.atomic_u64(0).map_err(bug)?.store(1, Ordering::Release);
        let (out, back) = (Direction::new(&memory, 0)?, Direction::new(&memory, 1)?);
        Ok(RingStream { out, back })
    }

    fn poll(&self) -> io::Result<NoPoll> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Read for RingStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.back.receive(buf)
    }
}

impl Write for RingStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.out.send(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for RingStream {
    fn set_nonblocking(&self, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn send_at_once(&self) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) -> io::Result<()> {
        self.out.close()
    }

    fn readiness_fd(&self) -> io::Result<BorrowedFd<'_>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn into_tokio(self) -> io::Result<Box<dyn AsyncStream>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Drop for RingStream {
    fn drop(&mut self) {
        let _ = self.out.close();
    }
}
