// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mappings: memory of a descriptor, and the window for a device's mappings of slabs.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use thiserror::Error;

use super::{ForkLocks, OutOfBounds, SharedSlice, check_sealed, is_free, lock};

/// Content of a mapping.
#[derive(Clone, Copy)]
enum MappingKind<'a> {
    /// Private zero pages.
    Memory,
    /// The same, without reserved memory for all pages.
    Zeros,
    /// A file, shared, from an offset on.
    File(BorrowedFd<'a>, u64),
}

/// Maps memory at an address of the kernel's choice.
fn map(len: usize, prot: ProtFlags, content: MappingKind<'_>) -> io::Result<*mut c_void> {
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    unsafe { map_with(null_mut(), len, prot, content, MapFlags::empty()) }
}

/// Variant of [`map`] at this address, in place of the old mapping.
///
/// # Safety
/// The caller owns the range, and no code relies on the old content.
unsafe fn map_at(
    at: *mut c_void,
    len: usize,
    prot: ProtFlags,
    content: MappingKind<'_>,
) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { map_with(at, len, prot, content, MapFlags::FIXED) }.map(drop)
}

/// # Safety
/// With FIXED the promise of [`map_at`].
unsafe fn map_with(
    at: *mut c_void,
    len: usize,
    prot: ProtFlags,
    content: MappingKind<'_>,
    flags: MapFlags,
) -> io::Result<*mut c_void> {
    let private = flags | MapFlags::PRIVATE;
    // SAFETY: the caller's promise.
    let mapped = unsafe {
        match content {
            MappingKind::Memory => mmap_anonymous(at, len, prot, private),
            MappingKind::Zeros => mmap_anonymous(at, len, prot, private | MapFlags::NORESERVE),
            MappingKind::File(fd, offset) => {
                mmap(at, len, prot, flags | MapFlags::SHARED, fd, offset)
            }
        }
    };
    Ok(mapped?)
}

/// Zero pages at an address of the kernel's choice. Most of the pages will never be used, so the kernel
/// need not reserve memory.
///
/// # Errors
/// The errors of mmap(2).
pub fn map_zeros(len: usize) -> io::Result<*mut c_void> {
    map(len, ProtFlags::READ | ProtFlags::WRITE, MappingKind::Zeros)
}

/// Zero pages at an address of the kernel's choice, with reserved memory.
///
/// # Errors
/// The errors of mmap(2).
pub fn map_memory(len: usize) -> io::Result<*mut c_void> {
    map(len, ProtFlags::READ | ProtFlags::WRITE, MappingKind::Memory)
}

/// A range of address space owned by this process. Unmapped when the last view of the range is gone.
pub struct SharedMem {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: `SharedMem` is an address range; `SharedSlice` controls access to the bytes.
unsafe impl Send for SharedMem {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedMem {}

impl SharedMem {
    /// Maps the first `len` bytes of `fd`, shared, readable and writable.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn from_fd(fd: impl AsFd, len: usize) -> io::Result<Arc<SharedMem>> {
        Self::from_fd_at(fd, 0, len)
    }

    /// Maps `len` bytes at `offset` of `fd`, shared, readable and writable. The file must keep the
    /// range as long as it is open, as the file of a device does.
    ///
    /// # Errors
    /// The errors of mmap(2) (the offset is no multiple of the page size).
    pub fn from_fd_at(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Arc<SharedMem>> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let start = map(len, prot, MappingKind::File(fd.as_fd(), offset))?;
        Self::own(start.cast(), len)
    }

