//! Hooks of the calls that read and write.

use std::ffi::{c_int, c_uint, c_void};
use std::io::{IoSlice, IoSliceMut};

use libc::{iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

use crate::hooks::escapes::{leave_passed, passed_descriptors};
use crate::hooks::libc_symbols::call_libc;
use crate::io::transfer::{self, Dispatch};
use crate::selection::establish;
use crate::socket::descriptors;
use crate::socket::table::DESCRIPTORS;
use crate::sys::raw::{Errno, SysResult};
use crate::sys::user_memory::{self, libc_result};

/// Reads, if the descriptor is an SMC connection. `None`: the kernel carries out the call.
#[inline]
fn recv_into(fd: c_int, bufs: &mut [IoSliceMut<'_>], flags: c_int) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(fd)?;
    match transfer::dispatch_read(&descriptor, fd, flags & libc::MSG_DONTWAIT != 0) {
        Dispatch::Kernel => None,
        Dispatch::Smc(socket, stream) => Some(transfer::recv((socket, stream), bufs, flags)),
        Dispatch::Keep(_) => Some(Err(Errno(libc::EAGAIN))),
        Dispatch::Fail(error) => Some(Err(error)),
    }
}

/// Reads and throws away, if the descriptor is an SMC connection: the program need have no buffer.
fn discard(fd: c_int, n: usize, flags: c_int) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(fd)?;
    match transfer::dispatch_read(&descriptor, fd, flags & libc::MSG_DONTWAIT != 0) {
        Dispatch::Smc(socket, stream) => Some(transfer::discard((socket, stream), n, flags)),
        _ => None,
    }
}

/// Writes, if the descriptor is an SMC connection. `None`: the kernel carries out the call.
#[inline]
fn send_from(fd: c_int, bufs: &[IoSlice<'_>], flags: c_int) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(fd)?;
    loop {
        return match transfer::dispatch_write(&descriptor, fd, flags & libc::MSG_DONTWAIT != 0) {
            Dispatch::Kernel => None,
            Dispatch::Smc(socket, stream) => Some(transfer::send((socket, stream), bufs, flags)),
            Dispatch::Keep(socket) => {
                let dont_wait = flags & libc::MSG_DONTWAIT != 0;
                match transfer::keep(&descriptor, socket, fd, bufs, dont_wait) {
                    Some(result) => Some(result),
                    None => continue,
                }
            }
            Dispatch::Fail(error) => Some(Err(error)),
        };
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        let room = unsafe { user_memory::read_buffer(buf, n) };
        if let Some(result) = recv_into(fd, &mut [IoSliceMut::new(room)], 0) {
            return libc_result(result);
        }
    }
    call_libc!(read, libc::SYS_read, (fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        let bytes = unsafe { user_memory::write_buffer(buf, n) };
        if let Some(result) = send_from(fd, &[IoSlice::new(bytes)], 0) {
            return libc_result(result);
        }
    }
    call_libc!(write, libc::SYS_write, (fd: c_int, buf: *const c_void, n: size_t) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's list.
        let rooms =
            unsafe { user_memory::read_buffers(iov, usize::try_from(n).unwrap_or(usize::MAX)) };
        match rooms {
            Ok(rooms) => {
                if let Some(result) = recv_into(fd, rooms, 0) {
                    return libc_result(result);
                }
            }
            Err(error) => return libc_result(Err(error)),
        }
    }
    call_libc!(readv, libc::SYS_readv, (fd: c_int, iov: *const iovec, n: c_int) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's list.
        match unsafe { user_memory::write_buffers(iov, usize::try_from(n).unwrap_or(usize::MAX)) } {
            Ok(pieces) => {
                if let Some(result) = send_from(fd, pieces, 0) {
                    return libc_result(result);
                }
            }
            Err(error) => return libc_result(Err(error)),
        }
    }
    call_libc!(writev, libc::SYS_writev, (fd: c_int, iov: *const iovec, n: c_int) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn recv(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        if flags & libc::MSG_TRUNC != 0
            && flags & libc::MSG_PEEK == 0
            && let Some(result) = discard(fd, n, flags)
        {
            return libc_result(result);
        }
        // SAFETY: the program's buffer.
        let room = unsafe { user_memory::read_buffer(buf, n) };
        if let Some(result) = recv_into(fd, &mut [IoSliceMut::new(room)], flags) {
            return libc_result(result);
        }
    }
    let (none, zero) = (std::ptr::null_mut::<sockaddr>(), std::ptr::null_mut::<socklen_t>());
    call_libc!(recvfrom, libc::SYS_recvfrom, (fd: c_int, buf: *mut c_void, n: size_t, flags: c_int,
          none: *mut sockaddr, zero: *mut socklen_t) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        let room = unsafe { user_memory::read_buffer(buf, n) };
        if let Some(result) = recv_into(fd, &mut [IoSliceMut::new(room)], flags) {
            if !addr.is_null() && !len.is_null() {
                // TCP returns no address.
                // SAFETY: the program's length.
                unsafe { *len = 0 };
            }
            return libc_result(result);
        }
    }
    call_libc!(recvfrom, libc::SYS_recvfrom, (fd: c_int, buf: *mut c_void, n: size_t, flags: c_int,
          addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn send(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the same call.
    unsafe { sendto(fd, buf, n, flags, std::ptr::null(), 0) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn sendto(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's buffer.
        let bytes = unsafe { user_memory::write_buffer(buf, n) };
        if let Some(result) = send_from(fd, &[IoSlice::new(bytes)], flags) {
            return libc_result(result);
        }
    }
    call_libc!(sendto, libc::SYS_sendto, (fd: c_int, buf: *const c_void, n: size_t, flags: c_int,
          addr: *const sockaddr, len: socklen_t) -> ssize_t)
}

/// `recvmsg` on a known descriptor.
///
/// # Safety
/// `message` leads to a valid header.
unsafe fn receive(fd: c_int, message: *mut msghdr, flags: c_int) -> Option<SysResult> {
    // SAFETY: the caller's promise.
    let header = unsafe { message.as_mut() }?;
    // SAFETY: the program's list.
    let rooms = match unsafe { user_memory::read_buffers(header.msg_iov, header.msg_iovlen) } {
        Ok(rooms) => rooms,
        Err(error) => return Some(Err(error)),
    };
    let result = recv_into(fd, rooms, flags)?;
    if result.is_ok() {
        (header.msg_namelen, header.msg_controllen) = (0, 0);
        header.msg_flags = flags & libc::MSG_OOB;
    }
    Some(result)
}

/// `sendmsg` on a known descriptor.
///
/// # Safety
/// `message` leads to a valid header.
unsafe fn transmit(fd: c_int, message: *const msghdr, flags: c_int) -> Option<SysResult> {
    // SAFETY: the caller's promise.
    let header = unsafe { message.as_ref() }?;
    // SAFETY: the program's list.
    match unsafe { user_memory::write_buffers(header.msg_iov, header.msg_iovlen) } {
        Ok(pieces) => send_from(fd, pieces, flags),
        Err(error) => Some(Err(error)),
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's header.
        if let Some(result) = unsafe { receive(fd, message, flags) } {
            return libc_result(result);
        }
    }
    let result = call_libc!(recvmsg, libc::SYS_recvmsg,
        (fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t);
    if result >= 0 {
        // SAFETY: the kernel has filled the header in.
        unsafe { passed_descriptors(message, receive_descriptor) };
    }
    result
}

/// What the library does with a descriptor that the program has received.
fn receive_descriptor(fd: c_int) {
    descriptors::remove_stale(fd);
    establish::add_relayed(fd);
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn sendmsg(
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    if DESCRIPTORS.has(fd) {
        // SAFETY: the program's header.
        if let Some(result) = unsafe { transmit(fd, message, flags) } {
            return libc_result(result);
        }
    }
    // SAFETY: the program's header.
    unsafe { leave_passed(message) };
    call_libc!(sendmsg, libc::SYS_sendmsg,
        (fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn recvmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if DESCRIPTORS.has(fd) && n > 0 && !list.is_null() {
        let mut flags = flags & !libc::MSG_WAITFORONE;
        for i in 0..n as usize {
            // SAFETY: the program's list of `n` headers.
            let message = unsafe { &mut *list.add(i) };
            // SAFETY: the program's header.
            match unsafe { receive(fd, &mut message.msg_hdr, flags) } {
                Some(Ok(len)) => message.msg_len = len as c_uint,
                Some(result) if i == 0 => return libc_result(result) as c_int,
                None if i == 0 => break,
                _ => return i as c_int,
            }
            if message.msg_len == 0 || i + 1 == n as usize {
                return i as c_int + 1;
            }
            // A stream has no message boundaries, so the call need not wait for more bytes.
            flags |= libc::MSG_DONTWAIT;
        }
    }
    call_libc!(recvmmsg, libc::SYS_recvmmsg,
        (fd: c_int, list: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn sendmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
) -> c_int {
    if DESCRIPTORS.has(fd) && n > 0 && !list.is_null() {
        for i in 0..n as usize {
            // SAFETY: the program's list of `n` headers.
            let message = unsafe { &mut *list.add(i) };
            // SAFETY: the program's header.
            match unsafe { transmit(fd, &message.msg_hdr, flags) } {
                Some(Ok(len)) => message.msg_len = len as c_uint,
                Some(result) if i == 0 => return libc_result(result) as c_int,
                None if i == 0 => break,
                _ => return i as c_int,
            }
            if i + 1 == n as usize {
                return n as c_int;
            }
        }
    }
    for i in 0..n as usize {
        // SAFETY: the program's list of `n` headers.
        unsafe { leave_passed(&raw const (*list.add(i)).msg_hdr) };
    }
    call_libc!(sendmmsg, libc::SYS_sendmmsg,
        (fd: c_int, list: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int)
}

/// `sendfile` into an SMC connection. `None`: the kernel carries out the call.
///
/// # Safety
/// `offset` is null or leads to an offset.
unsafe fn sendfile_here(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    n: usize,
) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(to)?;
    Some(match transfer::dispatch_write(&descriptor, to, false) {
        Dispatch::Kernel => return None,
        Dispatch::Keep(_) => Err(Errno(libc::EAGAIN)),
        Dispatch::Fail(error) => Err(error),
        Dispatch::Smc(socket, stream) => {
            // SAFETY: the caller's promise.
            let offset = unsafe { offset.as_mut() };
            transfer::sendfile((socket, stream), from, offset, n.min(0x7fff_f000))
        }
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    n: size_t,
) -> ssize_t {
    if DESCRIPTORS.has(to) {
        // SAFETY: the program's offset.
        if let Some(result) = unsafe { sendfile_here(to, from, offset, n) } {
            return libc_result(result);
        }
    }
    call_libc!(sendfile, libc::SYS_sendfile,
        (to: c_int, from: c_int, offset: *mut off64_t, n: size_t) -> ssize_t)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    n: size_t,
) -> ssize_t {
    // SAFETY: the same call.
    unsafe { sendfile(to, from, offset, n) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    n: size_t,
    flags: c_uint,
) -> ssize_t {
    let dont_wait = flags & libc::SPLICE_F_NONBLOCK != 0;
    for (fd, out) in [(from, true), (to, false)] {
        let Some(descriptor) = DESCRIPTORS.get(fd) else { continue };
        let dispatch = if out { transfer::dispatch_read } else { transfer::dispatch_write };
        match dispatch(&descriptor, fd, dont_wait) {
            Dispatch::Kernel => {}
            Dispatch::Keep(_) => return libc_result(Err(Errno(libc::EAGAIN))),
            Dispatch::Fail(error) => return libc_result(Err(error)),
            Dispatch::Smc(..) if !from_at.is_null() || !to_at.is_null() => {
                return libc_result(Err(Errno(libc::ESPIPE)));
            }
            Dispatch::Smc(socket, stream) => {
                return libc_result(match out {
                    true => transfer::splice_out((socket, stream), to, n, dont_wait),
                    false => transfer::splice_in((socket, stream), from, n, dont_wait),
                });
            }
        }
    }
    call_libc!(splice, libc::SYS_splice, (from: c_int, from_at: *mut off64_t, to: c_int,
          to_at: *mut off64_t, n: size_t, flags: c_uint) -> ssize_t)
}

/// Defines `preadv2` and `pwritev2`, which are `readv` and `writev` at the offset -1.
macro_rules! positioned {
    ($($name:ident, $number:ident, $without:ident, $flag:expr;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int,
            iov: *const iovec,
            n: c_int,
            offset: off64_t,
            flags: c_int,
        ) -> ssize_t {
            if DESCRIPTORS.has(fd) && offset == -1 {
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

/// # Safety
/// As `readv`.
unsafe fn read_at_once(fd: c_int, iov: *const iovec, n: c_int, dont_wait: bool) -> ssize_t {
    // SAFETY: the program's list.
    match unsafe { user_memory::read_buffers(iov, usize::try_from(n).unwrap_or(usize::MAX)) } {
        Err(error) => libc_result(Err(error)),
        Ok(rooms) => match recv_into(fd, rooms, if dont_wait { libc::MSG_DONTWAIT } else { 0 }) {
            Some(result) => libc_result(result),
            // SAFETY: the same call.
            None => unsafe { readv(fd, iov, n) },
        },
    }
}

/// # Safety
/// As `writev`.
unsafe fn write_at_once(fd: c_int, iov: *const iovec, n: c_int, dont_wait: bool) -> ssize_t {
    // SAFETY: the program's list.
    match unsafe { user_memory::write_buffers(iov, usize::try_from(n).unwrap_or(usize::MAX)) } {
        Err(error) => libc_result(Err(error)),
        Ok(pieces) => match send_from(fd, pieces, if dont_wait { libc::MSG_DONTWAIT } else { 0 }) {
            Some(result) => libc_result(result),
            // SAFETY: the same call.
            None => unsafe { writev(fd, iov, n) },
        },
    }
}
