//! What a daemon serves: fabrics, front ends, limits. Built from options, from a TOML file, or in
//! code by a program that starts the daemon in its own process.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;
use virtio_ism_abi::{Chid, Gid};

/// Largest number of move queues: the queues of a thread are a 64-bit mask in the framework, and
/// two queues are control and event.
pub const MAX_MOVE_QUEUES: u16 = 62;
/// Default size of the window, bytes.
pub const DEFAULT_WINDOW: u64 = 64 << 30;
/// Smallest window, bytes: room for the slabs of one pair in both directions.
pub const MIN_WINDOW: u64 = 64 << 20;
/// Largest window, bytes.
pub const MAX_WINDOW: u64 = 1 << 44;
/// Most devices that one socket can hand out.
pub const MAX_POOL: u32 = 4096;
/// Default CHID of a fabric.
pub const DEFAULT_CHID: Chid = Chid::VIRTIO_FIRST;

/// What is wrong with a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML, or has unknown or ill-typed keys.
    #[error("{path}: {source}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// Not a CHID of an emulated device.
    #[error("{0:?} is not a CHID: expected four hexadecimal digits between ff00 and ffff")]
    Chid(String),
    /// Not a GID.
    #[error("{0:?} is not a GID: expected a version 4 UUID")]
    Gid(String),
    /// A socket option that does not exist, lacks its value, or has a wrong one.
    #[error(
        "{0:?}: expected PATH[,gid=UUID][,chid=ff00][,name=NAME][,max-maps=N][,allow-any-file]\
         [,mode=666][,devices=N][,peer-uid=UID][,peer-gid=GID]"
    )]
    SocketOption(String),
    /// A number of devices that a pool cannot have.
    #[error("guest {name:?}: {devices} devices: expected 1 to {MAX_POOL}")]
    Devices {
        /// The guest.
        name: String,
        /// The number.
        devices: u32,
    },
    /// A setting of a guest that contradicts another one.
    #[error("guest {name:?}: {what}")]
    Contradiction {
        /// The guest.
        name: String,
        /// Which settings, and why.
        what: &'static str,
    },
    /// Two guests with one name.
    #[error("two guests are called {0:?}")]
    DuplicateName(String),
    /// Two guests on one socket.
    #[error("two guests share the socket {0}")]
    DuplicateSocket(PathBuf),
    /// Two fabrics with one CHID.
    #[error("two fabrics have CHID {0}")]
    DuplicateChid(Chid),
    /// A guest on a fabric that does not exist.
    #[error("guest {name:?} is on fabric {chid}, which is not configured")]
    UnknownFabric {
        /// The guest.
        name: String,
        /// Its fabric.
        chid: Chid,
    },
    /// A window size that cannot be a PCI BAR, or is too small or large.
    #[error("window of {0} bytes: expected a power of two between 64 MiB and 16 TiB")]
    WindowSize(u64),
    /// A number of move queues that does not work.
    #[error("{0} move queues: expected 1 to {MAX_MOVE_QUEUES}")]
    MoveQueues(u16),
    /// A socket mode with bits beyond rwxrwxrwx.
    #[error("socket mode {0:o}: expected an octal number up to 777")]
    SocketMode(u32),
    /// An empty or overlong name.
    #[error("guest name {0:?}: expected 1 to 64 printable characters")]
    Name(String),
    /// A descriptor of `--fd` that cannot be taken.
    #[error("descriptor {fd}: {source}")]
    Fd {
        /// Its number.
        fd: i32,
        /// Why.
        source: std::io::Error,
    },
}

/// Everything a [`Daemon`](crate::Daemon) needs to start.
#[derive(Clone, Debug)]
pub struct Config {
    /// The fabrics. A guest can only be on one of these.
    pub fabrics: Vec<FabricSpec>,
    /// The front ends to listen for from the start.
    pub guests: Vec<GuestSpec>,
    /// Path of the management socket; none if not wanted.
    pub management: Option<PathBuf>,
    /// Size of each front end's window, bytes, a power of two.
    pub window_size: u64,
    /// Move queues of each device, 1 to [`MAX_MOVE_QUEUES`].
    pub move_queues: u16,
    /// How long a device outlives the stop of all its rings; none: for ever.
    pub stopped_grace: Option<Duration>,
    /// How long a front end may take to acknowledge a mapping before it is dropped.
    pub ack_timeout: Duration,
    /// Permission bits of sockets.
    pub socket_mode: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            fabrics: vec![FabricSpec::new(DEFAULT_CHID)],
            guests: Vec::new(),
            management: None,
            window_size: DEFAULT_WINDOW,
            move_queues: 2,
            stopped_grace: Some(Duration::from_secs(60)),
            ack_timeout: Duration::from_secs(5),
            socket_mode: 0o600,
        }
    }
}

