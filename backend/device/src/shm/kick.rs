// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kicks that cannot block: the kernel signals the eventfd of another process.
//!
//! The call eventfd of a ring belongs to the front end, which may fill its counter; a `write` then
//! blocks, and whether it does is up to the front end as well, because O_NONBLOCK is a flag of the
//! shared file description. So a thread of another device must never write it. But the kernel's
//! asynchronous IO signals an eventfd when a request completes, and that saturates instead of
//! blocking. A [`Kicker`] submits a read of nothing from a file of its own and names the eventfd:
//! the read completes at once, inside the call, and the eventfd is signalled. One system call, about
//! a microsecond, and no thread in between.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};

/// Requests that may be uncollected: collecting is a system call, too.
const UNCOLLECTED: u32 = 32;

/// `aio_context_t`.
type Context = libc::c_ulong;

/// `struct iocb` of `linux/aio_abi.h`, little-endian.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

const PREAD: u16 = 0;
const FLAG_EVENTFD: u32 = 1;
const NO_SUCH_FLAG: u32 = 1 << 31;

const _: () = assert!(size_of::<Request>() == 64 && size_of::<Completion>() == 32);

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
        let mut context: Context = 0;
        // SAFETY: the kernel writes the one word that the second argument points at.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, UNCOLLECTED, &raw mut context) };
        check(result)?;
        Ok(Kicker { context, file, uncollected: 0 })
    }

    /// Signals `eventfd`, which adds 1 to its counter unless that is full.
    ///
    /// # Errors
    /// It is no eventfd, or the kernel is out of resources. Nothing was signalled then.
    pub fn kick(&mut self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        if self.uncollected >= UNCOLLECTED {
            self.collect()?;
        }
        let raw = |fd: i32| u32::try_from(fd).map_err(io::Error::other);
        let request = Request {
            opcode: PREAD,
            file: raw(self.file.as_raw_fd())?,
            flags: FLAG_EVENTFD,
            eventfd: raw(eventfd.as_raw_fd())?,
            ..Request::default()
        };
        let requests = [&raw const request];
        // SAFETY: the kernel copies the request before the call returns, and reads no bytes into
        // its (null) buffer because its length is 0. `requests` has the one entry that is announced.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1usize, requests.as_ptr()) };
        check(result)?;
        self.uncollected += 1;
        Ok(())
    }

    /// Whether this is an eventfd, which stays as it is.
    ///
    /// # Errors
    /// The kernel is out of resources.
    pub fn is_eventfd(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        let raw = |fd: i32| u32::try_from(fd).map_err(io::Error::other);
        let request = Request {
            opcode: PREAD,
            file: raw(self.file.as_raw_fd())?,
            flags: FLAG_EVENTFD,
            eventfd: raw(fd.as_raw_fd())?,
            // The kernel knows no such flag, but looks at the eventfd before it says so.
            rw_flags: NO_SUCH_FLAG,
            ..Request::default()
        };
        let requests = [&raw const request];
        // SAFETY: as in `kick`. The request is refused, so nothing is read at all.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1usize, requests.as_ptr()) };
        let error = match check(result) {
            Ok(_) => return Ok(true),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Ok(true),
            Some(libc::EINVAL | libc::EBADF) => Ok(false),
            _ => Err(error),
        }
    }

    fn collect(&mut self) -> io::Result<()> {
        let mut done = [Completion::default(); UNCOLLECTED as usize];
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many completions as `done` has room for.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0usize,
                done.len(),
                done.as_mut_ptr(),
                &raw const at_once,
            )
        };
        let collected = u32::try_from(check(result)?).unwrap_or(0);
        self.uncollected = self.uncollected.saturating_sub(collected);
        Ok(())
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        // SAFETY: the context is ours and not used any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

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
