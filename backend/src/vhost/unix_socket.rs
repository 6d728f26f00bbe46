//! Unix sockets as the daemon makes them: not open to others for a moment, stale ones replaced,
//! removed at the end.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname, listen,
    socket_with,
};
use thiserror::Error;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 8;

/// Why a socket cannot be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Another program listens there.
    #[error("{0} is in use by another program")]
    InUse(PathBuf),
    /// Something else than a socket has that name.
    #[error("{0} exists and is not a socket")]
    NotASocket(PathBuf),
    /// The system refuses.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket and the name it has in the file system, which goes when this goes.
#[derive(Debug)]
pub(crate) struct BoundSocket {
    path: PathBuf,
    /// At the end, the name may belong to another program's socket.
    identity: Identity,
}

/// Device, inode and time of birth: inode numbers come back, permissions and owners may change.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(path: &Path) -> io::Result<Identity> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino(), meta.created().ok()))
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        let ours = identity(&self.path).is_ok_and(|there| there == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove socket");
        }
    }
}

/// Makes a listening socket with permission bits `mode`. A socket that is there already is
/// replaced if no program listens on it.
pub(crate) fn bind_listener(
    path: &Path,
    mode: u32,
) -> Result<(UnixListener, BoundSocket), SocketError> {
    let failed = |action| {
        move |error: Errno| SocketError::Io { action, path: path.into(), source: error.into() }
    };
    let address = SocketAddrUnix::new(path).map_err(failed("use"))?;
    let socket = unix_socket(SocketFlags::empty()).map_err(failed("create"))?;
    // Linux takes the permissions of the name from those of the socket (less the umask).
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode)).map_err(failed("protect"))?;
    match bind(&socket, &address) {
        Err(Errno::ADDRINUSE) => {
            remove_stale(path, &address)?;
            bind(&socket, &address).map_err(failed("bind"))?;
        }
        other => other.map_err(failed("bind"))?,
    }
    // At once: a name on which no program listens looks stale.
    listen(&socket, BACKLOG).map_err(failed("listen on"))?;
    let io_failed =
        |action| move |source: io::Error| SocketError::Io { action, path: path.into(), source };
    let identity = identity(path).map_err(io_failed("look at"))?;
    let bound = BoundSocket { path: path.into(), identity };
    // What the umask took away, the operator may have asked for.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(io_failed("protect"))?;
    Ok((UnixListener::from(socket), bound))
}

/// Begins a connection to a listener of this process, which stays in the listener's queue.
///
/// # Errors
/// [`Errno::AGAIN`]: the queue is full. Others: the listener's name is another's, or gone.
pub(super) fn connect_to_oneself(listener: &UnixListener) -> rustix::io::Result<()> {
    let address = SocketAddrUnix::try_from(getsockname(listener)?)?;
    connect(&unix_socket(SocketFlags::NONBLOCK)?, &address)
}

fn unix_socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags | SocketFlags::CLOEXEC, None)
}

fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let failed =
        |source: io::Error| SocketError::Io { action: "replace", path: path.into(), source };
    let meta = std::fs::symlink_metadata(path).map_err(failed)?;
    if !meta.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    let probe = unix_socket(SocketFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "replacing a stale socket");
            std::fs::remove_file(path).map_err(failed)
        }
        _ => Err(SocketError::InUse(path.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ism-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn has_the_mode_asked_for_and_goes_with_its_owner() {
        let directory = directory("socket-mode");
        let path = directory.join("a.sock");
        for mode in [0o600, 0o660] {
            let (_listener, bound) = bind_listener(&path, mode).unwrap();
            let meta = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!(meta.permissions().mode() & 0o777, mode);
            drop(bound);
            assert!(!path.exists());
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn replaces_a_stale_socket_and_nothing_else() {
        let directory = directory("socket-stale");
        let path = directory.join("a.sock");
        let (listener, bound) = bind_listener(&path, 0o600).unwrap();
        assert!(matches!(bind_listener(&path, 0o600), Err(SocketError::InUse(_))));
        drop(listener);
        // The clock of file systems ticks in milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (_second, _bound) = bind_listener(&path, 0o600).unwrap();
        drop(bound); // the name is another's by now
        assert!(path.exists());
        let file = directory.join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(bind_listener(&file, 0o600), Err(SocketError::NotASocket(_))));
        assert!(file.exists());
        drop(_bound);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_path_that_is_too_long_is_an_error() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        assert!(matches!(bind_listener(&path, 0o600), Err(SocketError::Io { .. })));
    }
}
