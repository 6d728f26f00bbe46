//! The table of descriptors, and the memory of the sockets in it.
//!
//! A descriptor that is not ours costs one load. Memory of sockets is never given back, only used
//! again, so that a look at an entry that another thread is just closing is harmless: the count of
//! references tells.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::socket::stream::Sock;

/// Descriptors beyond this are left alone.
const MAX_FDS: usize = 1 << 20;

static TABLE: [AtomicPtr<Slot>; MAX_FDS] = [const { AtomicPtr::new(null_mut()) }; MAX_FDS];
/// Highest descriptor that ever had an entry.
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
static FREE: Mutex<Free> = Mutex::new(Free(Vec::new()));

struct Free(Vec<NonNull<Slot>>);

// SAFETY: slots are never freed, and one in this list is nobody else's.
unsafe impl Send for Free {}

/// Memory for one socket.
struct Slot {
    /// References: table entries and calls under way. Zero: free.
    refs: AtomicU32,
    /// Table entries among them.
    handles: AtomicU32,
    sock: UnsafeCell<Option<Sock>>,
}

/// A socket in use.
pub(crate) struct Ref(NonNull<Slot>);

// SAFETY: a reference is counted, and what it leads to is `Sync`.
unsafe impl Send for Ref {}
// SAFETY: as above.
unsafe impl Sync for Ref {}

impl Ref {
    fn slot(&self) -> &Slot {
        // SAFETY: slots live for ever.
        unsafe { self.0.as_ref() }
    }

    /// How many descriptors there are.
    pub(crate) fn handles(&self) -> u32 {
        self.slot().handles.load(Ordering::Acquire)
    }

    /// Whether others than the caller refer to it.
    pub(crate) fn is_in_use(&self) -> bool {
        self.slot().refs.load(Ordering::Acquire) > 1
    }

    /// Whether both are the same socket.
    pub(crate) fn is(&self, other: &Ref) -> bool {
        self.0 == other.0
    }
}

impl Deref for Ref {
    type Target = Sock;

    #[inline]
    fn deref(&self) -> &Sock {
        // SAFETY: while references are counted the content is there and nobody changes the cell.
        match unsafe { &*self.slot().sock.get() } {
            Some(sock) => sock,
            None => std::process::abort(),
        }
    }
}

impl Clone for Ref {
    fn clone(&self) -> Ref {
        self.slot().refs.fetch_add(1, Ordering::Relaxed);
        Ref(self.0)
    }
}

impl Drop for Ref {
    #[inline]
    fn drop(&mut self) {
        if self.slot().refs.fetch_sub(1, Ordering::Release) == 1 {
            std::sync::atomic::fence(Ordering::Acquire);
            retire(self.0);
        }
    }
}

#[cold]
fn retire(slot: NonNull<Slot>) {
    // SAFETY: no references are left, and none is made of a slot that has none.
    drop(unsafe { (*slot.as_ref().sock.get()).take() });
    FREE.lock().unwrap_or_else(PoisonError::into_inner).0.push(slot);
}

fn entry(fd: c_int) -> Option<&'static AtomicPtr<Slot>> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// Whether there is an entry: one load.
#[inline]
pub(crate) fn has(fd: c_int) -> bool {
    entry(fd).is_some_and(|entry| !entry.load(Ordering::Relaxed).is_null())
}

/// The socket of a descriptor.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Ref> {
    let entry = entry(fd)?;
    loop {
        let slot = NonNull::new(entry.load(Ordering::Acquire))?;
        // SAFETY: slots live for ever.
        let refs = unsafe { &slot.as_ref().refs };
        let mut now = refs.load(Ordering::Relaxed);
        while now != 0 {
            match refs.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    let found = Ref(slot);
                    if entry.load(Ordering::Acquire) == slot.as_ptr() {
                        return Some(found);
                    }
                    break;
                }
                Err(other) => now = other,
            }
        }
        // Closed at this moment: look again.
        std::hint::spin_loop();
    }
}

/// Puts a socket under a descriptor that has no entry.
pub(crate) fn install(fd: c_int, sock: Sock) -> Option<Ref> {
    let entry = entry(fd)?;
    let slot = FREE.lock().unwrap_or_else(PoisonError::into_inner).0.pop().unwrap_or_else(|| {
        let slot = Slot {
            refs: AtomicU32::new(0),
            handles: AtomicU32::new(0),
            sock: UnsafeCell::new(None),
        };
        NonNull::from(Box::leak(Box::new(slot)))
    });
    // SAFETY: taken from the list of free slots, so it is ours alone until the count rises.
    unsafe {
        *slot.as_ref().sock.get() = Some(sock);
        slot.as_ref().handles.store(1, Ordering::Relaxed);
        slot.as_ref().refs.store(2, Ordering::Release);
    }
    HIGHEST.fetch_max(fd, Ordering::Relaxed);
    let stale = entry.swap(slot.as_ptr(), Ordering::AcqRel);
    taken(stale);
    Some(Ref(slot))
}

/// Puts a socket under one more descriptor.
pub(crate) fn share(sock: &Ref, fd: c_int) {
    let Some(entry) = entry(fd) else { return };
    let another = sock.clone();
    HIGHEST.fetch_max(fd, Ordering::Relaxed);
    let stale = entry.swap(another.0.as_ptr(), Ordering::AcqRel);
    another.slot().handles.fetch_add(1, Ordering::AcqRel);
    // The table has the reference now.
    std::mem::forget(another);
    taken(stale);
}

/// The reference that a table entry was, which is not one any more.
fn taken(slot: *mut Slot) -> Option<Ref> {
    let found = NonNull::new(slot).map(Ref)?;
    found.slot().handles.fetch_sub(1, Ordering::AcqRel);
    Some(found)
}

/// Takes the entry of a descriptor away.
pub(crate) fn remove(fd: c_int) -> Option<Ref> {
    taken(entry(fd)?.swap(null_mut(), Ordering::AcqRel))
}

/// Takes the entry away if it is this socket.
pub(crate) fn remove_if(fd: c_int, sock: &Ref) {
    let Some(entry) = entry(fd) else { return };
    let wanted = sock.0.as_ptr();
    if entry.compare_exchange(wanted, null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        taken(wanted);
    }
}

/// Highest descriptor that may have an entry.
pub(crate) fn highest() -> c_int {
    HIGHEST.load(Ordering::Relaxed)
}
