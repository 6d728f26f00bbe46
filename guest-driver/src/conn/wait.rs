// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The wait of a connection's thread, and its wake-up.
//!
//! A thread waiting for a peer on the same kernel sleeps on the armed word of the signal line, and the
//! peer's thread wakes it by one system call. Otherwise the thread sleeps in the reactor, and the peer
//! wakes it through the device.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::Guard;
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags};

use super::carrier::Carrier;
use super::end_word::EndWord;
use super::parts::{Conn, Shared};
use crate::byte_queue::send_queue::QUEUEING;
use crate::reactor::Limit;
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::wait::{Deadline, RECHECK_INTERVAL, Waiter, clear_interrupted};
use ism_sys::WordWait;
use virtio_ism_abi::signal::{Line, MAX_FUTEX_SLEEPERS, Sleepers, sleeper_word};

/// The most rounds of one call while the peer sends without end.
pub(super) const MAX_ROUNDS: u32 = 32;

/// The carrier checked by a thread without a lock during a wait.
pub(super) struct Look<'a> {
    end: &'a EndWord,
    returns: u32,
    carrier: Guard<Arc<Carrier>>,
}

impl Look<'_> {
    /// The peer's words, as [`Carrier::words`].
    #[inline]
    pub(super) fn words(&self) -> [u64; 2] {
        self.carrier.words()
    }

    /// Whether the connection has come back to a ring since: these words change no more.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.end.returns() != self.returns
    }
}

