//! What the driver asks of the operating system, and the driver's only `unsafe`.
//!
//! Everything above this module sees safe types: memory shared with an untrusted peer
//! ([`SharedSlice`]), a window into which a device maps slabs ([`Reservation`]), descriptors that
//! are waited for ([`EventFd`], [`wait`]), and the driver side of a virtqueue ([`Ring`]).

mod event;
mod mapping;
mod memfd;
mod ring;
mod shared;

pub use event::{EventFd, Interest, Readiness, duplicate, shut_down, wait};
pub use mapping::{MapError, Reservation, SharedMem};
pub use memfd::{check_sealed, sealed_memfd};
#[cfg(test)]
pub(crate) use ring::device::Device as RingDevice;
pub use ring::{Completion, Ring, RingAddresses, RingError, Span};
pub use shared::{OutOfBounds, SharedSlice};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stays consistent whatever a panicking holder did.
///
/// The driver never panics while it holds a lock; a test that does must not hide its own message.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
