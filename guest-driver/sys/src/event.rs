// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting for descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::interrupt::sleep_in_kernel;
use super::{out_of_the_way, timespec};

/// An eventfd(2) counter, to wake waiting threads. Reads and writes never block.
#[derive(Debug)]
pub struct EventFd(vmm_sys_util::eventfd::EventFd);

impl EventFd {
    /// A new counter at zero.
    ///
    /// # Errors
    /// The errors of eventfd(2) (out of descriptors).
    pub fn new() -> io::Result<EventFd> {
        use rustix::event::{EventfdFlags, eventfd};
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = out_of_the_way(|| eventfd(0, flags))?.into_raw_fd();
        // SAFETY: the descriptor is an eventfd without another owner.
        Ok(EventFd(unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(fd) }))
    }

    /// Makes the counter readable.
    pub fn signal(&self) {
        // The write fails only with the counter at its maximum, already readable.
        let _ = self.0.write(1);
    }

    /// Makes the counter unreadable; `true` if the counter was readable.
    pub fn clear(&self) -> bool {
        self.0.read().is_ok()
    }

    /// Waits until the counter is readable, `false` after `timeout`. Does not clear the counter.
    ///
    /// # Errors
    /// The errors of poll(2).
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let [state] = wait([(self.as_fd(), PollInterest::Read)], Some(timeout))?;
        Ok(state.readable || state.hang_up)
    }

    /// The same counter as a type of the rust-vmm crates.
    pub fn as_vmm(&self) -> &vmm_sys_util::eventfd::EventFd {
        &self.0
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `self.0` owns the descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

/// The condition for an end of [`wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollInterest {
    /// There are bytes to read, or the other end is gone.
    Read,
    /// The other end is gone.
    HangUp,
}

/// Result of [`wait`] for one descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollResult {
    /// A read would not block.
    pub readable: bool,
    /// The other end is gone, or the descriptor is invalid.
    pub hang_up: bool,
}

