// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The limit of peers' DMBs written by connections at a time.
//!
//! A server attaches its client's DMB after the client's Confirm, and then it is too late for TCP. So
//! each end of a handshake takes a slot before its point of no return.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The slots of a device.
#[derive(Clone, Debug)]
pub(super) struct Attachments(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    used: AtomicU32,
    max: u32,
}

/// A slot, free again when dropped.
#[derive(Debug)]
pub(crate) struct AttachSlot(Attachments);

impl Attachments {
    /// The number of slots allowed by the device.
    pub(super) fn new(max: u32) -> Attachments {
        Attachments(Arc::new(Counts { used: AtomicU32::new(0), max }))
    }

    /// A slot, if one is free.
    pub(super) fn take(&self) -> Option<AttachSlot> {
        let max = self.0.max;
        let one_more = |used: u32| (used < max).then_some(used + 1);
        let counted = self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.is_ok().then(|| AttachSlot(self.clone()))
    }
}

impl Drop for AttachSlot {
    fn drop(&mut self) {
        self.0.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_slots_are_taken_than_there_are() {
        let attachments = Attachments::new(2);
        let (one, two) = (attachments.take(), attachments.take());
        assert!(one.is_some() && two.is_some() && attachments.take().is_none());
        drop(one);
        assert!(attachments.take().is_some());
    }
}
