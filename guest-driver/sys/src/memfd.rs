// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sealed memory files: memory to share with an untrusted process.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};

use super::out_of_the_way;
use super::process::resource_limit;

/// A new memory file of `len` bytes with a fixed size.
///
/// A device accepts only such files: if a file shrinks, the kernel kills processes on access to the lost
/// part.
///
/// # Errors
/// The errors of the system calls.
pub fn sealed_memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = out_of_the_way(|| memfd_create(name, flags))?;
    check_file_size(len)?;
    ftruncate(&fd, len)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Checks whether the process may make a file of `len` bytes (RLIMIT_FSIZE). An attempt above the limit
/// would end most programs by SIGXFSZ.
///
/// # Errors
/// EFBIG: the limit is smaller.
pub fn check_file_size(len: u64) -> io::Result<()> {
    match resource_limit(libc::RLIMIT_FSIZE) {
        Some(most) if len > most => Err(rustix::io::Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// Checks whether `fd` is a memory file with a lasting size of at least `needed` bytes.
///
/// # Errors
/// The file is not a memory file, may shrink, or is too short.
pub fn check_sealed(fd: BorrowedFd<'_>, needed: u64) -> io::Result<()> {
    let refuse = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if !fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
        return refuse("it is not sealed against shrinking");
    }
    let size = fstat(fd)?.st_size;
    if u64::try_from(size).is_ok_and(|size| size >= needed) {
        Ok(())
    } else {
        refuse("it is too short")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_sealed_file_keeps_its_size() {
        let fd = sealed_memfd("t", 8192).unwrap();
        assert!(ftruncate(&fd, 4096).is_err());
        assert!(ftruncate(&fd, 16384).is_err());
        check_sealed(fd.as_fd(), 8192).unwrap();
        assert!(check_sealed(fd.as_fd(), 8193).is_err());
    }

    #[test]
    fn other_files_are_refused() {
        let (end, _) = rustix::pipe::pipe().unwrap();
        assert!(check_sealed(end.as_fd(), 0).is_err());
    }
}
