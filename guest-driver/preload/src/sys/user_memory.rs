// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory passed by the program to a call. The kernel checks the addresses. This module rejects null
//! with an offset and addresses outside of the address space. Any other bad address faults, as in any
//! function of libc with its own access to the memory.

use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use guest_driver::interpose::SignalMask;

use super::raw::{self, Errno, RESTART, SysResult};

/// The kernel maps nothing below this address for unprivileged programs (vm.mmap_min_addr).
const LOWEST: usize = 64 << 10;
/// The end of the usual addresses of programs.
#[cfg(target_arch = "x86_64")]
const END: usize = 1 << 47;
#[cfg(not(target_arch = "x86_64"))]
const END: usize = 1 << 48;

/// Whether `len` bytes at an address are no memory at all, judged by the address. Costs two comparisons
/// for usual addresses.
#[inline]
pub(crate) fn is_nowhere<T>(at: *const T, len: usize) -> bool {
    len != 0 && at.addr().wrapping_sub(LOWEST) >= END - LOWEST && raw::is_unmapped(at.addr())
}

/// Whether an option can be stored. Otherwise the kernel returns the error.
///
/// # Safety
/// `len` leads to a length, or nowhere.
pub(crate) unsafe fn is_room(value: *const c_void, len: *const libc::socklen_t) -> bool {
    if is_nowhere(len, 1) {
        return false;
    }
    // SAFETY: the caller's promise.
    let len = unsafe { len.read_unaligned() };
    len as c_int >= 0 && !is_nowhere(value, len as usize)
}

/// A buffer of the program to read into; `None`: there is no memory.
///
/// # Safety
/// `buf` must lead to `len` writable bytes, or nowhere.
#[inline]
pub(crate) unsafe fn read_buffer<'a>(buf: *mut c_void, len: usize) -> Option<&'a mut [u8]> {
    if len == 0 {
        return Some(&mut []);
    }
    // SAFETY: the caller's promise.
    (!is_nowhere(buf, len)).then(|| unsafe {
        std::slice::from_raw_parts_mut(buf.cast(), len.min(isize::MAX as usize))
    })
}

/// A buffer of the program to write from; `None`: there is no memory.
///
/// # Safety
/// `buf` must lead to `len` readable bytes, or nowhere.
#[inline]
pub(crate) unsafe fn write_buffer<'a>(buf: *const c_void, len: usize) -> Option<&'a [u8]> {
    if len == 0 {
        return Some(&[]);
    }
    // SAFETY: the caller's promise.
    (!is_nowhere(buf, len))
        .then(|| unsafe { std::slice::from_raw_parts(buf.cast(), len.min(isize::MAX as usize)) })
}

/// A list of buffers of the program to read into; `None`: one of the buffers has no memory. EINVAL if
/// the list is too long or a length is negative, EFAULT if the list itself has no memory.
///
/// # Safety
/// `iov` must lead to `n` descriptions of writable memory, or nowhere.
pub(crate) unsafe fn read_buffers<'a>(
    iov: *const libc::iovec,
    n: usize,
) -> Result<Option<BufferList<'a>>, Errno> {
    // SAFETY: the caller's promise.
    let Some(list) = unsafe { check_list(iov, n) }? else { return Ok(None) };
    if list.iter().any(|entry| entry.iov_base.is_null()) {
        let entries = list.iter().filter(|entry| entry.iov_len != 0);
        // SAFETY: the caller's promise.
        let buffer = |entry: &libc::iovec| unsafe { read_buffer(entry.iov_base, entry.iov_len) };
        let buffers = entries.filter_map(buffer).map(IoSliceMut::new).collect();
        return Ok(Some(BufferList::Copied(buffers)));
    }
    if n == 0 {
        return Ok(Some(BufferList::Copied(Vec::new())));
    }
    // SAFETY: the caller's promise; `IoSliceMut` has the layout of `iovec`. The library only reads
    // the list.
    let list = unsafe { std::slice::from_raw_parts_mut(iov.cast_mut().cast(), n) };
    Ok(Some(BufferList::List(list)))
}

