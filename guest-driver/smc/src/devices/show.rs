// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices as text.

use std::fmt::Write as _;

use serde::Serialize;

use super::ism::DeviceReport;
use super::rnics::RnicReport;
use crate::error::CliError;
use crate::kernel::{self, Device};
use crate::output;

/// Prints the list of devices as JSON.
pub(super) fn json(devices: &[DeviceReport]) -> Result<(), CliError> {
    output::print(&output::json(&devices)?)
}

/// Prints devices and RNICs as one JSON object.
pub(super) fn json_of_both(
    devices: &[DeviceReport],
    rnics: &Result<Vec<RnicReport>, String>,
) -> Result<(), CliError> {
    let lists = DeviceLists {
        ism: devices,
        kernel: &kernel::devices().unwrap_or_default(),
        rnics: rnics.as_deref().unwrap_or_default(),
        no_rdma: rnics.as_ref().err(),
    };
    output::print(&output::json(&lists)?)
}

/// Prints everything for people.
pub(super) fn text(
    devices: Option<&[DeviceReport]>,
    rnics: &Result<Vec<RnicReport>, String>,
) -> Result<(), CliError> {
    let mut text = devices.map(as_text).unwrap_or_default();
    if devices.is_some() {
        text += &of_kernel_as_text(
            &kernel::devices().map_err(CliError::io("cannot list the devices of the kernel"))?,
        );
    }
    text += &rnics_as_text(rnics);
    output::print(&text)
}

/// The lists of the command.
#[derive(Serialize)]
struct DeviceLists<'a> {
    ism: &'a [DeviceReport],
    /// Devices of the kernel's AF_SMC.
    kernel: &'a [Device],
    rnics: &'a [RnicReport],
    /// Why there are no RNICs.
    no_rdma: Option<&'a String>,
}

fn as_text(devices: &[DeviceReport]) -> String {
    if devices.is_empty() {
        return "This machine has no virtio-ism PCI device (1af4:106c), as virtual machines have. \
                \"smc stat fabric\" lists the devices that a daemon gives to processes of this host.\n"
            .into();
    }
    let mut text = String::new();
    for device in devices {
        paragraph(&mut text, device);
    }
    text
}

fn of_kernel_as_text(devices: &[Device]) -> String {
    let paragraph = |device: &Device| {
        let Device { name, chid, gid } = device;
        format!(
            "{name}  the kernel's, for AF_SMC\n  fabric      CHID {chid}\n  GID         {gid}\n"
        )
    };
    devices.iter().map(paragraph).collect()
}

fn rnics_as_text(rnics: &Result<Vec<RnicReport>, String>) -> String {
    let rnics = match rnics {
        Ok(rnics) => rnics,
        Err(why) => return format!("This machine has no RNIC that can be used: {why}.\n"),
    };
    let mut text = String::new();
    for rnic in rnics {
        let state = match &rnic.problem {
            None => "can be used".into(),
            Some(problem) => format!("cannot be used: {problem}"),
        };
        let _ = writeln!(text, "{}/{}  {state}", rnic.name, rnic.port);
        let mut line = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                let _ = writeln!(text, "  {name:<11} {value}");
            }
        };
        line("interface", rnic.netdev.clone());
        line("port", rnic.state.map(Into::into));
        line("MTU", rnic.mtu.map(|mtu| mtu.to_string()));
        let versions = match (rnic.smcr_v1, rnic.smcr_v2) {
            (true, true) => "v1, v2",
            (true, false) => "v1 (v2 needs a GID of RoCE v2)",
            (false, true) => "v2",
            (false, false) => "no",
        };
        line("SMC-R", Some(versions.into()));
        for gid in &rnic.gids {
            let netdev = gid.netdev.as_deref().unwrap_or("another network namespace");
            line("GID", Some(format!("{}: {} (RoCE {}, {netdev})", gid.index, gid.gid, gid.roce)));
        }
    }
    text
}

