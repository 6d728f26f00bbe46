// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mistakes in a configuration.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;
use virtio_ism_abi::Chid;

use super::log_output::LogOutput;

/// Settings of a socket, given after its path.
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

/// A mistake in a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not TOML, or has unknown or ill-typed keys.
    #[error("{path}: {}", in_a_line(source))]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Place and reason.
        source: Box<toml::de::Error>,
    },
    /// A mistake in one table or one value of the file.
    #[error("{path}:{line}: {source}")]
    Table {
        /// The file.
        path: PathBuf,
        /// Line of the table's header or of the value, from 1.
        line: usize,
        /// The mistake.
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
    /// No guest and no socket to serve.
    #[error("nothing to do: {0}")]
    Nothing(String),
    /// The directory of a socket does not exist.
    #[error("there is no directory {0}, in which a socket is to be made")]
    NoDirectory(PathBuf),
    /// A path too long for a Unix socket.
    #[error("a socket cannot have the path {path}: it has {len} bytes, and the limit is {limit}")]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Length of the path, bytes.
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
    /// An unknown setting of a socket.
    #[error("{key:?} is no setting of a socket; settings are {}", SETTINGS.join(", "))]
    UnknownSetting {
        /// The unknown key.
        key: String,
    },
    /// A setting of a socket with an invalid value.
    #[error("{key}={value:?}: expected {expected}")]
    SettingValue {
        /// The setting.
        key: String,
        /// The value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A number of devices outside a pool's bounds.
    #[error("guest {name:?}: {devices} devices: expected 1 to 4096")]
    Devices {
        /// The guest.
        name: String,
        /// The number.
        devices: u32,
    },
    /// Contradicting settings of a guest.
    #[error("guest {name:?}: {what}")]
    Contradiction {
        /// The guest.
        name: String,
        /// The settings, and the reason.
        what: &'static str,
    },
    /// A user or group not mapped in the daemon's user namespace: the kernel shows the daemon another id.
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
        /// The guest's fabric.
        chid: Chid,
    },
    /// A window size unfit for a PCI BAR, or outside the bounds.
    #[error("window of {0} bytes: expected a power of two between 64 MiB and 16 TiB")]
    WindowSize(u64),
    /// A number of move queues outside the bounds.
    #[error("{0} move queues: expected 1 to 62")]
    MoveQueues(u16),
    /// An invalid socket mode.
    #[error("socket mode {0:?}: expected an octal number up to 777")]
    SocketMode(String),
    /// An empty or overlong name.
    #[error("guest name {0:?}: expected 1 to 64 printable characters")]
    Name(String),
    /// A variable of socket activation with an invalid value.
    #[error("{variable} is {value:?}: expected {expected}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// The value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// An unusable descriptor of socket activation.
    #[error("{descriptor}: {source}")]
    Passed {
        /// The descriptor.
        descriptor: PassedDescriptor,
        /// The reason.
        source: PassedDescriptorError,
    },
    /// An unusable descriptor of `--fd`.
    #[error("descriptor {fd}: {source}")]
    Fd {
        /// The descriptor's number.
        fd: i32,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Place and reason, without the quoted line.
fn in_a_line(source: &toml::de::Error) -> String {
    let text = source.to_string();
    let place = text.lines().next().unwrap_or_default();
    let message = source.message().lines().collect::<Vec<_>>().join(", ");
    if place.is_empty() { message } else { format!("{place}: {message}") }
}

/// A descriptor passed to the daemon by a service manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedDescriptor {
    /// The descriptor's number, from 3.
    pub number: u32,
    /// The descriptor's name in LISTEN_FDNAMES.
    pub name: Option<String>,
    /// The path the socket is bound to, or another description by the kernel; `None` if not open.
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

/// Why a passed descriptor is unusable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PassedDescriptorError {
    /// The descriptor is not open.
    #[error("it is not open")]
    Closed,
    /// A file, or a socket of another family.
    #[error("it is no Unix socket")]
    NotAUnixSocket,
    /// A datagram socket.
    #[error("it is a socket of datagrams")]
    Datagrams,
    /// A connected or unconnected socket.
    #[error("it does not listen")]
    NotListening,
    /// An abstract socket.
    #[error("it has no path in the file system")]
    NoPath,
    /// A socket with a path unknown to the configuration.
    #[error("no guest, and neither the management nor the metrics socket, has this path")]
    NotConfigured,
    /// A stream socket instead of a configured packet socket, or the reverse.
    #[error("it has another type than the configured socket of this path, which is {expected}")]
    Kind {
        /// The required type.
        expected: &'static str,
    },
    /// Another descriptor has the same path.
    #[error("descriptor {other} has the same path")]
    Duplicate {
        /// Number of the other descriptor.
        other: u32,
    },
}