/// A list of buffers to read into.
pub(crate) enum BufferList<'a> {
    /// The program's own.
    List(&'a mut [IoSliceMut<'a>]),
    /// A copy without its empty entries: an empty entry may have a null address in the kernel, but not
    /// in a slice.
    Copied(Vec<IoSliceMut<'a>>),
}

impl<'a> Deref for BufferList<'a> {
    type Target = [IoSliceMut<'a>];

    fn deref(&self) -> &[IoSliceMut<'a>] {
        match self {
            BufferList::List(list) => list,
            BufferList::Copied(list) => list,
        }
    }
}

impl<'a> DerefMut for BufferList<'a> {
    fn deref_mut(&mut self) -> &mut [IoSliceMut<'a>] {
        match self {
            BufferList::List(list) => list,
            BufferList::Copied(list) => list,
        }
    }
}

/// A list of buffers of the program to write from. Errors as in [`read_buffers`].
///
/// # Safety
/// `iov` must lead to `n` descriptions of readable memory, or nowhere.
pub(crate) unsafe fn write_buffers<'a>(
    iov: *const libc::iovec,
    n: usize,
) -> Result<Option<Cow<'a, [IoSlice<'a>]>>, Errno> {
    // SAFETY: the caller's promise.
    let Some(list) = unsafe { check_list(iov, n) }? else { return Ok(None) };
    if list.iter().any(|entry| entry.iov_base.is_null()) {
        let entries = list.iter().filter(|entry| entry.iov_len != 0);
        // SAFETY: the caller's promise.
        let buffer = |entry: &libc::iovec| unsafe { write_buffer(entry.iov_base, entry.iov_len) };
        return Ok(Some(entries.filter_map(buffer).map(IoSlice::new).collect()));
    }
    if n == 0 {
        return Ok(Some(Cow::Borrowed(&[])));
    }
    // SAFETY: the caller's promise; `IoSlice` has the layout of `iovec`.
    Ok(Some(Cow::Borrowed(unsafe { std::slice::from_raw_parts(iov.cast(), n) })))
}

/// The sum of the lengths of a list of buffers, with memory behind them or not. Errors as for
/// [`read_buffers`].
///
/// # Safety
/// `iov` must lead to `n` descriptions, or nowhere.
pub(crate) unsafe fn length(iov: *const libc::iovec, n: usize) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    let list = unsafe { entries(iov, n) }?;
    Ok(list.iter().fold(0, |sum: usize, entry| sum.saturating_add(entry.iov_len)))
}

/// The entries of a list; `None`: one of the buffers has no memory.
///
/// # Safety
/// `iov` must lead to `n` entries, or nowhere.
unsafe fn check_list<'a>(
    iov: *const libc::iovec,
    n: usize,
) -> Result<Option<&'a [libc::iovec]>, Errno> {
    // SAFETY: the caller's promise.
    let list = unsafe { entries(iov, n) }?;
    let nowhere = |entry: &libc::iovec| is_nowhere(entry.iov_base, entry.iov_len);
    Ok((!list.iter().any(nowhere)).then_some(list))
}

/// The entries of a list.
///
/// # Safety
/// As for [`length`].
unsafe fn entries<'a>(iov: *const libc::iovec, n: usize) -> Result<&'a [libc::iovec], Errno> {
    if n > libc::UIO_MAXIOV as usize {
        return Err(Errno(libc::EINVAL));
    }
    if n == 0 {
        return Ok(&[]);
    }
    if is_nowhere(iov, n) {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(iov, n) };
    match list.iter().any(|entry| entry.iov_len > isize::MAX as usize) {
        true => Err(Errno(libc::EINVAL)),
        false => Ok(list),
    }
}

/// Number of the control message with the size of the queue, and of the option for this message.
pub(crate) const TCP_INQ: c_int = 36;