    /// Zeroed memory in pages of 2 MiB, with constant physical addresses, also when this process forks.
    /// `len` is a multiple of 2 MiB.
    ///
    /// # Errors
    /// The errors of mmap(2) (too few huge pages are free).
    pub(super) fn huge(len: usize) -> io::Result<Arc<SharedMem>> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags)? };
        Self::own(start.cast(), len)
    }

    /// Replaces the mapping by private zero pages, to allow a close of the file while views still exist.
    /// Loads and stores of these views then do no harm.
    ///
    /// # Errors
    /// The errors of mmap(2); the mapping is unchanged then.
    pub fn revoke(&self) -> io::Result<()> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let at = self.start.as_ptr().cast();
        // SAFETY: the range is ours, and stays readable and writable for its views.
        unsafe { map_at(at, self.len, prot, MappingKind::Zeros) }
    }

    /// Private zeroed memory with the behaviour of shared memory.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn anonymous(len: usize) -> io::Result<Arc<SharedMem>> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let start = map(len, prot, MappingKind::Memory)?;
        Self::own(start.cast(), len)
    }

    fn own(start: *mut u8, len: usize) -> io::Result<Arc<SharedMem>> {
        let start = NonNull::new(start).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Arc::new(SharedMem { start, len }))
    }

    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// A view of a part.
    ///
    /// # Errors
    /// The part does not lie in the range.
    pub fn slice(self: &Arc<Self>, offset: usize, len: usize) -> Result<SharedSlice, OutOfBounds> {
        SharedSlice::new(self, offset, len)
    }
}

impl Drop for SharedMem {
    fn drop(&mut self) {
        // SAFETY: this module mapped the range, no other code unmaps the range, and every view holds an
        // `Arc` of `self`.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
            tracing::error!(%error, len = self.len, "unmap failed");
        }
    }
}

impl fmt::Debug for SharedMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMem").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Reason for a refused mapping into the window.
#[derive(Debug, Error)]
pub enum MapError {
    /// The range is empty, not a multiple of the granularity, or ends beyond the window.
    #[error(
        "{len} bytes at {offset:#x} do not fit a window of {size:#x} bytes in steps of {step:#x}"
    )]
    Range {
        /// Offset in the window, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
        /// Size of the window, bytes.
        size: u64,
        /// Granularity, bytes.
        step: u64,
    },
    /// The range overlaps a mapping.
    #[error("{len} bytes at {offset:#x} of the window overlap a mapping")]
    Overlap {
        /// Offset in the window, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
    },
    /// No mapping has exactly this range.
    #[error("no mapping of {len} bytes at {offset:#x} of the window")]
    NotMapped {
        /// Offset in the window, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
    },
    /// The mapping would not be writable.
    #[error("a mapping that is not writable is of no use")]
    ReadOnly,
    /// The file may shrink under the mapping, or is too short.
    #[error("the file offered is not sealed memory of at least {needed} bytes: {source}")]
    Unsealed {
        /// Bytes needed in the file.
        needed: u64,
        /// The reason.
        source: io::Error,
    },
    /// mmap failed.
    #[error("mmap: {0}")]
    Mmap(#[source] io::Error),
}

/// Smallest unit of a mapping into a window, bytes (no page size is larger).
const STEP: u64 = 64 << 10;

/// Address space for a window. Inaccessible until a device maps memory into the window.
///
/// Views ([`Reservation::slice`]) exist of mapped ranges only. Unmapping replaces a range by zero pages and
/// leaves no hole, so a late load or store of a view does no harm.
pub struct Reservation {
    mem: Arc<SharedMem>,
    // Live mappings, sorted by offset: (offset, length).
    mapped: Mutex<Vec<(u64, u64)>>,
}

impl ForkLocks for Reservation {
    fn is_unlocked(&self) -> bool {
        is_free(&self.mapped)
    }
}

