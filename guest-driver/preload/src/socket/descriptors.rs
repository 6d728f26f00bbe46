// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The effect of `close`, `dup` and similar calls on the table.

use std::ffi::c_int;

use crate::socket::epoll_set::EpollSet;
use crate::socket::registrations;
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef, NUMBERS};
use crate::sys::fork_lock::ForkLockGuard;
use crate::sys::own_numbers;
use crate::{config, fork};

/// Entries of the table. A single entry, the usual case of `close`, needs no memory of its own.
#[derive(Default)]
pub(crate) struct DescriptorList {
    first: Option<DescriptorRef>,
    others: Vec<DescriptorRef>,
}

impl DescriptorList {
    fn iter(&self) -> impl Iterator<Item = &DescriptorRef> {
        self.first.iter().chain(&self.others)
    }
}

/// Removes the entries of descriptors about to be closed, and returns them. The caller has locked
/// the numbers. Dropping the last entry of a connection ends the connection and may wait for the
/// peer. So before the drop the caller closes the numbers and releases the lock.
pub(crate) fn close(first: c_int, last: c_int) -> DescriptorList {
    if fork::shares_memory() {
        return DescriptorList::default();
    }
    let numbers = first.max(0)..=last.min(DESCRIPTORS.highest());
    let mut removed = numbers.filter(|fd| DESCRIPTORS.has(*fd)).filter_map(remove);
    // An empty list allocates nothing.
    DescriptorList { first: removed.next(), others: removed.collect() }
}

fn remove(fd: c_int) -> Option<DescriptorRef> {
    let descriptor = DESCRIPTORS.remove(fd)?;
    if descriptor.handles() == 0 {
        match &*descriptor {
            // A call of another thread still refers to the connection, as to a file in the kernel:
            // the connection ends with that call, or with the process.
            Descriptor::Stream(socket) => registrations::close(socket),
            Descriptor::Set(set) => {
                set.close(fd);
                registrations::forget_set(fd);
            }
        }
    }
    Some(descriptor)
}

/// Keeps a range of numbers what they are, as long as the caller has the result: no relay replaces
/// a number of a connection, or gives it back.
pub(crate) fn lock_numbers(first: c_int, last: c_int) -> Option<ForkLockGuard> {
    let is_stream = |fd| DESCRIPTORS.get(fd).is_some_and(|found| found.stream().is_some());
    let last = last.min(DESCRIPTORS.highest());
    let any = !fork::shares_memory()
        && (first.max(0)..=last).any(|fd| DESCRIPTORS.has(fd) && is_stream(fd));
    any.then(|| NUMBERS.lock())
}

/// Whether a relay may replace a number without an entry: a child may ask for the relay.
pub(crate) fn may_be_replaced(closed: &DescriptorList) -> bool {
    closed.iter().filter_map(|entry| entry.stream()).any(|socket| socket.undecided.has_offers())
}

/// Ends an SMC connection before the program disconnects the socket, which then is the kernel's.
/// `true`: TCP would have no connection any more, and no error to report.
pub(crate) fn disconnect(descriptor: &DescriptorRef) -> bool {
    let Some(socket) = descriptor.stream() else { return false };
    let Some(stream) = socket.smc() else { return false };
    let was_over = match stream.readiness(false).failed {
        true => socket.end.is_reset_reported(),
        false => socket.end.is_write_shut() && stream.peer_has_ended() == Some(true),
    };
    // Nothing of the library may touch the socket from here on: its next connection is the
    // program's.
    stream.abandon();
    release(descriptor);
    was_over
}

/// Leaves a socket to the kernel: removes all entries of the socket from the table.
pub(crate) fn release(descriptor: &DescriptorRef) {
    let Some(socket) = descriptor.stream() else { return };
    let is_its = |fd: &c_int| DESCRIPTORS.get(*fd).is_some_and(|found| found.is(descriptor));
    let fds: Vec<c_int> = (0..=DESCRIPTORS.highest()).filter(is_its).collect();
    registrations::move_to_kernel(socket, &fds, |fd| drop(DESCRIPTORS.remove(fd)));
}

/// Gives `new`, a duplicate of `old`, the entry of `old`.
pub(crate) fn duplicate(old: c_int, new: c_int) {
    if old == new || fork::shares_memory() {
        return;
    }
    if let Some(descriptor) = DESCRIPTORS.get(old) {
        DESCRIPTORS.share(&descriptor, new);
    }
}

/// Removes a stale entry from the number of a new descriptor.
#[inline]
pub(crate) fn remove_stale(fd: c_int) {
    own_numbers::forget(fd);
    if DESCRIPTORS.has(fd) {
        drop(close(fd, fd));
    }
}

/// Makes the entry of a new epoll set.
pub(crate) fn add_epoll_set(fd: c_int) {
    if config::get().is_some() && !fork::shares_memory() {
        DESCRIPTORS.install(fd, Descriptor::Set(EpollSet::new()));
    }
}
