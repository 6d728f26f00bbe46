// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The listeners of this process that answer TCP option 254 to all clients, beginning with the
//! first. For a client of such a listener the library knows without a system call whether the SYN
//! had no option.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A bit per descriptor. A listener with a higher number is not entered: each of its clients costs
/// a system call, and an inherited one does not answer.
struct Listeners([AtomicU64; 16]);

static ANSWERING: Listeners = Listeners::none();
/// Inherited listeners that do not answer, before the first accept of the process.
static INHERITED: Listeners = Listeners::none();

impl Listeners {
    const fn none() -> Listeners {
        Listeners([const { AtomicU64::new(0) }; 16])
    }

    fn place(&self, fd: c_int) -> Option<(&AtomicU64, u64)> {
        let fd = usize::try_from(fd).ok()?;
        Some((self.0.get(fd / 64)?, 1 << (fd % 64)))
    }

    fn add(&self, fd: c_int) {
        if let Some((word, bit)) = self.place(fd) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    #[inline]
    fn contains(&self, fd: c_int) -> bool {
        self.place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Removes a listener. `true`: the listener was entered.
    #[inline]
    fn remove(&self, fd: c_int) -> bool {
        self.place(fd).is_some_and(|(word, bit)| {
            word.load(Ordering::Relaxed) & bit != 0
                && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
        })
    }
}

/// Whether this process may have answering listeners.
static ANY: AtomicBool = AtomicBool::new(false);

/// Notes an answering listener of this process, or a possible one.
pub(crate) fn note() {
    ANY.store(true, Ordering::Relaxed);
}

/// Whether this process may have answering listeners, with any number.
#[inline]
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// Enters a listener.
pub(super) fn add(fd: c_int) {
    ANSWERING.add(fd);
}

/// Enters an inherited listener that does not answer.
pub(super) fn add_inherited(fd: c_int) {
    INHERITED.add(fd);
}

/// Removes a listener entered by [`add_inherited`]. `true`: the listener was entered.
#[inline]
pub(super) fn take_inherited(fd: c_int) -> bool {
    INHERITED.remove(fd)
}

/// Whether a descriptor is an entered listener.
#[inline]
pub(crate) fn contains(fd: c_int) -> bool {
    ANSWERING.contains(fd)
}

/// The program closes a descriptor, or gives its number to another file.
#[inline]
pub(crate) fn remove(fd: c_int) {
    ANSWERING.remove(fd);
    INHERITED.remove(fd);
}

/// [`remove`] for a range.
pub(crate) fn remove_range(first: c_int, last: c_int) {
    let most = (ANSWERING.0.len() * 64) as c_int - 1;
    (first.max(0)..=last.min(most)).for_each(remove);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_listener_until_it_is_closed() {
        for fd in [3, 64, 1023] {
            assert!(!contains(fd));
            add(fd);
            assert!(contains(fd));
            remove(fd);
            assert!(!contains(fd));
        }
        add(70);
        remove_range(71, c_int::MAX);
        assert!(contains(70));
        remove_range(-1, 70);
        assert!(!contains(70));
    }

    #[test]
    fn numbers_that_have_no_place_are_none() {
        for fd in [-1, 1024, c_int::MAX] {
            add(fd);
            assert!(!contains(fd));
            remove(fd);
        }
    }
}
