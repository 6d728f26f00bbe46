// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's read position, and the position announced to the peer.
//!
//! The receive side notes the first, and the send side sends it with its words, each under its own
//! lock. Both are the cursor part of a consumer word.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smc_core::wire::cdc::ConsumerWord;
use smc_core::wire::cursor::Cursor;

/// The consumer cursors of one connection.
#[derive(Debug)]
pub(super) struct ConsumerCursors {
    consumed: AtomicU64,
    announced: AtomicU64,
    /// The background thread will check whether the peer knows the read position. SeqCst: cleared before
    /// the thread reads the position; a reader that misses the store is served at the next tick.
    update_scheduled: AtomicBool,
}

fn word(cursor: Cursor) -> u64 {
    ConsumerWord { cursor, ..Default::default() }.to_u64()
}

impl ConsumerCursors {
    /// Nothing was read before `start`.
    pub(super) fn new(start: Cursor) -> ConsumerCursors {
        ConsumerCursors {
            consumed: AtomicU64::new(word(start)),
            announced: AtomicU64::new(word(start)),
            update_scheduled: AtomicBool::new(false),
        }
    }

    /// Begins anew, with a new ring.
    pub(super) fn restart(&self, start: Cursor) {
        self.note_announced(start);
        self.note_consumed(start);
    }

    /// Notes the program's read position. The bytes were copied out before.
    #[inline]
    pub(super) fn note_consumed(&self, cursor: Cursor) {
        // Release: the bytes were copied out before the peer may learn of the read.
        self.consumed.store(word(cursor), Ordering::Release);
    }

    /// The program's read position, in the form of a consumer word.
    #[inline]
    pub(super) fn consumed(&self) -> u64 {
        // Acquire: partner of the Release in `note_consumed`.
        self.consumed.load(Ordering::Acquire)
    }

    /// Notes the read position announced to the peer.
    #[inline]
    pub(super) fn note_announced(&self, cursor: Cursor) {
        self.announced.store(word(cursor), Ordering::Relaxed);
    }

    /// The read position announced to the peer.
    #[inline]
    pub(super) fn announced(&self) -> Cursor {
        ConsumerWord::from_u64(self.announced.load(Ordering::Relaxed)).cursor
    }

    /// Whether the peer knows the read position `consumed`.
    pub(super) fn knows(&self, consumed: u64) -> bool {
        consumed == self.announced.load(Ordering::Relaxed)
    }

    /// Requests an update by the background thread. `true`: none was requested before, so the caller
    /// schedules it.
    #[inline]
    pub(super) fn want_update(&self) -> bool {
        // Mostly an update is scheduled already, and a load is cheap.
        !self.update_scheduled.load(Ordering::Relaxed)
            && !self.update_scheduled.swap(true, Ordering::AcqRel)
    }

    /// The background thread sends an update now, or a child begins without one.
    pub(super) fn clear_update(&self) {
        self.update_scheduled.store(false, Ordering::SeqCst);
    }

    /// The background thread returns to the update later.
    pub(super) fn keep_update(&self) {
        self.update_scheduled.store(true, Ordering::Relaxed);
    }
}