/// One fabric: the guests that can reach each other.
#[derive(Clone, Debug)]
pub struct FabricSpec {
    /// Its CHID.
    pub chid: Chid,
    /// Caps on the sums of its devices' quotas.
    pub caps: Caps,
    /// Quotas of each of its devices, where they differ from the defaults.
    pub quotas: Quotas,
}

impl FabricSpec {
    /// A fabric with default quotas.
    pub fn new(chid: Chid) -> Self {
        FabricSpec { chid, caps: Caps::default(), quotas: Quotas::default() }
    }
}

/// Caps on the sum of the quotas of a fabric's devices: a device that would exceed one cannot
/// join, so no quota is ever overcommitted. What is `None` has no cap (256 devices).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Caps {
    /// Devices.
    pub devices: Option<u32>,
    /// Sum of `max_dmb_bytes`.
    pub dmb_bytes: Option<u64>,
    /// Sum of `max_slab_bytes`.
    pub slab_bytes: Option<u64>,
}

/// Per-device quotas; what is `None` keeps its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Quotas {
    /// DMBs registered at a time.
    pub max_dmbs: Option<u32>,
    /// Bytes of DMBs registered at a time.
    pub max_dmb_bytes: Option<u64>,
    /// Bytes of slabs owned, each counted whole.
    pub max_slab_bytes: Option<u64>,
    /// Bytes of slabs attached.
    pub max_attached_bytes: Option<u64>,
    /// DMBs attached at a time.
    pub max_attach: Option<u32>,
    /// Peers at a time.
    pub max_peers: Option<u32>,
    /// Slabs mapped into the front end at a time.
    pub max_maps: Option<u32>,
    /// Bytes of all regions of the guest's memory; 1 TiB by default.
    pub max_guest_memory: Option<u64>,
    /// Bytes of the guest's memory that the daemon may allocate by touching them first, in all
    /// connections of the guest; 256 MiB by default.
    pub max_touched_bytes: Option<u64>,
    /// Control commands per second.
    pub commands_per_second: Option<u32>,
    /// Wake records per second and slab or DMB; more are delayed and fall together.
    pub wakes_per_second: Option<u32>,
}

/// Where a front end connects.
#[derive(Clone, Debug)]
pub enum Socket {
    /// A Unix socket the daemon creates.
    Path(PathBuf),
    /// A listening Unix socket that was passed to the daemon, with room for one connection in its
    /// queue (a backlog of 0).
    Listening(Arc<OwnedFd>),
}

/// One guest: a socket for its front end, and what is particular about it.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Its name in logs, metrics and on the management socket.
    pub name: String,
    /// Where its front end connects.
    pub socket: Socket,
    /// Its fabric.
    pub chid: Chid,
    /// A pinned GID, for tests only: a GID should never come back.
    pub gid: Option<Gid>,
    /// Mappings this front end can hold; none: the fabric's quota.
    pub max_maps: Option<u32>,
    /// Accept guest memory in any file. A file system whose pages do not come makes a thread of the
    /// daemon wait, and with it peers.
    pub allow_any_file: bool,
    /// Permission bits of its socket; none: those of the configuration.
    pub mode: Option<u32>,
    /// Makes it a device pool: its socket hands out so many devices, one per connection. None: it has
    /// one device, and its front end connects to the socket itself.
    pub devices: Option<u32>,
    /// Only processes of this user get a device of the pool.
    pub peer_uid: Option<u32>,
    /// Only processes of this group get a device of the pool.
    pub peer_gid: Option<u32>,
}

