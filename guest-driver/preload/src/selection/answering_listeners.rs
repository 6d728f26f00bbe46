//! The listeners of this process that answer TCP option 254 to all clients, from their first one on.
//! For a client of theirs it is known without a system call whether its SYN had no option.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bit per descriptor. A listener with a number beyond them is not entered, and its clients cost a
/// system call each.
static ANSWERING: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

fn place(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((ANSWERING.get(fd / 64)?, 1 << (fd % 64)))
}

/// Enters a listener.
pub(super) fn add(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Whether a descriptor is one of them.
#[inline]
pub(crate) fn contains(fd: c_int) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// The program closes a descriptor, or gives its number to another file.
#[inline]
pub(crate) fn remove(fd: c_int) {
    if let Some((word, bit)) = place(fd)
        && word.load(Ordering::Relaxed) & bit != 0
    {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// [`remove`] for a range.
pub(crate) fn remove_range(first: c_int, last: c_int) {
    let most = (ANSWERING.len() * 64) as c_int - 1;
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
