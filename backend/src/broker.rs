//! The broker: a small process that stays outside of the daemon's sandbox, and does for it what
//! needs a path.
//!
//! The daemon maps the memory of all its guests, so one that takes it over should find nothing to
//! go on with. It cannot make, connect or remove a socket. For a guest that is added at run time,
//! for the queue of a device socket, and at the end, it asks the broker, which does that and nothing
//! else, in the directories of the sockets that were configured. The broker never sees a byte of a
//! guest.
//!
//! A request is one message of a socket of packets, its answer another, with the new sockets beside
//! it. The broker ends when the daemon does, and removes the sockets that are left.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

use crate::device::sync::lock;
use crate::fork;
use crate::packets::{receive, send};
use crate::vhost::unix_socket::{
    Backlog, LocalNames, NameId, SocketError, SocketKind, SocketNames,
};

/// What the daemon asks for. Paths are bytes.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// Make a listening socket.
    Bind { path: Vec<u8>, mode: u32, kind: SocketKind, backlog: Backlog },
    /// Make a listening socket that nobody else can reach, and one that is connected to it.
    Pair,
    /// Take note of a listening socket that was inherited.
    Adopt { path: Vec<u8> },
    /// Begin a connection that stays in the queue of a socket.
    Fill { name: NameId },
    /// Remove the name of a socket.
    Remove { name: NameId },
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Done { name: NameId },
    InUse,
    NotASocket,
    Failed { errno: i32 },
}

/// The daemon's end.
#[derive(Debug)]
pub(crate) struct Broker {
    /// Locked over a request and its answer. The broker waits for nobody, so no thread does.
    channel: Mutex<OwnedFd>,
    /// Where it may make sockets.
    directories: Vec<PathBuf>,
}

impl Broker {
    /// Starts the broker, which calls `confine` and then serves this process. `inherited` are paths
    /// of sockets that may be adopted, `directories` those in which `confine` allows sockets. To be
    /// called while there is one thread.
    ///
    /// # Errors
    /// The kernel makes no socket or no process.
    pub(crate) fn start(
        inherited: Vec<PathBuf>,
        directories: Vec<PathBuf>,
        confine: impl FnOnce() -> bool,
    ) -> io::Result<Broker> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut ours = Some(ours);
        fork::in_child(|| {
            // Else the end of the daemon would not be seen.
            drop(ours.take());
            let _ = rustix::thread::set_name(c"broker");
            // Sockets get the modes that are asked for, without a change of mode by path.
            let _ = rustix::process::umask(Mode::empty());
            if confine() {
                serve(&theirs, &inherited);
            }
        })?;
        let channel = ours.ok_or(Errno::BADF)?;
        Ok(Broker { channel: Mutex::new(channel), directories })
    }

    fn ask(&self, request: &Request) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let channel = lock(&self.channel);
        send(&channel, request, &[])?;
        let (answer, fds) = receive(&channel)?;
        Ok((answer.ok_or_else(|| io::Error::other("the broker has ended"))?, fds))
    }

    fn ask_about(
        &self,
        path: &Path,
        request: &Request,
    ) -> Result<(NameId, Vec<OwnedFd>), SocketError> {
        let failed = |source| SocketError::Io { action: "make", path: path.into(), source };
        match self.ask(request).map_err(failed)? {
            (Answer::Done { name }, fds) => Ok((name, fds)),
            (Answer::InUse, _) => Err(SocketError::InUse(path.into())),
            (Answer::NotASocket, _) => Err(SocketError::NotASocket(path.into())),
            (Answer::Failed { errno: libc::EACCES }, _) if self.is_outside(path) => {
                Err(SocketError::OutsideSandbox(path.into()))
            }
            (Answer::Failed { errno }, _) => Err(failed(io::Error::from_raw_os_error(errno))),
        }
    }

    /// Whether a path lies in none of its directories.
    fn is_outside(&self, path: &Path) -> bool {
        let directory = path.parent().unwrap_or(Path::new(""));
        !self.directories.iter().any(|known| known == directory)
    }
}

