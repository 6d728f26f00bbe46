// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Forks after a stack was opened. The child of a fork has the memory of its parent and none of the threads,
//! so the child must not touch the parent's stacks.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::error::Error;

/// Number of forks between the first process with a stack and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn note() {
    // Relaxed: the child has one thread.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Number of forks between the first process with a stack and a process. A child's number differs from its
/// parent's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation(u32);

impl Generation {
    /// The generation of this process.
    pub(crate) fn current() -> Generation {
        static FOLLOWS: AtomicBool = AtomicBool::new(false);
        // Two threads at once make two entries, and a child of a fork waits for neither. Each entry
        // makes the number of a child another one.
        if !FOLLOWS.load(Ordering::Acquire) {
            // SAFETY: the function only adds to a number, and the library is never unmapped. Without
            // memory for the entry a child is not told from its parent, as without this library.
            unsafe { libc::pthread_atfork(None, None, Some(note)) };
            // Release: partner of the Acquire above; a thread reading `true` has the entry.
            FOLLOWS.store(true, Ordering::Release);
        }
        Generation(FORKS.load(Ordering::Relaxed))
    }

    /// Whether the generation is this process's.
    pub(crate) fn is_current(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }

    /// Refuses an object made by an ancestor of this process.
    ///
    /// # Errors
    /// EBADF.
    pub(crate) fn check(self) -> Result<(), Error> {
        match self.is_current() {
            true => Ok(()),
            false => Err(Error::new(libc::EBADF, "it belongs to the process that forked this one")),
        }
    }
}
