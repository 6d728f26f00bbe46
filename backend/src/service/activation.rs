// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Socket activation: listening sockets opened by a service manager and passed to the daemon, as in
//! sd_listen_fds(3).
//!
//! Such a socket belongs to its creator. The daemon serves the socket instead of one made at the same path,
//! and does not remove the socket. So front ends connecting while no daemon runs wait for the next daemon.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libc::{AF_UNIX, SOCK_DGRAM, SOCK_SEQPACKET, SOCK_STREAM};
use listenfd::ListenFd;
use rustix::net::listen;
use rustix::net::sockopt::socket_acceptconn;

use crate::config::{Config, ConfigError, PassedDescriptor, PassedDescriptorError};
use crate::vhost::unix_socket::{
    Backlog, NameId, SocketError, SocketKind, SocketNames, directory_of, path_of,
};

/// The first passed descriptor (SD_LISTEN_FDS_START).
const FIRST: u32 = 3;
/// Most descriptors: more guests with units of their own than a daemon is likely to have.
const MAX_DESCRIPTORS: u32 = 1024;

/// Descriptors passed to this process.
#[derive(Default)]
pub(crate) struct PassedSockets {
    sockets: Vec<(PassedDescriptor, Result<Listening, PassedDescriptorError>)>,
}

/// A usable descriptor.
struct Listening {
    socket: OwnedFd,
    kind: SocketKind,
    path: PathBuf,
}

/// The configured use of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    kind: SocketKind,
    backlog: Backlog,
}

impl PassedSockets {
    /// Takes the descriptors passed to this process. `fd` is the descriptor of `--fd` and is left alone. To
    /// be called while the process has one thread and no other open descriptors.
    ///
    /// # Errors
    /// The environment does not follow sd_listen_fds(3). [`assign`](Self::assign) reports unusable
    /// descriptors.
    pub(crate) fn from_environment(fd: Option<i32>) -> Result<PassedSockets, ConfigError> {
        let variable = |key: &str| std::env::var_os(key);
        let names = names(variable, std::process::id())?;
        if names.is_empty() {
            return Ok(PassedSockets::default());
        }
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::new();
        for ((index, number), name) in (FIRST..).enumerate().zip(names) {
            if fd.and_then(|fd| u32::try_from(fd).ok()) == Some(number) {
                continue;
            }
            let mut descriptor = PassedDescriptor { number, name, path: what_is_open(number) };
            let taken = take(&mut passed, index, &mut descriptor);
            sockets.push((descriptor, taken));
        }
        Ok(PassedSockets { sockets })
    }

    /// Assigns each descriptor to a socket of the configuration.
    ///
    /// # Errors
    /// Every unusable descriptor.
    pub(crate) fn assign(self, config: &Config) -> Result<ActivatedSockets, Vec<ConfigError>> {
        let wanted = wanted(config);
        let mut mistakes = Vec::new();
        let mut sockets: BTreeMap<PathBuf, (Activated, u32)> = BTreeMap::new();
        for (descriptor, taken) in self.sockets {
            let number = descriptor.number;
            let mut refuse = |source| {
                let descriptor = descriptor.clone();
                mistakes.push(ConfigError::Passed { descriptor, source });
            };
            let Listening { socket, kind, path } = match taken {
                Ok(listening) => listening,
                Err(error) => {
                    refuse(error);
                    continue;
                }
            };
            match wanted.get(&path) {
                None => refuse(PassedDescriptorError::NotConfigured),
                Some((_, wanted)) if wanted.kind != kind => {
                    refuse(PassedDescriptorError::Kind { expected: wanted.kind.name() });
                }
                Some((path, Wanted { backlog, .. })) => {
                    if let Some((_, other)) = sockets.get(path) {
                        refuse(PassedDescriptorError::Duplicate { other: *other });
                    } else {
                        let activated = Activated { socket, kind, backlog: *backlog };
                        sockets.insert(path.clone(), (activated, number));
                    }
                }
            }
        }
        let sockets = sockets.into_iter().map(|(path, (socket, _))| (path, socket)).collect();
        if mistakes.is_empty() { Ok(ActivatedSockets { sockets }) } else { Err(mistakes) }
    }
}

