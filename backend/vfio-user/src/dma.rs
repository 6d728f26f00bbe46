// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's mapped memory for the device, and the back end's part of it.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use rustix::io::Errno;
use thiserror::Error;

use crate::wire::Fields;

/// Most mappings of a client at a time. QEMU needs some twenty.
pub(crate) const MAX_MAPS: usize = 1024;
/// Most files of a client's mappings, since each is a descriptor of this process.
const MAX_FILES: usize = 16;
/// Most regions for the back end: the number of descriptors in one vhost-user message.
pub(crate) const MAX_REGIONS: usize = 32;
/// Addresses and lengths are multiples of this, bytes.
pub(crate) const PAGE: u64 = 4096;
/// `f_type` of huge pages, from `linux/magic.h`.
const HUGETLBFS: u64 = 0x9584_58f6;

/// A number of statfs(2), whose type the machine decides.
fn unsigned(value: impl TryInto<u64>) -> u64 {
    value.try_into().unwrap_or(0)
}

/// Flags of DMA_MAP.
const READ: u32 = 1;
const WRITE: u32 = 2;
/// Flag of DMA_UNMAP: all mappings.
const ALL: u32 = 2;

/// Why a mapping is refused. Addresses are the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DmaError {
    /// Unknown or unsupported flags.
    #[error("DMA flags {0:#x}")]
    Flags(u32),
    /// Not whole pages, empty, or beyond the end of the address space.
    #[error("DMA of {size:#x} bytes at {address:#x}, which are no pages of {PAGE} bytes")]
    Range {
        /// Address of the range.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// A part of the range is mapped already.
    #[error("DMA of {size:#x} bytes at {address:#x}, a part of which is mapped already")]
    Overlap {
        /// Address of the range.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// The offset in the file is not aligned, or too large.
    #[error("DMA at {address:#x} from offset {offset:#x} of a file")]
    Offset {
        /// Address of the mapping.
        address: u64,
        /// Offset in the file, bytes.
        offset: u64,
    },
    /// The limit of mappings is reached.
    #[error("more than {MAX_MAPS} DMA mappings")]
    TooMany,
    /// The limit of files is reached.
    #[error("DMA mappings of more than {MAX_FILES} files")]
    TooManyFiles,
    /// The passed descriptor cannot be mapped.
    #[error("DMA at {address:#x} in a descriptor that is no file: {errno}")]
    NoFile {
        /// Address of the mapping.
        address: u64,
        /// The system's error.
        errno: Errno,
    },
    /// The range cuts through a mapping, or has gaps.
    #[error("no DMA mappings fill {size:#x} bytes at {address:#x}")]
    NotMapped {
        /// Address of the range.
        address: u64,
        /// Bytes.
        size: u64,
    },
}

/// A file, identified by device and inode, with the size of its pages.
#[derive(Debug)]
struct File {
    fd: OwnedFd,
    identity: (u64, u64),
    page: u64,
}

#[derive(Debug)]
struct Map {
    start: u64,
    size: u64,
    /// `None`: memory without a shareable file, such as a display's.
    file: Option<(Rc<File>, u64)>,
    is_writable: bool,
}

/// A part of the client's memory, for the back end.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion<'a> {
    /// Address for the device, equal to the guest's.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// The file.
    pub file: rustix::fd::BorrowedFd<'a>,
    /// Offset in the file, bytes.
    pub offset: u64,
}

/// The mappings of a client, by address.
#[derive(Debug, Default)]
pub(crate) struct DmaTable {
    maps: Vec<Map>,
}

