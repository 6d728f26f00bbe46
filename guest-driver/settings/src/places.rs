// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The places where programs look for a fabric, one after the other.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

/// File name of the device of servers, made by "smc fabric".
pub const SERVER: &str = "a.sock";
/// File name of the device of clients, made by "smc fabric".
pub const CLIENT: &str = "b.sock";
/// File name of a device pool for all others.
pub const POOL: &str = "any.sock";
/// File name of a daemon's management socket.
pub const MANAGEMENT: &str = "management.sock";

/// Directory in a container for the files of `smc cdi`.
pub const CONTAINER: &str = "/run/smc";
/// The directory of statistics sockets in a container.
pub const CONTAINER_STATISTICS: &str = "/run/smc/statistics";
/// The directory of the packaged service.
const SERVICE: &str = "/run/vhost-device-ism";

/// A place for sockets of devices. Programs look at the places in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The device pool given to a container.
    Container,
    /// The device pool of the packaged service.
    Service,
    /// The fabric started by this user with "smc fabric".
    Own,
}

impl Place {
    /// The places, in their order.
    pub const ALL: [Place; 3] = [Place::Container, Place::Service, Place::Own];

    /// The directory of the sockets of devices. The directory need not exist.
    ///
    /// # Errors
    /// Others may write the directory.
    pub fn directory(self) -> Result<PathBuf, NotPrivate> {
        match self {
            Place::Container => Ok(Path::new(CONTAINER).join("pool")),
            Place::Service => Ok(Path::new(SERVICE).join("any")),
            Place::Own => own_directory(),
        }
    }

    /// The management socket, absent in containers.
    fn management(self) -> Option<PathBuf> {
        match self {
            Place::Container => None,
            Place::Service => Some(Path::new(SERVICE).join(MANAGEMENT)),
            Place::Own => Some(own_directory().ok()?.join(MANAGEMENT)),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Container => "the pool of this container",
            Place::Service => "the service vhost-device-ism",
            Place::Own => "\"smc fabric\" of this user",
        })
    }
}

/// A directory writable by others: they could put sockets of their own there.
#[derive(Debug, Error)]
#[error("{0} is not a directory that belongs to you alone")]
pub struct NotPrivate(pub PathBuf);

/// The directory of this user's own fabric: `$XDG_RUNTIME_DIR/smc`, else `smc-UID` among the temporary files,
/// where any user can make a directory of this name. The directory need not exist.
///
/// # Errors
/// The directory belongs to another user, or others may write the directory: they could read bytes sent
/// through sockets of theirs.
pub fn own_directory() -> Result<PathBuf, NotPrivate> {
    let dir = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("smc"),
        None => temporary_directory(),
    };
    private(dir)
}

fn temporary_directory() -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    std::env::temp_dir().join(format!("smc-{uid}"))
}

/// The directory, if missing or private to this user.
fn private(dir: PathBuf) -> Result<PathBuf, NotPrivate> {
    let Ok(found) = std::fs::symlink_metadata(&dir) else { return Ok(dir) };
    let private = found.is_dir()
        && found.uid() == rustix::process::geteuid().as_raw()
        && found.mode() & 0o022 == 0;
    if private { Ok(dir) } else { Err(NotPrivate(dir)) }
}

/// Makes [`own_directory`], for this user only. The directory of XDG_RUNTIME_DIR is left to the system.
///
/// # Errors
/// The directory cannot be made, or others may write the directory.
pub fn make_own_directory() -> io::Result<PathBuf> {
    make_private(own_directory())
}

fn make_private(dir: Result<PathBuf, NotPrivate>) -> io::Result<PathBuf> {
    let not_private = |why: NotPrivate| io::Error::new(ErrorKind::PermissionDenied, why);
    let dir = dir.map_err(not_private)?;
    match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        // Another process may have been faster.
        _ => private(dir).map_err(not_private),
    }
}

/// The directory for statistics sockets of this user's processes: the container's directory, or else
/// [`own_directory`], made here. `None`: others may write the directory, or it cannot be made.
pub fn make_statistics_directory() -> Option<PathBuf> {
    let container = Path::new(CONTAINER_STATISTICS);
    match container.is_dir() {
        true => Some(container.into()),
        false => make_own_directory().ok(),
    }
}

/// The file with the knowledge about servers for later programs of this user, in [`own_directory`], made here.
/// `None`: others may write the directory, or it cannot be made.
pub fn traffic_file() -> Option<PathBuf> {
    make_own_directory().ok().map(|directory| directory.join("traffic"))
}

