// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Allocates the signal lines of a slab, and the bits of each line, to DMBs.

use std::collections::{BTreeSet, HashMap};

use virtio_ism_abi::slab::MAX_LINES;

/// The lines of one slab.
///
/// A line belongs to one wait group at a time. As long as lines last every DMB gets a line of its own, so a
/// thread arms exactly the lines of its own DMBs; then DMBs of a group share.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// First line never used.
    fresh: u16,
    /// Lines returned whole.
    idle: BTreeSet<u16>,
    used: HashMap<u16, Line>,
    by_group: HashMap<u16, BTreeSet<u16>>,
}

#[derive(Debug)]
struct Line {
    group: u16,
    bits: u64,
}

impl Lines {
    /// A line and a bit of the line for a DMB of `group`; `None` if none is left.
    pub(super) fn take(&mut self, group: u16) -> Option<(u16, u8)> {
        if let Some(line) = self.unused() {
            self.used.insert(line, Line { group, bits: 1 });
            self.by_group.entry(group).or_default().insert(line);
            return Some((line, 0));
        }
        self.by_group.get(&group)?.iter().find_map(|number| {
            let line = self.used.get_mut(number)?;
            let bit = line.bits.trailing_ones();
            line.bits |= 1u64.checked_shl(bit)?;
            Some((*number, bit as u8))
        })
    }

    /// Releases a bit. `true`: the line has no further bits in use.
    pub(super) fn release(&mut self, number: u16, bit: u8) -> bool {
        let Some(line) = self.used.get_mut(&number) else { return false };
        line.bits &= !(1 << (bit & 63));
        if line.bits != 0 {
            return false;
        }
        if let Some(lines) = self.by_group.get_mut(&line.group) {
            lines.remove(&number);
            if lines.is_empty() {
                self.by_group.remove(&line.group);
            }
        }
        self.used.remove(&number);
        self.idle.insert(number);
        true
    }

    fn unused(&mut self) -> Option<u16> {
        if let Some(line) = self.idle.pop_first() {
            return Some(line);
        }
        let line = self.fresh;
        if usize::from(line) >= MAX_LINES {
            return None;
        }
        self.fresh += 1;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_dmb_has_a_line_of_its_own_until_lines_run_out() {
        let mut lines = Lines::default();
        let taken: HashSet<_> = (0..MAX_LINES).filter_map(|_| lines.take(1)).collect();
        assert_eq!(taken.len(), MAX_LINES);
        assert!(taken.iter().all(|&(_, bit)| bit == 0));
        assert_eq!(lines.take(1), Some((0, 1)), "then the group shares");
    }

    #[test]
    fn groups_never_share_a_line() {
        let mut lines = Lines::default();
        let mut group_of = HashMap::new();
        for n in 0..MAX_LINES as u16 + 500 {
            let group = n % 7;
            let Some((line, bit)) = lines.take(group) else { continue };
            assert_eq!(*group_of.entry(line).or_insert(group), group, "line {line} bit {bit}");
        }
        assert_eq!(lines.take(99), None, "a new group finds no line");
    }

    #[test]
    fn a_line_is_full_with_64_dmbs_and_free_with_none() {
        let mut lines = Lines::default();
        for group in 0..MAX_LINES as u16 {
            assert!(lines.take(group).is_some());
        }
        for bit in 1..64 {
            assert_eq!(lines.take(5), Some((5, bit)));
        }
        assert_eq!(lines.take(5), None);
        assert!(!lines.release(5, 17));
        assert_eq!(lines.take(5), Some((5, 17)));
        for bit in 0..63 {
            assert!(!lines.release(5, bit));
        }
        assert!(lines.release(5, 63), "the last bit frees the line");
        assert!(!lines.release(5, 63));
        assert_eq!(lines.take(4000), Some((5, 0)), "for any group");
    }
}
