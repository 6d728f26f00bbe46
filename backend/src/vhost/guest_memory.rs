// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which guest memory the daemon is willing to map.
//!
//! The daemon maps the memory of every guest. Three things could then stop it for all guests:
//!
//! - A page that its owner has taken away raises SIGBUS. [`BusErrorGuard`](ism_device::shm::BusErrorGuard)
//!   makes that the owner's problem, so memory may shrink and have holes.
//! - A page that another process has to provide (FUSE, a network) can make an access wait for ever.
//!   Hence only files whose pages the kernel itself provides: memfds, tmpfs, huge pages.
//! - Regions without end use up the daemon's address space. Hence a limit on their sum.

use std::os::fd::AsFd;

use thiserror::Error;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// File systems in memory, by their number in `linux/magic.h`: memfds and tmpfs.
const TMPFS: u64 = 0x0102_1994;
/// Huge pages, memfds on them included.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Why a memory table is refused. Addresses are guest-physical.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum MemoryError {
    /// A region without a file.
    #[error("the region at {0:#x} has no file")]
    NoFile(u64),
    /// Somebody other than the kernel may have to provide its pages.
    #[error(
        "the region at {start:#x} is on a file system of type {kind:#x}, whose pages may not come; \
         give the guest memory in a memfd, in tmpfs or in huge pages, or set allow-any-file"
    )]
    Kind {
        /// The region.
        start: u64,
        /// `f_type` of fstatfs(2).
        kind: u64,
    },
    /// The file is shorter than the region.
    #[error("the file of the region at {0:#x} ends before the region does")]
    TooShort(u64),
    /// The region is not made of the whole pages of its file.
    #[error("the region at {start:#x} has {len} bytes, which are not whole pages of {page} bytes")]
    PartOfPage {
        /// The region.
        start: u64,
        /// Its length, bytes.
        len: u64,
        /// Bytes of a page.
        page: u64,
    },
    /// It was mapped before this table came: the front end gives memory region by region
    /// (ADD_MEM_REG), for which it has accepted a feature that was not offered.
    #[error("the region at {0:#x} was there before, and memory by regions is not offered")]
    ByRegions(u64),
    /// The regions are too large together.
    #[error("{sum} bytes of guest memory are more than max-guest-memory, {max} bytes")]
    TooLarge {
        /// All regions, bytes.
        sum: u64,
        /// The limit, bytes.
        max: u64,
    },
}

/// Checks every region of a table. `max` bounds the sum of their lengths, bytes. With `any_file` the
/// kind of a file does not matter.
pub(super) fn check(memory: &GuestMemoryMmap, max: u64, any_file: bool) -> Result<(), MemoryError> {
    let sum = memory.iter().fold(0u64, |sum, region| sum.saturating_add(region.len()));
    if sum > max {
        return Err(MemoryError::TooLarge { sum, max });
    }
    for region in memory.iter() {
        let (start, len) = (region.start_addr().raw_value(), region.len());
        let backing = region.file_offset().ok_or(MemoryError::NoFile(start))?;
        let file = backing.file().as_fd();
        let (kind, page) = rustix::fs::fstatfs(file)
            .map_or((0, 0), |stat| (stat.f_type.cast_unsigned(), stat.f_bsize.cast_unsigned()));
        if !any_file && ![TMPFS, HUGETLBFS].contains(&kind) {
            return Err(MemoryError::Kind { start, kind });
        }
        if kind == HUGETLBFS && !len.is_multiple_of(page) {
            return Err(MemoryError::PartOfPage { start, len, page });
        }
        let size =
            rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        let end = backing.start().checked_add(len);
        if end.is_none_or(|end| end > size) {
            return Err(MemoryError::TooShort(start));
        }
    }
    Ok(())
}

/// Checks that all of a table was mapped for it. What is kept for the mappings of a table ends with the
/// table, so no two tables may share a mapping. The framework makes tables that do.
pub(super) fn check_fresh(
    table: &GuestMemoryMmap,
    before: &GuestMemoryMmap,
) -> Result<(), MemoryError> {
    let is_old = |start: *mut u8| before.iter().any(|region| region.as_ptr() == start);
    match table.iter().find(|region| is_old(region.as_ptr())) {
        Some(region) => Err(MemoryError::ByRegions(region.start_addr().raw_value())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::fs::File;
    use vm_memory::{FileOffset, GuestAddress};

    const MAX: u64 = 1 << 40;

    fn table(file: File) -> GuestMemoryMmap {
        let ranges = [(GuestAddress(0x1000), 0x2000, Some(FileOffset::new(file, 0x1000)))];
        GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
    }

    fn memfd() -> File {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(0x3000).unwrap();
        file
    }

    #[test]
    fn accepts_memory_whose_pages_the_kernel_provides() {
        assert_eq!(check(&table(memfd()), MAX, false), Ok(()));
    }

    #[test]
    fn refuses_a_file_whose_pages_may_not_come() {
        // Beside the executable, which lies on some file system; if that is tmpfs, nothing is shown.
        let path = std::env::current_exe().unwrap().with_extension("guest-memory");
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(0x3000).unwrap();
        let table = table(file);
        match check(&table, MAX, false) {
            Err(MemoryError::Kind { start: 0x1000, kind }) => assert_ne!(kind, TMPFS),
            other => assert_eq!(other, Ok(())),
        }
        assert_eq!(check(&table, MAX, true), Ok(()));
    }

    #[test]
    fn refuses_a_file_that_ends_before_the_region() {
        let file = memfd();
        let table = table(file.try_clone().unwrap());
        file.set_len(0x2000).unwrap();
        assert_eq!(check(&table, MAX, false), Err(MemoryError::TooShort(0x1000)));
    }

    #[test]
    fn refuses_more_memory_than_the_limit() {
        let table = table(memfd());
        assert_eq!(check(&table, 0x2000, false), Ok(()));
        let refused = Err(MemoryError::TooLarge { sum: 0x2000, max: 0x1fff });
        assert_eq!(check(&table, 0x1fff, false), refused);
    }

    #[test]
    fn refuses_a_mapping_of_the_table_before() {
        let (file, before) = (memfd(), table(memfd()));
        let added = FileOffset::new(file, 0);
        let added = vm_memory::GuestRegionMmap::from_range(GuestAddress(0), 0x1000, Some(added));
        let both = before.insert_region(std::sync::Arc::new(added.unwrap())).unwrap();
        assert_eq!(check_fresh(&both, &before), Err(MemoryError::ByRegions(0x1000)));
        assert_eq!(check_fresh(&table(memfd()), &before), Ok(()));
    }

    #[test]
    fn refuses_memory_without_a_file() {
        let table = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        assert_eq!(check(&table, MAX, false), Err(MemoryError::NoFile(0)));
    }
}
