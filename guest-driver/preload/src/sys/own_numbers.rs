//! Numbers of descriptors that the library's own code makes by libc's functions.
//!
//! The code of a device duplicates descriptors, and makes pairs of sockets, at places that cannot
//! name a lowest number. Its calls go through the hooks, as those of the program do.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::sys::{owned, raw};

/// The thread that opens a device; 0: none does.
static THREAD: AtomicI32 = AtomicI32::new(0);
/// The lowest number of its descriptors.
static LOWEST: AtomicI32 = AtomicI32::new(0);

/// While this exists, the thread makes descriptors for the library.
pub(crate) struct OwnFdGuard(());

/// From here on the calling thread makes descriptors for the library. One thread does at a time.
pub(crate) fn begin(lowest: c_int) -> OwnFdGuard {
    LOWEST.store(lowest, Ordering::Relaxed);
    THREAD.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
    OwnFdGuard(())
}

impl Drop for OwnFdGuard {
    fn drop(&mut self) {
        THREAD.store(0, Ordering::Release);
    }
}

/// The lowest number for a descriptor of the calling thread; `None`: it is one of the program.
#[inline]
pub(crate) fn lowest() -> Option<c_int> {
    let thread = THREAD.load(Ordering::Acquire);
    let ours = thread != 0 && thread == rustix::thread::gettid().as_raw_nonzero().get();
    ours.then(|| LOWEST.load(Ordering::Relaxed))
}

/// Moves a new descriptor of the calling thread, if it is one of the library.
#[inline]
pub(crate) fn moved(fd: c_int) -> c_int {
    let Some(lowest) = lowest() else { return fd };
    match raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest) {
        Ok(high) => {
            drop(owned(fd));
            high as c_int
        }
        Err(_) => fd,
    }
}
