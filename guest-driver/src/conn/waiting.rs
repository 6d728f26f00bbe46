// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The waiters of a connection: sleeping threads, pollers, a readiness descriptor, queued bytes.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::reactor::poll_queue::PollEntry;
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::spin::Spin;
use crate::reactor::wait::Waiter;
use crate::reactor::word_state::WordState;
use ism_sys::{OnceBox, is_free, lock};
use virtio_ism_abi::signal::Line;

/// The waiters of one connection.
pub(super) struct Waiting {
    /// Number of sleeping threads and pollers, plus one for a readiness descriptor, one for bytes in
    /// the send queue, and one for the last bytes of a ring left by the peer. SeqCst: raised before the
    /// waiter's last look at the connection; read behind a change of the connection.
    waiters: AtomicU32,
    sleepers: Mutex<Vec<Arc<Waiter>>>,
    /// The entries of the connection's pollers.
    pollers: Mutex<Vec<Arc<PollEntry>>>,
    /// The words at the last [`Waiting::take_change`].
    last_change: [AtomicU64; 2],
    /// The use of the line's armed word by sleeping threads.
    pub(super) word_state: WordState,
    pub(super) readiness: OnceBox<ReadinessFd>,
    /// A write that must not wait, or a poll, found no room, and no poll has shown room since.
    write_blocked: AtomicBool,
    /// Number of times when TCP got room for records: the first time, and after a lack of room. Release,
    /// for the Acquire of a poll.
    rooms: AtomicU32,
    /// The send queue has bytes. Not under the lock of the send side, because the reactor asks at every
    /// event. SeqCst: set before the last look for room; read behind the arrival of room.
    pub(super) queueing: AtomicBool,
    /// The peer has left the ring, with some of its bytes not here yet. SeqCst, as `queueing`.
    pub(super) awaiting: AtomicBool,
    pub(super) spin: Spin,
}

impl Waiting {
    /// The state without waiters, at these words of the peer.
    pub(super) fn new(words: [u64; 2], spin: &Arc<Spin>) -> Waiting {
        Waiting {
            waiters: AtomicU32::new(0),
            sleepers: Mutex::default(),
            pollers: Mutex::default(),
            last_change: words.map(AtomicU64::new),
            word_state: WordState::default(),
            readiness: OnceBox::new(),
            write_blocked: AtomicBool::new(false),
            rooms: AtomicU32::new(0),
            queueing: AtomicBool::new(false),
            awaiting: AtomicBool::new(false),
            spin: Spin::of(spin),
        }
    }

    /// Number of waiters, for a thread that has armed the line or is about to.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.waiters.load(Ordering::SeqCst)
    }

    /// Whether there are more than `most` waiters, roughly.
    #[inline]
    pub(super) fn exceeds(&self, most: u32) -> bool {
        self.waiters.load(Ordering::Relaxed) > most
    }

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

    /// Adds a waiter other than a sleeping thread.
    pub(super) fn add_waiter(&self) {
        let _sleepers = self.sleepers();
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`Waiting::add_waiter`].
    pub(super) fn remove_waiter(&self, line: Option<Line<'_>>) {
        self.remove_waiter_locked(&mut self.sleepers(), line);
    }

    /// The last waiter disarms the line. Until then a signal costs the peer a wake-up. A new waiter at
    /// this moment arms the line afterwards, because it needs the lock first.
    fn remove_waiter_locked(&self, _sleepers: &mut Vec<Arc<Waiter>>, line: Option<Line<'_>>) {
        if self.waiters.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(line) = line
        {
            line.disarm();
        }
    }

    /// Notes the present words. `true`: they differ from the last call's.
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

    /// Notes a lack of room found by a write or a poll, or room shown by a poll.
    pub(super) fn set_write_blocked(&self, on: bool) {
        self.write_blocked.store(on, Ordering::Relaxed);
    }

    /// Notes new room on TCP for records.
    pub(super) fn note_room_on_tcp(&self) {
        self.rooms.fetch_add(1, Ordering::Release);
    }

    /// Number of times when TCP got room for records.
    pub(super) fn rooms_on_tcp(&self) -> u32 {
        self.rooms.load(Ordering::Acquire)
    }

    /// Whether no thread holds a lock.
    pub(super) fn is_unlocked(&self) -> bool {
        is_free(&self.sleepers)
            && is_free(&self.pollers)
            && self.readiness.get().is_none_or(|readiness| readiness.is_unlocked())
    }

    /// Forgets the waiters: threads of the parent of this process.
    pub(super) fn forget_threads(&self) {
        self.sleepers().clear();
        self.pollers().clear();
        self.waiters.store(0, Ordering::SeqCst);
        self.readiness.get().into_iter().for_each(ReadinessFd::unmark);
    }
}
