//! A second process of the daemon, and namespaces of its own.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::thread::UnshareFlags;

/// Runs `child` in a new process, which ends with it. To be called while this process has one
/// thread.
///
/// # Errors
/// There are more threads, or the kernel makes no process.
pub(crate) fn in_child(child: impl FnOnce()) -> io::Result<()> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("the process has several threads"));
    }
    // SAFETY: this process has one thread, so the child is a whole copy of it: no lock is held by a
    // thread that the child does not have.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = catch_unwind(AssertUnwindSafe(child));
            // SAFETY: it ends this process, without the exit handlers that belong to the parent.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(()),
    }
}

/// Leaves the host's network and its System V objects for empty namespaces, which threads that this
/// thread starts have, too. Sockets that are open, or have a path, work on. `false`: this process
/// may not, or the kernel has no namespaces.
pub(crate) fn enter_empty_namespaces() -> bool {
    let flags = UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    // SAFETY: CLONE_FILES is not among the flags, so all threads keep their descriptors in common.
    unsafe { rustix::thread::unshare_unsafe(flags) }.is_ok()
}
