// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The effect of `close`, `dup` and similar calls on the table.

use std::ffi::c_int;

use crate::socket::epoll_set::EpollSet;
use crate::socket::registrations;
use crate::socket::stream::StreamSocket;
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef, NUMBERS};
use crate::sys::fork_lock::ForkLockGuard;
use crate::sys::{own_copies, own_numbers};
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
    if let Some(socket) = descriptor.stream() {
        return_number(&descriptor, socket, fd);
    }
    Some(descriptor)
}

/// A number of the program for a connection, preferably `fd`. `None`: the program has none.
fn number_of(descriptor: &DescriptorRef, fd: c_int) -> Option<c_int> {
    let is_its = |fd: &c_int| DESCRIPTORS.get(*fd).is_some_and(|found| found.is(descriptor));
    if is_its(&fd) {
        return Some(fd);
    }
    (descriptor.handles() > 0).then(|| (0..=DESCRIPTORS.highest()).find(is_its)).flatten()
}

/// Lends a connection a number of the program, preferably this one, in the place of the
/// connection's own descriptor. A connection without a number of the program keeps its descriptor.
pub(crate) fn lend_number(descriptor: &DescriptorRef, fd: c_int) {
    let _numbers = NUMBERS.lock();
    lend_number_locked(descriptor, fd);
}

/// Does the same as [`lend_number`]. The caller holds [`NUMBERS`].
pub(crate) fn lend_number_locked(descriptor: &DescriptorRef, fd: c_int) {
    let Some(socket) = descriptor.stream() else { return };
    if let Some(stream) = socket.own_stream()
        && let Some(number) = number_of(descriptor, fd)
    {
        socket.undecided.set_copy(-1);
        stream.lend_tcp(number);
    }
}

/// Prepares the close of a number that has no entry any more. A connection with this number on loan
/// goes on by another one, or by a copy. If the close of the connection has no use for TCP, or
/// there is no number for a copy, TCP ends with the number.
fn return_number(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    let Some(stream) = socket.own_stream() else { return };
    if stream.lent_number() != Some(fd) {
        return;
    }
    match number_of(descriptor, fd) {
        Some(other) => stream.lend_tcp(other),
        // A call of another thread goes on with the connection.
        None if descriptor.refs() > 1 || stream.close_needs_tcp() => {
            stream.own_tcp(own_copies::duplicate_below_reserve(fd));
        }
        None => stream.own_tcp(None),
    }
}

/// Locks a range of numbers until the caller drops the result: no relay replaces a number of a
/// connection, or gives one back.
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
    // From here on the library must not touch the socket: its next connection is the program's.
    socket.end.set_disconnected();
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