/// Waits until the condition of one of the descriptors holds, for at most `timeout` (`None`:
/// without end). A signal ends the wait early, with no descriptor ready.
///
/// # Errors
/// The errors of poll(2).
pub fn wait<const N: usize>(
    fds: [(BorrowedFd<'_>, PollInterest); N],
    timeout: Option<Duration>,
) -> io::Result<[PollResult; N]> {
    let mut polled = fds.map(|(fd, interest)| {
        let read = if interest == PollInterest::Read { PollFlags::IN } else { PollFlags::empty() };
        PollFd::from_borrowed_fd(fd, read | PollFlags::RDHUP)
    });
    let timeout = timeout.map(timespec);
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok([PollResult::default(); N]),
        Err(error) => return Err(error.into()),
    }
    Ok(polled.map(|fd| {
        let events = fd.revents();
        let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL;
        PollResult { readable: events.contains(PollFlags::IN), hang_up: events.intersects(gone) }
    }))
}

/// A set of blocked signals in the form of the kernel: bit `n - 1` is signal `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalMask(pub u64);

/// Number of descriptors of [`poll_readable`], apart from the others.
pub const POLLED: usize = 3;

/// Descriptors of a call with a list in place.
const LISTED: usize = 16;

/// Waits until one of the descriptors is readable or has an error, or one of `others` has one of its events
/// (in the bits of poll(2)), for at most `timeout` (`None`: without end). Returns a flag for each descriptor,
/// and one for the others. While the thread sleeps, `mask` replaces the thread's signal mask.
///
/// # Errors
/// The errors of ppoll(2), including `Interrupted`.
pub fn poll_readable(
    fds: [Option<BorrowedFd<'_>>; POLLED],
    others: &[(BorrowedFd<'_>, i16)],
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> io::Result<([bool; POLLED], bool)> {
    // The kernel ignores entries with a negative number.
    let none = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
    let (mut short, mut long) = ([none; LISTED], Vec::new());
    let list = match POLLED + others.len() {
        len @ 0..=LISTED => &mut short[..len],
        len => {
            long.resize(len, none);
            &mut long[..]
        }
    };
    let (own, rest) = list.split_at_mut(POLLED);
    for (entry, fd) in own.iter_mut().zip(fds) {
        entry.fd = fd.map_or(-1, |fd| fd.as_raw_fd());
    }
    for (entry, (fd, events)) in rest.iter_mut().zip(others) {
        (entry.fd, entry.events) = (fd.as_raw_fd(), *events);
    }
    let mut time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    let time = time.as_mut().map_or(0, |time| std::ptr::from_mut(time) as usize);
    let mask = mask.as_ref().map_or(0, |mask| std::ptr::from_ref(&mask.0) as usize);
    let arguments = [list.as_mut_ptr() as usize, list.len(), time, mask, size_of::<u64>(), 0];
    // SAFETY: list, time and mask live until the call returns, and have the layout of the kernel (of a
    // signal mask: 64 bits); the kernel writes list and time only.
    unsafe { sleep_in_kernel(libc::SYS_ppoll, &arguments) }?;
    let mut flags = [false; POLLED];
    let (own, rest) = list.split_at(POLLED);
    flags.iter_mut().zip(own).for_each(|(flag, entry)| *flag = entry.revents != 0);
    Ok((flags, rest.iter().any(|entry| entry.revents != 0)))
}

/// Maximum number of events from [`wait_in_set`].
const REPORTED: usize = 16;

/// Waits for events of `epoll`, for at most `timeout` (`None`: without end; else rounded up to whole
/// milliseconds). Returns the data of at most 16 events, of none after the timeout. While the thread
/// sleeps, `mask` replaces the thread's signal mask.
///
/// # Errors
/// The errors of epoll_pwait(2), including `Interrupted`.
pub fn wait_in_set(
    epoll: BorrowedFd<'_>,
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> io::Result<impl Iterator<Item = u64>> {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; REPORTED];
    let timeout = timeout.map_or(-1, |timeout| {
        i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    let mask = mask.as_ref().map_or(0, |mask| std::ptr::from_ref(&mask.0) as usize);
    let (set, list) = (epoll.as_raw_fd() as usize, events.as_mut_ptr() as usize);
    let arguments = [set, list, REPORTED, timeout as usize, mask, size_of::<u64>()];
    // SAFETY: events and mask live until the call returns, and have the layout of the kernel (of a signal
    // mask: 64 bits); the kernel writes at most `REPORTED` events.
    let n = unsafe { sleep_in_kernel(libc::SYS_epoll_pwait, &arguments) }?;
    Ok(events.into_iter().take(n).map(|event| event.u64))
}

/// Duplicates the descriptor of an open file that a library shows as a number only.
///
/// # Errors
/// The number is not of an open descriptor, or none is left.
pub fn duplicate<T: AsRawFd + ?Sized>(shown: &T) -> io::Result<OwnedFd> {
    let raw = shown.as_raw_fd();
    if raw < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: used for the duration of one dup only. `shown` is borrowed for as long, so its descriptor
    // stays open. A number without an open file causes EBADF and has no other effect.
    let borrowed = unsafe { BorrowedFd::borrow_raw(raw) };
    out_of_the_way(|| borrowed.try_clone_to_owned())
}

/// Shuts a socket down in both directions. Threads blocked on the socket return.
pub fn shut_down(socket: BorrowedFd<'_>) {
    // An error means an unconnected socket.
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
    fn other_descriptors_end_a_poll_by_their_own_events() {
        let (quiet, loud) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        // In place, and longer.
        for n in [1, 2 * LISTED] {
            let poll = |fds, last| {
                let mut others = vec![(quiet.as_fd(), libc::POLLIN); n];
                others.push(last);
                poll_readable(fds, &others, Some(Duration::ZERO), None).unwrap()
            };
            let own = [None, Some(loud.as_fd()), None];
            assert_eq!(poll(own, (quiet.as_fd(), libc::POLLIN)), ([false; 3], false));
            assert_eq!(poll(own, (quiet.as_fd(), libc::POLLOUT)), ([false; 3], true));
            loud.signal();
            assert_eq!(poll(own, (quiet.as_fd(), libc::POLLIN)), ([false, true, false], false));
            assert_eq!(poll([None; 3], (loud.as_fd(), libc::POLLIN)), ([false; 3], true));
            loud.clear();
        }
    }

    #[test]
    fn a_closed_socket_is_a_hang_up() {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let copy = duplicate(&a).unwrap();
        let [quiet] = wait([(copy.as_fd(), PollInterest::HangUp)], Some(Duration::ZERO)).unwrap();
        assert_eq!(quiet, PollResult::default());
        drop(b);
        let [gone] =
            wait([(copy.as_fd(), PollInterest::HangUp)], Some(Duration::from_secs(1))).unwrap();
        assert!(gone.hang_up);
    }
}
