// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An open PCI function: configuration space, BARs and interrupts, through VFIO or UIO.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};

use super::caps::{CONFIG_SPACE, Place};
use super::discover::{self, Binding};
use super::paths::VFIO;
use super::{Interrupts, PciAddress, PciError};
use ism_sys::{CONFIG_REGION, Registers, SharedMem, VfioDevice, VfioIrq, VfioRegion};

/// Offset of the command register.
const COMMAND: u64 = 4;
/// Command: memory accesses are answered.
const MEMORY: u16 = 1 << 1;
/// Command: the function may access memory and send message-signalled interrupts.
const BUS_MASTER: u16 = 1 << 2;
/// Command: INTx is masked.
const INTX_OFF: u16 = 1 << 10;

pub(super) enum Function {
    Vfio { device: VfioDevice, config: VfioRegion },
    Uio { interrupts: File, config: File, directory: PathBuf, _name_lock: Option<UnixListener> },
}

impl Function {
    /// Opens a function for this process alone.
    pub(super) fn open(address: PciAddress) -> Result<Function, PciError> {
        match discover::function(address)?.binding {
            Binding::Vfio(group) => {
                let group = Path::new(VFIO).join(format!("noiommu-{group}"));
                let device = VfioDevice::open(&group, &address.to_string())?;
                let config =
                    device.region(CONFIG_REGION).map_err(system("configuration region"))?;
                Ok(Function::Vfio { device, config })
            }
            Binding::VfioIommu(group) => Err(PciError::Iommu { group }),
            Binding::VfioNoGroup => Err(PciError::NoGroup),
            Binding::Uio(number) => Function::open_uio(address, number),
            Binding::Other(driver) => Err(PciError::NotBound { driver: Some(driver) }),
            Binding::Unbound => Err(PciError::NotBound { driver: None }),
        }
    }

    fn open_uio(address: PciAddress, number: u32) -> Result<Function, PciError> {
        let directory = discover::directory(address);
        let config = open(&directory.join("config"))?;
        // UIO lets several processes open a function, so processes with this library lock the function. The
        // lock comes before UIO's own file is opened, because closing UIO's file stops the function for its
        // user.
        let name_lock = match flock(&config, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => None,
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(PciError::InUse),
            // The kernel has no file locks.
            Err(rustix::io::Errno::NOSYS) => Some(lock_by_name(address)?),
            Err(error) => return Err(system("locking the configuration space")(error.into())),
        };
        let interrupts = open(Path::new(&format!("/dev/uio{number}")))?;
        Ok(Function::Uio { interrupts, config, directory, _name_lock: name_lock })
    }

    /// Kind of the function's interrupts.
    pub(super) fn interrupts(&self) -> Interrupts {
        match self {
            Function::Vfio { device, .. } => {
                let vectors = device.irqs(VfioIrq::MsiX).unwrap_or(0);
                Interrupts::MsiX { vectors: u16::try_from(vectors).unwrap_or(u16::MAX) }
            }
            Function::Uio { .. } => Interrupts::IntX,
        }
    }

    /// A private copy of the configuration space.
    pub(super) fn config_space(&self) -> Result<[u8; CONFIG_SPACE], PciError> {
        let mut bytes = [0; CONFIG_SPACE];
        self.read_config(0, &mut bytes).map_err(system("reading configuration space"))?;
        Ok(bytes)
    }

