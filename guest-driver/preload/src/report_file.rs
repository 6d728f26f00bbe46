// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of `smc run --status` of this process, kept open between two lines.
//!
//! A proxy reports many connections per second, so a line costs three system calls: the file is opened
//! once, at a number out of the program's way. The program does not know the number, may close the
//! number by an instruction of its own, and may get the number for another file. So the kernel is asked
//! before each line for the identity of the file, and for a limit on the size of files.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::time::ClockId;

use crate::fork;
use crate::sys::{borrowed, leaked, own_numbers, quiet_write, raw};

/// Lowest number of the file.
const LOWEST: c_int = 700;

/// The file opened by a process. The value is never freed: another thread may be using the value.
struct ReportFile {
    owner: fork::ProcessIdentity,
    fd: c_int,
    device: u64,
    inode: u64,
}

static CURRENT: AtomicPtr<ReportFile> = AtomicPtr::new(std::ptr::null_mut());

impl ReportFile {
    /// The kernel's stat of the file, if the number is still the file's.
    fn stat(&self) -> Option<rustix::fs::Stat> {
        let is_entered = own_numbers::contains(self.fd);
        let stat = is_entered.then(|| rustix::fs::fstat(borrowed(self.fd)).ok()).flatten()?;
        ((stat.st_dev, stat.st_ino) == (self.device, self.inode)).then_some(stat)
    }

    fn is_own(&self) -> bool {
        self.owner == fork::identity()
    }
}

/// The second, of the clock since the machine's start, of the next attempt after a failure to open the
/// file.
static NOT_BEFORE: AtomicU64 = AtomicU64::new(0);

/// Adds a line to the file of this process in a directory. After a failure to open the file there is at
/// most one attempt a second: a process may have given up the right, and reports each connection.
///
/// # Errors
/// The line is missing or incomplete.
pub(crate) fn append(directory: &Path, line: &str) -> io::Result<()> {
    // A child of vfork is about to execute a program, and has the memory of its parent.
    let may_keep = !fork::shares_memory();
    let known = leaked(CURRENT.load(Ordering::Acquire));
    if let Some(file) = known.filter(|file| may_keep && file.is_own())
        && file.stat().is_some_and(|stat| stat.st_nlink == 1)
    {
        return write(file.fd, line.as_bytes());
    }
    let second = ism_sys::read_clock(ClockId::MonotonicCoarse).tv_sec.unsigned_abs();
    if second < NOT_BEFORE.load(Ordering::Relaxed) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let file = open_own(&path_in(directory)).inspect_err(|_| {
        NOT_BEFORE.store(second + 1, Ordering::Relaxed);
    })?;
    let written = write(file.as_raw_fd(), line.as_bytes());
    if may_keep {
        keep(known, &file);
    }
    written
}

/// Adds a line to the open file of this process, without memory and without a lock.
pub(crate) fn append_at_once(line: &str) {
    if let Some(file) = leaked(CURRENT.load(Ordering::Acquire)).filter(|file| file.is_own()) {
        let _ = write(file.fd, line.as_bytes());
    }
}

fn path_in(directory: &Path) -> PathBuf {
    directory.join(format!("{}.jsonl", std::process::id()))
}

/// Opens the file of this process early: the process may lose the right later. `user`: the later owner
/// of the file. On failure the first line opens the file.
pub(crate) fn open_early(directory: &Path, user: Option<u32>) {
    let known = leaked(CURRENT.load(Ordering::Acquire));
    let is_open = known.is_some_and(|file| file.is_own() && file.stat().is_some());
    if is_open || fork::shares_memory() {
        return;
    }
    let Ok(file) = open_own(&path_in(directory)) else { return };
    if let Some(user) = user {
        let _ = std::os::unix::fs::fchown(&file, Some(user), None);
    }
    keep(known, &file);
}

/// Writes all bytes. Beyond the program's limit of a file's size, the program gets no SIGXFSZ for a
/// write of the library.
fn write(fd: c_int, mut bytes: &[u8]) -> io::Result<()> {
    let has_limit = ism_sys::resource_limit(libc::RLIMIT_FSIZE).is_some();
    while !bytes.is_empty() {
        let written = match has_limit {
            true => quiet_write::write(fd, bytes),
            false => raw::write(fd, bytes),
        };
        match written {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(raw::Errno(libc::EINTR)) => {}
            Err(raw::Errno(number)) => return Err(io::Error::from_raw_os_error(number)),
        }
    }
    Ok(())
}

/// Keeps the file open for further lines, if the limit of the process allows a number out of the way.
/// `known`: the file kept before.
fn keep(known: Option<&'static ReportFile>, file: &File) {
    let Ok(stat) = rustix::fs::fstat(file) else { return };
    let before = known.filter(|known| known.stat().is_some());
    if let (None, Some(known)) = (before, known) {
        // The number is a file of the program by now, to be closed by the program.
        own_numbers::forget(known.fd);
    }
    let fd = match before.filter(|before| before.is_own()) {
        // The name of the old file is gone. Another thread may be about to write to the number.
        Some(before) => raw::dup3(file.as_raw_fd(), before.fd, libc::O_CLOEXEC),
        None => raw::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LOWEST),
    };
    let Ok(fd) = fd else { return };
    let fd = fd as c_int;
    own_numbers::enter(fd);
    let new = ReportFile { owner: fork::identity(), fd, device: stat.st_dev, inode: stat.st_ino };
    let replaced = known.map_or(std::ptr::null_mut(), |known| std::ptr::from_ref(known).cast_mut());
    let new = Box::into_raw(Box::new(new));
    if CURRENT.compare_exchange(replaced, new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        // Another thread has been faster.
        if before.is_none_or(|before| before.fd != fd) {
            own_numbers::close(fd);
        }
        return;
    }
    // A file copied by a fork is the parent's, and no thread of this process writes to the copy.
    if let Some(before) = before.filter(|before| before.fd != fd) {
        own_numbers::close(before.fd);
    }
}

/// Opens a file to append to, if the file is this user's. Others may be able to write the directory,
/// and to plant links there under the names of processes to come.
///
/// # Errors
/// The file cannot be opened, or is not this user's.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let mut options = File::options();
    options.create(true).append(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    let found = file.metadata()?;
    let own = found.uid() == ism_sys::effective_user() && found.nlink() == 1;
    let own = own && found.is_file();
    own.then_some(file).ok_or_else(|| io::ErrorKind::PermissionDenied.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_goes_into_no_file_that_somebody_planted() {
        let dir = std::env::temp_dir().join(format!("smc-status-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (secret, link) = (dir.join("secret"), dir.join("link"));
        std::fs::write(&secret, "x").unwrap();
        assert!(open_own(&secret).is_ok() && open_own(&dir.join("new")).is_ok());
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        assert!(open_own(&link).is_err(), "a symbolic link");
        let fifo = dir.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(open_own(&fifo).is_err(), "a FIFO, which would block");
        std::fs::hard_link(&secret, dir.join("hard")).unwrap();
        assert!(open_own(&dir.join("hard")).is_err(), "a second name of another file");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
