// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::wire::put;

fn memfd() -> OwnedFd {
    memfd_create("test", MemfdFlags::CLOEXEC).unwrap()
}

fn map_of(
    table: &mut DmaTable,
    start: u64,
    size: u64,
    file: Option<(&OwnedFd, u64)>,
    flags: u32,
) -> Result<bool, DmaError> {
    let mut body = [0; 32];
    put(&mut body, 4, &flags.to_ne_bytes());
    put(&mut body, 8, &file.map_or(0, |(_, offset)| offset).to_ne_bytes());
    put(&mut body, 16, &start.to_ne_bytes());
    put(&mut body, 24, &size.to_ne_bytes());
    table.map(&Fields(&body), file.map(|(fd, _)| fd.try_clone().unwrap()))
}

fn unmap(table: &mut DmaTable, start: u64, size: u64, flags: u32) -> Result<bool, DmaError> {
    let mut body = [0; 24];
    put(&mut body, 4, &flags.to_ne_bytes());
    put(&mut body, 8, &start.to_ne_bytes());
    put(&mut body, 16, &size.to_ne_bytes());
    table.unmap(&Fields(&body))
}

fn shown(table: &DmaTable) -> Vec<(u64, u64, u64)> {
    table.regions().iter().map(|r| (r.address, r.size, r.offset)).collect()
}

const RW: u32 = READ | WRITE;

#[test]
fn neighbours_in_one_file_are_one_region() {
    let (file, other, mut table) = (memfd(), memfd(), DmaTable::default());
    for (start, size, fd, offset) in [
        (0x2000, 0x1000, &file, 0x2000),
        (0x0000, 0x1000, &file, 0x0000),
        (0x1000, 0x1000, &file, 0x1000),
        (0x3000, 0x1000, &other, 0x3000),
        (0x4000, 0x1000, &other, 0x8000),
    ] {
        assert_eq!(map_of(&mut table, start, size, Some((fd, offset)), RW), Ok(true));
    }
    let expected = [(0, 0x3000, 0), (0x3000, 0x1000, 0x3000), (0x4000, 0x1000, 0x8000)];
    assert_eq!(shown(&table), expected);
}

#[test]
fn memory_that_cannot_be_shared_or_written_is_no_region() {
    let (file, mut table) = (memfd(), DmaTable::default());
    assert_eq!(map_of(&mut table, 0, 0x1000, None, RW), Ok(false));
    assert_eq!(map_of(&mut table, 0x1000, 0x1000, Some((&file, 0)), READ), Ok(false));
    assert_eq!(shown(&table), []);
    assert_eq!(unmap(&mut table, 0, 0x2000, 0), Ok(false));
}

#[test]
fn what_overlaps_is_refused() {
    let (file, mut table) = (memfd(), DmaTable::default());
    map_of(&mut table, 0x4000, 0x4000, Some((&file, 0)), RW).unwrap();
    for (address, size) in
        [(0x4000, 0x1000), (0x3000, 0x2000), (0x7000, 0x1000), (0, 0x10000), (0x5000, 0x1000)]
    {
        let refused = Err(DmaError::Overlap { address, size });
        assert_eq!(map_of(&mut table, address, size, None, RW), refused);
    }
    map_of(&mut table, 0x8000, 0x1000, None, RW).unwrap();
    map_of(&mut table, 0x3000, 0x1000, None, RW).unwrap();
}

#[test]
fn ranges_offsets_and_flags_that_cannot_be_are_refused() {
    let (file, mut table) = (memfd(), DmaTable::default());
    for (address, size) in [(0, 0), (1, 0x1000), (0, 0x1001), (u64::MAX - 0xfff, 0x1000)] {
        let refused = Err(DmaError::Range { address, size });
        assert_eq!(map_of(&mut table, address, size, None, RW), refused);
    }
    for offset in [1, u64::MAX - 0xfff] {
        let refused = Err(DmaError::Offset { address: 0, offset });
        assert_eq!(map_of(&mut table, 0, 0x1000, Some((&file, offset)), RW), refused);
    }
    for flags in [0, 4, 0xffff_ffff] {
        let refused = Err(DmaError::Flags(flags));
        assert_eq!(map_of(&mut table, 0, 0x1000, None, flags), refused);
    }
    assert_eq!(unmap(&mut table, 0, 0x1000, 1), Err(DmaError::Flags(1)));
}

