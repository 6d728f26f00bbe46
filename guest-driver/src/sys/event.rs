//! Descriptors that are waited for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// A counter that wakes who waits for it.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new counter at zero; reads and writes never block.
    ///
    /// # Errors
    /// What the kernel says (out of descriptors).
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes it readable.
    pub fn signal(&self) {
        // The only failure is a counter at its maximum: then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable; `true` if it was readable.
    pub fn clear(&self) -> bool {
        rustix::io::read(&self.0, &mut [0u8; 8]).is_ok()
    }

    /// Waits until it is readable, `false` after `timeout`. Does not clear it.
    ///
    /// # Errors
    /// What poll says.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let [state] = wait_readable([self.as_fd()], Some(timeout))?;
        Ok(state.readable || state.hang_up)
    }

    /// Another descriptor of the same counter.
    ///
    /// # Errors
    /// What the kernel says (out of descriptors).
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What a wait found about one descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// A read would not block.
    pub readable: bool,
    /// The other end is gone, or the descriptor is of no use.
    pub hang_up: bool,
}

/// Waits until one of the descriptors is readable or hung up, or `timeout` (none: for ever) is
/// over. An interrupted wait ends early with nothing ready.
///
/// # Errors
/// What poll says.
pub fn wait_readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[Readiness; N]> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN | PollFlags::RDHUP));
    let timeout = timeout.map(|t| Timespec {
        tv_sec: t.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok([Readiness::default(); N]),
        Err(error) => return Err(error.into()),
    }
    Ok(polled.map(|fd| {
        let events = fd.revents();
        let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL;
        Readiness { readable: events.contains(PollFlags::IN), hang_up: events.intersects(gone) }
    }))
}

/// A descriptor of our own for an open file that a library only shows by number.
///
/// # Errors
/// The number is not that of an open descriptor, or none is left.
pub fn duplicate(shown: &impl AsRawFd) -> io::Result<OwnedFd> {
    let raw = shown.as_raw_fd();
    if raw < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: used for the duration of one dup only. `shown` is borrowed for as long, so what it
    // owns stays open; a number that nobody owns yields EBADF and nothing else.
    let borrowed = unsafe { BorrowedFd::borrow_raw(raw) };
    borrowed.try_clone_to_owned()
}

/// Ends a socket in both directions: whoever blocks on it returns.
pub fn shut_down(socket: BorrowedFd<'_>) {
    // An error means that it is not connected any more.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_sticky_until_cleared() {
        let event = EventFd::new().unwrap();
        assert!(!event.wait(Duration::ZERO).unwrap());
        event.signal();
        event.signal();
        assert!(event.wait(Duration::from_secs(1)).unwrap());
        assert!(event.clear());
        assert!(!event.clear());
    }

    #[test]
    fn a_closed_socket_is_a_hang_up() {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let copy = duplicate(&a).unwrap();
        let [quiet] = wait_readable([copy.as_fd()], Some(Duration::ZERO)).unwrap();
        assert_eq!(quiet, Readiness::default());
        drop(b);
        let [gone] = wait_readable([copy.as_fd()], Some(Duration::from_secs(1))).unwrap();
        assert!(gone.hang_up);
    }
}
