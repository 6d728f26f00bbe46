// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptors for a front end to pass: the proper kind, and every other.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use rustix::io::{read, write};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use crate::bytes::Rng;

/// The kind of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Descriptor {
    /// A proper counter.
    Counter,
    /// A blocking counter.
    Blocking,
    /// A full counter; adding to the counter blocks.
    Full,
    /// A counter always readable.
    Semaphore,
    /// The readable end of a pipe.
    Reader,
    /// The writable end of a pipe, full.
    Writer,
    /// A socket whose other end is closed.
    Socket,
    /// A set of other descriptors.
    Set,
    /// A timer.
    Timer,
    /// Memory.
    Memory,
    /// A system device, always ready.
    Zero,
    /// A name in the file system, and nothing else.
    Path,
}

const KINDS: [Descriptor; 12] = [
    Descriptor::Counter,
    Descriptor::Blocking,
    Descriptor::Full,
    Descriptor::Semaphore,
    Descriptor::Reader,
    Descriptor::Writer,
    Descriptor::Socket,
    Descriptor::Set,
    Descriptor::Timer,
    Descriptor::Memory,
    Descriptor::Zero,
    Descriptor::Path,
];

/// The largest count of a counter.
const MOST: u64 = u64::MAX - 1;

impl Descriptor {
    /// Draws a kind of descriptor.
    pub(super) fn any(rng: &mut Rng) -> Descriptor {
        KINDS[rng.below(KINDS.len() as u32) as usize]
    }

    /// Makes a descriptor. `None`: this process has no descriptors left.
    pub(super) fn make(self) -> Option<OwnedFd> {
        let counter = |flags: EventfdFlags| eventfd(0, flags | EventfdFlags::CLOEXEC).ok();
        match self {
            Descriptor::Counter => counter(EventfdFlags::NONBLOCK),
            Descriptor::Blocking => counter(EventfdFlags::empty()),
            Descriptor::Full => {
                let full = counter(EventfdFlags::empty())?;
                write(&full, &MOST.to_ne_bytes()).ok()?;
                Some(full)
            }
            Descriptor::Semaphore => {
                let semaphore = counter(EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK)?;
                write(&semaphore, &MOST.to_ne_bytes()).ok()?;
                Some(semaphore)
            }
            Descriptor::Reader => Some(std::io::pipe().ok()?.0.into()),
            Descriptor::Writer => {
                let (_reader, writer) = std::io::pipe().ok()?;
                rustix::io::ioctl_fionbio(&writer, true).ok()?;
                while write(&writer, &[0; 4096]).is_ok() {}
                Some(writer.into())
            }
            Descriptor::Socket => Some(UnixStream::pair().ok()?.0.into()),
            Descriptor::Set => epoll::create(epoll::CreateFlags::CLOEXEC).ok(),
            Descriptor::Timer => {
                timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).ok()
            }
            Descriptor::Memory => memfd_create("soak", MemfdFlags::CLOEXEC).ok(),
            Descriptor::Zero => {
                open("/dev/zero", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()
            }
            Descriptor::Path => open("/proc", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok(),
        }
    }
}

/// Empties a counter, so no thread waits any longer in adding to it.
pub(super) fn empty(fd: &OwnedFd) {
    if rustix::io::ioctl_fionbio(fd, true).is_ok() {
        let _ = read(fd, &mut [0; 8]);
    }
}