#[test]
fn only_whole_mappings_are_unmapped() {
    let (file, mut table) = (memfd(), DmaTable::default());
    for start in [0x1000, 0x2000, 0x4000] {
        map_of(&mut table, start, 0x1000, Some((&file, start)), RW).unwrap();
    }
    map_of(&mut table, 0x8000, 0x2000, None, RW).unwrap();
    for (address, size) in [(0, 0x1000), (0x3000, 0x1000), (0x8000, 0x1000), (0x7000, 0x2000)] {
        let refused = Err(DmaError::NotMapped { address, size });
        assert_eq!(unmap(&mut table, address, size, 0), refused);
    }
    assert_eq!(unmap(&mut table, 0x1000, 0x2000, 0), Ok(true));
    assert_eq!(shown(&table), [(0x4000, 0x1000, 0x4000)]);
    assert_eq!(unmap(&mut table, 0, 0, ALL), Ok(true));
    assert_eq!(unmap(&mut table, 0, 0, ALL), Ok(false));
}

#[test]
fn mappings_and_files_have_a_largest_number() {
    let mut table = DmaTable::default();
    for n in 0..MAX_FILES as u64 {
        map_of(&mut table, n << 12, 0x1000, Some((&memfd(), 0)), RW).unwrap();
    }
    let refused = map_of(&mut table, 1 << 30, 0x1000, Some((&memfd(), 0)), RW);
    assert_eq!(refused, Err(DmaError::TooManyFiles));
    for n in MAX_FILES..MAX_MAPS {
        map_of(&mut table, (n as u64) << 12, 0x1000, None, RW).unwrap();
    }
    assert_eq!(map_of(&mut table, 1 << 30, 0x1000, None, RW), Err(DmaError::TooMany));
}

#[test]
fn of_too_many_regions_the_largest_stay() {
    let (file, mut table) = (memfd(), DmaTable::default());
    for n in 0..=MAX_REGIONS as u64 {
        let size = if n == 3 { 0x1000 } else { 0x2000 };
        map_of(&mut table, n << 16, size, Some((&file, n << 20)), RW).unwrap();
    }
    let shown = shown(&table);
    assert_eq!(shown.len(), MAX_REGIONS);
    assert!(!shown.iter().any(|(address, ..)| *address == 3 << 16));
    assert!(shown.is_sorted());
}

/// A table of mappings of one file with pages of 2 MiB, like hugetlbfs.
fn huge(maps: &[(u64, u64, u64)]) -> DmaTable {
    const PAGE: u64 = 2 << 20;
    let file = Rc::new(File { fd: memfd(), identity: (0, 0), page: PAGE });
    let map = |&(start, size, offset)| Map {
        start,
        size,
        file: Some((Rc::clone(&file), offset)),
        is_writable: true,
    };
    DmaTable { maps: maps.iter().map(map).collect() }
}

#[test]
fn a_region_of_huge_pages_never_overlaps_another_one() {
    const HUGE: u64 = 2 << 20;
    // Alike: whole pages.
    let table = huge(&[(HUGE + 0x1000, 0x1000, 0x1000), (HUGE + 0x5000, 0x1000, 0x5000)]);
    assert_eq!(shown(&table), [(HUGE, HUGE, 0)]);
    // The first mapping has no whole pages, and the second one's page begins before the mapping.
    let table = huge(&[(0x1000, 0x1000, 0x5000), (0x3000, 0x1000, 0x3000)]);
    assert_eq!(shown(&table), [(0x1000, 0x1000, 0x5000), (0x3000, 0x1000, 0x3000)]);
    // A mapping with two others in its pages, and the end of the address space.
    let last = u64::MAX - 0x1fff;
    let maps =
        [(0x1000, 0x1000, 0x1000), (0x4000, 0x1000, 0), (0x6000, 0x1000, 0), (last, 0x1000, 0)];
    let table = huge(&maps);
    assert_eq!(shown(&table), maps);
}

/// Offsets and addresses of all relations, in and beside a page.
#[test]
fn regions_of_any_mappings_are_in_order_and_hold_them() {
    const HUGE: u64 = 2 << 20;
    let mut seed = 1u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    for _ in 0..2000 {
        let mut maps: Vec<(u64, u64, u64)> = Vec::new();
        let mut at = random(4) * 0x1000;
        for _ in 0..=random(6) {
            let size = (1 + random(3)) * 0x1000;
            let offset = [at, random(4) * 0x1000, at % HUGE, at + HUGE][random(4) as usize];
            maps.push((at, size, offset));
            at += size + [0, 0x1000, HUGE, HUGE - 0x1000][random(4) as usize];
        }
        let regions = shown(&huge(&maps));
        assert!(regions.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{maps:x?} {regions:x?}");
        for (start, size, offset) in maps {
            let holds = |&(at, len, from): &(u64, u64, u64)| {
                at <= start && start + size <= at + len && from + (start - at) == offset
            };
            assert!(regions.iter().any(holds), "{start:x} {regions:x?}");
        }
    }
}
