// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a queue and its device notify each other.

use std::sync::Arc;

use super::Health;
use ism_sys::EventFd;

/// Notifies the device of new chains in a queue (a kick).
pub(crate) trait Notify: Send + Sync {
    fn notify(&self);
}

impl Notify for Arc<EventFd> {
    fn notify(&self) {
        self.signal();
    }
}

/// The connections between one queue and its device.
pub(crate) struct Wiring {
    /// Tells the device of new chains.
    pub(crate) kick: Box<dyn Notify>,
    /// Becomes readable when the device interrupts because of completions.
    pub(crate) call: Arc<EventFd>,
    pub(crate) health: Arc<Health>,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub(crate) event_idx: bool,
}
