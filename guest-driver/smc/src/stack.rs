// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options for an SMC stack, shared by several commands.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use guest_driver::{Config, DataPath, Rnics, Stack, statistics};
use smc_core::wire::ids::Eid;
use smc_rendezvous::Mode;
use smc_settings::{Fabric, Place};
use vhost_device_ism::management::{Client, Guest};
use virtio_ism::transport::pci;

use crate::error::CliError;
use crate::paths;

/// Which device to use, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct StackArgs {
    /// The virtio-ism device: a socket, as the daemon listens on it, a PCI device of this virtual
    /// machine, by its address (0000:00:04.0) or "pci" for any that is free, or "none".
    ///
    /// The default is the device of /etc/smc/smc.toml, or else the first that this user may use of:
    /// the pool that a container was given, the pool of the packaged service, and the devices of the
    /// user's own "smc fabric". Where there is none of these but a PCI device ("smc devices" lists
    /// them), it is "pci". Where there is none of these but an RNIC, it is "none". "smc config" shows
    /// which it is.
    #[arg(long, value_name = "DEVICE", env = "SMC_DEVICE")]
    pub(crate) device: Option<PathBuf>,

    /// User EID (enterprise id); repeat it for more. Both ends need one in common
    /// [default: VIRTIO-ISM].
    #[arg(long = "eid", value_name = "EID", env = "SMC_EID", value_delimiter = ',')]
    pub(crate) eids: Vec<String>,

    /// RNIC for SMC-R, such as rxe0 or mlx5_0/1 (its port 1); repeat it for more; "none" for no SMC-R
    /// [default: all RNICs]. SMC-R is used if the two ends have no fabric in common.
    #[arg(long = "rnic", value_name = "NAME", env = "SMC_RNIC", value_delimiter = ',')]
    pub(crate) rnics: Vec<String>,

    /// Physical network of a network interface or RNIC, such as eth0=NET1 or mlx5_0/1=NET1; repeat it
    /// for more. A connection over a listed interface uses an RNIC of the same network. Any other
    /// connection uses an RNIC whose network interface is that of the connection.
    #[arg(long, value_name = "NAME=ID", value_delimiter = ',', value_parser = parse_pnet)]
    pub(crate) pnet: Vec<(String, String)>,

    /// Versions of SMC-R that are offered and accepted.
    #[arg(long, value_enum, value_name = "VERSIONS", default_value_t = Versions::Both)]
    pub(crate) smcr: Versions,

    /// How to find out whether a peer speaks SMC. TCP option 254 needs CAP_BPF and CAP_NET_ADMIN
    /// (see "smc doctor") [default: off; auto for "smc check"].
    #[arg(long, value_enum, value_name = "HOW", env = "SMC_RENDEZVOUS")]
    pub(crate) rendezvous: Option<RendezvousArg>,

    /// Receive buffer (DMB or RMB element) of a connection, bytes: 16K to 1M, a power of two.
    #[arg(long, value_name = "SIZE", default_value = "512K", value_parser = smc_settings::parse_buffer)]
    pub(crate) buffer: usize,

    /// How long a waiting call polls the shared memory before it sleeps, microseconds; 0: it sleeps
    /// at once.
    #[arg(long, value_name = "US", default_value_t = 50)]
    pub(crate) spin_us: u64,

    /// Have connections go on over TCP when their device or last link is gone, if the peer does the
    /// same. This holds between processes and virtual machines of one host, and for SMC-R of release
    /// 2.1; "--outlive-device=false" switches it off.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_value = "true", default_missing_value = "true", action = ArgAction::Set)]
    pub(crate) outlive_device: bool,

    /// Have connections that have left their device stay on TCP when it is there again. SMC-R does so
    /// in any case.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_value = "false", default_missing_value = "true", action = ArgAction::Set)]
    pub(crate) stay_on_tcp: bool,

    /// How bytes travel between the buffers of SMC-D.
    #[arg(long, value_enum, value_name = "PATH", default_value_t = PathArg::Auto)]
    pub(crate) path: PathArg,
}

/// Versions of SMC-R, as an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Versions {
    /// Version 1 (RFC 7609) only.
    V1,
    /// Version 2 only.
    V2,
    /// Version 2, or else version 1.
    Both,
}

