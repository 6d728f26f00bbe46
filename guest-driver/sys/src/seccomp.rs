// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A seccomp(2) filter to withhold one system call.

use std::io;

use super::filters::{is_fatal, note_harmless};

/// Makes the kernel answer `io_uring_setup` with ENOSYS, like a kernel without io_uring: in this process
/// and in all its children, for good. Does nothing if the call is withheld already.
///
/// # Errors
/// `PermissionDenied`: the process has neither CAP_SYS_ADMIN nor `no_new_privs`, or another filter ends the
/// process at seccomp(2).
pub fn withhold_io_uring() -> io::Result<()> {
    if is_fatal(libc::SYS_io_uring_setup) {
        return Ok(());
    }
    if is_fatal(libc::SYS_seccomp) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // SAFETY: no parameters; the kernel answers EFAULT if it has the call.
    let probed = unsafe { libc::syscall(libc::SYS_io_uring_setup, 0, 0) };
    let error = io::Error::last_os_error().raw_os_error();
    if probed < 0 && matches!(error, Some(libc::ENOSYS | libc::EPERM)) {
        return Ok(());
    }
    let statement =
        |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    // The number of this call is the same on all architectures. The kernel caches that the filter always
    // allows all other numbers, and does not run the filter for them.
    let number = libc::SYS_io_uring_setup as u32;
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, number),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // Older kernels turn speculation off for processes with a filter, at a high cost.
    let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the program and its statements are valid until the call returns.
    match unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) } {
        0 => {
            note_harmless();
            Ok(())
        }
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EACCES) => {
                Err(io::ErrorKind::PermissionDenied.into())
            }
            error => Err(error),
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_withholds_io_uring_has_none_and_has_all_else() {
        // The filter is the thread's, and ends with the thread.
        let thread = std::thread::spawn(|| {
            match withhold_io_uring() {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return,
                result => result.unwrap(),
            }
            // SAFETY: no parameters.
            let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, 0, 0) };
            let error = io::Error::last_os_error().raw_os_error();
            assert!(made < 0 && matches!(error, Some(libc::ENOSYS | libc::EPERM)), "{error:?}");
            // Again: there is nothing to do.
            withhold_io_uring().unwrap();
            std::fs::read_to_string("/proc/self/status").unwrap();
        });
        thread.join().unwrap();
    }
}
