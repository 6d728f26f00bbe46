// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the child of a fork does with the connections of a device that it takes over.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::Ordering;

use super::Conn;
use crate::reactor::ConnectionHandler;
use ism_sys::{is_free, lock};

impl Conn {
    /// Whether the connection needs nothing but memory and descriptors, which a child has, too.
    pub(crate) fn can_be_inherited(&self) -> bool {
        !self.carrier.must_be_polled() && !self.has_failed()
    }

    /// Whether no thread holds a lock of the connection.
    pub(crate) fn is_unlocked(&self) -> bool {
        is_free(&self.rx)
            && is_free(&self.tx)
            && is_free(&self.keepalive)
            && is_free(&self.sleepers)
            && is_free(&self.pollers)
            && is_free(&self.tcp)
            && self.readiness.get().is_none_or(|readiness| readiness.is_unlocked())
    }

    /// The descriptors of the connection.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let tcp = lock(&self.tcp).as_ref().map(|tcp| tcp.as_fd().as_raw_fd());
        let readiness = self.readiness.get().map(|readiness| readiness.descriptors());
        tcp.into_iter().chain(readiness.into_iter().flatten()).collect()
    }

    /// Forgets the threads of the parent, which waited for this connection, and takes up what the
    /// parent's background thread had planned for it.
    pub(crate) fn forget_threads(&self) {
        lock(&self.sleepers).clear();
        lock(&self.pollers).clear();
        if let Some(line) = self.carrier.line_in_slab() {
            line.set_in_slab(false);
        }
        self.waiters.store(0, Ordering::SeqCst);
        self.hold_on();
        self.update_scheduled.store(false, Ordering::SeqCst);
        self.schedule_update();
        self.on_arrival();
    }
}
