// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of a thread's waits, for example for a page.

use std::mem::MaybeUninit;

/// The kernel's counters of a thread so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageWaits {
    /// Voluntary waits, for any reason.
    pub waits: i64,
    /// Pages read from a disk for the thread.
    pub from_disk: i64,
}

impl PageWaits {
    /// The counters of the calling thread.
    pub fn now() -> PageWaits {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the kernel fills the structure, valid when zeroed as well.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
            usage.assume_init()
        };
        PageWaits { waits: usage.ru_nvcsw, from_disk: usage.ru_majflt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_has_waited() {
        let before = PageWaits::now();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(PageWaits::now().waits > before.waits);
    }
}
