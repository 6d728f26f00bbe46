// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of the descriptors known to this library.

use std::ffi::c_int;

use crate::fork;
use crate::socket::epoll_set::EpollSet;
use crate::socket::stream::StreamSocket;
use crate::sys::fork_lock::ForkLock;
use crate::sys::table::{FdTable, FdTableRef, TableEntry};

/// An entry of the table.
#[derive(Debug)]
pub(crate) enum Descriptor {
    /// A stream socket.
    Stream(StreamSocket),
    /// An epoll set.
    Set(EpollSet),
}

/// A counted reference to an entry of the table.
pub(crate) type DescriptorRef = FdTableRef<Descriptor>;

/// The descriptors known to this library.
pub(crate) static DESCRIPTORS: FdTable<Descriptor> = FdTable::new();

/// Held while a number of a connection changes its file, and while the program closes a number that
/// a relay may replace: otherwise the relay could bring back a number just closed by the program. A
/// process holds the lock during a fork.
pub(crate) static NUMBERS: ForkLock = ForkLock::new();

impl TableEntry for Descriptor {
    #[inline]
    fn is_elsewhere() -> bool {
        fork::is_without_table()
    }
}

impl Descriptor {
    /// The stream socket, if the entry is one.
    #[inline]
    pub(crate) fn stream(&self) -> Option<&StreamSocket> {
        match self {
            Descriptor::Stream(socket) => Some(socket),
            Descriptor::Set(_) => None,
        }
    }

    /// The epoll set, if the entry is one.
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
