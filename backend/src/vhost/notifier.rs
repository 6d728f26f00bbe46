//! A doorbell: how a thread of one device tells a thread of another that it has something to do.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use rustix::event::{EventfdFlags, eventfd};

use crate::device::EventNotifier;

/// An eventfd that only the daemon holds, so writing it never blocks.
///
/// The worker's epoll watches it edge-triggered: each write is an edge, and nobody reads it.
#[derive(Debug)]
pub(crate) struct Notifier {
    fd: OwnedFd,
    /// Rung and not yet taken: more rings need no system call.
    rung: AtomicBool,
}

impl Notifier {
    pub(crate) fn new() -> io::Result<Notifier> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Notifier { fd, rung: AtomicBool::new(false) })
    }

    /// To be called by the worker before it looks for what it was rung for.
    pub(crate) fn take(&self) {
        // A read-modify-write, as in `ring`: whichever comes second sees the first. If it is this
        // one, it acquires what the ringer had done; if it is the other, it rings again.
        self.rung.swap(false, Ordering::AcqRel);
    }
}

impl Notifier {
    /// Makes the worker look.
    pub(crate) fn notify(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Can fail only after 2^64 - 2 rings.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Who can hand over a device's events at once.
pub(super) trait Porter: Send + Sync {
    /// Hands over what there is, from a thread of another device, without ever waiting. `false`:
    /// that was not possible, the device's own worker has to.
    fn deliver(&self) -> bool;
}

thread_local! {
    /// This thread holds no lock of a device.
    static ON_THE_SPOT: Cell<bool> = const { Cell::new(false) };
}

/// Lets doors that are rung by `work` hand over on the spot.
///
/// Handing over asks the device for its records. A device that rings may hold locks which that
/// would take again, its own or another's, so it must be the caller who knows that there are none.
pub(super) fn on_the_spot(work: impl FnOnce()) {
    ON_THE_SPOT.set(true);
    work();
    ON_THE_SPOT.set(false);
}

/// The doorbell of a device. Within [`on_the_spot`] events are handed over at once if nobody is at
/// work on the event queue, which spares a thread; otherwise the notifier rings.
pub(crate) struct FrontDoor {
    notifier: Arc<Notifier>,
    porter: OnceLock<Weak<dyn Porter>>,
}

impl FrontDoor {
    pub(super) fn new(notifier: Arc<Notifier>) -> FrontDoor {
        FrontDoor { notifier, porter: OnceLock::new() }
    }

    /// Says who hands over; once.
    pub(super) fn staff(&self, porter: Weak<dyn Porter>) {
        let _ = self.porter.set(porter);
    }
}

impl EventNotifier for FrontDoor {
    fn notify(&self) {
        if !ON_THE_SPOT.get() {
            return self.notifier.notify();
        }
        let porter = self.porter.get().and_then(Weak::upgrade);
        if !porter.is_some_and(|porter| porter.deliver()) {
            self.notifier.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(notifier: &Notifier) -> Option<u64> {
        let mut count = [0; 8];
        rustix::io::read(&notifier.fd, &mut count).ok().map(|_| u64::from_ne_bytes(count))
    }

    #[test]
    fn rings_once_until_taken() {
        let notifier = Notifier::new().unwrap();
        notifier.notify();
        notifier.notify();
        assert_eq!(writes(&notifier), Some(1));
        notifier.take();
        assert_eq!(writes(&notifier), None);
        notifier.notify();
        assert_eq!(writes(&notifier), Some(1));
    }

    struct Stub(bool);

    impl Porter for Stub {
        fn deliver(&self) -> bool {
            self.0
        }
    }

    #[test]
    fn the_bell_rings_only_if_nothing_could_be_handed_over() {
        for (delivers, rings) in [(true, false), (false, true)] {
            let notifier = Arc::new(Notifier::new().unwrap());
            let door = FrontDoor::new(notifier.clone());
            let porter: Arc<dyn Porter> = Arc::new(Stub(delivers));
            door.staff(Arc::downgrade(&porter));
            on_the_spot(|| door.notify());
            assert_eq!(notifier.rung.load(Ordering::Relaxed), rings);
        }
        let notifier = Arc::new(Notifier::new().unwrap());
        on_the_spot(|| FrontDoor::new(notifier.clone()).notify());
        assert!(notifier.rung.load(Ordering::Relaxed), "nobody is at the door");
    }

    #[test]
    fn a_device_that_rings_under_its_locks_is_not_asked_for_records() {
        let notifier = Arc::new(Notifier::new().unwrap());
        let door = FrontDoor::new(notifier.clone());
        let porter: Arc<dyn Porter> = Arc::new(Stub(true));
        door.staff(Arc::downgrade(&porter));
        door.notify();
        assert!(notifier.rung.load(Ordering::Relaxed));
    }
}
