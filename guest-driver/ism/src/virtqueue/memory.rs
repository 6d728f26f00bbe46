// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory for the device, allocated in blocks.
//!
//! For a daemon the memory is one sealed file, and bus addresses are addresses in this process. For a PCI
//! device the memory is pinned, and each 2 MiB have a bus address of their own. A block of up to 2 MiB is
//! contiguous on the bus; a larger block is a list of pieces.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::{DmaSpan, QueueError};
use ism_sys::{
    DmaMemory, ForkLocks, OutOfBounds, SharedMem, SharedSlice, is_free, lock, sealed_memfd,
};

/// Smallest block, bytes.
const MIN_BLOCK: usize = 4096;
/// Blocks are aligned to their size up to this, bytes.
const BASE_ALIGN: usize = 2 << 20;

/// A pool of memory for the device. Pages are allocated at the first touch, and this process touches its
/// allocations: a page first touched by a daemon would be charged to the daemon's limited quota.
#[derive(Debug)]
pub struct GuestPool {
    // The whole memory; of a file, as mapped by the device.
    whole: SharedSlice,
    // The part for allocations, from the first multiple of `BASE_ALIGN`.
    usable: SharedSlice,
    // Bus addresses of each `BASE_ALIGN` bytes of `usable`. `None`: addresses in this process.
    bus: Option<Vec<u64>>,
    free: Mutex<Buddy>,
}

impl ForkLocks for GuestPool {
    fn is_unlocked(&self) -> bool {
        is_free(&self.free)
    }
}

impl GuestPool {
    /// A pool of `size` bytes, rounded up to a power of two, and the file for the device to map.
    ///
    /// # Errors
    /// As the system calls, or `OutOfMemory` for a size beyond any process.
    pub fn new(size: u64) -> io::Result<(Arc<GuestPool>, OwnedFd)> {
        let size = usize::try_from(size)
            .ok()
            .and_then(|size| size.max(BASE_ALIGN).checked_next_power_of_two())
            .filter(|size| *size < 1 << 46)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let total = size + BASE_ALIGN;
        let file = sealed_memfd("virtio-ism driver", total as u64)?;
        let mem = SharedMem::from_fd(&file, total)?;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let whole = mem.slice(0, total).map_err(invalid)?;
        let skip = whole.address().next_multiple_of(BASE_ALIGN) - whole.address();
        let usable = mem.slice(skip, size).map_err(invalid)?;
        let free = Mutex::new(Buddy::new(size));
        Ok((Arc::new(GuestPool { whole, usable, bus: None, free }), file))
    }

    /// A pool of pinned memory, for a PCI device.
    pub fn pinned(memory: DmaMemory) -> Arc<GuestPool> {
        let (slice, bus) = memory.into_parts();
        let free = Mutex::new(Buddy::new(slice.len()));
        Arc::new(GuestPool { whole: slice.clone(), usable: slice, bus: Some(bus), free })
    }

    /// The whole memory, with addresses of this process.
    pub fn whole(&self) -> &SharedSlice {
        &self.whole
    }

    /// Frees the pages of the pool, although blocks may still be in use: these blocks read as zeros from now
    /// on. Call this only when the device can no longer reach the memory.
    ///
    /// # Errors
    /// As mmap(2); the pool is unchanged then.
    pub fn revoke(&self) -> io::Result<()> {
        self.whole.revoke()
    }

    /// Size of the usable part, bytes.
    pub fn size(&self) -> usize {
        self.usable.len()
    }

    /// Bus address of a byte of `usable`, and how many bytes are contiguous from there.
    #[inline]
    fn bus(&self, offset: usize) -> (u64, usize) {
        match &self.bus {
            None => ((self.usable.address() + offset) as u64, usize::MAX),
            Some(pieces) => match pieces.get(offset / BASE_ALIGN) {
                Some(start) => {
                    (start + (offset % BASE_ALIGN) as u64, BASE_ALIGN - offset % BASE_ALIGN)
                }
                None => (0, 0),
            },
        }
    }

    /// Zeroed memory of `len` bytes, aligned to `len` rounded up to a power of two (from 4 KiB to 2 MiB).
    ///
    /// # Errors
    /// The pool has no free block of the size.
    pub fn alloc(self: &Arc<Self>, len: usize) -> Result<GuestMem, QueueError> {
        let (mem, fresh) = self.alloc_block(len)?;
        if fresh && self.bus.is_none() {
            for page in (0..len).step_by(MIN_BLOCK) {
                mem.slice.zero(page, 1)?;
            }
        }
        Ok(mem)
    }

    /// Like [`alloc`](Self::alloc), without touching the pages: for memory written by this process before the
    /// device uses the memory.
    ///
    /// # Errors
    /// The pool has no free block of the size.
    pub fn alloc_untouched(self: &Arc<Self>, len: usize) -> Result<GuestMem, QueueError> {
        Ok(self.alloc_block(len)?.0)
    }

