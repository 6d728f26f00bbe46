// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of the driver's own descriptors.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, Ordering};

/// Lowest number of descriptors that the driver keeps; 0: whatever the kernel gives.
static LOWEST: AtomicI32 = AtomicI32::new(0);

/// Keeps the driver's descriptors at numbers from `lowest` on. A program unaware of the driver may count
/// on low numbers: a small table, or a certain number for the next descriptor.
pub fn set_lowest_descriptor(lowest: i32) {
    LOWEST.store(lowest, Ordering::Relaxed);
}

/// Moves a new descriptor out of the program's way, if [`set_lowest_descriptor`] was called.
pub fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    match LOWEST.load(Ordering::Relaxed) {
        0 => fd,
        lowest => rustix::io::fcntl_dupfd_cloexec(&fd, lowest).unwrap_or(fd),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn descriptors_are_moved_only_when_asked() {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let fd = open();
        let number = fd.as_raw_fd();
        assert_eq!(out_of_the_way(fd).as_raw_fd(), number);
        let moved = rustix::io::fcntl_dupfd_cloexec(open(), 200).unwrap();
        assert!(moved.as_raw_fd() >= 200);
    }
}
