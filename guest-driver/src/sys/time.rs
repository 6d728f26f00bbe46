//! Durations in the form of the kernel.

use std::time::Duration;

use rustix::event::Timespec;

/// Converts a timeout for system calls. A duration beyond the range of the kernel becomes the
/// longest one.
pub fn timespec(timeout: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    }
}
