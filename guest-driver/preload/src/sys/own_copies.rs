// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of the library's own descriptors, and numbers left to the program.
//!
//! The limit of a process (RLIMIT_NOFILE) is on numbers, and programs size the limit for themselves.
//! The driver's descriptors have numbers beyond the limit, or the highest below a hard limit. The
//! library's copies of TCP sockets, needed for a moment, lie below. Copies must leave enough numbers: a
//! connection stays on TCP before a call of the program finds no number.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use ism_sys::LimitGuard;

use super::{borrowed, owned, raw};
use crate::sys::fork_lock::{self, ForkMutex};
use crate::sys::raw::Errno;

/// Count of the highest numbers, reserved for the driver and for the program.
const RESERVE: u64 = 100;

/// The smallest limit with the highest numbers for the driver's descriptors.
const USUAL_LIMIT: u64 = 1000;

/// Upper bound of the lowest number for copies.
const HIGHEST_FLOOR: u64 = 60_000;

/// Upper bound of the driver's lowest number: the kernel's table is as long as the highest number.
const HIGHEST: u64 = 62_000;

/// The limit of the process on numbers of descriptors.
pub(crate) fn limit() -> u64 {
    ism_sys::resource_limit(libc::RLIMIT_NOFILE).unwrap_or(u64::MAX)
}

/// Numbers for the driver's descriptors, until dropped.
pub(crate) struct DriverLimit {
    raised: Option<LimitGuard>,
}

impl DriverLimit {
    pub(crate) fn take() -> DriverLimit {
        DriverLimit { raised: LimitGuard::of_descriptors() }
    }

    /// The lowest number; 0: the lowest free number.
    pub(crate) fn lowest(&self) -> c_int {
        match (&self.raised, limit()) {
            (Some(raised), _) => raised.first(),
            (None, limit) if limit < USUAL_LIMIT => 0,
            (None, limit) => (limit - RESERVE).min(HIGHEST) as c_int,
        }
    }
}

/// The smallest limit for a device: with less, the device's numbers would be too great a part.
const LEAST_LIMIT: u64 = 256;

/// Whether the limit of the process leaves room for the numbers of a device.
pub(crate) fn allow_device() -> bool {
    limit() >= LEAST_LIMIT
}

/// Numbers from here on are for the driver and the program.
fn reserve_begins(limit: u64) -> usize {
    let reserve = if limit < USUAL_LIMIT { limit / 8 } else { RESERVE };
    usize::try_from(limit - reserve).unwrap_or(usize::MAX)
}

/// The lowest number for copies.
fn floor(limit: u64) -> c_int {
    (limit / 3 * 2).min(HIGHEST_FLOOR) as c_int
}

/// Count of numbers below the reserve for the program. The kernel gives out the lowest free number, so
/// `highest`, a new number of the program, tells the count.
fn room(limit: u64, highest: c_int) -> usize {
    reserve_begins(limit).saturating_sub(usize::try_from(highest).unwrap_or(0))
}

/// Whether the program, after getting the number `fd`, has enough numbers left beside `copy`, the newest of
/// the copies for handshakes; `pending`: the known number of the others. The number of the newest copy tells
/// of the others, too: of those in calls that wait for a client's first bytes.
///
/// The program may take all further numbers before the end of a handshake, whose peer decides how long
/// the handshake lasts. So all handshakes together have a small part of the limit, and a smaller one if
/// fewer numbers are left.
fn is_plenty(limit: u64, fd: c_int, copy: c_int, pending: usize) -> bool {
    let left = room(limit, fd) / 4;
    let most = usize::try_from(limit / 64).unwrap_or(usize::MAX).min(left);
    let copies = copy - fd.max(floor(limit));
    room(limit, copy) > 0 && pending < most && copies.max(0) as usize <= left
}

/// Maximum number of pairs of descriptors for waiting calls, see [`PairPlace`].
fn most_pairs(limit: u64, highest: c_int) -> usize {
    usize::try_from(limit / 64).unwrap_or(usize::MAX).min(room(limit, highest) / 16)
}

/// Maximum number of connections with descriptors to show readiness to the kernel, two each.
pub(crate) fn most_readiness_descriptors() -> usize {
    usize::try_from(limit() / 128).unwrap_or(usize::MAX).max(2)
}

/// Permission for two descriptors during a waiting call. A program on TCP needs none to wait.
#[derive(Debug)]
pub(crate) struct PairPlace {
    /// The process of the call: the child of a fork has none of the calls.
    process: u32,
}