/// Time until the message about a device in use.
const IN_USE_NOTICE: Duration = Duration::from_secs(2);
/// How long a device may take to answer before the user is told.
const NO_ANSWER_NOTICE: Duration = Duration::from_secs(4);

/// How bytes travel, as an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PathArg {
    /// Stores into the peer's buffer if both ends can map it, else copies by the device.
    Auto,
    /// Stores into the peer's buffer; the connection is TCP if that is not possible.
    Window,
    /// The device copies (moves).
    Move,
}

impl From<PathArg> for DataPath {
    fn from(path: PathArg) -> DataPath {
        match path {
            PathArg::Auto => DataPath::Auto,
            PathArg::Window => DataPath::Window,
            PathArg::Move => DataPath::Move,
        }
    }
}

/// How to find out whether a peer speaks SMC, as an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RendezvousArg {
    /// Not negotiated: every server is taken to speak SMC; SMC clients are recognised by their first
    /// bytes.
    Off,
    /// By TCP option 254 if this process may use it, else as off.
    Auto,
    /// By TCP option 254; if this process may not use it, all connections are TCP. A server ends a
    /// connection whose client has sent the option and then does not speak SMC.
    Required,
}

impl From<RendezvousArg> for Mode {
    fn from(how: RendezvousArg) -> Mode {
        match how {
            RendezvousArg::Off => Mode::Off,
            RendezvousArg::Auto => Mode::Auto,
            RendezvousArg::Required => Mode::Required,
        }
    }
}

impl StackArgs {
    /// Opens the device, by default the one called `name`.
    ///
    /// # Errors
    /// A wrong EID; a failure to open the device.
    pub(crate) fn open(&self, name: &str) -> Result<Arc<Stack>, CliError> {
        let (config, device) = self.config(name)?;
        open(config, &device)
    }

    /// The configuration of the options, and the device, by default the one called `name`.
    ///
    /// # Errors
    /// A wrong EID; a default directory writable for others.
    pub(crate) fn config(&self, name: &str) -> Result<(Config, PathBuf), CliError> {
        let device = self.device.clone().map_or_else(|| default_device(name), Ok)?;
        let mut config = of_device(&device);
        config.rnics = rnics(&self.rnics);
        config.rendezvous = self.rendezvous.unwrap_or(RendezvousArg::Off).into();
        config.smcr.pnet.clone_from(&self.pnet);
        config.smcr.v1 = self.smcr != Versions::V2;
        config.smcr.v2 = self.smcr != Versions::V1;
        for name in &self.eids {
            let eid = Eid::new(name)
                .map_err(|why| CliError::Eid { name: name.clone(), why: why.to_string() })?;
            config = config.eid(eid);
        }
        config.recv_buffer = self.buffer;
        config.spin = Duration::from_micros(self.spin_us);
        config.path = self.path.into();
        config.outlive_device = self.outlive_device;
        config.return_to_device = !self.stay_on_tcp;
        Ok((config, device))
    }
}

/// The defaults on this device or on "none".
pub(crate) fn of_device(device: &Path) -> Config {
    if is_none(device) { Config::default() } else { Config::new(device) }
}

/// Whether this is "none": no device is to be used.
pub(crate) fn is_none(device: &Path) -> bool {
    device.to_str() == Some("none")
}

/// The RNICs of `--rnic`.
fn rnics(names: &[String]) -> Rnics {
    match names {
        [] => Rnics::Auto,
        [none] if none == "none" => Rnics::None,
        names => Rnics::Names(names.to_vec()),
    }
}

/// The default device: in the first fabric accessible to this user, the socket called `name`, or a
/// pool if the socket is in use or missing; or in a virtual machine any PCI device, or none where
/// there is an RNIC.
///
/// # Errors
/// There is no device at all, and others may write the directory of the user's own fabric.
pub(crate) fn default_device(name: &str) -> Result<PathBuf, CliError> {
    let none = match smc_settings::find_fabric() {
        Ok(found) => return Ok(socket_of(&found, name)),
        Err(none) => none,
    };
    if pci::functions().is_ok_and(|found| !found.is_empty()) {
        return Ok("pci".into());
    }
    if smc_verbs::devices().is_ok_and(|found| !found.is_empty()) {
        return Ok("none".into());
    }
    match none.denied() {
        // The error of opening the pool, and its hint, name the closed part.
        Some(looked) if looked.place != Place::Own => Ok(looked.directory.join(paths::POOL)),
        _ => Ok(paths::directory()?.join(name)),
    }
}

