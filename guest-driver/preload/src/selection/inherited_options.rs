// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the program sets options inherited by accepted sockets from their listener. As long as
//! no such option was set, no system call has to ask for the options of a connection.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::config;
use crate::selection::options;
use crate::sys::raw;

/// Whether any socket may have a time limit, SO_LINGER, SO_OOBINLINE, or a
/// buffer whose size is set.
static OTHERS: AtomicBool = AtomicBool::new(false);
/// Whether the program has set TCP_QUICKACK of any socket.
static QUICKACK: AtomicBool = AtomicBool::new(false);
/// Whether the program has set TCP_NOTSENT_LOWAT of any socket.
static NOTSENT_LOWAT: AtomicBool = AtomicBool::new(false);
/// Whether the program has set TCP_USER_TIMEOUT of any socket.
static USER_TIMEOUT: AtomicBool = AtomicBool::new(false);
/// Whether the program has set TCP_SAVE_SYN of any socket.
static SAVE_SYN: AtomicBool = AtomicBool::new(false);

// The time limits with 64 bits, on all architectures.
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;
// The buffers with a size set by the program, from Linux 5.14 on.
const SO_BUF_LOCK: c_int = 72;
const SOCK_SNDBUF_LOCK: c_int = 1;
const SOCK_RCVBUF_LOCK: c_int = 2;

/// Stores that the program sets an option of a socket. The library's own sockets are Unix sockets.
/// `is_on`: whether the value switches the option on.
pub(crate) fn note(fd: c_int, level: c_int, name: c_int, is_on: impl Fn() -> bool) {
    options::note(level, name, &is_on);
    match name {
        libc::TCP_QUICKACK if level == libc::IPPROTO_TCP => QUICKACK.store(true, Ordering::Relaxed),
        libc::TCP_NOTSENT_LOWAT if level == libc::IPPROTO_TCP => {
            NOTSENT_LOWAT.store(true, Ordering::Relaxed);
        }
        libc::TCP_USER_TIMEOUT if level == libc::IPPROTO_TCP && is_on() => {
            USER_TIMEOUT.store(true, Ordering::Relaxed);
        }
        libc::TCP_SAVE_SYN if level == libc::IPPROTO_TCP => SAVE_SYN.store(true, Ordering::Relaxed),
        _ if level != libc::SOL_SOCKET => {}
        libc::SO_RCVTIMEO
        | libc::SO_SNDTIMEO
        | SO_RCVTIMEO_NEW
        | SO_SNDTIMEO_NEW
        | libc::SO_LINGER
        | libc::SO_SNDBUF
        | libc::SO_SNDBUFFORCE
        | libc::SO_RCVBUF
        | libc::SO_RCVBUFFORCE
        | libc::SO_OOBINLINE
            if !may_be_set() && is_tcp(fd) =>
        {
            OTHERS.store(true, Ordering::Relaxed);
        }
        _ => {}
    }
}

/// Stores that the program has a descriptor of another process. The options of such a TCP socket
/// are unknown.
pub(crate) fn note_foreign(fd: c_int) {
    if is_tcp(fd) {
        options::note_any();
        OTHERS.store(true, Ordering::Relaxed);
        NOTSENT_LOWAT.store(true, Ordering::Relaxed);
        USER_TIMEOUT.store(true, Ordering::Relaxed);
    }
}

/// SO_SNDBUF of a TCP socket, if set by the program: twice the size asked for.
pub(crate) fn send_buffer(fd: c_int) -> Option<usize> {
    buffer(fd, libc::SO_SNDBUF, SOCK_SNDBUF_LOCK)
}

/// Like [`send_buffer`], for SO_RCVBUF.
pub(crate) fn receive_buffer(fd: c_int) -> Option<usize> {
    buffer(fd, libc::SO_RCVBUF, SOCK_RCVBUF_LOCK)
}

fn buffer(fd: c_int, name: c_int, lock: c_int) -> Option<usize> {
    if !may_be_set() {
        return None;
    }
    let locks = raw::socket_option(fd, libc::SOL_SOCKET, SO_BUF_LOCK).ok()?;
    let bytes = raw::socket_option(fd, libc::SOL_SOCKET, name).ok()?;
    if locks & lock == 0 { None } else { usize::try_from(bytes).ok() }
}

/// TCP_NOTSENT_LOWAT of a socket, if the program has set the option on any.
pub(crate) fn unsent_limit(fd: c_int) -> Option<usize> {
    if !NOTSENT_LOWAT.load(Ordering::Relaxed) {
        return None;
    }
    let bytes = raw::socket_option(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT).ok()?;
    usize::try_from(bytes as u32).ok()
}

/// TCP_USER_TIMEOUT of a socket in milliseconds, if the program has set the option on any.
pub(crate) fn user_timeout(fd: c_int) -> Option<u32> {
    if !USER_TIMEOUT.load(Ordering::Relaxed) {
        return None;
    }
    let value = raw::socket_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT).ok()?;
    u32::try_from(value).ok()
}

fn is_tcp(fd: c_int) -> bool {
    raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
}

/// Whether the program may choose itself how TCP acknowledges.
pub(crate) fn may_have_quickack() -> bool {
    QUICKACK.load(Ordering::Relaxed)
}

/// Whether an option of TCP has a value set by the library: listeners that answer option 254 save
/// the SYNs of their clients.
pub(crate) fn is_librarys(name: c_int) -> bool {
    matches!(name, libc::TCP_SAVE_SYN | libc::TCP_SAVED_SYN)
        && config::get().is_some()
        && !SAVE_SYN.load(Ordering::Relaxed)
}

/// Whether a socket may have a time limit, SO_LINGER, SO_OOBINLINE, or a buffer of a set size.
pub(crate) fn may_be_set() -> bool {
    OTHERS.load(Ordering::Relaxed)
}
