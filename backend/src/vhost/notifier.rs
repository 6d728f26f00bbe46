// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A notifier: wakes a worker of one device from a thread of another.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd held only by the daemon, so a write never blocks.
///
/// The worker's epoll watches the eventfd edge-triggered: each write is an edge, and no thread reads the
/// counter.
#[derive(Debug)]
pub(crate) struct Notifier {
    fd: OwnedFd,
    /// Notified, but not yet taken: a further notification needs no system call.
    notified: AtomicBool,
}

impl Notifier {
    pub(crate) fn new() -> io::Result<Notifier> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Notifier { fd, notified: AtomicBool::new(false) })
    }

    /// Takes the notification. The worker calls `take` before checking for work.
    pub(crate) fn take(&self) {
        // A read-modify-write, as in `notify`: the second of the two sees the first. A later `take` acquires
        // the notifying thread's writes. A later `notify` writes the eventfd again.
        self.notified.swap(false, Ordering::AcqRel);
    }

    /// Makes the worker check for work.
    pub(crate) fn notify(&self) {
        if !self.notified.swap(true, Ordering::AcqRel) {
            // The write can fail only after 2^64 - 2 notifications.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
impl Notifier {
    /// Whether a notification is not yet taken.
    pub(super) fn is_notified(&self) -> bool {
        self.notified.load(Ordering::Relaxed)
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(notifier: &Notifier) -> Option<u64> {
        let mut count = [0; 8];
        rustix::io::read(&notifier.fd, &mut count).ok().map(|_| u64::from_ne_bytes(count))
    }

    #[test]
    fn writes_once_until_taken() {
        let notifier = Notifier::new().unwrap();
        notifier.notify();
        notifier.notify();
        assert_eq!(writes(&notifier), Some(1));
        notifier.take();
        assert_eq!(writes(&notifier), None);
        notifier.notify();
        assert_eq!(writes(&notifier), Some(1));
    }
}
