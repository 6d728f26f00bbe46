// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the library knows of a socket's place in an epoll set.

use std::ffi::c_int;

/// A registration in an epoll set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    /// The set's descriptor.
    pub(crate) set: c_int,
    /// The descriptor that the program named.
    pub(crate) fd: c_int,
    /// The program's mask.
    pub(crate) events: u32,
    /// The program's data.
    pub(crate) data: u64,
    /// What the kernel's set contains for it.
    pub(crate) target: EpollTarget,
}

/// What the kernel's epoll set contains for a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EpollTarget {
    /// The socket itself.
    Native,
    /// Nothing yet: the handshake is not complete.
    Nothing,
    /// The socket itself, for its room to write only: the handshake of a client is not complete.
    Writable,
    /// The readiness descriptor of the SMC connection.
    ReadinessFd(c_int),
    /// The socket itself, with the library's mark for its data: the handshake is not complete, and
    /// the program's wait for the set goes on with it.
    Handshake,
    /// Nothing: the library polls the connection for the set.
    Polled,
}
