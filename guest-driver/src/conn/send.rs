// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send side: into the peer's ring.

use std::io::{self, IoSlice};

use smc_core::connection::Span;
use smc_core::stream::{SendPath, Transmit, WriteError};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags};

use super::counts::times_are_stored;
use super::{Conn, Deadline, Tx};
use crate::capture;
use virtio_ism::DeliverError;

/// The most pieces of one delivery. A slice is one piece, or two at the end of the ring. Further pieces
/// go with the next delivery.
const PIECES_PER_DELIVERY: usize = 8;

impl Conn {
    /// Writes the slices and returns the number of bytes. A blocking call returns when every byte is in
    /// the peer's ring or in the send queue (CDC-27), like TCP's call when they are in the send buffer,
    /// or with fewer if it ends early.
    ///
    /// # Errors
    /// No byte was written: the connection has failed, this end writes no more, there is no room
    /// (`WouldBlock`), or the deadline is over.
    pub(crate) fn send(&self, bufs: &[IoSlice<'_>], deadline: &Deadline) -> io::Result<usize> {
        let result = self.note_report(self.send_some(bufs, deadline));
        if capture::is_on() {
            self.capture_sent(bufs, *result.as_ref().unwrap_or(&0));
        }
        result
    }

    fn send_some(&self, bufs: &[IoSlice<'_>], deadline: &Deadline) -> io::Result<usize> {
        let wanted = bufs.iter().fold(0usize, |sum, buf| sum.saturating_add(buf.len()));
        let (mut tx, mut done) = (self.tx(), 0);
        // An application only writing, and finding room, learns here of the peer's close (CLOSE-43).
        self.refresh_tx(&mut tx);
        loop {
            match self.may_write(&tx) {
                Ok(()) if done < wanted => {}
                Err(error) if done == 0 => return Err(error),
                _ => return Ok(done),
            }
            if let Some(n) = self.transmit(&mut tx, bufs, done, wanted - done)? {
                done += n;
                continue;
            }
            // The refresh, or the attempt, may have ended the connection.
            if let Err(error) = self.may_write(&tx) {
                return if done > 0 { Ok(done) } else { Err(error) };
            }
            let held = self.hold(&mut tx, bufs, done, false);
            if held > 0 {
                done += held;
                continue;
            }
            let is_on_ring = tx.half.path() == SendPath::Ring;
            if is_on_ring {
                tx.half.sender.block();
                if tx.half.sender.publish_due() {
                    self.publish(&mut tx);
                }
            }
            if self.options.is_nonblocking() {
                self.waiting.set_write_blocked(true);
                let seen = tx.half.seen();
                drop(tx);
                if self.finds_no_room(is_on_ring, done, seen)? {
                    return if done > 0 { Ok(done) } else { Err(io::ErrorKind::WouldBlock.into()) };
                }
                tx = self.tx();
                continue;
            }
            let before = tx.half.seen();
            drop(tx);
            let waited = self.await_room(deadline, true, before, || false);
            tx = self.tx();
            if let Err(error) = waited {
                tx.wait_no_more();
                return if done > 0 { Ok(done) } else { Err(error) };
            }
        }
    }

    /// Sends the next of `left` bytes, on the path that the send half names. `None`: nothing goes now.
    #[inline]
    fn transmit(
        &self,
        tx: &mut Tx,
        bufs: &[IoSlice<'_>],
        skip: usize,
        left: usize,
    ) -> io::Result<Option<usize>> {
        if tx.half.is_short_of(left) {
            self.refresh_tx(tx);
        }
        if tx.half.path() != SendPath::Ring {
            // Earlier bytes first.
            self.flush_held(tx);
        }
        let has_room = || tx.has_room_on_tcp();
        match tx.half.next(left, has_room) {
            Transmit::Ring { bytes, more } => {
                Ok(Some(self.put(tx, bufs, skip, bytes, more)? as usize))
            }
            Transmit::Record => Ok(Some(self.put_on_tcp(tx, bufs, skip, 0)).filter(|n| *n > 0)),
            Transmit::Hold => Ok(None),
        }
    }

    /// Whether a write that must not wait finds no room, after a last look at the peer's reading.
    fn finds_no_room(&self, is_on_ring: bool, done: usize, seen: u64) -> io::Result<bool> {
        if is_on_ring && done == 0 {
            self.reactor.poll();
        }
        if !is_on_ring {
            self.sync_readiness();
            return Ok(true);
        }
        if done > 0 {
            self.await_stall();
            self.sync_readiness();
            return Ok(true);
        }
        self.sync_readiness();
        if self.words()[1] != seen && !self.has_failed() {
            return Ok(false);
        }
        self.check()?;
        self.await_stall();
        Ok(true)
    }

    pub(super) fn may_write(&self, tx: &Tx) -> io::Result<()> {
        self.check()?;
        tx.half.may_write().map_err(|error| match error {
            WriteError::Reset => io::ErrorKind::ConnectionReset.into(),
            WriteError::Closed => io::ErrorKind::BrokenPipe.into(),
        })
    }

    /// Takes the peer's consumer word. Failures show in the connection's state.
    pub(super) fn refresh_tx(&self, tx: &mut Tx) {
        let word = tx.carrier.words()[1];
        if word == tx.half.seen() || Self::is_held(tx) {
            return;
        }
        let word = ConsumerWord::from_u64(word);
        let moved =
            word.producer_flags.contains(ProducerFlags::FAILOVER) && self.carrier().take_move();
        if let Err(violation) = tx.half.take(word, moved) {
            if !self.carrier().has_memory() {
                // These are not the peer's words: the device is gone, as the reactor will report soon.
                return;
            }
            tracing::warn!(peer = %self.carrier(), %violation, "connection aborted");
            self.abort_locked(tx);
            return;
        }
        if !tx.queue.is_empty() {
            self.flush_held(tx);
        }
        if !tx.half.close.peer_flags().contains(word.state_flags) {
            self.on_peer_flags(tx, word.state_flags);
        }
    }

    /// Writes `n` bytes of the slices from byte `skip` on, without inspecting them (SEC-5), and sends
    /// the words at once (CDC-25).
    pub(super) fn put(
        &self,
        tx: &mut Tx,
        bufs: &[IoSlice<'_>],
        skip: usize,
        n: u32,
        more: bool,
    ) -> io::Result<u32> {
        let spans = tx.half.sender.spans(n);
        let mut pieces = Pieces::new();
        let taken = pieces.gather(bufs, skip, spans);
        let more = more || taken < n;
        let taken = tx.half.sender.advance(taken, more);
        tx.half.count(taken);
        Ok(if self.deliver(tx, pieces.as_slice())? { taken } else { 0 })
    }

    /// Sends a byte as urgent data (MSG_OOB).
    ///
    /// # Errors
    /// As [`Conn::send`].
    pub(crate) fn send_urgent(&self, byte: u8, deadline: &Deadline) -> io::Result<()> {
        let result = self.send_urgent_byte(byte, deadline);
        if capture::is_on() && result.is_ok() {
            self.capture_sent(&[IoSlice::new(&[byte])], 1);
        }
        result
    }

    fn send_urgent_byte(&self, byte: u8, deadline: &Deadline) -> io::Result<()> {
        let mut tx = self.tx();
        let mut announced = false;
        loop {
            self.refresh_tx(&mut tx);
            self.may_write(&tx)?;
            let is_on_ring = tx.half.path() == SendPath::Ring;
            match self.transmit_urgent(&mut tx, byte)? {
                Some(true) => return Ok(()),
                Some(false) => continue,
                None => {}
            }
            if self.hold(&mut tx, &[IoSlice::new(&[byte])], 0, true) > 0 {
                return Ok(());
            }
            if is_on_ring && !announced {
                // The peer learns of urgent data although there is no room for the byte (CDC-30).
                announced = true;
                tx.half.sender.announce_urgent();
                if tx.half.sender.publish_due() {
                    self.publish(&mut tx);
                }
            }
            let before = tx.half.seen();
            drop(tx);
            let waited = match self.options.is_nonblocking() {
                true => Err(io::ErrorKind::WouldBlock.into()),
                false if is_on_ring => self.await_room(deadline, true, before, || false),
                false => self.await_turn_on_tcp(deadline, |tx| {
                    tx.queue.is_empty() && tx.may_send_urgent_record()
                }),
            };
            tx = self.tx();
            if let Err(error) = waited {
                if !tx.queue.has_urgent() {
                    tx.half.sender.cancel_urgent();
                }
                tx.wait_no_more();
                return Err(error);
            }
        }
    }

    /// Sends an urgent byte. `None`: there is no room; `false`: the attempt has changed the path.
    fn transmit_urgent(&self, tx: &mut Tx, byte: u8) -> io::Result<Option<bool>> {
        if tx.half.path() == SendPath::Ring {
            if tx.half.sender.space() == 0 {
                return Ok(None);
            }
            let [span, _] = tx.half.sender.spans(1);
            tx.half.sender.advance_urgent(1);
            tx.half.count(1);
            return self.deliver(tx, &[(span.offset, &[byte])]).map(Some);
        }
        self.flush_held(tx);
        if tx.queue.is_empty() && self.put_urgent_on_tcp(tx, byte) {
            return Ok(Some(true));
        }
        self.may_write(tx)?;
        Ok(None)
    }

    /// Waits until a record may be sent, or this end writes no more.
    fn await_turn_on_tcp(
        &self,
        deadline: &Deadline,
        may_send: impl Fn(&Tx) -> bool,
    ) -> io::Result<()> {
        self.wait_as(deadline, true, || {
            let ends = self.end.is_write_shut() || !self.end.has_left_ring();
            ends || may_send(&self.tx())
        })
    }

    /// Unread bytes in the peer's ring, with bytes queued here (SIOCOUTQ).
    pub(crate) fn unread_by_peer(&self) -> usize {
        self.reactor.poll();
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        let on_tcp = tx.records.out.len();
        tx.half.sender.in_flight() as usize + tx.queue.len() + on_tcp
    }

    /// The program's read position, announced with every word.
    fn consumed(&self) -> Cursor {
        ConsumerWord::from_u64(self.cursors.consumed()).cursor
    }

    /// The control words to send now.
    pub(super) fn out_words(&self, tx: &Tx) -> [u64; 2] {
        tx.half.words(self.consumed(), tx.half.sender.flags(), tx.half.close.flags())
    }

    /// Delivers bytes and control words to the peer, with a signal. `false`: the ring was left, and the
    /// bytes were not sent.
    pub(super) fn deliver(&self, tx: &mut Tx, pieces: &[(u32, &[u8])]) -> io::Result<bool> {
        if !tx.half.close.may_publish() {
            return Ok(true);
        }
        let sent = match tx.half.sender.flags_ahead() {
            None => {
                let words = self.out_words(tx);
                tx.carrier.deliver(pieces, words, true).map(|()| words)
            }
            Some(flags) => self.deliver_flags_ahead(tx, pieces, flags),
        };
        match sent {
            Ok(words) => {
                self.sent(tx, words);
                Ok(true)
            }
            Err(error) => self.undeliverable(tx, pieces, error),
        }
    }

    /// Delivers flags to be seen by the peer before the cursor moves: urgent data, which is rare.
    #[cold]
    fn deliver_flags_ahead(
        &self,
        tx: &Tx,
        pieces: &[(u32, &[u8])],
        flags: ProducerFlags,
    ) -> Result<[u64; 2], DeliverError> {
        let ahead = tx.half.words_ahead(self.consumed(), flags);
        tx.carrier.deliver(&[], ahead, false)?;
        let words = self.out_words(tx);
        // Bytes and their words in one delivery: the carrier has copies of any bytes possibly lost.
        tx.carrier.deliver(pieces, words, true)?;
        Ok(words)
    }

    pub(super) fn sent(&self, tx: &mut Tx, [producer, consumer]: [u64; 2]) {
        tx.half.on_published(producer);
        let cursor = ConsumerWord::from_u64(consumer).cursor;
        self.cursors.note_announced(cursor);
        if times_are_stored() {
            tx.last_move.note(tx.half.total());
        }
    }

    /// Sends the control words alone, if anything may still be sent.
    pub(super) fn publish(&self, tx: &mut Tx) {
        // A failure shows in the connection's state.
        let _ = self.deliver(tx, &[]);
    }

    /// Sends the last control words, with state flags forbidding any others.
    pub(super) fn publish_last(&self, tx: &mut Tx) {
        let words = self.out_words(tx);
        // Before the words: the peer may offer its buffer again as soon as it sees them.
        tx.carrier.release();
        match tx.carrier.deliver(&[], words, true) {
            Ok(()) => self.sent(tx, words),
            Err(_) if tx.half.has_left() || self.leave(tx) => self.tell_by_tcp(tx),
            // The peer must not take the FIN of a process exiting now for an end of data.
            Err(_) => self.reset_tcp(tx),
        }
    }

    /// A delivery has failed on a connection able to outlive its carrier. Bytes not in the ring were
    /// not sent: the caller sends them again, over TCP.
    #[cold]
    fn deliver_no_more(
        &self,
        tx: &mut Tx,
        pieces: &[(u32, &[u8])],
        error: &DeliverError,
    ) -> io::Result<bool> {
        // Any other error comes after the stores, or instead of a move.
        let stored = !matches!(error, DeliverError::Failed | DeliverError::Range { .. })
            && !self.carrier().keeps_copies();
        let bytes = pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        match stored {
            true => tx.queue.note_sent(bytes),
            false => tx.half.uncount(bytes),
        }
        if tx.half.has_left() {
            let words = self.out_words(tx);
            self.sent(tx, words);
            self.tell_by_tcp(tx);
        } else if self.carrier().may_hear_of_peer() {
            self.hold_writes(tx);
            self.carrier().fail();
        } else {
            self.lost_locked(tx);
        }
        self.check().map(|()| stored)
    }

    #[cold]
    fn undeliverable(
        &self,
        tx: &mut Tx,
        pieces: &[(u32, &[u8])],
        error: DeliverError,
    ) -> io::Result<bool> {
        if self.may_outlive() {
            return self.deliver_no_more(tx, pieces, &error);
        }
        tracing::debug!(peer = %self.carrier(), %error, "the peer's buffer is gone");
        if self.carrier().may_hear_of_peer() {
            // The bytes count as written, like bytes sent by TCP to a peer just ended.
            self.carrier().fail();
            return Ok(true);
        }
        self.lost_locked(tx);
        self.check().map(|()| true)
    }
}

/// The pieces of a delivery, on the stack.
struct Pieces<'a> {
    list: [(u32, &'a [u8]); PIECES_PER_DELIVERY],
    n: usize,
}

impl<'a> Pieces<'a> {
    fn new() -> Self {
        Pieces { list: [(0, &[]); PIECES_PER_DELIVERY], n: 0 }
    }

    fn as_slice(&self) -> &[(u32, &'a [u8])] {
        self.list.get(..self.n).unwrap_or_default()
    }

    /// Adds the slices' bytes from `skip` on, placed in the spans. Returns the number of bytes added.
    fn gather(&mut self, bufs: &'a [IoSlice<'_>], mut skip: usize, spans: [Span; 2]) -> u32 {
        let mut spans = spans.into_iter();
        let mut span = spans.next().unwrap_or_default();
        let mut taken = 0u32;
        for buf in bufs {
            if skip >= buf.len() {
                skip -= buf.len();
                continue;
            }
            let (_, mut bytes) = buf.split_at(skip);
            skip = 0;
            while !bytes.is_empty() {
                if span.len == 0 {
                    match spans.next() {
                        Some(next) if next.len > 0 => span = next,
                        _ => return taken,
                    }
                }
                let n = bytes.len().min(span.len as usize);
                let (now, later) = bytes.split_at(n);
                let Some(piece) = self.list.get_mut(self.n) else { return taken };
                *piece = (span.offset, now);
                self.n += 1;
                taken += n as u32;
                span = Span { offset: span.offset + n as u32, len: span.len - n as u32 };
                bytes = later;
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn laid_out<'a>(
        bufs: &'a [IoSlice<'_>],
        skip: usize,
        spans: [(u32, u32); 2],
    ) -> (u32, Vec<(u32, &'a [u8])>) {
        let mut pieces = Pieces::new();
        let spans = spans.map(|(offset, len)| Span { offset, len });
        let taken = pieces.gather(bufs, skip, spans);
        (taken, pieces.as_slice().to_vec())
    }

    #[test]
    fn slices_are_laid_end_to_end_and_split_at_the_end_of_the_ring() {
        let bufs = [IoSlice::new(b"abc"), IoSlice::new(b""), IoSlice::new(b"defgh")];
        let (taken, pieces) = laid_out(&bufs, 1, [(90, 4), (32, 3)]);
        assert_eq!(taken, 7);
        assert_eq!(pieces, [(90, &b"bc"[..]), (92, &b"de"[..]), (32, &b"fgh"[..])]);
    }

    #[test]
    fn no_more_is_taken_than_there_is_room_or_pieces_for() {
        let bufs = [IoSlice::new(b"abcdef")];
        assert_eq!(laid_out(&bufs, 0, [(32, 2), (0, 0)]), (2, vec![(32, &b"ab"[..])]));
        let many: Vec<_> = (0..20).map(|_| IoSlice::new(b"x")).collect();
        let (taken, pieces) = laid_out(&many, 0, [(32, 20), (0, 0)]);
        assert_eq!((taken as usize, pieces.len()), (PIECES_PER_DELIVERY, PIECES_PER_DELIVERY));
    }
}
