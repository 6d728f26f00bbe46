//! The library's own heap, so that the program's heap stays as it would be without the library. The
//! end of the heap decides how often some programs ask the kernel for memory and return it. And the
//! program's allocator may open files or map memory, which would call the hooks.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;

use dlmalloc::Dlmalloc;

use super::fork_lock::ForkLock;

/// An allocator whose lock a process can hold while it forks.
pub(crate) struct Heap {
    memory: UnsafeCell<Dlmalloc>,
}

static LOCK: ForkLock = ForkLock::new();

// SAFETY: only the thread that has the lock reaches the memory.
unsafe impl Sync for Heap {}

impl Heap {
    /// An empty heap. There is one in the process.
    pub(crate) const fn new() -> Heap {
        Heap { memory: UnsafeCell::new(Dlmalloc::new()) }
    }
}

/// Keeps the heap as it is while the process forks. The thread that forks allocates nothing until
/// [`after_fork`].
pub(crate) fn before_fork() {
    LOCK.acquire_before_fork();
}

/// Undoes [`before_fork`], in the parent or the child.
pub(crate) fn after_fork() {
    LOCK.release_after_fork();
}

// SAFETY: as dlmalloc's own global allocator, with another lock.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _held = LOCK.lock();
        // SAFETY: the lock is held; the caller's layout.
        unsafe { (*self.memory.get()).malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let _held = LOCK.lock();
        // SAFETY: the lock is held; the caller has the memory from this heap.
        unsafe { (*self.memory.get()).free(at, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let _held = LOCK.lock();
        // SAFETY: the lock is held; the caller's layout.
        unsafe { (*self.memory.get()).calloc(layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _held = LOCK.lock();
        // SAFETY: the lock is held; the caller has the memory from this heap.
        unsafe { (*self.memory.get()).realloc(at, layout.size(), layout.align(), size) }
    }
}
