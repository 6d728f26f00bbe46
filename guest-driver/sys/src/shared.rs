// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A view of memory open to reads and writes of an untrusted peer at any time.
//!
//! Nothing here ever yields a `&[u8]` or `&mut [u8]` of the memory: bytes are copied in and out, words are
//! accessed through atomics. Callers check values in their own copies.
//!
//! The bulk copies race with the peer on purpose. The peer is another process (or a device), so a race can
//! only deliver a mixture of old and new bytes. The layer above reads a range only after the peer has
//! published the range with a Release store. A peer overwriting a published range damages only its own
//! data. Bytes have no invalid values.

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use rustix::mm::{Advice, madvise};
use thiserror::Error;

use super::SharedMem;

/// A range outside of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{len} bytes at offset {offset} do not lie in (or are not aligned for) {size} bytes of shared memory"
)]
pub struct OutOfBounds {
    /// First byte wanted, from the start of the slice.
    pub offset: usize,
    /// Bytes wanted.
    pub len: usize,
    /// Bytes there are.
    pub size: usize,
}

/// A bounds-checked range of shared memory. Clones are views of the same bytes and keep the
/// mapping alive.
#[derive(Clone)]
pub struct SharedSlice {
    start: NonNull<u8>,
    len: usize,
    // Keeps `start .. start + len` mapped.
    owner: Arc<SharedMem>,
}

// SAFETY: the range stays mapped while `owner` lives, for all threads, and all access goes through atomics
// or through deliberately racing copies (see the module text).
unsafe impl Send for SharedSlice {}
// SAFETY: as for `Send`; no method gives out a plain reference to the bytes.
unsafe impl Sync for SharedSlice {}

impl SharedSlice {
    /// `len` bytes at `offset` of a mapping, readable and writable there.
    pub(super) fn new(
        owner: &Arc<SharedMem>,
        offset: usize,
        len: usize,
    ) -> Result<SharedSlice, OutOfBounds> {
        check(offset, len, owner.len())?;
        // SAFETY: `offset` was checked to lie in (or one past the end of) the mapping.
        let start = unsafe { owner.start().add(offset) };
        Ok(SharedSlice { start, len, owner: Arc::clone(owner) })
    }

    /// Bytes in the slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the slice has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte in this process, for tables read by a device.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Replaces the whole mapping of this view by private zero pages.
    ///
    /// # Errors
    /// The errors of mmap(2); the mapping is unchanged then.
    pub fn revoke(&self) -> io::Result<()> {
        self.owner.revoke()
    }

    /// A copy of the slice in private memory.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn private_copy(&self) -> io::Result<SharedSlice> {
        let mut bytes = vec![0; self.len];
        self.copy_out(0, &mut bytes).map_err(io::Error::other)?;
        let copy = SharedMem::anonymous(self.len)?.slice(0, self.len).map_err(io::Error::other)?;
        copy.copy_in(0, &bytes).map_err(io::Error::other)?;
        Ok(copy)
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// A part of the slice.
    ///
    /// # Errors
    /// The part does not lie in the slice.
    pub fn slice(&self, offset: usize, len: usize) -> Result<SharedSlice, OutOfBounds> {
        check(offset, len, self.len)?;
        // SAFETY: `offset` was checked to lie in (or one past the end of) the slice.
        let start = unsafe { self.start.add(offset) };
        Ok(SharedSlice { start, len, owner: Arc::clone(&self.owner) })
    }

    /// Copies `src` to `offset` of the shared memory, at memcpy speed and without any ordering: publish the
    /// bytes with a Release store afterwards.
    ///
    /// # Errors
    /// The target does not lie in the slice; nothing was copied.
    #[inline]
    pub fn copy_in(&self, offset: usize, src: &[u8]) -> Result<(), OutOfBounds> {
        check(offset, src.len(), self.len)?;
        // SAFETY: the target was checked to lie in the slice, mapped and writable as long as `owner` lives.
        // `src` is private memory: no reference to shared memory exists, so they cannot overlap. A peer may
        // race with the copy (module text).
        unsafe {
            std::ptr::copy_nonoverlapping(src.as_ptr(), self.start.as_ptr().add(offset), src.len());
        }
        Ok(())
    }

