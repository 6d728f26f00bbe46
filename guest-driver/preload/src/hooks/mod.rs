// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The exported functions. Each looks the descriptor up. For an unknown descriptor the function calls
//! libc's function. For a known one the function turns the program's pointers into slices, and calls
//! the modules below.

mod assembly;
mod bytes;
mod cancellation;
mod clone;
mod descriptors;
mod escapes;
mod exec;
mod files;
mod filters;
mod fork_and_exit;
mod fortify;
mod init;
mod libc_symbols;
mod linux_aio;
mod locked_memory;
mod namespaces;
mod readiness;
mod rebinding;
mod rights;
mod sanitizers;
mod signals;
mod sockets;
mod syscall;
mod temporary_relays;
mod within;