    /// Zeroed memory, and whether its pages may be untouched.
    fn alloc_block(self: &Arc<Self>, len: usize) -> Result<(GuestMem, bool), QueueError> {
        let refused = QueueError::OutOfMemory { wanted: len, size: self.usable.len() };
        let Some(block) = len.max(MIN_BLOCK).checked_next_power_of_two() else {
            return Err(refused);
        };
        let Some((offset, fresh)) = lock(&self.free).alloc(block) else { return Err(refused) };
        let slice = self.usable.slice(offset, len)?;
        if !fresh {
            slice.zero(0, len)?;
        }
        let mem = GuestMem { slice, offset, block, pool: Arc::clone(self), leak: false };
        Ok((mem, fresh))
    }

    /// Like [`alloc`](Self::alloc), but never freed. Returns the memory and its bus address.
    ///
    /// # Errors
    /// The pool has no free block of the size.
    pub fn permanent(self: &Arc<Self>, len: usize) -> Result<(SharedSlice, u64), QueueError> {
        let mut mem = self.alloc(len)?;
        mem.leak();
        Ok((mem.slice().clone(), mem.gpa()))
    }

    /// Bytes in use, in whole blocks.
    pub fn used(&self) -> usize {
        lock(&self.free).used
    }
}

/// Memory from a [`GuestPool`], freed on drop.
#[derive(Debug)]
pub struct GuestMem {
    slice: SharedSlice,
    offset: usize,
    block: usize,
    pool: Arc<GuestPool>,
    leak: bool,
}

impl GuestMem {
    /// Bus address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.pool.bus(self.offset).0
    }

    /// A contiguous part on the bus, as a buffer for a ring.
    ///
    /// # Errors
    /// The part does not lie in the memory, or crosses a multiple of 2 MiB of pinned memory.
    #[inline]
    pub fn span(&self, at: usize, len: usize) -> Result<DmaSpan, OutOfBounds> {
        let whole = self.slice.len();
        let refused = OutOfBounds { offset: at, len, size: whole };
        if at > whole || len > whole - at {
            return Err(refused);
        }
        let (gpa, contiguous) = self.pool.bus(self.offset + at);
        match u32::try_from(len) {
            Ok(short) if len <= contiguous => {
                Ok(DmaSpan { address: self.slice.address() + at, gpa, len: short })
            }
            _ => Err(refused),
        }
    }

    /// The memory on the bus: address and length of each contiguous piece.
    pub fn pieces(&self) -> Vec<(u64, u32)> {
        let mut pieces: Vec<(u64, u32)> = Vec::new();
        let mut at = 0;
        while at < self.slice.len() {
            let (gpa, contiguous) = self.pool.bus(self.offset + at);
            // 2 GiB at most: a multiple of every block's size with a length of 32 bits.
            let len = contiguous.min(self.slice.len() - at).clamp(1, 1 << 31);
            match pieces.last_mut() {
                Some((start, have))
                    if *start + u64::from(*have) == gpa && (*have as usize) + len <= 1 << 31 =>
                {
                    *have += len as u32;
                }
                _ => pieces.push((gpa, len as u32)),
            }
            at += len;
        }
        pieces
    }

    /// The memory, with addresses of this process.
    pub fn slice(&self) -> &SharedSlice {
        &self.slice
    }

    /// Keeps the memory from ever being freed, because the device may still write there.
    pub fn leak(&mut self) {
        self.leak = true;
    }
}

impl Drop for GuestMem {
    fn drop(&mut self) {
        if !self.leak {
            lock(&self.pool.free).free(self.offset, self.block);
        }
    }
}

/// Buddy allocator over offsets; all bookkeeping is private to this process.
#[derive(Debug)]
struct Buddy {
    size: usize,
    // Free blocks of MIN_BLOCK << order, by offset.
    free: Vec<BTreeSet<usize>>,
    // No block at or above this offset was ever allocated: the memory there is still zero.
    touched: usize,
    used: usize,
}

impl Buddy {
    fn new(size: usize) -> Buddy {
        let mut free = vec![BTreeSet::new(); order(1 << size.max(MIN_BLOCK).ilog2()) + 1];
        // The largest blocks first, to align each to its size.
        let mut at = 0;
        while size - at >= MIN_BLOCK {
            let block = 1usize << (size - at).ilog2();
            if let Some(blocks) = free.get_mut(order(block)) {
                blocks.insert(at);
            }
            at += block;
        }
        Buddy { size, free, touched: 0, used: 0 }
    }

    /// The lowest free block of `block` bytes (a power of two), and whether the block is used for the first
    /// time.
    fn alloc(&mut self, block: usize) -> Option<(usize, bool)> {
        let wanted = order(block);
        let from = (wanted..self.free.len())
            .find(|order| self.free.get(*order).is_some_and(|blocks| !blocks.is_empty()))?;
        let offset = self.free.get_mut(from)?.pop_first()?;
        for split in (wanted..from).rev() {
            self.free.get_mut(split)?.insert(offset + (MIN_BLOCK << split));
        }
        let fresh = offset >= self.touched;
        self.touched = self.touched.max(offset + block);
        self.used += block;
        Some((offset, fresh))
    }

