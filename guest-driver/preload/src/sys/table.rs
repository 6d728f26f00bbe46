// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A table indexed by descriptor, and the memory of its values.
//!
//! A descriptor without an entry costs one load. The table never frees the memory of a value, only
//! reuses the memory. So a thread may read an entry during another thread's close: the count of
//! references tells whether the value is still there.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use super::fork_lock::ForkMutex;

/// Number of descriptors covered by a table. Higher ones have no entry, ever.
const MAX_FDS: usize = 1 << 20;

/// A table with at most one value per descriptor; several descriptors may share a value.
pub(crate) struct FdTable<T: 'static> {
    entries: [AtomicPtr<Slot<T>>; MAX_FDS],
    /// The number after the highest descriptor that ever had an entry.
    end: AtomicI32,
    free: ForkMutex<FreeSlots<T>>,
}

/// A value of a table.
pub(crate) trait TableEntry {
    /// Whether the caller is another process with this memory, whose numbers are other files.
    fn is_elsewhere() -> bool;
}

/// The first of the unused slots; each has the address of the next one. An empty table is all zeros,
/// and so takes no room in the file of the library.
struct FreeSlots<T: 'static>(*mut Slot<T>);

impl<T> Default for FreeSlots<T> {
    fn default() -> FreeSlots<T> {
        FreeSlots(null_mut())
    }
}

impl<T> FreeSlots<T> {
    fn push(&mut self, slot: NonNull<Slot<T>>) {
        // SAFETY: slots are never freed.
        unsafe { slot.as_ref() }.next_free.store(self.0, Ordering::Relaxed);
        self.0 = slot.as_ptr();
    }

    fn pop(&mut self) -> Option<NonNull<Slot<T>>> {
        let first = NonNull::new(self.0)?;
        // SAFETY: slots are never freed.
        self.0 = unsafe { first.as_ref() }.next_free.load(Ordering::Relaxed);
        Some(first)
    }
}

// SAFETY: slots are never freed, and a slot in this list has no other users.
unsafe impl<T: Send> Send for FreeSlots<T> {}

/// Memory for one value.
struct Slot<T: 'static> {
    /// References: table entries and calls under way. Zero: the slot is free. SeqCst in a count: behind the
    /// fence of `TemporaryRelay::begin_taking`.
    refs: AtomicU32,
    /// Table entries among them.
    handles: AtomicU32,
    value: UnsafeCell<Option<T>>,
    /// For [`FreeSlots`].
    next_free: AtomicPtr<Slot<T>>,
    /// The table of the slot, for the slot's return.
    table: &'static FdTable<T>,
}

/// A counted reference to a value of a table.
pub(crate) struct FdTableRef<T: 'static>(NonNull<Slot<T>>);

// SAFETY: a reference is counted; the bounds let other threads use and drop the value.
unsafe impl<T: Send + Sync> Send for FdTableRef<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for FdTableRef<T> {}

impl<T> FdTableRef<T> {
    fn slot(&self) -> &Slot<T> {
        // SAFETY: slots are never freed.
        unsafe { self.0.as_ref() }
    }

    /// Number of descriptors of the value.
    pub(crate) fn handles(&self) -> u32 {
        self.slot().handles.load(Ordering::Acquire)
    }

    /// Number of references to the value: one of each descriptor, and one of each call under way.
    pub(crate) fn refs(&self) -> u32 {
        self.slot().refs.load(Ordering::SeqCst)
    }

    /// Keeps the reference during a call without a certain return: nothing with a destructor may live
    /// across such a call. Without a return the value is never dropped.
    pub(crate) fn leak(self) -> LeakedTableRef<T> {
        let slot = self.0;
        std::mem::forget(self);
        LeakedTableRef(slot)
    }

    /// Whether both refer to the same value.
    pub(crate) fn is(&self, other: &FdTableRef<T>) -> bool {
        self.0 == other.0
    }
}

/// A reference of [`FdTableRef::leak`].
pub(crate) struct LeakedTableRef<T: 'static>(NonNull<Slot<T>>);

impl<T> Clone for LeakedTableRef<T> {
    fn clone(&self) -> LeakedTableRef<T> {
        *self
    }
}

impl<T> Copy for LeakedTableRef<T> {}

impl<T> LeakedTableRef<T> {
    /// The reference again.
    ///
    /// # Safety
    /// Each reference comes back at most once.
    pub(crate) unsafe fn take(self) -> FdTableRef<T> {
        FdTableRef(self.0)
    }
}

impl<T> Deref for FdTableRef<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: while references are counted the value is there and the cell does not change.
        match unsafe { &*self.slot().value.get() } {
            Some(value) => value,
            None => std::process::abort(),
        }
    }
}

impl<T> Clone for FdTableRef<T> {
    fn clone(&self) -> FdTableRef<T> {
        self.slot().refs.fetch_add(1, Ordering::Relaxed);
        FdTableRef(self.0)
    }
}

impl<T> Drop for FdTableRef<T> {
    #[inline]
    fn drop(&mut self) {
        if self.slot().refs.fetch_sub(1, Ordering::Release) == 1 {
            std::sync::atomic::fence(Ordering::Acquire);
            release(self.0);
        }
    }
}

/// Drops the value of a slot without references, and gives the slot back to its table.
#[cold]
fn release<T>(slot: NonNull<Slot<T>>) {
    // SAFETY: no references are left, and `FdTable::get` makes none for a slot without references.
    drop(unsafe { (*slot.as_ref().value.get()).take() });
    // SAFETY: slots are never freed.
    let table = unsafe { slot.as_ref() }.table;
    table.free.lock().push(slot);
}

