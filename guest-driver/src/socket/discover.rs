// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A stack on the fabric of the machine, found as by all programs of the project.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use smc_core::wire::ids::Eid;
use smc_settings::{Settings, device_sockets, find_fabric};
use virtio_ism::transport::DeviceAddress;

use super::config::Config;
use super::stack::Stack;

/// Variable naming the device of a process, before the settings of the machine.
const VARIABLE: &str = "SMC_DEVICE";
/// The name of no device.
const NONE: &str = "none";

impl Stack {
    /// Opens the device of this machine for this user, as `smc config` shows: the device of SMC_DEVICE, or of
    /// `/etc/smc/smc.toml`, or else the first free one of the first fabric (the pool of a container, of the
    /// packaged service, or of the user's own `smc fabric`). The other settings of the file count, too. The
    /// device `none` leaves all connections to TCP, unless there is an RNIC.
    ///
    /// # Errors
    /// The file of settings has a mistake, no fabric is open to this user, or as [`Stack::open`]. A program
    /// that goes on over TCP opens a stack with [`Config::default`] instead.
    pub fn discover() -> io::Result<Arc<Stack>> {
        let settings = Settings::load().map_err(io::Error::other)?;
        let named = match std::env::var_os(VARIABLE).filter(|device| !device.is_empty()) {
            Some(device) => vec![DeviceAddress::from(Path::new(&device))],
            None => settings.device.iter().map(DeviceAddress::from).collect(),
        };
        let addresses = match named.is_empty() {
            true => {
                let fabric = find_fabric();
                let fabric =
                    fabric.map_err(|none| io::Error::new(io::ErrorKind::NotFound, none))?;
                fabric.sockets.into_iter().map(DeviceAddress::from).collect()
            }
            false => expanded(named)?,
        };
        first_free(addresses, &config(&settings)?)
    }
}

/// A directory stands for the sockets in it, and `none` for no device.
fn expanded(named: Vec<DeviceAddress>) -> io::Result<Vec<DeviceAddress>> {
    let mut all = Vec::new();
    for address in named {
        match &address {
            DeviceAddress::Socket(path) if path.as_os_str() == NONE => {}
            DeviceAddress::Socket(path) if path.is_dir() => {
                all.extend(device_sockets(path)?.into_iter().map(DeviceAddress::from));
            }
            _ => all.push(address),
        }
    }
    Ok(all)
}

/// The settings of the machine as a configuration, without a device.
fn config(settings: &Settings) -> io::Result<Config> {
    let mut config = Config::default();
    if !settings.eids.is_empty() {
        let eids = settings.eids.iter().map(|eid| Eid::new(eid).map_err(io::Error::other));
        config.eids = eids.collect::<io::Result<_>>()?;
    }
    config.recv_buffer = settings.buffer.unwrap_or(config.recv_buffer);
    config.spin = settings.spin_us.map_or(config.spin, Duration::from_micros);
    config.outlive_device = settings.outlive_device.unwrap_or(config.outlive_device);
    config.return_to_device = settings.stay_on_tcp.map_or(config.return_to_device, |stay| !stay);
    Ok(config)
}

/// Opens the first free device; the last one is waited for.
fn first_free(mut addresses: Vec<DeviceAddress>, config: &Config) -> io::Result<Arc<Stack>> {
    let Some(last) = addresses.pop() else { return Stack::open(config.clone()) };
    for address in addresses {
        let devices = vec![address];
        let opened =
            Stack::open(Config { devices, device_timeout: Duration::ZERO, ..config.clone() });
        match opened {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
            opened => return opened,
        }
    }
    Stack::open(Config { devices: vec![last], ..config.clone() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::SmcStream;

    #[test]
    fn settings_become_a_configuration() {
        let mut settings = Settings::default();
        assert_eq!(config(&settings).unwrap().eids, Config::default().eids);
        settings.eids = vec!["FLEET".into()];
        settings.stay_on_tcp = Some(true);
        let made = config(&settings).unwrap();
        assert_eq!((made.eids, made.return_to_device), (vec![Eid::new("FLEET").unwrap()], false));
        settings.eids = vec!["no eid".into()];
        assert!(config(&settings).is_err());
    }

    #[test]
    fn no_device_is_a_device_too_and_its_connections_become_tcp_streams() {
        assert_eq!(expanded(vec!["none".into()]).unwrap(), []);
        let stack = first_free(Vec::new(), &Config::default()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = SmcStream::connect(&stack, listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let mut tcp = TcpStream::try_from(stream).unwrap();
        tcp.write_all(b"plain").unwrap();
        drop(tcp);
        let mut came = String::new();
        server.read_to_string(&mut came).unwrap();
        assert_eq!(came, "plain");
    }
}
