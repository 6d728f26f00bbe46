// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The broker: a small process outside the daemon's sandbox, for operations needing a path.
//!
//! The daemon maps the memory of all its guests, so an attacker in the daemon should gain as little as
//! possible. The daemon cannot make, connect or remove a socket. For a guest added at run time, for the queue
//! of a device socket, and at the end, the daemon asks the broker. The broker does only this, in the
//! directories of the configured sockets. The broker never sees a byte of a guest.
//!
//! The broker does not trust the daemon: see [`BrokerLimits`]. A path outside its directories always gets the
//! same answer, before any look at the file system.
//!
//! New sockets come with the answer to a request. The broker ends with the daemon, and removes the remaining
//! sockets.
//!
//! The broker's parent process only waits for the broker's end. If the broker is killed, the parent makes
//! another one with the recorded names, and tells the daemon of a possibly lost request. If both are gone,
//! [`Broker::on_end`] tells the daemon.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, memfd_create};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::service::fork;
use crate::service::helper::{Helper, Service};
use crate::vhost::event_loop::{LoopHandle, Registration};
use crate::vhost::unix_socket::{
    Backlog, LocalNames, NameId, SocketError, SocketKind, SocketNames, StaleMode, directory_of,
};

/// Most names for guests added beside the configuration.
const MAX_ADDED: usize = 4096;

/// The daemon's requests. Paths are bytes.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// Make a listening socket.
    Bind { path: Vec<u8>, mode: u32, kind: SocketKind, backlog: Backlog },
    /// Make a listening socket out of reach of other processes, and a socket connected to the first.
    Pair,
    /// Register an inherited listening socket.
    Adopt { path: Vec<u8> },
    /// Begin a connection; the connection stays in the queue of a socket.
    Fill { name: NameId },
    /// Remove the name of a socket.
    Remove { name: NameId },
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Done { name: NameId },
    InUse,
    NotASocket,
    Outside,
    Exists,
    TooMany { limit: usize },
    Failed { errno: i32 },
}

/// Limits of the broker's work for the daemon.
#[derive(Clone, Debug)]
pub(crate) struct BrokerLimits {
    /// The broker makes sockets only directly in one of these.
    pub(crate) directories: Vec<PathBuf>,
    /// Paths of the configuration. Only at these paths the broker replaces a stale socket, or connects to a
    /// socket to find out whether the socket is stale.
    pub(crate) configured: BTreeSet<PathBuf>,
    /// Paths of adoptable sockets.
    pub(crate) inherited: BTreeSet<PathBuf>,
}

/// The daemon's end. The broker never waits, so no thread waits long for an answer.
#[derive(Debug)]
pub(crate) struct Broker(Helper<Request, Answer>);

impl Broker {
    /// Starts the broker and its parent. The parent calls `confine`, and the broker `confine_further`. To be
    /// called while there is one thread.
    ///
    /// # Errors
    /// The kernel makes no socket, file or process.
    pub(crate) fn start(
        rules: BrokerLimits,
        confine: impl FnOnce() -> bool,
        confine_further: impl Fn() -> bool,
    ) -> io::Result<Broker> {
        let notes = File::from(memfd_create("names", MemfdFlags::CLOEXEC)?);
        let helper = Helper::start(c"broker", None, |service| {
            // Sockets get the requested modes, without a change of mode by path.
            let _ = rustix::process::umask(Mode::empty());
            if !confine() {
                return;
            }
            let work = || match notes.try_clone() {
                Ok(notes) if confine_further() => serve(service, &rules, notes),
                Ok(_) => {}
                Err(error) => tracing::error!(%error, "no broker"),
            };
            fork::until_it_returns(work, |how| {
                tracing::error!("the broker {how}; another one is made");
                service.say_lost();
            });
        })?;
        Ok(Broker(helper))
    }

    fn ask_about(
        &self,
        path: &Path,
        request: Request,
    ) -> Result<(NameId, Vec<OwnedFd>), SocketError> {
        let failed = |source| SocketError::Io { action: "make", path: path.into(), source };
        match self.0.ask(request).map_err(failed)? {
            (Answer::Done { name }, fds) => Ok((name, fds)),
            (Answer::InUse, _) => Err(SocketError::InUse(path.into())),
            (Answer::NotASocket, _) => Err(SocketError::NotASocket(path.into())),
            (Answer::Outside, _) => Err(SocketError::OutsideSandbox(path.into())),
            (Answer::Exists, _) => Err(SocketError::Exists(path.into())),
            (Answer::TooMany { limit }, _) => {
                Err(SocketError::TooMany { path: path.into(), limit })
            }
            (Answer::Failed { errno }, _) => Err(failed(io::Error::from_raw_os_error(errno))),
        }
    }

