// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Safe types over the operating system's interfaces.
//!
//! [`SharedSlice`] is memory shared with an untrusted peer, and [`Reservation`] a window for a device's
//! mappings of slabs. [`EventFd`] and [`wait`] wait for descriptors, and [`sleep_on_words`] waits for a
//! change of a word by another process. A [`Doorbell`] wakes a thread of another process from its wait for
//! a descriptor. [`VfioDevice`], [`Registers`] and [`DmaMemory`] drive a PCI function. [`tcp_counts`] and
//! [`peer_process`] query a socket, and [`connect_unix`] connects one. [`watch_program`] makes a process.
//! [`open_regular`] and [`read_text`] open files named by a user.

mod apart;
mod delays;
mod descriptor;
mod dma;
mod doorbell;
mod event;
mod file;
mod filters;
mod futex;
mod held;
pub mod interrupt;
#[cfg(target_arch = "x86_64")]
mod loader;
#[cfg(not(target_arch = "x86_64"))]
#[path = "loader/other.rs"]
mod loader;
mod mapping;
mod memfd;
mod once;
mod process;
mod registers;
mod ring_cost;
#[cfg(any(test, feature = "testing"))]
mod saved;
mod seccomp;
mod shared;
mod sockopt;
mod tcp;
mod thread;
mod time;
mod unix;
mod vfio;

pub use apart::{ProgramWatch, WatcherTask, watch_program};
pub use delays::may_delay;
pub use descriptor::{
    DriverDescriptorGuard, DriverThreadGuard, LimitGuard, ProgramDescriptorGuard, as_driver_thread,
    duplicate_beyond_limit, forget_numbers, is_driver_thread, making, move_out_of_the_way,
    numbers_change, out_of_the_way, set_lowest_descriptor,
};
pub use dma::{DmaError, DmaMemory};
pub use doorbell::Doorbell;
pub use event::{
    EventFd, POLLED, PollInterest, PollResult, SignalMask, duplicate, poll_readable, shut_down,
    wait, wait_in_set,
};
pub use file::{open_regular, read_text};
pub use filters::{
    FilterCall, forbidden_call, forbidden_call_in, harmless_filters, is_fatal, know_filters,
};
#[cfg(any(test, feature = "testing"))]
pub use futex::sleep_on_no_words;
pub use futex::{
    MAX_WORDS, WordWait, can_sleep_on_words, sleep_on_private, sleep_on_words, wake_sleepers,
};
pub use held::{ForkLocks, LockGuardList, is_free, try_hold};
#[cfg(target_arch = "x86_64")]
pub use loader::Beginning;
pub use loader::{LoadError, Loader};
pub use mapping::{MapError, Reservation, SharedMem, map_memory, map_zeros};
pub use memfd::{check_file_size, check_sealed, sealed_memfd};
pub use once::OnceBox;
pub use process::{
    effective_group, effective_user, has_own_rights, machine, page_size, resource_limit,
    started_as, thread_number,
};
pub use registers::Registers;
#[cfg(any(test, feature = "testing"))]
pub use saved::keep_private_copies;
pub use seccomp::withhold_io_uring;
pub use shared::{OutOfBounds, SharedSlice};
pub use sockopt::{PeerProcess, TcpCounts, peer_process, set_fast_open_connect, tcp_counts};
pub use tcp::{HeldTcp, has_error, has_fin, reset_tcp, unacknowledged, unsent};
pub use thread::{
    JoinOutcome, USUAL_STACK, await_names_of_threads, forget_unnamed_threads, join_within,
    note_locked_memory, start_thread, start_threads_elsewhere,
};
pub use time::{processor_time, read_clock, timespec};
pub use unix::{connect_unix, connect_unix_packets, is_other_kind};
pub use vfio::{CONFIG_REGION, VfioDevice, VfioError, VfioIrq, VfioRegion};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of a thread with the lock.
///
/// The driver does not panic with a lock. A test may, and its own message must show.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    may_delay();
    let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    may_delay();
    guard
}
