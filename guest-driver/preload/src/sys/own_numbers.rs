// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of descriptors made by the library's own code with libc's functions.
//!
//! The code of a device duplicates descriptors, and makes pairs of sockets, without a way to name a
//! lowest number. These calls go through the hooks, like the program's calls.
//!
//! Some numbers are entered in a list. The program's calls to close an entered number fail, as on
//! closed numbers, and calls to close a range leave the entered numbers open.

use std::ffi::c_int;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::{owned, raw};

/// Moves a new descriptor of the calling thread, if the descriptor is the library's.
#[inline]
pub(crate) fn moved(fd: c_int) -> c_int {
    match ism_sys::is_driver_thread() {
        true => ism_sys::move_out_of_the_way(owned(fd)).into_raw_fd(),
        false => fd,
    }
}

/// A bit per number. Higher numbers are not entered.
static ENTERED: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

fn place(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((ENTERED.get(fd / 64)?, 1 << (fd % 64)))
}

/// Enters a descriptor, to be closed by [`close`].
pub(crate) fn enter(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Whether a descriptor is entered.
#[inline]
pub(crate) fn contains(fd: c_int) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// Removes a number taken by the program for another file. `true`: the number was entered.
#[inline]
pub(crate) fn forget(fd: c_int) -> bool {
    contains(fd)
        && place(fd).is_some_and(|(word, bit)| word.fetch_and(!bit, Ordering::Relaxed) & bit != 0)
}

/// Removes all numbers, after the process has closed all descriptors except some not entered.
pub(crate) fn forget_all() {
    for fd in entered() {
        forget(fd);
    }
}

/// Closes an entered descriptor, unless the program has taken its number for another file.
pub(crate) fn close(fd: c_int) {
    if forget(fd) {
        let _ = raw::close(fd);
    }
}

/// The entered numbers, ascending.
pub(crate) fn entered() -> impl Iterator<Item = c_int> {
    let words = ENTERED.iter().enumerate();
    let words = words.filter(|(_, word)| word.load(Ordering::Relaxed) != 0);
    words
        .flat_map(|(at, _)| (at * 64..at * 64 + 64).map(|fd| fd as c_int))
        .filter(|fd| contains(*fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_entered_until_it_is_closed_or_taken() {
        let all = [900_000, 900_063, 900_064];
        all.into_iter().for_each(enter);
        assert_eq!(entered().filter(|fd| *fd >= 900_000).collect::<Vec<_>>(), all);
        assert!(forget(900_063) && !forget(900_063));
        // No descriptor is open there.
        close(900_000);
        assert_eq!(entered().filter(|fd| *fd >= 900_000).collect::<Vec<_>>(), [900_064]);
    }

    #[test]
    fn numbers_that_have_no_place_are_never_entered() {
        for fd in [-1, 1 << 20, c_int::MAX] {
            enter(fd);
            assert!(!contains(fd));
        }
    }
}
