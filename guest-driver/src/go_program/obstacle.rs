// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reasons for leaving a program written in Go to TCP.

use thiserror::Error;

/// Why the library cannot take over the system calls of a program written in Go.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GoObstacle {
    /// The dynamic linker is another one than glibc's.
    #[error("its dynamic linker is not glibc's ({0})")]
    OtherLinker(String),
    /// The library knows no place of system calls on this machine.
    #[error("system calls of Go are taken over on x86-64 only")]
    Machine,
    /// The version of Go is not one of the known ones.
    #[error("its version of Go is not known to the library ({0})")]
    Version(String),
    /// The table of functions cannot be read.
    #[error("its table of functions cannot be used: {0}")]
    Table(&'static str),
    /// A function makes system calls in an unknown way.
    #[error("its function {0} makes system calls in a way that is not known to the library")]
    Function(String),
    /// The function behind most system calls is missing.
    #[error("its function for system calls was not found")]
    NoFunction,
    /// There is no room for a jump out of a function.
    #[error("there is no room for a jump near its function {0}")]
    NoRoom(String),
    /// Parts in other languages make system calls on sockets by their own instructions.
    #[error("its parts in C make system calls without libc")]
    OwnCalls,
}