/// Writes the control message of TCP_INQ like the kernel: cut off at the end of the buffer.
///
/// # Safety
/// `header.msg_control` leads to `room` bytes, or nowhere.
pub(crate) unsafe fn write_queue_size(header: &mut libc::msghdr, room: usize, queued: c_int) {
    let head = std::mem::size_of::<libc::cmsghdr>();
    if room < head || is_nowhere(header.msg_control, room) {
        header.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    let wanted = head + std::mem::size_of::<c_int>();
    // SAFETY: an all-zero value is valid.
    let mut message: libc::cmsghdr = unsafe { std::mem::zeroed() };
    message.cmsg_level = libc::IPPROTO_TCP;
    message.cmsg_type = TCP_INQ;
    message.cmsg_len = wanted.min(room) as _;
    if room < wanted {
        header.msg_flags |= libc::MSG_CTRUNC;
    }
    let bytes = queued.to_ne_bytes();
    // SAFETY: the caller's promise; both pieces end within the room.
    unsafe {
        header.msg_control.cast::<libc::cmsghdr>().write_unaligned(message);
        let data = header.msg_control.cast::<u8>().add(head);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len().min(room - head));
    }
    // The kernel counts the padding, up to the end of the buffer.
    header.msg_controllen = wanted.next_multiple_of(std::mem::align_of::<usize>()).min(room) as _;
}

/// An IPv4 or IPv6 address; `None`: another family, or too short.
///
/// # Safety
/// `addr` must lead to `len` bytes.
pub(crate) unsafe fn address(addr: *const libc::sockaddr, len: u32) -> Option<SocketAddr> {
    if addr.is_null() || (len as usize) < std::mem::size_of::<libc::sockaddr_in>() {
        return None;
    }
    // SAFETY: the caller's promise; the length was compared.
    let v4: libc::sockaddr_in = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
    match c_int::from(v4.sin_family) {
        libc::AF_INET => {
            let ip = std::net::Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddr::from((ip, u16::from_be(v4.sin_port))))
        }
        libc::AF_INET6 if len as usize >= std::mem::size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = std::net::Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Some(SocketAddr::from((ip.to_canonical(), u16::from_be(v6.sin6_port))))
        }
        _ => None,
    }
}

/// Buffer of accept(2) for the address of a client: the program's, or the library's if the program does
/// not want the address.
pub(crate) struct AddressBuffer {
    own: libc::sockaddr_storage,
    own_len: libc::socklen_t,
    addr: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
    /// Bytes of the program's buffer; 0: not known.
    room: libc::socklen_t,
}

/// Distance above the stack pointer of addresses certainly on the stack.
const ON_STACK: usize = 32 << 10;
/// The same above the stack pointer of a program with a stack of its own: a goroutine's is small.
const ON_PROGRAM_STACK: usize = 1 << 10;

thread_local! {
    /// The program's stack pointer, while the library answers on another stack.
    static PROGRAM_STACK: Cell<usize> = const { Cell::new(0) };
}

/// Makes a call for a program with this stack pointer, on another stack.
#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) fn for_stack<R>(pointer: usize, call: impl FnOnce() -> R) -> R {
    PROGRAM_STACK.set(pointer);
    let result = call();
    PROGRAM_STACK.set(0);
    result
}

impl AddressBuffer {
    /// The program's buffer.
    ///
    /// # Safety
    /// `addr` and `len` are the program's arguments.
    pub(crate) unsafe fn new(
        addr: *mut libc::sockaddr,
        len: *mut libc::socklen_t,
    ) -> AddressBuffer {
        let here = 0u8;
        // For a bad address the kernel has an error, so only a certainly good address is read: nearly
        // always the address of a local variable.
        let from_here = (len as usize).wrapping_sub(std::ptr::from_ref(&here) as usize);
        let from_program = (len as usize).wrapping_sub(PROGRAM_STACK.get());
        let is_local = from_here < ON_STACK || from_program < ON_PROGRAM_STACK;
        let room = match !addr.is_null() && is_local {
            // SAFETY: the memory is that of the callers of this function.
            true => unsafe { len.read_unaligned() },
            false => 0,
        };
        // SAFETY: all zeros are an address of no family.
        let own = unsafe { std::mem::zeroed() };
        let own_len = std::mem::size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        AddressBuffer { own, own_len, addr, len, room }
    }

