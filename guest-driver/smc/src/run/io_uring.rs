// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! io_uring: the library cannot see what the kernel does with a connection on behalf of a ring.
//!
//! liburing makes its system calls itself, so the library cannot withhold them. A seccomp filter can.
//! It takes CAP_SYS_ADMIN or `no_new_privs`, which "smc run" does not set: a setuid program would
//! lose its rights. Without the filter the library withholds what goes through libc.

/// Withholds io_uring from this process, and so from the program that replaces it, if the process may
/// do so.
pub(super) fn withhold() {
    let _ = ism_sys::withhold_io_uring();
}
