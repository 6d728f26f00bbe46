// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A descriptor by which the kernel shows the readiness of a connection: one end of a Unix socket pair.
//!
//! A stream pair can show the same states as a TCP socket: readable, writable, end of data (RDHUP),
//! hang-up. The application registers its end wherever it likes, and the kernel does level and edge
//! triggering, nesting and sharing. When the readiness of the connection changes, the library writes a
//! byte to its own end, fills or drains it, shuts it down or closes it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ism_sys::{is_free, lock, move_out_of_the_way};

/// The readiness of a connection at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ready {
    /// A read would not block.
    pub(crate) readable: bool,
    /// A write would not block.
    pub(crate) writable: bool,
    /// The peer sends no more.
    pub(crate) read_closed: bool,
    /// Nothing goes either way any more.
    pub(crate) hang_up: bool,
    /// Both directions have ended. `hang_up` is also true when only the peer has closed.
    pub(crate) both_ended: bool,
    /// The connection ended abnormally.
    pub(crate) failed: bool,
    /// How many bytes have come since the connection began.
    pub(crate) arrived: u64,
}

#[derive(Debug)]
struct Shown {
    ours: Option<UnixStream>,
    ready: Ready,
}

/// The pair and the readiness shown by it.
#[derive(Debug)]
pub(crate) struct ReadinessFd {
    application: UnixStream,
    shown: Mutex<Shown>,
    /// The pair shows at once the end of unread bytes, and a hang-up as TCP does.
    exact: AtomicBool,
    /// The background thread watches the line of the connection, by the line of its slab. SeqCst: set before
    /// the words are read; a new ring is stored, then the mark is read.
    marked: AtomicBool,
}

/// Number of pairs of this process.
static PAIRS: AtomicUsize = AtomicUsize::new(0);

impl Drop for ReadinessFd {
    fn drop(&mut self) {
        PAIRS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ReadinessFd {
    /// Number of pairs of this process.
    pub(crate) fn count() -> usize {
        PAIRS.load(Ordering::Relaxed)
    }

    /// A pair that shows "writable".
    pub(crate) fn new() -> std::io::Result<ReadinessFd> {
        let making = ism_sys::making();
        let (ours, application) = UnixStream::pair()?;
        let [ours, application] =
            [ours, application].map(|end| UnixStream::from(move_out_of_the_way(end.into())));
        drop(making);
        ours.set_nonblocking(true)?;
        application.set_nonblocking(true)?;
        // The kernel rounds up to its minimum: a few bytes then fill the pair.
        rustix::net::sockopt::set_socket_send_buffer_size(&application, 1)?;
        let ready = Ready { writable: true, ..Ready::default() };
        let shown = Mutex::new(Shown { ours: Some(ours), ready });
        PAIRS.fetch_add(1, Ordering::Relaxed);
        let (exact, marked) = Default::default();
        Ok(ReadinessFd { application, shown, exact, marked })
    }

    /// Makes the pair follow the state of a TCP socket at every moment, at the cost of a system call
    /// for each read of the last bytes.
    pub(crate) fn make_exact(&self) {
        self.exact.store(true, Ordering::Relaxed);
    }

    /// Whether [`ReadinessFd::make_exact`] was called.
    pub(crate) fn is_exact(&self) -> bool {
        self.exact.load(Ordering::Relaxed)
    }

    /// Notes that the background thread watches the line. `false`: it does so already.
    pub(crate) fn mark(&self) -> bool {
        !self.marked.swap(true, Ordering::SeqCst)
    }

    /// Undoes [`ReadinessFd::mark`].
    pub(crate) fn unmark(&self) {
        self.marked.store(false, Ordering::SeqCst);
    }

    /// Whether [`ReadinessFd::mark`] was called.
    pub(crate) fn is_marked(&self) -> bool {
        self.marked.load(Ordering::SeqCst)
    }

    /// The end that the application polls.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.application.as_fd()
    }

    /// Shows a failure no more: the application knows of it.
    pub(crate) fn clear_error(&self) {
        // The kernel shows POLLERR until the error is read.
        let _ = rustix::net::sockopt::socket_error(&self.application);
    }

    /// Whether no thread holds the lock.
    pub(crate) fn is_unlocked(&self) -> bool {
        is_free(&self.shown)
    }

    /// The descriptors of both ends.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let ours = lock(&self.shown).ours.as_ref().map(AsRawFd::as_raw_fd);
        ours.into_iter().chain([self.application.as_raw_fd()]).collect()
    }