/// Number of taken places, and their process.
static PAIRS: ForkMutex<(u32, usize)> = ForkMutex::new((0, 0));

/// Runs `f` on the number of places taken by this process.
fn with_pairs<T>(f: impl FnOnce(&mut usize) -> T) -> T {
    let mut pairs = PAIRS.lock();
    if pairs.0 != fork_lock::process() {
        *pairs = (fork_lock::process(), 0);
    }
    f(&mut pairs.1)
}

impl PairPlace {
    /// `highest`: the highest number in the call's list. `None`: numbers are short.
    pub(crate) fn take(highest: c_int) -> Option<PairPlace> {
        let most = most_pairs(limit(), highest);
        let taken = with_pairs(|pairs| {
            let fits = *pairs < most;
            *pairs += usize::from(fits);
            fits
        });
        taken.then(|| PairPlace { process: fork_lock::process() })
    }

    /// Whether the place may stay taken without use.
    pub(crate) fn may_stay(&self, highest: c_int) -> bool {
        self.is_own() && with_pairs(|pairs| *pairs <= most_pairs(limit(), highest) / 2)
    }

    /// Whether the place is this process's, and not a parent's.
    pub(crate) fn is_own(&self) -> bool {
        self.process == fork_lock::process()
    }
}

impl Drop for PairPlace {
    fn drop(&mut self) {
        if self.is_own() {
            with_pairs(|pairs| *pairs = pairs.saturating_sub(1));
        }
    }
}

fn duplicate_from(fd: c_int, lowest: c_int) -> Result<OwnedFd, Errno> {
    raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest).map(|copy| owned(copy as c_int))
}

/// Makes a copy of a descriptor, out of the program's way.
pub(crate) fn duplicate(fd: c_int) -> Result<OwnedFd, Errno> {
    duplicate_from(fd, floor(limit())).or_else(|_| duplicate_from(fd, 3))
}

/// Variant of [`duplicate`]. `None`: the program has reached the reserve.
pub(crate) fn duplicate_below_reserve(fd: c_int) -> Option<OwnedFd> {
    let limit = limit();
    let copy = duplicate_from(fd, floor(limit)).ok()?;
    (room(limit, copy.as_raw_fd()) > 0).then_some(copy)
}

/// Variant of [`duplicate`] for a handshake. If the program may soon need the numbers below its limit, the
/// copy has a number beyond. `pending`: the number of handshakes that wait for their peers.
///
/// # Errors
/// EMFILE: numbers are short, or none is free; or another error of fcntl(2).
pub(crate) fn duplicate_if_plenty(fd: c_int, pending: usize) -> Result<OwnedFd, Errno> {
    let limit = limit();
    let plenty = if limit < LEAST_LIMIT {
        Err(Errno(libc::EMFILE))
    } else {
        let below = duplicate_from(fd, floor(limit));
        match below.ok().filter(|copy| is_plenty(limit, fd, copy.as_raw_fd(), pending)) {
            Some(copy) => Ok(copy),
            None => ism_sys::duplicate_beyond_limit(borrowed(fd)).map_err(Errno::from),
        }
    };
    SHORT.store(plenty.is_err(), Ordering::Relaxed);
    plenty
}

/// Whether the last [`duplicate_if_plenty`] has failed.
static SHORT: AtomicBool = AtomicBool::new(false);

/// Whether numbers were short at the last handshake.
pub(crate) fn are_short() -> bool {
    SHORT.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_is_left_at_every_limit() {
        for (limit, begins) in [(64, 56), (256, 224), (1024, 924), (20_000, 19_900)] {
            assert_eq!(reserve_begins(limit), begins, "{limit}");
            assert!(floor(limit) < begins as c_int, "{limit}");
        }
    }

    #[test]
    fn the_fewer_numbers_are_left_the_fewer_handshakes_run() {
        let most = |fd: c_int| (0..1024).take_while(|n| is_plenty(1024, fd, fd + 1, *n)).count();
        for (fd, expected) in [(4, 16), (700, 16), (900, 6), (922, 0), (924, 0)] {
            assert_eq!(most(fd), expected, "{fd}");
        }
        assert!(!is_plenty(1024, 4, 924, 0), "the copy is in the reserve");
        assert!(!is_plenty(1024, 4, floor(1024) + 231, 0), "others wait for first bytes");
    }

    #[test]
    fn the_fewer_numbers_are_left_the_fewer_pairs_there_are() {
        for (highest, most) in [(-1, 16), (500, 16), (800, 7), (900, 1), (1000, 0)] {
            assert_eq!(most_pairs(1024, highest), most, "{highest}");
        }
    }
}