/// The socket of a fabric for the programs with the role `name`.
fn socket_of(found: &Fabric, name: &str) -> PathBuf {
    let named = |name: &str| found.sockets.iter().find(|socket| socket.ends_with(name));
    let own = named(name).filter(|_| found.place == Place::Own);
    let pool = named(paths::POOL).or(found.sockets.first());
    let own = match pool {
        Some(_) => own.filter(|socket| !is_in_use(socket)),
        None => own,
    };
    own.or(pool).cloned().unwrap_or_default()
}

/// Whether a device has a front end, by the answer of the daemon of "smc fabric". A connection
/// would tell, too, but disturb others.
fn is_in_use(socket: &Path) -> bool {
    let guests = paths::directory().ok().and_then(|directory| {
        let mut daemon = Client::connect(directory.join(paths::MANAGEMENT)).ok()?;
        daemon.list().ok()
    });
    let is_it = |guest: &Guest| guest.connected && guest.socket.as_deref() == Some(socket);
    guests.is_some_and(|guests| guests.iter().any(is_it))
}

/// The statistics socket of this process, if the default directory belongs to its user alone.
pub(crate) fn statistics_socket() -> Option<PathBuf> {
    Some(statistics::path_in(&smc_settings::make_statistics_directory()?))
}

/// Opens a stack on one device, and makes the stack visible to "smc stat". Waits for a device in
/// use by another process, as long as the configuration says, with a message. Another message
/// reports an unresponsive device.
///
/// # Errors
/// [`CliError::Device`].
pub(crate) fn open(mut config: Config, device: &Path) -> Result<Arc<Stack>, CliError> {
    config.statistics = statistics_socket();
    let name = device.display();
    let timeout = config.device_timeout;
    config.device_timeout = timeout.min(IN_USE_NOTICE);
    let mut opened = open_aloud(config.clone(), device);
    let in_use = |error: &io::Error| error.kind() == io::ErrorKind::ResourceBusy;
    if timeout > IN_USE_NOTICE && opened.as_ref().is_err_and(in_use) {
        crate::output::note(&format!(
            "smc: waiting for the device {name}: another process uses it (see \"smc stat\"; --device \
             names another one)"
        ));
        config.device_timeout = timeout - IN_USE_NOTICE;
        opened = Stack::open(config);
    }
    opened.map_err(|source| CliError::Device { device: device.into(), source })
}

/// Opens a stack, with a message if the device has not answered for a while.
fn open_aloud(config: Config, device: &Path) -> io::Result<Arc<Stack>> {
    let (done, waiting) = channel::<()>();
    let name = device.display().to_string();
    std::thread::spawn(move || {
        if waiting.recv_timeout(NO_ANSWER_NOTICE) == Err(RecvTimeoutError::Timeout) {
            crate::output::note(&format!("smc: the device {name} does not answer; still waiting"));
        }
    });
    let opened = Stack::open(config);
    drop(done);
    opened
}

/// Reads a name and the id of its physical network.
fn parse_pnet(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, id)) if !name.is_empty() && !id.is_empty() => Ok((name.into(), id.into())),
        _ => Err(format!("{text:?} is not NAME=ID; example: eth0=NET1")),
    }
}

/// Reads a number of bytes with an optional suffix K, M or G (powers of 1024).
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let wrong = || format!("{text:?} is not a size; examples: 100, 64K, 1M, 2G");
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (text.get(..end), 10),
        Some((end, 'm' | 'M')) => (text.get(..end), 20),
        Some((end, 'g' | 'G')) => (text.get(..end), 30),
        _ => (Some(text), 0),
    };
    let number: usize = digits.unwrap_or_default().parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|size| *size > 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_have_a_name_and_an_id() {
        assert_eq!(parse_pnet("a/1=B"), Ok(("a/1".into(), "B".into())));
        for bad in ["", "a", "=B", "a="] {
            assert!(parse_pnet(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_have_suffixes_and_are_not_zero() {
        assert_eq!(parse_size("100"), Ok(100));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("1m"), Ok(1 << 20));
        for bad in ["", "0", "K", "-1", "1X", "99999999999999999999", "99999999999999G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
