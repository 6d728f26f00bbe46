// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receive side: out of the own ring.

use std::io::{self, IoSliceMut};

use smc_core::connection::{OobError, UpdateDecision, UrgentEvent, read_words};
use smc_core::stream::reader_view;
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags, StateFlags};

use super::counts::times_are_stored;
use super::{Conn, Deadline, Failure, Rx};
use crate::capture;
use crate::reactor::DelayedUpdate;

/// The most slices filled by one vectored read.
const MAX_SLICES: usize = 1024;

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
        let result = self.note_report(self.recv_some(bufs, peek, deadline));
        if capture::is_on()
            && !peek
            && let Ok(n) = &result
        {
            self.capture_received(bufs, *n);
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
            if rx.half.failed || self.end.is_purged() {
                self.check()?;
            }
            if rx.kept.is_some() {
                return self.recv_kept(&mut rx, bufs, peek);
            }
            if (rx.half.receiver.readable() as usize) < wanted {
                if self.end.reads_tcp() {
                    self.serve_tcp(&mut rx);
                    if rx.kept.is_some() {
                        // The connection came back to a ring. Unread bytes of the last ring come first.
                        continue;
                    }
                }
                let ended = self.refresh_rx(&mut rx);
                if self.end.is_purged() {
                    self.check()?;
                }
                if rx.half.receiver.readable() == 0 {
                    // Bytes written by a peer before it vanished or aborted are delivered before the
                    // error, and nothing after: a peer may continue until it learns of the failure.
                    self.check().inspect_err(|_| rx.half.failed = true)?;
                    if ended? || self.end.is_read_shut() {
                        return Ok(0);
                    }
                }
            }
            if rx.half.receiver.readable() > 0 {
                let n = self.copy_out(&rx, bufs)?;
                if !peek {
                    self.consume(&mut rx, n)?;
                    if self.end.reads_tcp() {
                        self.go_on_from_tcp(&mut rx);
                    }
                    if rx.half.receiver.readable() == 0 {
                        self.note_empty(&mut rx);
                    }
                }
                return Ok(n as usize);
            }
            if self.options.is_nonblocking() {
                let before = reader_view(rx.half.seen());
                // Without the lock, possibly taken by the reactor's calls to this connection.
                if self.reactor.must_be_polled() {
                    drop(rx);
                    self.reactor.poll();
                    rx = self.rx();
                } else if self.waiting.readiness.get().is_none() && self.reactor.is_try_due() {
                    drop(rx);
                    self.reactor.try_poll();
                    rx = self.rx();
                }
                if reader_view(rx.half.seen()) == before && self.has_nothing_to_read(&mut rx) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                continue;
            }
            let (before, look) = (reader_view(rx.half.seen()), self.look());
            drop(rx);
            let shut = || self.end.is_read_shut() || look.is_over();
            let changed = || reader_view(look.words()) != before || shut();
            self.await_bytes(deadline, true, changed)?;
            rx = self.rx();
        }
    }

    /// Takes the peer's words. `true`: no further bytes will follow.
    pub(super) fn refresh_rx(&self, rx: &mut Rx) -> io::Result<bool> {
        // Loaded before the words: the send side may learn of the end at any time, but only words
        // loaded later include the last bytes.
        let was_done = self.end.is_peer_done();
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
                tracing::warn!(peer = %self.carrier(), %violation, "connection aborted");
                self.abort_locked(&mut self.tx());
                return self.check().map(|()| StateFlags::empty());
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
            self.on_peer_flags(&mut tx, flags);
        }
        drop(tx);
        self.check()
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
        self.end.fail(Failure::Reset);
        self.lost_locked(&mut self.tx());
        self.check().err().unwrap_or_else(|| io::ErrorKind::ConnectionReset.into())
    }

    /// The application has taken the next `n` bytes.
    pub(super) fn consume(&self, rx: &mut Rx, n: u32) -> io::Result<()> {
        rx.half.receiver.on_published(self.cursors.announced());
        let decision = rx.half.receiver.consume(n);
        self.cursors.note_consumed(rx.half.receiver.cursor());
        self.update(rx, decision);
        if !decision.is_due() {
            self.schedule_update();
        }
        Ok(())
    }

    /// Has the background thread send the consumer cursor, unless other words carry it soon. The
    /// application may not call again, and the peer may be blocked meanwhile.
    pub(super) fn schedule_update(&self) {
        // A missed update is sent at the next tick, after a second at most.
        if self.cursors.want_update() {
            self.reactor.schedule_update(self.carrier().key());
        }
    }

    /// Sends the update of [`Conn::schedule_update`], unless the application continues reading.
    pub(super) fn flush_update(&self, read_before: Option<u64>) -> DelayedUpdate {
        self.answer_flags();
        self.cursors.clear_update();
        self.check_carrier();
        let read = self.cursors.consumed();
        if self.cursors.knows(read) || self.has_failed() {
            return DelayedUpdate::None;
        }
        // An application reading on, or answering, updates the peer sooner or at less cost.
        if read_before != Some(read) {
            self.cursors.keep_update();
            return DelayedUpdate::Since(read);
        }
        let mut tx = self.tx();
        self.publish(&mut tx);
        DelayedUpdate::Sent
    }

    /// Whether the peer asks for an update.
    pub(super) fn is_asked(&self) -> bool {
        let flags = ConsumerWord::from_u64(self.words()[1]).producer_flags;
        !(flags - ProducerFlags::FAILOVER).is_empty()
    }

    /// Sends the consumer cursor if due.
    fn update(&self, rx: &mut Rx, decision: UpdateDecision) {
        if decision.is_due() {
            self.cursors.note_consumed(rx.half.receiver.cursor());
            let mut tx = self.tx();
            self.publish(&mut tx);
            drop(tx);
            rx.half.receiver.on_published(rx.half.receiver.cursor());
        }
    }

    /// Answers the peer's producer flags, if there are any. The application may not call before the
    /// peer continues.
    pub(super) fn answer_flags(&self) {
        if !self.is_asked() {
            return;
        }
        let mut rx = self.rx();
        // A failure shows in the connection's state.
        let _ = self.refresh_rx(&mut rx);
    }

    /// Takes the urgent byte (MSG_OOB). `peek` leaves it.
    pub(crate) fn recv_urgent(&self, peek: bool) -> io::Result<u8> {
        self.reactor.poll();
        let mut rx = self.rx();
        self.check()?;
        self.refresh_rx(&mut rx)?;
        let byte = rx.half.receiver.take_urgent(peek).map_err(|error| match error {
            OobError::NotYet => io::ErrorKind::WouldBlock.into(),
            OobError::NoUrgent | OobError::Inline => {
                io::Error::new(io::ErrorKind::InvalidInput, error)
            }
        });
        if self.end.reads_tcp() && !peek && byte.is_ok() {
            // Bytes waiting behind the urgent byte have their turn.
            self.serve_tcp(&mut rx);
        }
        byte
    }

    /// Whether the reader stands at the urgent mark (SIOCATMARK).
    pub(crate) fn at_mark(&self) -> io::Result<bool> {
        self.reactor.poll();
        let mut rx = self.rx();
        self.refresh_rx(&mut rx)?;
        Ok(rx.kept.is_none() && rx.half.receiver.at_mark())
    }

    /// Whether urgent data is announced or there (POLLPRI).
    pub(crate) fn has_urgent(&self) -> io::Result<bool> {
        self.reactor.poll();
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
        self.reactor.poll();
        let mut rx = self.rx();
        self.check()?;
        self.refresh_rx(&mut rx)?;
        Ok(rx.readable())
    }

    /// Whether this many bytes can be read now (SO_RCVLOWAT), or half of the ring's size: as on TCP,
    /// too large a number must not make both ends wait.
    pub(crate) fn has_readable(&self, bytes: usize) -> io::Result<bool> {
        let readable = self.readable()?;
        Ok(readable >= bytes || readable >= self.own_ring().len() as usize / 2)
    }

    /// `shutdown(read)`: reads return end of data once the ring is empty; the peer is not informed
    /// (CLOSE-16).
    pub(crate) fn shutdown_read(&self) {
        self.end.shut_read();
        self.failed_or_shut();
    }
}
