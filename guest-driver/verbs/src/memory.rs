// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory for reads by devices and writes by peers, and its registration.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smc_core::wire::ids::Rkey;

use super::{Context, VerbsError, ffi};
use ism_sys::{OutOfBounds, SharedMem, SharedSlice, sealed_memfd};

/// A protection domain. A queue pair can only use memory registered in its own domain (LG-51).
pub struct Pd {
    raw: NonNull<ffi::Pd>,
    context: Arc<Context>,
}

// SAFETY: the library allows calls with one domain from all threads.
unsafe impl Send for Pd {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pd {}

impl Pd {
    /// A new domain.
    ///
    /// # Errors
    /// Errors of `ibv_alloc_pd`.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Pd>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().ibv_alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(Pd { raw, context: Arc::clone(context) }))
    }

    /// The device of the domain.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ffi::Pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: the library made the domain, `drop` frees the domain once, and all objects with
        // an `Arc` of the domain are gone.
        let code = unsafe { (self.context.functions().ibv_dealloc_pd)(self.raw()) };
        if code != 0 {
            tracing::debug!(code, "a protection domain was not freed");
        }
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd").field("context", &self.context).finish_non_exhaustive()
    }
}

/// Address of the next memory in the view of devices and peers. The first address is not zero,
/// because some implementations take zero for "none".
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(1 << 32);
/// Addresses are multiples of this, bytes: the largest size of pages other than huge pages.
const ADDRESS_STEP: u64 = 64 << 10;

/// Zeroed memory in whole pages for registration with devices. Peers may then write the memory at
/// any time, so this process accesses it by copies and atomics only ([`SharedSlice`]).
///
/// The memory is shared, so a fork of this process does not separate the memory from the device.
/// The mapping lives until the last registration and the last view are gone.
#[derive(Debug)]
pub struct Memory {
    all: SharedSlice,
    // The address of the first byte in work requests and for peers, if the library can register
    // memory under a chosen address. Peers then do not learn addresses of this process.
    address: u64,
}

impl Memory {
    /// `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// There is too little memory, or `len` is zero or larger than the address space.
    pub fn new(len: usize) -> Result<Arc<Memory>, VerbsError> {
        let fail = |source| VerbsError::Memory { len, source };
        let page = ism_sys::page_size();
        let size = len.checked_next_multiple_of(page).filter(|size| *size != 0);
        let size = size.ok_or_else(|| fail(io::ErrorKind::InvalidInput.into()))?;
        let file = sealed_memfd("smc-rdma", size as u64).map_err(fail)?;
        let mem = SharedMem::from_fd(file.as_fd(), size).map_err(fail)?;
        let beyond = |_| fail(io::ErrorKind::InvalidInput.into());
        let all = mem.slice(0, size).map_err(beyond)?;
        // A gap follows each memory, so an address just beyond its end belongs to no memory.
        let room = (size as u64).next_multiple_of(ADDRESS_STEP) + ADDRESS_STEP;
        let address = NEXT_ADDRESS.fetch_add(room, Ordering::Relaxed);
        Ok(Arc::new(Memory { all, address }))
    }

    /// A view of the whole memory. The view keeps the memory alive, but no registration.
    pub fn slice(&self) -> &SharedSlice {
        &self.all
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Always false: there is a page at least.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Copies `src` to `offset`; see [`SharedSlice::copy_in`].
    ///
    /// # Errors
    /// The target does not lie in the memory; nothing was copied.
    #[inline]
    pub fn copy_in(&self, offset: usize, src: &[u8]) -> Result<(), OutOfBounds> {
        self.all.copy_in(offset, src)
    }

    /// Copies the bytes at `offset` to `dst`; see [`SharedSlice::copy_out`].
    ///
    /// # Errors
    /// The source does not lie in the memory; nothing was copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, dst: &mut [u8]) -> Result<(), OutOfBounds> {
        self.all.copy_out(offset, dst)
    }

    /// Stores zeros.
    ///
    /// # Errors
    /// The range does not lie in the memory; nothing was stored.
    pub fn zero(&self, offset: usize, len: usize) -> Result<(), OutOfBounds> {
        self.all.zero(offset, len)
    }
}

/// Access rights to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The local device may read and write the memory for local requests: send buffers, receive
    /// buffers.
    Local,
    /// Peers knowing the key may also write the memory, but not read it: RMBs.
    RemoteWrite,
}

/// A registration of one [`Memory`] in one protection domain. The keys are valid for the life of
/// the registration.
pub struct Mr {
    raw: NonNull<ffi::Mr>,
    lkey: u32,
    rkey: Rkey,
    address: u64,
    pd: Arc<Pd>,
    // `drop` frees it after the registration.
    memory: ManuallyDrop<Arc<Memory>>,
}

// SAFETY: a registration is a handle; any thread may deregister.
unsafe impl Send for Mr {}
// SAFETY: as for `Send`; nothing changes through a shared reference.
unsafe impl Sync for Mr {}

/// A piece of registered memory, for a work request.
///
/// An `Sge` does not keep the registration alive. If the registration is gone when the device
/// executes the work request, the request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge(pub(super) ffi::Sge);

impl Sge {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether the piece is empty.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }
}