impl GuestSpec {
    /// A guest on the default fabric, named after its socket.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        GuestSpec {
            name,
            socket: Socket::Path(path),
            chid: DEFAULT_CHID,
            gid: None,
            max_maps: None,
            allow_any_file: false,
            mode: None,
            devices: None,
            peer_uid: None,
            peer_gid: None,
        }
    }

    /// Reads `PATH[,KEY=VALUE..]`; see [`ConfigError::SocketOption`] for the keys.
    ///
    /// # Errors
    /// Names what cannot be read.
    pub fn parse(text: &str, chid: Chid) -> Result<Self, ConfigError> {
        let mut words = text.split(',');
        let path = words.next().filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| ConfigError::SocketOption(text.into()))?;
        let mut spec = GuestSpec { chid, ..GuestSpec::new(path) };
        for word in words {
            let unknown = || ConfigError::SocketOption(word.into());
            match word.split_once('=') {
                None if word == "allow-any-file" => spec.allow_any_file = true,
                Some(("gid", gid)) => spec.gid = Some(parse_gid(gid)?),
                Some(("chid", chid)) => spec.chid = parse_chid(chid)?,
                Some(("name", name)) => spec.name = name.into(),
                Some(("max-maps", n)) => spec.max_maps = Some(n.parse().map_err(|_| unknown())?),
                Some(("mode", mode)) => spec.mode = Some(parse_mode(mode)?),
                Some(("devices", n)) => spec.devices = Some(n.parse().map_err(|_| unknown())?),
                Some(("peer-uid", n)) => spec.peer_uid = Some(n.parse().map_err(|_| unknown())?),
                Some(("peer-gid", n)) => spec.peer_gid = Some(n.parse().map_err(|_| unknown())?),
                _ => return Err(unknown()),
            }
        }
        Ok(spec)
    }

    /// The path of its socket, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match &self.socket {
            Socket::Path(path) => Some(path),
            Socket::Listening(_) => None,
        }
    }

    /// Checks what can be checked without the others.
    ///
    /// # Errors
    /// [`ConfigError::Name`], [`ConfigError::Devices`], [`ConfigError::Contradiction`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let printable = self.name.chars().all(|c| !c.is_control() && c != '"' && c != '\\');
        if self.name.is_empty() || self.name.len() > 64 || !printable {
            return Err(ConfigError::Name(self.name.clone()));
        }
        let name = || self.name.clone();
        let contradiction = |what| Err(ConfigError::Contradiction { name: name(), what });
        match self.devices {
            Some(devices) if !(1..=MAX_POOL).contains(&devices) => {
                Err(ConfigError::Devices { name: name(), devices })
            }
            Some(_) if self.gid.is_some() => {
                contradiction("devices of a pool cannot share a pinned GID")
            }
            Some(_) if self.path().is_none() => {
                contradiction("a pool needs the path of a socket, not a descriptor")
            }
            None if self.peer_uid.or(self.peer_gid).is_some() => {
                contradiction("peer-uid and peer-gid are for a pool (devices=N)")
            }
            _ => Ok(()),
        }
    }
}

/// Reads a CHID: four hexadecimal digits, `ff00` to `ffff` (EISM-6, EISM-7).
///
/// # Errors
/// [`ConfigError::Chid`].
pub fn parse_chid(text: &str) -> Result<Chid, ConfigError> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let chid = u16::from_str_radix(digits, 16).ok().map(Chid);
    chid.filter(|chid| chid.is_emulated()).ok_or_else(|| ConfigError::Chid(text.into()))
}

/// Reads a GID: a version 4 UUID (EISM-9).
///
/// # Errors
/// [`ConfigError::Gid`].
pub fn parse_gid(text: &str) -> Result<Gid, ConfigError> {
    let uuid = uuid::Uuid::parse_str(text).ok().filter(|uuid| uuid.get_version_num() == 4);
    uuid.map(|uuid| Gid(uuid.into_bytes())).ok_or_else(|| ConfigError::Gid(text.into()))
}

/// The file of `--config`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    management: Option<PathBuf>,
    window_size: Option<u64>,
    move_queues: Option<u16>,
    stopped_grace: Option<u64>,
    socket_mode: Option<String>,
    #[serde(default)]
    fabric: Vec<FileFabric>,
    #[serde(default)]
    guest: Vec<FileGuest>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileFabric {
    chid: String,
    #[serde(default)]
    caps: Caps,
    #[serde(default)]
    quotas: Quotas,
}

/// A guest in a file, and the body of the management command that adds one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FileGuest {
    pub(crate) socket: PathBuf,
    pub(crate) name: Option<String>,
    pub(crate) chid: Option<String>,
    pub(crate) gid: Option<String>,
    pub(crate) max_maps: Option<u32>,
    #[serde(default)]
    pub(crate) allow_any_file: bool,
    pub(crate) mode: Option<String>,
    pub(crate) devices: Option<u32>,
    pub(crate) peer_uid: Option<u32>,
    pub(crate) peer_gid: Option<u32>,
}

