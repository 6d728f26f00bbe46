//! A descriptor that the kernel shows as ready when a connection is: one end of a Unix socket
//! pair.
//!
//! A stream pair can show everything that a TCP socket can: readable, writable, end of data
//! (RDHUP), hang-up. The application registers its end wherever it likes, and the kernel does level
//! and edge triggering, nesting and sharing. When the readiness of the connection changes, the
//! library writes a byte to its own end, fills or drains it, shuts it down or closes it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use crate::sys::{lock, out_of_the_way};

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
}

#[derive(Debug)]
struct Shown {
    ours: Option<UnixStream>,
    ready: Ready,
}

/// The pair and the readiness that it shows.
#[derive(Debug)]
pub(crate) struct ReadinessFd {
    application: UnixStream,
    shown: Mutex<Shown>,
}

impl ReadinessFd {
    /// A pair that shows "writable".
    pub(crate) fn new() -> std::io::Result<ReadinessFd> {
        let (ours, application) = UnixStream::pair()?;
        let [ours, application] =
            [ours, application].map(|end| UnixStream::from(out_of_the_way(end.into())));
        ours.set_nonblocking(true)?;
        application.set_nonblocking(true)?;
        // The kernel rounds up to its minimum: a few bytes then fill the pair.
        rustix::net::sockopt::set_socket_send_buffer_size(&application, 1)?;
        let ready = Ready { writable: true, ..Ready::default() };
        let shown = Mutex::new(Shown { ours: Some(ours), ready });
        Ok(ReadinessFd { application, shown })
    }

    /// The end that the application polls.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.application.as_fd()
    }

    /// Makes the pair show `ready`.
    pub(crate) fn show(&self, ready: Ready) {
        let mut shown = lock(&self.shown);
        if shown.ready == ready {
            return;
        }
        let Some(ours) = &shown.ours else { return };
        // WouldBlock means that the pair is full or empty already.
        if ready.hang_up {
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

fn drain(mut end: &UnixStream) {
    let mut sink = [0u8; 256];
    while matches!(end.read(&mut sink), Ok(n) if n > 0) {}
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
        readiness.show(Ready { readable: true, writable: true, read_closed: true, hang_up: false });
        let shown = flags(&readiness);
        assert!(shown.contains(PollFlags::IN | PollFlags::RDHUP | PollFlags::OUT));
        assert!(!shown.contains(PollFlags::HUP));
    }

    #[test]
    fn the_end_shows_hup() {
        let readiness = ReadinessFd::new().unwrap();
        readiness.show(Ready { readable: true, writable: true, read_closed: true, hang_up: true });
        assert!(flags(&readiness).contains(PollFlags::HUP | PollFlags::IN));
    }
}