impl Mr {
    /// Registers all of a memory. The kernel pins the pages (RMB-1).
    ///
    /// # Errors
    /// [`VerbsError::Pin`] if the pages cannot be pinned; else [`VerbsError::Call`].
    pub fn register(pd: &Arc<Pd>, memory: &Arc<Memory>, access: Access) -> Result<Mr, VerbsError> {
        let functions = pd.context.functions();
        let flags = match access {
            Access::Local => ffi::ACCESS_LOCAL_WRITE,
            Access::RemoteWrite => ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE,
        };
        let start = std::ptr::with_exposed_provenance_mut(memory.all.address());
        let len = memory.len();
        // For both calls: the domain lives, and `start .. start + len` is mapped, readable and
        // writable until the registration ends (`Mr::drop` keeps the order). All accesses of this
        // program expect writes by peers at any time.
        let mut raw = std::ptr::null_mut();
        let mut address = memory.address;
        let mut refused = true;
        if let Some(register) = functions.ibv_reg_mr_iova {
            // SAFETY: see above.
            raw = unsafe { register(pd.raw(), start, len, address, flags) };
            let error = io::Error::last_os_error().raw_os_error();
            refused = raw.is_null() && matches!(error, Some(libc::EINVAL | libc::EOPNOTSUPP));
        }
        if refused {
            // The library is too old, or the device cannot register memory under another address.
            address = memory.all.address() as u64;
            // SAFETY: see above.
            raw = unsafe { (functions.ibv_reg_mr)(pd.raw(), start, len, flags) };
        }
        let Some(raw) = NonNull::new(raw) else {
            let source = io::Error::last_os_error();
            return Err(match source.kind() {
                io::ErrorKind::OutOfMemory => VerbsError::Pin { len, source },
                _ => VerbsError::Call { call: "ibv_reg_mr", source },
            });
        };
        // SAFETY: the library made the registration, and never changes the keys.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, Rkey(raw.as_ref().rkey)) };
        let memory = ManuallyDrop::new(Arc::clone(memory));
        Ok(Mr { raw, lkey, rkey, address, pd: Arc::clone(pd), memory })
    }

    /// The peer's key for the memory.
    pub fn rkey(&self) -> Rkey {
        self.rkey
    }

    /// The key of the memory in local work requests (part of [`sge`](Self::sge)).
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The address of the first byte in work requests of peers and of this process. The address
    /// differs from the address in this process, unless library or device are too old to choose.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The domain of the registration.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// A piece of the memory for a work request.
    ///
    /// # Errors
    /// The piece does not lie in the memory.
    #[inline]
    pub fn sge(&self, offset: usize, len: usize) -> Result<Sge, OutOfBounds> {
        let size = self.memory.len();
        let fits = offset <= size && len <= size - offset;
        let (true, Ok(length)) = (fits, u32::try_from(len)) else {
            return Err(OutOfBounds { offset, len, size });
        };
        Ok(Sge(ffi::Sge { addr: self.address + offset as u64, length, lkey: self.lkey }))
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the library made the registration, and `drop` ends the registration once.
        let code = unsafe { (self.pd.context.functions().ibv_dereg_mr)(self.raw.as_ptr()) };
        if code == 0 {
            // SAFETY: no code uses the field afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // The device may still access the memory, so the memory stays mapped for good.
            tracing::warn!(code, len = self.memory.len(), "memory was not deregistered");
        }
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A key is a right to write the memory, so keys do not belong in logs.
        f.debug_struct("Mr").field("len", &self.memory.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: RMB-1, RMB-9.
    #[test]
    fn memory_is_zeroed_whole_pages() {
        let memory = Memory::new(5000).unwrap();
        let page = ism_sys::page_size();
        assert_eq!(memory.len(), 5000usize.next_multiple_of(page));
        assert!(memory.all.address().is_multiple_of(page));
        let mut bytes = vec![1; memory.len()];
        memory.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        memory.copy_in(4999, &[7]).unwrap();
        memory.slice().copy_out(4999, &mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], 7);
        memory.zero(4999, 1).unwrap();
        memory.copy_out(4999, &mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], 0);
        assert!(memory.copy_in(memory.len(), &[1]).is_err());
        assert!(matches!(Memory::new(0), Err(VerbsError::Memory { len: 0, .. })));
        assert!(matches!(Memory::new(usize::MAX), Err(VerbsError::Memory { .. })));
    }

    #[test]
    fn peers_see_addresses_that_neither_overlap_nor_touch() {
        let all: Vec<_> = (1..5).map(|i| Memory::new(i * 40_000).unwrap()).collect();
        for (i, a) in all.iter().enumerate() {
            assert!(a.address.is_multiple_of(ADDRESS_STEP));
            for b in all.iter().skip(i + 1) {
                let (low, high) = if a.address < b.address { (a, b) } else { (b, a) };
                assert!(low.address + (low.len() as u64) < high.address);
            }
        }
    }

    #[test]
    fn memory_outlives_a_fork_of_this_process_in_place() {
        // Private memory would be copied away from the device by the first store after a fork.
        let memory = Memory::new(4096).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{:x}-", memory.all.address());
        let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
        assert!(line.contains("rw-s"), "{line}");
    }
}
