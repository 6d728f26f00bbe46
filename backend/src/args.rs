//! Command line of the daemon, by the conventions for vhost-user back-end programs
//! (`--socket-path`, `--fd`, `--print-capabilities`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use virtio_ism_abi::Chid;

use crate::config::{self, Config, ConfigError, FabricSpec, GuestSpec, Socket};

const ABOUT: &str = "Emulates the virtio-ism device (Internal Shared Memory) for virtual machines \
and processes of this host.";

const LONG_ABOUT: &str = "\
Emulates the virtio-ism device (Internal Shared Memory) for virtual machines and processes of this
host, over the vhost-user protocol.

Each guest gets a Unix socket of its own, to which its front end connects: QEMU, or a program that
uses the guest-driver library. Guests on one fabric can let each other write into buffers (DMBs)
that they register; SMC-D sockets run on top of that. Guests on different fabrics cannot meet.";

const EXAMPLES: &str = "\
Examples:
  Two guests that can reach each other:
    vhost-device-ism --socket-path /run/ism/vm1.sock --socket-path /run/ism/vm2.sock

  The same, with counters and run-time changes on a management socket:
    vhost-device-ism --socket-path /run/ism/vm1.sock --management /run/ism/mgmt.sock
    echo '{\"op\":\"list\"}' | nc -NU /run/ism/mgmt.sock

  A guest whose QEMU has the upstream 8-region memory table, and memory in a file on a disk:
    vhost-device-ism --socket-path /run/ism/vm3.sock,max-maps=4,allow-any-file

Whoever may connect to a guest's socket is that guest for the daemon. Sockets get mode 0600; put
them into a directory that only the guest's user can enter.";

/// Which rights the daemon drops after its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SandboxMode {
    /// Nothing: any system call, any file.
    Off,
    /// Files by landlock; a system call outside the list fails with EPERM.
    On,
    /// As "on", but a system call outside the list kills the daemon.
    Strict,
}

/// Options of `vhost-device-ism`.
#[derive(Debug, Parser)]
#[command(name = "vhost-device-ism", version, about = ABOUT, long_about = LONG_ABOUT,
          after_long_help = EXAMPLES)]
pub struct Args {
    /// Listen on this Unix socket for one guest's front end; repeat it for more guests.
    ///
    /// Settings of this guest follow the path, separated by commas: chid=ff00 (its fabric),
    /// name=NAME (in logs and metrics; default: the file name), max-maps=N (mappings the front end
    /// can hold; 4 for QEMU without this project's device), allow-any-file (accept guest memory
    /// in any file: one whose pages do not come makes peers wait), mode=666 (permission bits of the
    /// socket), gid=UUID (pin the GID; for tests only, a GID should never come back).
    ///
    /// devices=N makes it a device pool for processes and containers: each connection gets a device
    /// of its own, and a container at most as many as are free for others. peer-uid=UID and
    /// peer-gid=GID say whose processes get any.
    #[arg(long, short = 's', value_name = "PATH[,KEY=VALUE..]", conflicts_with = "fd")]
    pub socket_path: Vec<String>,

    /// Take this inherited descriptor, a listening Unix socket, instead of creating a socket.
    #[arg(long, value_name = "N")]
    pub fd: Option<i32>,

    /// Print what this program is as JSON, and exit.
    #[arg(long)]
    pub print_capabilities: bool,

    /// Read fabrics, guests and quotas from a TOML file; options come on top.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Fabric of guests that name none: four hexadecimal digits, ff00 to fffe [default: ff00].
    ///
    /// Guests reach each other only within a fabric. ffff says that all its members are one
    /// operating system.
    #[arg(long, value_name = "CHID")]
    pub chid: Option<String>,

    /// Listen on this Unix socket for management: JSON lines such as {"op":"list"}, and HTTP
    /// "GET /metrics" for Prometheus.
    #[arg(long, value_name = "PATH")]
    pub management: Option<PathBuf>,

    /// Size of the shared-memory window of each device: bytes, or with suffix M, G or T; a power
    /// of two [default: 64G].
    ///
    /// It costs address space of the front end, not memory. In a VM it becomes a PCI BAR, so a
    /// firmware or a guest with few physical address bits may want less.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub window_size: Option<u64>,

    /// Number of move queues per device, 1 to 62 [default: 2].
    #[arg(long, value_name = "N")]
    pub move_queues: Option<u16>,

    /// End a device whose rings have all been stopped for so many seconds; 0: never [default: 60].
    ///
    /// A paused VM and a VM that was reset without notice look alike. Peers of the latter would
    /// wait for ever. With a front end that reports resets (this project's QEMU device), use 0.
    #[arg(long, value_name = "SECONDS")]
    pub stopped_grace: Option<u64>,

