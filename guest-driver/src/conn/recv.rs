// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receive side: out of the own ring, whether the peer has stored the bytes or this end has, out
//! of records.

use std::io::{self, IoSliceMut};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, TryLockError};

use smc_core::connection::{OobError, UpdateDecision, UrgentEvent, read_words};
use smc_core::stream::reader_view;
use smc_core::wire::cdc::StateFlags;

use super::counts::{MovedTime, STORED, times_are_stored};
use super::delivery::SentCounts;
use super::end_word::Failure;
use super::parts::{Conn, Rx};
use super::records_in::RecordStep;
use super::wait::MAX_ROUNDS;
use crate::byte_queue::send_queue::queues_are_held;
use crate::byte_queue::unread_bytes::UnreadBytes;
use crate::capture;
use crate::reactor::DelayedUpdate;
use crate::reactor::wait::Deadline;
use smc_info::MovedCounts;

/// The most slices filled by one vectored read.
const MAX_SLICES: usize = 1024;

impl Rx {
    /// Whether a new ring may begin, with this many unread bytes of the last one at most. Otherwise a
    /// peer leaving ring after ring, each full of unread bytes, would fill this process. Without unread
    /// bytes the answer does not depend on other connections.
    pub(super) fn may_begin_ring(&self, bytes: usize) -> bool {
        self.unread.as_ref().is_none_or(|unread| unread.has_room(bytes))
    }

    /// Bytes returned by reads before a wait, or up to an urgent mark.
    pub(super) fn readable(&self) -> usize {
        self.unread.as_ref().map_or(0, UnreadBytes::len) + self.half.receiver.readable() as usize
    }
}

impl Conn {
    /// Reads into the slices and returns the number of bytes; 0 is end of data. With `peek` the
    /// bytes stay in the ring.
    ///
    /// # Errors
    /// The connection has failed, there is nothing to read (`WouldBlock`), or the deadline is over.
    pub(crate) fn recv(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        peek: bool,
        deadline: &Deadline,
    ) -> io::Result<usize> {
        let result = self.shared.note_report(self.recv_some(bufs, peek, deadline));
        if capture::is_on()
            && !peek
            && let Ok(n) = &result
        {
            self.shared.capture_received(bufs, *n);
        }
        result
    }

    fn recv_some(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        peek: bool,
        deadline: &Deadline,
    ) -> io::Result<usize> {
        let wanted = bufs.iter().fold(0usize, |sum, buf| sum.saturating_add(buf.len()));
        if wanted == 0 {
            return Ok(0);
        }
        let mut rx = self.rx();
        loop {
            if rx.half.failed || self.shared.end.is_purged() {
                self.shared.check()?;
            }
            if rx.unread.is_some() {
                return self.recv_unread(&mut rx, bufs, peek);
            }
            if (rx.half.receiver.readable() as usize) < wanted {
                if self.shared.end.reads_tcp() {
                    self.serve_tcp(&mut rx);
                    if rx.unread.is_some() {
                        // The connection came back to a ring. Unread bytes of the last ring come first.
                        continue;
                    }
                }
                let ended = self.refresh_rx(&mut rx);
                if self.shared.end.is_purged() {
                    self.shared.check()?;
                }
                if rx.half.receiver.readable() == 0 {
                    // Bytes written by a peer before it vanished or aborted are delivered before the
                    // error, and nothing after: a peer may continue until it learns of the failure.
                    self.shared.check().inspect_err(|_| rx.half.failed = true)?;
                    if ended? || self.shared.end.is_read_shut() {
                        return Ok(0);
                    }
                }
            }
            if rx.half.receiver.readable() > 0 {
                let n = self.copy_out(&rx, bufs)?;
                if !peek {
                    self.consume(&mut rx, n)?;
                    if self.shared.end.reads_tcp() {
                        self.go_on_from_tcp(&mut rx);
                    }
                    if rx.half.receiver.readable() == 0 {
                        self.note_empty(&mut rx);
                    }
                }
                return Ok(n as usize);
            }
            if self.shared.options.is_nonblocking() {
                let before = reader_view(rx.half.seen());
                // Without the lock, possibly taken by the reactor's calls to this connection.
                if self.shared.reactor.must_be_polled() {
                    drop(rx);
                    self.shared.reactor.poll();
                    rx = self.rx();
                } else if self.shared.waiting.readiness.get().is_none()
                    && self.shared.reactor.is_try_due()
                {
                    drop(rx);
                    self.shared.reactor.try_poll();
                    rx = self.rx();
                }
                if reader_view(rx.half.seen()) == before && self.has_nothing_to_read(&mut rx) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                continue;
            }
            let (before, look) = (reader_view(rx.half.seen()), self.shared.look());
            drop(rx);
            let shut = || self.shared.end.is_read_shut() || look.is_over();
            let changed = || reader_view(look.words()) != before || shut();
            self.shared.await_bytes(deadline, true, changed)?;
            rx = self.rx();
        }
    }

