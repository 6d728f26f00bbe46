// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VFIO without an IOMMU, to drive a PCI function from this process.
//!
//! Numbers and structures are those of `linux/vfio.h`. A group can be open only once in a system,
//! so only one process can have a device. When its last descriptor and mapping are closed, also by
//! a crash, the kernel stops and resets the function.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

use super::SharedMem;

const fn request(number: libc::Ioctl) -> libc::Ioctl {
    // _IO(';', 100 + number)
    (';' as libc::Ioctl) << 8 | (100 + number)
}

const GET_API_VERSION: libc::Ioctl = request(0);
const CHECK_EXTENSION: libc::Ioctl = request(1);
const SET_IOMMU: libc::Ioctl = request(2);
const GROUP_GET_STATUS: libc::Ioctl = request(3);
const GROUP_SET_CONTAINER: libc::Ioctl = request(4);
const GROUP_GET_DEVICE_FD: libc::Ioctl = request(6);
const DEVICE_GET_REGION_INFO: libc::Ioctl = request(8);
const DEVICE_GET_IRQ_INFO: libc::Ioctl = request(9);
const DEVICE_SET_IRQS: libc::Ioctl = request(10);

const API_VERSION: i32 = 0;
const NOIOMMU: i32 = 8;
const GROUP_VIABLE: u32 = 1;
const REGION_MMAP: u32 = 1 << 2;
const IRQ_DATA_NONE: u32 = 1;
const IRQ_DATA_EVENTFD: u32 = 1 << 2;
const IRQ_ACTION_TRIGGER: u32 = 1 << 5;

/// Region of the configuration space; regions 0 to 5 are the BARs.
pub const CONFIG_REGION: u32 = 7;
/// Most vectors in use: 62 move queues, control, events, configuration.
const MAX_VECTORS: usize = 65;

/// A kind of interrupt of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VfioIrq {
    /// Message-signalled interrupts, many vectors.
    MsiX = 2,
    /// The kernel wants the device back (it is being removed, or unbound).
    Request = 4,
}

#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
#[derive(Default)]
struct IrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    fds: [i32; MAX_VECTORS],
}

/// Why a function cannot be opened.
#[derive(Debug, Error)]
pub enum VfioError {
    /// A step failed.
    #[error("{what}: {source}")]
    System {
        /// The step.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Another process has the function open.
    #[error("it is in use by another process")]
    InUse,
    /// The kernel has another version of the interface.
    #[error("VFIO of version {0}")]
    Version(i32),
    /// The kernel has no mode without IOMMU.
    #[error("the kernel has no VFIO without IOMMU (CONFIG_VFIO_NOIOMMU)")]
    NoNoIommu,
    /// A device of the group is not bound to VFIO.
    #[error("its group is not viable: another device of it has a driver of the kernel")]
    NotViable,
}

/// The place of a region in the device's file.
#[derive(Clone, Copy, Debug)]
pub struct VfioRegion {
    /// Bytes; 0 if there is none.
    pub size: u64,
    /// Offset in the device's file.
    pub offset: u64,
    /// Whether the region can be mapped.
    pub mappable: bool,
}

/// An open function.
#[derive(Debug)]
pub struct VfioDevice {
    device: File,
    // All three must be open while the device is in use; the order of closing does not matter.
    _group: File,
    _container: File,
}

impl VfioDevice {
    /// Opens the function `name` (`0000:00:04.0`) of a group without IOMMU.
    ///
    /// # Errors
    /// Another process has the function open ([`VfioError::InUse`]), or see [`VfioError`].
    pub fn open(group: &Path, name: &str) -> Result<VfioDevice, VfioError> {
        let container = open(Path::new("/dev/vfio/vfio"))?;
        match call(&container, GET_API_VERSION, 0).map_err(failed("VFIO_GET_API_VERSION"))? {
            API_VERSION => {}
            other => return Err(VfioError::Version(other)),
        }
        let group = open(group)?;
        let mut status = GroupStatus { argsz: size_of::<GroupStatus>() as u32, flags: 0 };
        exchange(&group, GROUP_GET_STATUS, &mut status).map_err(failed("VFIO_GROUP_GET_STATUS"))?;
        if status.flags & GROUP_VIABLE == 0 {
            return Err(VfioError::NotViable);
        }
        let mut raw = container.as_raw_fd();
        exchange(&group, GROUP_SET_CONTAINER, &mut raw)
            .map_err(failed("VFIO_GROUP_SET_CONTAINER"))?;
        // The kernel reports the modes of a container only once it has a group.
        if call(&container, CHECK_EXTENSION, NOIOMMU).unwrap_or(0) == 0 {
            return Err(VfioError::NoNoIommu);
        }
        call(&container, SET_IOMMU, NOIOMMU).map_err(failed("VFIO_SET_IOMMU"))?;
        let device = get_device(&group, name)
            .map_err(failed(&format!("VFIO_GROUP_GET_DEVICE_FD of {name}")))?;
        Ok(VfioDevice { device, _group: group, _container: container })
    }

