// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard input to the peer, and the peer to standard output, at the same time.

use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use guest_driver::SmcStream;
use ism_sys::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes to move at a time, and the requested capacity of pipes.
const CHUNK: usize = 256 << 10;
/// How often to check the connection while no input arrives.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Bytes moved in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// How the receiving direction has ended, for the sender.
struct Over {
    /// Signalled when the connection has ended: there is no use in waiting for input.
    ended: EventFd,
    /// Set before `ended` if bytes could not be received: there is no use in sending either.
    failed: AtomicBool,
}

/// Moves bytes both ways until both directions have ended, and the peer has read everything.
///
/// # Errors
/// The connection failed, or cannot send although the input has more; the peer does not read for
/// `timeout` after the end; or standard input or output failed.
pub(super) fn both_ways(stream: &SmcStream, timeout: Duration) -> io::Result<Moved> {
    widen(io::stdin().as_fd());
    widen(io::stdout().as_fd());
    let over = Over { ended: EventFd::new()?, failed: AtomicBool::new(false) };
    let input = io::stdin();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0;
            (send(input.as_fd(), stream, &over, &mut sent), sent)
        });
        let received = receive(stream);
        if received.is_err() || is_gone(stream) {
            over.failed.store(received.is_err(), Ordering::Release);
            over.ended.signal();
        }
        let (end, sent) = sender
            .join()
            .unwrap_or_else(|_| (Err(io::Error::other("the sending thread panicked")), 0));
        let both = received.and_then(|received| {
            end?;
            stream.linger(timeout)?;
            Ok(Moved { received, sent })
        });
        both.map_err(|error| {
            io::Error::new(error.kind(), format!("{error}, after {sent} bytes were sent"))
        })
    })
}

/// Pipes hold 64 KiB by default: more lets both sides work at a time.
fn widen(fd: BorrowedFd<'_>) {
    // Not a pipe, or beyond the user's limit: the old size works, too.
    let _ = rustix::pipe::fcntl_setpipe_size(fd, CHUNK);
}

fn receive(stream: &SmcStream) -> io::Result<u64> {
    let mut out = io::stdout().lock();
    let mut buf = vec![0u8; CHUNK];
    let mut total = 0;
    loop {
        let n = stream.recv(&mut buf)?;
        if n == 0 {
            out.flush()?;
            return Ok(total);
        }
        // Straight to the descriptor: the standard library's buffer would be flushed at line ends.
        let mut rest = buf.get(..n).unwrap_or_default();
        while !rest.is_empty() {
            let written = retry(|| rustix::io::write(&out, rest))?;
            rest = rest.get(written..).unwrap_or_default();
        }
        total += n as u64;
    }
}

/// Sends the input to its end, and counts in `sent`. An earlier end of the connection is an error:
/// the peer has not got the rest.
fn send(input: BorrowedFd<'_>, stream: &SmcStream, over: &Over, sent: &mut u64) -> io::Result<()> {
    let mut buf = vec![0u8; CHUNK];
    while wait_for_input(input, stream, over)? {
        let n = retry(|| rustix::io::read(input, &mut buf))?;
        if n == 0 {
            // The peer may be gone already: all bytes were written before, and `linger` tells.
            let _ = stream.shutdown(Shutdown::Write);
            break;
        }
        let mut rest = buf.get(..n).unwrap_or_default();
        while !rest.is_empty() {
            let done = stream.send(rest)?;
            *sent += done as u64;
            rest = rest.get(done..).unwrap_or_default();
        }
    }
    Ok(())
}

/// `false`: the connection is over, without pending input or without use for more input.
fn wait_for_input(input: BorrowedFd<'_>, stream: &SmcStream, over: &Over) -> io::Result<bool> {
    let pause = Timespec {
        tv_sec: CHECK_INTERVAL.as_secs() as i64,
        tv_nsec: CHECK_INTERVAL.subsec_nanos().into(),
    };
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(input, PollFlags::IN),
            PollFd::from_borrowed_fd(over.ended.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&pause)) {
            Ok(0) if is_gone(stream) => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let [input, ended] = fds.map(|fd| !fd.revents().is_empty());
        if ended && over.failed.load(Ordering::Acquire) {
            return Ok(false);
        }
        if input || ended {
            return Ok(input);
        }
    }
}

/// Whether both directions have ended, or the connection broke.
fn is_gone(stream: &SmcStream) -> bool {
    let Ok(fd) = stream.pollable() else { return false };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::HUP | PollFlags::ERR;
    poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0) && fds[0].revents().intersects(gone)
}

fn retry(mut call: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}