    /// Takes the peer's words. `true`: no further bytes will follow.
    pub(super) fn refresh_rx(&self, rx: &mut Rx) -> io::Result<bool> {
        // Loaded before the words: the send side may learn of the end at any time, but only words
        // loaded later include the last bytes.
        let was_done = self.shared.end.is_peer_done();
        let words = rx.carrier.words();
        let mut ended = was_done;
        if rx.half.is_new(words) {
            let flags = self.take_words(rx)?;
            // Not the present `peer_done`: the send side may have set it after these words were loaded.
            ended |= flags.intersects(StateFlags::SENDING_DONE | StateFlags::CLOSED);
        }
        if ended && !rx.half.ended {
            // The words of lost memory show that nothing more has arrived.
            if !rx.carrier.has_memory() {
                return Err(self.memory_lost());
            }
            rx.half.ended = true;
        }
        Ok(ended)
    }

    /// Takes the present words and returns their state flags.
    #[inline(never)]
    fn take_words(&self, rx: &mut Rx) -> io::Result<StateFlags> {
        let (producer, consumer) = read_words(|| rx.carrier.words()[0], || rx.carrier.words()[1]);
        let arrival = match rx.half.take(producer, consumer) {
            Ok(arrival) => arrival,
            Err(_) if !rx.carrier.has_memory() => return Err(self.memory_lost()),
            Err(violation) => {
                tracing::warn!(peer = %self.shared.carrier(), %violation, "connection aborted");
                self.tx().abort(&self.shared);
                return self.shared.check().map(|()| StateFlags::empty());
            }
        };
        if times_are_stored() {
            let [producer, _] = rx.half.seen();
            rx.last_move.note(producer);
        }
        if let UrgentEvent::Present { offset } = arrival.urgent {
            let mut byte = [0u8];
            rx.carrier.copy_out(offset, &mut byte).map_err(io::Error::other)?;
            if !rx.carrier.has_memory() {
                return Err(self.memory_lost());
            }
            rx.half.receiver.remember_urgent(byte[0]);
        }
        if !consumer.state_flags.is_empty() {
            self.on_peer_state(rx, consumer.state_flags)?;
        }
        self.update(rx, arrival.update);
        Ok(consumer.state_flags)
    }

    /// Takes state flags of the peer, new or repeated.
    fn on_peer_state(&self, rx: &mut Rx, flags: StateFlags) -> io::Result<()> {
        rx.half.receiver.on_peer_done();
        let mut tx = self.tx();
        let known = tx.half.close.peer_flags().contains(flags);
        if !known {
            tx.on_peer_flags(&self.shared, flags);
        }
        drop(tx);
        self.shared.check()
    }