    /// Permission bits of the sockets, octal [default: 600].
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<String>,

    /// How much to log: error, warn, info, debug or trace [default: info]. RUST_LOG says it in
    /// detail, and wins.
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<tracing::Level>,

    /// Rights that the daemon drops once its sockets are open.
    #[arg(long, value_enum, default_value_t = SandboxMode::On, value_name = "MODE")]
    pub sandbox: SandboxMode,

    /// Become this user after the start: a name, or numbers as UID:GID. Only as root.
    ///
    /// Without it, a daemon that is started as root becomes the user vhost-device-ism if there is
    /// one, and otherwise stays root, without capabilities. Sockets belong to the user who starts
    /// the daemon.
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,

    /// The same as --sandbox=off.
    #[arg(long)]
    pub no_sandbox: bool,
}

/// Reads a size with an optional suffix K, M, G or T (powers of 1024).
fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; examples: 4G, 65536M");
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        Some((end, 't' | 'T')) => (&text[..end], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

impl Args {
    /// The sandbox that was asked for.
    pub fn sandbox_mode(&self) -> SandboxMode {
        if self.no_sandbox { SandboxMode::Off } else { self.sandbox }
    }

    /// File and options together, checked.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn to_config(&self) -> Result<Config, ConfigError> {
        let mut config = match &self.config {
            Some(path) => Config::from_file(path)?,
            None => Config::default(),
        };
        if let Some(path) = &self.management {
            config.management = Some(path.clone());
        }
        if let Some(size) = self.window_size {
            config.window_size = size;
        }
        if let Some(queues) = self.move_queues {
            config.move_queues = queues;
        }
        if let Some(seconds) = self.stopped_grace {
            config.stopped_grace = (seconds != 0).then(|| Duration::from_secs(seconds));
        }
        if let Some(mode) = &self.socket_mode {
            config.socket_mode = config::parse_mode(mode)?;
        }
        let chid = self.chid.as_deref().map(config::parse_chid).transpose()?;
        let default_chid = chid.unwrap_or_else(|| config.default_chid());
        if let Some(chid) = chid
            && self.config.is_none()
        {
            config.fabrics = vec![FabricSpec::new(chid)];
        }
        for text in &self.socket_path {
            let spec = GuestSpec::parse(text, default_chid)?;
            add_fabric(&mut config, spec.chid, self.config.is_some());
            config.guests.push(spec);
        }
        if let Some(fd) = self.fd {
            let socket = inherited(fd).map_err(|source| ConfigError::Fd { fd, source })?;
            let mut spec = GuestSpec { chid: default_chid, ..GuestSpec::new(format!("fd{fd}")) };
            spec.socket = Socket::Listening(Arc::new(socket));
            config.guests.push(spec);
        }
        config.check()?;
        Ok(config)
    }
}

/// Without a file, a fabric exists because a socket names it.
fn add_fabric(config: &mut Config, chid: Chid, from_file: bool) {
    if !from_file && config.fabrics.iter().all(|fabric| fabric.chid != chid) {
        config.fabrics.push(FabricSpec::new(chid));
    }
}

/// Takes over an inherited descriptor by its number.
fn inherited(fd: i32) -> std::io::Result<std::os::fd::OwnedFd> {
    // Through a pidfd because that is safe for any number: it duplicates what is there, or fails.
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    let socket = pidfd_getfd(this, fd, PidfdGetfdFlags::empty())?;
    if !rustix::net::sockopt::socket_acceptconn(&socket)? {
        return Err(std::io::Error::other("is not a listening socket"));
    }
    // Room for one connection. Whoever calls this is who listens, to those who connect: so it is
    // done before this process becomes another user.
    rustix::net::listen(&socket, 0)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn config(args: &[&str]) -> Result<Config, ConfigError> {
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
    fn sizes_have_suffixes() {
        assert_eq!(parse_size("64G"), Ok(64 << 30));
        assert_eq!(parse_size("512m"), Ok(512 << 20));
        assert_eq!(parse_size("4096"), Ok(4096));
        for bad in ["", "G", "1X", "-1", "18446744073709551615T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn zero_grace_is_no_grace() {
        assert_eq!(config(&["--stopped-grace", "0"]).unwrap().stopped_grace, None);
        assert_eq!(config(&[]).unwrap().stopped_grace, Some(Duration::from_secs(60)));
    }

    #[test]
    fn refuses_a_descriptor_that_is_not_a_listening_socket() {
        assert!(matches!(config(&["--fd", "0"]), Err(ConfigError::Fd { fd: 0, .. })));
        assert!(matches!(config(&["--fd", "9999"]), Err(ConfigError::Fd { fd: 9999, .. })));
    }
}
