// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Regions of the function in vfio's numbering, and the layout of its BARs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use thiserror::Error;

/// Most bytes of one access: more than the whole configuration space of PCI Express.
pub(crate) const MAX_DATA: usize = 8192;

/// Regions of vfio-pci: six BARs, the ROM, the configuration space, VGA.
pub(crate) const REGIONS: u32 = 9;
/// BAR of the virtio structures.
pub(crate) const STRUCTURES_BAR: u32 = 0;
/// BAR of the MSI-X table and its pending bits.
pub(crate) const MSIX_BAR: u32 = 2;
/// BAR of the shared memory.
pub(crate) const SHARED_BAR: u32 = 4;
/// The configuration space.
pub(crate) const CONFIG: u32 = 7;

/// Bytes of the configuration space of a conventional function.
pub(crate) const CONFIG_LEN: usize = 256;
/// Bytes of the structures' BAR; each structure has pages of its own.
pub(crate) const STRUCTURES_LEN: u64 = 0x4000;
/// Bytes of the BAR of MSI-X.
pub(crate) const MSIX_LEN: u64 = 0x1000;
/// Offset of the pending bits in the BAR of MSI-X.
pub(crate) const PENDING: u32 = 0x800;
/// Most vectors with table entries before the pending bits.
pub(crate) const MAX_VECTORS: u16 = (PENDING / 16) as u16;
/// The pending bits, one for each vector.
pub(crate) const PENDING_BITS: Place =
    Place { offset: PENDING as u64, len: MAX_VECTORS as u64 / 8 };

/// Place of a structure in its BAR, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The common configuration (virtio 1.3, 4.1.4.3).
pub(crate) const COMMON: Place = Place { offset: 0, len: 0x1000 };
/// The interrupt status, always 0: interrupts are messages.
pub(crate) const ISR: Place = Place { offset: 0x1000, len: 0x1000 };
/// The configuration of the device.
pub(crate) const DEVICE: Place = Place { offset: 0x2000, len: 0x1000 };
/// The notification registers, one for each queue.
pub(crate) const NOTIFY: Place = Place { offset: 0x3000, len: 0x1000 };
/// Bytes between two notification registers.
pub(crate) const NOTIFY_MULTIPLIER: u32 = 4;

impl Place {
    /// The offset in the structure, for an offset in the BAR inside the structure.
    pub(crate) fn at(self, offset: u64) -> Option<usize> {
        let at = offset.checked_sub(self.offset).filter(|at| *at < self.len)?;
        usize::try_from(at).ok()
    }
}

/// A shared memory region of the device (virtio 1.3, 2.10), made of areas of one length. The client maps the
/// areas once, when it reads the information on the region.
#[derive(Debug)]
pub struct SharedMemory {
    /// Number of the region for drivers.
    pub id: u8,
    /// Length of each area, bytes: a power of two.
    pub area_len: u64,
    /// The file of each area, mapped from its begin. The number of files is a power of two.
    pub files: Vec<OwnedFd>,
}

impl SharedMemory {
    /// Length of the region, bytes.
    pub(crate) fn len(&self) -> u64 {
        self.area_len.saturating_mul(self.files.len() as u64)
    }

    /// The files of the areas.
    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().map(AsFd::as_fd).collect()
    }
}

/// Bytes of a region, with `shared` bytes of shared memory; 0 for an absent region.
pub(crate) fn size(region: u32, shared: u64) -> u64 {
    match region {
        SHARED_BAR => shared,
        STRUCTURES_BAR => STRUCTURES_LEN,
        MSIX_BAR => MSIX_LEN,
        CONFIG => CONFIG_LEN as u64,
        _ => 0,
    }
}

/// An access no driver can have asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("an access to {count} bytes at {offset:#x} of region {region}, which has {size:#x}")]
pub struct AccessError {
    /// The region.
    pub region: u32,
    /// Offset in the region, bytes.
    pub offset: u64,
    /// Bytes.
    pub count: u32,
    /// Bytes of the region.
    pub size: u64,
}

/// Checks whether an access lies in its region. Returns its length.
pub(crate) fn check(
    region: u32,
    offset: u64,
    count: u32,
    shared: u64,
) -> Result<usize, AccessError> {
    let size = size(region, shared);
    let len = count as usize;
    let end = offset.checked_add(count.into());
    if len > MAX_DATA || len == 0 || end.is_none_or(|end| end > size) {
        return Err(AccessError { region, offset, count, size });
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_lie_in_their_region() {
        assert_eq!(check(CONFIG, 0, 256, 0), Ok(256));
        assert_eq!(check(STRUCTURES_BAR, STRUCTURES_LEN - 4, 4, 0), Ok(4));
        assert_eq!(check(SHARED_BAR, 4092, 4, 4096), Ok(4));
        assert!(check(SHARED_BAR, 4093, 4, 4096).is_err());
        for (region, offset, count) in [
            (CONFIG, 0, 257),
            (CONFIG, 256, 1),
            (CONFIG, u64::MAX, 1),
            (CONFIG, 0, 0),
            (STRUCTURES_BAR, 0, u32::MAX),
            (STRUCTURES_BAR, 0, MAX_DATA as u32 + 1),
            (1, 0, 1),
            (SHARED_BAR, 0, 1),
            (REGIONS, 0, 1),
            (u32::MAX, 0, 1),
        ] {
            let size = size(region, 0);
            let refused = Err(AccessError { region, offset, count, size });
            assert_eq!(check(region, offset, count, 0), refused);
        }
    }
}
