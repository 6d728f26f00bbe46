// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The library's own heap, so that the program's heap stays as it would be without the library. The
//! end of the heap decides how often some programs ask the kernel for memory and return it. And the
//! program's allocator may open files or map memory, which would call the hooks.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlmalloc::Dlmalloc;

use super::fork_lock::{ForkLock, ForkLockGuard};

/// An allocator whose lock a process can hold while it forks.
pub(crate) struct Heap {
    memory: UnsafeCell<Dlmalloc>,
}

static LOCK: ForkLock = ForkLock::new();
/// The heap of this process is another one than that of its parent, whose memory is never given back.
static BEGUN_ANEW: AtomicBool = AtomicBool::new(false);

// SAFETY: only the thread that has the lock reaches the memory.
unsafe impl Sync for Heap {}

impl Heap {
    /// An empty heap. There is one in the process.
    pub(crate) const fn new() -> Heap {
        Heap { memory: UnsafeCell::new(Dlmalloc::new()) }
    }

    fn lock(&self) -> ForkLockGuard {
        let (held, taken_away) = LOCK.lock_or_take();
        if taken_away {
            // SAFETY: the lock is held. The old heap may be half changed, so it is not dropped.
            unsafe { self.memory.get().write(Dlmalloc::new()) };
            BEGUN_ANEW.store(true, Ordering::Relaxed);
        }
        held
    }
}

/// Keeps the heap as it is while the process forks. The thread that forks allocates nothing until
/// [`after_fork`].
pub(crate) fn before_fork() {
    LOCK.acquire_before_fork();
}

/// Whether the process can fork within `limit`, as [`ForkLock::comes_free`].
pub(crate) fn comes_free(limit: Duration) -> bool {
    LOCK.comes_free(limit)
}

/// Undoes [`before_fork`], in the parent or the child.
pub(crate) fn after_fork() {
    LOCK.release_after_fork();
}

// SAFETY: as dlmalloc's own global allocator, with another lock.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _held = self.lock();
        // SAFETY: the lock is held; the caller's layout.
        unsafe { (*self.memory.get()).malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let _held = self.lock();
        if BEGUN_ANEW.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the lock is held; the caller has the memory from this heap.
        unsafe { (*self.memory.get()).free(at, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let _held = self.lock();
        // SAFETY: the lock is held; the caller's layout.
        unsafe { (*self.memory.get()).calloc(layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _held = self.lock();
        // SAFETY: the lock is held; the caller has the memory from this heap, or from an older one,
        // where it stays as it is.
        unsafe {
            let memory = &mut *self.memory.get();
            if !BEGUN_ANEW.load(Ordering::Relaxed) {
                return memory.realloc(at, layout.size(), layout.align(), size);
            }
            let new = memory.malloc(size, layout.align());
            if !new.is_null() {
                new.copy_from_nonoverlapping(at, layout.size().min(size));
            }
            new
        }
    }
}
