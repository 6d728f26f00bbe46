// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The walk of descriptor chains, for every table within bounds (docs/testing.md, "Exhaustive
//! checks").

use std::collections::BTreeSet;

use virtio_queue::QueueT;

use super::tests::{AVAIL, INDIRECT, NEXT, Ring, TABLE, WRITE};
use super::*;

/// Descriptors of the ring in the first two checks.
const ENTRIES: u16 = 4;
/// Address of a descriptor table other than the ring's.
const OTHER: u64 = 0x5000;
/// Guest memory ends here.
const END: u64 = 0x1_0000;

/// A descriptor: address, length, flags, next.
type Entry = (u64, u32, u16, u16);

/// Memory ends after this table's first descriptor, so the table is never reached.
const ZEROES: &[Entry] = &[(0, 0, 0, 0), (0, 0, 0, 0)];

/// The chain by the standard: readable pieces and writable pieces. `None`: malformed. `other` is an indirect
/// table; such a table ends the chain, and must not contain another.
fn walk(table: &[Entry], head: u16, other: Option<&[Entry]>) -> Option<[Vec<(u64, u32)>; 2]> {
    let mut pieces = [Vec::new(), Vec::new()];
    let (mut at, mut seen) = (head, BTreeSet::new());
    loop {
        let (addr, len, flags, next) = *table.get(usize::from(at))?;
        if !seen.insert(at) {
            return None;
        }
        if flags & INDIRECT != 0 {
            let other = if (addr, len) == (END - 16, 32) { ZEROES } else { other? };
            if !len.is_multiple_of(16) || addr != OTHER && addr != END - 16 {
                return None;
            }
            let inner = walk(other.get(..len as usize / 16)?, 0, None)?;
            for (pieces, inner) in pieces.iter_mut().zip(inner) {
                pieces.extend(inner);
            }
            return Some(pieces);
        }
        pieces[usize::from(flags & WRITE != 0)].push((addr, len));
        if flags & NEXT == 0 {
            return Some(pieces);
        }
        at = next;
    }
}

fn write_table(ring: &Ring, at: u64, table: &[Entry]) {
    for (n, (addr, len, flags, next)) in table.iter().enumerate() {
        ring.descriptor(at + 16 * n as u64, *addr, *len, *flags, *next);
    }
}

/// Takes the chain with head `head`, from a queue with no chain taken before.
fn take(ring: &mut Ring, head: u16) -> Result<Chain, ChainError> {
    ring.offer(head);
    ring.queue.set_next_avail(0);
    ring.pop()
}

#[track_caller]
fn compare(ring: &mut Ring, head: u16, expected: Option<[Vec<(u64, u32)>; 2]>, what: &[&[Entry]]) {
    let taken = take(ring, head);
    let Some([readable, writable]) = expected else {
        let malformed = matches!(taken, Err(ChainError::Malformed { .. }));
        assert!(malformed, "{taken:?} of {what:x?} from {head}");
        return;
    };
    let chain = taken.unwrap_or_else(|error| panic!("{error} of {what:x?} from {head}"));
    let plain = |pieces: &[DescriptorBuffer]| -> Vec<(u64, u32)> {
        pieces.iter().map(|piece| (piece.addr.0, piece.len)).collect()
    };
    assert_eq!(plain(&chain.readable), readable, "{what:x?} from {head}");
    assert_eq!(plain(&chain.writable), writable, "{what:x?} from {head}");
    let sum = |pieces: &[(u64, u32)]| pieces.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
    assert_eq!((chain.readable_len(), chain.writable_len()), (sum(&readable), sum(&writable)));
}

/// Calls `each` with every list of `N` elements of `of`.
fn all<T: Copy, const N: usize>(of: &[T], mut each: impl FnMut([T; N])) {
    let mut digits = [0; N];
    loop {
        each(digits.map(|digit| of[digit]));
        let Some(at) = digits.iter().position(|digit| digit + 1 < of.len()) else { return };
        digits[at] += 1;
        digits[..at].fill(0);
    }
}

#[test]
fn every_direct_table_of_four_is_walked_as_the_standard_says() {
    let mut entries: Vec<Entry> = Vec::new();
    for flags in [0, NEXT, WRITE, NEXT | WRITE] {
        // Without NEXT the index has no meaning: one index out of range is enough.
        let nexts = if flags & NEXT == 0 { ENTRIES..=ENTRIES } else { 0..=ENTRIES };
        entries.extend(nexts.map(|next| (0x4000, 4, flags, next)));
    }
    let mut ring = Ring::with_size(ENTRIES);
    let mut count = 0u64;
    all::<_, { ENTRIES as usize }>(&entries, |table| {
        write_table(&ring, TABLE, &table);
        for head in 0..=ENTRIES {
            compare(&mut ring, head, walk(&table, head, None), &[&table]);
            count += 1;
        }
    });
    println!("{count} walks");
}