    /// The place of a region.
    ///
    /// # Errors
    /// The errors of ioctl(2) (there is no such region).
    pub fn region(&self, index: u32) -> io::Result<VfioRegion> {
        let argsz = size_of::<RegionInfo>() as u32;
        let mut info = RegionInfo { argsz, index, ..RegionInfo::default() };
        exchange(&self.device, DEVICE_GET_REGION_INFO, &mut info)?;
        Ok(VfioRegion {
            size: info.size,
            offset: info.offset,
            mappable: info.flags & REGION_MMAP != 0,
        })
    }

    /// Reads from an unmapped region.
    ///
    /// # Errors
    /// The errors of pread(2).
    pub fn read(&self, region: VfioRegion, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.device.read_exact_at(bytes, region.offset.saturating_add(at))
    }

    /// Writes to an unmapped region.
    ///
    /// # Errors
    /// The errors of pwrite(2).
    pub fn write(&self, region: VfioRegion, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.device.write_all_at(bytes, region.offset.saturating_add(at))
    }

    /// Maps a part of a region, without accessing it.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn map(&self, region: VfioRegion, at: u64, len: usize) -> io::Result<Arc<SharedMem>> {
        SharedMem::from_fd_at(&self.device, region.offset.saturating_add(at), len)
    }

    /// The number of interrupts of a kind.
    ///
    /// # Errors
    /// The errors of ioctl(2) (there is no such kind).
    pub fn irqs(&self, kind: VfioIrq) -> io::Result<u32> {
        let argsz = size_of::<IrqInfo>() as u32;
        let mut info = IrqInfo { argsz, index: kind as u32, ..IrqInfo::default() };
        exchange(&self.device, DEVICE_GET_IRQ_INFO, &mut info)?;
        Ok(info.count)
    }

    /// Makes the interrupts of a kind, from 0, signal these eventfds.
    ///
    /// # Errors
    /// The errors of ioctl(2), or there are too many eventfds.
    pub fn set_irqs(&self, kind: VfioIrq, events: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut set = irq_set(kind, IRQ_DATA_EVENTFD, events.len());
        if events.len() > MAX_VECTORS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (place, event) in set.fds.iter_mut().zip(events) {
            *place = event.as_raw_fd();
        }
        exchange(&self.device, DEVICE_SET_IRQS, &mut set).map(drop)
    }

    /// Turns the interrupts of a kind off.
    pub fn clear_irqs(&self, kind: VfioIrq) {
        // An error does not matter, because closing the device also turns them off.
        let mut set = irq_set(kind, IRQ_DATA_NONE, 0);
        let _ = exchange(&self.device, DEVICE_SET_IRQS, &mut set);
    }
}

impl AsFd for VfioDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

fn irq_set(kind: VfioIrq, data: u32, count: usize) -> IrqSet {
    IrqSet {
        argsz: size_of::<IrqSet>() as u32,
        flags: data | IRQ_ACTION_TRIGGER,
        index: kind as u32,
        start: 0,
        count: count as u32,
        fds: [-1; MAX_VECTORS],
    }
}

fn open(path: &Path) -> Result<File, VfioError> {
    let open = || OpenOptions::new().read(true).write(true).open(path).map(Into::into);
    crate::out_of_the_way(open).map(Into::into).map_err(|source| {
        if source.raw_os_error() == Some(libc::EBUSY) {
            VfioError::InUse
        } else {
            VfioError::System { what: path.display().to_string(), source }
        }
    })
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> VfioError {
    let what = what.to_owned();
    move |source| VfioError::System { what, source }
}

/// Makes a request with a number as its argument.
fn call(file: &File, request: libc::Ioctl, argument: i32) -> io::Result<i32> {
    // SAFETY: the requests with a number (`GET_API_VERSION`, `CHECK_EXTENSION`, `SET_IOMMU`) touch no
    // memory of this process.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, libc::c_long::from(argument)) })
}

/// Makes a request with a structure as its argument, read and maybe filled by the kernel.
fn exchange<T>(file: &File, request: libc::Ioctl, argument: &mut T) -> io::Result<i32> {
    // SAFETY: every caller passes the structure of the request, with its size in `argsz` where the request
    // has one; the structure is borrowed for the call and all bit patterns are values of its fields.
    check(unsafe {
        libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(argument).cast::<u8>())
    })
}

fn get_device(group: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: `name` is a terminated string, alive for the call and only read.
    let raw = check(unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD, name.as_ptr()) })?;
    // SAFETY: the kernel has just made this descriptor for this call; no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) }.into())
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_structures_have_the_numbers_of_the_kernel_s_header() {
        assert_eq!((GET_API_VERSION, DEVICE_SET_IRQS), (0x3b64, 0x3b6e));
        assert_eq!(size_of::<RegionInfo>(), 32);
        assert_eq!(size_of::<IrqSet>(), 20 + 4 * MAX_VECTORS);
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let error = VfioDevice::open(Path::new("/dev/vfio/noiommu-none"), "0000:00:04.0");
        assert!(matches!(error, Err(VfioError::System { .. })));
    }
}
