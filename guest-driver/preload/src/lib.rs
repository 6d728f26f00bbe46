// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets of an unmodified program, on SMC.
//!
//! The dynamic linker loads this library before libc, because `smc run` sets `LD_PRELOAD`. The
//! library exports libc's functions that work on sockets, so a program calls these functions
//! instead of libc's. Whoever asks libc itself for them finds them in its symbol table. A
//! descriptor stays the TCP socket that it is, and the kernel goes on to provide its names and
//! options. Beside it the library keeps the state of the connection, in a table indexed by
//! descriptor. Once SMC carries the connection, bytes and readiness come from shared memory.
//!
//! The exported functions may do little. A program may call them in the middle of a fork, in a
//! signal handler, before `main` or after the end of its thread. A descriptor that the library does
//! not know costs one load.
//!
//! The rooms, from the ground up; each uses only those before it:
//!
//! - `sys`: system calls, the table, and memory of the program;
//! - `config`, `status`, `log`, `fork`, `next_program`: settings, the report of what happened, the
//!   log, the process's identity, and what it executes;
//! - `socket`: what the library knows of a descriptor;
//! - `selection`: whether SMC or TCP carries a connection, and the handshake;
//! - `relay`: connections that the kernel serves;
//! - `io`: the calls that read, write and wait;
//! - `hooks`: the exported functions.
//!
//! Only `sys` and `hooks` have `unsafe` code.
#![warn(missing_docs)]
#![deny(unsafe_code)]

mod config;
mod fork;
#[allow(unsafe_code, reason = "functions of libc have pointers for arguments")]
mod hooks;
mod io;
mod last_thread;
mod log;
mod next_program;
mod relay;
mod report_file;
mod selection;
mod socket;
mod status;
#[allow(unsafe_code, reason = "system calls, and memory of the program")]
mod sys;
mod tcp_notes;