fn paragraph(text: &mut String, device: &DeviceReport) {
    let driver = device.driver.as_deref().unwrap_or("no driver");
    let state = match &device.problem {
        None => "free".into(),
        Some(_) if device.in_use => "in use".into(),
        Some(problem) => format!("cannot be used: {problem}"),
    };
    let _ = writeln!(text, "{}  {driver}, {state}", device.address);
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let _ = writeln!(text, "  {name:<11} {value}");
        }
    };
    let fabric = device.chid.as_ref().map(|chid| format!("CHID {chid}"));
    line("fabric", fabric);
    line("GID", device.gid.clone());
    line("features", device.features.as_ref().map(|names| names.join(" ")));
    line("interrupts", device.interrupts.clone());
    line(
        "window",
        device.window.map(|window| match window {
            0 => "none".into(),
            bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
            bytes => format!("{} MiB", bytes >> 20),
        }),
    );
    if let (Some(store), Some(load)) = (device.store_rate, device.load_rate) {
        let gigabytes = |rate: u64| rate as f64 / 1e9;
        let speed =
            format!("stores {:.2} GB/s, loads {:.2} GB/s", gigabytes(store), gigabytes(load));
        line("measured", Some(speed));
    }
    if let (Some(path), Some(why)) = (device.path, &device.why) {
        line("data path", Some(format!("{path}: {why}")));
    }
}

#[cfg(test)]
mod tests {
    use super::super::rnics::GidReport;
    use super::*;

    #[test]
    fn a_machine_without_devices_says_so_and_lists_nothing() {
        assert!(as_text(&[]).contains("no virtio-ism PCI device"));
        assert_eq!(output::json(&Vec::<DeviceReport>::new()).unwrap(), "[]\n");
    }

    #[test]
    fn a_device_of_the_kernel_is_named_with_its_fabric() {
        assert_eq!(of_kernel_as_text(&[]), "");
        let (name, chid, gid) = ("ism-virtio0".into(), "ff00".into(), "1-2".into());
        let text = of_kernel_as_text(&[Device { name, chid, gid }]);
        assert!(text.starts_with("ism-virtio0  the kernel's"), "{text}");
        assert!(text.contains("CHID ff00") && text.contains("1-2"), "{text}");
    }

    #[test]
    fn a_measured_device_shows_its_speed_and_why_its_path_was_chosen() {
        let device = DeviceReport {
            address: "0000:00:04.0".into(),
            driver: Some("vfio-pci".into()),
            window: Some(64 << 30),
            path: Some("window"),
            why: Some("faster than 500 MiB/s".into()),
            store_rate: Some(2_500_000_000),
            load_rate: Some(2_400_000_000),
            ..DeviceReport::default()
        };
        let text = as_text(&[device]);
        for part in ["vfio-pci, free", "64 GiB", "stores 2.50 GB/s", "window: faster"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_device_that_cannot_be_used_says_why() {
        let busy =
            DeviceReport { in_use: true, problem: Some("x".into()), ..DeviceReport::default() };
        let unbound =
            DeviceReport { problem: Some("it is bound to".into()), ..DeviceReport::default() };
        let text = as_text(&[busy, unbound]);
        assert!(
            text.contains("in use\n") && text.contains("cannot be used: it is bound"),
            "{text}"
        );
        let json =
            output::json(&[DeviceReport { in_use: true, ..DeviceReport::default() }]).unwrap();
        assert!(json.contains("\"in_use\":true"), "{json}");
    }

    #[test]
    fn rnics_are_listed_with_their_gids_or_the_reason_why_there_are_none() {
        let text = rnics_as_text(&Err("no libibverbs".into()));
        assert!(text.contains("no RNIC that can be used: no libibverbs."), "{text}");
        let gid = GidReport {
            index: 1,
            gid: "192.0.2.7".into(),
            roce: "v2",
            netdev: Some("eth0".into()),
        };
        let rnic = RnicReport {
            name: "rxe0".into(),
            port: 1,
            gids: vec![gid],
            smcr_v1: true,
            smcr_v2: true,
            ..RnicReport::default()
        };
        let text = rnics_as_text(&Ok(vec![rnic]));
        assert!(text.starts_with("rxe0/1  can be used\n"), "{text}");
        assert!(text.contains("1: 192.0.2.7 (RoCE v2, eth0)"), "{text}");
        assert!(text.contains("v1, v2"), "{text}");
    }
}
