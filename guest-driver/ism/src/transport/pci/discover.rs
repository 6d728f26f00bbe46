// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtio-ism functions of this machine, and the kernel driver of each.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use virtio_ism_abi::VIRTIO_ID_ISM;
use virtio_ism_abi::virtio_pci::{FIRST_DEVICE, VENDOR};

use super::paths::DEVICES;
use super::{PciAddress, PciError};

/// PCI device of ISM devices.
const DEVICE: u16 = FIRST_DEVICE + VIRTIO_ID_ISM as u16;

/// The kernel driver bound to a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// `vfio-pci`, in this group without IOMMU.
    Vfio(u32),
    /// `vfio-pci`, in this group behind an IOMMU.
    VfioIommu(u32),
    /// `vfio-pci`, without a group.
    VfioNoGroup,
    /// `uio_pci_generic`, as this number.
    Uio(u32),
    /// Another driver, or `uio_pci_generic` without a number yet.
    Other(String),
    /// No driver.
    Unbound,
}

/// A virtio-ism function.
#[derive(Clone, Debug)]
pub struct Function {
    /// PCI address of the function.
    pub address: PciAddress,
    /// The bound driver.
    pub binding: Binding,
}

/// The virtio-ism functions, in the order of their addresses.
///
/// # Errors
/// The kernel has PCI but cannot list the functions.
pub fn functions() -> Result<Vec<Function>, io::Error> {
    functions_in(Path::new(DEVICES))
}

fn functions_in(devices: &Path) -> Result<Vec<Function>, io::Error> {
    let entries = match fs::read_dir(devices) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A function can vanish between `read_dir` and the reads of its files.
        let has = |name, number| id(&entry.path(), name).is_ok_and(|found| found == number);
        // First the device: a virtual machine has many functions of the vendor.
        if has("device", DEVICE) && has("vendor", VENDOR) {
            found.push(Function { address, binding: binding(&entry.path()) });
        }
    }
    found.sort_by_key(|function| function.address);
    Ok(found)
}

/// The function at an address.
pub(super) fn function(address: PciAddress) -> Result<Function, PciError> {
    let path = directory(address);
    let id = |name| id(&path, name).map_err(|_| PciError::Absent);
    let (vendor, device) = (id("vendor")?, id("device")?);
    if (vendor, device) != (VENDOR, DEVICE) {
        return Err(PciError::OtherDevice { vendor, device });
    }
    Ok(Function { address, binding: binding(&path) })
}

/// The directory of a function in sysfs.
pub(super) fn directory(address: PciAddress) -> PathBuf {
    Path::new(DEVICES).join(address.to_string())
}

/// The number in a file of a function, by one read(2): each `smc run` without a fabric looks at all
/// functions.
fn id(function: &Path, name: &str) -> io::Result<u16> {
    let _making = ism_sys::making();
    let mut text = [0; 16];
    let read = fs::File::open(function.join(name))?.read(&mut text)?;
    let text = text.get(..read).and_then(|text| std::str::from_utf8(text).ok());
    let number = text.map(|text| u16::from_str_radix(text.trim().trim_start_matches("0x"), 16));
    number.and_then(Result::ok).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

fn binding(function: &Path) -> Binding {
    let _making = ism_sys::making();
    let Some(driver) = link_name(&function.join("driver")) else { return Binding::Unbound };
    match driver.as_str() {
        "vfio-pci" => {
            let group = link_name(&function.join("iommu_group")).and_then(|n| n.parse().ok());
            let Some(group) = group else { return Binding::VfioNoGroup };
            let kind = fs::read_to_string(function.join("iommu_group/name"));
            match kind {
                Ok(name) if name.trim() == "vfio-noiommu" => Binding::Vfio(group),
                _ => Binding::VfioIommu(group),
            }
        }
        "uio_pci_generic" => match uio_number(&function.join("uio")) {
            Some(number) => Binding::Uio(number),
            None => Binding::Other(driver),
        },
        _ => Binding::Other(driver),
    }
}

fn uio_number(directory: &Path) -> Option<u32> {
    let entries = fs::read_dir(directory).ok()?;
    entries
        .flatten()
        .find_map(|entry| entry.file_name().to_str()?.strip_prefix("uio")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_test_support::TestDir;
    use std::os::unix::fs::symlink;

    /// A directory like `/sys/bus/pci/devices`, removed when dropped.
    struct Tree(TestDir);

    impl Tree {
        fn new(_name: &str) -> Tree {
            Tree(TestDir::new())
        }
        fn add(&self, address: &str, device: &str) -> PathBuf {
            let path = self.0.join(address);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("vendor"), "0x1af4\n").unwrap();
            fs::write(path.join("device"), device).unwrap();
            path
        }
    }

    #[test]
    fn only_ism_functions_are_listed_with_their_drivers() {
        let tree = Tree::new("discover");
        tree.add("0000:00:02.0", "0x1041\n");
        let unbound = tree.add("0000:00:09.0", "0x106c\n");
        let virtio = tree.add("0000:00:03.0", "0x106c\n");
        symlink("../drivers/virtio-pci", virtio.join("driver")).unwrap();
        let vfio = tree.add("0000:00:04.0", "0x106c\n");
        symlink("../drivers/vfio-pci", vfio.join("driver")).unwrap();
        let group = tree.0.join("7");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("name"), "vfio-noiommu\n").unwrap();
        symlink(&group, vfio.join("iommu_group")).unwrap();
        let uio = tree.add("0000:00:05.0", "0x106c\n");
        symlink("../drivers/uio_pci_generic", uio.join("driver")).unwrap();
        fs::create_dir_all(uio.join("uio/uio3")).unwrap();
        let found = functions_in(&tree.0).unwrap();
        let bindings: Vec<_> = found.into_iter().map(|f| (f.address.device, f.binding)).collect();
        assert_eq!(
            bindings,
            [
                (3, Binding::Other("virtio-pci".into())),
                (4, Binding::Vfio(7)),
                (5, Binding::Uio(3)),
                (9, Binding::Unbound),
            ]
        );
        fs::remove_file(group.join("name")).unwrap();
        assert_eq!(binding(&vfio), Binding::VfioIommu(7));
        fs::remove_file(vfio.join("iommu_group")).unwrap();
        assert_eq!(binding(&vfio), Binding::VfioNoGroup);
        drop(unbound);
    }

    #[test]
    fn a_machine_without_pci_has_none() {
        assert!(functions_in(Path::new("/nonexistent")).unwrap().is_empty());
    }
}