/// Turns the reference of a removed table entry into a reference of the caller.
fn take_reference<T>(slot: *mut Slot<T>) -> Option<FdTableRef<T>> {
    let found = NonNull::new(slot).map(FdTableRef)?;
    found.slot().handles.fetch_sub(1, Ordering::AcqRel);
    Some(found)
}

impl<T: TableEntry> FdTable<T> {
    /// An empty table, for a static.
    pub(crate) const fn new() -> FdTable<T> {
        FdTable {
            entries: [const { AtomicPtr::new(null_mut()) }; MAX_FDS],
            end: AtomicI32::new(0),
            free: ForkMutex::new(FreeSlots(null_mut())),
        }
    }

    /// The entry of a descriptor. None in a process of [`TableEntry::is_elsewhere`].
    #[inline]
    fn entry(&self, fd: c_int) -> Option<&AtomicPtr<Slot<T>>> {
        let entry = self.entries.get(usize::try_from(fd).ok()?)?;
        (!T::is_elsewhere()).then_some(entry)
    }

    /// Whether a descriptor has an entry: one load, if there is none.
    #[inline]
    pub(crate) fn has(&self, fd: c_int) -> bool {
        let at = usize::try_from(fd).ok().and_then(|fd| self.entries.get(fd));
        at.is_some_and(|entry| !entry.load(Ordering::Relaxed).is_null()) && !T::is_elsewhere()
    }

    /// The value of a descriptor.
    #[inline]
    pub(crate) fn get(&self, fd: c_int) -> Option<FdTableRef<T>> {
        if !self.has(fd) {
            return None;
        }
        let entry = self.entries.get(usize::try_from(fd).ok()?)?;
        loop {
            let slot = NonNull::new(entry.load(Ordering::Acquire))?;
            // SAFETY: slots are never freed.
            let refs = unsafe { &slot.as_ref().refs };
            let mut now = refs.load(Ordering::Relaxed);
            while now != 0 {
                match refs.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed)
                {
                    Ok(_) => {
                        let found = FdTableRef(slot);
                        if entry.load(Ordering::Acquire) == slot.as_ptr() {
                            return Some(found);
                        }
                        break;
                    }
                    Err(other) => now = other,
                }
            }
            // Another thread closed the descriptor between the two loads: try again.
            std::hint::spin_loop();
        }
    }

    /// Makes the entry of a descriptor. Removes an old entry.
    pub(crate) fn install(&'static self, fd: c_int, value: T) -> Option<FdTableRef<T>> {
        let entry = self.entry(fd)?;
        let free = self.free.lock().pop();
        let slot = free.unwrap_or_else(|| {
            let slot = Slot {
                refs: AtomicU32::new(0),
                handles: AtomicU32::new(0),
                value: UnsafeCell::new(None),
                next_free: AtomicPtr::new(null_mut()),
                table: self,
            };
            NonNull::from(Box::leak(Box::new(slot)))
        });
        // SAFETY: the slot comes from the list of free ones or is new, so there is no other access to
        // its value until the count of references rises.
        unsafe {
            *slot.as_ref().value.get() = Some(value);
            slot.as_ref().handles.store(1, Ordering::Relaxed);
            slot.as_ref().refs.store(2, Ordering::Release);
        }
        self.end.fetch_max(fd.saturating_add(1), Ordering::Relaxed);
        let stale = entry.swap(slot.as_ptr(), Ordering::AcqRel);
        take_reference(stale);
        Some(FdTableRef(slot))
    }

    /// Gives one more descriptor the value of `shared`.
    pub(crate) fn share(&self, shared: &FdTableRef<T>, fd: c_int) {
        let Some(entry) = self.entry(fd) else { return };
        let another = shared.clone();
        self.end.fetch_max(fd.saturating_add(1), Ordering::Relaxed);
        let stale = entry.swap(another.0.as_ptr(), Ordering::AcqRel);
        another.slot().handles.fetch_add(1, Ordering::AcqRel);
        // The table has the reference now.
        std::mem::forget(another);
        take_reference(stale);
    }

    /// Removes the entry of a descriptor.
    pub(crate) fn remove(&self, fd: c_int) -> Option<FdTableRef<T>> {
        take_reference(self.entry(fd)?.swap(null_mut(), Ordering::AcqRel))
    }

    /// Removes the entry of a descriptor if the entry has this value.
    pub(crate) fn remove_if(&self, fd: c_int, value: &FdTableRef<T>) {
        let Some(entry) = self.entry(fd) else { return };
        let wanted = value.0.as_ptr();
        if entry.compare_exchange(wanted, null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            take_reference(wanted);
        }
    }

    /// Highest descriptor with a possible entry; -1: there are no entries.
    pub(crate) fn highest(&self) -> c_int {
        self.end.load(Ordering::Relaxed) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    static IS_ELSEWHERE: AtomicBool = AtomicBool::new(false);
    static TABLE: FdTable<u32> = FdTable::new();

    impl TableEntry for u32 {
        fn is_elsewhere() -> bool {
            IS_ELSEWHERE.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn another_process_finds_and_changes_no_entry() {
        let here = TABLE.install(3, 1).unwrap();
        IS_ELSEWHERE.store(true, Ordering::Relaxed);
        assert!(!TABLE.has(3) && TABLE.get(3).is_none() && TABLE.remove(3).is_none());
        assert!(TABLE.install(3, 2).is_none());
        TABLE.share(&here, 4);
        TABLE.remove_if(3, &here);
        IS_ELSEWHERE.store(false, Ordering::Relaxed);
        assert!(!TABLE.has(4));
        assert_eq!(TABLE.get(3).as_deref(), Some(&1));
        assert_eq!((here.handles(), here.refs()), (1, 2));
    }
}
