// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unix sockets of the daemon: never open to others for a moment, stale sockets replaced, removed at the end.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname, listen,
    socket_with,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use ism_device::sync::lock;

/// Connections waiting to be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Backlog {
    /// One: the queue of a device socket has room for the next front end.
    One,
    /// Some.
    Several,
    /// Enough for processes of containers starting at the same time.
    Many,
}

impl Backlog {
    /// The argument of listen(2). The kernel has room for one more connection.
    pub(crate) fn length(self) -> i32 {
        match self {
            Backlog::One => 0,
            Backlog::Several => 8,
            Backlog::Many => 128,
        }
    }
}

/// Why a socket cannot be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Another program listens at this path.
    #[error("{0} is in use by another program")]
    InUse(PathBuf),
    /// A file other than a socket has this name.
    #[error("{0} exists and is not a socket")]
    NotASocket(PathBuf),
    /// The sandbox has no such directory.
    #[error(
        "cannot make {0}: in its sandbox the daemon makes sockets only in the directories of those \
         that it was started with"
    )]
    OutsideSandbox(PathBuf),
    /// A file has this name, and the daemon was not started with this socket.
    #[error(
        "{0} exists: in its sandbox the daemon replaces only sockets that it was started with; \
         remove it if no program listens there"
    )]
    Exists(PathBuf),
    /// The daemon has reached its limit of sockets.
    #[error("cannot make {path}: the daemon has {limit} sockets already")]
    TooMany {
        /// Path of the socket.
        path: PathBuf,
        /// The limit.
        limit: usize,
    },
    /// A passed socket has the wrong type for this path.
    #[error("{path} was passed as {is}, and {expected} is needed")]
    Kind {
        /// Path of the socket.
        path: PathBuf,
        /// Type of the passed socket.
        is: &'static str,
        /// The required type.
        expected: &'static str,
    },
    /// A system call failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The attempted action.
        action: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Type of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SocketKind {
    /// Bytes.
    Stream,
    /// Packets with boundaries.
    Packets,
}

impl SocketKind {
    /// The POSIX name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            SocketKind::Stream => "SOCK_STREAM",
            SocketKind::Packets => "SOCK_SEQPACKET",
        }
    }

    fn of_kernel(self) -> SocketType {
        match self {
            SocketKind::Stream => SocketType::STREAM,
            SocketKind::Packets => SocketType::SEQPACKET,
        }
    }
}

/// Number of a socket's name among [`SocketNames`].
pub(crate) type NameId = u64;

/// Makes, connects and removes listening sockets: every operation needing their paths.
pub(crate) trait SocketNames: Send + Sync {
    /// Makes a listening socket with permission bits `mode`. Replaces an existing socket without a listening
    /// program.
    ///
    /// SO_PEERCRED shows clients the process calling listen(2), so no other process may call listen(2) again.
    fn bind(
        &self,
        path: &Path,
        mode: u32,
        kind: SocketKind,
        backlog: Backlog,
    ) -> Result<(OwnedFd, NameId), SocketError>;
    /// A listening socket out of reach of other processes, and a socket connected to the first but not yet
    /// accepted.
    ///
    /// # Errors
    /// No descriptors are left, or another process found the socket and connected first.
    fn pair(&self) -> io::Result<(UnixListener, OwnedFd)>;
    /// Registers an inherited listening socket. This process does not remove such a socket.
    fn adopt(&self, path: &Path) -> Result<NameId, SocketError>;
    /// Whether the socket of this path outlives its guest, as a socket passed to the daemon does.
    fn outlives_guest(&self, _path: &Path) -> bool {
        false
    }
    /// Whether the helper process for these operations runs; `None`: this process does them itself.
    fn is_up(&self) -> Option<bool> {
        None
    }
    /// Begins a connection to a listening socket; the connection stays in the queue.
    ///
    /// # Errors
    /// EAGAIN: the queue is full. Others: the name is gone or belongs to another program.
    fn fill(&self, name: NameId) -> io::Result<()>;
    /// Removes a name, unless the name belongs to another program by now.
    fn remove(&self, name: NameId);
}

/// The name of a listening socket in the file system. Dropping the value removes the name.
pub(crate) struct BoundSocket {
    names: Arc<dyn SocketNames>,
    name: NameId,
}

impl BoundSocket {
    /// Makes a listening socket; see [`SocketNames::bind`].
    pub(crate) fn bind(
        names: &Arc<dyn SocketNames>,
        path: &Path,
        mode: u32,
        backlog: Backlog,
    ) -> Result<(UnixListener, BoundSocket), SocketError> {
        let (listener, bound) =
            BoundSocket::bind_kind(names, path, mode, SocketKind::Stream, backlog)?;
        Ok((listener.into(), bound))
    }

    /// Like [`bind`](Self::bind), for any kind of socket.
    pub(crate) fn bind_kind(
        names: &Arc<dyn SocketNames>,
        path: &Path,
        mode: u32,
        kind: SocketKind,
        backlog: Backlog,
    ) -> Result<(OwnedFd, BoundSocket), SocketError> {
        let (listener, name) = names.bind(path, mode, kind, backlog)?;
        Ok((listener, BoundSocket { names: names.clone(), name }))
    }

