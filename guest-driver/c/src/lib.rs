// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC sockets for programs in C: the library `libsmc.so`, whose documentation is `include/smc.h`.
//!
//! From the ground up:
//!
//! - `error`: errno, and the text of the last error of a thread;
//! - `memory`: access to memory behind the caller's pointers;
//! - `fork`: forks after a stack was opened;
//! - `stack`: stacks, and their settings;
//! - `socket`: connections and listening sockets;
//! - `transfer`: sending and receiving;
//! - `options`: socket options and addresses;
//! - `info`: information about the carrier of a connection;
//! - `exports`: the functions of the header. Each turns pointers into references, and the modules above do
//!   the work.
//!
//! The functions are `extern "C"`: a panic in one aborts the process instead of unwinding into the caller. An
//! errno would not do, because a panic is a defect, and afterwards the state of rings shared with a peer may
//! be wrong: a later call could lose bytes without an error.
#![warn(missing_docs)]
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "pointers of C")]
mod error;
#[allow(unsafe_code, reason = "pointers of C")]
mod exports;
#[allow(unsafe_code, reason = "pointers of C")]
mod fork;
mod info;
#[allow(unsafe_code, reason = "pointers of C")]
mod memory;
mod options;
mod socket;
#[allow(unsafe_code, reason = "pointers of C")]
mod stack;
mod transfer;
