// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A front end's window: ranges with slabs, and ranges possibly still mapped from a past session.

use crate::shm::Buddy;

/// The ranges of one window. A window outlives sessions, as the front end's mappings do.
#[derive(Debug)]
pub(super) struct Window {
    size: u64,
    ranges: Buddy,
    /// Ranges possibly left mapped by a past session. Not allocated again before the front end's answer to an
    /// unmap request.
    stale: Vec<Stale>,
    /// The front end maps at its start only, so no range has to be allocated or unmapped.
    is_fixed: bool,
}

#[derive(Debug)]
struct Stale {
    offset: u64,
    len: u64,
    /// A request to the front end about the range is outstanding, to map or to unmap.
    busy: bool,
}

impl Window {
    /// No window.
    pub(super) fn none() -> Window {
        Window { size: 0, ranges: Buddy::new(0, 1), stale: Vec::new(), is_fixed: false }
    }

    /// The window of a front end that maps at its start only.
    pub(super) fn fixed(size: u64) -> Window {
        Window { size, is_fixed: true, ..Window::none() }
    }

    /// A window of `size` bytes, allocated in multiples of `align` bytes.
    pub(super) fn new(size: u64, align: u32) -> Window {
        Window { size, ranges: Buddy::new(size, u64::from(align)), ..Window::none() }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Whether no range is allocated, including stale ranges.
    pub(super) fn is_unused(&self) -> bool {
        self.ranges.is_unused()
    }

    pub(super) fn alloc(&mut self, len: u64) -> Option<u64> {
        self.ranges.alloc(len)
    }

    /// Gives back an unmapped range.
    pub(super) fn free(&mut self, offset: u64) {
        self.ranges.free(offset);
    }

    /// Records a range of an ended session. `busy`: a request to the front end about the range is
    /// outstanding.
    pub(super) fn mark_stale(&mut self, offset: u64, len: u64, busy: bool) {
        if !self.is_fixed {
            self.stale.push(Stale { offset, len, busy });
        }
    }

    /// The front end has answered the request about a stale range.
    pub(super) fn mark_answered(&mut self, offset: u64) {
        for stale in self.stale.iter_mut().filter(|stale| stale.offset == offset) {
            stale.busy = false;
        }
    }

    /// The next stale range to ask the front end about: offset and length in bytes.
    pub(super) fn next_stale(&mut self) -> Option<(u64, u64)> {
        let stale = self.stale.iter_mut().find(|stale| !stale.busy)?;
        stale.busy = true;
        Some((stale.offset, stale.len))
    }

    /// A stale range is no longer mapped.
    pub(super) fn free_stale(&mut self, offset: u64) {
        let before = self.stale.len();
        self.stale.retain(|stale| stale.offset != offset);
        if self.stale.len() < before {
            self.ranges.free(offset);
        }
    }

    pub(super) fn stale(&self) -> usize {
        self.stale.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_range_is_not_given_out_before_its_end_is_confirmed() {
        let mut window = Window::new(4 << 20, 2 << 20);
        let range = window.alloc(2 << 20).unwrap();
        window.mark_stale(range, 2 << 20, true);
        assert_eq!(window.next_stale(), None, "still being mapped");
        window.mark_answered(range);
        assert_eq!(window.next_stale(), Some((range, 2 << 20)));
        assert_eq!(window.next_stale(), None, "asked once");
        assert_eq!(window.alloc(2 << 20), Some(2 << 20));
        assert_eq!(window.alloc(2 << 20), None);
        window.free_stale(range);
        assert_eq!(window.alloc(2 << 20), Some(range));
        window.free_stale(range);
        assert_eq!(window.alloc(1), None, "a range in use is not stale");
    }
}
