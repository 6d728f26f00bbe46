// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Default paths of sockets, so that commands in different terminals find each other without options.

use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::CliError;

/// File name of the device of servers (`smc listen`).
pub(crate) const SERVER: &str = "a.sock";
/// File name of the device of clients (`smc connect`).
pub(crate) const CLIENT: &str = "b.sock";
/// File name of the device pool of those for whom these are in use.
pub(crate) const POOL: &str = "any.sock";
/// File name of the daemon's management socket.
pub(crate) const MANAGEMENT: &str = "management.sock";

/// Where a container has what `smc cdi` gives it.
pub(crate) const CONTAINER: &str = "/run/smc";
/// The directory of statistics sockets in a container.
pub(crate) const CONTAINER_STATISTICS: &str = "/run/smc/statistics";

/// The directory of the default sockets: `$XDG_RUNTIME_DIR/smc`, else `smc-UID` among the temporary
/// files, where anybody can make a directory of that name. It need not exist.
///
/// # Errors
/// It belongs to another user, or others may write it: they could put sockets of their own into it,
/// and read what is sent through them.
pub(crate) fn directory() -> Result<PathBuf, CliError> {
    let dir = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("smc"),
        None => {
            let uid = rustix::process::getuid().as_raw();
            std::env::temp_dir().join(format!("smc-{uid}"))
        }
    };
    let Ok(found) = std::fs::symlink_metadata(&dir) else { return Ok(dir) };
    let private = found.is_dir()
        && found.uid() == rustix::process::geteuid().as_raw()
        && found.mode() & 0o022 == 0;
    if private { Ok(dir) } else { Err(CliError::NotPrivate(dir)) }
}

/// A socket in [`directory`].
///
/// # Errors
/// Those of [`directory`].
pub(crate) fn socket(name: &str) -> Result<PathBuf, CliError> {
    Ok(directory()?.join(name))
}

/// Checks that a daemon listens on the socket of a device, which another process may be using. The
/// connection is closed before a byte is sent.
///
/// # Errors
/// No daemon listens there, or this user may not connect.
pub(crate) fn listens(socket: &Path) -> std::io::Result<()> {
    match ism_sys::connect_unix(socket, Duration::ZERO) {
        // A device pool: a connection would ask for a device.
        Err(error) if ism_sys::is_other_kind(&error) => Ok(()),
        Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

/// Makes [`directory`], for this user only. Not the one that XDG_RUNTIME_DIR names: it is the
/// system's to make.
///
/// # Errors
/// It cannot be made, or those of [`directory`].
pub(crate) fn make_directory() -> Result<PathBuf, CliError> {
    let dir = directory()?;
    let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
    let made = made.or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    });
    made.map_err(CliError::io(format!("cannot make {}", dir.display())))?;
    // Somebody else may have been faster.
    directory()
}
