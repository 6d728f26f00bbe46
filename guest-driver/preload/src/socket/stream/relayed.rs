// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection that another process carries, whose descriptor is a Unix socket (see `relay`).

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::socket::pair::AddressPair;
use crate::sys::own_numbers;

/// The library's knowledge of a connection that another process carries.
#[derive(Debug)]
pub(crate) struct RelayState {
    /// The TCP socket, which provides names and options; -1: none.
    tcp_fd: AtomicI32,
    /// Whether the owner was asked to carry the connection, or there is none that could be asked.
    owner_requested: AtomicBool,
    /// The addresses of a connection that has no TCP socket in this process.
    names: Option<AddressPair>,
}

impl RelayState {
    /// A connection that no process carries yet, or whose owner must be asked. `tcp_fd`: its TCP
    /// socket, which this takes over; -1: none.
    pub(crate) fn new(tcp_fd: c_int) -> RelayState {
        let owner_requested = AtomicBool::new(false);
        let relayed = RelayState { tcp_fd: AtomicI32::new(-1), owner_requested, names: None };
        relayed.set_tcp_fd(tcp_fd);
        relayed
    }

    /// A connection of a process that this one cannot ask.
    pub(crate) const fn named(names: AddressPair) -> RelayState {
        let (tcp_fd, owner_requested) = (AtomicI32::new(-1), AtomicBool::new(true));
        RelayState { tcp_fd, owner_requested, names: Some(names) }
    }

    /// Stores the TCP socket, which this takes over.
    pub(super) fn set_tcp_fd(&self, tcp_fd: c_int) {
        if tcp_fd >= 0 {
            own_numbers::enter(tcp_fd);
        }
        own_numbers::close(self.tcp_fd.swap(tcp_fd, Ordering::Relaxed));
    }

    /// The TCP socket.
    pub(super) fn tcp_fd(&self) -> Option<c_int> {
        let fd = self.tcp_fd.load(Ordering::Relaxed);
        own_numbers::contains(fd).then_some(fd)
    }

    /// The addresses of a connection that has no TCP socket in this process.
    pub(crate) fn names(&self) -> Option<&AddressPair> {
        self.names.as_ref()
    }

    /// Whether the owner must still be asked to carry the connection. Only the first call returns
    /// `true`.
    pub(crate) fn request_owner_once(&self) -> bool {
        !self.owner_requested.swap(true, Ordering::Relaxed)
    }

    /// Whether the owner was asked to carry the connection, or there is none.
    pub(super) fn is_owner_requested(&self) -> bool {
        self.owner_requested.load(Ordering::Relaxed)
    }
}

impl Drop for RelayState {
    fn drop(&mut self) {
        own_numbers::close(*self.tcp_fd.get_mut());
    }
}
