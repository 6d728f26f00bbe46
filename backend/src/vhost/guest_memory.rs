//! Which guest memory the daemon is willing to touch.
//!
//! The daemon maps the memory of every guest. A file that its owner truncates afterwards raises
//! SIGBUS here, and a file served by another process (FUSE) can make a page fault wait for ever.
//! Either would stop all guests. Hence only memfds sealed against shrinking, whose pages the
//! kernel itself provides.
//!
//! What this cannot see: a memfd on huge pages from which the owner punched a hole faults a page
//! in again on use, and raises SIGBUS if the pool of huge pages is empty by then. Reserve huge
//! pages, or put such guests into a daemon of their own.

use std::os::fd::AsFd;

use rustix::fs::SealFlags;
use thiserror::Error;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Why a memory table is refused. Addresses are guest-physical.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum MemoryError {
    /// A region without a file.
    #[error("the region at {0:#x} has no file")]
    NoFile(u64),
    /// Not a memfd.
    #[error("the region at {0:#x} is not a memfd")]
    NotMemfd(u64),
    /// Its owner can shrink it.
    #[error("the region at {0:#x} is a memfd without F_SEAL_SHRINK")]
    NotSealed(u64),
    /// It was shrunk before it was sealed.
    #[error("the file of the region at {0:#x} ends before the region does")]
    TooShort(u64),
}

/// Checks every region of a table.
pub(super) fn check(memory: &GuestMemoryMmap) -> Result<(), MemoryError> {
    for region in memory.iter() {
        let start = region.start_addr().raw_value();
        let backing = region.file_offset().ok_or(MemoryError::NoFile(start))?;
        let file = backing.file().as_fd();
        let seals = rustix::fs::fcntl_get_seals(file).map_err(|_| MemoryError::NotMemfd(start))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MemoryError::NotSealed(start));
        }
        // After the seal was seen: from here on the size can only grow.
        let size =
            rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        let end = backing.start().checked_add(region.len());
        if end.is_none_or(|end| end > size) {
            return Err(MemoryError::TooShort(start));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::fs::File;
    use vm_memory::{FileOffset, GuestAddress};

    fn table(file: File) -> GuestMemoryMmap {
        let ranges = [(GuestAddress(0x1000), 0x2000, Some(FileOffset::new(file, 0x1000)))];
        GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
    }

    fn memfd() -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("test", flags).unwrap());
        file.set_len(0x3000).unwrap();
        file
    }

    #[test]
    fn accepts_a_memfd_sealed_against_shrinking() {
        let file = memfd();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert_eq!(check(&table(file)), Ok(()));
    }

    #[test]
    fn refuses_what_can_shrink() {
        assert_eq!(check(&table(memfd())), Err(MemoryError::NotSealed(0x1000)));
        let path = std::env::temp_dir().join(format!("ism-guest-memory-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(0x3000).unwrap();
        let verdict = check(&table(file));
        // A temporary directory on tmpfs has seals that say "none".
        assert!(matches!(verdict, Err(MemoryError::NotMemfd(_) | MemoryError::NotSealed(_))));
    }

    #[test]
    fn refuses_what_shrank_before_it_was_sealed() {
        let file = memfd();
        let table = table(file.try_clone().unwrap());
        ftruncate(&file, 0x2000).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert_eq!(check(&table), Err(MemoryError::TooShort(0x1000)));
    }

    #[test]
    fn refuses_memory_without_a_file() {
        let table = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        assert_eq!(check(&table), Err(MemoryError::NoFile(0)));
    }
}
