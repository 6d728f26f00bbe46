// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of an undecided connection, and the bytes written by the program before the decision.

use std::ffi::c_int;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use guest_driver::interpose::ByteQueue;

use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};

/// [`HandshakeState::keep`] keeps so many bytes with any setting of the program.
const MIN_EARLY: usize = 8 << 10;

/// The state of an undecided connection.
#[derive(Debug)]
pub(crate) struct HandshakeState {
    /// The number of the handshake in the list of waiting handshakes; 0: none.
    pending: AtomicU64,
    /// Bytes written by the program.
    early: ForkMutex<ByteQueue>,
    /// There was no room for more bytes. A word outside the lock, because the registrations may not
    /// take the lock: the thread deciding the connection takes it before the lock of the
    /// registrations.
    early_full: AtomicBool,
    /// The library's duplicate of the TCP socket, for the handshake; -1: none.
    copy: AtomicI32,
    /// Number of relays about to serve the connection. The lock of `NUMBERS`, or the call that makes the
    /// child, orders the word.
    offers: AtomicU32,
    /// Whether the program has called to write, or waits for room to write.
    wants_to_write: AtomicBool,
}

impl HandshakeState {
    /// A connection without any event yet.
    pub(super) fn new() -> HandshakeState {
        HandshakeState {
            pending: AtomicU64::new(0),
            early: ForkMutex::default(),
            early_full: AtomicBool::new(false),
            copy: AtomicI32::new(-1),
            offers: AtomicU32::new(0),
            wants_to_write: AtomicBool::new(false),
        }
    }

    /// The number of the handshake in the list of waiting handshakes; 0: none.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Stores the number of the handshake in the list of waiting handshakes.
    pub(crate) fn set_pending(&self, number: u64) {
        self.pending.store(number, Ordering::Relaxed);
    }

    /// Keeps bytes of a call, at most `limit` bytes in all. Returns the number of bytes kept;
    /// `None`: there is no room, or with `all` not enough for all. `urgent`: the last byte is
    /// urgent.
    pub(super) fn keep(
        &self,
        early: &mut ByteQueue,
        bufs: &[IoSlice<'_>],
        (all, urgent): (bool, bool),
        limit: impl Fn() -> usize,
    ) -> Option<usize> {
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        let before = early.len();
        let limit = if before + wanted <= MIN_EARLY { MIN_EARLY } else { limit().max(MIN_EARLY) };
        if before >= limit || all && wanted > limit - before || !early.may_grow() {
            self.early_full.store(true, Ordering::Relaxed);
            return None;
        }
        let kept: usize = bufs.iter().map(|buf| early.append(buf, limit)).sum();
        if urgent && kept > 0 && kept == wanted {
            early.mark_last_urgent();
        }
        Some(kept)
    }

    /// Whether the program has written bytes not sent yet.
    pub(crate) fn has_early(&self) -> bool {
        !self.early.lock().is_empty()
    }

    /// Whether there was no room for some of the program's bytes.
    pub(super) fn is_early_full(&self) -> bool {
        self.early_full.load(Ordering::Relaxed)
    }

    /// The bytes written by the program, locked. The thread deciding the connection sends the bytes
    /// before it stores the state and releases the lock, so no write of the program comes between.
    pub(crate) fn early(&self) -> ForkMutexGuard<'_, ByteQueue> {
        self.early.lock()
    }

    /// The number of the library's duplicate of the TCP socket; -1: none.
    pub(super) fn copy(&self) -> c_int {
        self.copy.load(Ordering::Relaxed)
    }

    /// Stores the number of the library's duplicate of the TCP socket.
    pub(crate) fn set_copy(&self, copy: c_int) {
        self.copy.store(copy, Ordering::Relaxed);
    }

    /// The number of the duplicate, for the first call; -1: none, or taken already.
    pub(super) fn take_copy(&self) -> c_int {
        self.copy.swap(-1, Ordering::Relaxed)
    }

    /// Whether the program has called to write, or waits for room to write.
    pub(crate) fn wants_to_write(&self) -> bool {
        self.wants_to_write.load(Ordering::Relaxed)
    }

    /// Stores that the program wants to write.
    pub(crate) fn note_write(&self) {
        self.wants_to_write.store(true, Ordering::Relaxed);
    }

    /// Counts a relay about to serve the connection: the connection must live on after the program
    /// has closed its last descriptor.
    pub(crate) fn add_offer(&self) {
        self.offers.fetch_add(1, Ordering::Release);
    }

    /// Undoes one [`HandshakeState::add_offer`].
    pub(crate) fn remove_offer(&self) {
        self.offers.fetch_sub(1, Ordering::Release);
    }

    /// Whether a relay is about to serve the connection.
    pub(crate) fn has_offers(&self) -> bool {
        self.offers.load(Ordering::Acquire) > 0
    }
}
