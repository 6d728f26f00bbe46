// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kicks that cannot block: the kernel signals the eventfd of another process.
//!
//! The call eventfd of a ring belongs to the front end. The front end may fill its counter, and a `write`
//! then blocks, unless O_NONBLOCK is set; the front end also controls O_NONBLOCK, a flag of the shared file
//! description. So a thread of another device must never write to the eventfd. But the kernel's asynchronous
//! IO signals an eventfd when a request completes, and this addition saturates instead of blocking. A
//! [`Kicker`] submits a read of nothing from a file of its own and names the eventfd: the read completes at
//! once, inside the call, and the kernel signals the eventfd. One system call, about a microsecond, and no
//! thread in between.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use eventfd_aio::{COLLECTED, Context};
use rustix::fs::{MemfdFlags, memfd_create};

/// Most uncollected requests: collecting is a system call, too.
const UNCOLLECTED: u32 = COLLECTED;

/// A context of the kernel's asynchronous IO.
#[derive(Debug)]
pub struct Kicker {
    context: Context,
    file: OwnedFd,
    uncollected: u32,
}

impl Kicker {
    /// A new context.
    ///
    /// # Errors
    /// The kernel has no asynchronous IO, or no contexts left (`fs.aio-max-nr`).
    pub fn new() -> io::Result<Kicker> {
        let file = memfd_create("kick", MemfdFlags::CLOEXEC)?;
        let context = Context::new(UNCOLLECTED)?;
        Ok(Kicker { context, file, uncollected: 0 })
    }

    /// Signals `eventfd`: adds 1 to its counter, unless full.
    ///
    /// # Errors
    /// `eventfd` is no eventfd, or the kernel is out of resources. Then nothing was signalled.
    pub fn kick(&mut self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        if self.uncollected >= UNCOLLECTED {
            self.collect()?;
        }
        self.context.signal(self.file.as_fd(), eventfd)?;
        self.uncollected += 1;
        Ok(())
    }

    /// Whether `fd` is an eventfd; leaves its counter unchanged.
    ///
    /// # Errors
    /// The kernel is out of resources.
    pub fn is_eventfd(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        self.context.is_eventfd(self.file.as_fd(), fd)
    }

    fn collect(&mut self) -> io::Result<()> {
        let collected = self.context.collect()?;
        self.uncollected = self.uncollected.saturating_sub(collected);
        Ok(())
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        self.context.destroy();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn counter(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn every_kick_counts() {
        let mut kicker = Kicker::new().unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for _ in 0..100 {
            kicker.kick(event.as_fd()).unwrap();
        }
        assert_eq!(counter(&event), 100);
    }

    #[test]
    fn a_full_counter_does_not_block() {
        let mut kicker = Kicker::new().unwrap();
        // Blocking on purpose: a write would hang here.
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..3 {
            kicker.kick(event.as_fd()).unwrap();
        }
        assert_eq!(counter(&event), u64::MAX);
    }

    #[test]
    fn an_eventfd_is_recognised_and_not_signalled() {
        let kicker = Kicker::new().unwrap();
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        for _ in 0..100 {
            assert!(kicker.is_eventfd(event.as_fd()).unwrap());
            assert!(!kicker.is_eventfd(other.as_fd()).unwrap());
        }
        assert_eq!(rustix::io::read(&event, &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let mut kicker = Kicker::new().unwrap();
        let file = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        assert!(kicker.kick(file.as_fd()).is_err());
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        kicker.kick(event.as_fd()).unwrap();
        assert_eq!(counter(&event), 1);
    }
}
