// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a program writes before its connection is decided.

use std::io::IoSlice;
use std::sync::atomic::Ordering;

use guest_driver::interpose::ByteQueue;

use super::{SocketRole, SocketState, StreamSocket};
use crate::sys::fork_lock::ForkMutexGuard;

/// Bytes that [`StreamSocket::keep_early`] keeps whatever the program has set.
const MIN_EARLY: usize = 8 << 10;

impl StreamSocket {
    /// Keeps bytes of a call that must not wait for the handshake, as TCP keeps what it cannot send
    /// yet, and at most `limit` bytes. Returns how many there was room for, with `all` none unless
    /// there is room for all; `None`: the connection is decided. `urgent`: the last one is.
    pub(crate) fn keep_early(
        &self,
        bufs: &[IoSlice<'_>],
        (all, urgent): (bool, bool),
        limit: impl Fn() -> usize,
    ) -> Option<usize> {
        let mut early = self.early.lock();
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        match self.state() {
            SocketState::Deciding => {}
            // Nobody will read them: see `may_write_in_vain`.
            SocketState::Failed => return Some(wanted),
            _ => return None,
        }
        let before = early.len();
        let limit = if before + wanted <= MIN_EARLY { MIN_EARLY } else { limit().max(MIN_EARLY) };
        if before >= limit || all && wanted > limit - before || !early.may_grow() {
            self.early_full.store(true, Ordering::Relaxed);
            self.write_blocked.store(true, Ordering::Relaxed);
            return Some(0);
        }
        let kept: usize = bufs.iter().map(|buf| early.append(buf, limit)).sum();
        if kept < wanted {
            self.write_blocked.store(true, Ordering::Relaxed);
        } else if urgent && kept > 0 {
            early.mark_last_urgent();
        }
        Some(kept)
    }

    /// Whether a client that is not decided may write all the same.
    pub(crate) fn is_writable_early(&self) -> bool {
        self.role() == SocketRole::Client && !self.early_full.load(Ordering::Relaxed)
    }

    /// Whether [`StreamSocket::keep_early`] has kept bytes that are not sent yet.
    pub(crate) fn has_early(&self) -> bool {
        !self.early.lock().is_empty()
    }

    /// What [`StreamSocket::keep_early`] has kept, locked. Whoever decides the connection sends it
    /// before it stores the state and releases the lock, so no write of the program comes between.
    pub(crate) fn early(&self) -> ForkMutexGuard<'_, ByteQueue> {
        self.early.lock()
    }
}