    fn read_config(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Function::Vfio { device, config } => device.read(*config, at, bytes),
            Function::Uio { config, .. } => config.read_exact_at(bytes, at),
        }
    }

    /// Lets the function answer and access memory.
    pub(super) fn enable(&self) -> Result<(), PciError> {
        self.set_command(MEMORY | BUS_MASTER, 0).map_err(system("PCI command register"))
    }

    /// Stops the function from accessing memory.
    pub(super) fn disable(&self) {
        // An error does not matter: closing the function does this, too.
        let _ = self.set_command(0, BUS_MASTER);
    }

    fn set_command(&self, set: u16, clear: u16) -> io::Result<()> {
        let mut bytes = [0; 2];
        self.read_config(COMMAND, &mut bytes)?;
        let old = u16::from_le_bytes(bytes);
        let bytes = ((old | set) & !clear).to_le_bytes();
        match self {
            Function::Vfio { device, config } => device.write(*config, COMMAND, &bytes),
            Function::Uio { config, .. } => config.write_all_at(&bytes, COMMAND),
        }
    }

    /// Bytes of a BAR; 0 if there is none, or no memory.
    pub(super) fn bar_size(&self, bar: u8) -> u64 {
        match self {
            Function::Vfio { device, .. } => {
                device.region(bar.into()).map_or(0, |region| region.size)
            }
            Function::Uio { directory, .. } => bar_of_sysfs(directory, bar),
        }
    }

    /// Maps a place. The second value is the offset of the place in the mapping.
    pub(super) fn map(&self, place: Place) -> Result<(Arc<SharedMem>, usize), PciError> {
        match self {
            Function::Vfio { device, .. } => {
                let refused = PciError::NotMappable { bar: place.bar };
                let (start, len, at) = in_pages(place)?;
                let region = device.region(place.bar.into()).map_err(system("BAR"))?;
                if !region.mappable {
                    return Err(refused);
                }
                let mem = device.map(region, start, len).map_err(system("mapping a BAR"))?;
                Ok((mem, at))
            }
            Function::Uio { directory, .. } => map_sysfs(directory, place),
        }
    }

    /// Maps a place as registers.
    pub(super) fn registers(&self, place: Place) -> Result<(Arc<SharedMem>, Registers), PciError> {
        let (mem, at) = self.map(place)?;
        let registers = Registers::new(&mem, at, place.len as usize)?;
        Ok((mem, registers))
    }

    /// The file of a BAR, for mapping part by part. VFIO has no such file and needs none: its page tables are
    /// filled at page faults.
    pub(super) fn bar_file(&self, bar: u8) -> Result<File, PciError> {
        match self {
            Function::Vfio { .. } => Err(PciError::NotMappable { bar }),
            Function::Uio { directory, .. } => open(&directory.join(format!("resource{bar}"))),
        }
    }

    /// Whether mapping a large BAR fills all of its page tables at once.
    pub(super) fn maps_eagerly(&self) -> bool {
        matches!(self, Function::Uio { .. })
    }

    /// Makes MSI-X vectors, from 0, signal these eventfds.
    pub(super) fn set_vectors(&self, events: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        match self {
            Function::Vfio { device, .. } => {
                device.set_irqs(VfioIrq::MsiX, events).map_err(system("setting up MSI-X"))
            }
            Function::Uio { .. } => Err(PciError::NoInterrupts),
        }
    }

    /// Makes the kernel signal an eventfd at a request to remove the function.
    pub(super) fn set_request(&self, event: BorrowedFd<'_>) -> Result<(), PciError> {
        match self {
            Function::Vfio { device, .. } => device
                .set_irqs(VfioIrq::Request, &[event])
                .map_err(system("asking for removal requests")),
            // UIO's descriptor reports an error instead.
            Function::Uio { .. } => Ok(()),
        }
    }

    /// Turns off the function's interrupts.
    pub(super) fn clear_interrupts(&self) {
        match self {
            Function::Vfio { device, .. } => {
                device.clear_irqs(VfioIrq::MsiX);
                device.clear_irqs(VfioIrq::Request);
            }
            Function::Uio { .. } => {
                let _ = self.set_command(INTX_OFF, 0);
            }
        }
    }

    /// The descriptor that becomes readable at an INTx interrupt.
    pub(super) fn intx(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Function::Vfio { .. } => None,
            Function::Uio { interrupts, .. } => Some(interrupts.as_fd()),
        }
    }

    /// Takes pending INTx interrupts.
    ///
    /// # Errors
    /// The function is gone.
    pub(super) fn take_intx(&self) -> io::Result<()> {
        match self {
            Function::Vfio { .. } => Ok(()),
            Function::Uio { interrupts, .. } => {
                let mut count = [0; 4];
                io::Read::read_exact(&mut &*interrupts, &mut count)
            }
        }
    }

    /// Unmasks the INTx line, masked by the kernel at each interrupt.
    pub(super) fn unmask_intx(&self) -> io::Result<()> {
        match self {
            Function::Vfio { .. } => Ok(()),
            Function::Uio { .. } => self.set_command(0, INTX_OFF),
        }
    }
}