impl FileGuest {
    pub(crate) fn into_spec(self, default_chid: Chid) -> Result<GuestSpec, ConfigError> {
        let mut spec = GuestSpec::new(self.socket);
        if let Some(name) = self.name {
            spec.name = name;
        }
        spec.chid = self.chid.as_deref().map_or(Ok(default_chid), parse_chid)?;
        spec.gid = self.gid.as_deref().map(parse_gid).transpose()?;
        spec.max_maps = self.max_maps;
        spec.allow_any_file = self.allow_any_file;
        spec.mode = self.mode.as_deref().map(parse_mode).transpose()?;
        spec.devices = self.devices;
        spec.peer_uid = self.peer_uid;
        spec.peer_gid = self.peer_gid;
        spec.check()?;
        Ok(spec)
    }
}

/// Reads an octal mode.
///
/// # Errors
/// [`ConfigError::SocketMode`] (with all bits set if it is no number at all).
pub fn parse_mode(text: &str) -> Result<u32, ConfigError> {
    let mode = u32::from_str_radix(text, 8).map_err(|_| ConfigError::SocketMode(u32::MAX))?;
    if mode > 0o777 { Err(ConfigError::SocketMode(mode)) } else { Ok(mode) }
}

impl Config {
    /// Reads a TOML file (see the README for its keys).
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::from_toml(&text, path)
    }

    fn from_toml(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|source| ConfigError::Syntax {
            path: path.into(),
            source: Box::new(source),
        })?;
        let mut config = Config { management: file.management, ..Config::default() };
        if let Some(window) = file.window_size {
            config.window_size = window;
        }
        if let Some(queues) = file.move_queues {
            config.move_queues = queues;
        }
        if let Some(seconds) = file.stopped_grace {
            config.stopped_grace = (seconds != 0).then(|| Duration::from_secs(seconds));
        }
        if let Some(mode) = file.socket_mode {
            config.socket_mode = parse_mode(&mode)?;
        }
        if !file.fabric.is_empty() {
            config.fabrics.clear();
        }
        for fabric in file.fabric {
            config.fabrics.push(FabricSpec {
                chid: parse_chid(&fabric.chid)?,
                caps: fabric.caps,
                quotas: fabric.quotas,
            });
        }
        let default_chid = config.default_chid();
        for guest in file.guest {
            config.guests.push(guest.into_spec(default_chid)?);
        }
        Ok(config)
    }

    /// CHID of a guest that names none: the first fabric's.
    pub fn default_chid(&self) -> Chid {
        self.fabrics.first().map_or(DEFAULT_CHID, |fabric| fabric.chid)
    }

    /// Checks the whole.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !self.window_size.is_power_of_two()
            || !(MIN_WINDOW..=MAX_WINDOW).contains(&self.window_size)
        {
            return Err(ConfigError::WindowSize(self.window_size));
        }
        if self.move_queues == 0 || self.move_queues > MAX_MOVE_QUEUES {
            return Err(ConfigError::MoveQueues(self.move_queues));
        }
        if self.socket_mode > 0o777 {
            return Err(ConfigError::SocketMode(self.socket_mode));
        }
        let mut chids = BTreeSet::new();
        for fabric in &self.fabrics {
            if !fabric.chid.is_emulated() {
                return Err(ConfigError::Chid(fabric.chid.to_string()));
            }
            if !chids.insert(fabric.chid) {
                return Err(ConfigError::DuplicateChid(fabric.chid));
            }
        }
        let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
        for guest in &self.guests {
            guest.check()?;
            if !names.insert(guest.name.as_str()) {
                return Err(ConfigError::DuplicateName(guest.name.clone()));
            }
            if let Some(path) = guest.path()
                && !paths.insert(path)
            {
                return Err(ConfigError::DuplicateSocket(path.into()));
            }
            if !chids.contains(&guest.chid) {
                return Err(ConfigError::UnknownFabric {
                    name: guest.name.clone(),
                    chid: guest.chid,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toml(text: &str) -> Result<Config, ConfigError> {
        let config = Config::from_toml(text, Path::new("test.toml"))?;
        config.check()?;
        Ok(config)
    }

    #[test]
    fn reads_a_socket_with_all_its_options() {
        let spec = GuestSpec::parse(
            "/run/vm1.sock,gid=3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b,chid=ff07,name=one,max-maps=4,allow-any-file",
            DEFAULT_CHID,
        )
        .unwrap();
        assert_eq!(spec.path(), Some(Path::new("/run/vm1.sock")));
        assert_eq!(spec.gid.unwrap().to_string(), "3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b");
        assert_eq!(spec.chid, Chid(0xff07));
        assert_eq!(
            (spec.name.as_str(), spec.max_maps, spec.allow_any_file),
            ("one", Some(4), true)
        );
    }

    #[test]
    fn reads_a_pool() {
        let text = "/run/any.sock,devices=64,mode=666,peer-uid=1000,peer-gid=100";
        let pool = GuestSpec::parse(text, DEFAULT_CHID).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.devices, pool.mode), (Some(64), Some(0o666)));
        assert_eq!((pool.peer_uid, pool.peer_gid), (Some(1000), Some(100)));
        let flawed = |text: &str| GuestSpec::parse(text, DEFAULT_CHID).unwrap().check();
        for devices in [0, 4097] {
            let refused = flawed(&format!("/run/any.sock,devices={devices}"));
            assert!(
                matches!(refused, Err(ConfigError::Devices { devices: n, .. }) if n == devices)
            );
        }
        let gid = "/s,devices=2,gid=3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b";
        for text in [gid, "/s,peer-uid=0", "/s,peer-gid=0"] {
            assert!(matches!(flawed(text), Err(ConfigError::Contradiction { .. })), "{text}");
        }
    }

    #[test]
    fn names_a_guest_after_its_socket() {
        let spec = GuestSpec::parse("/run/vm1.sock", Chid(0xff01)).unwrap();
        assert_eq!((spec.name.as_str(), spec.chid), ("vm1", Chid(0xff01)));
        assert!(!spec.allow_any_file);
    }

    #[test]
    fn refuses_socket_options_that_do_not_exist() {
        for bad in ["", ",gid=x", "/s,foo", "/s,max-maps=many", "/s,gid", "/s,allow-any-file=1"] {
            assert!(
                matches!(GuestSpec::parse(bad, DEFAULT_CHID), Err(ConfigError::SocketOption(_))),
                "{bad}"
            );
        }
        let nil = "/s,gid=00000000-0000-0000-0000-000000000000";
        assert!(matches!(GuestSpec::parse(nil, DEFAULT_CHID), Err(ConfigError::Gid(_))));
        assert!(matches!(GuestSpec::parse("/s,chid=1", DEFAULT_CHID), Err(ConfigError::Chid(_))));
    }

    #[test]
    fn reads_fabrics_and_guests_from_a_file() {
        let config = toml(
            r#"
            management = "/run/ism/mgmt.sock"
            window-size = 1073741824
            stopped-grace = 0
            socket-mode = "660"
            [[fabric]]
            chid = "ff10"
            caps = { devices = 3 }
            quotas = { max-dmbs = 5 }
            [[guest]]
            socket = "/run/ism/a.sock"
            [[guest]]
            socket = "/run/ism/b.sock"
            name = "bee"
            allow-any-file = true
            "#,
        )
        .unwrap();
        assert_eq!(config.socket_mode, 0o660);
        assert_eq!(config.stopped_grace, None);
        assert_eq!(config.fabrics[0].quotas.max_dmbs, Some(5));
        assert_eq!(config.fabrics[0].caps.devices, Some(3));
        assert_eq!(config.guests[0].chid, Chid(0xff10));
        assert_eq!(config.guests[1].name, "bee");
    }

    #[test]
    fn refuses_contradictions() {
        let guest = "[[guest]]\nsocket = \"/a/x.sock\"\n";
        assert!(matches!(toml("colour = 1"), Err(ConfigError::Syntax { .. })));
        assert!(matches!(
            toml(&format!("{guest}{guest}")),
            Err(ConfigError::DuplicateName(name)) if name == "x"
        ));
        assert!(matches!(
            toml(&format!("{guest}{guest}name=\"y\"")),
            Err(ConfigError::DuplicateSocket(_))
        ));
        assert!(matches!(
            toml(&format!("{guest}chid = \"ff01\"")),
            Err(ConfigError::UnknownFabric { chid: Chid(0xff01), .. })
        ));
        assert!(matches!(toml("window-size = 3"), Err(ConfigError::WindowSize(3))));
        assert!(matches!(toml("move-queues = 63"), Err(ConfigError::MoveQueues(63))));
        assert!(matches!(
            toml("[[fabric]]\nchid=\"ff00\"\n[[fabric]]\nchid=\"ff00\""),
            Err(ConfigError::DuplicateChid(_))
        ));
        assert!(matches!(
            toml("[[guest]]\nsocket=\"/a\"\nname=\"a\\tb\""),
            Err(ConfigError::Name(_))
        ));
    }
}
