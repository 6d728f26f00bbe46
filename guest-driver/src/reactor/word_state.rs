// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The use of an armed word by sleeping threads.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use ism_sys::WordWait;

/// After this many sleeps in a row without the peer's due wake-up, threads sleep in the reactor only.
const MAX_MISSED: u8 = 3;

/// The use of a line's armed word by a connection's sleeping threads.
#[derive(Debug, Default)]
pub(crate) struct WordState {
    /// A thread has slept on the word, and the reactor knows.
    known: AtomicBool,
    /// Sleeps in a row ended without a wake-up although the peer had taken the word. [`MAX_MISSED`]:
    /// threads do not sleep on the word any more.
    missed: AtomicU8,
}

impl WordState {
    /// Whether the reactor knows of sleepers on the word.
    pub(crate) fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Notes a thread's sleep on the word. `true`: the reactor does not know yet, and the caller
    /// informs the reactor.
    pub(crate) fn begin(&self) -> bool {
        // One thread gets `true`. The order is that of the reactor's count of such connections.
        !self.known.load(Ordering::Relaxed) && !self.known.swap(true, Ordering::Relaxed)
    }

    /// Whether threads may sleep on the word.
    pub(crate) fn is_allowed(&self) -> bool {
        self.missed.load(Ordering::Relaxed) < MAX_MISSED
    }

    /// Notes the end of a sleep. `taken`: the peer has taken the word.
    pub(crate) fn note(&self, slept: WordWait, taken: bool) {
        match slept {
            WordWait::Woken(_) => self.missed.store(0, Ordering::Relaxed),
            WordWait::Refused => self.missed.store(MAX_MISSED, Ordering::Relaxed),
            // The peer runs on another kernel after all, or does not want to wake.
            WordWait::Ended if taken => {
                let missed = self.missed.load(Ordering::Relaxed).saturating_add(1);
                self.missed.store(missed, Ordering::Relaxed);
            }
            WordWait::Ended | WordWait::NotAsleep | WordWait::Interrupted => {}
        }
    }
}
