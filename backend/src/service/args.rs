// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Command line of the daemon, by the conventions for vhost-user back-end programs
//! (`--socket-path`, `--fd`, `--print-capabilities`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use virtio_ism_abi::Chid;

use crate::config::{self, Config, ConfigError, FabricSpec, GuestSpec, Socket};
use crate::service::config_reader;
use crate::service::ctl::ControlArgs;

const ABOUT: &str = "Emulates the virtio-ism device (Internal Shared Memory) for virtual machines \
and processes of this host.";

const LONG_ABOUT: &str = "Emulates the virtio-ism device (Internal Shared Memory) for virtual \
machines and processes of this host, over the vhost-user protocol.

Each guest gets a Unix socket of its own, to which its front end connects: QEMU, or a program that \
uses the guest-driver library. Guests on one fabric can let each other write into buffers (DMBs) \
that they register; SMC-D sockets run on top of that. Guests on different fabrics cannot meet.";

const EXAMPLES: &str = "\
Examples:
  Two guests that can reach each other:
    vhost-device-ism --socket-path /run/ism/vm1.sock --socket-path /run/ism/vm2.sock

  The same, with counters and run-time changes on a management socket:
    vhost-device-ism --socket-path /run/ism/vm1.sock --management /run/ism/mgmt.sock
    vhost-device-ism ctl --management /run/ism/mgmt.sock list

  A guest whose QEMU has the upstream 8-region memory table, and memory in a file on a disk:
    vhost-device-ism --socket-path /run/ism/vm3.sock,max-maps=4,allow-any-file

Whoever may connect to a guest's socket is that guest for the daemon. Sockets get mode 0600; put \
them into a directory that only the guest's user can enter.";

/// The rights the daemon drops after its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SandboxMode {
    /// Nothing: any system call, any file.
    Off,
    /// Files by landlock; a system call outside the list fails with EPERM.
    On,
    /// Like on, but a system call outside the list kills the daemon.
    Strict,
}

/// Commands other than the daemon.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Ask a running daemon for its guests, add or remove them, or have it read its file again.
    Ctl(ControlArgs),
}

/// The version, in a package with the commit.
const VERSION: &str = match option_env!("SMC_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// Options of `vhost-device-ism`.
#[derive(Clone, Debug, Parser)]
#[command(name = "vhost-device-ism", version = VERSION, about = ABOUT, long_about = LONG_ABOUT,
          after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// A command other than running the daemon.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Listen on this Unix socket for one guest's front end; repeat it for more guests.
    ///
    /// Settings of this guest follow the path, separated by commas: chid=ff00 (its fabric), name=NAME (in
    /// logs and metrics; default: the file name), max-maps=N (mappings the front end can hold; 4 for QEMU
    /// without this project's device), allow-any-file (accept guest memory in any file: a file with slow
    /// pages makes peers wait), vfio-user (front ends speak vfio-user, as QEMU's vfio-user-pci does, and not
    /// vhost-user), mode=666 (permission bits of the socket), gid=UUID (pin the GID; for tests only, a GID
    /// should never come back).
    ///
    /// devices=N makes the socket a device pool for processes and containers: each connection gets a device
    /// of its own, and a container at most as many as are free for others. Only processes of peer-uid=UID and
    /// peer-gid=GID get devices.
    #[arg(long, short = 's', value_name = "PATH[,KEY=VALUE..]", conflicts_with = "fd")]
    pub socket_path: Vec<String>,

    /// Take this inherited descriptor, a listening Unix socket, instead of creating a socket.
    #[arg(long, value_name = "N")]
    pub fd: Option<i32>,

    /// Print the program's capabilities as JSON, and exit.
    #[arg(long)]
    pub print_capabilities: bool,

    /// Read fabrics, guests and quotas from a TOML file; options come on top. SIGHUP reads the file again.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Fabric of guests without a fabric of their own: four hexadecimal digits, ff00 to fffe [default: ff00].
    ///
    /// Guests reach each other only within a fabric. ffff is a fabric with all members in one operating
    /// system.
    #[arg(long, value_name = "CHID")]
    pub chid: Option<String>,

    /// Listen on this Unix socket for "vhost-device-ism ctl" and other management programs: JSON lines such
    /// as {"op":"list"}, and HTTP "GET /metrics" for Prometheus.
    #[arg(long, value_name = "PATH")]
    pub management: Option<PathBuf>,

    /// Listen on this Unix socket for readers of metrics, without the right to change anything.
    #[arg(long, value_name = "PATH")]
    pub metrics: Option<PathBuf>,

    /// Check options and file, print all mistakes, and exit: 0 without mistakes, else 1.
    #[arg(long)]
    pub check_config: bool,

    /// Size of the shared-memory window of each device: bytes, or with suffix M, G or T; a power
    /// of two [default: 64G].
    ///
    /// The window costs address space of the front end, not memory. In a VM the window becomes a PCI BAR, so
    /// a firmware or a guest with few physical address bits may want less.
    #[arg(long, value_name = "SIZE", value_parser = config::parse_size)]
    pub window_size: Option<u64>,

    /// Number of move queues per device, 1 to 62 [default: 2].
    #[arg(long, value_name = "N")]
    pub move_queues: Option<u16>,

    /// End a device whose rings have all been stopped for so many seconds; 0: never [default: 60].
    ///
    /// A paused VM and a VM reset without notice look alike. Peers of the latter would wait for ever. With a
    /// front end able to report resets (this project's QEMU device), use 0.
    #[arg(long, value_name = "SECONDS")]
    pub stopped_grace: Option<u64>,

    /// How many seconds drivers get to leave an ending device; 0: none [default: 1].
    ///
    /// When the daemon ends or a guest is removed, the daemon tells drivers with support for leaving, and
    /// their connections can go on without the device. The daemon goes on as soon as all have left. A second
    /// SIGTERM ends the daemon at once.
    #[arg(long, value_name = "SECONDS", value_parser = config::parse_seconds)]
    pub leave_timeout: Option<Duration>,

    /// Permission bits of the sockets, octal [default: 600].
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<String>,

    /// How much to log: error, warn, info, debug or trace [default: info]. RUST_LOG gives finer control, and
    /// wins.
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<tracing::Level>,

    /// Rights the daemon drops once its sockets are open.
    #[arg(long, value_enum, default_value_t = SandboxMode::On, value_name = "MODE")]
    pub sandbox: SandboxMode,

    /// Become this user after the start: a name, or numbers as UID:GID. Only as root.
    ///
    /// Without this option, a daemon started as root becomes the user vhost-device-ism if the user exists,
    /// and otherwise stays root, without capabilities. Sockets belong to the user starting the daemon.
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,

    /// The same as --sandbox=off.
    #[arg(long)]
    pub no_sandbox: bool,
}

