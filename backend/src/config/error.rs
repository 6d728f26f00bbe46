// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can be wrong with a configuration.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;
use virtio_ism_abi::Chid;

use super::log_output::LogOutput;

/// Settings of a socket, as they follow its path.
pub const SETTINGS: [&str; 10] = [
    "chid",
    "name",
    "max-maps",
    "allow-any-file",
    "vfio-user",
    "mode",
    "devices",
    "peer-uid",
    "peer-gid",
    "gid",
];

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
    #[error("{path}: {}", in_a_line(source))]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// What is wrong in one table or with one value of the file.
    #[error("{path}:{line}: {source}")]
    Table {
        /// The file.
        path: PathBuf,
        /// Line of the table's header or of the value, from 1.
        line: usize,
        /// What is wrong.
        source: Box<ConfigError>,
    },
    /// The file has more bytes than a configuration can have.
    #[error("{path} has more than {limit} bytes")]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Most bytes.
        limit: u64,
    },
    /// Nothing is to be served.
    #[error("nothing to do: {0}")]
    Nothing(String),
    /// The directory of a socket is not there.
    #[error("there is no directory {0}, in which a socket is to be made")]
    NoDirectory(PathBuf),
    /// A path that no Unix socket can have.
    #[error("a socket cannot have the path {path}: it has {len} bytes, and the limit is {limit}")]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        len: usize,
        /// Most bytes: `sun_path` of unix(7), less its NUL.
        limit: usize,
    },
    /// Not a CHID of an emulated device.
    #[error("{0:?} is not a CHID: expected four hexadecimal digits between ff00 and ffff")]
    Chid(String),
    /// Not a GID.
    #[error("{0:?} is not a GID: expected a version 4 UUID")]
    Gid(String),
    /// A socket's settings without its path.
    #[error("{0:?}: a socket needs a path: PATH[,KEY=VALUE..]")]
    NoPath(String),
    /// A setting of a socket that does not exist.
    #[error("{key:?} is no setting of a socket; settings are {}", SETTINGS.join(", "))]
    UnknownSetting {
        /// What stands there instead.
        key: String,
    },
    /// A setting of a socket with a value that it cannot have.
    #[error("{key}={value:?}: expected {expected}")]
    SettingValue {
        /// The setting.
        key: String,
        /// The value.
        value: String,
        /// What the value can be.
        expected: &'static str,
    },
    /// A number of devices that a pool cannot have.
    #[error("guest {name:?}: {devices} devices: expected 1 to 4096")]
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
    /// A user or group whose processes the kernel shows to the daemon under another id.
    #[error(
        "guest {name:?}: {key}={id}: this process cannot tell who has this id, since its user \
         namespace does not have it (PrivateUsers=yes of systemd makes such a namespace)"
    )]
    UnknownPeer {
        /// The guest.
        name: String,
        /// `peer-uid` or `peer-gid`.
        key: &'static str,
        /// The id.
        id: u32,
    },
    /// Two guests with one name.
    #[error("two guests are called {0:?}")]
    DuplicateName(String),
    /// Two sockets with one path.
    #[error("two sockets have the path {0}")]
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
    #[error("{0} move queues: expected 1 to 62")]
    MoveQueues(u16),
    /// A socket mode that is none.
    #[error("socket mode {0:?}: expected an octal number up to 777")]
    SocketMode(String),
    /// An empty or overlong name.
    #[error("guest name {0:?}: expected 1 to 64 printable characters")]
    Name(String),
    /// A variable of socket activation with a value that it cannot have.
    #[error("{variable} is {value:?}: expected {expected}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What the value can be.
        expected: &'static str,
    },
    /// A descriptor of socket activation that cannot be served.
    #[error("{descriptor}: {source}")]
    Passed {
        /// Which one.
        descriptor: PassedDescriptor,
        /// Why.
        source: PassedDescriptorError,
    },
    /// A descriptor of `--fd` that cannot be taken.
    #[error("descriptor {fd}: {source}")]
    Fd {
        /// Its number.
        fd: i32,
        /// Why.
        source: std::io::Error,
    },
}

/// Where and why, without the drawing of the line.
fn in_a_line(source: &toml::de::Error) -> String {
    let text = source.to_string();
    let place = text.lines().next().unwrap_or_default();
    let message = source.message().lines().collect::<Vec<_>>().join(", ");
    if place.is_empty() { message } else { format!("{place}: {message}") }
}

/// A descriptor that a service manager has passed to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedDescriptor {
    /// Its number, from 3.
    pub number: u32,
    /// Its name in LISTEN_FDNAMES.
    pub name: Option<String>,
    /// The path to which it is bound, or what else the kernel knows of it; none if nothing is open.
    pub path: Option<PathBuf>,
}

impl fmt::Display for PassedDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "passed descriptor {}", self.number)?;
        if let Some(name) = &self.name {
            write!(f, " ({name:?})")?;
        }
        match &self.path {
            Some(path) => write!(f, ", {}", LogOutput(path.display())),
            None => Ok(()),
        }
    }
}

/// Why a passed descriptor cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PassedDescriptorError {
    /// Nothing is open.
    #[error("it is not open")]
    Closed,
    /// A file, or a socket of another family.
    #[error("it is no Unix socket")]
    NotAUnixSocket,
    /// A Unix socket of datagrams.
    #[error("it is a socket of datagrams")]
    Datagrams,
    /// A connected or unconnected socket.
    #[error("it does not listen")]
    NotListening,
    /// An abstract socket.
    #[error("it has no path in the file system")]
    NoPath,
    /// A socket with a path that the configuration does not have.
    #[error("no guest, and neither the management nor the metrics socket, has this path")]
    NotConfigured,
    /// A socket for bytes where one for packets is configured, or the other way round.
    #[error("it has another type than the configured socket of this path, which is {expected}")]
    Kind {
        /// The type that is needed.
        expected: &'static str,
    },
    /// Another descriptor has the same path.
    #[error("descriptor {other} has the same path")]
    Duplicate {
        /// The other one.
        other: u32,
    },
}
