// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process that owns a connection.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::fork;

/// The process that owns a connection, and whether others may have the connection.
#[derive(Debug)]
pub(crate) struct SocketOwner {
    /// The generation of the process (see `fork`).
    generation: AtomicU32,
    /// The number of [`fork::children`] when the socket was made.
    children_before: u32,
    /// Another program has made the socket, and may still have a descriptor.
    is_handed_on: AtomicBool,
}

impl SocketOwner {
    /// A socket of this process.
    pub(super) fn new() -> SocketOwner {
        SocketOwner {
            generation: AtomicU32::new(fork::generation()),
            children_before: fork::children(),
            is_handed_on: AtomicBool::new(false),
        }
    }

    /// Stores that another program has made the socket.
    pub(crate) fn set_handed_on(&self) {
        self.is_handed_on.store(true, Ordering::Relaxed);
    }

    /// Whether another program has made the socket.
    pub(crate) fn is_handed_on(&self) -> bool {
        self.is_handed_on.load(Ordering::Relaxed)
    }

    /// Whether the connection belongs to an ancestor of this process.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation.load(Ordering::Relaxed) != fork::generation()
    }

    /// Gives the connection to this process, which begins the handshake.
    pub(crate) fn adopt(&self) {
        self.generation.store(fork::generation(), Ordering::Relaxed);
    }

    /// Whether a child process may have inherited the socket.
    pub(crate) fn may_be_shared(&self) -> bool {
        self.children_before != fork::children() || self.is_inherited()
    }
}