    /// Copies the shared memory at `offset` to `dst`, at memcpy speed. The caller has seen by an Acquire
    /// load the peer's publication of the range.
    ///
    /// # Errors
    /// The source does not lie in the slice; nothing was copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, dst: &mut [u8]) -> Result<(), OutOfBounds> {
        check(offset, dst.len(), self.len)?;
        // SAFETY: the source was checked to lie in the slice, mapped and readable as long as `owner` lives.
        // `dst` is private memory and cannot overlap. A peer may race with the copy: the bytes are then any
        // bytes, valid for `u8` (module text).
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.start.as_ptr().add(offset),
                dst.as_mut_ptr(),
                dst.len(),
            );
        }
        Ok(())
    }

    /// Makes the kernel allocate and map the pages of a range for writing; their bytes stay as they are.
    ///
    /// # Errors
    /// The range does not lie in the slice. `InvalidInput` before Linux 5.14; `OutOfMemory`.
    pub fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        check(offset, len, self.len).map_err(io::Error::other)?;
        let before = (self.address() + offset) % crate::page_size();
        // SAFETY: the range was checked to lie in the slice, mapped and writable as long as `owner` lives.
        // A mapping begins with a page, so the bytes before the range in its first page are mapped, too.
        // The advice changes no byte.
        unsafe {
            let start = self.start.as_ptr().add(offset).sub(before);
            madvise(start.cast(), len + before, Advice::LinuxPopulateWrite)?;
        }
        Ok(())
    }

    /// Stores zeros.
    ///
    /// # Errors
    /// The range does not lie in the slice; nothing was stored.
    pub fn zero(&self, offset: usize, len: usize) -> Result<(), OutOfBounds> {
        check(offset, len, self.len)?;
        // SAFETY: the range was checked to lie in the slice, which `owner` keeps mapped and
        // writable.
        unsafe { std::ptr::write_bytes(self.start.as_ptr().add(offset), 0, len) };
        Ok(())
    }

    /// The 8 bytes at `offset` as an atomic word in the byte order of this machine.
    ///
    /// # Errors
    /// The word does not lie in the slice, or its address is not a multiple of 8.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> Result<&AtomicU64, OutOfBounds> {
        let word = self.word(offset, size_of::<u64>())?;
        // SAFETY: in bounds and aligned (checked), mapped as long as `self` (and so the
        // reference) lives, and only ever a concurrent target of whole-word atomics or racing
        // copies (module text).
        Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
    }

    /// The 4 bytes at `offset` as an atomic word in the byte order of this machine.
    ///
    /// # Errors
    /// The word does not lie in the slice, or its address is not a multiple of 4.
    #[inline]
    pub fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32, OutOfBounds> {
        let word = self.word(offset, size_of::<u32>())?;
        // SAFETY: as in `atomic_u64`.
        Ok(unsafe { AtomicU32::from_ptr(word.cast()) })
    }

    /// The 2 bytes at `offset` as an atomic word in the byte order of this machine.
    ///
    /// # Errors
    /// The word does not lie in the slice, or its address is not a multiple of 2.
    #[inline]
    pub fn atomic_u16(&self, offset: usize) -> Result<&AtomicU16, OutOfBounds> {
        let word = self.word(offset, size_of::<u16>())?;
        // SAFETY: as in `atomic_u64`.
        Ok(unsafe { AtomicU16::from_ptr(word.cast()) })
    }

    #[inline]
    fn word(&self, offset: usize, size: usize) -> Result<*mut u8, OutOfBounds> {
        check(offset, size, self.len)?;
        // SAFETY: `offset` was checked to lie in the slice.
        let word = unsafe { self.start.as_ptr().add(offset) };
        if word.addr().is_multiple_of(size) {
            Ok(word)
        } else {
            Err(OutOfBounds { offset, len: size, size: self.len })
        }
    }
}

impl fmt::Debug for SharedSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Neither bytes nor addresses belong in a log.
        f.debug_struct("SharedSlice").field("len", &self.len).finish_non_exhaustive()
    }
}

