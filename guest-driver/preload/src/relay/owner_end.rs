// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The owner's end of a pair, where the relay reads the program's bytes.
//!
//! A Unix socket has no RST. But the peer of a socket closed with unread bytes gets ECONNRESET. So the
//! relay always leaves one forwarded byte in the socket; [`SocketPair`] puts the first one there. The
//! program sees a reset when the relay closes the socket as it is, or when the process is killed. The
//! program reads an end of data when the relay has taken the byte before.
//!
//! [`SocketPair`]: crate::socket::pair::SocketPair

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};

use crate::sys::raw;

/// Result of a read from a socket.
pub(super) enum Received {
    Nothing,
    Bytes(usize),
    Urgent(u8),
    /// The sender has shut its direction down, or has closed.
    End,
    /// The connection is broken.
    Reset,
}

/// The owner's end of a pair.
#[derive(Debug)]
pub(super) struct OwnerEnd {
    fd: OwnedFd,
    /// The first byte in the socket is already forwarded.
    kept: bool,
}

impl OwnerEnd {
    /// The end of a new pair. The pair starts with a byte other than the program's.
    pub(super) fn new(fd: OwnedFd) -> OwnerEnd {
        OwnerEnd { fd, kept: true }
    }

    /// Takes the program's bytes, without waiting: an urgent byte alone, or bytes before the urgent
    /// byte. The last byte is taken and stays in the socket. `room` must have at least two bytes.
    pub(super) fn receive(&mut self, room: &mut [u8]) -> Received {
        loop {
            let queued = self.queued();
            if self.kept && queued <= 1 {
                match self.end() {
                    // More bytes may have come before the end.
                    Received::End | Received::Reset if self.queued() > 1 => continue,
                    end => return end,
                }
            }
            if queued == 0 {
                // This is the only reader.
                return Received::Reset;
            }
            // The forwarded byte goes, and another one stays.
            let old = usize::from(self.kept);
            let last = room.len().saturating_sub(1);
            let wanted = (queued - 1).min(last);
            let taken = match self.kept || !self.is_at_mark() {
                true if wanted > 0 => {
                    match recv(&self.fd, &mut room[..wanted], RecvFlags::DONTWAIT) {
                        Ok((n, _)) => n,
                        Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
                        Err(_) => return Received::Reset,
                    }
                }
                true => 0,
                false => return self.urgent(),
            };
            if taken > 0 {
                self.kept = false;
            }
            room.copy_within(old.min(taken)..taken, 0);
            let mut n = taken.saturating_sub(old);
            if self.is_at_mark() {
                if n > 0 {
                    return Received::Bytes(n);
                }
                continue;
            }
            let Some(byte) = self.peek() else { return Received::Reset };
            if let Some(place) = room.get_mut(n) {
                *place = byte;
                n += 1;
                self.kept = true;
            }
            return Received::Bytes(n);
        }
    }

    fn urgent(&mut self) -> Received {
        match self.peek() {
            Some(byte) => {
                self.kept = true;
                Received::Urgent(byte)
            }
            None => Received::Reset,
        }
    }

    fn peek(&self) -> Option<u8> {
        let mut byte = [0u8];
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        matches!(recv(&self.fd, &mut byte, flags), Ok((1, _))).then_some(byte[0])
    }

    fn queued(&self) -> usize {
        raw::queued_bytes(self.as_raw_fd()).unwrap_or(0)
    }

    fn is_at_mark(&self) -> bool {
        raw::is_at_mark(self.as_raw_fd())
    }

