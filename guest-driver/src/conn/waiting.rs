// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The waiters of a connection: sleeping threads, pollers, a readiness descriptor, queued bytes.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use virtio_ism_abi::signal::Line;

use crate::reactor::poll_queue::PollEntry;
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::spin::Spin;
use crate::reactor::wait::Waiter;
use ism_sys::{WordWait, is_free, lock};

/// After this many sleeps in a row that the peer should have ended and did not, threads sleep in the
/// reactor only.
const MAX_MISSED: u8 = 3;

/// The waiters of one connection.
pub(super) struct Waiting {
    /// Number of sleeping threads and pollers, plus one for a readiness descriptor, one for bytes in
    /// the send queue, and one for the last bytes of a ring that the peer has left.
    waiters: AtomicU32,
    sleepers: Mutex<Vec<Arc<Waiter>>>,
    /// The entries of the pollers that watch the connection.
    pollers: Mutex<Vec<Arc<PollEntry>>>,
    /// The words at the last [`Waiting::take_change`].
    last_change: [AtomicU64; 2],
    /// How threads sleep on the armed word of the line.
    pub(super) word_state: WordState,
    pub(super) readiness: OnceLock<ReadinessFd>,
    /// A write that must not wait, or a poll, found no room, and no poll has shown room since.
    write_blocked: AtomicBool,
    /// How often TCP has got room for records: the first time, and after it had none.
    rooms: AtomicU32,
    /// The send queue has bytes. Not under the lock of the send side, because the reactor asks at
    /// every event.
    pub(super) holding: AtomicBool,
    /// The peer has left the ring, and not all of its bytes are here.
    pub(super) awaiting: AtomicBool,
    pub(super) spin: Spin,
}

impl Waiting {
    /// Nobody waits, and the peer's words are these.
    pub(super) fn new(words: [u64; 2], spin: &Arc<Spin>) -> Waiting {
        Waiting {
            waiters: AtomicU32::new(0),
            sleepers: Mutex::default(),
            pollers: Mutex::default(),
            last_change: words.map(AtomicU64::new),
            word_state: WordState::default(),
            readiness: OnceLock::new(),
            write_blocked: AtomicBool::new(false),
            rooms: AtomicU32::new(0),
            holding: AtomicBool::new(false),
            awaiting: AtomicBool::new(false),
            spin: Spin::of(spin),
        }
    }

    /// Number of waiters, for a thread that has armed the line before or is about to.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.waiters.load(Ordering::SeqCst)
    }

    /// Whether more than `most` threads and others wait, roughly.
    #[inline]
    pub(super) fn exceeds(&self, most: u32) -> bool {
        self.waiters.load(Ordering::Relaxed) > most
    }

    /// The sleeping threads.
    pub(super) fn sleepers(&self) -> MutexGuard<'_, Vec<Arc<Waiter>>> {
        lock(&self.sleepers)
    }

    /// The entries of the pollers.
    pub(super) fn pollers(&self) -> MutexGuard<'_, Vec<Arc<PollEntry>>> {
        lock(&self.pollers)
    }

    /// Adds a sleeping thread.
    pub(super) fn add_sleeper(&self, waiter: &Arc<Waiter>) {
        let mut sleepers = self.sleepers();
        sleepers.push(waiter.clone());
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`Waiting::add_sleeper`].
    pub(super) fn remove_sleeper(&self, waiter: &Arc<Waiter>, line: Option<Line<'_>>) {
        let mut sleepers = self.sleepers();
        if let Some(at) = sleepers.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            sleepers.swap_remove(at);
            self.remove_waiter_locked(&mut sleepers, line);
        }
    }

    /// Adds a waiter that is no sleeping thread.
    pub(super) fn add_waiter(&self) {
        let _sleepers = self.sleepers();
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`Waiting::add_waiter`].
    pub(super) fn remove_waiter(&self, line: Option<Line<'_>>) {
        self.remove_waiter_locked(&mut self.sleepers(), line);
    }

    /// The last waiter disarms the line. Until then a signal costs the peer a wake-up. A waiter that
    /// comes at this moment arms the line afterwards, because it needs the lock first.
    fn remove_waiter_locked(&self, _sleepers: &mut Vec<Arc<Waiter>>, line: Option<Line<'_>>) {
        if self.waiters.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(line) = line
        {
            line.disarm();
        }
    }

    /// Notes the words as they are now. `true`: they were others at the last call.
    pub(super) fn take_change(&self, words: [u64; 2]) -> bool {
        let mut same = true;
        for (last_change, word) in self.last_change.iter().zip(words) {
            if last_change.load(Ordering::Relaxed) != word {
                last_change.store(word, Ordering::Relaxed);
                same = false;
            }
        }
        !same
    }

    /// Whether a write that must not wait, or a poll, found no room, and no poll has shown room since.
    #[inline]
    pub(super) fn is_write_blocked(&self) -> bool {
        self.write_blocked.load(Ordering::Relaxed)
    }

    /// Notes that a write or a poll found no room, or that a poll has shown some.
    pub(super) fn set_write_blocked(&self, on: bool) {
        self.write_blocked.store(on, Ordering::Relaxed);
    }

    /// Notes that TCP has got room for records.
    pub(super) fn note_room_on_tcp(&self) {
        self.rooms.fetch_add(1, Ordering::SeqCst);
    }

    /// How often TCP has got room for records.
    pub(super) fn rooms_on_tcp(&self) -> u32 {
        self.rooms.load(Ordering::SeqCst)
    }

    /// Whether no thread holds a lock.
    pub(super) fn is_unlocked(&self) -> bool {
        is_free(&self.sleepers)
            && is_free(&self.pollers)
            && self.readiness.get().is_none_or(|readiness| readiness.is_unlocked())
    }

    /// Forgets the waiters: they were threads of the parent of this process.
    pub(super) fn forget_threads(&self) {
        self.sleepers().clear();
        self.pollers().clear();
        self.waiters.store(0, Ordering::SeqCst);
    }
}

/// How threads of a connection sleep on the armed word of its line.
#[derive(Debug, Default)]
pub(super) struct WordState {
    /// A thread has slept so, and the reactor knows.
    known: AtomicBool,
    /// Sleeps in a row after which the peer had taken the word and had not woken the thread.
    /// [`MAX_MISSED`]: threads do not sleep on the word any more.
    missed: AtomicU8,
}

impl WordState {
    /// Whether the reactor knows of sleepers on the word.
    pub(super) fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Notes that a thread sleeps so. `true`: the reactor does not know yet, and the caller tells it.
    pub(super) fn begin(&self) -> bool {
        !self.known.load(Ordering::Relaxed) && !self.known.swap(true, Ordering::SeqCst)
    }

    /// Whether threads may sleep on the word.
    pub(super) fn is_allowed(&self) -> bool {
        self.missed.load(Ordering::Relaxed) < MAX_MISSED
    }

    /// Notes how a sleep ended. `taken`: the peer has taken the word.
    pub(super) fn note(&self, slept: WordWait, taken: bool) {
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
