// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs making system calls by instructions of their own, unseen by the library. The kernel
//! polls and reads the TCP socket for such a program. Once the library finds out, the process
//! begins no further connection on SMC, and its listeners answer no client.
//!
//! The files of a process show most such programs before their first connection. Others are found
//! by their actions.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::socket::stream::StreamSocket;
use crate::socket::table::DESCRIPTORS;
use crate::status;
use crate::sys::{borrowed, is_epoll_set, raw};

/// Whether the program makes such calls on connections that may be on SMC.
static FOUND: AtomicBool = AtomicBool::new(false);

/// Whether the library has found out about such calls.
#[inline]
pub(crate) fn found() -> bool {
    FOUND.load(Ordering::Relaxed)
}

/// Notes such calls, named by `what`.
fn note(what: &str) {
    if !FOUND.swap(true, Ordering::Relaxed) {
        status::program_goes_around(what);
    }
}

/// Looks for sets of epoll that the program has made without the library and in which it watches
/// connections or listeners. Called before the process opens a device.
pub(super) fn look_for_sets() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let mut unknown = entries.flatten().filter_map(number).filter(|fd| !DESCRIPTORS.has(*fd));
    if unknown.any(|fd| is_epoll_set(fd) && watches_connections(fd)) {
        note("epoll");
    }
}

/// Whether the program has read the first bytes of a client without the library: the program took
/// the Proposal for data. A process sharing the connection may have read the bytes with the
/// library.
pub(super) fn has_read(socket: &StreamSocket, fd: c_int) -> bool {
    /// An urgent byte and the end of data may count as received, and not as queued.
    const UNCERTAIN: u64 = 2;
    let queued = rustix::io::ioctl_fionread(borrowed(fd)).unwrap_or(u64::MAX);
    let has_read = !socket.owner.may_be_shared()
        && raw::received_bytes(fd).is_some_and(|all| all > queued.saturating_add(UNCERTAIN));
    if has_read {
        note("read");
    }
    has_read
}

/// Whether a set has a connection that the library knows, or a listener of TCP.
fn watches_connections(set: c_int) -> bool {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{set}")).unwrap_or_default();
    text.lines().filter_map(member).any(|fd| {
        let known = || DESCRIPTORS.get(fd).is_some_and(|found| found.stream().is_some());
        DESCRIPTORS.has(fd) && known() || is_listener(fd)
    })
}

fn is_listener(fd: c_int) -> bool {
    let option = |name| raw::socket_option(fd, libc::SOL_SOCKET, name);
    option(libc::SO_ACCEPTCONN) == Ok(1) && option(libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
}

/// The descriptor of a line about a member of a set.
fn member(line: &str) -> Option<c_int> {
    line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_set_name_its_members() {
        let line = "tfd:        5 events:       19 data:                5  pos:0 ino:1b3 sdev:8";
        assert_eq!(member(line), Some(5));
        assert_eq!(member("flags:\t02000002"), None);
    }
}
