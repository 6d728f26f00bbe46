// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of `smc run --status` of this process, which stays open between two lines.
//!
//! A proxy reports many connections per second, so a line costs two system calls: the file is opened
//! once, at a number out of the program's way. The program does not know the number, and may have
//! closed it by an instruction of its own and have got it for another file. So the kernel is asked
//! before each line which file the number is.

use std::ffi::c_int;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::fork;
use crate::sys::{borrowed, leaked, own_numbers, raw};

/// Lowest number of the file.
const LOWEST: c_int = 700;

/// The file that a process has opened. The value is never freed: another thread may be using it.
struct ReportFile {
    /// The process.
    owner: fork::ProcessIdentity,
    fd: c_int,
    device: u64,
    inode: u64,
}

static CURRENT: AtomicPtr<ReportFile> = AtomicPtr::new(std::ptr::null_mut());

impl ReportFile {
    /// What the kernel says of the file, if the number is still its number.
    fn stat(&self) -> Option<rustix::fs::Stat> {
        let is_entered = own_numbers::contains(self.fd);
        let stat = is_entered.then(|| rustix::fs::fstat(borrowed(self.fd)).ok()).flatten()?;
        ((stat.st_dev, stat.st_ino) == (self.device, self.inode)).then_some(stat)
    }

    fn is_own(&self) -> bool {
        self.owner == fork::identity()
    }
}

/// Adds a line to the file of this process in a directory. Where no file can be written there is no
/// line.
pub(crate) fn append(directory: &Path, line: &str) {
    // A child of vfork is about to execute a program, and has the memory of its parent.
    let may_keep = !fork::shares_memory();
    let known = leaked(CURRENT.load(Ordering::Acquire));
    if let Some(file) = known.filter(|file| may_keep && file.is_own())
        && file.stat().is_some_and(|stat| stat.st_nlink == 1)
    {
        let _ = raw::write(file.fd, line.as_bytes());
        return;
    }
    let path = directory.join(format!("{}.jsonl", std::process::id()));
    if let Some(mut file) = open_own(&path) {
        let _ = file.write_all(line.as_bytes());
        if may_keep {
            keep(known, &file);
        }
    }
}

/// Keeps the file open for further lines, if the limit of the process allows a number that is out of
/// the way. `known`: what was kept before.
fn keep(known: Option<&'static ReportFile>, file: &File) {
    let Ok(stat) = rustix::fs::fstat(file) else { return };
    let before = known.filter(|known| known.stat().is_some());
    if let (None, Some(known)) = (before, known) {
        // It is a file of the program by now, which the program may close.
        own_numbers::forget(known.fd);
    }
    let fd = match before.filter(|before| before.is_own()) {
        // Its name is gone. Another thread may be about to write to the number.
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
    // What a fork has copied is the parent's, and no thread of this process writes to it.
    if let Some(before) = before.filter(|before| before.fd != fd) {
        own_numbers::close(before.fd);
    }
}

/// Opens a file to append to, if it is this user's. Others may be able to write the directory, and to
/// plant links there under the names of processes to come.
pub(crate) fn open_own(path: &Path) -> Option<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let mut options = File::options();
    options.create(true).append(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).ok()?;
    let found = file.metadata().ok()?;
    let own = found.uid() == rustix::process::geteuid().as_raw() && found.nlink() == 1;
    (own && found.is_file()).then_some(file)
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
        assert!(open_own(&secret).is_some() && open_own(&dir.join("new")).is_some());
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        assert!(open_own(&link).is_none(), "a symbolic link");
        let fifo = dir.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(open_own(&fifo).is_none(), "a FIFO, which would block");
        std::fs::hard_link(&secret, dir.join("hard")).unwrap();
        assert!(open_own(&dir.join("hard")).is_none(), "a second name of another file");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