    /// Makes the loop call `on_end` after the end of both the broker and its parent.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn on_end(
        &self,
        events: &LoopHandle,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Registration> {
        self.0.on_end(events, on_end)
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
        let (name, fds) = self.ask_about(path, request)?;
        match fds.into_iter().next() {
            Some(socket) => Ok((socket, name)),
            None => Err(SocketError::Io { action: "make", path: path.into(), source: no_socket() }),
        }
    }

    fn pair(&self) -> io::Result<(UnixListener, OwnedFd)> {
        let (answer, fds) = self.0.ask(Request::Pair)?;
        match (answer, <[OwnedFd; 2]>::try_from(fds)) {
            (Answer::Done { .. }, Ok([listener, connected])) => Ok((listener.into(), connected)),
            (Answer::Failed { errno }, _) => Err(io::Error::from_raw_os_error(errno)),
            _ => Err(no_socket()),
        }
    }

    fn adopt(&self, path: &Path) -> Result<NameId, SocketError> {
        let request = Request::Adopt { path: path.as_os_str().as_bytes().to_vec() };
        Ok(self.ask_about(path, request)?.0)
    }

    fn fill(&self, name: NameId) -> io::Result<()> {
        match self.0.ask(Request::Fill { name })?.0 {
            Answer::Done { .. } => Ok(()),
            Answer::Failed { errno } => Err(io::Error::from_raw_os_error(errno)),
            _ => Err(Errno::INVAL.into()),
        }
    }

    fn is_up(&self) -> Option<bool> {
        Some(self.0.is_up())
    }

    fn remove(&self, name: NameId) {
        if let Err(error) = self.0.ask(Request::Remove { name }) {
            tracing::warn!(%error, "a socket's name is left");
        }
    }
}

fn no_socket() -> io::Error {
    io::Error::other("the broker gave no socket")
}

/// Serves the daemon until the daemon's end.
fn serve(service: &Service<Request, Answer>, rules: &BrokerLimits, notes: File) {
    let names = LocalNames::noted_in(notes);
    service.serve(|request| {
        carry_out(&names, rules, request).unwrap_or_else(|error| (answer_of(&error), Vec::new()))
    });
    names.remove_all();
}

fn answer_of(error: &SocketError) -> Answer {
    match error {
        SocketError::InUse(_) => Answer::InUse,
        SocketError::NotASocket(_) => Answer::NotASocket,
        SocketError::OutsideSandbox(_) => Answer::Outside,
        SocketError::Exists(_) => Answer::Exists,
        SocketError::TooMany { limit, .. } => Answer::TooMany { limit: *limit },
        SocketError::Kind { .. } => Answer::Failed { errno: libc::EPROTOTYPE },
        SocketError::Io { source, .. } => {
            Answer::Failed { errno: source.raw_os_error().unwrap_or(libc::EIO) }
        }
    }
}

impl BrokerLimits {
    /// The full path of an allowed socket, and the treatment of an existing one.
    fn check(&self, path: &Path, names: usize) -> Result<(PathBuf, StaleMode), SocketError> {
        let directory = directory_of(path);
        let (true, Some(file)) = (self.directories.contains(&directory), path.file_name()) else {
            return Err(SocketError::OutsideSandbox(path.into()));
        };
        let limit = self.configured.len() + self.inherited.len() + MAX_ADDED;
        if names >= limit {
            return Err(SocketError::TooMany { path: path.into(), limit });
        }
        let is_configured = self.configured.contains(path);
        let existing = if is_configured { StaleMode::Replace } else { StaleMode::Keep };
        Ok((directory.join(file), existing))
    }
}