/// The directory for the statistics of this process: the directory named at the start of its program. If the
/// program has become another user since, such as a server started by root: the directory of the new user
/// among the temporary files, made here. `None`: the directory cannot be made, or others may write it.
pub fn statistics_directory_of_now(named: &Path) -> Option<PathBuf> {
    let user = rustix::process::geteuid();
    let may_write = std::fs::metadata(named).is_ok_and(|found| {
        user.is_root() || found.uid() == user.as_raw() || found.mode() & 0o002 != 0
    });
    if may_write { Some(named.into()) } else { make_private(private(temporary_directory())).ok() }
}

/// The result of a look at a place.
#[derive(Debug)]
pub struct PlaceReport {
    /// The examined place.
    pub place: Place,
    /// Directory of the place.
    pub directory: PathBuf,
    /// The sockets of listening daemons usable by this user, sorted; or the reason for their absence.
    pub sockets: io::Result<Vec<PathBuf>>,
}

impl PlaceReport {
    /// Looks at a place.
    pub fn at(place: Place) -> PlaceReport {
        match place.directory() {
            Ok(directory) => PlaceReport::in_directory(place, directory),
            Err(NotPrivate(directory)) => {
                let why = io::Error::new(ErrorKind::PermissionDenied, "others may write it");
                PlaceReport { place, directory, sockets: Err(why) }
            }
        }
    }

    fn in_directory(place: Place, directory: PathBuf) -> PlaceReport {
        let sockets = device_sockets(&directory).and_then(|all| {
            let mut last = io::Error::from(ErrorKind::NotFound);
            let answers = |socket: &PathBuf| match probe(socket) {
                Ok(()) => true,
                Err(error) => {
                    last = error;
                    false
                }
            };
            let some: Vec<_> = all.into_iter().filter(answers).collect();
            if some.is_empty() { Err(last) } else { Ok(some) }
        });
        PlaceReport { place, directory, sockets }
    }
}

/// A fabric whose devices this user may use.
#[derive(Debug)]
pub struct Fabric {
    /// Place of the fabric.
    pub place: Place,
    /// The directory of the sockets.
    pub directory: PathBuf,
    /// The sockets, at least one.
    pub sockets: Vec<PathBuf>,
}

/// There is no fabric for this user: the results for each place instead.
#[derive(Debug)]
pub struct NoFabric(pub Vec<PlaceReport>);

impl NoFabric {
    /// The directory of the first present place closed to this user.
    pub fn denied(&self) -> Option<&PlaceReport> {
        let denied = |looked: &&PlaceReport| matches!(&looked.sockets, Err(why) if why.kind() == ErrorKind::PermissionDenied);
        self.0.iter().find(denied)
    }
}

impl fmt::Display for NoFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no device is in ")?;
        for (at, PlaceReport { directory, sockets, .. }) in self.0.iter().enumerate() {
            let before = if at == 0 { "" } else { ", " };
            write!(f, "{before}{}", directory.display())?;
            match sockets {
                Err(why) if why.kind() != ErrorKind::NotFound => write!(f, " ({why})")?,
                _ => {}
            }
        }
        Ok(())
    }
}

impl std::error::Error for NoFabric {}

/// The first place whose devices this user may use.
///
/// # Errors
/// There is none.
pub fn find_fabric() -> Result<Fabric, NoFabric> {
    first(Place::ALL.into_iter().map(PlaceReport::at))
}

fn first(places: impl Iterator<Item = PlaceReport>) -> Result<Fabric, NoFabric> {
    let mut without = Vec::new();
    for looked in places {
        match looked {
            PlaceReport { place, directory, sockets: Ok(sockets) } => {
                return Ok(Fabric { place, directory, sockets });
            }
            looked => without.push(looked),
        }
    }
    Err(NoFabric(without))
}

/// The management socket of the first daemon open to this user, in the order of the places; otherwise the
/// first existing socket, or else the socket of the user's own fabric.
///
/// # Errors
/// No management socket is open to this user, and others may write the directory of its own fabric.
pub fn find_management() -> Result<PathBuf, NotPrivate> {
    let all: Vec<_> = Place::ALL.into_iter().filter_map(Place::management).collect();
    if let Some(asked) = all.iter().find(|socket| probe(socket).is_ok()) {
        return Ok(asked.clone());
    }
    let own = own_directory()?.join(MANAGEMENT);
    Ok(all.iter().find(|socket| closed_or_there(socket)).cloned().unwrap_or(own))
}