    /// Copies readable bytes into the slices, limited by both.
    pub(super) fn copy_out(&self, rx: &Rx, bufs: &mut [IoSliceMut<'_>]) -> io::Result<u32> {
        let readable = rx.half.receiver.readable();
        let mut done = 0u32;
        for buf in bufs.iter_mut().take(MAX_SLICES) {
            let room = u32::try_from(buf.len()).unwrap_or(u32::MAX).min(readable - done);
            if room == 0 && done == readable {
                break;
            }
            let [first, second] = rx.half.receiver.peek(done, room);
            let (a, b) = buf.split_at_mut(first.len as usize);
            rx.carrier.copy_out(first.offset, a)?;
            if second.len != 0
                && let Some(b) = b.get_mut(..second.len as usize)
            {
                rx.carrier.copy_out(second.offset, b)?;
            }
            done += room;
        }
        if rx.carrier.has_memory() { Ok(done) } else { Err(self.memory_lost()) }
    }

    /// Ends the connection: its buffer is gone with the device, and the last reads may be zeros.
    #[cold]
    fn memory_lost(&self) -> io::Error {
        // Regardless of the peer's words: some of its bytes cannot be read.
        self.shared.end.fail(Failure::Reset);
        self.tx().on_loss(&self.shared);
        self.shared.check().err().unwrap_or_else(|| io::ErrorKind::ConnectionReset.into())
    }

    /// The application has taken the next `n` bytes.
    fn consume(&self, rx: &mut Rx, n: u32) -> io::Result<()> {
        rx.half.receiver.on_published(self.shared.cursors.announced());
        let decision = rx.half.receiver.consume(n);
        self.shared.cursors.note_consumed(rx.half.receiver.cursor());
        self.update(rx, decision);
        if !decision.is_due() {
            self.shared.schedule_update();
        }
        Ok(())
    }

    /// Sends the update of [`Shared::schedule_update`], unless the application continues reading.
    pub(super) fn flush_update(&self, read_before: Option<u64>) -> DelayedUpdate {
        self.answer_flags();
        self.shared.cursors.clear_update();
        self.check_carrier();
        let read = self.shared.cursors.consumed();
        if self.shared.cursors.knows(read) || self.shared.has_failed() {
            return DelayedUpdate::None;
        }
        // An application reading on, or answering, updates the peer sooner or at less cost.
        if read_before != Some(read) {
            self.shared.cursors.keep_update();
            return DelayedUpdate::Since(read);
        }
        let mut tx = self.tx();
        tx.publish(&self.shared);
        DelayedUpdate::Sent
    }

    /// Sends the consumer cursor if due.
    pub(super) fn update(&self, rx: &mut Rx, decision: UpdateDecision) {
        if decision.is_due() {
            self.shared.cursors.note_consumed(rx.half.receiver.cursor());
            let mut tx = self.tx();
            tx.publish(&self.shared);
            drop(tx);
            rx.half.receiver.on_published(rx.half.receiver.cursor());
        }
    }

    /// Answers the peer's producer flags, if there are any. The application may not call before the
    /// peer continues.
    pub(super) fn answer_flags(&self) {
        if !self.shared.is_asked() {
            return;
        }
        let mut rx = self.rx();
        // A failure shows in the connection's state.
        let _ = self.refresh_rx(&mut rx);
    }

    /// Takes the urgent byte (MSG_OOB). `peek` leaves it.
    pub(crate) fn recv_urgent(&self, peek: bool) -> io::Result<u8> {
        self.shared.reactor.poll();
        let mut rx = self.rx();
        self.shared.check()?;
        self.refresh_rx(&mut rx)?;
        let byte = rx.half.receiver.take_urgent(peek).map_err(|error| match error {
            OobError::NotYet => io::ErrorKind::WouldBlock.into(),
            OobError::NoUrgent | OobError::Inline => {
                io::Error::new(io::ErrorKind::InvalidInput, error)
            }
        });
        if self.shared.end.reads_tcp() && !peek && byte.is_ok() {
            // Bytes waiting behind the urgent byte have their turn.
            self.serve_tcp(&mut rx);
        }
        byte
    }

    /// Whether the reader stands at the urgent mark (SIOCATMARK).
    pub(crate) fn at_mark(&self) -> io::Result<bool> {
        self.shared.reactor.poll();
        let mut rx = self.rx();
        self.refresh_rx(&mut rx)?;
        Ok(rx.unread.is_none() && rx.half.receiver.at_mark())
    }

    /// Whether urgent data is announced or there (POLLPRI).
    pub(crate) fn has_urgent(&self) -> io::Result<bool> {
        self.shared.reactor.poll();
        let mut rx = self.rx();
        self.refresh_rx(&mut rx)?;
        Ok(rx.half.receiver.exception())
    }

    /// Whether the urgent byte stays in the stream (SO_OOBINLINE).
    pub(crate) fn set_oob_inline(&self, inline: bool) {
        let mut rx = self.rx();
        let decision = rx.half.receiver.set_oob_inline(inline);
        self.update(&mut rx, decision);
    }

    /// Bytes that a read would return now (FIONREAD).
    pub(crate) fn readable(&self) -> io::Result<usize> {
        self.shared.reactor.poll();
        let mut rx = self.rx();
        self.shared.check()?;
        self.refresh_rx(&mut rx)?;
        Ok(rx.readable())
    }

    /// Whether this many bytes can be read now (SO_RCVLOWAT), or half of the ring's size: as on TCP,
    /// too large a number must not make both ends wait.
    pub(crate) fn has_readable(&self, bytes: usize) -> io::Result<bool> {
        let readable = self.readable()?;
        Ok(readable >= bytes || readable >= self.shared.own_ring().len() as usize / 2)
    }

    /// `shutdown(read)`: reads return end of data once the ring is empty; the peer is not informed
    /// (CLOSE-16).
    pub(crate) fn shutdown_read(&self) {
        self.shared.end.shut_read();
        self.failed_or_shut();
    }

    /// Reads unread bytes of the last ring (at least one), and behind them bytes of the ring. With `peek` the bytes stay.
    /// Fewer bytes than room mean no more bytes, as on TCP: programs wait then, or check again only
    /// after new arrivals.
    #[cold]
    fn recv_unread(
        &self,
        rx: &mut Rx,
        bufs: &mut [IoSliceMut<'_>],
        peek: bool,
    ) -> io::Result<usize> {
        let Some(unread) = &mut rx.unread else { return Ok(0) };
        let (mut done, mut rest) = unread.copy_out(bufs);
        if !peek {
            unread.remove(done);
            if unread.len() == 0 {
                rx.unread = None;
            }
        }
        // A failure shows at the next read, and so does the end.
        if !rest.is_empty() && self.refresh_rx(rx).is_ok() && !rx.half.receiver.at_mark() {
            let n = self.copy_out(rx, &mut rest)?;
            done += n as usize;
            if !peek && n > 0 {
                self.consume(rx, n)?;
            }
        }
        if !peek {
            if self.shared.end.reads_tcp() {
                // There may be room for more bytes of TCP.
                self.serve_tcp(rx);
            } else if rx.unread.is_none() {
                self.tx().note_unread(&self.shared, rx);
            }
            if rx.readable() == 0 {
                self.note_empty(rx);
            }
        }
        Ok(done)
    }

    /// Takes unread bytes out of the ring, and keeps them. Returns their number.
    pub(super) fn keep_unread(&self, rx: &mut Rx) -> io::Result<usize> {
        self.refresh_rx(rx)?;
        let mut bytes = vec![0; rx.half.receiver.readable() as usize];
        let n = self.copy_out(rx, &mut [IoSliceMut::new(&mut bytes)])?;
        if n > 0 {
            self.consume(rx, n)?;
            bytes.truncate(n as usize);
            rx.unread.get_or_insert_default().add(&bytes);
        }
        Ok(n as usize)
    }

    /// Makes room in a ring for more bytes of TCP, because the awaited record is behind them. `false`:
    /// there is no room, and the program has to read.
    fn make_room(&self, rx: &mut Rx) -> bool {
        if self.refresh_rx(rx).is_err() {
            return false;
        }
        let more = rx.half.receiver.readable() as usize;
        let has_room = match &rx.unread {
            Some(unread) => unread.has_room(more),
            None => UnreadBytes::default().has_room(more),
        };
        has_room && self.keep_unread(rx).is_ok_and(|n| n > 0)
    }

    /// Takes bytes from TCP, sends as far as TCP has room, and wakes the waiters concerned.
    pub(super) fn serve_tcp(&self, rx: &mut Rx) {
        {
            let mut tx = self.tx();
            if queues_are_held() {
                return;
            }
            if std::mem::take(&mut tx.half.records.blocked) {
                self.shared.waiting.note_room_on_tcp();
            }
            tx.flush_records(&self.shared);
            if tx.half.has_left() {
                tx.flush_queue(&self.shared);
            }
        }
        let mut rounds = 0..MAX_ROUNDS;
        loop {
            if rounds.next().is_none() {
                // A separate event continues, so this caller has its turn.
                self.shared.tcp.watch_room();
                break;
            }
            let mut tx = self.tx();
            match tx.serve_round(&self.shared, rx) {
                RecordStep::Done => break,
                RecordStep::Again => {}
                RecordStep::Reads(from) => {
                    drop(tx);
                    // A failure shows in the connection's state.
                    let _ = self.refresh_rx(rx);
                    self.tx().begin_reading(&self.shared, from);
                }
                RecordStep::Full => {
                    drop(tx);
                    if !self.make_room(rx) {
                        break;
                    }
                }
                RecordStep::Ring => {
                    drop(tx);
                    if !self.begin_ring(rx) {
                        break;
                    }
                }
            }
        }
        self.tx().note_unread(&self.shared, rx);
        self.shared.wake_all();
    }

    /// Continues after a wait for the last bytes of a ring.
    pub(super) fn serve_awaited(&self) {
        if self.shared.waiting.awaiting.load(Ordering::SeqCst) {
            self.serve_tcp(&mut self.rx());
        }
    }

    /// The program has read bytes from TCP: input waiting for room has its turn.
    fn go_on_from_tcp(&self, rx: &mut Rx) {
        let mut tx = self.tx();
        let awaits_room = !tx.records.input.is_empty();
        if !awaits_room {
            return tx.note_unread(&self.shared, rx);
        }
        drop(tx);
        self.serve_tcp(rx);
    }

    /// Checks for moved bytes. The next check finds the bytes of a direction in use now.
    pub(super) fn note_moves(&self) {
        if let Some(mut tx) = if_free(&self.tx) {
            let total = tx.half.total();
            tx.last_move.note(total);
        }
        if let Some(mut rx) = if_free(&self.rx) {
            // The words, because the program may not have received the bytes yet.
            let [producer, _] = rx.carrier.words();
            rx.last_move.note(producer);
        }
    }

    /// Bytes of the program neither in the peer's memory nor in its TCP.
    pub(crate) fn undelivered(&self) -> u64 {
        let mut tx = self.tx();
        let counts = tx.progress(&self.shared);
        tx.half.total().saturating_sub(counts.acknowledged) + counts.unsent
    }

    /// Number of written bytes not yet received by the peer, and the number of unsent bytes among them.
    pub(crate) fn outstanding(&self) -> [usize; 2] {
        self.shared.reactor.poll();
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        let SentCounts { sent, acknowledged, unsent } = tx.progress(&self.shared);
        let all = unsent.saturating_add(sent.saturating_sub(acknowledged));
        [all, unsent].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// The connection's counts of moved bytes. From now on every connection of the process stores the
    /// times of its messages.
    pub(crate) fn moved_counts(&self) -> MovedCounts {
        if !times_are_stored() {
            STORED.store(true, Ordering::Relaxed);
        }
        self.shared.reactor.poll();
        let mut rx = self.rx();
        // A failure shows in other calls.
        let _ = self.refresh_rx(&mut rx);
        let [producer, _] = rx.half.seen();
        rx.last_move.note(producer);
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        let total = tx.half.total();
        tx.last_move.note(total);
        let SentCounts { sent, acknowledged, unsent } = tx.progress(&self.shared);
        let is_on_tcp = tx.half.carrier().is_on_tcp() && self.shared.end.reads_tcp();
        let since = |last: &MovedTime| (!is_on_tcp).then(|| last.elapsed());
        let ring = *rx.half.receiver.ring();
        MovedCounts {
            sent,
            acknowledged,
            unsent,
            received: rx.half.total(),
            deliveries: tx.half.deliveries(),
            arrivals: rx.half.arrivals(),
            since_sent: since(&tx.last_move),
            since_received: since(&rx.last_move),
            send_window: tx.half.sender.window(),
            receive_window: ring.len().saturating_sub(rx.half.receiver.available()),
            receive_buffer: ring.len(),
            carrier_changes: tx.half.switches().0,
            ended: tx.half.close.flags().intersects(StateFlags::SENDING_DONE | StateFlags::CLOSED),
            ended_by_peer: rx.half.ended,
        }
    }
}

fn if_free<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