fn carry_out(
    names: &LocalNames,
    rules: &BrokerLimits,
    request: Request,
) -> Result<(Answer, Vec<OwnedFd>), SocketError> {
    let path = |bytes: Vec<u8>| PathBuf::from(std::ffi::OsString::from_vec(bytes));
    let unnamed = |action| move |source| SocketError::Io { action, path: PathBuf::new(), source };
    let (name, fds) = match request {
        Request::Bind { path: bytes, mode, kind, backlog } => {
            let (path, existing) = rules.check(&path(bytes), names.count())?;
            let (listener, name) = names.bind_at(&path, mode & 0o777, kind, backlog, existing)?;
            (name, vec![listener])
        }
        Request::Pair => {
            let (listener, connected) = names.pair().map_err(unnamed("make"))?;
            (0, vec![listener.into(), connected])
        }
        Request::Adopt { path: bytes } => {
            let path = path(bytes);
            if !rules.inherited.contains(&path) {
                return Err(SocketError::OutsideSandbox(path));
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

#[cfg(test)]
mod tests {
    use super::*;
    use smc_test_support::TestDir;
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    struct Place(TestDir);

    impl Place {
        fn new(_name: &str) -> Place {
            let place = TestDir::new();
            std::fs::create_dir(place.path("below")).unwrap();
            Place(place)
        }

        fn rules(&self) -> BrokerLimits {
            BrokerLimits {
                directories: vec![self.0.to_owned()],
                configured: [self.0.join("a")].into(),
                inherited: BTreeSet::new(),
            }
        }
    }

    fn bind(names: &LocalNames, rules: &BrokerLimits, path: &Path) -> Result<NameId, SocketError> {
        let (path, kind) = (path.as_os_str().as_bytes().to_vec(), SocketKind::Stream);
        let request = Request::Bind { path, mode: 0o600, kind, backlog: Backlog::One };
        match carry_out(names, rules, request)? {
            (Answer::Done { name }, _) => Ok(name),
            (other, _) => panic!("{other:?}"),
        }
    }

    #[test]
    fn sockets_are_made_in_the_directories_and_nowhere_below_or_beside() {
        let place = Place::new("broker-outside");
        let (names, rules) = (LocalNames::default(), place.rules());
        let live = UnixListener::bind(place.0.join("below/live")).unwrap();
        live.set_nonblocking(true).unwrap();
        std::fs::write(place.0.join("below/file"), "").unwrap();
        for path in
            ["below/new", "below/live", "below/file", "below/../b", "../b", "no/b", "..", ""]
        {
            let refused = bind(&names, &rules, &place.0.join(path)).unwrap_err();
            assert!(matches!(refused, SocketError::OutsideSandbox(_)), "{path}: {refused}");
        }
        for path in ["/run/docker.sock", "/etc/passwd", "relative", "/", ""] {
            let refused = bind(&names, &rules, Path::new(path)).unwrap_err();
            assert!(matches!(refused, SocketError::OutsideSandbox(_)), "{path}: {refused}");
        }
        assert!(live.accept().is_err(), "nobody has connected");
        assert!(bind(&names, &rules, &place.0.join("b")).is_ok());
    }

    #[test]
    fn a_socket_that_is_not_of_the_configuration_is_neither_replaced_nor_connected_to() {
        let place = Place::new("broker-replace");
        let (names, rules) = (LocalNames::default(), place.rules());
        let live = UnixListener::bind(place.0.join("live")).unwrap();
        live.set_nonblocking(true).unwrap();
        for stale in ["a", "stale"] {
            drop(UnixListener::bind(place.0.join(stale)).unwrap());
        }
        for path in ["live", "stale"] {
            let refused = bind(&names, &rules, &place.0.join(path)).unwrap_err();
            assert!(matches!(refused, SocketError::Exists(_)), "{path}: {refused}");
        }
        assert!(live.accept().is_err(), "nobody has connected");
        assert!(bind(&names, &rules, &place.0.join("a")).is_ok());
    }

    #[test]
    fn a_name_that_is_another_programs_by_now_is_not_connected_to() {
        let place = Place::new("broker-fill");
        let (names, rules) = (LocalNames::default(), place.rules());
        let name = bind(&names, &rules, &place.0.join("a")).unwrap();
        std::fs::remove_file(place.0.join("a")).unwrap();
        // The clock of file systems ticks in milliseconds.
        std::thread::sleep(Duration::from_millis(20));
        let other = UnixListener::bind(place.0.join("a")).unwrap();
        other.set_nonblocking(true).unwrap();
        assert!(carry_out(&names, &rules, Request::Fill { name }).is_err());
        assert!(other.accept().is_err(), "nobody has connected");
    }

    #[test]
    fn the_number_of_sockets_is_limited() {
        let place = Place::new("broker-many");
        let (names, rules) = (LocalNames::default(), place.rules());
        let made = (0..10_000)
            .take_while(|n| bind(&names, &rules, &place.0.join(format!("s{n}"))).is_ok())
            .count();
        assert_eq!(made, MAX_ADDED + 1);
        let refused = bind(&names, &rules, &place.0.join("a")).unwrap_err();
        assert!(matches!(refused, SocketError::TooMany { .. }), "{refused}");
        names.remove_all();
        assert!(bind(&names, &rules, &place.0.join("a")).is_ok());
    }

    #[test]
    fn the_next_broker_knows_the_names_of_the_one_before() {
        let place = Place::new("broker-next");
        let rules = place.rules();
        let notes = File::from(memfd_create("names", MemfdFlags::CLOEXEC).unwrap());
        let first = LocalNames::noted_in(notes.try_clone().unwrap());
        let kept = bind(&first, &rules, &place.0.join("a")).unwrap();
        let gone = bind(&first, &rules, &place.0.join("b")).unwrap();
        first.remove(gone);
        let next = LocalNames::noted_in(notes);
        assert_eq!(next.count(), 1);
        assert_ne!(bind(&next, &rules, &place.0.join("b")).unwrap(), kept);
        next.remove_all();
        assert!(!place.0.join("a").exists() && !place.0.join("b").exists());
    }
}