impl DmaTable {
    /// Adds the mapping of a DMA_MAP. Returns whether the back end's table changes.
    pub(crate) fn map(
        &mut self,
        fields: &Fields<'_>,
        fd: Option<OwnedFd>,
    ) -> Result<bool, DmaError> {
        let (flags, offset) = (fields.u32(4), fields.u64(8));
        let (start, size) = (fields.u64(16), fields.u64(24));
        if flags & !(READ | WRITE) != 0 || flags == 0 {
            return Err(DmaError::Flags(flags));
        }
        let end = end_of(start, size)?;
        if self.maps.len() >= MAX_MAPS {
            return Err(DmaError::TooMany);
        }
        let at = self.maps.partition_point(|map| map.start < start);
        let before = at.checked_sub(1).and_then(|before| self.maps.get(before));
        let meets_before = before.is_some_and(|map| map.end() > start);
        if meets_before || self.maps.get(at).is_some_and(|map| map.start < end) {
            return Err(DmaError::Overlap { address: start, size });
        }
        let file = fd.map(|fd| self.file(fd, start, offset, size)).transpose()?;
        let is_writable = flags & WRITE != 0;
        let is_shown = file.is_some() && is_writable;
        self.maps.insert(at, Map { start, size, file, is_writable });
        Ok(is_shown)
    }

    /// Removes the mappings of a DMA_UNMAP. Returns whether the back end's table changes.
    pub(crate) fn unmap(&mut self, fields: &Fields<'_>) -> Result<bool, DmaError> {
        let (flags, start, size) = (fields.u32(4), fields.u64(8), fields.u64(16));
        if flags & !ALL != 0 {
            return Err(DmaError::Flags(flags));
        }
        if flags & ALL != 0 {
            let is_shown = self.maps.iter().any(Map::is_shown);
            self.maps.clear();
            return Ok(is_shown);
        }
        let end = end_of(start, size)?;
        let first = self.maps.partition_point(|map| map.end() <= start);
        let last = self.maps.partition_point(|map| map.start < end);
        let found = self.maps.get(first..last).unwrap_or_default();
        let is_inside = |map: &Map| map.start >= start && map.end() <= end;
        if found.is_empty() || !found.iter().all(is_inside) {
            return Err(DmaError::NotMapped { address: start, size });
        }
        let is_shown = found.iter().any(Map::is_shown);
        self.maps.drain(first..last);
        Ok(is_shown)
    }

    /// The file of a new mapping: one descriptor for all mappings of a file.
    fn file(
        &self,
        fd: OwnedFd,
        start: u64,
        offset: u64,
        size: u64,
    ) -> Result<(Rc<File>, u64), DmaError> {
        if !offset.is_multiple_of(PAGE) || offset.checked_add(size).is_none() {
            return Err(DmaError::Offset { address: start, offset });
        }
        let no_file = |errno| DmaError::NoFile { address: start, errno };
        let stat = rustix::fs::fstat(&fd).map_err(no_file)?;
        let identity = (stat.st_dev, stat.st_ino);
        let mut files: Vec<&Rc<File>> = Vec::new();
        for (file, _) in self.maps.iter().filter_map(|map| map.file.as_ref()) {
            if file.identity == identity {
                return Ok((Rc::clone(file), offset));
            }
            if !files.iter().any(|known| Rc::ptr_eq(known, file)) {
                files.push(file);
            }
        }
        if files.len() >= MAX_FILES {
            return Err(DmaError::TooManyFiles);
        }
        let kind = rustix::fs::fstatfs(&fd).map_err(no_file)?;
        let is_huge = unsigned(kind.f_type) == HUGETLBFS;
        let block = unsigned(kind.f_bsize);
        let page = if is_huge && block.is_power_of_two() { block } else { PAGE };
        Ok((Rc::new(File { fd, identity, page }), offset))
    }

