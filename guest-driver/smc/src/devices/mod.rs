// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc devices`: the virtio-ism devices and RNICs of this (virtual) machine.

use clap::Args;
use guest_driver::PciAddress;

use crate::error::CliError;

mod bind;
mod ism;
mod rnics;
mod show;

/// Help of `smc devices`.
pub(crate) const LONG_ABOUT: &str = "\
Lists the virtio-ism PCI devices of this machine: PCI address, driver, fabric (CHID), GID and
features, whether bytes travel through its window or by moves and why, and the measured speed of the
window. Then the devices over which the kernel's AF_SMC runs SMC-D, and the RNICs: network interface, state, MTU, GIDs, and whether SMC-R can use them.

A free device is set up for a moment to be measured, which gives it a new GID. A device that is in
use is listed without a measurement.

Programs drive a device from user space. \"smc devices --bind\" makes that possible; it needs root,
once after boot. It
  - lets VFIO hand out devices without an IOMMU (the device has none), which the kernel calls unsafe:
    a program that has the device could have it write any memory of this machine;
  - binds each device to vfio-pci (with --uio: to uio_pci_generic, whose interrupts cost more);
  - reserves huge pages for queues and buffers.
Doing it again changes nothing. \"smc devices --unbind\" gives the devices back to the kernel.";

/// Options of `smc devices`.
#[derive(Args, Debug)]
pub(crate) struct DevicesArgs {
    /// Print JSON: a list of virtio-ism devices.
    #[arg(long)]
    json: bool,

    /// With --json: an object with lists instead, "ism", "kernel" and "rnics". Without: RNICs only.
    #[arg(long, conflicts_with_all = ["bind", "unbind"])]
    rdma: bool,

    /// Make devices usable by programs: all, or those at these addresses.
    #[arg(long, value_name = "ADDR", num_args = 0.., conflicts_with_all = ["unbind", "json"])]
    bind: Option<Vec<PciAddress>>,

    /// Give devices back to the kernel: all, or those at these addresses.
    #[arg(long, value_name = "ADDR", num_args = 0.., conflicts_with = "json")]
    unbind: Option<Vec<PciAddress>>,

    /// With --bind: use uio_pci_generic, for kernels without VFIO.
    #[arg(long, requires = "bind")]
    uio: bool,

    /// With --bind: see that there are so many huge pages of 2 MiB [default: 32 for each device,
    /// at most a quarter of memory].
    #[arg(long, value_name = "N", requires = "bind")]
    hugepages: Option<u64>,
}

/// Lists, binds or unbinds devices.
///
/// # Errors
/// The kernel refuses. An empty list is no error.
pub(crate) fn run(args: &DevicesArgs) -> Result<(), CliError> {
    if let Some(which) = &args.bind {
        let driver = if args.uio { bind::Driver::Uio } else { bind::Driver::Vfio };
        return bind::bind(which, driver, args.hugepages);
    }
    if let Some(which) = &args.unbind {
        return bind::unbind(which);
    }
    match (args.json, args.rdma) {
        (true, false) => show::json(&ism::all()?),
        (true, true) => show::json_of_both(&ism::all()?, &rnics::all()),
        (false, false) => show::text(Some(&ism::all()?), &rnics::all()),
        (false, true) => show::text(None, &rnics::all()),
    }
}
