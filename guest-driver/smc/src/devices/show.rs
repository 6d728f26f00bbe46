//! Devices as text.

use std::fmt::Write as _;

use super::look::Device;
use crate::error::CliError;
use crate::output;

pub(super) fn print(devices: &[Device], json: bool) -> Result<(), CliError> {
    let text = if json { as_json(devices)? } else { as_text(devices) };
    output::print(&text)
}

fn as_json(devices: &[Device]) -> Result<String, CliError> {
    let text = serde_json::to_string(devices)
        .map_err(|error| CliError::Output(std::io::Error::other(error)))?;
    Ok(text + "\n")
}

fn as_text(devices: &[Device]) -> String {
    if devices.is_empty() {
        return "This machine has no virtio-ism PCI device (1af4:106c).\n".into();
    }
    let mut text = String::new();
    for device in devices {
        paragraph(&mut text, device);
    }
    text
}

fn paragraph(text: &mut String, device: &Device) {
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
    use super::*;

    #[test]
    fn a_machine_without_devices_says_so_and_lists_nothing() {
        assert!(as_text(&[]).contains("no virtio-ism PCI device"));
        assert_eq!(as_json(&[]).unwrap(), "[]\n");
    }

    #[test]
    fn a_measured_device_shows_its_speed_and_why_its_path_was_chosen() {
        let device = Device {
            address: "0000:00:04.0".into(),
            driver: Some("vfio-pci".into()),
            window: Some(64 << 30),
            path: Some("window"),
            why: Some("faster than 500 MiB/s".into()),
            store_rate: Some(2_500_000_000),
            load_rate: Some(2_400_000_000),
            ..Device::default()
        };
        let text = as_text(&[device]);
        for part in ["vfio-pci, free", "64 GiB", "stores 2.50 GB/s", "window: faster"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_device_that_cannot_be_used_says_why() {
        let busy = Device { in_use: true, problem: Some("x".into()), ..Device::default() };
        let unbound = Device { problem: Some("it is bound to".into()), ..Device::default() };
        let text = as_text(&[busy, unbound]);
        assert!(
            text.contains("in use\n") && text.contains("cannot be used: it is bound"),
            "{text}"
        );
        let json = as_json(&[Device { in_use: true, ..Device::default() }]).unwrap();
        assert!(json.contains("\"in_use\":true"), "{json}");
    }
}