/// The names of the descriptors passed to process `pid`, one per descriptor.
fn names(
    variable: impl Fn(&str) -> Option<OsString>,
    pid: u32,
) -> Result<Vec<Option<String>>, ConfigError> {
    let wrong = |variable, value: &OsStr, expected| ConfigError::Environment {
        variable,
        value: value.to_string_lossy().into_owned(),
        expected,
    };
    let number = |text: &OsStr| text.to_str().and_then(|text| text.parse::<u32>().ok());
    // Without LISTEN_PID, or with another process's id, the descriptors are for another process, such as a
    // shell.
    let Some(of) = variable("LISTEN_PID") else { return Ok(Vec::new()) };
    let of = number(&of).ok_or_else(|| wrong("LISTEN_PID", &of, "a process id"))?;
    let Some(count) = variable("LISTEN_FDS").filter(|_| of == pid) else { return Ok(Vec::new()) };
    let bounded = number(&count).filter(|count| (1..=MAX_DESCRIPTORS).contains(count));
    let count = bounded.ok_or_else(|| wrong("LISTEN_FDS", &count, "a number from 1 to 1024"))?;
    // An extension of the `listenfd` library: numbers in messages would be wrong.
    if let Some(first) = variable("LISTEN_FDS_FIRST_FD") {
        return Err(wrong("LISTEN_FDS_FIRST_FD", &first, "that it is not set"));
    }
    let Some(text) = variable("LISTEN_FDNAMES") else { return Ok(vec![None; count as usize]) };
    let text_of_names = text.to_string_lossy();
    let names: Vec<_> = text_of_names.split(':').map(|name| Some(name.to_owned())).collect();
    match names.len() == count as usize {
        true => Ok(names),
        false => Err(wrong("LISTEN_FDNAMES", &text, "a name for each of LISTEN_FDS descriptors")),
    }
}

/// The path of an open descriptor, or the kernel's description.
fn what_is_open(number: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{number}")).ok()
}

/// Takes the descriptor of a listening Unix socket, and records its path in `descriptor`.
fn take(
    passed: &mut ListenFd,
    index: usize,
    descriptor: &mut PassedDescriptor,
) -> Result<Listening, PassedDescriptorError> {
    let kinds = [
        (SOCK_STREAM, Some(SocketKind::Stream)),
        (SOCK_SEQPACKET, Some(SocketKind::Packets)),
        (SOCK_DGRAM, None),
    ];
    let mut taken = kinds.into_iter().filter_map(|(of_kernel, kind)| {
        let socket = passed.take_custom::<OwnedFd>(index, AF_UNIX, of_kernel, "Unix socket");
        Some((socket.ok().flatten()?, kind))
    });
    let is_closed = descriptor.path.is_none() && Path::new("/proc/self/fd").exists();
    let (socket, kind) = taken.next().ok_or(match is_closed {
        true => PassedDescriptorError::Closed,
        false => PassedDescriptorError::NotAUnixSocket,
    })?;
    let path = path_of(&socket);
    descriptor.path.clone_from(&path);
    let kind = kind.ok_or(PassedDescriptorError::Datagrams)?;
    if !socket_acceptconn(&socket).unwrap_or(false) {
        return Err(PassedDescriptorError::NotListening);
    }
    let path = resolve(&path.ok_or(PassedDescriptorError::NoPath)?);
    Ok(Listening { socket, kind, path })
}

/// The sockets of a configuration, by the path from [`resolve`], with the configured path.
fn wanted(config: &Config) -> BTreeMap<PathBuf, (PathBuf, Wanted)> {
    let guests = config.guests.iter().filter_map(|guest| {
        let wanted = match guest.devices {
            None => Wanted { kind: SocketKind::Stream, backlog: Backlog::One },
            Some(_) => Wanted { kind: SocketKind::Packets, backlog: Backlog::Many },
        };
        Some((guest.path()?, wanted))
    });
    let others = config.management.iter().chain(&config.metrics).map(|path| {
        (path.as_path(), Wanted { kind: SocketKind::Stream, backlog: Backlog::Several })
    });
    guests.chain(others).map(|(path, wanted)| (resolve(path), (path.to_owned(), wanted))).collect()
}

/// The path without links and relative parts of its directory: one socket may have several paths.
fn resolve(path: &Path) -> PathBuf {
    let directory = std::fs::canonicalize(directory_of(path));
    match (directory, path.file_name()) {
        (Ok(directory), Some(name)) => directory.join(name),
        _ => path.to_owned(),
    }
}

/// The passed sockets, by their paths in the configuration.
#[derive(Default)]
pub(crate) struct ActivatedSockets {
    sockets: BTreeMap<PathBuf, Activated>,
}

struct Activated {
    socket: OwnedFd,
    kind: SocketKind,
    backlog: Backlog,
}

