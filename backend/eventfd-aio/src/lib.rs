// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Non-blocking signals to eventfds of other processes.
//!
//! Another holder of an eventfd can fill its counter and clear O_NONBLOCK, a flag of the shared file
//! description. A `write` of this process would then block. The kernel's asynchronous IO signals an eventfd
//! when a request completes, and this addition saturates instead of blocking. A [`Context`] submits a read of
//! no bytes and names the eventfd: the read completes at once, inside the call.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most completed requests taken by one [`Context::collect`].
pub const COLLECTED: u32 = 32;

/// A context of the kernel's asynchronous IO (`aio_context_t`).
///
/// A context belongs to the address space of its creator, and lives until [`destroy`](Self::destroy) or the
/// end of the process. In another address space, such as a forked child's, its calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context(libc::c_ulong);

/// `struct iocb` of `linux/aio_abi.h`. The order of the second and the third word is that of the bytes.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: u32,
    #[cfg(target_endian = "big")]
    key: u32,
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

impl Context {
    /// A new context with room for `requests` uncollected requests.
    ///
    /// # Errors
    /// The kernel has no asynchronous IO, or no contexts left (`fs.aio-max-nr`).
    pub fn new(requests: u32) -> io::Result<Context> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes only the one word at the second argument.
        check(unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut context) })?;
        Ok(Context(context))
    }

    /// The kernel's number of the context, not 0.
    pub fn number(self) -> u64 {
        self.0
    }

    /// The context with this number. Without such a context, calls fail with EINVAL.
    pub fn with_number(number: u64) -> Context {
        Context(number)
    }

    /// Signals `eventfd`: adds 1 to its counter, unless full. `file`: a regular file; nothing is read from
    /// it.
    ///
    /// # Errors
    /// EAGAIN: no room for another request before [`collect`](Self::collect). Others: `eventfd` is no
    /// eventfd, or the kernel refuses. Then nothing was signalled.
    #[inline]
    pub fn signal(self, file: BorrowedFd<'_>, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        self.submit(&request(file, eventfd)?)
    }

    /// Whether `fd` is an eventfd; leaves its counter unchanged. `file`: as for [`signal`](Self::signal).
    ///
    /// # Errors
    /// The kernel is out of resources.
    pub fn is_eventfd(self, file: BorrowedFd<'_>, fd: BorrowedFd<'_>) -> io::Result<bool> {
        // The kernel knows no such flag, but checks the eventfd before the flag.
        let request = Request { rw_flags: NO_SUCH_FLAG, ..request(file, fd)? };
        let error = match self.submit(&request) {
            Ok(()) => return Ok(true),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Ok(true),
            Some(libc::EINVAL | libc::EBADF) => Ok(false),
            _ => Err(error),
        }
    }

    #[inline]
    fn submit(self, request: &Request) -> io::Result<()> {
        let requests = [&raw const *request];
        // SAFETY: the kernel copies the request before the call returns, and reads no bytes into its (null)
        // buffer because its length is 0. `requests` has one entry, the number passed.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.0, 1usize, requests.as_ptr()) };
        check(result).map(drop)
    }

    /// Takes completed requests, at most [`COLLECTED`]. Returns their number.
    ///
    /// # Errors
    /// There is no such context.
    pub fn collect(self) -> io::Result<u32> {
        let mut done = [Completion::default(); COLLECTED as usize];
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many completions as `done` has room for.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.0,
                0usize,
                done.len(),
                done.as_mut_ptr(),
                &raw const at_once,
            )
        };
        Ok(u32::try_from(check(result)?).unwrap_or(0))
    }

    /// Ends the context. Later calls fail.
    pub fn destroy(self) {
        // SAFETY: the kernel unmaps its own ring for the context with this number. This process has no
        // reference into the ring.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

fn request(file: BorrowedFd<'_>, eventfd: BorrowedFd<'_>) -> io::Result<Request> {
    let raw = |fd: BorrowedFd<'_>| u32::try_from(fd.as_raw_fd()).map_err(io::Error::other);
    Ok(Request {
        opcode: PREAD,
        file: raw(file)?,
        flags: FLAG_EVENTFD,
        eventfd: raw(eventfd)?,
        ..Request::default()
    })
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file() -> OwnedFd {
        memfd_create("t", MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn a_context_takes_as_many_signals_as_it_has_room_for_and_more_after_a_collection() {
        let (context, file) = (Context::new(4).unwrap(), file());
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut signals = 0;
        for _ in 0..3 {
            while context.signal(file.as_fd(), event.as_fd()).is_ok() {
                signals += 1;
                assert!(signals < 100_000, "a context without a bound");
            }
            assert!(context.collect().unwrap() > 0);
        }
        let mut count = [0; 8];
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), signals);
        context.destroy();
    }

    #[test]
    fn a_context_that_does_not_exist_fails() {
        let (made, file) = (Context::new(4).unwrap(), file());
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        assert_eq!(Context::with_number(made.number()), made);
        made.destroy();
        for context in [made, Context::with_number(0), Context::with_number(4096)] {
            let error = context.signal(file.as_fd(), event.as_fd()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            assert!(context.collect().is_err());
        }
    }
}
