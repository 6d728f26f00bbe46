//! Who has a device: a device serves one process, and which are taken is told by locks on files beside
//! their sockets (`NAME.sock.claim`).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Attempts to lock a file that others remove meanwhile.
const ATTEMPTS: usize = 16;

/// A device of ours: the lock ends with the process, however that ends.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    path: PathBuf,
}

impl Claim {
    /// Claims the device of this socket. `None`: another process has it.
    pub(crate) fn lay(socket: &Path) -> Option<Claim> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".claim");
        let path = PathBuf::from(path);
        for _ in 0..ATTEMPTS {
            let mut options = OpenOptions::new();
            let file = options.write(true).create(true).truncate(false).mode(0o666).open(&path);
            let claim = Claim { file: file.ok()?, path: path.clone() };
            claim.file.try_lock().ok()?;
            if claim.counts() {
                return Some(claim);
            }
        }
        None
    }

    /// Whether the file that is locked is the one that others would find.
    fn counts(&self) -> bool {
        let (Ok(ours), Ok(found)) = (self.file.metadata(), std::fs::metadata(&self.path)) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (found.dev(), found.ino())
    }

    /// Removes the file. A process that is killed leaves it to the next one that has the device.
    pub(crate) fn remove(&self) {
        if self.counts() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_one_owner_and_a_claim_that_was_removed_counts_no_more() {
        let name = format!("smc-claim-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let first = Claim::lay(&socket).unwrap();
        assert!(Claim::lay(&socket).is_none());
        first.remove();
        let second = Claim::lay(&socket).unwrap();
        // The first one is about to end, and must not take away what is not its own.
        first.remove();
        assert!(Claim::lay(&socket).is_none());
        let path = second.path.clone();
        drop(first);
        // Killed.
        drop(second);
        assert!(path.exists());
        let third = Claim::lay(&socket).unwrap();
        third.remove();
        assert!(!path.exists());
    }
}
