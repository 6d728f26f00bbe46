// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The library's own heap: the program's heap stays the same as without the library. The end of the
//! heap decides how often some programs ask the kernel for memory and return memory. And the program's
//! allocator may open files or map memory, and so call the hooks.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlmalloc::{Allocator, Dlmalloc};
use ism_sys::map_memory;
use rustix::mm::{MremapFlags, mremap, munmap};

use super::fork_lock::{ForkLock, ForkLockGuard};

/// An allocator with a lock for the time of a fork.
pub(crate) struct Heap {
    memory: UnsafeCell<Dlmalloc<Pages>>,
}

static LOCK: ForkLock = ForkLock::new();
/// Whether this process has another heap than its parent. Memory of the parent's heap is never freed.
static BEGUN_ANEW: AtomicBool = AtomicBool::new(false);

// SAFETY: only the thread that has the lock reaches the memory.
unsafe impl Sync for Heap {}

impl Heap {
    /// An empty heap. There is one in the process.
    pub(crate) const fn new() -> Heap {
        Heap { memory: UnsafeCell::new(Dlmalloc::new_with_allocator(Pages)) }
    }

    fn lock(&self) -> ForkLockGuard {
        let (held, taken_away) = LOCK.lock_or_take();
        if taken_away {
            // SAFETY: the lock is held. The old heap may be half changed, so the old heap is not
            // dropped.
            unsafe { self.memory.get().write(Dlmalloc::new_with_allocator(Pages)) };
            BEGUN_ANEW.store(true, Ordering::Relaxed);
        }
        held
    }
}

/// Size of the heap's reserve for the case of RLIMIT_AS or RLIMIT_DATA: the program's sockets need some
/// memory, on TCP, too.
const RESERVE: usize = 1 << 20;

/// The reserve. Its pages are part of the library's file, and cost no memory until used.
#[repr(align(4096))]
struct Reserve(UnsafeCell<[u8; RESERVE]>);

// SAFETY: the heap hands out each byte once, with the lock held.
unsafe impl Sync for Reserve {}

static LAST: Reserve = Reserve(UnsafeCell::new([0; RESERVE]));
static USED: AtomicUsize = AtomicUsize::new(0);

/// Memory of the reserve; null if the reserve is used up.
fn reserved(size: usize) -> *mut u8 {
    let used = USED.load(Ordering::Relaxed);
    match used.checked_add(size).filter(|used| *used <= RESERVE) {
        Some(now) => {
            USED.store(now, Ordering::Relaxed);
            LAST.0.get().cast::<u8>().wrapping_add(used)
        }
        None => std::ptr::null_mut(),
    }
}

/// Whether any of this memory is part of the reserve. The reserve takes nothing back.
fn is_reserved(at: *mut u8, len: usize) -> bool {
    let begin = LAST.0.get() as usize;
    (at as usize) < begin + RESERVE && at as usize + len > begin
}

/// The kernel's pages, for the growth of the heap. The heap calls this with the lock held.
struct Pages;

// SAFETY: the kernel gives whole pages of zeros to the heap alone, until they are given back.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        match map_memory(size) {
            Ok(at) => (at.cast(), size, 0),
            Err(_) => (reserved(size), size, 0),
        }
    }

    fn remap(&self, at: *mut u8, old: usize, new: usize, can_move: bool) -> *mut u8 {
        if is_reserved(at, old) {
            return std::ptr::null_mut();
        }
        let flags = if can_move { MremapFlags::MAYMOVE } else { MremapFlags::empty() };
        // SAFETY: the memory is the heap's, and the heap uses the returned address.
        match unsafe { mremap(at.cast(), old, new, flags) } {
            Ok(moved) => moved.cast(),
            Err(_) => std::ptr::null_mut(),
        }
    }

    fn free_part(&self, at: *mut u8, old: usize, new: usize) -> bool {
        self.free(at.wrapping_add(new), old - new)
    }

    fn free(&self, at: *mut u8, size: usize) -> bool {
        if is_reserved(at, size) {
            return false;
        }
        // SAFETY: the memory is the heap's, and no longer in use.
        unsafe { munmap(at.cast(), size) }.is_ok()
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        ism_sys::page_size()
    }
}

/// Keeps the heap unchanged while the process forks. The forking thread allocates nothing until
/// [`after_fork`].
pub(crate) fn before_fork() {
    LOCK.acquire_before_fork();
}

/// Whether the process can fork within `limit`, in the sense of [`ForkLock::comes_free`].
pub(crate) fn comes_free(limit: Duration) -> bool {
    LOCK.comes_free(limit)
}

/// Undoes [`before_fork`], in the parent or the child.
pub(crate) fn after_fork() {
    LOCK.release_after_fork();
}

// SAFETY: like dlmalloc's own global allocator, with another lock.
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
        // SAFETY: the lock is held; the caller has the memory from this heap, or from an older heap,
        // never to be changed again.
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