    /// The kernel's arguments.
    pub(crate) fn pointers(&mut self) -> (*mut libc::sockaddr, *mut libc::socklen_t) {
        match self.addr.is_null() {
            true => (std::ptr::from_mut(&mut self.own).cast(), &raw mut self.own_len),
            false => (self.addr, self.len),
        }
    }

    /// The stored IPv4 or IPv6 address, if complete.
    ///
    /// # Safety
    /// The kernel has written an address.
    pub(crate) unsafe fn address(&self) -> Option<SocketAddr> {
        if self.addr.is_null() {
            // SAFETY: the memory is this value's, and longer than each possible address.
            return unsafe { address(std::ptr::from_ref(&self.own).cast(), self.own_len) };
        }
        // SAFETY: the kernel has written this many bytes.
        unsafe { address(self.addr, self.room) }
    }
}

/// Whether an address is of no family, to disconnect a socket.
///
/// # Safety
/// `addr` must lead to `len` bytes.
pub(crate) unsafe fn is_unspecified(addr: *const libc::sockaddr, len: u32) -> bool {
    // SAFETY: the caller's promise; the length was compared.
    !addr.is_null()
        && len >= 2
        && c_int::from(unsafe { addr.cast::<u16>().read_unaligned() }) == libc::AF_UNSPEC
}

/// Writes an address into the program's buffer, as `getsockname` does.
///
/// # Safety
/// `addr` must lead to `*len` bytes, unless null.
pub(crate) unsafe fn write_address(
    addr: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
    address: SocketAddr,
) -> SysResult {
    if addr.is_null() || len.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    let (mut v4, mut v6): (libc::sockaddr_in, libc::sockaddr_in6) =
        // SAFETY: all zeros are a value of both.
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let (from, size) = match address {
        SocketAddr::V4(address) => {
            v4.sin_family = libc::AF_INET as u16;
            v4.sin_port = address.port().to_be();
            v4.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
            (std::ptr::from_ref(&v4).cast::<u8>(), std::mem::size_of_val(&v4))
        }
        SocketAddr::V6(address) => {
            v6.sin6_family = libc::AF_INET6 as u16;
            v6.sin6_port = address.port().to_be();
            v6.sin6_addr.s6_addr = address.ip().octets();
            v6.sin6_scope_id = address.scope_id();
            (std::ptr::from_ref(&v6).cast::<u8>(), std::mem::size_of_val(&v6))
        }
    };
    // SAFETY: the caller's promise; the source has `size` bytes.
    unsafe {
        let room = (*len as usize).min(size);
        std::ptr::copy_nonoverlapping(from, addr.cast(), room);
        *len = size as libc::socklen_t;
    }
    Ok(0)
}

/// A timeout; `None`: for ever.
///
/// # Safety
/// `time` must be null or lead to one.
pub(crate) unsafe fn timespec(time: *const libc::timespec) -> Option<Duration> {
    // SAFETY: the caller's promise.
    unsafe { time.as_ref() }.map(|time| {
        let secs = u64::try_from(time.tv_sec).unwrap_or(0);
        Duration::new(secs, u32::try_from(time.tv_nsec).unwrap_or(0).min(999_999_999))
    })
}

/// Whether an address to send to is not readable, or too long.
pub(crate) fn is_no_address(addr: *const libc::sockaddr, len: libc::socklen_t) -> bool {
    let len = len as usize;
    !addr.is_null() && (len > size_of::<libc::sockaddr_storage>() || is_nowhere(addr, len))
}