#[test]
fn every_indirect_table_of_two_is_walked_as_the_standard_says() {
    let flags: Vec<u16> = (0..8).collect();
    // Tables: right, short, long, empty, odd, at the end of memory, at the end of the address space.
    let places = [
        (OTHER, 32),
        (OTHER, 16),
        (OTHER, 48),
        (OTHER, 0),
        (OTHER, 33),
        (END - 16, 32),
        (u64::MAX - 15, 32),
    ];
    let mut first: Vec<Entry> = Vec::new();
    for flags in &flags {
        for (addr, len) in places {
            let nexts = if flags & NEXT == 0 { 2..3 } else { 0..3 };
            first.extend(nexts.map(|next| (addr, len, *flags, next)));
        }
    }
    let second: Vec<Entry> = flags.iter().map(|flags| (OTHER, 32, *flags, 2)).collect();
    let mut inner: Vec<Entry> = Vec::new();
    for flags in &flags {
        let nexts = if flags & NEXT == 0 { 3..4 } else { 0..4 };
        inner.extend(nexts.map(|next| (0x4000, 4, *flags, next)));
    }
    let mut ring = Ring::with_size(2);
    let mut count = 0u64;
    // A descriptor behind the table, to detect a read past its end.
    let third = (0x4000, 4, 0, 0);
    all::<_, 2>(&inner, |[a, b]| {
        let other = [a, b, third];
        write_table(&ring, OTHER, &other);
        for first in &first {
            for second in &second {
                let table = [*first, *second];
                write_table(&ring, TABLE, &table);
                let expected = walk(&table, 0, Some(&other));
                compare(&mut ring, 0, expected, &[&table, &other]);
                count += 1;
            }
        }
    });
    println!("{count} walks");
}

/// Addresses and lengths at borders of memory, regions or integers.
fn borders() -> Vec<(u64, u32)> {
    let addresses =
        [0, 1, 0x7fff, 0x8000, END - 4, END - 1, END, u64::MAX - 3, u64::MAX, 1 << 32, 1 << 63];
    let lengths = [0, 1, 4, 0x7fff, 0x8000, 0x8001, 0x1_0000, 0x1_0001, u32::MAX];
    addresses.into_iter().flat_map(|addr| lengths.map(|len| (addr, len))).collect()
}

/// Whether the whole range is guest memory; an empty range always is.
fn reachable((addr, len): (u64, u32)) -> bool {
    len == 0 || addr.checked_add(len.into()).is_some_and(|end| end <= END)
}

#[test]
fn every_pair_of_buffers_at_a_border_is_read_and_written_within_memory_or_refused() {
    let mut ring = Ring::with_size(2);
    let (readable_bytes, mut buffer) = (vec![7; 0x1_0002], vec![0; 0x1_0002]);
    let mut count = 0u64;
    all::<_, 2>(&borders(), |pair| {
        for write in [0, WRITE] {
            let [a, b] = pair;
            write_table(&ring, TABLE, &[(a.0, a.1, NEXT | write, 1), (b.0, b.1, write, 0)]);
            let chain = match take(&mut ring, 0) {
                Ok(chain) => chain,
                // Longer than 4 GiB.
                Err(ChainError::Malformed { .. }) => {
                    assert!(u64::from(a.1) + u64::from(b.1) > u32::MAX.into());
                    continue;
                }
                Err(error) => panic!("{error} of {pair:x?}"),
            };
            let sum = a.1 as usize + b.1 as usize;
            count += 1;
            if write == 0 {
                let all = reachable(a) && reachable(b);
                assert_eq!(chain.reader(&ring.memory).rest_is_reachable(), all, "{pair:x?}");
                for want in [0, 1, 4, 5, 0x8000] {
                    let read = chain.reader(&ring.memory).read(&mut buffer[..want]);
                    let first = (a.0, a.1.min(want as u32));
                    let second = (b.0, b.1.min(want as u32 - first.1));
                    match read {
                        Ok(n) => {
                            assert_eq!(n, want.min(sum), "{pair:x?}");
                            assert!(reachable(first) && reachable(second), "{pair:x?}");
                        }
                        Err(_) => assert!(!reachable(first) || !reachable(second), "{pair:x?}"),
                    }
                }
                continue;
            }
            for len in [0, 1, 4, 5, 0x8000, 0x1_0002] {
                let first = (a.0, a.1.min(len as u32));
                let second = (b.0, b.1.min(len as u32 - first.1));
                let can = len <= sum && reachable(first) && reachable(second);
                assert_eq!(chain.can_write(&ring.memory, len), can, "{len} of {pair:x?}");
            }
            // Not over the ring itself, rewritten by the next round.
            for len in [0, 4] {
                let written = chain.write(&ring.memory, &readable_bytes[..len]);
                let can = chain.can_write(&ring.memory, len.min(sum));
                assert_eq!(written.ok(), can.then_some(len.min(sum) as u32), "{pair:x?}");
            }
        }
    });
    println!("{count} chains; the avail ring is at {AVAIL:#x}");
}
