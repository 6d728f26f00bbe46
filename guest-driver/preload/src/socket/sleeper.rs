// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sleep of a thread waiting for SMC connections and for descriptors of the kernel at once.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use guest_driver::interpose::Watch;

use crate::config;
use crate::sys::raw::{self, Errno, SysResult};

/// A watch and an epoll set for one sleeping thread. The owner is a thread, for the time of a call,
/// or an epoll set of the program.
#[derive(Debug)]
pub(crate) struct Sleeper {
    pub(crate) watch: Watch,
    /// A set of the library's own with the descriptors of the kernel, and the eventfd of `watch`.
    pub(crate) outer: OwnedFd,
}

impl Sleeper {
    /// A sleeper with only its own eventfd to wake it.
    pub(crate) fn new() -> std::io::Result<Sleeper> {
        let watch = Watch::new(config::get().map_or(Duration::ZERO, |config| config.spin))?;
        let outer = raw::epoll_create1(libc::EPOLL_CLOEXEC)
            .map_err(|Errno(error)| std::io::Error::from_raw_os_error(error))?;
        let outer = crate::socket::pair::high(crate::sys::owned(outer as c_int));
        let eventfd = watch.notifier().as_raw_fd();
        raw::epoll_ctl(outer.as_raw_fd(), libc::EPOLL_CTL_ADD, eventfd, libc::EPOLLIN as u32, 0)
            .map_err(|Errno(error)| std::io::Error::from_raw_os_error(error))?;
        Ok(Sleeper { watch, outer })
    }

    /// The descriptors of the sleeper.
    pub(crate) fn descriptors(&self) -> [c_int; 2] {
        [self.outer.as_raw_fd(), self.watch.notifier().as_raw_fd()]
    }

    /// Makes the sleeper wake when `fd` shows one of `events`.
    pub(crate) fn add(&self, fd: c_int, events: u32) -> SysResult {
        raw::epoll_ctl(self.outer.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, events, 0)
    }

    /// Like [`Sleeper::add`]; the set reports `data` with the events.
    pub(crate) fn add_with(&self, fd: c_int, events: u32, data: u64) -> SysResult {
        raw::epoll_ctl(self.outer.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, events, data)
    }

    /// Undoes [`Sleeper::add`].
    pub(crate) fn remove(&self, fd: c_int) {
        let _ = raw::epoll_ctl(self.outer.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, 0, 0);
    }
}
