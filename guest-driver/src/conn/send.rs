// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The calls that write: each loops over the send side, and waits without its lock.

use std::io::{self, IoSlice};
use std::time::Instant;

use smc_core::stream::SendPath;

use super::parts::{Conn, Tx};
use crate::byte_queue::ByteQueue;
use crate::byte_queue::send_queue::{LOOK, SendQueue, UNREAD};
use crate::capture;
use crate::reactor::wait::Deadline;

impl Conn {
    /// Writes the slices and returns the number of bytes. A blocking call returns when every byte is in
    /// the peer's ring or in the send queue (CDC-27), like TCP's call when they are in the send buffer,
    /// or with fewer if it ends early.
    ///
    /// # Errors
    /// No byte was written: the connection has failed, this end writes no more, there is no room
    /// (`WouldBlock`), or the deadline is over.
    pub(crate) fn send(&self, bufs: &[IoSlice<'_>], deadline: &Deadline) -> io::Result<usize> {
        let result = self.shared.note_report(self.send_some(bufs, deadline));
        if capture::is_on() {
            self.shared.capture_sent(bufs, *result.as_ref().unwrap_or(&0));
        }
        result
    }

    fn send_some(&self, bufs: &[IoSlice<'_>], deadline: &Deadline) -> io::Result<usize> {
        let wanted = bufs.iter().fold(0usize, |sum, buf| sum.saturating_add(buf.len()));
        let (mut tx, mut done) = (self.tx(), 0);
        // An application only writing, and finding room, learns here of the peer's close (CLOSE-43).
        tx.refresh(&self.shared);
        loop {
            match tx.may_write(&self.shared) {
                Ok(()) if done < wanted => {}
                Err(error) if done == 0 => return Err(error),
                _ => return Ok(done),
            }
            if let Some(n) = tx.transmit(&self.shared, bufs, done, wanted - done)? {
                done += n;
                continue;
            }
            // The refresh, or the attempt, may have ended the connection.
            if let Err(error) = tx.may_write(&self.shared) {
                return if done > 0 { Ok(done) } else { Err(error) };
            }
            let held = tx.enqueue(&self.shared, bufs, done, false);
            if held > 0 {
                done += held;
                continue;
            }
            let is_on_ring = tx.half.path() == SendPath::Ring;
            if is_on_ring {
                tx.half.sender.block();
                if tx.half.sender.publish_due() {
                    tx.publish(&self.shared);
                }
            }
            if self.shared.options.is_nonblocking() {
                self.shared.waiting.set_write_blocked(true);
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

    /// Whether a write that must not wait finds no room, after a last look at the peer's reading.
    fn finds_no_room(&self, is_on_ring: bool, done: usize, seen: u64) -> io::Result<bool> {
        if is_on_ring && done == 0 {
            self.shared.reactor.poll();
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
        if self.shared.words()[1] != seen && !self.shared.has_failed() {
            return Ok(false);
        }
        self.shared.check()?;
        self.await_stall();
        Ok(true)
    }

    /// Sends a byte as urgent data (MSG_OOB).
    ///
    /// # Errors
    /// As [`Conn::send`].
    pub(crate) fn send_urgent(&self, byte: u8, deadline: &Deadline) -> io::Result<()> {
        let result = self.send_urgent_byte(byte, deadline);
        if capture::is_on() && result.is_ok() {
            self.shared.capture_sent(&[IoSlice::new(&[byte])], 1);
        }
        result
    }

    fn send_urgent_byte(&self, byte: u8, deadline: &Deadline) -> io::Result<()> {
        let mut tx = self.tx();
        let mut announced = false;
        loop {
            tx.refresh(&self.shared);
            tx.may_write(&self.shared)?;
            let is_on_ring = tx.half.path() == SendPath::Ring;
            match tx.transmit_urgent(&self.shared, byte)? {
                Some(true) => return Ok(()),
                Some(false) => continue,
                None => {}
            }
            if tx.enqueue(&self.shared, &[IoSlice::new(&[byte])], 0, true) > 0 {
                return Ok(());
            }
            if is_on_ring && !announced {
                // The peer learns of urgent data although there is no room for the byte (CDC-30).
                announced = true;
                tx.half.sender.announce_urgent();
                if tx.half.sender.publish_due() {
                    tx.publish(&self.shared);
                }
            }
            let before = tx.half.seen();
            drop(tx);
            let waited = match self.shared.options.is_nonblocking() {
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

    /// Waits until a record may be sent, or this end writes no more.
    fn await_turn_on_tcp(
        &self,
        deadline: &Deadline,
        may_send: impl Fn(&Tx) -> bool,
    ) -> io::Result<()> {
        self.shared.wait_as(deadline, true, || {
            let ends = self.shared.end.is_write_shut() || !self.shared.end.has_left_ring();
            ends || may_send(&self.tx())
        })
    }

    /// Unread bytes in the peer's ring, with bytes queued here (SIOCOUTQ).
    pub(crate) fn unread_by_peer(&self) -> usize {
        self.shared.reactor.poll();
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        let on_tcp = tx.records.out.len();
        tx.half.sender.in_flight() as usize + tx.queue.len() + on_tcp
    }

    /// Puts bytes written earlier by the program into the ring, and the rest into the queue.
    pub(crate) fn send_queue(&self, bytes: ByteQueue) {
        if capture::is_on() {
            let pieces: Vec<_> = bytes.pieces().map(IoSlice::new).collect();
            self.shared.capture_sent(&pieces, bytes.len());
        }
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        tx.queue.bytes.append_queue(bytes);
        tx.flush_queue(&self.shared);
        tx.note_full();
        tx.begin_queueing(&self.shared);
    }

    /// Bytes of the queue.
    pub(crate) fn queued(&self) -> usize {
        self.shared.reactor.poll();
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        tx.queue.len()
    }

    /// Bounds the bytes written before the peer reads, as SO_SNDBUF does: `bytes` is the option's value
    /// on a socket, twice the value set by the program.
    pub(crate) fn set_send_buffer(&self, bytes: usize) {
        let mut tx = self.tx();
        let unread = UNREAD.min(tx.half.sender.ring().len() as usize);
        let all = bytes.saturating_add(unread);
        tx.half.sender.limit_to(u32::try_from(all).unwrap_or(u32::MAX));
        tx.queue.limit = all.saturating_sub(tx.half.sender.usable() as usize);
    }

    /// Changes limits of the send queue.
    pub(crate) fn limit_queue(&self, set: impl FnOnce(&mut SendQueue)) {
        set(&mut self.tx().queue);
        // There may be room now.
        self.check_blocked_writer();
    }

    /// Sends waiting bytes, as far as possible now.
    pub(super) fn send_queued(&self) {
        if self.shared.has_queued() {
            let mut tx = self.tx();
            tx.refresh(&self.shared);
            tx.await_reader(&self.shared);
        }
    }

    /// Waits until a write without room at the peer's word `seen` may continue: the peer has read, or
    /// the queue takes the write.
    ///
    /// # Errors
    /// See [`Shared::wait_as`].
    pub(super) fn await_room(
        &self,
        deadline: &Deadline,
        on_word: bool,
        seen: u64,
        mut or: impl FnMut() -> bool,
    ) -> io::Result<()> {
        let write_shut = || self.shared.end.is_write_shut();
        if self.shared.end.has_left_ring() {
            return self.shared.wait_as(deadline, on_word, || {
                let on_tcp = self.shared.end.has_left_ring();
                write_shut() || or() || !on_tcp || self.tx().has_room_on_tcp()
            });
        }
        let look = self.shared.look();
        let left = || self.shared.end.has_left_ring() || look.is_over();
        let changed = || look.words()[1] != seen || write_shut() || left() || or();
        let queues_at = self.tx().queues_at();
        let ends_before = |at: Instant| deadline.left().is_some_and(|(now, left)| now + left < at);
        match queues_at.filter(|at| !ends_before(*at)) {
            Some(at) => match self.shared.wait_as(&Deadline::from(Some(at)), on_word, changed) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
                waited => waited,
            },
            None => self.shared.wait_as(deadline, on_word, changed),
        }
    }

    /// Bytes taken by a write now, in the ring or in the queue. More, if the connection has left its
    /// ring.
    pub(crate) fn room(&self) -> usize {
        let mut tx = self.tx();
        if tx.half.path() != SendPath::Ring {
            return usize::MAX;
        }
        tx.refresh(&self.shared);
        let queue = &tx.queue;
        let in_queue = match tx.may_queue() {
            true => queue.limit.min(queue.unsent_limit).saturating_sub(queue.len()),
            false => 0,
        };
        let in_ring = if queue.has_unsent() { 0 } else { tx.half.sender.space() as usize };
        in_ring.saturating_add(in_queue)
    }

    /// After a non-waiting call without room: checks for a moment for reads of the peer. `true`:
    /// another try may find room, in the ring or in the queue.
    pub(crate) fn look_for_room(&self) -> bool {
        let seen = {
            let tx = self.tx();
            if tx.half.path() != SendPath::Ring {
                return tx.has_room_on_tcp();
            }
            match tx.full() {
                Some(_) if !tx.queue.has_room() => return false,
                Some(_) if !tx.has_stalled() => tx.half.seen(),
                _ => return true,
            }
        };
        let (begun, carrier) = (Instant::now(), self.shared.carrier());
        while begun.elapsed() < LOOK {
            self.shared.reactor.poll();
            if carrier.words()[1] != seen || self.shared.has_failed() {
                return true;
            }
            std::thread::yield_now();
        }
        let mut tx = self.tx();
        let read = tx.half.sender.consumed();
        if let Some(full) = tx.queue.full.as_mut().filter(|full| full.read == read) {
            full.stalled = true;
        }
        true
    }

    /// Informs a non-waiting writer of new room, after a report of no room.
    pub(super) fn check_blocked_writer(&self) {
        if !self.shared.waiting.is_write_blocked() {
            return;
        }
        if self.ready().writable {
            self.shared.waiting.set_write_blocked(false);
            self.shared.wake_all();
        }
    }

    /// Has the background thread check again whether the peer has stalled. Nothing to do if stalled
    /// with a queue too full to show room: a read of the peer makes room.
    pub(super) fn await_stall(&self) {
        if self.shared.end.has_left_ring() {
            return;
        }
        let mut tx = self.tx();
        tx.note_full();
        let waits = tx.queue.has_room() && (!tx.has_stalled() || tx.shows_room_in_queue());
        drop(tx);
        if waits {
            self.shared.schedule_update();
        }
    }
}
