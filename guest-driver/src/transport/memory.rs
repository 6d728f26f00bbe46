//! Memory that the device can reach: one sealed file, handed out in blocks.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use super::TransportError;
use crate::sys::{SharedMem, SharedSlice, lock, sealed_memfd};

/// Smallest block, bytes.
const MIN_BLOCK: usize = 4096;
/// Blocks are aligned to their size up to this, bytes.
const BASE_ALIGN: usize = 2 << 20;

/// A pool of memory that the device can reach. Pages are only used when they are touched.
#[derive(Debug)]
pub struct GuestPool {
    file: OwnedFd,
    // All of the file, as the device maps it.
    whole: SharedSlice,
    // From the first multiple of `BASE_ALIGN` on: what is handed out.
    usable: SharedSlice,
    free: Mutex<Buddy>,
}

impl GuestPool {
    /// A pool of `size` bytes, rounded up to a power of two.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(size: u64) -> io::Result<Arc<GuestPool>> {
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
        Ok(Arc::new(GuestPool { file, whole, usable, free }))
    }

    /// All of the memory, with addresses of this process; bus addresses are the same.
    pub fn whole(&self) -> &SharedSlice {
        &self.whole
    }

    /// The file, to be told to the device.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Zeroed memory of `len` bytes, aligned to `len` rounded up to a power of two (from 4 KiB to
    /// 2 MiB).
    ///
    /// # Errors
    /// The pool is used up.
    pub fn alloc(self: &Arc<Self>, len: usize) -> Result<GuestMem, TransportError> {
        let refused = TransportError::OutOfMemory { wanted: len, size: self.usable.len() };
        let Some(block) = len.max(MIN_BLOCK).checked_next_power_of_two() else {
            return Err(refused);
        };
        let Some((offset, fresh)) = lock(&self.free).alloc(block) else { return Err(refused) };
        let slice = self.usable.slice(offset, len)?;
        if !fresh {
            slice.zero(0, len)?;
        }
        Ok(GuestMem { slice, offset, block, pool: Arc::clone(self), leak: false })
    }

    /// Like [`alloc`](Self::alloc), for as long as the pool lives.
    ///
    /// # Errors
    /// The pool is used up.
    pub fn permanent(self: &Arc<Self>, len: usize) -> Result<SharedSlice, TransportError> {
        let mut mem = self.alloc(len)?;
        mem.leak();
        Ok(mem.slice().clone())
    }

    /// Bytes handed out, in whole blocks.
    pub fn used(&self) -> usize {
        lock(&self.free).used
    }
}

/// Memory from a [`GuestPool`]; goes back when dropped.
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
        self.slice.address() as u64
    }

    /// The memory.
    pub fn slice(&self) -> &SharedSlice {
        &self.slice
    }

    /// Never gives the memory back: the device may still write it.
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
    // Nothing at or above was ever handed out: still zero.
    touched: usize,
    used: usize,
}

impl Buddy {
    fn new(size: usize) -> Buddy {
        let top = order(size);
        let mut free = vec![BTreeSet::new(); top + 1];
        if let Some(blocks) = free.get_mut(top) {
            blocks.insert(0);
        }
        Buddy { size, free, touched: 0, used: 0 }
    }

    /// The lowest free block of `block` bytes (a power of two), and whether nobody had it before.
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
        let pool = GuestPool::new(8 << 20).unwrap();
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
        assert!(matches!(pool.alloc(8 << 20), Err(TransportError::OutOfMemory { .. })));
        drop(again);
        assert_eq!(pool.used(), 0);
        pool.alloc(8 << 20).unwrap();
    }

    #[test]
    fn leaked_memory_is_never_handed_out_again() {
        let pool = GuestPool::new(2 << 20).unwrap();
        let mut mem = pool.alloc(2 << 20).unwrap();
        mem.leak();
        drop(mem);
        assert!(pool.alloc(1).is_err());
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(sizes in prop::collection::vec(0usize..6, 1..60)) {
            let size = 1 << 20;
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
            prop_assert!(buddy.alloc(size).is_some());
        }
    }
}
