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
//! one load. `sys` has the exported functions and all that is `unsafe`.
#![warn(missing_docs)]

mod brief;
mod claim;
mod config;
mod decide;
mod epoll;
mod fds;
mod fork;
mod io;
mod option;
mod poll;
mod refusals;
mod registrations;
mod relay;
mod session;
mod sock;
mod sockets;
mod status;
mod sys;
mod tally;
