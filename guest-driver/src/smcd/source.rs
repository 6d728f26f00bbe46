//! A virtio-ism device as a source of wake-ups.

use std::os::fd::BorrowedFd;

use crate::ism::{EVENTS_PER_POLL, IsmDevice};
use crate::reactor::source::{ReactorEvent, Source};

impl Source for IsmDevice {
    fn event_fd(&self) -> BorrowedFd<'_> {
        IsmDevice::event_fd(self)
    }

    fn arm_interrupts(&self) -> bool {
        IsmDevice::arm_interrupts(self)
    }

    fn clear_event_fd(&self) {
        IsmDevice::clear_event_fd(self);
    }

    fn suppress_interrupts(&self) {
        IsmDevice::suppress_interrupts(self);
    }

    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        // An error means that the device is gone, which is asked for apart.
        IsmDevice::poll_events(self, &mut |event| handle(ReactorEvent::Ism(event)))
            .is_ok_and(|n| n == EVENTS_PER_POLL)
    }

    fn is_gone(&self) -> bool {
        IsmDevice::is_gone(self)
    }

    #[inline]
    fn has_memory(&self) -> bool {
        IsmDevice::has_memory(self)
    }
}