    /// The regions for the back end: writable memory with a file, with neighbours in one file as one region.
    /// A region of huge pages has whole pages, as required by vhost-user back ends, unless another mapping in
    /// one of these pages differs. Beyond [`MAX_REGIONS`], only the largest regions stay.
    pub(crate) fn regions(&self) -> Vec<MemoryRegion<'_>> {
        let mut regions: Vec<MemoryRegion<'_>> = Vec::new();
        let mut last_file: Option<&Rc<File>> = None;
        for Part { start, end, offset, file, .. } in self.parts() {
            if let Some(last) = regions.last_mut()
                && last_file.is_some_and(|last| Rc::ptr_eq(last, file))
                && let Some(distance) = start.checked_sub(last.address)
                && distance <= last.size
                && last.offset.checked_add(distance) == Some(offset)
            {
                last.size = last.size.max(end.saturating_sub(last.address));
                continue;
            }
            let size = end.saturating_sub(start);
            regions.push(MemoryRegion { address: start, size, file: file.fd.as_fd(), offset });
            last_file = Some(file);
        }
        if regions.len() > MAX_REGIONS {
            regions.sort_by_key(|region| std::cmp::Reverse(region.size));
            regions.truncate(MAX_REGIONS);
            regions.sort_by_key(|region| region.address);
        }
        regions
    }

    /// The mappings for the back end, by address and with whole pages. Two parts overlapping with different
    /// bytes keep their own ranges: mappings themselves never overlap.
    fn parts(&self) -> Vec<Part<'_>> {
        let shown = self.maps.iter().filter(|map| map.is_shown());
        let mut parts: Vec<_> = shown.filter_map(Map::whole_pages).collect();
        loop {
            parts.sort_by_key(|part| part.start);
            let (mut is_changed, mut furthest) = (false, 0);
            for at in 1..parts.len() {
                let (before, after) = parts.split_at_mut(at);
                let (Some(a), Some(b)) = (before.get_mut(furthest), after.first_mut()) else {
                    continue;
                };
                if b.start < a.end && !a.is_alike(b) {
                    is_changed |= a.keep_range() | b.keep_range();
                }
                if b.end >= a.end {
                    furthest = at;
                }
            }
            if !is_changed {
                return parts;
            }
        }
    }
}

/// A mapping with the whole pages of its file, or with its own range.
struct Part<'a> {
    start: u64,
    end: u64,
    offset: u64,
    file: &'a Rc<File>,
    map: &'a Map,
}

impl Part<'_> {
    /// Whether a later part has the same bytes at the same addresses.
    fn is_alike(&self, later: &Part<'_>) -> bool {
        let distance = later.start.checked_sub(self.start);
        Rc::ptr_eq(self.file, later.file)
            && distance.and_then(|distance| self.offset.checked_add(distance)) == Some(later.offset)
    }

    /// Returns to the range of the mapping. `true`: the part was larger.
    fn keep_range(&mut self) -> bool {
        let before = self.start..self.end;
        let offset = self.map.file.as_ref().map_or(self.offset, |(_, offset)| *offset);
        (self.start, self.end, self.offset) = (self.map.start, self.map.end(), offset);
        before != (self.start..self.end)
    }
}

impl Map {
    /// Whether the mapping goes to the back end.
    fn is_shown(&self) -> bool {
        self.file.is_some() && self.is_writable
    }

    /// End of the mapping, checked by [`end_of`].
    fn end(&self) -> u64 {
        self.start.saturating_add(self.size)
    }

    /// The mapping's range in whole pages of its file. Without equal alignment of addresses and offsets there
    /// are no such pages, and the mapping keeps its range.
    fn whole_pages(&self) -> Option<Part<'_>> {
        let (file, offset) = self.file.as_ref()?;
        let range = (self.start, self.end(), *offset);
        let before = self.start % file.page;
        let whole = || {
            let offset = offset.checked_sub(before)?;
            Some((self.start - before, self.end().checked_next_multiple_of(file.page)?, offset))
        };
        let is_alike = before == offset % file.page;
        let (start, end, offset) = whole().filter(|_| is_alike).unwrap_or(range);
        Some(Part { start, end, offset, file, map: self })
    }
}

fn end_of(address: u64, size: u64) -> Result<u64, DmaError> {
    let end = address.checked_add(size);
    let is_whole = address.is_multiple_of(PAGE) && size.is_multiple_of(PAGE) && size != 0;
    end.filter(|_| is_whole).ok_or(DmaError::Range { address, size })
}

#[cfg(test)]
#[path = "dma_tests.rs"]
mod tests;