impl Reservation {
    /// Reserves `size` bytes of address space; no memory is used.
    ///
    /// # Errors
    /// The errors of mmap(2), or the size is larger than the address space of this machine.
    pub fn new(size: u64) -> io::Result<Reservation> {
        let len = usize::try_from(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let start = map(len, ProtFlags::empty(), MappingKind::Zeros)?;
        let mem = SharedMem::own(start.cast(), len)?;
        Ok(Reservation { mem, mapped: Mutex::new(Vec::new()) })
    }

    /// Size of the window, bytes.
    pub fn size(&self) -> u64 {
        self.mem.len() as u64
    }

    /// Maps `len` bytes from `fd_offset` of `fd` at `offset` of the window, shared and writable.
    ///
    /// # Errors
    /// See [`MapError`]; the window is unchanged then.
    pub fn map(
        &self,
        offset: u64,
        len: u64,
        fd: BorrowedFd<'_>,
        fd_offset: u64,
    ) -> Result<(), MapError> {
        self.map_checked(offset, len, fd, fd_offset, |needed| check_sealed(fd, needed))
    }

    fn map_checked(
        &self,
        offset: u64,
        len: u64,
        fd: BorrowedFd<'_>,
        fd_offset: u64,
        check: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<(), MapError> {
        let step = STEP;
        let end = offset.checked_add(len).filter(|end| *end <= self.size());
        let aligned = [offset, len, fd_offset].iter().all(|value| value.is_multiple_of(step));
        let Some(end) = end.filter(|_| len != 0 && aligned) else {
            return Err(MapError::Range { offset, len, size: self.size(), step });
        };
        let needed = fd_offset.saturating_add(len);
        check(needed).map_err(|source| MapError::Unsealed { needed, source })?;

        let mut mapped = lock(&self.mapped);
        let at = mapped.partition_point(|(start, _)| *start < offset);
        let before = at.checked_sub(1).and_then(|i| mapped.get(i));
        if before.is_some_and(|(start, len)| start + len > offset)
            || mapped.get(at).is_some_and(|(start, _)| *start < end)
        {
            return Err(MapError::Overlap { offset, len });
        }
        // SAFETY: the range was checked to lie in this reservation, which we own, and overlaps no live
        // mapping. The new mapping replaces inaccessible address space or zero pages of the reservation.
        unsafe {
            let at = self.mem.start().as_ptr().add(offset as usize).cast();
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            map_at(at, len as usize, prot, MappingKind::File(fd, fd_offset))
        }
        .map_err(MapError::Mmap)?;
        mapped.insert(at, (offset, len));
        Ok(())
    }

    /// Unmaps a range: private zero pages replace it.
    ///
    /// # Errors
    /// There is no mapping of exactly this range.
    pub fn unmap(&self, offset: u64, len: u64) -> Result<(), MapError> {
        let mut mapped = lock(&self.mapped);
        let at = mapped
            .binary_search(&(offset, len))
            .map_err(|_| MapError::NotMapped { offset, len })?;
        // SAFETY: the range is a live mapping inside this reservation, which we own. Views of the range
        // stay valid: they see readable and writable zero pages from now on.
        unsafe {
            let at = self.mem.start().as_ptr().add(offset as usize).cast();
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            map_at(at, len as usize, prot, MappingKind::Zeros)
        }
        .map_err(MapError::Mmap)?;
        mapped.remove(at);
        Ok(())
    }

    /// Variant of [`map`](Self::map) for a device's own file, without seals.
    ///
    /// # Errors
    /// See [`MapError`]; the window is unchanged then.
    pub fn map_device(
        &self,
        offset: u64,
        len: u64,
        fd: BorrowedFd<'_>,
        fd_offset: u64,
    ) -> Result<(), MapError> {
        self.map_checked(offset, len, fd, fd_offset, |_| Ok(()))
    }

    /// A view of a range covered by live mappings without a gap; `None` otherwise.
    pub fn slice_across(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        let end = offset.checked_add(len)?;
        let mapped = lock(&self.mapped);
        let first = mapped.partition_point(|(start, _)| *start <= offset).checked_sub(1)?;
        let mut covered = offset;
        for (start, size) in mapped.get(first..)? {
            if covered >= end {
                break;
            }
            if *start > covered {
                return None;
            }
            covered = covered.max(start + size);
        }
        (covered >= end).then(|| self.mem.slice(offset as usize, len as usize).ok()).flatten()
    }

    /// Replaces all mappings at once, and for good, by zero pages.
    ///
    /// # Errors
    /// The errors of mmap(2); the mappings are unchanged then.
    pub fn revoke(&self) -> io::Result<()> {
        let mut mapped = lock(&self.mapped);
        self.mem.revoke()?;
        mapped.clear();
        Ok(())
    }

    /// A view of a range in one live mapping; `None` otherwise.
    pub fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        let end = offset.checked_add(len)?;
        let mapped = lock(&self.mapped);
        let at = mapped.partition_point(|(start, _)| *start <= offset).checked_sub(1)?;
        let (start, size) = mapped.get(at)?;
        if end > start + size {
            return None;
        }
        self.mem.slice(offset as usize, len as usize).ok()
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("size", &self.size()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sealed_memfd;

    const K64: u64 = 64 << 10;

    fn read(slice: &SharedSlice) -> u8 {
        let mut byte = [0];
        slice.copy_out(0, &mut byte).unwrap();
        byte[0]
    }

    #[test]
    fn only_mapped_ranges_can_be_viewed() {
        let window = Reservation::new(16 * K64).unwrap();
        let fd = sealed_memfd("t", 2 * K64).unwrap();
        assert!(window.slice(0, 1).is_none());
        window.map(4 * K64, 2 * K64, fd.as_fd(), 0).unwrap();
        assert!(window.slice(4 * K64, 2 * K64).is_some());
        assert!(window.slice(4 * K64, 2 * K64 + 1).is_none());
        assert!(window.slice(4 * K64 - 1, 2).is_none());
        assert!(window.slice(u64::MAX, 2).is_none());
    }

    #[test]
    fn a_late_store_after_unmap_hits_zero_pages_and_not_the_file() {
        let window = Reservation::new(4 * K64).unwrap();
        let fd = sealed_memfd("t", K64).unwrap();
        window.map(0, K64, fd.as_fd(), 0).unwrap();
        let late = window.slice(0, 16).unwrap();
        late.copy_in(0, &[7]).unwrap();
        window.unmap(0, K64).unwrap();
        assert_eq!(read(&late), 0);
        late.copy_in(0, &[8]).unwrap();
        window.map(0, K64, fd.as_fd(), 0).unwrap();
        assert_eq!(read(&window.slice(0, 1).unwrap()), 7);
    }

    #[test]
    fn refuses_out_of_window_overlapping_and_unsealed_mappings() {
        let window = Reservation::new(4 * K64).unwrap();
        let fd = sealed_memfd("t", 2 * K64).unwrap();
        let map = |offset, len, at| window.map(offset, len, fd.as_fd(), at);
        assert!(matches!(map(3 * K64, 2 * K64, 0), Err(MapError::Range { .. })));
        assert!(matches!(map(u64::MAX - K64 + 1, K64, 0), Err(MapError::Range { .. })));
        assert!(matches!(map(512, K64, 0), Err(MapError::Range { .. })));
        assert!(matches!(map(0, 0, 0), Err(MapError::Range { .. })));
        assert!(matches!(map(0, 2 * K64, K64), Err(MapError::Unsealed { .. })), "too short");
        map(K64, 2 * K64, 0).unwrap();
        assert!(matches!(map(2 * K64, 2 * K64, 0), Err(MapError::Overlap { .. })));
        assert!(matches!(map(0, 2 * K64, 0), Err(MapError::Overlap { .. })));
        assert!(matches!(map(K64, K64, 0), Err(MapError::Overlap { .. })));
        map(0, K64, 0).unwrap();
        map(3 * K64, K64, 0).unwrap();
        assert!(matches!(window.unmap(K64, K64), Err(MapError::NotMapped { .. })));

        let name = c"unsealed";
        let bare = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&bare, K64).unwrap();
        window.unmap(0, K64).unwrap();
        assert!(matches!(window.map(0, K64, bare.as_fd(), 0), Err(MapError::Unsealed { .. })));
    }
}
