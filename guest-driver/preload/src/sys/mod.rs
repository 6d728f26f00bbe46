// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls, the type of the table of descriptors, and memory of the program. Only this module and
//! `hooks` have `unsafe` code.

pub(crate) mod clock;
pub(crate) mod elf;
pub(crate) mod fork_lock;
pub(crate) mod heap;
pub(crate) mod own_copies;
pub(crate) mod own_numbers;
pub(crate) mod own_stack;
pub(crate) mod quiet_write;
pub(crate) mod raw;
pub(crate) mod table;
mod unwinding;
pub(crate) mod user_memory;
pub(crate) mod watchdog;

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use guest_driver::interpose::SignalMask;
use raw::{Errno, SysResult};

/// Stack size in bytes, for the library's own threads and for its work in the program's threads. One of
/// them opens the device, with a need of 100 KiB without optimisation.
pub(crate) const STACK: usize = ism_sys::USUAL_STACK;

/// The target of a pointer to leaked memory, never to be freed.
pub(crate) fn leaked<T>(pointer: *mut T) -> Option<&'static T> {
    // SAFETY: all callers pass null, a pointer from `Box::leak`, or a mapping kept for ever.
    unsafe { pointer.as_ref() }
}

/// Takes owner of a new descriptor.
pub(crate) fn owned(fd: c_int) -> OwnedFd {
    // SAFETY: the caller has the descriptor from the kernel, and passes its owner on.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Borrows a descriptor of the program for a call. If the program closes the descriptor meanwhile, the
/// call fails or works on another file, the same as without this library.
pub(crate) fn borrowed(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: the value is not -1, the only invalid one, and no memory depends on the descriptor.
    unsafe { BorrowedFd::borrow_raw(if fd < 0 { c_int::MAX } else { fd }) }
}

/// A TCP socket of the program as a stream, for a call. The stream does not close the descriptor.
pub(crate) fn lent_stream(fd: c_int) -> ManuallyDrop<TcpStream> {
    // SAFETY: as in `borrowed`; the stream is never dropped, so the program keeps the descriptor.
    ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(if fd < 0 { c_int::MAX } else { fd }) })
}

/// A duration for the kernel; too long a duration becomes the longest possible one.
pub(crate) fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// The time left until `end`; `None`: there is no end.
pub(crate) fn left_of(end: Option<Instant>) -> Option<Duration> {
    end.map(|end| end.saturating_duration_since(Instant::now()))
}

/// Sleeps until one of the descriptors is readable, at most for `timeout`.
pub(crate) fn wait_readable(fds: &[Option<BorrowedFd<'_>>], timeout: Duration) {
    use rustix::event::{PollFd, PollFlags};
    let mut fds: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    let _ = rustix::event::poll(&mut fds, Some(&timeout));
}

/// The local address of a socket.
pub(crate) fn local_address(fd: c_int) -> Option<SocketAddr> {
    let name = rustix::net::getsockname(borrowed(fd)).ok()?;
    SocketAddr::try_from(name).ok()
}

/// The position of a file.
pub(crate) fn position(fd: c_int) -> Result<i64, Errno> {
    // SAFETY: numbers only.
    unsafe { raw::call(libc::SYS_lseek, [fd as usize, 0, libc::SEEK_CUR as usize, 0, 0, 0]) }
        .map(|at| at as i64)
}

/// Sets the position of a file.
pub(crate) fn set_position(fd: c_int, at: i64) -> Result<(), Errno> {
    let args = [fd as usize, at as usize, libc::SEEK_SET as usize, 0, 0, 0];
    // SAFETY: numbers only.
    unsafe { raw::call(libc::SYS_lseek, args) }.map(|_| ())
}

/// The kernel's `epoll_pwait2`.
pub(crate) fn epoll_wait(
    set: c_int,
    out: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> SysResult {
    let mut time = timeout.map(timespec);
    let list = out.as_mut_ptr() as usize;
    let mask = mask.as_ref().map_or(0, |mask| std::ptr::from_ref(&mask.0) as usize);
    let millis = match timeout {
        None => -1isize,
        Some(timeout) if timeout.is_zero() => 0,
        Some(_) => {
            let time = time.as_mut().map_or(0, |time| std::ptr::from_mut(time) as usize);
            let args = [set as usize, list, out.len(), time, mask, 8];
            // SAFETY: list, time and mask are valid until the call returns.
            match unsafe { raw::sleep(libc::SYS_epoll_pwait2, args) } {
                // The kernel or a sandbox does not know the call.
                Err(Errno(libc::ENOSYS | libc::EPERM)) => {}
                result => return result,
            }
            timeout.map_or(0, |t| t.as_micros().div_ceil(1000).min(i32::MAX as u128) as isize)
        }
    };
    let args = [set as usize, list, out.len(), millis as usize, mask, 8];
    if millis == 0 {
        // SAFETY: list and mask are valid until the call returns.
        return unsafe { raw::call(libc::SYS_epoll_pwait, args) };
    }
    // SAFETY: as above.
    unsafe { raw::sleep(libc::SYS_epoll_pwait, args) }
}

/// The numbers of the open descriptors. Libc would read the directory into memory of the program's
/// heap.
pub(crate) fn open_numbers() -> Vec<c_int> {
    use rustix::fs::{Mode, OFlags, RawDir};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty()) else {
        return Vec::new();
    };
    let mut room = [std::mem::MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(&directory, &mut room);
    let mut numbers = Vec::new();
    while let Some(Ok(entry)) = entries.next() {
        numbers.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<c_int>().ok()));
    }
    numbers.retain(|fd| *fd != directory.as_raw_fd());
    numbers
}

/// Whether a descriptor is an epoll set.
pub(crate) fn is_epoll_set(fd: c_int) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    link.is_ok_and(|name| name.to_string_lossy().contains("eventpoll"))
}

/// Whether a write on a socket would not block.
pub(crate) fn is_writable(fd: c_int) -> bool {
    let mut list = [libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }];
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    raw::ppoll(&mut list, Some(&now), None).is_ok_and(|n| n > 0)
        && list[0].revents & (libc::POLLERR | libc::POLLHUP) == 0
}

/// Whether the kernel's `sendfile` can read from a descriptor; EBADF if the descriptor is not open.
pub(crate) fn can_be_sent(fd: c_int) -> Result<bool, Errno> {
    use rustix::fs::{FileType, OFlags};
    let stat = rustix::fs::fstat(borrowed(fd))?;
    let access = rustix::fs::fcntl_getfl(borrowed(fd))?;
    if access.intersection(OFlags::ACCMODE) == OFlags::WRONLY {
        return Err(Errno(libc::EBADF));
    }
    let kind = FileType::from_raw_mode(stat.st_mode);
    let is_file = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
    if !is_file || stat.st_size != 0 || kind == FileType::BlockDevice {
        return Ok(is_file);
    }
    // An empty file, or a file with content generated by the kernel. The kernel reads only some of the
    // latter: a pipe in the place of the connection finds out, at an offset of its own.
    let Ok((_reader, writer)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else {
        return Ok(true);
    };
    let flags = rustix::pipe::SpliceFlags::NONBLOCK;
    let moved = rustix::pipe::splice(borrowed(fd), Some(&mut 0), writer, None, 1, flags);
    Ok(moved != Err(rustix::io::Errno::INVAL))
}