impl Shared {
    /// The state to check from now on.
    pub(super) fn look(&self) -> Look<'_> {
        // The count first, because a return raises it after the exchange of the carrier.
        let returns = self.end.returns();
        Look { end: &self.end, returns, carrier: self.carrier() }
    }

    /// Waits until `changed` returns `true` or the connection has failed. The caller holds no locks.
    /// Without `on_word`, a signal ends the wait, even with a SA_RESTART handler.
    ///
    /// # Errors
    /// `WouldBlock` at the deadline, as for a socket with a timeout.
    pub(super) fn wait_as(
        &self,
        deadline: &Deadline,
        on_word: bool,
        mut changed: impl FnMut() -> bool,
    ) -> io::Result<()> {
        // A peer cannot extend the deadline by words changing all the time to no effect.
        if deadline.is_over() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut done = || changed() || self.has_failed();
        // A poll of an RNIC's queues takes much longer than a check of memory.
        let (spun, learns) = match self.reactor.must_be_polled() {
            true => {
                let poll = || {
                    self.reactor.poll();
                    done()
                };
                (self.waiting.spin.until_polled(poll), self.waiting.spin.spins_polled())
            }
            false => {
                let spin = &self.waiting.spin;
                let peer = || self.carrier().found_asleep();
                (spin.until_answered(peer, &mut done), spin.learns())
            }
        };
        if spun {
            return Ok(());
        }
        // Without a fast clock each read of the clock is a system call.
        let start = learns.then(Instant::now);
        let waiter = Waiter::current();
        self.add_sleeper(&waiter);
        let result = self.sleep(&waiter, deadline, on_word, &mut done);
        if let (Ok(()), Some(start)) = (&result, start) {
            self.waiting.spin.note_sleep(start.elapsed());
        }
        self.remove_sleeper(&waiter);
        result
    }

    /// Like [`Shared::wait_as`], for a reader. If the bytes come by TCP, the call returns at their
    /// arrival, and the caller takes them.
    pub(super) fn await_bytes(
        &self,
        deadline: &Deadline,
        on_word: bool,
        mut changed: impl FnMut() -> bool,
    ) -> io::Result<()> {
        if !self.end.reads_tcp() {
            return self.wait_as(deadline, on_word, changed);
        }
        let left = deadline.left().map_or(RECHECK_INTERVAL, |(_, left)| left);
        if left.is_zero() {
            let is_due = changed() || self.has_failed();
            return if is_due { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let slept = self.tcp.sleep_as_reader(|waiter, set| {
            self.add_sleeper(waiter);
            let count = waiter.wake_count();
            if !changed() && !self.has_failed() {
                waiter.sleep_in(set, count, left.min(RECHECK_INTERVAL));
            }
            self.remove_sleeper(waiter);
        });
        if slept { Ok(()) } else { self.wait_as(deadline, on_word, changed) }
    }

    /// Adds a thread to be woken at every change.
    pub(super) fn add_sleeper(&self, waiter: &Arc<Waiter>) {
        self.waiting.add_sleeper(waiter);
    }

    /// Undoes one [`Shared::add_sleeper`].
    pub(super) fn remove_sleeper(&self, waiter: &Arc<Waiter>) {
        self.waiting.remove_sleeper(waiter, self.carrier().line());
    }

    /// Undoes one [`Waiting::add_waiter`](super::waiting::Waiting::add_waiter).
    pub(super) fn remove_waiter(&self) {
        self.waiting.remove_waiter(self.carrier().line());
    }

    /// Sleeps until `done`. The waking thread has handled the event; this thread only checks the
    /// result.
    pub(super) fn sleep(
        &self,
        waiter: &Arc<Waiter>,
        deadline: &Deadline,
        on_word: bool,
        done: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        loop {
            let count = waiter.wake_count();
            let carrier = self.carrier();
            let word = self.futex_line(&carrier).filter(|_| on_word);
            let how = if word.is_some() { Sleepers::FUTEX } else { Sleepers::KICK };
            let armed = self.arm_as(&carrier, how, Some(waiter));
            if done() {
                return Ok(());
            }
            let limit = deadline.left();
            if limit.is_some_and(|(_, left)| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let Some(value) = armed else { continue };
            // If the deadline is far away, a recheck of the background thread ends the sleep
            // earlier. So the kernel need not set and cancel a timer for each sleep.
            let limit = match self.end.has_left_ring() || self.end.reads_tcp() {
                // No background thread checks a connection that has left its device.
                true => {
                    let left = limit.map_or(RECHECK_INTERVAL, |(_, left)| left);
                    Some((Instant::now(), left.min(RECHECK_INTERVAL)))
                }
                false => limit.filter(|(_, left)| *left < 3 * RECHECK_INTERVAL),
            };
            match word {
                Some(line) => self.sleep_on_word(waiter, count, limit, line, value),
                None => self.reactor.sleep(waiter, count, limit, None),
            }
            if done() {
                return Ok(());
            }
        }
    }

    /// The line with the word for a thread's sleep now.
    pub(super) fn futex_line<'a>(&self, carrier: &'a Carrier) -> Option<Line<'a>> {
        let line = carrier.futex_line()?;
        let room = !self.waiting.exceeds(MAX_FUTEX_SLEEPERS);
        (room && self.waiting.word_state.is_allowed()).then_some(line)
    }

    /// Sleeps while the armed word has this value.
    fn sleep_on_word(&self, waiter: &Waiter, count: u32, limit: Limit, line: Line<'_>, value: u32) {
        if self.waiting.word_state.begin() {
            self.reactor.add_unwatched();
        }
        clear_interrupted();
        let timeout = limit.map(|(_, left)| left);
        let slept = waiter.sleep_on_words(count, &[(line.armed, value)], timeout);
        self.waiting.word_state.note(slept, line.is_taken(Sleepers::FUTEX));
    }

    /// Arms the signal line for a waiter woken through the device. `false`: a signal came before, so
    /// the caller checks again.
    pub(super) fn arm(&self) -> bool {
        self.arm_as(&self.carrier(), Sleepers::KICK, None).is_some()
    }

    /// Arms the signal line for `me`, a sleeper of this kind. Returns the armed word; `None`: a signal
    /// came before, so the caller checks again.
    fn arm_as(&self, carrier: &Carrier, how: Sleepers, me: Option<&Arc<Waiter>>) -> Option<u32> {
        // For guest memory the device reports every signal, armed or not.
        let Some(line) = carrier.line() else { return Some(0) };
        line.take();
        let (before, quiet) = line.arm_as(how);
        let taken = how == Sleepers::FUTEX && before & how.bits() == 0;
        if taken && self.waiting.count() > 1 {
            // The peer has taken the word since another thread armed it. That thread may not sleep yet,
            // and would then find the expected word.
            self.wake_others(me);
        }
        if !quiet {
            line.take();
            // A thread sleeping on words arms again, or is the last one and disarms. Other callers may
            // be ready now, and sparing the peer a kick is worth another arming by others.
            if how == Sleepers::KICK {
                line.disarm_as(how);
                if self.waiting.count() > 1 {
                    self.wake_others(me);
                }
            }
            return None;
        }
        Some(sleeper_word(before, how))
    }

    fn wake_others(&self, but: Option<&Arc<Waiter>>) {
        let is_me = |other: &Arc<Waiter>| but.is_some_and(|me| Arc::ptr_eq(me, other));
        let others: Vec<_> =
            self.waiting.sleepers().iter().filter(|w| !is_me(w)).cloned().collect();
        for other in others {
            self.reactor.wake(&other);
        }
        self.wake_pollers();
    }

    /// Wakes the sleepers and pollers of this connection.
    pub(super) fn wake_all(&self) {
        if self.waiting.count() == 0 {
            return;
        }
        self.wake_sleepers();
        self.wake_pollers();
    }

    /// Has the pollers of this connection check it.
    fn wake_pollers(&self) {
        // A wake-up takes no other lock.
        for poller in self.waiting.pollers().iter() {
            if let Some(waiter) = poller.queue() {
                self.reactor.wake(waiter);
            }
        }
    }

    /// Wakes the threads asleep for this connection.
    pub(super) fn wake_sleepers(&self) {
        let (first, others) = {
            let sleepers = self.waiting.sleepers();
            let Some((first, others)) = sleepers.split_first() else { return };
            // Mostly there is one sleeper, for which this allocates nothing.
            (first.clone(), others.to_vec())
        };
        self.reactor.wake(&first);
        for waiter in &others {
            self.reactor.wake(waiter);
        }
    }

    /// Has the reactor call the connection at each event, although no thread waits for it.
    pub(super) fn watch_events(&self) {
        self.waiting.add_waiter();
        self.reactor.add_pollable();
    }

    /// Undoes one [`Shared::watch_events`].
    fn ignore_events(&self) {
        self.reactor.remove_pollable();
        self.remove_waiter();
    }

    /// Bytes of the ring left by the peer are still missing. The device's next event continues the
    /// work.
    pub(super) fn await_ring(&self) {
        if !self.waiting.awaiting.swap(true, Ordering::SeqCst) {
            self.watch_events();
        }
        // Without an armed line, arrivals are seen at the next recheck.
        for _ in 0..MAX_ROUNDS {
            if self.arm() {
                return;
            }
        }
    }

    /// Undoes [`Shared::await_ring`].
    pub(super) fn end_awaiting(&self) {
        if self.waiting.awaiting.swap(false, Ordering::SeqCst) {
            self.ignore_events();
        }
    }

    /// Has the background thread send the consumer cursor, unless other words carry it soon. The
    /// application may not call again, and the peer may be blocked meanwhile.
    pub(super) fn schedule_update(&self) {
        // A missed update is sent at the next tick, after a second at most.
        if self.cursors.want_update() {
            self.reactor.schedule_update(self.carrier().key());
        }
    }

    /// Whether the peer asks for an update.
    pub(super) fn is_asked(&self) -> bool {
        let flags = ConsumerWord::from_u64(self.words()[1]).producer_flags;
        !(flags - ProducerFlags::FAILOVER).is_empty()
    }

    /// Whether bytes wait to be sent.
    pub(super) fn has_queued(&self) -> bool {
        self.waiting.queueing.load(Ordering::SeqCst)
    }

    pub(super) fn end_queueing(&self) {
        if self.waiting.queueing.swap(false, Ordering::SeqCst) {
            let less = |holding: usize| holding.checked_sub(1);
            let count = self.queueing_count();
            let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            self.ignore_events();
        }
    }

    pub(super) fn queueing_count(&self) -> &'static AtomicUsize {
        let [inheritable, others] = &QUEUEING;
        if self.carrier().must_be_polled() { others } else { inheritable }
    }

    /// Has the background thread watch the line for the readiness descriptor, if that is possible. The
    /// caller looks at the words afterwards.
    pub(super) fn mark_line(&self) {
        if let Some(line) = self.carrier().line_in_slab()
            && self.reactor.may_watch_lines()
            && self.waiting.readiness.get().is_some_and(ReadinessFd::mark)
        {
            line.set_in_slab(true);
            self.reactor.add_marked();
        }
    }

    pub(super) fn has_marked_descriptor(&self) -> bool {
        self.waiting.readiness.get().is_some_and(ReadinessFd::is_marked)
    }

    /// Whether the background thread learns of all changes of the words by the slab of the line.
    pub(super) fn is_marked(&self) -> bool {
        self.has_marked_descriptor() && self.carrier().line_in_slab().is_some()
    }

    /// The line of a new ring, reported to the pollers and to the background thread like the last one's.
    pub(super) fn watch_line(&self, carrier: &Carrier) {
        let pollers = self.waiting.pollers();
        if (!pollers.is_empty() || self.has_marked_descriptor())
            && let Some(line) = carrier.line_in_slab()
        {
            line.set_in_slab(true);
        }
    }
}

