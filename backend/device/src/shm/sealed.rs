// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A sealed anonymous file, mapped at its first use.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use vm_memory::{AtomicInteger, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use super::ShmError;

/// Up to this length, clearing by writing is cheaper than punching a hole.
const WRITE_ZEROES_MAX: u64 = 1 << 20;
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A memfd with fixed size and seals: a process with the descriptor can only write its bytes.
#[derive(Debug)]
pub struct Sealed {
    file: Arc<File>,
    len: u64,
    /// Most slabs are only ever touched by their front ends; the daemon maps a slab at its own first write.
    map: OnceLock<MmapRegion>,
}

impl Sealed {
    /// A file of `len` bytes that reads as zero.
    ///
    /// # Errors
    /// [`ShmError::Create`] if the kernel refuses (descriptors or memory).
    pub fn new(len: u64) -> Result<Sealed, ShmError> {
        let create = || -> Result<File, Errno> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = match memfd_create("ism-slab", flags | MemfdFlags::NOEXEC_SEAL) {
                // Kernels before 6.3 do not know the flag.
                Err(Errno::INVAL) => memfd_create("ism-slab", flags)?,
                other => other?,
            };
            rustix::fs::ftruncate(&fd, len)?;
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(File::from(fd))
        };
        let file = create().map_err(|e| ShmError::Create { len, source: e.into() })?;
        Ok(Sealed { file: Arc::new(file), len, map: OnceLock::new() })
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The descriptor, to be given to front ends.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`ShmError::Range`] outside of the memory, [`ShmError::Map`] if mapping fails.
    pub fn slice(&self, offset: u64, len: u64) -> Result<VolatileSlice<'_>, ShmError> {
        let outside = || ShmError::Range { offset, len };
        let start = usize::try_from(offset).map_err(|_| outside())?;
        let count = usize::try_from(len).map_err(|_| outside())?;
        self.map()?.get_slice(start, count).map_err(|_| outside())
    }

    /// The atomic at `offset`. Front ends may change its value at any time.
    ///
    /// # Errors
    /// [`ShmError::Range`] outside of the memory or if `offset` is not aligned to the type, [`ShmError::Map`]
    /// if mapping fails.
    pub fn atomic<T: AtomicInteger>(&self, offset: u64) -> Result<&T, ShmError> {
        let outside = || ShmError::Range { offset, len: size_of::<T>() as u64 };
        let start = usize::try_from(offset).map_err(|_| outside())?;
        self.map()?.get_atomic_ref(start).map_err(|_| outside())
    }

    /// Whether the daemon has mapped the file.
    pub fn is_mapped(&self) -> bool {
        self.map.get().is_some()
    }

    fn map(&self) -> Result<&MmapRegion, ShmError> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let len =
            usize::try_from(self.len).map_err(|_| ShmError::Range { offset: 0, len: self.len })?;
        let map = MmapRegion::from_file(FileOffset::from_arc(self.file.clone(), 0), len)
            .map_err(|source| ShmError::Map { len: self.len, source })?;
        super::dump::leave_out(map.as_ptr().addr(), len);
        // Two threads may both have mapped; one mapping is dropped again.
        Ok(self.map.get_or_init(|| map))
    }

    /// Stores `bytes` at `offset` without mapping.
    ///
    /// # Errors
    /// [`ShmError::Range`] outside of the memory, [`ShmError::Zero`] if the kernel refuses.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ShmError> {
        let len = bytes.len() as u64;
        self.check(offset, len)?;
        let zero = |source| ShmError::Zero { offset, len, source };
        self.file.write_all_at(bytes, offset).map_err(zero)
    }

    /// Makes `len` bytes at `offset` read as zero.
    ///
    /// # Errors
    /// [`ShmError::Range`] outside of the memory, [`ShmError::Zero`] if the kernel refuses.
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), ShmError> {
        self.check(offset, len)?;
        if len > WRITE_ZEROES_MAX && self.punch(offset, len).is_ok() {
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROES.len() as u64);
            self.write(offset + done, ZEROES.get(..step as usize).unwrap_or_default())?;
            done += step;
        }
        Ok(())
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&*self.file, flags, offset, len)?)
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), ShmError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(ShmError::Range { offset, len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{fcntl_get_seals, ftruncate};
    use vm_memory::Bytes;

    #[test]
    fn a_holder_of_the_descriptor_cannot_resize_or_seal_it() {
        let memory = Sealed::new(1 << 20).unwrap();
        let fd = memory.fd();
        let seals = fcntl_get_seals(fd).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
        assert_eq!(ftruncate(fd, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(fd, 2 << 20), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(fd, SealFlags::FUTURE_WRITE), Err(Errno::PERM));
    }

    #[test]
    fn a_hole_that_a_holder_punches_reads_as_zero_and_can_be_written() {
        let memory = Sealed::new(1 << 20).unwrap();
        let slice = memory.slice(4096, 8).unwrap();
        slice.write_slice(&[7; 8], 0).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(memory.fd(), flags, 0, 1 << 20).unwrap();
        let mut bytes = [1; 8];
        slice.read_slice(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 8]);
        slice.write_slice(&[7; 8], 0).unwrap();
    }

    #[test]
    fn small_and_large_ranges_are_cleared_and_their_neighbours_are_not() {
        let memory = Sealed::new(4 << 20).unwrap();
        let all = memory.slice(0, 4 << 20).unwrap();
        for (offset, len) in [(64 << 10, 128 << 10), (1 << 20, 2 << 20)] {
            all.write_slice(&vec![0xee; 4 << 20], 0).unwrap();
            memory.zero(offset, len).unwrap();
            let mut bytes = vec![0; 4 << 20];
            all.read_slice(&mut bytes, 0).unwrap();
            for (i, byte) in bytes.iter().enumerate() {
                let inside = (offset..offset + len).contains(&(i as u64));
                assert_eq!(*byte, if inside { 0 } else { 0xee }, "byte {i}");
            }
        }
    }

    #[test]
    fn ranges_outside_are_refused() {
        let memory = Sealed::new(4096).unwrap();
        assert!(!memory.is_mapped());
        assert!(matches!(memory.slice(4090, 7), Err(ShmError::Range { .. })));
        assert!(matches!(memory.slice(u64::MAX, 2), Err(ShmError::Range { .. })));
        assert!(matches!(memory.zero(4096, 1), Err(ShmError::Range { .. })));
        assert!(matches!(memory.write(u64::MAX, &[1]), Err(ShmError::Range { .. })));
    }
}
