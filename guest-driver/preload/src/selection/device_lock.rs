//! Exclusive use of a device. A device serves one process, and that process holds a lock on a file
//! beside the device's socket (`NAME.sock.lock`).

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Attempts to lock the file while other processes remove it.
const ATTEMPTS: usize = 16;

/// A device that this process has locked. The lock ends with the process, however that ends.
#[derive(Debug)]
pub(crate) struct DeviceLock {
    file: File,
    path: PathBuf,
}

/// Why a process cannot lock a device.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another process holds the lock.
    Taken,
    /// The file can neither be opened nor created.
    File(PathBuf, Error),
}

impl DeviceLock {
    /// Locks the device of this socket.
    ///
    /// # Errors
    /// See [`LockError`].
    pub(crate) fn acquire(socket: &Path) -> Result<DeviceLock, LockError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        for _ in 0..ATTEMPTS {
            let file = match open(&path, socket) {
                Ok(file) => file,
                // Another process removed or created it meanwhile.
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

    /// Whether the locked file is the one that other processes would find.
    fn is_current(&self) -> bool {
        let (Ok(ours), Ok(found)) = (self.file.metadata(), std::fs::metadata(&self.path)) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (found.dev(), found.ino())
    }

    /// Removes the file. If this process is killed instead, the next owner of the device reuses the
    /// file.
    pub(crate) fn remove(&self) {
        if self.is_current() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens the file, and creates it if there is none. The right to read suffices for the lock, so a
/// file that another user has left will do. Other users may write into the directory, so the call
/// follows no link.
fn open(path: &Path, socket: &Path) -> Result<File, Error> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        opened => return opened,
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // A user who may connect to the device (which takes the right to write) must be able to lock
    // the file after this process was killed, whatever its umask is.
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
    fn a_device_has_one_owner_and_a_removed_lock_file_has_no_effect() {
        let name = format!("smc-lock-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let first = DeviceLock::acquire(&socket).unwrap();
        assert!(matches!(DeviceLock::acquire(&socket), Err(LockError::Taken)));
        first.remove();
        let second = DeviceLock::acquire(&socket).unwrap();
        // The first owner is about to end, and must not remove the file of the second.
        first.remove();
        assert!(matches!(DeviceLock::acquire(&socket), Err(LockError::Taken)));
        let path = second.path.clone();
        drop(first);
        // As if the owner was killed.
        drop(second);
        assert!(path.exists());
        let third = DeviceLock::acquire(&socket).unwrap();
        third.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_user_of_the_device_may_lock_the_file_of_a_killed_owner() {
        let dir = std::env::temp_dir().join(format!("smc-locks-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for (mode, expected) in [(0o600, 0o600), (0o660, 0o640), (0o666, 0o644), (0o777, 0o644)] {
            let socket = dir.join(format!("{mode:o}.sock"));
            File::create(&socket).unwrap().set_permissions(Permissions::from_mode(mode)).unwrap();
            let lock = DeviceLock::acquire(&socket).unwrap();
            let left = lock.path.metadata().unwrap();
            assert_eq!(left.mode() & 0o777, expected, "{mode:o}");
            assert_eq!(left.gid(), socket.metadata().unwrap().gid());
            drop(lock);
            // The next owner need not have the right to write.
            let mut later = DeviceLock::acquire(&socket).unwrap();
            assert!(later.file.write(b"!").is_err());
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_link_in_place_of_a_lock_file_is_not_followed() {
        let dir = std::env::temp_dir().join(format!("smc-lock-link-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (socket, elsewhere) = (dir.join("a.sock"), dir.join("elsewhere"));
        std::os::unix::fs::symlink(&elsewhere, dir.join("a.sock.lock")).unwrap();
        assert!(matches!(DeviceLock::acquire(&socket), Err(LockError::File(..))));
        assert!(!elsewhere.exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
