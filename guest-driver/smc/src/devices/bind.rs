// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hands devices to user space, and back.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::PciAddress;
use virtio_ism::transport::pci::{self, Function};

use super::ism::driver;
use crate::error::CliError;
use crate::output;

const PCI: &str = "/sys/bus/pci";
const UNSAFE_NOIOMMU: &str = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
/// Huge pages of 2 MiB for each device: 64 MiB, the memory of a stack.
const PAGES_PER_DEVICE: u64 = 32;
/// How long a driver may take to show up, and the files of a device in `/dev`.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A driver of the kernel for access to a device from programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    Vfio,
    Uio,
}

impl Driver {
    fn name(self) -> &'static str {
        match self {
            Driver::Vfio => "vfio-pci",
            Driver::Uio => "uio_pci_generic",
        }
    }

    fn module(self) -> &'static str {
        match self {
            Driver::Vfio => "vfio_pci",
            Driver::Uio => "uio_pci_generic",
        }
    }
}

/// Binds devices (none named: all) to a driver, and sees to huge pages.
pub(super) fn bind(
    which: &[PciAddress],
    to: Driver,
    hugepages: Option<u64>,
) -> Result<(), CliError> {
    let devices = chosen(which)?;
    if devices.is_empty() {
        return output::print("This machine has no virtio-ism PCI device (1af4:106c).\n");
    }
    load(to)?;
    for device in &devices {
        let before = driver(&device.binding).unwrap_or("no driver").to_owned();
        if before == to.name() {
            output::print(&format!("{}: is bound to {before}\n", device.address))?;
            continue;
        }
        let path = directory(device.address);
        write(&path.join("driver_override"), to.name())?;
        release(&path, device.address)?;
        write(&Path::new(PCI).join("drivers_probe"), &device.address.to_string())?;
        wait_for(&path, to)?;
        output::print(&format!("{}: bound to {} (was {before})\n", device.address, to.name()))?;
    }
    reserve(hugepages, devices.len() as u64)
}

/// Gives devices (none named: all) back to the kernel's own drivers.
pub(super) fn unbind(which: &[PciAddress]) -> Result<(), CliError> {
    for device in chosen(which)? {
        let before = driver(&device.binding).unwrap_or("no driver");
        if before != Driver::Vfio.name() && before != Driver::Uio.name() {
            output::print(&format!("{}: was not handed out ({before})\n", device.address))?;
            continue;
        }
        let path = directory(device.address);
        // An empty line takes the override away.
        write(&path.join("driver_override"), "\n")?;
        release(&path, device.address)?;
        // The kernel may have no driver of its own for the device.
        let _ = write(&Path::new(PCI).join("drivers_probe"), &device.address.to_string());
        output::print(&format!("{}: given back by {before}\n", device.address))?;
    }
    Ok(())
}

fn chosen(which: &[PciAddress]) -> Result<Vec<Function>, CliError> {
    let mut found = pci::functions().map_err(CliError::io("cannot list PCI devices"))?;
    if let Some(missing) =
        which.iter().find(|address| !found.iter().any(|device| device.address == **address))
    {
        return Err(CliError::Usage(format!(
            "{missing} is no virtio-ism device of this machine (\"smc devices\" lists them)"
        )));
    }
    found.retain(|device| which.is_empty() || which.contains(&device.address));
    Ok(found)
}

fn directory(address: PciAddress) -> PathBuf {
    Path::new(PCI).join("devices").join(address.to_string())
}

/// Makes sure that the driver is in the kernel and takes devices without IOMMU.
fn load(driver: Driver) -> Result<(), CliError> {
    let there = || Path::new(PCI).join("drivers").join(driver.name()).exists();
    if !there() {
        // With a built-in driver, modprobe may be missing.
        let _ = Command::new("modprobe").arg(driver.module()).status();
    }
    if !there() {
        let other = match driver {
            Driver::Vfio => "; --uio works with uio_pci_generic instead",
            Driver::Uio => "",
        };
        return Err(CliError::Usage(format!(
            "this kernel has no {} (module {}){other}",
            driver.name(),
            driver.module()
        )));
    }
    if driver == Driver::Uio {
        return Ok(());
    }
    match fs::read_to_string(UNSAFE_NOIOMMU) {
        Ok(value) if value.trim() == "Y" => Ok(()),
        Ok(_) => write(Path::new(UNSAFE_NOIOMMU), "Y"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(CliError::Usage(
            "this kernel has no VFIO without IOMMU (CONFIG_VFIO_NOIOMMU); --uio works without"
                .into(),
        )),
        Err(error) => Err(CliError::io(format!("cannot read {UNSAFE_NOIOMMU}"))(error)),
    }
}

/// Takes a device from its current driver.
fn release(device: &Path, address: PciAddress) -> Result<(), CliError> {
    match write(&device.join("driver/unbind"), &address.to_string()) {
        Err(CliError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Waits until the driver has the device and its file is there.
fn wait_for(device: &Path, to: Driver) -> Result<(), CliError> {
    let start = Instant::now();
    let driver = || fs::read_link(device.join("driver"));
    loop {
        if driver().is_ok_and(|link| link.ends_with(to.name())) {
            return Ok(());
        }
        if start.elapsed() > TIMEOUT {
            return Err(CliError::Usage(format!(
                "{} did not take {}; the kernel's log may say why",
                to.name(),
                device.display()
            )));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Makes sure of enough huge pages, and prints their number.
fn reserve(wanted: Option<u64>, devices: u64) -> Result<(), CliError> {
    let Some(have) = number(HUGE_PAGES) else {
        return output::print("huge pages: this kernel has none; programs lock memory instead\n");
    };
    let wanted = wanted.unwrap_or_else(|| {
        let quarter = memory().map_or(u64::MAX, |bytes| bytes / 4 / (2 << 20));
        (devices * PAGES_PER_DEVICE).min(quarter)
    });
    if have < wanted {
        write(Path::new(HUGE_PAGES), &wanted.to_string())?;
    }
    let got = number(HUGE_PAGES).unwrap_or(have);
    let short = if got < wanted {
        format!(" ({wanted} were wanted: memory is short or in pieces)")
    } else {
        String::new()
    };
    output::print(&format!("huge pages: {got} of 2 MiB{short}\n"))
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Memory of the machine, bytes.
fn memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

fn write(path: &Path, value: &str) -> Result<(), CliError> {
    let denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    fs::write(path, value).map_err(|error| {
        let root = if denied(&error) { " (this needs root)" } else { "" };
        CliError::io(format!("cannot write {:?} to {}{root}", value.trim(), path.display()))(error)
    })
}