impl ActivatedSockets {
    /// Makes this process the peer clients see (SO_PEERCRED), and sets the backlogs to the daemon's own
    /// values. To be called before this process becomes another user.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn listen(&self) -> Result<(), SocketError> {
        for (path, activated) in &self.sockets {
            listen(&activated.socket, activated.backlog.length()).map_err(|error| {
                SocketError::Io { action: "listen on", path: path.clone(), source: error.into() }
            })?;
        }
        Ok(())
    }

    /// Paths of the sockets.
    pub(crate) fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.sockets.keys().cloned()
    }

    /// Number of sockets.
    pub(crate) fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Hands out these sockets; `names` makes sockets at other paths.
    pub(crate) fn before(self, names: Arc<dyn SocketNames>) -> Arc<dyn SocketNames> {
        match self.sockets.is_empty() {
            true => names,
            false => Arc::new(ActivatedNames { sockets: self.sockets, names }),
        }
    }
}

/// Passed sockets, tried before making new ones.
struct ActivatedNames {
    sockets: BTreeMap<PathBuf, Activated>,
    names: Arc<dyn SocketNames>,
}

impl SocketNames for ActivatedNames {
    fn bind(
        &self,
        path: &Path,
        mode: u32,
        kind: SocketKind,
        backlog: Backlog,
    ) -> Result<(OwnedFd, NameId), SocketError> {
        let Some(activated) = self.sockets.get(path) else {
            return self.names.bind(path, mode, kind, backlog);
        };
        if activated.kind != kind {
            let (path, is, expected) = (path.into(), activated.kind.name(), kind.name());
            return Err(SocketError::Kind { path, is, expected });
        }
        let socket = activated.socket.try_clone();
        let failed = |source| SocketError::Io { action: "use", path: path.into(), source };
        Ok((socket.map_err(failed)?, self.names.adopt(path)?))
    }

    fn pair(&self) -> io::Result<(UnixListener, OwnedFd)> {
        self.names.pair()
    }

    fn adopt(&self, path: &Path) -> Result<NameId, SocketError> {
        self.names.adopt(path)
    }

    fn outlives_guest(&self, path: &Path) -> bool {
        self.sockets.contains_key(path)
    }

    fn is_up(&self) -> Option<bool> {
        self.names.is_up()
    }

    fn fill(&self, name: NameId) -> io::Result<()> {
        self.names.fill(name)
    }

    fn remove(&self, name: NameId) {
        self.names.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_of(variables: &[(&str, &str)]) -> Result<Vec<Option<String>>, String> {
        let variable = |key: &str| {
            let found = variables.iter().find(|(name, _)| *name == key);
            found.map(|(_, value)| OsString::from(value))
        };
        names(variable, 7).map_err(|error| error.to_string())
    }

    #[test]
    fn descriptors_of_this_process_only_are_taken() {
        let none: [&[(&str, &str)]; 4] = [
            &[],
            &[("LISTEN_FDS", "2")],
            &[("LISTEN_PID", "7")],
            &[("LISTEN_PID", "8"), ("LISTEN_FDS", "many"), ("LISTEN_FDNAMES", "a:b")],
        ];
        for variables in none {
            assert_eq!(names_of(variables), Ok(Vec::new()), "{variables:?}");
        }
        let two = [("LISTEN_PID", "7"), ("LISTEN_FDS", "2")];
        assert_eq!(names_of(&two), Ok(vec![None, None]));
        let named = [&two[..], &[("LISTEN_FDNAMES", "pool:")]].concat();
        assert_eq!(names_of(&named), Ok(vec![Some("pool".into()), Some(String::new())]));
    }

    #[test]
    fn an_environment_that_cannot_be_right_is_refused_by_its_variable() {
        for count in ["0", "-1", "1025", "99999999999999999999", "two", "", "1 "] {
            let refused = names_of(&[("LISTEN_PID", "7"), ("LISTEN_FDS", count)]).unwrap_err();
            let expected = format!("LISTEN_FDS is {count:?}: expected a number from 1 to 1024");
            assert_eq!(refused, expected);
        }
        let refused = names_of(&[("LISTEN_PID", "me"), ("LISTEN_FDS", "1")]).unwrap_err();
        assert_eq!(refused, "LISTEN_PID is \"me\": expected a process id");
        let one = [("LISTEN_PID", "7"), ("LISTEN_FDS", "1")];
        for other in [("LISTEN_FDNAMES", "a:b"), ("LISTEN_FDS_FIRST_FD", "5")] {
            let refused = names_of(&[&one[..], &[other]].concat()).unwrap_err();
            assert!(refused.starts_with(&format!("{} is {:?}", other.0, other.1)), "{refused}");
        }
    }
}