/// The counterpart of one connection's sleep on a word, for a thread waiting for several: until one
/// of the peers wakes the thread, or `timeout` is over. The caller has added `waiter` to the
/// sleepers of each connection, and checks every one afterwards. `false`: one of them has no such
/// word, and there was no sleep.
pub(crate) fn sleep_on_lines(
    conns: &[&Arc<Conn>],
    (waiter, count): (&Arc<Waiter>, u32),
    timeout: Duration,
    changed: impl FnOnce() -> bool,
) -> bool {
    if conns.len() > ism_sys::MAX_WORDS {
        return false;
    }
    let carriers: Vec<_> = conns.iter().map(|conn| conn.shared.carrier()).collect();
    let each = || conns.iter().zip(&carriers);
    let lines: Option<Vec<_>> =
        each().map(|(conn, carrier)| conn.shared.futex_line(carrier)).collect();
    let Some(lines) = lines else { return false };
    let mut words = Vec::with_capacity(lines.len());
    for ((conn, carrier), line) in each().zip(&lines) {
        match conn.shared.arm_as(carrier, Sleepers::FUTEX, Some(waiter)) {
            Some(value) => words.push((line.armed, value)),
            None => return true,
        }
    }
    if changed() {
        return true;
    }
    for conn in conns.iter().filter(|conn| conn.shared.waiting.word_state.begin()) {
        conn.shared.reactor.add_unwatched();
    }
    let slept = waiter.sleep_on_words(count, &words, Some(timeout));
    for (at, (conn, line)) in conns.iter().zip(&lines).enumerate() {
        let is_other = matches!(slept, WordWait::Woken(woken) if woken != at);
        let slept = if is_other { WordWait::NotAsleep } else { slept };
        conn.shared.waiting.word_state.note(slept, line.is_taken(Sleepers::FUTEX));
    }
    true
}
