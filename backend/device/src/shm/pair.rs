// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of one pair of front ends, mapped by a front end before any slab exists.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use super::{Buddy, Sealed, ShmError};
use crate::sync::lock;

/// One sealed file for all slabs between two front ends, in both directions.
#[derive(Debug)]
pub struct PairMemory {
    pub(super) memory: Arc<Sealed>,
    ranges: Mutex<Buddy>,
}

impl PairMemory {
    /// Memory of `len` bytes without slabs, for ranges at multiples of `align` bytes. The file takes pages at
    /// first use.
    ///
    /// # Errors
    /// As [`Sealed::new`].
    pub fn new(len: u64, align: u32) -> Result<Arc<PairMemory>, ShmError> {
        let ranges = Mutex::new(Buddy::new(len, align.into()));
        Ok(Arc::new(PairMemory { memory: Arc::new(Sealed::new(len)?), ranges }))
    }

    /// The descriptor, to be given to both front ends.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// A range of at least `len` bytes that reads as zero; `None` without room.
    pub fn alloc(self: &Arc<PairMemory>, len: u64) -> Option<PairRange> {
        let offset = lock(&self.ranges).alloc(len)?;
        Some(PairRange { pair: self.clone(), offset, len })
    }
}

/// A range of the memory of a pair. Dropping the range clears its bytes, and gives the range back.
#[derive(Debug)]
pub struct PairRange {
    pair: Arc<PairMemory>,
    offset: u64,
    len: u64,
}

impl PairRange {
    /// The memory of the range.
    pub fn pair(&self) -> &Arc<PairMemory> {
        &self.pair
    }

    /// Offset in the memory, bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for PairRange {
    fn drop(&mut self) {
        // A range with old bytes is lost until the end of the pair.
        if self.pair.memory.zero(self.offset, self.len).is_ok() {
            lock(&self.pair.ranges).free(self.offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn a_range_comes_back_clean() {
        let pair = PairMemory::new(4 << 20, 1 << 20).unwrap();
        let range = pair.alloc(4 << 20).unwrap();
        assert!(pair.alloc(1).is_none(), "no room is left");
        pair.memory.slice(12, 1).unwrap().write_slice(&[7], 0).unwrap();
        drop(range);
        let range = pair.alloc(1).unwrap();
        assert_eq!(range.offset(), 0);
        let mut byte = [1];
        pair.memory.slice(12, 1).unwrap().read_slice(&mut byte, 0).unwrap();
        assert_eq!(byte, [0]);
        assert!(pair.alloc(u64::MAX).is_none());
    }
}