    /// Whether the program has ended its direction, and how: the kernel reports an error if the program
    /// had unread bytes.
    fn end(&self) -> Received {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut fds, Some(&zero)) {
            Ok(0) | Err(Errno::INTR) => Received::Nothing,
            // With RLIMIT_NOFILE 0 a process may not poll any descriptor.
            Err(_) => Received::Nothing,
            Ok(_) => match sockopt::socket_error(&self.fd) {
                Ok(Ok(())) => Received::End,
                _ => Received::Reset,
            },
        }
    }

    /// Whether the program has unread bytes.
    pub(super) fn has_unread(&self) -> bool {
        // The kernel counts the memory of the buffers, much more than a byte for each. The kernel wakes
        // a sender when the last buffer is read, and counts one until the wake-up is done.
        raw::unread_bytes(self.as_raw_fd()).is_ok_and(|n| n > 1)
    }

    /// Whether no process has the program's end, at the latest after `millis` milliseconds.
    pub(super) fn is_left(&self, millis: i64) -> bool {
        let limit = Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
        let mut fds = [PollFd::new(&self.fd, PollFlags::empty())];
        poll(&mut fds, Some(&limit)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Takes the kept byte, so the program reads an end of data when this end is closed.
    pub(super) fn take_kept_byte(&self) {
        if self.kept {
            let _ = recv(&self.fd, &mut [0u8], RecvFlags::DONTWAIT);
        }
    }
}

impl AsFd for OwnerEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for OwnerEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::net::{SendFlags, send};

    use super::*;
    use crate::socket::sleeper::Sleeper;

    fn pair() -> (OwnerEnd, UnixStream) {
        let (owner, mut program) = UnixStream::pair().unwrap();
        sockopt::set_socket_oobinline(&owner, true).unwrap();
        program.write_all(&[0]).unwrap();
        (OwnerEnd::new(owner.into()), program)
    }

    /// Closes the program's end. The child of a fork in another test may have a copy for a moment.
    fn close(program: UnixStream, end: &OwnerEnd) {
        drop(program);
        let mut fds = [PollFd::new(end, PollFlags::empty())];
        assert_eq!(poll(&mut fds, None), Ok(1));
    }

    /// The received bytes, urgent bytes in brackets, and the kind of end.
    fn all(end: &mut OwnerEnd, room: usize) -> (String, &'static str) {
        let mut room = vec![0; room];
        let mut came = String::new();
        loop {
            match end.receive(&mut room) {
                Received::Bytes(n) => came.push_str(std::str::from_utf8(&room[..n]).unwrap()),
                Received::Urgent(byte) => came.push_str(&format!("[{}]", char::from(byte))),
                Received::Nothing => return (came, "nothing"),
                Received::End => return (came, "end"),
                Received::Reset => return (came, "reset"),
            }
        }
    }

    #[test]
    fn each_byte_comes_once_and_at_once() {
        for room in [2, 3, 64] {
            let (mut end, mut program) = pair();
            assert_eq!(all(&mut end, room), (String::new(), "nothing"));
            for text in ["a", "b", "cd", "efghijkl", "m"] {
                program.write_all(text.as_bytes()).unwrap();
                assert_eq!(all(&mut end, room), (text.into(), "nothing"), "room for {room}");
            }
            program.write_all(b"last").unwrap();
            close(program, &end);
            assert_eq!(all(&mut end, room), ("last".into(), "end"));
        }
    }

    #[test]
    fn urgent_bytes_come_alone_and_in_their_place() {
        for room in [2, 3, 64] {
            let (mut end, mut program) = pair();
            for (before, after) in [("ab", "cd"), ("", "e"), ("f", "")] {
                program.write_all(before.as_bytes()).unwrap();
                if send(&program, b"!", SendFlags::OOB) == Err(Errno::OPNOTSUPP) {
                    return;
                }
                program.write_all(after.as_bytes()).unwrap();
                let expected = format!("{before}[!]{after}");
                assert_eq!(all(&mut end, room), (expected, "nothing"), "room for {room}");
            }
            program.shutdown(Shutdown::Write).unwrap();
            assert_eq!(all(&mut end, room), (String::new(), "end"));
        }
    }

    #[test]
    fn the_program_is_told_of_an_end_or_of_a_reset() {
        for reset in [false, true] {
            let (mut end, mut program) = pair();
            program.write_all(b"question").unwrap();
            assert_eq!(all(&mut end, 64).0, "question");
            send(&end, b"answer", SendFlags::empty()).unwrap();
            if !reset {
                end.take_kept_byte();
            }
            drop(end);
            let mut answer = [0; 6];
            program.read_exact(&mut answer).unwrap();
            let read = program.read(&mut [0]).map_err(|error| error.kind());
            assert_eq!(read, if reset { Err(ErrorKind::ConnectionReset) } else { Ok(0) });
        }
    }

    #[test]
    fn whoever_is_woken_by_the_last_read_sees_nothing_unread() {
        let (end, mut program) = pair();
        let (set, edges) = (Sleeper::new().unwrap(), libc::EPOLLOUT as u32 | libc::EPOLLET as u32);
        set.add_with(end.as_raw_fd(), edges, 1).unwrap();
        let mut found = [libc::epoll_event { events: 0, u64: 0 }; 1];
        let mut woken =
            |limit| crate::sys::epoll_wait(set.outer.as_raw_fd(), &mut found, limit, None);
        std::thread::scope(|scope| {
            scope.spawn(move || while program.read(&mut [0; 8]).unwrap() > 0 {});
            for round in 0..100_000 {
                while woken(Some(Duration::ZERO)).unwrap() > 0 {}
                send(&end, b"x", SendFlags::empty()).unwrap();
                while end.has_unread() {
                    assert!(woken(Some(Duration::from_secs(30))).unwrap() > 0, "round {round}");
                }
            }
            rustix::net::shutdown(&end, rustix::net::Shutdown::Write).unwrap();
        });
    }

    #[test]
    fn a_program_that_leaves_bytes_unread_resets() {
        let (mut end, mut program) = pair();
        program.write_all(b"bye").unwrap();
        send(&end, b"unread", SendFlags::empty()).unwrap();
        close(program, &end);
        assert_eq!(all(&mut end, 64), ("bye".into(), "reset"));
    }
}