/// Lets the kernel check the control messages of a message, without sending a byte.
///
/// # Safety
/// The header leads to its control messages, or nowhere.
pub(crate) unsafe fn check_control(fd: c_int, header: &libc::msghdr) -> Result<(), Errno> {
    let mut empty = *header;
    (empty.msg_iov, empty.msg_iovlen) = (std::ptr::null_mut(), 0);
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
    let args = [fd as usize, (&raw const empty) as usize, flags, 0, 0, 0];
    // SAFETY: the header is valid until the call returns, and the kernel checks the rest.
    match unsafe { raw::call(libc::SYS_sendmsg, args) } {
        Err(error @ Errno(libc::EINVAL | libc::EPERM | libc::EFAULT | libc::ENOBUFS)) => Err(error),
        _ => Ok(()),
    }
}

/// Whether the kernel refuses a time (EINVAL).
///
/// # Safety
/// `time` must be null or lead to one.
pub(crate) unsafe fn is_no_time(time: *const libc::timespec) -> bool {
    // SAFETY: the caller's promise.
    let time = unsafe { time.as_ref() };
    time.is_some_and(|time| time.tv_sec < 0 || !(0..1_000_000_000).contains(&time.tv_nsec))
}

/// A timeout in milliseconds; negative: for ever.
pub(crate) fn millis(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}

/// Sets `errno`.
pub(crate) fn set_errno(error: c_int) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = error };
    share_errno();
}

/// Functions like `__errno_location`, of copies of libc in other namespaces.
static OTHER_ERRNOS: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];

/// Adds the `errno` of another copy of libc, for the errors of failed calls. The linker makes fewer
/// namespaces than there are places.
///
/// # Safety
/// `location` is the address of a function like `__errno_location`, for as long as the process lives.
pub(crate) unsafe fn add_errno(location: usize) {
    let take = |place: &AtomicUsize| {
        place.compare_exchange(0, location, Ordering::Release, Ordering::Relaxed).is_ok()
    };
    let _ = OTHER_ERRNOS.iter().any(take);
}

/// Copies `errno` to other copies of libc, after a failed call. Costs one load if there are none.
#[inline]
pub(crate) fn share_errno() {
    if OTHER_ERRNOS[0].load(Ordering::Acquire) != 0 {
        copy_errno();
    }
}

#[cold]
fn copy_errno() {
    let error = errno();
    let locations = OTHER_ERRNOS.iter().map(|place| place.load(Ordering::Acquire));
    for location in locations.take_while(|location| *location != 0) {
        // SAFETY: the promise of the caller of `add_errno`.
        unsafe {
            let location = std::mem::transmute::<usize, extern "C" fn() -> *mut c_int>(location);
            *location() = error;
        }
    }
}

/// Converts a result to the return value of libc's functions, and sets `errno`.
pub(crate) fn libc_result(result: SysResult) -> isize {
    match result {
        Ok(value) => value as isize,
        Err(error) => {
            set_errno(if error == RESTART { libc::EINTR } else { error.0 });
            -1
        }
    }
}

/// A signal mask; the kernel knows the first 64 signals. `None`: the program passed none.
///
/// # Safety
/// `mask` must be null or lead to one.
pub(crate) unsafe fn mask(mask: *const libc::sigset_t) -> Option<SignalMask> {
    // SAFETY: the caller's promise; a set is longer than this.
    (!mask.is_null()).then(|| SignalMask(unsafe { mask.cast::<u64>().read_unaligned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_read_only_from_the_stack_of_the_thread_or_of_its_program() {
        let mut far = Box::new([28u32; 512]);
        let mut address = [0u8; 28];
        let addr = (&raw mut address).cast::<libc::sockaddr>();
        let stack = (&raw const far[0]) as usize;
        let mut room = |at: usize| {
            // SAFETY: both lead to memory.
            unsafe { AddressBuffer::new(addr, &raw mut far[at]) }.room
        };
        assert_eq!(room(0), 0);
        assert_eq!(for_stack(stack, || [room(1), room(511)]), [28, 0]);
        assert_eq!(room(1), 0, "the call is over");
    }
}