/// Whether a file exists at a path, possibly behind a closed directory.
fn closed_or_there(path: &Path) -> bool {
    path.symlink_metadata()
        .map_or_else(|error| error.kind() == ErrorKind::PermissionDenied, |_| true)
}

/// The sockets of devices in a directory, sorted. Sockets of the management interface and of processes may
/// lie beside them.
///
/// # Errors
/// The directory is missing, or this user may not read the directory.
pub fn device_sockets(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let is_device = |path: &PathBuf| {
        path.file_name().map(|name| name.to_string_lossy()).is_some_and(|name| {
            name.ends_with(".sock") && !name.starts_with("process-") && name != MANAGEMENT
        })
    };
    let mut sockets: Vec<_> = std::fs::read_dir(directory)?
        .flatten()
        .map(|entry| entry.path())
        .filter(is_device)
        .collect();
    sockets.sort();
    Ok(sockets)
}

/// Checks for a listening program on a Unix stream socket open to this user. No connection is made: the probe
/// is a socket of another type, and the kernel reports the wrong type in place of a connection.
///
/// # Errors
/// The file is missing, no program listens, or this user may not connect.
pub fn probe(socket: &Path) -> io::Result<()> {
    match UnixDatagram::unbound()?.connect(socket) {
        Err(error) if error.raw_os_error() == Some(Errno::PROTOTYPE.raw_os_error()) => Ok(()),
        Err(error) => Err(error),
        // A socket of datagrams: no daemon has one.
        Ok(()) => Err(ErrorKind::ConnectionRefused.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use smc_test_support::TestDir;

    use super::*;

    struct TestDirectory(TestDir);

    impl TestDirectory {
        fn new(_name: &str) -> TestDirectory {
            TestDirectory(TestDir::new())
        }

        fn looked(&self, place: Place) -> PlaceReport {
            PlaceReport::in_directory(place, self.0.to_owned())
        }
    }

    #[test]
    fn the_first_place_with_a_device_that_answers_is_used() {
        let [pool, service, own] = ["pool", "service", "own"].map(TestDirectory::new);
        let all = || {
            first(
                [
                    pool.looked(Place::Container),
                    service.looked(Place::Service),
                    own.looked(Place::Own),
                ]
                .into_iter(),
            )
        };
        let none = all().unwrap_err();
        assert!(none.denied().is_none() && none.0.len() == 3, "{none}");
        let _own = UnixListener::bind(own.0.join(SERVER)).unwrap();
        assert_eq!(all().unwrap().place, Place::Own);
        // An ended daemon has left its socket behind.
        drop(UnixListener::bind(service.0.join(POOL)).unwrap());
        assert_eq!(all().unwrap().place, Place::Own);
        std::fs::remove_file(service.0.join(POOL)).unwrap();
        let _service = UnixListener::bind(service.0.join(POOL)).unwrap();
        let found = all().unwrap();
        assert_eq!((found.place, found.sockets), (Place::Service, vec![service.0.join(POOL)]));
        let _pool = UnixListener::bind(pool.0.join("web.sock")).unwrap();
        assert_eq!(all().unwrap().place, Place::Container);
    }

    #[test]
    fn sockets_that_are_no_devices_are_left_out() {
        let place = TestDirectory::new("kinds");
        for name in [MANAGEMENT, "process-7.sock", "notes.txt", "b.sock", "a.sock"] {
            std::fs::write(place.0.join(name), "").unwrap();
        }
        let found = device_sockets(&place.0).unwrap();
        assert_eq!(found, [place.0.join("a.sock"), place.0.join("b.sock")]);
        assert!(device_sockets(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn a_probe_tells_who_listens_and_connects_to_nobody() {
        let place = TestDirectory::new("probe");
        let path = place.0.join("x.sock");
        assert_eq!(probe(&path).unwrap_err().kind(), ErrorKind::NotFound);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        probe(&path).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(listener);
        assert_eq!(probe(&path).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        std::fs::write(place.0.join("file"), "").unwrap();
        assert!(probe(&place.0.join("file")).is_err());
    }

    #[test]
    fn a_closed_place_is_told_from_one_that_is_not_there() {
        let denied = || io::Error::from(ErrorKind::PermissionDenied);
        let looked = |place, sockets| PlaceReport { place, directory: "/run/x".into(), sockets };
        let none = NoFabric(vec![
            looked(Place::Container, Err(ErrorKind::NotFound.into())),
            looked(Place::Service, Err(denied())),
        ]);
        assert_eq!(none.denied().unwrap().place, Place::Service);
        assert_eq!(none.to_string(), "no device is in /run/x, /run/x (permission denied)");
    }
}
