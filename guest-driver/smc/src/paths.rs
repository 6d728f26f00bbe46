// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Paths of sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use smc_settings::NotPrivate;
pub(crate) use smc_settings::{CLIENT, CONTAINER, CONTAINER_STATISTICS, MANAGEMENT, POOL, SERVER};

use crate::error::CliError;

/// The directory of this user's own fabric, and of its processes' statistics sockets. The directory
/// need not exist.
///
/// # Errors
/// Others may write the directory.
pub(crate) fn directory() -> Result<PathBuf, CliError> {
    smc_settings::own_directory().map_err(|NotPrivate(path)| CliError::NotPrivate(path))
}

/// The default management socket.
///
/// # Errors
/// There is no daemon to ask, and others may write the directory of the user's own fabric.
pub(crate) fn management() -> Result<PathBuf, CliError> {
    smc_settings::find_management().map_err(|NotPrivate(path)| CliError::NotPrivate(path))
}

/// Checks that a daemon listens on the socket of a device, possibly in use by another process. The
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

/// Makes [`directory`], for this user only.
///
/// # Errors
/// The directory cannot be made, or errors of [`directory`].
pub(crate) fn make_directory() -> Result<PathBuf, CliError> {
    let dir = directory()?;
    smc_settings::make_own_directory()
        .map_err(CliError::io(format!("cannot make {}", dir.display())))
}
