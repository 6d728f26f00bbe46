// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory with known bus addresses, for a PCI device without an IOMMU.
//!
//! Bus addresses are physical addresses of the (virtual) machine. Huge pages are contiguous there and keep
//! their addresses. If none are reserved, this module locks ordinary pages and uses the contiguous ones,
//! merged into huge pages by the kernel. The kernel may move such pages to compact memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::mm::{Advice, madvise, mlock};
use thiserror::Error;

use super::{SharedMem, SharedSlice};

/// Reason for the lack of memory for the device.
#[derive(Debug, Error)]
pub enum DmaError {
    /// A call of the kernel failed.
    #[error("{what}: {source}")]
    System {
        /// The call.
        what: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// Physical addresses read as zero.
    #[error("physical addresses are hidden from this process: it needs CAP_SYS_ADMIN")]
    Hidden,
    /// A page is not in memory although it should be pinned there.
    #[error("the page at byte {offset} is not in memory")]
    Absent {
        /// Offset of the page, bytes.
        offset: usize,
    },
    /// There is less memory than the driver needs.
    #[error(
        "only {got} bytes of contiguous memory instead of {least} (no free huge pages of 2 MiB; \
         \"smc devices --bind\" reserves some)"
    )]
    TooLittle {
        /// Bytes from the kernel.
        got: usize,
        /// Bytes needed.
        least: usize,
    },
}

/// Pinned, zeroed memory in pieces of 2 MiB, each contiguous on the bus.
#[derive(Debug)]
pub struct DmaMemory {
    slice: SharedSlice,
    pieces: Vec<u64>,
    huge: bool,
}

/// Bytes of a piece.
const PIECE: usize = 2 << 20;
/// Bit of a pagemap entry: the page is in memory.
const PRESENT: u64 = 1 << 63;
/// Bits of a pagemap entry: the page's number.
const PFN: u64 = (1 << 55) - 1;

impl DmaMemory {
    /// Up to `wanted` bytes, but `least` at least: from free huge pages, else from locked pages. Both are
    /// rounded up to 2 MiB.
    ///
    /// # Errors
    /// See [`DmaError`].
    pub fn allocate(wanted: usize, least: usize) -> Result<DmaMemory, DmaError> {
        let least = pieces_of(least);
        let wanted = pieces_of(wanted).max(least);
        let mut n = wanted.min(free_huge_pages().unwrap_or(wanted));
        // Another process may have taken some of the pages meanwhile, so try less, too.
        while n >= least {
            match SharedMem::huge(n * PIECE) {
                Ok(mem) => return Self::from_huge(&mem),
                Err(error) => tracing::debug!(%error, pages = n, "no huge pages"),
            }
            n /= 2;
        }
        Self::from_locked(wanted, least)
    }

    fn from_huge(mem: &Arc<SharedMem>) -> Result<DmaMemory, DmaError> {
        advise(mem, 0, mem.len(), Advice::LinuxPopulateWrite, "populating huge pages")?;
        let pagemap = pagemap()?;
        let pieces = (0..mem.len() / PIECE)
            .map(|n| physical(&pagemap, address(mem), n * PIECE))
            .collect::<Result<_, _>>()?;
        Ok(DmaMemory { slice: part(mem, 0, mem.len())?, pieces, huge: true })
    }

