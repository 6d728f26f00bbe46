// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The exported functions. Each looks the descriptor up. If the library does not know it, the
//! function calls libc's function. Otherwise it turns the program's pointers into slices, and the
//! rooms below do the work.

mod assembly;
mod bytes;
mod cancellation;
mod clone;
mod descriptors;
mod escapes;
mod exec;
mod files;
mod filters;
mod fortify;
mod init;
mod libc_symbols;
mod linux_aio;
mod locked_memory;
mod namespaces;
mod queued_signals;
mod readiness;
mod rebinding;
mod rights;
mod sanitizers;
mod signals;
mod sockets;
mod stopped_threads;
mod syscall;
mod temporary_relays;
mod within;
