//! What the driver asks of the operating system, and its `unsafe` (that of other libraries and calls
//! is in `verbs` and `rendezvous`).
//!
//! Everything above this module sees safe types: memory shared with an untrusted peer
//! ([`SharedSlice`]), a window into which a device maps slabs ([`Reservation`]), descriptors that
//! are waited for ([`EventFd`], [`wait`]), and what it
//! takes to work a PCI function: [`VfioDevice`], [`Registers`], [`DmaMemory`]; and what the kernel
//! tells of a socket.

mod dma;
mod event;
mod mapping;
mod memfd;
mod registers;
mod shared;
mod sockopt;
mod vfio;

pub use dma::{DmaError, DmaMemory};
pub use event::{
    EventFd, Interest, POLLED, Readiness, SignalMask, duplicate, poll_readable, shut_down, wait,
    wait_in_set,
};
pub use mapping::{MapError, Reservation, SharedMem};
pub use memfd::{check_sealed, sealed_memfd};
pub use registers::Registers;
pub use shared::{OutOfBounds, SharedSlice};
pub use sockopt::{TcpCounts, peer_process, tcp_counts};
pub use vfio::{CONFIG_REGION, VfioDevice, VfioError, VfioIrq, VfioRegion};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stays consistent whatever a panicking holder did.
///
/// The driver never panics while it holds a lock; a test that does must not hide its own message.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
