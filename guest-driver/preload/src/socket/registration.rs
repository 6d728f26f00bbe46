// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A socket's place in an epoll set.

use std::ffi::c_int;

/// A registration in an epoll set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    /// The set's descriptor.
    pub(crate) set: c_int,
    /// The descriptor named by the program.
    pub(crate) fd: c_int,
    /// The program's mask.
    pub(crate) events: u32,
    /// The program's data.
    pub(crate) data: u64,
    /// The socket's entry in the kernel's set.
    pub(crate) target: EpollTarget,
}

/// A socket's entry in the kernel's epoll set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EpollTarget {
    /// The socket itself.
    Native,
    /// No entry yet: the handshake is not complete.
    Nothing,
    /// The socket itself, for its room to write only: the handshake of a client is not complete.
    Writable,
    /// The readiness descriptor of the SMC connection.
    ReadinessFd(c_int),
    /// The socket itself, with event bits of the library: the handshake is not complete, and the
    /// program's wait for the set goes on with the handshake.
    Handshake,
    /// No entry: the library polls the connection for the set.
    Polled,
}
