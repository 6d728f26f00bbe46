// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A buddy allocator over offsets.

use std::collections::{BTreeMap, BTreeSet};

/// Allocates ranges of `[0, len)`.
///
/// A range of `n` units starts at a multiple of `n` rounded up to a power of two, so a range with a power of
/// two as length is aligned to its length. The units between `n` and this power of two stay available. The
/// lowest fitting place wins, to keep the top free.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, PartialOrd, Ord))]
pub struct Buddy {
    unit: u64,
    /// Free blocks by order: starts in units, each a multiple of `1 << order`.
    free: Vec<BTreeSet<u64>>,
    /// Allocated ranges: start and length in units.
    live: BTreeMap<u64, u64>,
    used: u64,
}

/// Number of possible orders of a start in units.
const ORDERS: u32 = u64::BITS;

impl Buddy {
    /// An allocator over `len` bytes in units of `unit` bytes. A rest of `len` below a unit stays unused.
    /// `unit` of 0 counts as 1.
    pub fn new(len: u64, unit: u64) -> Buddy {
        let unit = unit.max(1);
        let mut buddy = Buddy {
            unit,
            free: vec![BTreeSet::new(); ORDERS as usize],
            live: BTreeMap::new(),
            used: 0,
        };
        buddy.release(0, len / unit);
        buddy
    }

    /// Allocates a range of at least `len` bytes; `None` without room. The result is in bytes.
    pub fn alloc(&mut self, len: u64) -> Option<u64> {
        let units = len.div_ceil(self.unit).max(1);
        let order = units.checked_next_power_of_two()?.trailing_zeros();
        let start = self.take(order)?;
        // Give back the tail added by rounding up.
        self.release(start + units, (1 << order) - units);
        self.live.insert(start, units);
        self.used += units;
        Some(start * self.unit)
    }

    /// Frees the range starting at `offset` bytes. `false`: no range starts there.
    pub fn free(&mut self, offset: u64) -> bool {
        if !offset.is_multiple_of(self.unit) {
            return false;
        }
        let start = offset / self.unit;
        let Some(units) = self.live.remove(&start) else { return false };
        self.used -= units;
        self.release(start, units);
        true
    }

    /// Allocated bytes, in whole units.
    pub fn used(&self) -> u64 {
        self.used * self.unit
    }

    /// Whether nothing is allocated.
    pub fn is_unused(&self) -> bool {
        self.live.is_empty()
    }

    /// A free block of exactly this order, split off a larger block if needed.
    fn take(&mut self, order: u32) -> Option<u64> {
        let (from, start) = (order..ORDERS)
            .filter_map(|o| Some((o, *self.free.get(o as usize)?.first()?)))
            .min_by_key(|&(o, _)| o)?;
        self.free.get_mut(from as usize)?.remove(&start);
        for o in (order..from).rev() {
            self.free.get_mut(o as usize)?.insert(start + (1 << o));
        }
        Some(start)
    }

    /// Makes `[start, start + units)` free: cut into aligned blocks, each merged with its buddy.
    fn release(&mut self, mut start: u64, mut units: u64) {
        while units > 0 {
            let fits = units.ilog2();
            let order = if start == 0 { fits } else { fits.min(start.trailing_zeros()) };
            self.insert(start, order);
            start += 1 << order;
            units -= 1 << order;
        }
    }

