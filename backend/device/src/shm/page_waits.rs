// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How often a thread has waited for something, such as a page.

use std::mem::MaybeUninit;

/// What the kernel has counted of a thread so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageWaits {
    /// Times that it has waited, for whatever.
    pub waits: i64,
    /// Pages that were read from a disk for it.
    pub from_disk: i64,
}

impl PageWaits {
    /// Those of the calling thread.
    pub fn now() -> PageWaits {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the kernel fills the structure, for which zeroes are valid as well.
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
