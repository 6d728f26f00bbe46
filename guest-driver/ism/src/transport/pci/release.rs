// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lifetime of a gone device's memory.
//!
//! The window and the pinned memory belong to the function. A gone device has to release the function, for a
//! removal by the kernel or for the next session. But the memory may contain the only copy of bytes of
//! connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use ism_sys::lock;

/// For an owner bound to the device. The owner needs the time to notice the end of the device: memory turning
/// to zeros before would look like wrong data of a peer.
const GRACE: Duration = Duration::from_millis(50);
/// For an owner outliving the device but not answering. The kernel may want to remove the function.
const LONGEST: Duration = Duration::from_secs(30);

/// When the memory of one device goes.
#[derive(Debug)]
pub(super) struct MemoryRelease {
    longest: Duration,
    let_go: Mutex<bool>,
    changed: Condvar,
    over: AtomicBool,
}

impl MemoryRelease {
    /// `leaves`: the owner goes on without the device, and calls [`MemoryRelease::let_go`].
    pub(super) fn new(leaves: bool) -> Arc<MemoryRelease> {
        let longest = if leaves { LONGEST } else { GRACE };
        let (let_go, changed) = (Mutex::new(false), Condvar::new());
        Arc::new(MemoryRelease { longest, let_go, changed, over: AtomicBool::new(false) })
    }

    /// Ends the need for the memory.
    pub(super) fn let_go(&self) {
        *lock(&self.let_go) = true;
        self.changed.notify_all();
    }

    /// Waits for [`Self::let_go`], up to the limit.
    pub(super) fn wait(&self) {
        let held = lock(&self.let_go);
        let waited = self.changed.wait_timeout_while(held, self.longest, |let_go| !*let_go);
        let (_let_go, ended) = waited.unwrap_or_else(PoisonError::into_inner);
        if ended.timed_out() && self.longest > GRACE {
            tracing::warn!(after = ?self.longest, "connections lose the memory of their device");
        }
    }

    /// The memory turns to zeros now.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    /// Whether the memory may have turned to zeros.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn memory_stays_until_it_is_let_go() {
        let release = MemoryRelease::new(true);
        let start = Instant::now();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| release.wait());
            assert!(!release.is_over());
            release.let_go();
            waits.join().unwrap();
        });
        assert!(start.elapsed() < LONGEST);
        release.end();
        assert!(release.is_over());
    }

    #[test]
    fn an_owner_that_ends_with_the_device_has_a_moment() {
        let start = Instant::now();
        MemoryRelease::new(false).wait();
        assert!(start.elapsed() >= GRACE);
    }
}
