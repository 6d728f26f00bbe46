// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! io_uring: the library cannot see the kernel's operations on connections on behalf of a ring.
//!
//! liburing makes its system calls directly, so the library cannot withhold the calls. A seccomp
//! filter can, but needs CAP_SYS_ADMIN or `no_new_privs`. "smc run" does not set `no_new_privs`: a
//! setuid program would lose its rights. Without the filter the library withholds the calls through
//! libc.

/// Withholds io_uring from this process, and so from the program to execute, if the process has the
/// rights.
pub(super) fn withhold() {
    let _ = ism_sys::withhold_io_uring();
}
