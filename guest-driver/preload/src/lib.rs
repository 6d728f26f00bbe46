// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets of an unmodified program, on SMC.
//!
//! The dynamic linker loads this library before libc, because `smc run` sets `LD_PRELOAD`. The library
//! exports libc's functions on sockets, so a program calls these functions instead of libc's. Look-ups
//! in libc itself find them in libc's symbol table. A descriptor stays the same TCP socket, and the
//! kernel goes on to provide its names and options. Besides, the library keeps the state of the
//! connection, in a table indexed by descriptor. Once SMC carries the connection, bytes and readiness
//! come from shared memory.
//!
//! The exported functions may do little. A program may call them in the middle of a fork, in a signal
//! handler, before `main` or after the end of its thread. An unknown descriptor costs one load.
//!
//! The modules, from the ground up; each uses only earlier ones:
//!
//! - `sys`: system calls, the table, and memory of the program;
//! - `policies`, `config`, `policy`, `status`, `log`, `fork`, `next_program`: settings, the changing
//!   policy, the report of events, the log, the process's identity, and the program about to be
//!   executed;
//! - `socket`: the library's state of a descriptor;
//! - `selection`: the decision between SMC and TCP for a connection, and the handshake;
//! - `relay`: connections served by the kernel;
//! - `io`: the calls to read, to write and to wait;
//! - `boundary`: system calls by instructions of a program written in Go;
//! - `hooks`: the exported functions.
//!
//! Only `sys`, `boundary` and `hooks` have `unsafe` code. The compiler forbids it in the other modules,
//! which no attribute in them can undo.
#![warn(missing_docs)]
#![deny(unsafe_code)]

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "instructions of the program, and an entry in assembly")]
mod boundary;
#[forbid(unsafe_code)]
mod config;
#[forbid(unsafe_code)]
mod fork;
#[allow(unsafe_code, reason = "functions of libc have pointers for arguments")]
mod hooks;
#[forbid(unsafe_code)]
mod io;
#[forbid(unsafe_code)]
mod last_thread;
#[forbid(unsafe_code)]
mod log;
#[forbid(unsafe_code)]
mod next_program;
#[forbid(unsafe_code)]
mod policies;
#[forbid(unsafe_code)]
mod policy;
#[forbid(unsafe_code)]
mod relay;
#[forbid(unsafe_code)]
mod report_file;
#[forbid(unsafe_code)]
mod selection;
#[forbid(unsafe_code)]
mod socket;
#[forbid(unsafe_code)]
mod status;
#[allow(unsafe_code, reason = "system calls, and memory of the program")]
mod sys;
#[forbid(unsafe_code)]
mod tcp_notes;