impl SocketNames for Broker {
    fn bind(
        &self,
        path: &Path,
        mode: u32,
        kind: SocketKind,
        backlog: Backlog,
    ) -> Result<(OwnedFd, NameId), SocketError> {
        let path_bytes = path.as_os_str().as_bytes().to_vec();
        let request = Request::Bind { path: path_bytes, mode, kind, backlog };
        let (name, fds) = self.ask_about(path, &request)?;
        match fds.into_iter().next() {
            Some(socket) => Ok((socket, name)),
            None => Err(SocketError::Io { action: "make", path: path.into(), source: no_socket() }),
        }
    }

    fn pair(&self) -> io::Result<(UnixListener, OwnedFd)> {
        let (answer, fds) = self.ask(&Request::Pair)?;
        match (answer, <[OwnedFd; 2]>::try_from(fds)) {
            (Answer::Done { .. }, Ok([listener, connected])) => Ok((listener.into(), connected)),
            (Answer::Failed { errno }, _) => Err(io::Error::from_raw_os_error(errno)),
            _ => Err(no_socket()),
        }
    }

    fn adopt(&self, path: &Path) -> Result<NameId, SocketError> {
        let request = Request::Adopt { path: path.as_os_str().as_bytes().to_vec() };
        Ok(self.ask_about(path, &request)?.0)
    }

    fn fill(&self, name: NameId) -> io::Result<()> {
        match self.ask(&Request::Fill { name })?.0 {
            Answer::Done { .. } => Ok(()),
            Answer::Failed { errno } => Err(io::Error::from_raw_os_error(errno)),
            Answer::InUse | Answer::NotASocket => Err(Errno::INVAL.into()),
        }
    }

    fn remove(&self, name: NameId) {
        if let Err(error) = self.ask(&Request::Remove { name }) {
            tracing::warn!(%error, "a socket's name is left");
        }
    }
}

fn no_socket() -> io::Error {
    io::Error::other("the broker gave no socket")
}

/// Serves the daemon until it ends.
fn serve(channel: &OwnedFd, inherited: &[PathBuf]) {
    let names = LocalNames::default();
    while let Ok((Some(request), _)) = receive(channel) {
        let (answer, fds) = match carry_out(&names, inherited, request) {
            Ok(done) => done,
            Err(SocketError::InUse(_)) => (Answer::InUse, Vec::new()),
            Err(SocketError::NotASocket(_)) => (Answer::NotASocket, Vec::new()),
            Err(SocketError::OutsideSandbox(_)) => {
                (Answer::Failed { errno: libc::EACCES }, Vec::new())
            }
            Err(SocketError::Kind { .. }) => {
                (Answer::Failed { errno: libc::EPROTOTYPE }, Vec::new())
            }
            Err(SocketError::Io { source, .. }) => {
                (Answer::Failed { errno: source.raw_os_error().unwrap_or(libc::EIO) }, Vec::new())
            }
        };
        if send(channel, &answer, &fds).is_err() {
            break;
        }
    }
    names.remove_all();
}

fn carry_out(
    names: &LocalNames,
    inherited: &[PathBuf],
    request: Request,
) -> Result<(Answer, Vec<OwnedFd>), SocketError> {
    let path = |bytes: Vec<u8>| PathBuf::from(std::ffi::OsString::from_vec(bytes));
    let unnamed = |action| move |source| SocketError::Io { action, path: PathBuf::new(), source };
    let (name, fds) = match request {
        Request::Bind { path: bytes, mode, kind, backlog } => {
            let (listener, name) = names.bind(&path(bytes), mode & 0o777, kind, backlog)?;
            (name, vec![listener])
        }
        Request::Pair => {
            let (listener, connected) = names.pair().map_err(unnamed("make"))?;
            (0, vec![listener.into(), connected])
        }
        Request::Adopt { path: bytes } => {
            let path = path(bytes);
            if !inherited.contains(&path) {
                let source = Errno::PERM.into();
                return Err(SocketError::Io { action: "use", path, source });
            }
            (names.adopt(&path)?, Vec::new())
        }
        Request::Fill { name } => {
            names.fill(name).map_err(unnamed("fill"))?;
            (name, Vec::new())
        }
        Request::Remove { name } => {
            names.remove(name);
            (name, Vec::new())
        }
    };
    Ok((Answer::Done { name }, fds))
}
