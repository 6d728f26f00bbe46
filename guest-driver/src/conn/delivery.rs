// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The delivery of bytes and words into the peer's ring.

use std::io::{self, IoSlice};

use smc_core::connection::Span;
use smc_core::stream::{SendPath, Transmit, WriteError};
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags};

use super::counts::times_are_stored;
use super::parts::{Shared, Tx};
use ism_sys::{unacknowledged, unsent};
use virtio_ism::DeliverError;

/// The most pieces of one delivery. A slice is one piece, or two at the end of the ring. Further pieces
/// go with the next delivery.
const PIECES_PER_DELIVERY: usize = 8;

impl Tx {
    /// Sends the next of `left` bytes, on the path that the send half names. `None`: nothing goes now.
    #[inline]
    pub(super) fn transmit(
        &mut self,
        shared: &Shared,
        bufs: &[IoSlice<'_>],
        skip: usize,
        left: usize,
    ) -> io::Result<Option<usize>> {
        if self.half.is_short_of(left) {
            self.refresh(shared);
        }
        if self.half.path() != SendPath::Ring {
            // Earlier bytes first.
            self.flush_queue(shared);
        }
        let has_room = || self.has_room_on_tcp();
        match self.half.next(left, has_room) {
            Transmit::Ring { bytes, more } => {
                Ok(Some(self.put(shared, bufs, skip, bytes, more)? as usize))
            }
            Transmit::Record => {
                Ok(Some(self.send_record(shared, bufs, skip, 0)).filter(|n| *n > 0))
            }
            Transmit::Hold => Ok(None),
        }
    }

    pub(super) fn may_write(&self, shared: &Shared) -> io::Result<()> {
        shared.check()?;
        self.half.may_write().map_err(|error| match error {
            WriteError::Reset => io::ErrorKind::ConnectionReset.into(),
            WriteError::Closed => io::ErrorKind::BrokenPipe.into(),
        })
    }

    /// Takes the peer's consumer word. Failures show in the connection's state.
    pub(super) fn refresh(&mut self, shared: &Shared) {
        let word = self.carrier.words()[1];
        if word == self.half.seen() || self.is_paused() {
            return;
        }
        let word = ConsumerWord::from_u64(word);
        let moved = word.producer_flags.contains(ProducerFlags::FAILOVER)
            && shared.carrier().take_failover_flag();
        if let Err(violation) = self.half.take(word, moved) {
            if !shared.carrier().has_memory() {
                // These are not the peer's words: the device is gone, as the reactor will report soon.
                return;
            }
            tracing::warn!(peer = %shared.carrier(), %violation, "connection aborted");
            self.abort(shared);
            return;
        }
        if !self.queue.is_empty() {
            self.flush_queue(shared);
        }
        if !self.half.close.peer_flags().contains(word.state_flags) {
            self.on_peer_flags(shared, word.state_flags);
        }
    }

    /// Writes `n` bytes of the slices from byte `skip` on, without inspecting them (SEC-5), and sends
    /// the words at once (CDC-25).
    pub(super) fn put(
        &mut self,
        shared: &Shared,
        bufs: &[IoSlice<'_>],
        skip: usize,
        n: u32,
        more: bool,
    ) -> io::Result<u32> {
        let spans = self.half.sender.spans(n);
        let mut pieces = Pieces::new();
        let taken = pieces.gather(bufs, skip, spans);
        let more = more || taken < n;
        let taken = self.half.sender.advance(taken, more);
        self.half.count(taken);
        Ok(if self.deliver(shared, pieces.as_slice())? { taken } else { 0 })
    }

    /// Sends an urgent byte. `None`: there is no room; `false`: the attempt has changed the path.
    pub(super) fn transmit_urgent(
        &mut self,
        shared: &Shared,
        byte: u8,
    ) -> io::Result<Option<bool>> {
        if self.half.path() == SendPath::Ring {
            if self.half.sender.space() == 0 {
                return Ok(None);
            }
            let [span, _] = self.half.sender.spans(1);
            self.half.sender.advance_urgent(1);
            self.half.count(1);
            return self.deliver(shared, &[(span.offset, &[byte])]).map(Some);
        }
        self.flush_queue(shared);
        if self.queue.is_empty() && self.send_urgent_record(shared, byte) {
            return Ok(Some(true));
        }
        self.may_write(shared)?;
        Ok(None)
    }

    /// The control words to send now.
    pub(super) fn out_words(&self, shared: &Shared) -> [u64; 2] {
        self.half.words(shared.consumed(), self.half.sender.flags(), self.half.close.flags())
    }

    /// Delivers bytes and control words to the peer, with a signal. `false`: the ring was left, and the
    /// bytes were not sent.
    pub(super) fn deliver(&mut self, shared: &Shared, pieces: &[(u32, &[u8])]) -> io::Result<bool> {
        if !self.half.close.may_publish() {
            return Ok(true);
        }
        let sent = match self.half.sender.flags_ahead() {
            None => {
                let words = self.out_words(shared);
                self.carrier.deliver(pieces, words, true).map(|()| words)
            }
            Some(flags) => self.deliver_flags_ahead(shared, pieces, flags),
        };
        match sent {
            Ok(words) => {
                self.sent(shared, words);
                Ok(true)
            }
            Err(error) => self.undeliverable(shared, pieces, error),
        }
    }

    /// Delivers flags to be seen by the peer before the cursor moves: urgent data, which is rare.
    #[cold]
    fn deliver_flags_ahead(
        &self,
        shared: &Shared,
        pieces: &[(u32, &[u8])],
        flags: ProducerFlags,
    ) -> Result<[u64; 2], DeliverError> {
        let ahead = self.half.words_ahead(shared.consumed(), flags);
        self.carrier.deliver(&[], ahead, false)?;
        let words = self.out_words(shared);
        // Bytes and their words in one delivery: the carrier has copies of any bytes possibly lost.
        self.carrier.deliver(pieces, words, true)?;
        Ok(words)
    }

    pub(super) fn sent(&mut self, shared: &Shared, [producer, consumer]: [u64; 2]) {
        self.half.on_published(producer);
        let cursor = ConsumerWord::from_u64(consumer).cursor;
        shared.cursors.note_announced(cursor);
        if times_are_stored() {
            self.last_move.note(self.half.total());
        }
    }

    /// Sends the control words alone, if anything may still be sent.
    pub(super) fn publish(&mut self, shared: &Shared) {
        // A failure shows in the connection's state.
        let _ = self.deliver(shared, &[]);
    }

    /// Sends the last control words, with state flags forbidding any others.
    pub(super) fn publish_last(&mut self, shared: &Shared) {
        let words = self.out_words(shared);
        // Before the words: the peer may offer its buffer again as soon as it sees them.
        self.carrier.release();
        match self.carrier.deliver(&[], words, true) {
            Ok(()) => self.sent(shared, words),
            Err(_) if self.half.has_left() || self.leave(shared) => self.send_state_record(shared),
            // The peer must not take the FIN of a process exiting now for an end of data.
            Err(_) => self.reset_tcp(shared),
        }
    }

    /// A delivery has failed on a connection able to outlive its carrier. Bytes not in the ring were
    /// not sent: the caller sends them again, over TCP.
    #[cold]
    fn deliver_no_more(
        &mut self,
        shared: &Shared,
        pieces: &[(u32, &[u8])],
        error: &DeliverError,
    ) -> io::Result<bool> {
        // Any other error comes after the stores, or instead of a move.
        let stored = !matches!(error, DeliverError::Failed | DeliverError::Range { .. })
            && !shared.carrier().keeps_copies();
        let bytes = pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        match stored {
            true => self.queue.note_sent(bytes),
            false => self.half.uncount(bytes),
        }
        if self.half.has_left() {
            let words = self.out_words(shared);
            self.sent(shared, words);
            self.send_state_record(shared);
        } else if shared.carrier().may_hear_of_peer() {
            self.stop_sending(shared);
            shared.carrier().fail();
        } else {
            self.on_loss(shared);
        }
        shared.check().map(|()| stored)
    }

    #[cold]
    fn undeliverable(
        &mut self,
        shared: &Shared,
        pieces: &[(u32, &[u8])],
        error: DeliverError,
    ) -> io::Result<bool> {
        if shared.may_outlive() {
            return self.deliver_no_more(shared, pieces, &error);
        }
        tracing::debug!(peer = %shared.carrier(), %error, "the peer's buffer is gone");
        if shared.carrier().may_hear_of_peer() {
            // The bytes count as written, like bytes sent by TCP to a peer just ended.
            shared.carrier().fail();
            return Ok(true);
        }
        self.on_loss(shared);
        shared.check().map(|()| true)
    }
}

/// The progress of a direction.
pub(super) struct SentCounts {
    pub(super) sent: u64,
    pub(super) acknowledged: u64,
    pub(super) unsent: u64,
}

impl Tx {
    /// Sent and unsent bytes. In a ring, sent bytes are in the peer's memory, and so acknowledged in
    /// the sense of TCP. For records, the kernel knows more.
    pub(super) fn progress(&mut self, shared: &Shared) -> SentCounts {
        let queued = self.queue.len() as u64;
        let total = self.half.total();
        let (mut sent, mut acknowledged) = (total, total);
        if !self.half.carrier().is_on_ring() {
            let waiting = self.records.out.len() as u64;
            let of_tcp = |bytes: std::io::Result<usize>| waiting + bytes.unwrap_or(0) as u64;
            // With the headers of the records, which are few bytes.
            sent = total.saturating_sub(of_tcp(shared.tcp.with(unsent)));
            acknowledged = total.saturating_sub(of_tcp(shared.tcp.with(unacknowledged)));
        }
        let [sent, acknowledged] = self.half.report(sent, acknowledged);
        SentCounts { sent, acknowledged, unsent: queued + total.saturating_sub(sent) }
    }
}

/// The pieces of a delivery, on the stack.
struct Pieces<'a> {
    list: [(u32, &'a [u8]); PIECES_PER_DELIVERY],
    n: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn new() -> Self {
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
