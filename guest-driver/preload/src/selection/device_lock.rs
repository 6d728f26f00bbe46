//! Who has a device: a device serves one process, and which are taken is told by locks on files beside
//! their sockets (`NAME.sock.claim`).

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Attempts to lock a file that others remove meanwhile.
const ATTEMPTS: usize = 16;

/// A device of ours: the lock ends with the process, however that ends.
#[derive(Debug)]
pub(crate) struct DeviceLock {
    file: File,
    path: PathBuf,
}

/// Why a device cannot be claimed.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another process has it.
    Taken,
    /// The file can neither be opened nor made.
    File(PathBuf, Error),
}

impl DeviceLock {
    /// Claims the device of this socket.
    pub(crate) fn acquire(socket: &Path) -> Result<DeviceLock, LockError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".claim");
        let path = PathBuf::from(path);
        for _ in 0..ATTEMPTS {
            let file = match open(&path, socket) {
                Ok(file) => file,
                // Removed or made meanwhile.
                Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists) => continue,
                Err(error) => return Err(LockError::File(path, error)),
            };
            file.try_lock().map_err(|_| LockError::Taken)?;
            let lock = DeviceLock { file, path: path.clone() };
            if lock.is_current() {
                return Ok(lock);
            }
        }
        Err(LockError::Taken)
    }

    /// Whether the file that is locked is the one that others would find.
    fn is_current(&self) -> bool {
        let (Ok(ours), Ok(found)) = (self.file.metadata(), std::fs::metadata(&self.path)) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (found.dev(), found.ino())
    }

    /// Removes the file. A process that is killed leaves it to the next one that has the device.
    pub(crate) fn remove(&self) {
        if self.is_current() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens the file, made if need be. To lock it, it is enough to read it: one that another user has left
/// will do. Nothing is opened that only looks like it, for others may write into the directory.
fn open(path: &Path, socket: &Path) -> Result<File, Error> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        opened => return opened,
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // Whoever may use the device (to connect takes the right to write) may see that it is free again
    // when this process has been killed, whatever its umask is.
    if let Ok(socket) = socket.metadata() {
        let _ = std::os::unix::fs::fchown(&file, None, Some(socket.gid()));
        let may_use = socket.mode() & 0o022;
        let _ = file.set_permissions(Permissions::from_mode(0o600 | may_use << 1));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_device_has_one_owner_and_a_claim_that_was_removed_counts_no_more() {
        let name = format!("smc-claim-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let first = DeviceLock::acquire(&socket).unwrap();
        assert!(matches!(DeviceLock::acquire(&socket), Err(LockError::Taken)));
        first.remove();
        let second = DeviceLock::acquire(&socket).unwrap();
        // The first one is about to end, and must not take away what is not its own.
        first.remove();
        assert!(matches!(DeviceLock::acquire(&socket), Err(LockError::Taken)));
        let path = second.path.clone();
        drop(first);
        // Killed.
        drop(second);
        assert!(path.exists());
        let third = DeviceLock::acquire(&socket).unwrap();
        third.remove();
        assert!(!path.exists());
    }

    #[test]
    fn whoever_may_use_the_device_may_lock_what_a_killed_owner_left() {
        let dir = std::env::temp_dir().join(format!("smc-claims-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for (mode, expected) in [(0o600, 0o600), (0o660, 0o640), (0o666, 0o644), (0o777, 0o644)] {
            let socket = dir.join(format!("{mode:o}.sock"));
            File::create(&socket).unwrap().set_permissions(Permissions::from_mode(mode)).unwrap();
            let lock = DeviceLock::acquire(&socket).unwrap();
            let left = lock.path.metadata().unwrap();
            assert_eq!(left.mode() & 0o777, expected, "{mode:o}");
            assert_eq!(left.gid(), socket.metadata().unwrap().gid());
            drop(lock);
            // The right to write it is not needed.
            let mut later = DeviceLock::acquire(&socket).unwrap();
            assert!(later.file.write(b"!").is_err());
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_link_in_place_of_a_claim_is_not_followed() {
        let dir = std::env::temp_dir().join(format!("smc-claim-link-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (socket, elsewhere) = (dir.join("a.sock"), dir.join("elsewhere"));
        std::os::unix::fs::symlink(&elsewhere, dir.join("a.sock.claim")).unwrap();
        assert!(matches!(DeviceLock::acquire(&socket), Err(LockError::File(..))));
        assert!(!elsewhere.exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
