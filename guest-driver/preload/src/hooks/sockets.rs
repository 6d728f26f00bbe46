// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the calls to make and connect sockets, and of their options.

use std::ffi::{c_int, c_void};

use ism_sys::{OnceBox, interrupt};
use libc::{sockaddr, socklen_t};

use crate::config;
use crate::hooks::libc_symbols::{call_libc, symbols};
use crate::hooks::rebinding;
use crate::hooks::temporary_relays::by_kernel;
use crate::hooks::within::{restartable, within};
use crate::io::{control, tcp_info};
use crate::relay::take_back;
use crate::selection::{
    answering_listeners, connect, establish, inherited_options, option, options,
};
use crate::socket::descriptors;
use crate::socket::pair::AddressPair;
use crate::socket::table::DESCRIPTORS;
use crate::sys::raw::{self, Errno, RESTART, SysResult};
use crate::sys::user_memory::{self, AddressBuffer, errno, libc_result, set_errno};

/// Protocol number of IP for SMC sockets since Linux 6.11.
const IPPROTO_SMC: c_int = 256;
/// Address family of SMC sockets, and the protocol for IPv6. The protocol for IPv4 is 0.
const AF_SMC: c_int = 43;
const SMCPROTO_SMC6: c_int = 1;

/// A socket of the kernel's AF_SMC in place of a TCP socket. Negative: the kernel has no AF_SMC.
fn kernel_smc_socket(domain: c_int, kind: c_int) -> c_int {
    let family_protocol = if domain == libc::AF_INET6 { SMCPROTO_SMC6 } else { 0 };
    for (domain, protocol) in [(domain, IPPROTO_SMC), (AF_SMC, family_protocol)] {
        let fd = call_libc!(socket, libc::SYS_socket,
            (domain: c_int, kind: c_int, protocol: c_int) -> c_int);
        if fd >= 0 {
            return fd;
        }
    }
    -1
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn socket(
    domain: c_int,
    kind: c_int,
    protocol: c_int,
) -> c_int {
    if config::is_by_kernel() && establish::is_tcp(domain, kind, protocol) {
        let fd = kernel_smc_socket(domain, kind);
        if fd >= 0 {
            return fd;
        }
    }
    let fd = call_libc!(socket, libc::SYS_socket, (domain: c_int, kind: c_int, protocol: c_int)
                   -> c_int);
    if fd >= 0 {
        within(|| {
            descriptors::remove_stale(fd);
            establish::add_socket(fd, domain, kind, protocol);
        });
    }
    fd
}

/// The kernel's `connect`, interrupted by signals; or another library's wrapper of libc's.
fn native_connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> SysResult {
    static WRAPPED: OnceBox<bool> = OnceBox::new();
    if *WRAPPED.get_or_init(|| symbols::connect.get().is_some_and(|at| !rebinding::is_libcs(at))) {
        let result = call_libc!(connect, libc::SYS_connect,
            (fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int);
        let error = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return if result == 0 { Ok(0) } else { Err(Errno(error())) };
    }
    let args = [fd as usize, addr as usize, len as usize, 0, 0, 0];
    // SAFETY: the program's arguments, unchanged.
    match unsafe { raw::sleep(libc::SYS_connect, args) } {
        // A signal came before the call. After EINTR a program polls the socket, so the kernel must be
        // connecting the socket.
        Err(Errno(libc::EINTR)) if interrupt::is_deferred() && raw::is_closed_tcp(fd) => {
            begin_to_connect(fd, args)
        }
        result => result,
    }
}

/// Starts the kernel's connect, and waits for a moment only.
fn begin_to_connect(fd: c_int, args: [usize; 6]) -> SysResult {
    let wanted = raw::timeout_of(fd, libc::SO_SNDTIMEO);
    let set_timeout = |micros: u64| {
        let time = [micros / 1_000_000, micros % 1_000_000];
        let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_SNDTIMEO as usize);
        let at = (&raw const time) as usize;
        // SAFETY: the time is valid until the call returns.
        unsafe { raw::call(libc::SYS_setsockopt, [fd as usize, level, name, at, 16, 0]) }
    };
    let is_limited = set_timeout(1).is_ok();
    // SAFETY: the program's arguments, unchanged.
    let result = unsafe { raw::call(libc::SYS_connect, args) };
    if is_limited {
        let _ = set_timeout(wanted);
    }
    let flags = raw::fcntl(fd, libc::F_GETFL, 0).map_or(0, |flags| flags as c_int);
    match result {
        Err(Errno(libc::EINPROGRESS)) if flags & libc::O_NONBLOCK == 0 => Err(Errno(libc::EINTR)),
        result => result,
    }
}

/// `connect` of a known socket. `None`: the kernel carries out the call.
///
/// # Safety
/// As `connect`.
unsafe fn connect_here(fd: c_int, addr: *const sockaddr, len: socklen_t) -> Option<SysResult> {
    let descriptor = take_back::hold(fd)?;
    let socket = descriptor.stream()?;
    let native = || native_connect(fd, addr, len);
    // SAFETY: the caller's promise.
    if unsafe { user_memory::is_unspecified(addr, len) } {
        return Some(connect::disconnect(fd, &descriptor, native));
    }
    // SAFETY: the caller's promise.
    let to = unsafe { user_memory::address(addr, len) };
    Some(match connect::connect(fd, &descriptor, socket, to, native) {
        Err(Errno(libc::EINTR))
            if interrupt::is_deferred() && raw::timeout_of(fd, libc::SO_SNDTIMEO) == 0 =>
        {
            Err(RESTART)
        }
        result => result,
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn connect(
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> c_int {
    // SAFETY: the program's address.
    let here = || unsafe { connect_here(fd, addr, len) };
    if DESCRIPTORS.has(fd)
        && let Some(result) = restartable(here)
    {
        return libc_result(result) as c_int;
    }
    let result = call_libc!(connect, libc::SYS_connect,
        (fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int);
    let error = errno();
    if result == 0 || error == libc::EINPROGRESS {
        within(|| establish::note_connected(fd));
        set_errno(error);
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    let is_on_smc = || DESCRIPTORS.get(fd).as_ref().is_some_and(control::is_on_smc);
    if DESCRIPTORS.has(fd) && within(is_on_smc) {
        // The kernel may have been made to forget the connection.
        return libc_result(Err(Errno(libc::EINVAL))) as c_int;
    }
    within(|| option::before_listen(fd));
    let result = call_libc!(listen, libc::SYS_listen, (fd: c_int, backlog: c_int) -> c_int);
    if result == 0 && config::get().is_some() {
        within(|| establish::remove_listener(fd));
    }
    result
}

/// `accept` by one of libc's functions. On an answering listener the client's address comes from the
/// call itself: a client left to TCP then costs no further call.
///
/// # Safety
/// `addr` and `len` are the program's arguments.
unsafe fn accept_by(
    fd: c_int,
    (addr, len): (*mut sockaddr, *mut socklen_t),
    nonblocking: bool,
    native: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int,
) -> c_int {
    if !answering_listeners::contains(fd) {
        within(|| option::before_accept(fd));
        let new = native(addr, len);
        if new >= 0 {
            within(|| {
                descriptors::remove_stale(new);
                establish::add_accepted(new, nonblocking, None);
            });
        }
        return new;
    }
    // SAFETY: as the caller promises.
    let mut room = unsafe { AddressBuffer::new(addr, len) };
    let (addr, len) = room.pointers();
    let new = native(addr, len);
    if new >= 0 {
        within(|| {
            descriptors::remove_stale(new);
            // SAFETY: the kernel has written the address.
            establish::add_accepted(new, nonblocking, unsafe { room.address() });
        });
    }
    new
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn accept(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let native = |addr: *mut sockaddr, len: *mut socklen_t| {
        call_libc!(accept, libc::SYS_accept,
            (fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int)
    };
    // SAFETY: the program's arguments.
    unsafe { accept_by(fd, (addr, len), false, native) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let native = |addr: *mut sockaddr, len: *mut socklen_t| {
        call_libc!(accept4, libc::SYS_accept4,
            (fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int)
    };
    // SAFETY: the program's arguments.
    unsafe { accept_by(fd, (addr, len), flags & libc::SOCK_NONBLOCK != 0, native) }
}

/// The descriptor of the TCP socket, for names and options. If another process carries the connection,
/// the descriptor is not `fd`.
fn tcp_fd_of(fd: c_int) -> c_int {
    let of_connection = || DESCRIPTORS.get(fd)?.stream()?.tcp_fd();
    if DESCRIPTORS.has(fd) { within(of_connection).unwrap_or(fd) } else { fd }
}

/// Makes a short call on the TCP socket.
fn on_tcp(fd: c_int, call: impl FnOnce(c_int) -> c_int) -> c_int {
    if !DESCRIPTORS.has(fd) {
        return call(fd);
    }
    within(|| {
        let _held = take_back::hold(fd);
        call(tcp_fd_of(fd))
    })
}

/// The addresses of a connection served by another process's relay.
fn relayed_names(fd: c_int) -> Option<AddressPair> {
    if !DESCRIPTORS.has(fd) {
        return None;
    }
    within(|| DESCRIPTORS.get(fd)?.stream()?.relayed.names().copied())
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn getsockname(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let of_reset = || {
        let descriptor = DESCRIPTORS.get(fd)?;
        if let Some(client) = descriptor.stream()?.side.client() {
            client.set_name_known();
        }
        control::name_of_reset(&descriptor)
    };
    let reset = || if DESCRIPTORS.has(fd) { within(of_reset) } else { None };
    if let Some(local) = relayed_names(fd).map(|(local, _)| local).or_else(reset) {
        // SAFETY: the program's room.
        return libc_result(unsafe { user_memory::write_address(addr, len, local) }) as c_int;
    }
    on_tcp(fd, |fd| {
        call_libc!(getsockname, libc::SYS_getsockname, (fd: c_int, addr: *mut sockaddr,
            len: *mut socklen_t) -> c_int)
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn getpeername(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    if let Some((_, peer)) = relayed_names(fd) {
        // SAFETY: the program's room.
        return libc_result(unsafe { user_memory::write_address(addr, len, peer) }) as c_int;
    }
    let is_over = || DESCRIPTORS.get(fd).as_ref().is_some_and(control::is_over);
    if DESCRIPTORS.has(fd) && within(is_over) {
        return libc_result(Err(Errno(libc::ENOTCONN))) as c_int;
    }
    on_tcp(fd, |fd| {
        call_libc!(getpeername, libc::SYS_getpeername, (fd: c_int, addr: *mut sockaddr,
            len: *mut socklen_t) -> c_int)
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's arguments.
    within(|| unsafe { get_option(fd, level, name, value, len) })
}

/// # Safety
/// As `getsockopt`.
unsafe fn get_option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let _held = if DESCRIPTORS.has(fd) { take_back::hold(fd) } else { None };
    // TCP_ZEROCOPY_RECEIVE reads bytes.
    if (level, name) == (libc::IPPROTO_TCP, options::TCP_ZEROCOPY_RECEIVE)
        && DESCRIPTORS.has(fd)
        && let Some(descriptor) = DESCRIPTORS.get(fd)
        && let Some(socket) = descriptor.stream()
        && control::refuses_option(socket, level, name)
    {
        return libc_result(Err(Errno(libc::EOPNOTSUPP))) as c_int;
    }
    if DESCRIPTORS.has(fd)
        && let Some(descriptor) = DESCRIPTORS.get(fd)
        && let Some(answer) = control::get_option(&descriptor, fd, level, name)
        // SAFETY: the program's room.
        && unsafe { user_memory::is_room(value, len) }
    {
        // SAFETY: the program's length and room.
        unsafe {
            let room = (*len as usize).min(4);
            std::ptr::copy_nonoverlapping(answer.to_ne_bytes().as_ptr(), value.cast(), room);
            *len = room as socklen_t;
        }
        return 0;
    }
    if level == libc::IPPROTO_TCP
        && inherited_options::is_librarys(name)
        // SAFETY: the program's room.
        && unsafe { user_memory::is_room(value, len) }
    {
        // SAFETY: the program's length and room.
        unsafe {
            *len = if name == libc::TCP_SAVE_SYN { (*len).min(4) } else { 0 };
            value.cast::<u8>().write_bytes(0, *len as usize);
        }
        return 0;
    }
    let of_program = fd;
    let fd = if control::is_of_descriptor(level, name) { fd } else { tcp_fd_of(fd) };
    let result = call_libc!(getsockopt, libc::SYS_getsockopt, (fd: c_int, level: c_int,
        name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int);
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_INFO)
        && result == 0
        && DESCRIPTORS.has(of_program)
        && let Some(descriptor) = DESCRIPTORS.get(of_program)
    {
        let mut info = [0u8; tcp_info::MOST];
        // SAFETY: the kernel has written so many bytes there.
        let n = unsafe { *len as usize }.min(info.len());
        // SAFETY: as above; the room here is long enough.
        unsafe { std::ptr::copy_nonoverlapping(value.cast(), info.as_mut_ptr(), n) };
        tcp_info::correct(&descriptor, of_program, info.get_mut(..n).unwrap_or_default());
        // SAFETY: the same bytes of the program.
        unsafe { std::ptr::copy_nonoverlapping(info.as_ptr(), value.cast(), n) };
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER)
        && result == 0
        && DESCRIPTORS.has(of_program)
        && let Some(descriptor) = DESCRIPTORS.get(of_program)
        && let Some(linger) = control::programs_linger(&descriptor)
    {
        let bytes = linger.map(c_int::to_ne_bytes).concat();
        // SAFETY: the kernel has written so many bytes there, at most those of the structure.
        unsafe {
            let n = (*len as usize).min(bytes.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), n);
        }
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if !interrupt::is_inside() {
        // The library sets options by libc, too.
        // SAFETY: the program's value.
        let is_on = || unsafe { asks_for(level, name, value, len) };
        within(|| inherited_options::note(fd, level, name, is_on));
    }
    // SAFETY: the program's arguments.
    within(|| unsafe { set_option(fd, level, name, value, len) })
}

/// Whether a value of an option switches the option on. True for values other than numbers.
///
/// # Safety
/// `value` leads to `len` bytes, or nowhere.
unsafe fn asks_for(level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> bool {
    if (len as usize) < size_of::<c_int>() || user_memory::is_nowhere(value, len as usize) {
        return true;
    }
    // SAFETY: the caller's promise.
    options::is_on(level, name, unsafe { value.cast::<c_int>().read_unaligned() })
}

/// # Safety
/// As `setsockopt`.
unsafe fn set_option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let known = if DESCRIPTORS.has(fd) { take_back::hold(fd) } else { None };
    let socket = known.as_ref().and_then(|descriptor| descriptor.stream());
    // SAFETY: the program's value.
    let is_on = || unsafe { asks_for(level, name, value, len) };
    if socket.is_some_and(|socket| is_on() && control::refuses_option(socket, level, name)) {
        return libc_result(Err(Errno(libc::EOPNOTSUPP))) as c_int;
    }
    if level != libc::SOL_SOCKET && relayed_names(fd).is_some() {
        // There is no TCP connection for the option.
        return 0;
    }
    // Without the lock a relay coming or going meanwhile would keep the old options.
    let numbers = descriptors::lock_numbers(fd, fd);
    let pair = fd;
    let fd = tcp_fd_of(fd);
    if fd != pair && control::is_of_transfer(level, name) {
        // The program's calls are on the pair. The kernel's result for TCP is the result.
        let fd = pair;
        let _ = call_libc!(setsockopt, libc::SYS_setsockopt, (fd: c_int, level: c_int,
            name: c_int, value: *const c_void, len: socklen_t) -> c_int);
    }
    let result = call_libc!(setsockopt, libc::SYS_setsockopt, (fd: c_int, level: c_int, name: c_int,
        value: *const c_void, len: socklen_t) -> c_int);
    drop(numbers);
    if result == 0
        && let Some(socket) = socket
    {
        control::follow_option(fd, socket, level, name);
    }
    result
}

/// libc makes the system call by itself.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sockatmark(fd: c_int) -> c_int {
    let mut mark: c_int = 0;
    // SAFETY: the number is valid until the call returns.
    match unsafe { super::descriptors::ioctl(fd, control::SIOCATMARK, &raw mut mark) } {
        0 => mark,
        error => error,
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let native = || call_libc!(shutdown, libc::SYS_shutdown, (fd: c_int, how: c_int) -> c_int);
    let here = || control::shutdown(fd, &DESCRIPTORS.get(fd)?, how);
    if DESCRIPTORS.has(fd) {
        if let Some(result) = within(here) {
            return libc_result(result) as c_int;
        }
        // SAFETY: the same call.
        return by_kernel(fd, || unsafe { shutdown(fd, how) }, native);
    }
    native()
}