#[inline]
fn check(offset: usize, len: usize, size: usize) -> Result<(), OutOfBounds> {
    if offset <= size && len <= size - offset {
        Ok(())
    } else {
        Err(OutOfBounds { offset, len, size })
    }
}

#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
impl SharedSlice {
    /// Numbers of the mapped pages of the slice.
    ///
    /// # Panics
    /// /proc cannot be read.
    pub fn pages_there(&self) -> Vec<usize> {
        use std::os::unix::fs::FileExt;
        let page = crate::page_size();
        let mut entries = vec![0; self.len.div_ceil(page) * 8];
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut entries, (self.address() / page * 8) as u64).unwrap();
        let is_there = |entry: &[u8]| entry.last().is_some_and(|highest| highest & 0x80 != 0);
        let all = entries.chunks(8).enumerate();
        all.filter(|(_, entry)| is_there(entry)).map(|(number, _)| number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    fn slice(len: usize) -> SharedSlice {
        let mem = SharedMem::anonymous(4096).unwrap();
        mem.slice(0, len).unwrap()
    }

    #[test]
    fn bytes_go_in_and_out() {
        let shared = slice(64);
        shared.copy_in(60, &[1, 2, 3, 4]).unwrap();
        let mut back = [0; 4];
        shared.clone().copy_out(60, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4]);
        shared.zero(60, 4).unwrap();
        shared.copy_out(60, &mut back).unwrap();
        assert_eq!(back, [0; 4]);
    }

    #[test]
    fn pages_of_a_range_are_there_before_they_are_written_and_keep_their_bytes() {
        let page = crate::page_size();
        let mem = SharedMem::anonymous(16 * page).unwrap();
        let shared = mem.slice(0, 16 * page).unwrap();
        shared.copy_in(2 * page, &[7; 100]).unwrap();
        assert_eq!(shared.pages_there(), [2]);
        // From the middle of a page, in a part with its start in the middle of a page.
        let part = shared.slice(page / 2, 8 * page).unwrap();
        part.populate(2 * page, 3 * page).unwrap();
        assert_eq!(shared.pages_there(), [2, 3, 4, 5]);
        let mut back = [0; 100];
        shared.copy_out(2 * page, &mut back).unwrap();
        assert_eq!(back, [7; 100]);
        assert!(part.populate(8 * page, 1).is_err());
    }

    #[test]
    fn a_private_copy_has_the_bytes_and_nobody_else_changes_them() {
        let shared = slice(64);
        shared.copy_in(15, &[1, 2]).unwrap();
        let copy = shared.slice(10, 10).unwrap().private_copy().unwrap();
        shared.copy_in(15, &[7, 8]).unwrap();
        let mut bytes = [0; 2];
        copy.copy_out(5, &mut bytes).unwrap();
        assert_eq!((copy.len(), bytes), (10, [1, 2]));
        copy.copy_in(5, &[9]).unwrap();
        shared.copy_out(15, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 8]);
    }

    #[test]
    fn ranges_beyond_the_end_are_refused_and_touch_nothing() {
        let shared = slice(64);
        assert_eq!(shared.copy_in(61, &[9; 4]), Err(OutOfBounds { offset: 61, len: 4, size: 64 }));
        assert!(shared.copy_out(usize::MAX, &mut [0; 2]).is_err());
        assert!(shared.zero(0, 65).is_err());
        assert!(shared.slice(32, 33).is_err());
        assert!(shared.slice(64, 0).is_ok());
        let mut all = [1; 64];
        shared.copy_out(0, &mut all).unwrap();
        assert_eq!(all, [0; 64]);
    }

    #[test]
    fn words_must_be_aligned_and_inside() {
        let shared = slice(64);
        shared.atomic_u64(8).unwrap().store(u64::from_ne_bytes(*b"abcdefgh"), Ordering::Relaxed);
        let mut bytes = [0; 8];
        shared.copy_out(8, &mut bytes).unwrap();
        assert_eq!(&bytes, b"abcdefgh");
        assert!(shared.atomic_u64(4).is_err());
        assert!(shared.atomic_u64(57).is_err());
        assert!(shared.atomic_u32(60).is_ok());
        assert!(shared.slice(4, 16).unwrap().atomic_u64(0).is_err(), "the address counts");
    }
}