    /// Makes the pair show `ready`.
    pub(crate) fn show(&self, ready: Ready) {
        let mut shown = lock(&self.shown);
        if shown.ready == ready {
            return;
        }
        let Some(ours) = &shown.ours else { return };
        // WouldBlock: the pair is full or empty already.
        let hang_up = if self.is_exact() { ready.both_ended } else { ready.hang_up };
        if hang_up {
            if ready.failed {
                // The kernel shows POLLERR at an end whose peer is closed with unread bytes.
                let _ = (&mut &self.application).write(&[0]);
            }
            shown.ours = None;
            shown.ready = ready;
            return;
        }
        if ready.readable != shown.ready.readable {
            if ready.readable {
                let _ = (&mut &*ours).write(&[1]);
            } else if !ready.read_closed {
                drain(&self.application);
            }
        } else if ready.readable && ready.arrived != shown.ready.arrived && self.is_exact() {
            show_edge(ours, &self.application);
        }
        if ready.read_closed && !shown.ready.read_closed {
            let _ = ours.shutdown(std::net::Shutdown::Write);
        }
        if ready.writable != shown.ready.writable {
            if ready.writable {
                drain(ours);
            } else {
                while matches!((&mut &self.application).write(&[0]), Ok(n) if n > 0) {}
            }
        }
        shown.ready = ready;
    }
}

/// Has the application's readable end show a new arrival: edge-triggered sets report each one.
fn show_edge(mut ours: &UnixStream, application: &UnixStream) {
    if ours.write(&[1]).is_err() {
        // The pair is full.
        drain(application);
        let _ = ours.write(&[1]);
    }
}

fn drain(mut end: &UnixStream) {
    let mut sink = [0u8; 256];
    // A read takes all there is, if the buffer has room.
    while matches!(end.read(&mut sink), Ok(n) if n == sink.len()) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};

    fn flags(readiness: &ReadinessFd) -> PollFlags {
        let all = PollFlags::IN | PollFlags::OUT | PollFlags::RDHUP;
        let mut fds = [PollFd::from_borrowed_fd(readiness.as_fd(), all)];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&zero)).unwrap();
        fds[0].revents()
    }

    #[test]
    fn every_combination_of_readable_and_writable_can_be_shown_in_any_order() {
        let readiness = ReadinessFd::new().unwrap();
        let states = [(false, true), (true, true), (true, false), (false, false)];
        for from in states {
            for to in states {
                for (readable, writable) in [from, to] {
                    readiness.show(Ready { readable, writable, ..Ready::default() });
                    assert_eq!(flags(&readiness).contains(PollFlags::IN), readable);
                    assert_eq!(flags(&readiness).contains(PollFlags::OUT), writable);
                }
            }
        }
    }

    #[test]
    fn a_half_close_shows_rdhup_and_stays_readable() {
        let readiness = ReadinessFd::new().unwrap();
        let ended = Ready { readable: true, writable: true, read_closed: true, ..Ready::default() };
        readiness.show(ended);
        let shown = flags(&readiness);
        assert!(shown.contains(PollFlags::IN | PollFlags::RDHUP | PollFlags::OUT));
        assert!(!shown.contains(PollFlags::HUP));
    }

    #[test]
    fn the_end_shows_hup() {
        let readiness = ReadinessFd::new().unwrap();
        let ended = Ready { readable: true, writable: true, read_closed: true, ..Ready::default() };
        readiness.show(Ready { hang_up: true, both_ended: true, ..ended });
        assert!(flags(&readiness).contains(PollFlags::HUP | PollFlags::IN));
        assert!(!flags(&readiness).contains(PollFlags::ERR));
    }

    #[test]
    fn a_failure_shows_err() {
        let readiness = ReadinessFd::new().unwrap();
        readiness.show(Ready { hang_up: true, both_ended: true, failed: true, ..Ready::default() });
        assert!(flags(&readiness).contains(PollFlags::HUP | PollFlags::ERR));
    }

    #[test]
    fn an_exact_pair_shows_an_edge_for_each_arrival() {
        use rustix::event::epoll;
        let readiness = ReadinessFd::new().unwrap();
        readiness.make_exact();
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let events = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&set, readiness.as_fd(), epoll::EventData::new_u64(0), events).unwrap();
        let edges = || {
            let mut list = Vec::with_capacity(1);
            let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&set, rustix::buffer::spare_capacity(&mut list), Some(&zero)).unwrap()
        };
        for arrived in 1..3000 {
            readiness.show(Ready { readable: true, writable: true, arrived, ..Ready::default() });
            assert_eq!((edges(), edges()), (1, 0), "{arrived}");
        }
        assert!(flags(&readiness).contains(PollFlags::OUT));
        readiness.show(Ready { writable: true, arrived: 2999, ..Ready::default() });
        assert!(!flags(&readiness).contains(PollFlags::IN));
    }

    #[test]
    fn an_exact_pair_hangs_up_when_both_ends_have_closed() {
        let readiness = ReadinessFd::new().unwrap();
        readiness.make_exact();
        let closed = Ready { readable: true, read_closed: true, hang_up: true, ..Ready::default() };
        readiness.show(closed);
        assert!(flags(&readiness).contains(PollFlags::IN | PollFlags::RDHUP));
        assert!(!flags(&readiness).contains(PollFlags::HUP));
        readiness.show(Ready { both_ended: true, ..closed });
        assert!(flags(&readiness).contains(PollFlags::HUP));
    }
}