    pub(crate) fn name(&self) -> NameId {
        self.name
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        self.names.remove(self.name);
    }
}

/// How to treat an existing file when making a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StaleMode {
    /// Replace a socket without a listening program.
    Replace,
    /// Keep every file, and do not connect to one.
    Keep,
}

/// Device, inode and time of birth: inode numbers are reused, permissions and owners may change.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(path: &Path) -> io::Result<Identity> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino(), meta.created().ok()))
}

/// Sockets made by this process itself.
#[derive(Debug, Default)]
pub(crate) struct LocalNames {
    names: Mutex<Names>,
    /// Where [`Names`] are recorded, for a process taking over.
    notes: Option<File>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Names {
    last: NameId,
    known: BTreeMap<NameId, Name>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Name {
    path: PathBuf,
    /// Identity of the original socket: later, the name may belong to another program.
    identity: Option<Identity>,
    /// Whether this process has made the socket, and so has to remove it.
    is_own: bool,
}

impl LocalNames {
    /// Names recorded in a file, starting with the names recorded there by another process.
    pub(crate) fn noted_in(notes: File) -> LocalNames {
        let mut bytes = vec![0; notes.metadata().map_or(0, |data| data.len()) as usize];
        let read = notes.read_exact_at(&mut bytes, 0).ok();
        let names = read.and_then(|()| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        LocalNames { names: Mutex::new(names), notes: Some(notes) }
    }

    /// Number of names.
    pub(crate) fn count(&self) -> usize {
        lock(&self.names).known.len()
    }

    /// Like [`SocketNames::bind`]; `existing` decides about existing files.
    pub(crate) fn bind_at(
        &self,
        path: &Path,
        mode: u32,
        kind: SocketKind,
        backlog: Backlog,
        existing: StaleMode,
    ) -> Result<(OwnedFd, NameId), SocketError> {
        let (listener, identity) = bind_listener(path, mode, kind, backlog, existing)?;
        Ok((listener, self.note(path, Some(identity), true)))
    }

    fn note(&self, path: &Path, identity: Option<Identity>, is_own: bool) -> NameId {
        let mut names = lock(&self.names);
        names.last += 1;
        let name = names.last;
        names.known.insert(name, Name { path: path.into(), identity, is_own });
        self.write(&names);
        name
    }

    /// Records the names. Only a takeover depends on the record.
    fn write(&self, names: &Names) {
        let Some(notes) = &self.notes else { return };
        let written = serde_json::to_vec(names).map_err(io::Error::from).and_then(|bytes| {
            notes.write_all_at(&bytes, 0)?;
            notes.set_len(bytes.len() as u64)
        });
        if let Err(error) = written {
            tracing::warn!(%error, "the names of sockets are not noted");
        }
    }

    /// Removes all remaining names.
    pub(crate) fn remove_all(&self) {
        let names: Vec<NameId> = lock(&self.names).known.keys().copied().collect();
        for name in names {
            self.remove(name);
        }
    }
}

impl SocketNames for LocalNames {
    fn bind(
        &self,
        path: &Path,
        mode: u32,
        kind: SocketKind,
        backlog: Backlog,
    ) -> Result<(OwnedFd, NameId), SocketError> {
        self.bind_at(path, mode, kind, backlog, StaleMode::Replace)
    }

    fn pair(&self) -> io::Result<(UnixListener, OwnedFd)> {
        // Abstract, so in no directory visible to a container. A process guessing the name, or reading the
        // name in /proc/net/unix, could connect first: then this call fails, and no process gets a
        // descriptor.
        let name = uuid::Uuid::new_v4();
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let listener = unix_socket(SocketKind::Stream, SocketFlags::empty())?;
        bind(&listener, &address)?;
        listen(&listener, 0)?;
        let connected = unix_socket(SocketKind::Stream, SocketFlags::NONBLOCK)?;
        connect(&connected, &address)?;
        rustix::fs::fcntl_setfl(&connected, rustix::fs::OFlags::empty())?;
        Ok((listener.into(), connected))
    }

    fn adopt(&self, path: &Path) -> Result<NameId, SocketError> {
        Ok(self.note(path, identity(path).ok(), false))
    }

    fn fill(&self, name: NameId) -> io::Result<()> {
        let known = lock(&self.names).known.get(&name).cloned().ok_or(Errno::NOENT)?;
        if known.identity.is_none() || identity(&known.path).ok() != known.identity {
            return Err(Errno::NOENT.into());
        }
        let address = SocketAddrUnix::new(&known.path)?;
        Ok(connect(&unix_socket(SocketKind::Stream, SocketFlags::NONBLOCK)?, &address)?)
    }

    fn remove(&self, name: NameId) {
        let removed = {
            let mut names = lock(&self.names);
            let removed = names.known.remove(&name);
            self.write(&names);
            removed
        };
        let Some(Name { path, identity: made, is_own }) = removed else { return };
        let ours = is_own && made.is_some() && identity(&path).ok() == made;
        if ours && let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(?path, %error, "cannot remove socket");
        }
    }
}

/// The path of an inherited listening socket, if any.
pub(crate) fn path_of(listener: impl AsFd) -> Option<PathBuf> {
    let address = SocketAddrUnix::try_from(getsockname(listener).ok()?).ok()?;
    let path = address.path()?;
    Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
}

/// The directory of a file.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.into(),
        _ => PathBuf::from("."),
    }
}

