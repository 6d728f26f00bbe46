// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtio-ism devices of this machine, and how fast their windows are.

use std::sync::Arc;

use guest_driver::PciAddress;
use serde::Serialize;
use virtio_ism::transport::RunningDevice;
use virtio_ism::transport::SetupOptions;
use virtio_ism::transport::pci::{self, Binding, PciError};
use virtio_ism::{IsmDevice, IsmError, OpenOptions, SLOWEST_WINDOW};
use virtio_ism_abi::Status;
use virtio_ism_abi::config::{Config, Features};

use crate::error::CliError;

/// Memory for a device opened only for a measurement, bytes.
const PROBE_MEMORY: u64 = 8 << 20;

/// A device as shown by `--json`. Unknown values are null.
#[derive(Debug, Default, Serialize)]
pub(super) struct DeviceReport {
    pub(super) address: String,
    /// The driver of the kernel.
    pub(super) driver: Option<String>,
    pub(super) in_use: bool,
    /// Why the device cannot be used now.
    pub(super) problem: Option<String>,
    pub(super) chid: Option<String>,
    pub(super) gid: Option<String>,
    pub(super) features: Option<Vec<String>>,
    pub(super) interrupts: Option<String>,
    /// Bytes.
    pub(super) window: Option<u64>,
    /// `window` or `move`.
    pub(super) path: Option<&'static str>,
    /// The reason for `path`.
    pub(super) why: Option<String>,
    /// Bytes per second.
    pub(super) store_rate: Option<u64>,
    /// Bytes per second.
    pub(super) load_rate: Option<u64>,
}

/// Inspects every device.
pub(super) fn all() -> Result<Vec<DeviceReport>, CliError> {
    let found = pci::functions().map_err(CliError::io("cannot list PCI devices"))?;
    Ok(found.into_iter().map(|function| inspect(function.address, &function.binding)).collect())
}

fn inspect(address: PciAddress, binding: &Binding) -> DeviceReport {
    let mut device = DeviceReport {
        address: address.to_string(),
        driver: driver(binding).map(Into::into),
        ..DeviceReport::default()
    };
    let wanted =
        SetupOptions { move_queues: 1, guest_memory: PROBE_MEMORY, leaves: false, owner: None };
    match pci::open(address, wanted) {
        Ok((running, interrupts)) => {
            device.interrupts = Some(interrupts.to_string());
            measure(&mut device, running);
        }
        Err(source) => {
            device.in_use = matches!(source, PciError::InUse);
            device.problem = Some(source.to_string());
            if let Ok(config) = pci::peek(address) {
                describe(&mut device, &config);
            }
        }
    }
    device
}

pub(super) fn driver(binding: &Binding) -> Option<&str> {
    match binding {
        Binding::Vfio(_) | Binding::VfioIommu(_) | Binding::VfioNoGroup => Some("vfio-pci"),
        Binding::Uio(_) => Some("uio_pci_generic"),
        Binding::Other(driver) => Some(driver),
        Binding::Unbound => None,
    }
}

fn describe(device: &mut DeviceReport, config: &Config) {
    device.chid = Some(format!("{:04x}", config.chid.get()));
    device.gid = Some(config.gid.to_string());
    device.window = Some(config.window_size.get());
}

fn measure(device: &mut DeviceReport, running: Arc<RunningDevice>) {
    describe(device, running.config());
    device.window = Some(running.window_size());
    let features = running.features();
    device.features = Some(features.iter_names().map(|(name, _)| name.to_lowercase()).collect());
    let ism = match IsmDevice::open_on(running, &OpenOptions::new("pci")) {
        Ok(ism) => ism,
        Err(error) => {
            device.problem = Some(error.to_string());
            return;
        }
    };
    device.gid = Some(ism.gid().to_string());
    let (path, why) = if !features.contains(Features::WINDOW) {
        ("move", "the front end cannot map".into())
    } else {
        match ism.measure_window() {
            Ok(speed) => {
                (device.store_rate, device.load_rate) = (Some(speed.store), Some(speed.load));
                let least = SLOWEST_WINDOW >> 20;
                match speed.is_fast() {
                    true => ("window", format!("faster than {least} MiB/s")),
                    false => ("move", format!("the window is slower than {least} MiB/s")),
                }
            }
            // A window of areas has an area for each peer, and none for this device alone.
            Err(IsmError::Refused { status: Status::Enospc, .. }) => {
                ("window", "a part for each peer, not measured".into())
            }
            Err(error) => ("move", format!("the window cannot be used: {error}")),
        }
    };
    (device.path, device.why) = (Some(path), Some(why));
}
