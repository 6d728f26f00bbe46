// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The check of guest memory before the daemon maps the memory.
//!
//! The daemon maps the memory of every guest. Three dangers could stop the daemon for all guests:
//!
//! - A page taken away by its owner raises SIGBUS. [`BusErrorGuard`](ism_device::shm::BusErrorGuard) contains
//!   the error in the owner's connection, so memory may shrink and have holes.
//! - Access to a page provided by another process (FUSE, a network) can wait for ever. Hence only files with
//!   pages from the kernel itself: memfds, tmpfs, huge pages.
//! - Regions without end would use up the daemon's address space. Hence a limit on their sum.

use std::os::fd::AsFd;

use thiserror::Error;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// `f_type` of memfds and tmpfs, from `linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;
/// `f_type` of huge pages, including memfds on huge pages.
const HUGETLBFS: u64 = 0x9584_58f6;

/// A number of statfs(2), whose type the machine decides.
fn unsigned(value: impl TryInto<u64>) -> u64 {
    value.try_into().unwrap_or(0)
}

/// Why a memory table is refused. Addresses are guest-physical.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum MemoryError {
    /// A region without a file.
    #[error("the region at {0:#x} has no file")]
    NoFile(u64),
    /// The pages may come from a process other than the kernel.
    #[error(
        "the region at {start:#x} is on a file system of type {kind:#x}, whose pages may not come; \
         give the guest memory in a memfd, in tmpfs or in huge pages, or set allow-any-file"
    )]
    Kind {
        /// Start of the region.
        start: u64,
        /// `f_type` of fstatfs(2).
        kind: u64,
    },
    /// The file is shorter than the region.
    #[error("the file of the region at {0:#x} ends before the region does")]
    TooShort(u64),
    /// The region does not consist of whole pages of its file.
    #[error("the region at {start:#x} has {len} bytes, which are not whole pages of {page} bytes")]
    PartOfPage {
        /// Start of the region.
        start: u64,
        /// Length of the region, bytes.
        len: u64,
        /// Page size, bytes.
        page: u64,
    },
    /// The region was mapped before this table: the front end gives memory region by region (ADD_MEM_REG),
    /// using a feature the daemon did not offer.
    #[error("the region at {0:#x} was there before, and memory by regions is not offered")]
    ByRegions(u64),
    /// The regions are too large together.
    #[error("{sum} bytes of guest memory are more than max-guest-memory, {max} bytes")]
    TooLarge {
        /// Sum of all regions, bytes.
        sum: u64,
        /// The limit, bytes.
        max: u64,
    },
}

/// Checks every region of a table. `max` bounds the sum of their lengths, bytes. With `any_file` every kind
/// of file is accepted.
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
            .map_or((0, 0), |stat| (unsigned(stat.f_type), unsigned(stat.f_bsize)));
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

/// Checks whether every mapping of a table is new. State kept for a table's mappings ends with the table, so
/// no two tables may share a mapping. The framework does make such tables.
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
        // Beside the executable, on some file system; on tmpfs, the test shows nothing.
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