    fn from_locked(wanted: usize, least: usize) -> Result<DmaMemory, DmaError> {
        let mem = SharedMem::anonymous((wanted + 1) * PIECE).map_err(system("mmap"))?;
        let skip = address(&mem).next_multiple_of(PIECE) - address(&mem);
        // A page shared by a child would be copied, and moved, by the next store.
        advise(&mem, 0, mem.len(), Advice::LinuxDontFork, "madvise")?;
        // Not every kernel has transparent huge pages. Without them, no piece is contiguous below.
        let _ = advise(&mem, 0, mem.len(), Advice::LinuxHugepage, "madvise");
        advise(&mem, skip, wanted * PIECE, Advice::LinuxPopulateWrite, "populating memory")?;
        lock_in_memory(&mem, skip, wanted * PIECE)?;
        let pagemap = pagemap()?;
        let pieces: Vec<Option<u64>> = (0..wanted)
            .map(|n| contiguous(&pagemap, address(&mem), skip + n * PIECE))
            .collect::<Result<_, _>>()?;
        let (start, found) = longest_run(&pieces);
        if found.len() < least {
            return Err(DmaError::TooLittle { got: found.len() * PIECE, least: least * PIECE });
        }
        let slice = part(&mem, skip + start * PIECE, found.len() * PIECE)?;
        Ok(DmaMemory { slice, pieces: found, huge: false })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Always `false`: there is one piece at least.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// Whether the memory consists of huge pages, never moved by the kernel.
    pub fn is_huge(&self) -> bool {
        self.huge
    }

    /// The memory, and the bus address of each piece of 2 MiB.
    pub fn into_parts(self) -> (SharedSlice, Vec<u64>) {
        (self.slice, self.pieces)
    }

    /// Memory with these pretended bus addresses, for tests.
    ///
    /// # Panics
    /// There is no memory.
    #[cfg(any(test, feature = "testing"))]
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
    pub fn pretend(pieces: Vec<u64>) -> DmaMemory {
        let mem = SharedMem::anonymous((pieces.len() + 1) * PIECE).unwrap();
        let skip = address(&mem).next_multiple_of(PIECE) - address(&mem);
        let slice = mem.slice(skip, pieces.len() * PIECE).unwrap();
        DmaMemory { slice, pieces, huge: false }
    }
}

fn pieces_of(bytes: usize) -> usize {
    bytes.div_ceil(PIECE).max(1)
}

fn address(mem: &SharedMem) -> usize {
    mem.start().as_ptr().addr()
}

fn part(mem: &Arc<SharedMem>, offset: usize, len: usize) -> Result<SharedSlice, DmaError> {
    let slice = mem.slice(offset, len);
    slice.map_err(|_| DmaError::TooLittle { got: mem.len(), least: offset + len })
}

fn system(what: &'static str) -> impl Fn(io::Error) -> DmaError {
    move |source| DmaError::System { what, source }
}

fn advise(
    mem: &SharedMem,
    offset: usize,
    len: usize,
    advice: Advice,
    what: &'static str,
) -> Result<(), DmaError> {
    let len = len.min(mem.len().saturating_sub(offset));
    // SAFETY: the range lies in a mapping of this module, still without views. None of these advices
    // changes the mapping's content.
    unsafe { madvise(mem.start().as_ptr().add(offset.min(mem.len())).cast(), len, advice) }
        .map_err(|error| system(what)(error.into()))
}

fn lock_in_memory(mem: &SharedMem, offset: usize, len: usize) -> Result<(), DmaError> {
    let len = len.min(mem.len().saturating_sub(offset));
    // SAFETY: the range lies in a mapping of this module; locking does not change the content.
    unsafe { mlock(mem.start().as_ptr().add(offset.min(mem.len())).cast(), len) }
        .map_err(|error| system("mlock")(error.into()))
}

fn pagemap() -> Result<File, DmaError> {
    let _making = crate::making();
    File::open("/proc/self/pagemap").map_err(system("/proc/self/pagemap"))
}

/// Physical address of the page at `base + offset`.
fn physical(pagemap: &File, base: usize, offset: usize) -> Result<u64, DmaError> {
    let page = crate::page_size();
    let mut entry = [0; 8];
    let at = ((base + offset) / page * size_of_val(&entry)) as u64;
    pagemap.read_exact_at(&mut entry, at).map_err(system("/proc/self/pagemap"))?;
    read_entry(u64::from_ne_bytes(entry), page as u64, offset)
}

fn read_entry(entry: u64, page: u64, offset: usize) -> Result<u64, DmaError> {
    if entry & PRESENT == 0 {
        return Err(DmaError::Absent { offset });
    }
    match entry & PFN {
        0 => Err(DmaError::Hidden),
        pfn => Ok(pfn * page),
    }
}

/// Physical address of the 2 MiB at `base + offset`, if they are in one piece.
fn contiguous(pagemap: &File, base: usize, offset: usize) -> Result<Option<u64>, DmaError> {
    let page = crate::page_size();
    let start = physical(pagemap, base, offset)?;
    for at in (page..PIECE).step_by(page) {
        if physical(pagemap, base, offset + at)? != start + at as u64 {
            return Ok(None);
        }
    }
    Ok(Some(start))
}

/// The longest run of contiguous pieces: the index of the first, and all addresses.
fn longest_run(pieces: &[Option<u64>]) -> (usize, Vec<u64>) {
    let mut best = (0, Vec::new());
    let mut run = Vec::new();
    for (i, piece) in pieces.iter().enumerate() {
        match piece {
            Some(start) => run.push(*start),
            None => run.clear(),
        }
        if run.len() > best.1.len() {
            best = (i + 1 - run.len(), run.clone());
        }
    }
    best
}

/// Number of huge pages of 2 MiB neither used nor reserved.
fn free_huge_pages() -> Option<usize> {
    let read = |name: &str| -> Option<usize> {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}_hugepages");
        let _making = crate::making();
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    Some(read("free")?.saturating_sub(read("resv").unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_and_absent_pages_are_refused() {
        assert!(matches!(read_entry(PRESENT, 4096, 0), Err(DmaError::Hidden)));
        assert!(matches!(read_entry(0x1234, 4096, 8), Err(DmaError::Absent { offset: 8 })));
        for (page, address) in [(4096, 0x123_4000), (16 << 10, 0x48d_0000), (64 << 10, 0x1234_0000)]
        {
            assert_eq!(read_entry(PRESENT | 1 << 61 | 0x1234, page, 0).unwrap(), address);
        }
    }

    #[test]
    fn the_longest_run_of_contiguous_pieces_is_used() {
        let pieces = [Some(1), None, Some(2), Some(3), None, Some(4), Some(5)];
        assert_eq!(longest_run(&pieces), (2, vec![2, 3]));
        assert_eq!(longest_run(&[None, None]), (0, vec![]));
        assert_eq!(longest_run(&[Some(7), Some(8)]), (0, vec![7, 8]));
    }
}
