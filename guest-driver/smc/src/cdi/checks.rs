// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks of paths on the host before containers get the paths.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use crate::error::CliError;

fn wrong(pool: &Path, what: impl std::fmt::Display) -> CliError {
    CliError::Cdi(format!("--pool {}: {what}", pool.display()))
}

/// Refuses a pool with other files in its directory: containers would get the files, too, for
/// example a management socket. A missing directory is accepted.
pub(super) fn is_alone(pool: &Path) -> Result<(), CliError> {
    let directory = match pool.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(wrong(pool, format!("cannot list its directory: {error}"))),
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    match names.into_iter().find(|name| Some(name.as_os_str()) != pool.file_name()) {
        None => Ok(()),
        Some(other) => Err(wrong(
            pool,
            format!(
                "containers would also have {other:?} of its directory: give the pool a directory \
                 of its own"
            ),
        )),
    }
}

/// Refuses a path other than the device pool of a listening daemon.
pub(super) fn is_pool(pool: &Path) -> Result<(), CliError> {
    // A pool is a socket of packets: an ordinary connection is refused as one of another kind.
    match ism_sys::connect_unix(pool, Duration::ZERO) {
        Err(error) if ism_sys::is_other_kind(&error) => Ok(()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(error)
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            Err(wrong(
                pool,
                format!("no daemon listens there ({error}); --later if it starts later"),
            ))
        }
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(wrong(pool, error)),
        _ => Err(wrong(pool, "it is the socket of one device, not a device pool (devices=NUMBER)")),
    }
}

/// The file or a directory of its path, if writable for users other than root.
pub(super) fn open_to_others(program: &Path) -> Option<&Path> {
    program.ancestors().find(|path| {
        std::fs::metadata(path).is_ok_and(|data| {
            let mode = data.mode();
            // The sticky bit keeps users from replacing the files of others.
            let is_sticky = data.is_dir() && mode & 0o1000 != 0;
            data.uid() != 0 || mode & 0o022 != 0 && !is_sticky
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_test_support::TestDir;

    #[test]
    fn a_pool_with_something_beside_it_is_refused() {
        let place = TestDir::new();
        let pool = place.path("any.sock");
        assert!(is_alone(&pool).is_ok(), "not there yet");
        assert!(is_alone(&place.path("nodir/any.sock")).is_ok());
        std::fs::write(&pool, "").unwrap();
        assert!(is_alone(&pool).is_ok());
        std::fs::write(place.path("management\u{1b}.sock"), "").unwrap();
        let refused = is_alone(&pool).unwrap_err().to_string();
        assert!(refused.contains("\"management\\u{1b}.sock\""), "{refused}");
        let refused = is_alone(&pool.join("x")).unwrap_err().to_string();
        assert!(refused.contains("cannot list its directory"), "{refused}");
    }

    #[test]
    fn what_is_no_pool_is_refused() {
        let place = TestDir::new();
        let socket = place.path("any.sock");
        let refused = || is_pool(&socket).unwrap_err().to_string();
        assert!(refused().contains("no daemon listens there"), "{}", refused());
        std::fs::write(&socket, "").unwrap();
        assert!(refused().contains("no daemon listens there"), "{}", refused());
        std::fs::remove_file(&socket).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(refused().contains("not a device pool"), "{}", refused());
        drop(listener);
        assert!(refused().contains("no daemon listens there"), "{}", refused());
    }

    #[test]
    fn a_program_that_others_can_change_is_found() {
        use std::os::unix::fs::PermissionsExt;
        let place = TestDir::new();
        let program = place.path("smc");
        std::fs::write(&program, "").unwrap();
        let with_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        with_mode(&program, 0o775);
        assert_eq!(open_to_others(&program), Some(&*program));
        with_mode(&program, 0o755);
        let is_root = std::fs::metadata(&program).unwrap().uid() == 0;
        if is_root {
            assert_eq!(open_to_others(&program), None);
            with_mode(&place, 0o777);
            assert_eq!(open_to_others(&program), Some(&*place));
        }
    }
}