/// Binds an abstract socket address as a lock: only one process at a time can have the address.
fn lock_by_name(address: PciAddress) -> Result<UnixListener, PciError> {
    let name = format!("virtio-ism {address}");
    let bound = SocketAddr::from_abstract_name(&name).and_then(|at| UnixListener::bind_addr(&at));
    bound.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => PciError::InUse,
        _ => PciError::System { what: name, source },
    })
}

/// The pages of a place: offset of the first page, bytes, and the offset of the place in them.
fn in_pages(place: Place) -> Result<(u64, usize, usize), PciError> {
    let page = ism_sys::page_size() as u64;
    let start = place.offset / page * page;
    let end = (place.offset + place.len).next_multiple_of(page);
    match usize::try_from(end - start) {
        Ok(len) => Ok((start, len, (place.offset - start) as usize)),
        Err(_) => Err(PciError::NotMappable { bar: place.bar }),
    }
}

/// Maps a place by the file of its BAR in sysfs.
pub(super) fn map_sysfs(
    directory: &Path,
    place: Place,
) -> Result<(Arc<SharedMem>, usize), PciError> {
    let (start, len, at) = in_pages(place)?;
    let file = open(&directory.join(format!("resource{}", place.bar)))?;
    let mem = SharedMem::from_fd_at(file, start, len).map_err(system("mapping a BAR"))?;
    Ok((mem, at))
}

/// Size of a memory BAR from the lines of `resource`: start, end, flags.
pub(super) fn bar_of_sysfs(directory: &Path, bar: u8) -> u64 {
    let _making = ism_sys::making();
    let text = std::fs::read_to_string(directory.join("resource")).unwrap_or_default();
    text.lines().nth(bar.into()).map_or(0, bar_of_line)
}

fn bar_of_line(line: &str) -> u64 {
    /// Flag: memory, not ports.
    const IS_MEMORY: u64 = 0x200;
    let mut fields = line
        .split_ascii_whitespace()
        .map(|field| u64::from_str_radix(field.trim_start_matches("0x"), 16).ok());
    match (fields.next().flatten(), fields.next().flatten(), fields.next().flatten()) {
        (Some(start), Some(end), Some(flags)) if end > start && flags & IS_MEMORY != 0 => {
            (end - start).saturating_add(1)
        }
        _ => 0,
    }
}

fn open(path: &Path) -> Result<File, PciError> {
    let open = || OpenOptions::new().read(true).write(true).open(path).map(Into::into);
    ism_sys::out_of_the_way(open).map(Into::into).map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) => PciError::InUse,
        _ => PciError::System { what: path.display().to_string(), source },
    })
}

fn system(what: &str) -> impl FnOnce(io::Error) -> PciError {
    let what = what.to_owned();
    move |source| PciError::System { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_bar_is_in_its_line() {
        let of = bar_of_line;
        assert_eq!(of("0x00000000febd4000 0x00000000febd7fff 0x000000000014220c"), 0x4000);
        assert_eq!(of("0x0000000000000000 0x0000000000000000 0x0000000000000000"), 0);
        assert_eq!(of("0x000000000000c040 0x000000000000c07f 0x0000000000040101"), 0, "ports");
        assert_eq!(of(""), 0);
        assert_eq!(of("0x0 x 0x200"), 0);
    }
}
