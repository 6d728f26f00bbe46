//! Descriptors as such: what close, dup and their like do to the table.

use std::ffi::c_int;
use std::net::Shutdown;

use crate::socket::epoll_set::EpollSet;
use crate::socket::registrations;
use crate::socket::table::{DESCRIPTORS, Descriptor};
use crate::{config, fork};

/// A descriptor is about to be closed.
pub(crate) fn closing(fd: c_int) {
    if !DESCRIPTORS.has(fd) || fork::borrows_memory() {
        return;
    }
    let Some(descriptor) = DESCRIPTORS.remove(fd) else { return };
    if descriptor.handles() > 0 {
        return;
    }
    match &*descriptor {
        Descriptor::Stream(socket) => {
            registrations::forget(socket);
            // A call of another thread still refers to it, and the process may end before that does:
            // the peer has to hear of the end all the same.
            if descriptor.is_in_use()
                && let Some(stream) = socket.smc()
            {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        Descriptor::Set(set) => set.close(fd),
    }
}

/// Descriptors of a range are about to be closed.
pub(crate) fn closing_range(first: c_int, last: c_int) {
    let last = last.min(DESCRIPTORS.highest());
    if first >= 0 && !fork::borrows_memory() {
        (first..=last).for_each(closing);
    }
}

/// `new` is now what `old` is.
pub(crate) fn duplicated(old: c_int, new: c_int) {
    if old == new || fork::borrows_memory() {
        return;
    }
    if let Some(descriptor) = DESCRIPTORS.get(old) {
        DESCRIPTORS.share(&descriptor, new);
    }
}

/// A new descriptor that is nothing of ours: an entry would be a leftover.
#[inline]
pub(crate) fn fresh(fd: c_int) {
    if DESCRIPTORS.has(fd) {
        closing(fd);
    }
}

/// An epoll set was made.
pub(crate) fn set_made(fd: c_int) {
    if config::get().is_some() && !fork::borrows_memory() {
        DESCRIPTORS.install(fd, Descriptor::Set(EpollSet::new()));
    }
}

/// The program ends: connections close as the kernel would close them.
pub(crate) fn end() {
    for fd in 0..=DESCRIPTORS.highest() {
        if DESCRIPTORS.get(fd).is_some_and(|descriptor| descriptor.stream().is_some()) {
            closing(fd);
        }
    }
}
