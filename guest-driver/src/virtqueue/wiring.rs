//! How a queue and its device notify each other.

use std::sync::Arc;

use super::Health;
use crate::sys::EventFd;

/// Tells the device that a queue has something new.
pub(crate) trait Notify: Send + Sync {
    fn notify(&self);
}

impl Notify for Arc<EventFd> {
    fn notify(&self) {
        self.signal();
    }
}

/// What a queue needs besides its ring.
pub(crate) struct Wiring {
    /// Where new chains are announced.
    pub(crate) kick: Box<dyn Notify>,
    /// Where the device announces completions.
    pub(crate) call: Arc<EventFd>,
    pub(crate) health: Arc<Health>,
    pub(crate) event_idx: bool,
}
