//! The sockets of an unmodified program, on SMC.
//!
//! `smc run` has the dynamic linker load this library before libc, so that the functions of libc that
//! work on sockets are the ones exported here. A descriptor stays the TCP socket that it is: names,
//! options and everything that is not known here are the kernel's. Beside it, in a table indexed by
//! descriptor, stands how far the connection is on its way to SMC; once it is there, bytes and
//! readiness come from shared memory.
//!
//! What the exported functions may do is little: the program may be in the middle of a fork, in a
//! signal handler, before `main` or after the end of its thread. A descriptor that is not ours costs
//! one load. `hooks` has the exported functions; all that is `unsafe` is in `hooks` and `sys`.
#![warn(missing_docs)]

mod config;
mod fork;
mod hooks;
mod io;
mod relay;
mod selection;
mod socket;
mod status;
mod sys;