impl Args {
    /// The requested sandbox mode.
    pub fn sandbox_mode(&self) -> SandboxMode {
        if self.no_sandbox { SandboxMode::Off } else { self.sandbox }
    }

    /// File and options combined and checked.
    ///
    /// # Errors
    /// Every mistake.
    pub fn to_config(&self) -> Result<Config, Vec<ConfigError>> {
        let text =
            self.config.as_deref().map(read_file).transpose().map_err(|wrong| vec![wrong])?;
        let (mut config, mut mistakes) = self.combine(text.as_deref());
        if let Some(fd) = self.fd {
            match inherited(fd) {
                Ok(socket) => {
                    let name = format!("fd{fd}");
                    let chid = self.chid_of_guests(&config);
                    let socket = Socket::Listening(Arc::new(socket));
                    config.guests.push(GuestSpec { chid, socket, ..GuestSpec::new(name) });
                }
                Err(source) => mistakes.push(ConfigError::Fd { fd, source }),
            }
        }
        finish(config, mistakes)
    }

    /// Like [`to_config`](Self::to_config), with another text of the file and without inherited sockets.
    ///
    /// # Errors
    /// Every mistake.
    pub(crate) fn to_config_again(&self, text: &str) -> Result<Config, Vec<ConfigError>> {
        let (config, mistakes) = self.combine(Some(text));
        finish(config, mistakes)
    }

    /// The fabric for sockets among the options without a CHID.
    fn chid_of_guests(&self, config: &Config) -> Chid {
        let chid = self.chid.as_deref().and_then(|chid| config::parse_chid(chid).ok());
        chid.unwrap_or_else(|| config.default_chid())
    }