    fn free(&mut self, mut offset: usize, mut block: usize) {
        self.used -= block;
        while block < self.size {
            let Some(blocks) = self.free.get_mut(order(block)) else { return };
            if !blocks.remove(&(offset ^ block)) {
                break;
            }
            offset &= !block;
            block *= 2;
        }
        if let Some(blocks) = self.free.get_mut(order(block)) {
            blocks.insert(offset);
        }
    }
}

fn order(block: usize) -> usize {
    (block / MIN_BLOCK).trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_is_aligned_zeroed_and_comes_back() {
        let (pool, _) = GuestPool::new(8 << 20).unwrap();
        let first = pool.alloc(64 << 10).unwrap();
        assert_eq!(first.gpa() % (64 << 10), 0);
        first.slice().copy_in(0, &[1; 100]).unwrap();
        let gpa = first.gpa();
        drop(first);
        let again = pool.alloc(64 << 10).unwrap();
        assert_eq!(again.gpa(), gpa, "lowest block first");
        let mut bytes = [9; 100];
        again.slice().copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 100]);
        assert!(matches!(pool.alloc(8 << 20), Err(QueueError::OutOfMemory { .. })));
        drop(again);
        assert_eq!(pool.used(), 0);
        pool.alloc(8 << 20).unwrap();
    }

    #[test]
    fn leaked_memory_is_never_allocated_again() {
        let (pool, _) = GuestPool::new(2 << 20).unwrap();
        let mut mem = pool.alloc(2 << 20).unwrap();
        mem.leak();
        drop(mem);
        assert!(pool.alloc(1).is_err());
    }

    #[test]
    fn pinned_memory_is_described_piece_by_piece() {
        const M2: u64 = 2 << 20;
        let bus = vec![0x1000_0000, 0x1000_0000 + M2, 0x7000_0000];
        let pool = GuestPool::pinned(DmaMemory::pretend(bus.clone()));
        assert_eq!(pool.size(), 6 << 20);
        let large = pool.alloc(4 << 20).unwrap();
        assert_eq!(large.pieces(), [(bus[0], 4 << 20)], "neighbours are one piece");
        let at = large.span(M2 as usize + 4096, 64).unwrap();
        assert_eq!((at.gpa, at.len), (bus[1] + 4096, 64));
        assert_eq!(at.address, large.slice().address() + M2 as usize + 4096);
        assert!(large.span(M2 as usize - 8, 16).is_err(), "not in one piece");
        assert!(large.span((4 << 20) - 8, 16).is_err(), "beyond the end");
        let small = pool.alloc(64 << 10).unwrap();
        assert_eq!(small.gpa(), bus[2]);
        assert!(pool.alloc(4 << 20).is_err());
        drop((large, small));
        assert_eq!(pool.used(), 0);
        let (_, gpa) = pool.permanent(8192).unwrap();
        assert_eq!(gpa, bus[2], "the smallest block that fits");
    }

    #[test]
    fn scattered_memory_has_a_piece_each_2_mib() {
        let bus: Vec<u64> = (0..16).map(|n| n << 30).collect();
        let pool = GuestPool::pinned(DmaMemory::pretend(bus.clone()));
        let dmb = pool.alloc(32 << 20).unwrap();
        assert_eq!(dmb.pieces(), bus.iter().map(|gpa| (*gpa, 2 << 20)).collect::<Vec<_>>());
    }

    #[test]
    fn a_file_is_one_piece() {
        let (pool, _) = GuestPool::new(8 << 20).unwrap();
        let dmb = pool.alloc(8 << 20).unwrap();
        assert_eq!(dmb.pieces(), [(dmb.slice().address() as u64, 8 << 20)]);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(
            sizes in prop::collection::vec(0usize..6, 1..60),
            size in (8usize..300).prop_map(|pages| pages * MIN_BLOCK),
        ) {
            let mut buddy = Buddy::new(size);
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (i, order) in sizes.iter().enumerate() {
                let block = MIN_BLOCK << order;
                if let Some((offset, _)) = buddy.alloc(block) {
                    prop_assert!(offset.is_multiple_of(block) && offset + block <= size);
                    for (o, b) in &live {
                        prop_assert!(offset + block <= *o || o + b <= offset);
                    }
                    live.push((offset, block));
                }
                if i % 3 == 2 && !live.is_empty() {
                    let (o, b) = live.swap_remove(i % live.len());
                    buddy.free(o, b);
                }
            }
            for (o, b) in live {
                buddy.free(o, b);
            }
            prop_assert_eq!(buddy.used, 0);
            prop_assert!(buddy.alloc(1 << size.ilog2()).is_some());
        }
    }
}