/// See [`SocketNames::bind`].
fn bind_listener(
    path: &Path,
    mode: u32,
    kind: SocketKind,
    backlog: Backlog,
    existing: StaleMode,
) -> Result<(OwnedFd, Identity), SocketError> {
    let failed = |action| {
        move |error: Errno| SocketError::Io { action, path: path.into(), source: error.into() }
    };
    let address = SocketAddrUnix::new(path).map_err(failed("use"))?;
    let socket = unix_socket(kind, SocketFlags::empty()).map_err(failed("create"))?;
    // Linux derives the name's permissions from the socket's (less the umask).
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode)).map_err(failed("protect"))?;
    match bind(&socket, &address) {
        Err(Errno::ADDRINUSE) if existing == StaleMode::Keep => {
            return Err(SocketError::Exists(path.into()));
        }
        Err(Errno::ADDRINUSE) => {
            remove_stale(path, &address)?;
            bind(&socket, &address).map_err(failed("bind"))?;
        }
        other => other.map_err(failed("bind"))?,
    }
    // At once: a name without a listening program looks stale.
    listen(&socket, backlog.length()).map_err(failed("listen on"))?;
    let io_failed =
        |action| move |source: io::Error| SocketError::Io { action, path: path.into(), source };
    let identity = identity(path).map_err(io_failed("look at"))?;
    // The operator may have asked for bits removed by the umask.
    let made = std::fs::symlink_metadata(path).map_err(io_failed("look at"))?.permissions();
    if made.mode() & 0o777 != mode {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(io_failed("protect"))?;
    }
    Ok((socket, identity))
}

fn unix_socket(kind: SocketKind, flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, kind.of_kernel(), flags | SocketFlags::CLOEXEC, None)
}

fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let failed =
        |source: io::Error| SocketError::Io { action: "replace", path: path.into(), source };
    let meta = std::fs::symlink_metadata(path).map_err(failed)?;
    if !meta.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    // A socket of another kind refuses with another error, and so counts as in use as well.
    let probe = unix_socket(SocketKind::Stream, SocketFlags::NONBLOCK)
        .map_err(|error| failed(error.into()))?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(?path, "replacing a stale socket");
            std::fs::remove_file(path).map_err(failed)
        }
        _ => Err(SocketError::InUse(path.into())),
    }
}

#[cfg(test)]
mod tests {
    use smc_test_support::TestDir;

    use super::*;

    fn bind(path: &Path, mode: u32) -> Result<(UnixListener, BoundSocket), SocketError> {
        let names: Arc<dyn SocketNames> = Arc::new(LocalNames::default());
        BoundSocket::bind(&names, path, mode, Backlog::Several)
    }

    fn directory(_name: &str) -> TestDir {
        TestDir::new()
    }

    #[test]
    fn has_the_mode_asked_for_and_goes_with_its_owner() {
        let directory = directory("socket-mode");
        let path = directory.join("a.sock");
        for mode in [0o600, 0o660] {
            let (_listener, bound) = bind(&path, mode).unwrap();
            let meta = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!(meta.permissions().mode() & 0o777, mode);
            drop(bound);
            assert!(!path.exists());
        }
    }

    #[test]
    fn replaces_a_stale_socket_and_nothing_else() {
        let directory = directory("socket-stale");
        let path = directory.join("a.sock");
        let (listener, bound) = bind(&path, 0o600).unwrap();
        assert!(matches!(bind(&path, 0o600), Err(SocketError::InUse(_))));
        drop(listener);
        // The clock of file systems ticks in milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (_second, _bound) = bind(&path, 0o600).unwrap();
        drop(bound); // the name is another's by now
        assert!(path.exists());
        let file = directory.join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(bind(&file, 0o600), Err(SocketError::NotASocket(_))));
        assert!(file.exists());
        drop(_bound);
    }

    #[test]
    fn one_end_of_a_pair_is_in_the_queue_of_the_other() {
        let (listener, connected) = LocalNames::default().pair().unwrap();
        let (accepted, _) = listener.accept().unwrap();
        rustix::io::write(&connected, b"x").unwrap();
        assert_eq!(rustix::io::read(&accepted, &mut [0; 2]), Ok(1));
    }

    #[test]
    fn a_path_that_is_too_long_is_an_error() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        assert!(matches!(bind(&path, 0o600), Err(SocketError::Io { .. })));
    }
}