    fn combine(&self, text: Option<&str>) -> (Config, Vec<ConfigError>) {
        let path = self.config.as_deref().unwrap_or(Path::new(""));
        let (mut config, mut mistakes) = match text {
            Some(text) => Config::from_toml(text, path),
            None => (Config::default(), Vec::new()),
        };
        if let Some(path) = &self.management {
            config.management = Some(path.clone());
        }
        if let Some(path) = &self.metrics {
            config.metrics = Some(path.clone());
        }
        config.window_size = self.window_size.unwrap_or(config.window_size);
        config.move_queues = self.move_queues.unwrap_or(config.move_queues);
        if let Some(seconds) = self.stopped_grace {
            config.stopped_grace = (seconds != 0).then(|| Duration::from_secs(seconds));
        }
        config.leave_timeout = self.leave_timeout.unwrap_or(config.leave_timeout);
        match self.socket_mode.as_deref().map(config::parse_mode) {
            Some(Ok(mode)) => config.socket_mode = mode,
            Some(Err(mistake)) => mistakes.push(mistake),
            None => {}
        }
        match self.chid.as_deref().map(config::parse_chid) {
            Some(Ok(chid)) if text.is_none() => config.fabrics = vec![FabricSpec::new(chid)],
            Some(Err(mistake)) => mistakes.push(mistake),
            _ => {}
        }
        let default_chid = self.chid_of_guests(&config);
        for word in &self.socket_path {
            match GuestSpec::parse(word, default_chid) {
                Ok(spec) => {
                    add_fabric(&mut config, spec.chid, text.is_some());
                    config.guests.push(spec);
                }
                Err(mistake) => mistakes.push(mistake),
            }
        }
        (config, mistakes)
    }
}

fn finish(config: Config, mut mistakes: Vec<ConfigError>) -> Result<Config, Vec<ConfigError>> {
    mistakes.extend(config.mistakes());
    if mistakes.is_empty() { Ok(config) } else { Err(mistakes) }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    let file = config_reader::open(path)
        .map_err(|source| ConfigError::Read { path: path.into(), source })?;
    config::read_text(file.into(), path)
}

/// Without a file, a socket's CHID creates its fabric.
fn add_fabric(config: &mut Config, chid: Chid, from_file: bool) {
    if !from_file && config.fabrics.iter().all(|fabric| fabric.chid != chid) {
        config.fabrics.push(FabricSpec::new(chid));
    }
}

/// Takes over an inherited descriptor by its number.
fn inherited(fd: i32) -> std::io::Result<std::os::fd::OwnedFd> {
    // Through a pidfd, safe for any number: duplicates an open descriptor, or fails.
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    let socket = pidfd_getfd(this, fd, PidfdGetfdFlags::empty())?;
    if !rustix::net::sockopt::socket_acceptconn(&socket)? {
        return Err(std::io::Error::other("is not a listening socket"));
    }
    // Room for one connection. SO_PEERCRED shows clients the user at listen(2). So listen before this process
    // becomes another user.
    rustix::net::listen(&socket, 0)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn config(args: &[&str]) -> Result<Config, Vec<ConfigError>> {
        let args = std::iter::once("vhost-device-ism").chain(args.iter().copied());
        Args::try_parse_from(args).unwrap().to_config()
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn sockets_make_the_fabrics_they_name() {
        let config = config(&["-s", "/a/1.sock", "-s", "/a/2.sock,chid=ff05"]).unwrap();
        let chids: Vec<u16> = config.fabrics.iter().map(|fabric| fabric.chid.0).collect();
        assert_eq!(chids, [0xff00, 0xff05]);
        assert_eq!(config.guests[1].chid.0, 0xff05);
    }

    #[test]
    fn chid_is_the_fabric_of_sockets_that_name_none() {
        let config = config(&["--chid", "ff09", "-s", "/a/1.sock"]).unwrap();
        assert_eq!(config.fabrics.len(), 1);
        assert_eq!(config.guests[0].chid.0, 0xff09);
    }

    #[test]
    fn drivers_get_a_second_to_leave_or_what_is_said() {
        assert_eq!(config(&[]).unwrap().leave_timeout, Duration::from_secs(1));
        let half = config(&["--leave-timeout", "0.5"]).unwrap();
        assert_eq!(half.leave_timeout, Duration::from_millis(500));
    }

    #[test]
    fn zero_grace_is_no_grace() {
        assert_eq!(config(&["--stopped-grace", "0"]).unwrap().stopped_grace, None);
        assert_eq!(config(&[]).unwrap().stopped_grace, Some(Duration::from_secs(60)));
    }

    #[test]
    fn refuses_a_descriptor_that_is_not_a_listening_socket() {
        for number in [0, 9999] {
            let refused = config(&["--fd", &number.to_string()]).unwrap_err();
            assert!(matches!(refused[..], [ConfigError::Fd { fd, .. }] if fd == number));
        }
    }

    #[test]
    fn all_mistakes_of_the_options_are_named() {
        let refused = config(&["--socket-mode", "999", "--chid", "x", "-s", "/a,b", "-s", "/c"]);
        let said: Vec<String> = refused.unwrap_err().iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 3, "{said:?}");
    }
}
