// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The environment of `VirtQueue`: memory for rings, and bus addresses of buffers.

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{DmaSpan, QueueAddresses};
use ism_sys::SharedSlice;

thread_local! {
    // Memory of the ring under construction by this thread: `Hal` has no `self` to store the memory.
    static RING_MEMORY: RefCell<Option<(SharedSlice, u64, usize)>> = const { RefCell::new(None) };
    // The buffers being added to a ring by this thread: address in this process, bus address.
    static BUFFERS: Cell<[(usize, u64); 2]> = const { Cell::new([(0, 0); 2]) };
}

/// Calls `f` to make rings in `memory`; `gpa` is the bus address of the memory.
pub(super) fn with_ring_memory<R>(memory: &SharedSlice, gpa: u64, f: impl FnOnce() -> R) -> R {
    RING_MEMORY.with(|cell| *cell.borrow_mut() = Some((memory.clone(), gpa, 0)));
    let result = f();
    RING_MEMORY.with(|cell| *cell.borrow_mut() = None);
    result
}

/// Calls `f` to share these buffers with the device.
#[inline]
pub(super) fn with_translation<R>(
    readable: Option<DmaSpan>,
    writable: Option<DmaSpan>,
    f: impl FnOnce() -> R,
) -> R {
    let of = |span: Option<DmaSpan>| span.map_or((0, 0), |span| (span.address, span.gpa));
    BUFFERS.set([of(readable), of(writable)]);
    f()
}

/// Bus addresses come from [`BUFFERS`], ring memory from [`RING_MEMORY`].
pub(super) struct SharedHal;

// SAFETY: `dma_alloc` hands out disjoint, page-aligned, zeroed parts of the memory given to
// `SplitQueue::new`, which the ring keeps mapped as long as its queue; the other methods only translate
// addresses, as given by the owner of the buffers.
unsafe impl Hal for SharedHal {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        // Address 0 means failure.
        let failed = (0, NonNull::dangling());
        RING_MEMORY.with(|cell| {
            let mut cell = cell.borrow_mut();
            let Some((memory, gpa, next)) = cell.as_mut() else { return failed };
            let Ok(part) = memory.slice(*next, pages * PAGE_SIZE) else { return failed };
            let at = *gpa + *next as u64;
            *next += part.len();
            (at, part.start())
        })
    }

    unsafe fn dma_dealloc(_: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        // The ring's memory is a part of the pool and goes with its slice.
        0
    }

    unsafe fn mmio_phys_to_virt(_: PhysAddr, _: usize) -> NonNull<u8> {
        // Only called by the crate's PCI transport, not in use here.
        NonNull::dangling()
    }

    unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
        let address = buffer.addr().get();
        let [(readable, gpa), (_, other)] = BUFFERS.get();
        if address == readable { gpa } else { other }
    }

    unsafe fn unshare(_: PhysAddr, _: NonNull<[u8]>, _: BufferDirection) {}
}

/// Receives the addresses of the parts of a `VirtQueue`.
pub(super) struct AddressCatcher {
    pub(super) size: u32,
    pub(super) caught: Option<QueueAddresses>,
}

impl Transport for AddressCatcher {
    fn device_type(&self) -> DeviceType {
        // The crate's list of types ends before ISM, and no code reads this.
        DeviceType::Pstore
    }
    fn read_device_features(&mut self) -> u64 {
        0
    }
    fn write_driver_features(&mut self, _: u64) {}
    fn max_queue_size(&mut self, _: u16) -> u32 {
        self.size
    }
    fn notify(&mut self, _: u16) {}
    fn get_status(&self) -> DeviceStatus {
        DeviceStatus::empty()
    }
    fn set_status(&mut self, _: DeviceStatus) {}
    fn set_guest_page_size(&mut self, _: u32) {}
    fn requires_legacy_layout(&self) -> bool {
        false
    }
    fn queue_set(
        &mut self,
        _: u16,
        size: u32,
        descriptors: PhysAddr,
        available: PhysAddr,
        used: PhysAddr,
    ) {
        self.caught = Some(QueueAddresses { size: size as u16, descriptors, available, used });
    }
    fn queue_unset(&mut self, _: u16) {}
    fn queue_used(&mut self, _: u16) -> bool {
        false
    }
    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }
    fn read_config_generation(&self) -> u32 {
        0
    }
    fn read_config_space<T: FromBytes + IntoBytes>(&self, _: usize) -> virtio_drivers::Result<T> {
        Err(virtio_drivers::Error::Unsupported)
    }
    fn write_config_space<T: IntoBytes + Immutable>(
        &mut self,
        _: usize,
        _: T,
    ) -> virtio_drivers::Result<()> {
        Err(virtio_drivers::Error::Unsupported)
    }
}
