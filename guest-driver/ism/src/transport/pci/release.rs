// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lifetime of a gone device's memory.
//!
//! The window and the pinned memory belong to the function. A gone device has to release the function, for a
//! removal by the kernel or for the next session. But the memory may contain the only copy of bytes of
//! connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::transport::SlabMark;
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
    /// A fence at both ends: a thread that has read a zero of the gone memory sees the word.
    over: AtomicBool,
    /// The last mark at each place of the window.
    marks: Mutex<HashMap<u64, SlabMark>>,
}

impl MemoryRelease {
    /// `leaves`: the owner goes on without the device, and calls [`MemoryRelease::let_go`].
    pub(super) fn new(leaves: bool) -> Arc<MemoryRelease> {
        let longest = if leaves { LONGEST } else { GRACE };
        let (let_go, changed) = (Mutex::new(false), Condvar::new());
        let (over, marks) = (AtomicBool::new(false), Mutex::default());
        Arc::new(MemoryRelease { longest, let_go, changed, over, marks })
    }

    /// Notes a mark of the window.
    pub(super) fn note_mark(&self, slab_off: u64, mark: SlabMark) {
        lock(&self.marks).insert(slab_off, mark);
    }

    /// Whether the window has not gone with its function. A monitor without its back end (vfio-user) keeps
    /// the window's memory although all registers read as ones; a function off its bus has no memory.
    pub(super) fn has_window(&self) -> bool {
        let marks = lock(&self.marks);
        marks.is_empty() || marks.values().any(SlabMark::is_there)
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
        self.over.store(true, Ordering::Relaxed);
        // Orders the word before the end of the memory.
        fence(Ordering::SeqCst);
    }

    /// Whether the memory may have turned to zeros.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        // Orders earlier loads of the memory before the word.
        fence(Ordering::Acquire);
        self.over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ism_sys::SharedMem;
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
    fn the_window_is_there_as_long_as_one_of_its_marks_is() {
        let release = MemoryRelease::new(true);
        assert!(release.has_window(), "no byte was in the window");
        let mem = SharedMem::anonymous(4096).unwrap();
        let slabs = [0, 64].map(|at| mem.slice(at, 8).unwrap());
        for (n, at) in slabs.iter().enumerate() {
            let nonce = 0x1122_3344_5566_7788 + n as u64;
            at.copy_in(0, &nonce.to_le_bytes()).unwrap();
            release.note_mark(n as u64, SlabMark { at: at.clone(), nonce });
        }
        assert!(release.has_window());
        // A peer has changed the nonce of a slab, or other memory is in its place.
        slabs[0].copy_in(0, &[0; 8]).unwrap();
        assert!(release.has_window());
        slabs[1].copy_in(0, &[0xff; 8]).unwrap();
        assert!(!release.has_window(), "loads return no stored bytes");
    }

    #[test]
    fn an_owner_that_ends_with_the_device_has_a_moment() {
        let start = Instant::now();
        MemoryRelease::new(false).wait();
        assert!(start.elapsed() >= GRACE);
    }
}
