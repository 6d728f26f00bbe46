//! Descriptors as such: what close, dup and their like do to the table.

use std::ffi::c_int;
use std::net::Shutdown;

use crate::socket::epoll_set::EpollSet;
use crate::socket::registrations;
use crate::socket::table::{DESCRIPTORS, Descriptor};
use crate::{config, fork};

/// A descriptor is about to be closed.
pub(crate) fn close(fd: c_int) {
    if !DESCRIPTORS.has(fd) || fork::shares_memory() {
        return;
    }
    let Some(descriptor) = DESCRIPTORS.remove(fd) else { return };
    if descriptor.handles() > 0 {
        return;
    }
    match &*descriptor {
        Descriptor::Stream(socket) => {
            registrations::close(socket);
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
pub(crate) fn close_range(first: c_int, last: c_int) {
    let last = last.min(DESCRIPTORS.highest());
    if first >= 0 && !fork::shares_memory() {
        (first..=last).for_each(close);
    }
}

/// `new` is now what `old` is.
pub(crate) fn duplicate(old: c_int, new: c_int) {
    if old == new || fork::shares_memory() {
        return;
    }
    if let Some(descriptor) = DESCRIPTORS.get(old) {
        DESCRIPTORS.share(&descriptor, new);
    }
}

/// A new descriptor that is nothing of ours: an entry would be a leftover.
#[inline]
pub(crate) fn remove_stale(fd: c_int) {
    if DESCRIPTORS.has(fd) {
        close(fd);
    }
}

/// An epoll set was made.
pub(crate) fn add_epoll_set(fd: c_int) {
    if config::get().is_some() && !fork::shares_memory() {
        DESCRIPTORS.install(fd, Descriptor::Set(EpollSet::new()));
    }
}

/// The program ends: connections close as the kernel would close them.
pub(crate) fn close_all() {
    for fd in 0..=DESCRIPTORS.highest() {
        if DESCRIPTORS.get(fd).is_some_and(|descriptor| descriptor.stream().is_some()) {
            close(fd);
        }
    }
}
