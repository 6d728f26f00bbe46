// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of the descriptors that this library knows.

use std::ffi::c_int;

use crate::socket::epoll_set::EpollSet;
use crate::socket::stream::StreamSocket;
use crate::sys::fork_lock::ForkLock;
use crate::sys::table::{FdTable, FdTableRef};

/// What the library knows of a descriptor.
#[derive(Debug)]
pub(crate) enum Descriptor {
    /// A stream socket.
    Stream(StreamSocket),
    /// An epoll set.
    Set(EpollSet),
}

/// A counted reference to what the library knows of a descriptor.
pub(crate) type DescriptorRef = FdTableRef<Descriptor>;

/// The descriptors that this library knows.
pub(crate) static DESCRIPTORS: FdTable<Descriptor> = FdTable::new();

/// Held while a number of a connection changes what it is, and while the program closes a number of
/// a connection that a relay may replace: otherwise the relay could bring back a number that the
/// program has just closed. A process holds it while it forks.
pub(crate) static NUMBERS: ForkLock = ForkLock::new();

impl Descriptor {
    /// The stream socket, if it is one.
    #[inline]
    pub(crate) fn stream(&self) -> Option<&StreamSocket> {
        match self {
            Descriptor::Stream(socket) => Some(socket),
            Descriptor::Set(_) => None,
        }
    }

    /// The epoll set, if it is one.
    pub(crate) fn set(&self) -> Option<&EpollSet> {
        match self {
            Descriptor::Set(set) => Some(set),
            Descriptor::Stream(_) => None,
        }
    }
}

/// The entry of a descriptor, if it is a known epoll set.
pub(crate) fn epoll_set_of(fd: c_int) -> Option<DescriptorRef> {
    DESCRIPTORS.get(fd).filter(|found| found.set().is_some())
}
