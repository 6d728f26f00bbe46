// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the calls that read and write.

use std::borrow::Cow;
use std::ffi::{c_int, c_uint, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::time::Instant;

use libc::{iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

use crate::hooks::escapes::{leave_passed, passed_descriptors};
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::temporary_relays::by_kernel;
use crate::hooks::within::{restartable, within};
use crate::io::control;
use crate::io::transfer::{self, Dispatch};
use crate::selection::{answering_listeners, establish, inherited_options, options};
use crate::socket::descriptors;
use crate::socket::table::DESCRIPTORS;
use crate::sys::raw::{Errno, SysResult};
use crate::sys::user_memory::{self, BufferList, libc_result};

/// Reads from an SMC connection. `None`: the kernel carries out the call.
#[inline]
fn recv_into(fd: c_int, bufs: &mut [IoSliceMut<'_>], flags: c_int) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(fd)?;
    let reads =
        flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0 && !bufs.iter().all(|b| b.is_empty());
    if reads && let Err(error) = transfer::look_at_silent(&descriptor, fd, flags) {
        return Some(Err(error));
    }
    match transfer::dispatch_read(&descriptor, fd, flags & libc::MSG_DONTWAIT != 0) {
        Dispatch::Kernel => None,
        Dispatch::Smc(socket, stream) => Some(transfer::recv((socket, stream), bufs, flags)),
        Dispatch::Keep(_) => Some(Err(Errno(libc::EAGAIN))),
        Dispatch::Fail(error) => Some(Err(error)),
    }
}

/// Variant of [`recv_into`] for buffers without memory behind one of them. The call waits as usual,
/// and fails when there are bytes to write there.
#[cold]
fn recv_nowhere(fd: c_int, flags: c_int) -> Option<SysResult> {
    let mut byte = [0u8];
    let flags = flags & !(libc::MSG_TRUNC | libc::MSG_WAITALL) | libc::MSG_PEEK;
    Some(match recv_into(fd, &mut [IoSliceMut::new(&mut byte)], flags)? {
        Ok(1..) => Err(Errno(libc::EFAULT)),
        other => other,
    })
}

/// Variant of [`send_from`] for buffers without memory behind one of them.
#[cold]
fn send_nowhere(fd: c_int, flags: c_int) -> Option<SysResult> {
    Some(send_from(fd, &[], flags & !libc::MSG_OOB)?.and(Err(Errno(libc::EFAULT))))
}

/// [`recv_into`] with one buffer of the program.
///
/// # Safety
/// `buf` leads to `n` writable bytes, or nowhere.
#[inline]
unsafe fn recv_one(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> Option<SysResult> {
    if let Some(result) = discard(fd, n, flags) {
        return Some(result);
    }
    // SAFETY: the caller's promise.
    match unsafe { user_memory::read_buffer(buf, n) } {
        Some(room) => recv_into(fd, &mut [IoSliceMut::new(room)], flags),
        None => recv_nowhere(fd, flags),
    }
}

/// [`send_from`] with one buffer of the program.
///
/// # Safety
/// `buf` leads to `n` readable bytes, or nowhere.
#[inline]
unsafe fn send_one(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> Option<SysResult> {
    // SAFETY: the caller's promise.
    match unsafe { user_memory::write_buffer(buf, n) } {
        Some(bytes) => send_from(fd, &[IoSlice::new(bytes)], flags),
        None => send_nowhere(fd, flags),
    }
}

/// [`recv_into`] with a list of the program.
///
/// # Safety
/// `iov` leads to `n` buffers, or nowhere.
unsafe fn recv_list(fd: c_int, iov: *const iovec, n: usize, flags: c_int) -> Option<SysResult> {
    if flags & libc::MSG_TRUNC != 0
        // SAFETY: the caller's promise.
        && let Ok(len) = unsafe { user_memory::length(iov, n) }
        && let Some(result) = discard(fd, len, flags)
    {
        return Some(result);
    }
    // SAFETY: the caller's promise.
    recv_checked(fd, unsafe { user_memory::read_buffers(iov, n) }, flags)
}

fn recv_checked(
    fd: c_int,
    rooms: Result<Option<BufferList<'_>>, Errno>,
    flags: c_int,
) -> Option<SysResult> {
    match rooms {
        Ok(Some(mut rooms)) => recv_into(fd, &mut rooms, flags),
        Ok(None) => recv_nowhere(fd, flags),
        Err(error) => Some(Err(error)),
    }
}

/// [`send_from`] with a list of the program.
///
/// # Safety
/// `iov` leads to `n` buffers, or nowhere.
unsafe fn send_list(fd: c_int, iov: *const iovec, n: usize, flags: c_int) -> Option<SysResult> {
    // SAFETY: the caller's promise.
    send_checked(fd, unsafe { user_memory::write_buffers(iov, n) }, flags)
}

fn send_checked(
    fd: c_int,
    pieces: Result<Option<Cow<'_, [IoSlice<'_>]>>, Errno>,
    flags: c_int,
) -> Option<SysResult> {
    match pieces {
        Ok(Some(pieces)) => send_from(fd, &pieces, flags),
        Ok(None) => send_nowhere(fd, flags),
        Err(error) => Some(Err(error)),
    }
}

/// The length of a list of a vectored call.
fn count(n: c_int) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// With MSG_TRUNC, reads and discards bytes of an SMC connection: there need not be memory for them.
#[inline]
fn discard(fd: c_int, n: usize, flags: c_int) -> Option<SysResult> {
    if flags & libc::MSG_TRUNC == 0 || n == 0 {
        return None;
    }
    let descriptor = DESCRIPTORS.get(fd)?;
    match transfer::dispatch_read(&descriptor, fd, flags & libc::MSG_DONTWAIT != 0) {
        Dispatch::Smc(socket, stream) => Some(transfer::discard((socket, stream), n, flags)),
        _ => None,
    }
}

/// Writes to an SMC connection. `None`: the kernel carries out the call.
#[inline]
fn send_from(fd: c_int, bufs: &[IoSlice<'_>], flags: c_int) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(fd)?;
    loop {
        let dont_wait = flags & libc::MSG_DONTWAIT != 0;
        return match transfer::dispatch_write(&descriptor, fd, dont_wait) {
            Dispatch::Kernel => None,
            Dispatch::Smc(..) | Dispatch::Keep(_)
                if options::asks_for_completion(fd, flags, bufs) =>
            {
                Some(Err(Errno(libc::ENOBUFS)))
            }
            Dispatch::Smc(socket, stream) => Some(transfer::send((socket, stream), bufs, flags)),
            Dispatch::Keep(socket) => match transfer::keep(&descriptor, socket, fd, bufs, flags) {
                Some(result) => Some(result),
                None => continue,
            },
            Dispatch::Fail(error) => Some(Err(error)),
        };
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
    let native =
        || call_libc!(read, libc::SYS_read, (fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t);
    // A read(2) of no bytes returns at once, and the kernel carries it out on any socket.
    if DESCRIPTORS.has(fd) && n != 0 {
        // SAFETY: the program's buffer.
        if let Some(result) = restartable(|| unsafe { recv_one(fd, buf, n, 0) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { read(fd, buf, n) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t {
    let native = || call_libc!(write, libc::SYS_write, (fd: c_int, buf: *const c_void, n: size_t) -> ssize_t);
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        if let Some(result) = restartable(|| unsafe { send_one(fd, buf, n, 0) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { write(fd, buf, n) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    let native =
        || call_libc!(readv, libc::SYS_readv, (fd: c_int, iov: *const iovec, n: c_int) -> ssize_t);
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's list.
        if let Some(result) = restartable(|| unsafe { read_list(fd, iov, n, 0) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { readv(fd, iov, n) }, native);
    }
    native()
}

/// A system call with a list of the program.
fn vectored(number: i64, fd: c_int, iov: *const iovec, n: c_int) -> SysResult {
    // SAFETY: the program's arguments, unchanged.
    unsafe { crate::sys::raw::call(number, [fd as usize, iov as usize, n as usize, 0, 0, 0]) }
}

/// `readv` on a known descriptor.
///
/// # Safety
/// As [`recv_list`].
unsafe fn read_list(fd: c_int, iov: *const iovec, n: c_int, flags: c_int) -> Option<SysResult> {
    // SAFETY: the program's list.
    match unsafe { user_memory::read_buffers(iov, count(n)) } {
        // Like a read of no bytes: the kernel carries out the call on any socket, and at once.
        Ok(Some(rooms)) if rooms.iter().all(|room| room.is_empty()) => {
            Some(vectored(libc::SYS_readv, fd, iov, n))
        }
        rooms => recv_checked(fd, rooms, flags),
    }
}

/// `writev` on a known descriptor.
///
/// # Safety
/// As [`send_list`].
unsafe fn write_list(fd: c_int, iov: *const iovec, n: c_int, flags: c_int) -> Option<SysResult> {
    // SAFETY: the program's list.
    match unsafe { user_memory::write_buffers(iov, count(n)) } {
        // The kernel returns at once in any state of the socket.
        Ok(Some(pieces)) if pieces.iter().all(|piece| piece.is_empty()) => {
            Some(vectored(libc::SYS_writev, fd, iov, n))
        }
        pieces => send_checked(fd, pieces, flags),
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    let native = || call_libc!(writev, libc::SYS_writev, (fd: c_int, iov: *const iovec, n: c_int) -> ssize_t);
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's list.
        if let Some(result) = restartable(|| unsafe { write_list(fd, iov, n, 0) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { writev(fd, iov, n) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn recv(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
) -> ssize_t {
    let (none, zero) = (std::ptr::null_mut::<sockaddr>(), std::ptr::null_mut::<socklen_t>());
    let native = || {
        call_libc!(recvfrom, libc::SYS_recvfrom, (fd: c_int, buf: *mut c_void, n: size_t, flags: c_int,
              none: *mut sockaddr, zero: *mut socklen_t) -> ssize_t)
    };
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        if let Some(result) = restartable(|| unsafe { recv_one(fd, buf, n, flags) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { recv(fd, buf, n, flags) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    let native = || {
        call_libc!(recvfrom, libc::SYS_recvfrom, (fd: c_int, buf: *mut c_void, n: size_t, flags: c_int,
              addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t)
    };
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        if let Some(result) = restartable(|| unsafe { recv_one(fd, buf, n, flags) }) {
            if result.is_ok() && !addr.is_null() && !len.is_null() {
                // TCP returns no address.
                // SAFETY: the program's length.
                unsafe { *len = 0 };
            }
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { recvfrom(fd, buf, n, flags, addr, len) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn send(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the same call.
    unsafe { sendto(fd, buf, n, flags, std::ptr::null(), 0) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    let native = || {
        call_libc!(sendto, libc::SYS_sendto, (fd: c_int, buf: *const c_void, n: size_t, flags: c_int,
              addr: *const sockaddr, len: socklen_t) -> ssize_t)
    };
    // TCP ignores the address, but the kernel refuses an unreadable or too long one.
    if DESCRIPTORS.has(fd) && !user_memory::is_no_address(addr, len) {
        // SAFETY: the program's buffer.
        if let Some(result) = restartable(|| unsafe { send_one(fd, buf, n, flags) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { sendto(fd, buf, n, flags, addr, len) }, native);
    }
    native()
}

/// `recvmsg` on a known descriptor.
///
/// # Safety
/// `message` leads to a valid header, or nowhere.
unsafe fn receive(fd: c_int, message: *mut msghdr, flags: c_int) -> Option<SysResult> {
    if user_memory::is_nowhere(message, 1) {
        return Some(Err(Errno(libc::EFAULT)));
    }
    // SAFETY: the caller's promise.
    let header = unsafe { &mut *message };
    if header.msg_iovlen > libc::UIO_MAXIOV as usize {
        return Some(Err(Errno(libc::EMSGSIZE)));
    }
    // SAFETY: the program's list.
    let result = unsafe { recv_list(fd, header.msg_iov, header.msg_iovlen, flags) }?;
    if result.is_ok() {
        let room = std::mem::take(&mut header.msg_controllen);
        header.msg_namelen = 0;
        header.msg_flags = flags & (libc::MSG_OOB | libc::MSG_CMSG_CLOEXEC);
        if control::is_queue_size_wanted()
            && let Some(queued) = DESCRIPTORS.get(fd).as_ref().and_then(control::queue_size)
        {
            // SAFETY: the program's room for control messages.
            unsafe { user_memory::write_queue_size(header, room, queued) };
        }
    }
    Some(result)
}

/// `sendmsg` on a known descriptor.
///
/// # Safety
/// `message` leads to a valid header, or nowhere.
unsafe fn transmit(fd: c_int, message: *const msghdr, flags: c_int) -> Option<SysResult> {
    if user_memory::is_nowhere(message, 1) {
        return Some(Err(Errno(libc::EFAULT)));
    }
    // SAFETY: the caller's promise.
    let header = unsafe { &*message };
    if header.msg_iovlen > libc::UIO_MAXIOV as usize {
        return Some(Err(Errno(libc::EMSGSIZE)));
    }
    if header.msg_controllen > 0 && DESCRIPTORS.get(fd).as_ref().is_some_and(control::is_on_smc) {
        // SAFETY: the program's header.
        if let Err(error) = unsafe { user_memory::check_control(fd, header) } {
            return Some(Err(error));
        }
    }
    // SAFETY: the program's list.
    unsafe { send_list(fd, header.msg_iov, header.msg_iovlen, flags) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn recvmsg(
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    let native = || {
        let result = call_libc!(recvmsg, libc::SYS_recvmsg,
            (fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t);
        if result >= 0 {
            // SAFETY: the kernel has filled the header in.
            unsafe { passed_descriptors(message, receive_descriptor) };
        }
        result
    };
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's header.
        if let Some(result) = restartable(|| unsafe { receive(fd, message, flags) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { recvmsg(fd, message, flags) }, native);
    }
    native()
}

/// Updates the tables for a descriptor received by the program.
fn receive_descriptor(fd: c_int) {
    descriptors::remove_stale(fd);
    inherited_options::note_foreign(fd);
    answering_listeners::note();
    establish::add_relayed(fd);
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn sendmsg(
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    let native = || {
        // SAFETY: the program's header.
        within(|| unsafe { leave_passed(fd, message) });
        call_libc!(sendmsg, libc::SYS_sendmsg,
            (fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t)
    };
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's header.
        if let Some(result) = restartable(|| unsafe { transmit(fd, message, flags) }) {
            return libc_result(result);
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { sendmsg(fd, message, flags) }, native);
    }
    native()
}

/// `recvmmsg` on a known descriptor: one message after another, up to the first error. The call
/// waits for each message.
///
/// # Safety
/// `list` leads to `n` headers, and `timeout` to a time, or it is null.
unsafe fn receive_many(
    fd: c_int,
    list: *mut mmsghdr,
    n: usize,
    mut flags: c_int,
    timeout: *mut timespec,
) -> Option<SysResult> {
    let known = DESCRIPTORS.get(fd)?;
    if let Some(error @ 1..) = known.stream().and_then(control::take_error) {
        // The kernel reports the error first, even if there are bytes to read.
        return Some(Err(Errno(error)));
    }
    let wait_for_one = flags & libc::MSG_WAITFORONE != 0;
    flags &= !libc::MSG_WAITFORONE;
    // SAFETY: the caller's promise.
    if unsafe { user_memory::is_no_time(timeout) } {
        return Some(Err(Errno(libc::EINVAL)));
    }
    // SAFETY: the caller's promise.
    let end = unsafe { user_memory::timespec(timeout) }.map(|time| Instant::now() + time);
    for i in 0..n.min(libc::UIO_MAXIOV as usize) {
        // SAFETY: the caller's promise.
        let message = unsafe { &mut *list.add(i) };
        // SAFETY: the program's header.
        match unsafe { receive(fd, &mut message.msg_hdr, flags) } {
            Some(Ok(len)) => message.msg_len = len as c_uint,
            Some(result) if i == 0 => return Some(result),
            None if i == 0 => return None,
            _ => return Some(Ok(i)),
        }
        if let Some(end) = end {
            let left = end.saturating_duration_since(Instant::now());
            // SAFETY: the caller's promise.
            unsafe { timeout.write_unaligned(crate::sys::timespec(left)) };
            if left.is_zero() {
                return Some(Ok(i + 1));
            }
        }
        if wait_for_one {
            flags |= libc::MSG_DONTWAIT;
        }
        if message.msg_hdr.msg_flags & libc::MSG_OOB != 0 {
            return Some(Ok(i + 1));
        }
    }
    Some(Ok(n.min(libc::UIO_MAXIOV as usize)))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    let native = || {
        call_libc!(recvmmsg, libc::SYS_recvmmsg,
            (fd: c_int, list: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int)
    };
    if DESCRIPTORS.has(fd) && n > 0 && !user_memory::is_nowhere(list, 1) {
        // SAFETY: the program's list and time.
        let here = || unsafe { receive_many(fd, list, n as usize, flags, timeout) };
        if let Some(result) = restartable(here) {
            return libc_result(result) as c_int;
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { recvmmsg(fd, list, n, flags, timeout) }, native);
    }
    native()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
) -> c_int {
    let native = || {
        for i in 0..n as usize {
            // SAFETY: the program's list of `n` headers.
            within(|| unsafe { leave_passed(fd, &raw const (*list.add(i)).msg_hdr) });
        }
        call_libc!(sendmmsg, libc::SYS_sendmmsg,
            (fd: c_int, list: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int)
    };
    if DESCRIPTORS.has(fd) && n > 0 && !user_memory::is_nowhere(list, 1) {
        for i in 0..n as usize {
            // SAFETY: the program's list of `n` headers.
            let message = unsafe { &mut *list.add(i) };
            // SAFETY: the program's header.
            match restartable(|| unsafe { transmit(fd, &message.msg_hdr, flags) }) {
                Some(Ok(len)) => message.msg_len = len as c_uint,
                Some(result) if i == 0 => return libc_result(result) as c_int,
                None if i == 0 => break,
                _ => return i as c_int,
            }
            if i + 1 == n as usize {
                return n as c_int;
            }
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { sendmmsg(fd, list, n, flags) }, native);
    }
    native()
}

/// Flags of `preadv2` and `pwritev2` without an effect on sockets, and RWF_NOWAIT.
const KNOWN_FLAGS: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_NOWAIT;

/// Defines `preadv2` and `pwritev2`, which are `readv` and `writev` at the offset -1.
macro_rules! positioned {
    ($($name:ident, $number:ident, $without:ident, $flag:expr;)*) => {
        $(#[unsafe(no_mangle)]
        pub(super) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            iov: *const iovec,
            n: c_int,
            offset: off64_t,
            flags: c_int,
        ) -> ssize_t {
            if DESCRIPTORS.has(fd) && offset == -1 && flags & !KNOWN_FLAGS == 0 {
                // SAFETY: the program's list.
                return unsafe { $without(fd, iov, n, flags & $flag != 0) };
            }
            // The kernel takes the offset in two halves.
            let (low, high) = (offset as usize, 0usize);
            let args = [fd as usize, iov as usize, n as usize, low, high, flags as usize];
            // SAFETY: the program's arguments, unchanged.
            libc_result(unsafe { crate::sys::raw::call(libc::$number, args) })
        })*
    };
}

positioned! {
    preadv2, SYS_preadv2, read_at_once, libc::RWF_NOWAIT;
    preadv64v2, SYS_preadv2, read_at_once, libc::RWF_NOWAIT;
    pwritev2, SYS_pwritev2, write_at_once, libc::RWF_NOWAIT;
    pwritev64v2, SYS_pwritev2, write_at_once, libc::RWF_NOWAIT;
}

/// The result of a transfer of an eight-byte number.
fn moved_number(moved: ssize_t) -> c_int {
    if moved == size_of::<u64>() as ssize_t { 0 } else { -1 }
}

/// libc makes the system call by itself, on any descriptor.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn eventfd_read(fd: c_int, number: *mut u64) -> c_int {
    // SAFETY: the program's number.
    moved_number(unsafe { read(fd, number.cast(), size_of::<u64>()) })
}

/// libc makes the system call by itself, on any descriptor.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn eventfd_write(fd: c_int, number: u64) -> c_int {
    // SAFETY: the number is valid until the call returns.
    moved_number(unsafe { write(fd, (&raw const number).cast(), size_of::<u64>()) })
}

/// # Safety
/// As `readv`.
unsafe fn read_at_once(fd: c_int, iov: *const iovec, n: c_int, dont_wait: bool) -> ssize_t {
    let flags = if dont_wait { libc::MSG_DONTWAIT } else { 0 };
    // SAFETY: the program's list.
    match restartable(|| unsafe { read_list(fd, iov, n, flags) }) {
        Some(result) => libc_result(result),
        // SAFETY: the same call.
        None => unsafe { readv(fd, iov, n) },
    }
}

/// # Safety
/// As `writev`.
unsafe fn write_at_once(fd: c_int, iov: *const iovec, n: c_int, dont_wait: bool) -> ssize_t {
    let flags = if dont_wait { libc::MSG_DONTWAIT } else { 0 };
    // SAFETY: the program's list.
    match restartable(|| unsafe { write_list(fd, iov, n, flags) }) {
        Some(result) => libc_result(result),
        // SAFETY: the same call.
        None => unsafe { writev(fd, iov, n) },
    }
}
