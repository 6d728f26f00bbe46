// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connections of an inherited device in the child of a fork.

use std::os::fd::RawFd;

use smc_core::carrier::End;

use super::Conn;
use crate::reactor::ConnectionHandler;
use ism_sys::is_free;

impl Conn {
    /// Whether the connection needs only memory and descriptors, present in a child, too.
    pub(crate) fn can_be_inherited(&self) -> bool {
        !self.carrier().must_be_polled() && !self.has_failed()
    }

    /// Whether the child of a fork has to check TCP now and then: for the peer's bytes, room, or the
    /// peer's records while a ring is being left.
    pub(crate) fn needs_turns(&self) -> bool {
        let is_due = |end: &End| !end.is_on_ring() && !end.is_over();
        !self.carrier().must_be_polled() && is_due(self.tx().half.carrier())
    }

    /// Whether no thread holds a lock of the connection.
    pub(crate) fn is_unlocked(&self) -> bool {
        is_free(&self.rx)
            && is_free(&self.tx)
            && is_free(&self.options.keepalive)
            && self.tcp.is_unlocked()
            && self.waiting.is_unlocked()
    }

    /// The descriptors of the connection.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let readiness = self.waiting.readiness.get().map(|readiness| readiness.descriptors());
        self.tcp.descriptors().into_iter().chain(readiness.into_iter().flatten()).collect()
    }

    /// Forgets the waiting threads of the parent, and takes up the plans of the parent's background
    /// thread.
    pub(crate) fn forget_threads(&self) {
        if let Some(line) = self.carrier().line_in_slab() {
            line.set_in_slab(false);
        }
        self.waiting.forget_threads();
        self.tcp.forget_threads();
        // A step under way is lost with its message, so the handshake for a ring ends by a Decline.
        self.tx().way_back.renewal.lose_step();
        self.hold_on();
        self.cursors.clear_update();
        self.schedule_update();
        self.on_arrival();
    }
}
