// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a device still works, and the wake-up of waiting threads at its end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ism_sys::{EventFd, ForkLocks, is_free, lock, shut_down};

/// A switch from a working to a gone device, never back.
#[derive(Debug)]
pub(crate) struct Health {
    gone: AtomicBool,
    // The eventfds and sockets of threads waiting for an interrupt, or for an answer of the device.
    wake: Mutex<Vec<Arc<EventFd>>>,
    sockets: Mutex<Vec<Arc<OwnedFd>>>,
}

impl ForkLocks for Health {
    fn is_unlocked(&self) -> bool {
        is_free(&self.wake) && is_free(&self.sockets)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut all: Vec<_> =
            lock(&self.wake).iter().map(|event| event.as_fd().as_raw_fd()).collect();
        all.extend(lock(&self.sockets).iter().map(|socket| socket.as_raw_fd()));
        all
    }
}

impl Health {
    pub(crate) fn new() -> Arc<Health> {
        Arc::new(Health {
            gone: AtomicBool::new(false),
            wake: Mutex::new(Vec::new()),
            sockets: Mutex::new(Vec::new()),
        })
    }

    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Makes an eventfd readable when the device goes.
    pub(crate) fn wake_with(&self, event: &Arc<EventFd>) {
        lock(&self.wake).push(Arc::clone(event));
        if self.is_gone() {
            event.signal();
        }
    }

    /// Shuts a socket down when the device goes, so no thread stays blocked on the socket.
    pub(crate) fn shut_down_with(&self, socket: &Arc<OwnedFd>) {
        let mut sockets = lock(&self.sockets);
        if self.is_gone() {
            shut_down(socket.as_fd());
        }
        sockets.push(Arc::clone(socket));
    }

    /// Marks the device as gone, and wakes all waiting threads. Only the first call has an effect.
    pub(crate) fn fail(&self, why: &str) {
        // Release: partner of the Acquire in `is_gone`, for the sake of the log's order only.
        if self.gone.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::info!(why, "the ISM device is gone");
        self.wake_all();
        for socket in lock(&self.sockets).iter() {
            shut_down(socket.as_fd());
        }
    }

    /// Marks a device that knows nothing of this driver's session as gone: the machine goes on from a
    /// snapshot, and its monitor has not told the driver.
    pub(crate) fn lose_session(&self) {
        self.fail("the device has lost the driver's session");
    }

    fn wake_all(&self) {
        for event in lock(&self.wake).iter() {
            event.signal();
        }
    }

    /// Clears an eventfd. The eventfd of a gone device stays readable.
    pub(crate) fn clear(&self, event: &EventFd) {
        event.clear();
        if self.is_gone() {
            event.signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_end_wakes_for_good_and_ends_sockets() {
        let health = Health::new();
        let event = Arc::new(EventFd::new().unwrap());
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        health.wake_with(&event);
        health.shut_down_with(&Arc::new(a.into()));
        health.fail("test");
        assert!(health.is_gone());
        health.clear(&event);
        assert!(event.wait(Duration::ZERO).unwrap());
        assert_eq!(std::io::Read::read(&mut &b, &mut [0; 1]).unwrap(), 0);
        let late = Arc::new(EventFd::new().unwrap());
        health.wake_with(&late);
        assert!(late.wait(Duration::ZERO).unwrap());
    }
}