    fn insert(&mut self, mut start: u64, order: u32) {
        for o in order..ORDERS {
            let Some(blocks) = self.free.get_mut(o as usize) else { return };
            if !blocks.remove(&(start ^ (1 << o))) {
                blocks.insert(start);
                return;
            }
            start &= !(1 << o);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn powers_of_two_are_aligned_to_their_length() {
        let mut buddy = Buddy::new(4 * MIB, 16 << 10);
        assert_eq!(buddy.alloc(16 << 10), Some(0));
        assert_eq!(buddy.alloc(MIB), Some(MIB));
        assert_eq!(buddy.alloc(64 << 10), Some(64 << 10));
        assert_eq!(buddy.alloc(2 * MIB), Some(2 * MIB));
        assert_eq!(buddy.alloc(MIB), None);
        assert!(buddy.free(MIB));
        assert_eq!(buddy.alloc(MIB), Some(MIB));
    }

    #[test]
    fn the_tail_of_a_range_that_is_no_power_of_two_stays_available() {
        // 4 MiB of data and a control tail, in steps of 2 MiB.
        let mut buddy = Buddy::new(16 * MIB, 2 * MIB);
        let slab = 4 * MIB + (64 << 10);
        assert_eq!(buddy.alloc(slab), Some(0));
        assert_eq!(buddy.used(), 6 * MIB);
        assert_eq!(buddy.alloc(2 * MIB), Some(6 * MIB));
        assert_eq!(buddy.alloc(slab), Some(8 * MIB));
    }

    #[test]
    fn a_length_that_is_no_power_of_two_is_used_to_the_last_unit() {
        let mut buddy = Buddy::new(7, 1);
        let mut got: Vec<_> = std::iter::from_fn(|| buddy.alloc(1)).collect();
        got.sort_unstable();
        assert_eq!(got, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_was_not_given_out_is_not_taken_back() {
        let mut buddy = Buddy::new(MIB, 4096);
        assert!(!buddy.free(0));
        assert_eq!(buddy.alloc(8192), Some(0));
        assert!(!buddy.free(4096) && !buddy.free(1));
        assert!(buddy.free(0) && !buddy.free(0));
        assert_eq!(buddy.alloc(MIB), Some(0), "merged into one block again");
        assert_eq!(buddy.alloc(1), None);
    }

    #[test]
    fn absurd_lengths_are_refused() {
        let mut buddy = Buddy::new(MIB, 4096);
        assert_eq!(buddy.alloc(u64::MAX), None);
        assert_eq!(buddy.alloc(MIB + 1), None);
        assert_eq!(Buddy::new(0, 0).alloc(1), None);
    }

    /// The state after one operation, checked for its invariants. The state is complete: allocated ranges and
    /// free blocks.
    fn checked(buddy: Buddy, len: u64) -> Buddy {
        let mut owner = vec![0; len as usize];
        let mut own = |start: u64, units: u64| {
            for unit in start..start + units {
                owner[unit as usize] += 1;
            }
        };
        for (start, units) in &buddy.live {
            own(*start, *units);
            assert!(start.is_multiple_of(units.next_power_of_two()), "{buddy:?}");
        }
        for (order, blocks) in buddy.free.iter().enumerate() {
            for start in blocks {
                own(*start, 1 << order);
                assert!(start.is_multiple_of(1 << order), "{buddy:?}");
                // Otherwise the allocator would miss a fitting range.
                let other = start ^ (1 << order);
                assert!(!blocks.contains(&other), "not merged: {buddy:?}");
            }
        }
        assert!(owner.iter().all(|n| *n == 1), "each unit is free or in one range: {buddy:?}");
        assert_eq!(buddy.used(), buddy.live.values().sum::<u64>());
        buddy
    }

    #[test]
    fn every_sequence_of_operations_keeps_ranges_apart_and_loses_nothing() {
        for len in 1..=9 {
            let first = checked(Buddy::new(len, 1), len);
            let mut seen = BTreeSet::from([first.clone()]);
            let mut next = vec![first.clone()];
            while let Some(buddy) = next.pop() {
                let mut after = Vec::new();
                for n in 0..=len + 1 {
                    let mut buddy = buddy.clone();
                    let units = n.max(1);
                    let order = units.next_power_of_two().trailing_zeros() as usize;
                    let fits = buddy.free.iter().skip(order).any(|blocks| !blocks.is_empty());
                    let before = buddy.clone();
                    match buddy.alloc(n) {
                        Some(start) => {
                            assert!(fits && buddy.live.get(&start) == Some(&units));
                            after.push(buddy);
                        }
                        None => assert!(!fits && buddy == before, "{buddy:?} has no {n}"),
                    }
                }
                for offset in 0..=len + 1 {
                    let mut freed = buddy.clone();
                    assert_eq!(freed.free(offset), buddy.live.contains_key(&offset));
                    after.push(freed);
                }
                for buddy in after {
                    if !seen.contains(&buddy) {
                        seen.insert(checked(buddy.clone(), len));
                        next.push(buddy);
                    }
                }
            }
            // The free blocks follow from the allocated ranges, so nothing can be lost over time.
            let mut lives: Vec<_> = seen.iter().map(|buddy| buddy.live.clone()).collect();
            let count = lives.len();
            lives.sort();
            lives.dedup();
            assert_eq!(lives.len(), count, "{len}");
            println!("{len} units: {count} states");
        }
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_comes_back(
            len in 1u64..600,
            ops in prop::collection::vec((any::<bool>(), 0u64..80), 1..200),
        ) {
            let mut buddy = Buddy::new(len, 1);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (alloc, n) in ops {
                if alloc {
                    if let Some(start) = buddy.alloc(n) {
                        let n = n.max(1);
                        prop_assert!(start + n <= len);
                        prop_assert!(start.is_multiple_of(n.next_power_of_two()));
                        prop_assert!(live.iter().all(|&(s, l)| start + n <= s || s + l <= start));
                        live.push((start, n));
                    }
                } else if !live.is_empty() {
                    let (start, _) = live.swap_remove(n as usize % live.len());
                    prop_assert!(buddy.free(start));
                }
                prop_assert_eq!(buddy.used(), live.iter().map(|r| r.1).sum::<u64>());
            }
            for (start, _) in live {
                prop_assert!(buddy.free(start));
            }
            prop_assert!(buddy.is_unused());
            let whole = 1 << len.ilog2();
            prop_assert_eq!(buddy.alloc(whole), Some(0), "no fragment is left");
        }
    }
}
