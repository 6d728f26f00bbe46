// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Readiness: for pollers, and for the kernel's poll and epoll.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use smc_core::connection::Sender;
use smc_core::stream::{SendPath, reader_view};
use smc_core::wire::cdc::StateFlags;
use virtio_ism_abi::signal::Sleepers;

use super::{Carrier, Conn, Rx, Tx};
use crate::reactor::poll_queue::PollEntry;
use crate::reactor::readiness_fd::{ReadinessFd, Ready};

/// The part of a connection's readiness not shown by its control words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalEnd {
    /// The connection ended abnormally.
    failed: bool,
    /// The application reads no more.
    read_shut: bool,
    /// A write that must not wait, or a poll, has found no room, and no poll has shown room since.
    write_blocked: bool,
    /// Number of times when TCP got room for records, after the ring was left.
    rooms_on_tcp: u32,
}

impl LocalEnd {
    /// Whether a reader finds no difference.
    pub(crate) fn same_for_reader(self, other: LocalEnd) -> bool {
        let view = |end| LocalEnd { write_blocked: false, rooms_on_tcp: 0, ..end };
        view(self) == view(other)
    }
}

impl Conn {
    /// The present readiness of the connection. A poller without room is woken when the send queue
    /// accepts a write. The peer does not signal this: it has stalled.
    pub(crate) fn ready(&self) -> Ready {
        let ready = self.ready_locked(&mut self.rx());
        if !ready.writable {
            self.waiting.set_write_blocked(true);
            self.await_stall();
        }
        ready
    }

    fn ready_locked(&self, rx: &mut Rx) -> Ready {
        let ended = self.refresh_rx(rx).unwrap_or(true);
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        let failed = self.has_error();
        let shut = self.end.is_read_shut();
        // The peer closed, so nothing goes either way, or both directions have ended.
        let closed = tx.half.close.peer_flags().contains(StateFlags::CLOSED);
        let own_end = tx.half.own_flags().intersects(StateFlags::SENDING_DONE | StateFlags::CLOSED);
        Ready {
            readable: rx.readable() > 0 || ended || shut || failed,
            writable: failed
                || !tx.half.close.can_write()
                || tx.half.records.broken
                || Self::shows_room(&tx),
            read_closed: ended || shut || failed,
            hang_up: failed || closed || (own_end && (ended || shut)),
            both_ended: failed || (own_end && (ended || shut)),
            failed,
            arrived: rx.half.total(),
        }
    }

    fn shows_room(tx: &Tx) -> bool {
        match tx.half.path() {
            SendPath::Ring => has_room(&tx.half.sender) || tx.shows_room(),
            SendPath::Leaving(_) | SendPath::Tcp => tx.shows_room_on_tcp(),
        }
    }

    /// The control words.
    pub(crate) fn control_words(&self) -> [u64; 2] {
        self.words()
    }

    /// The state not shown by the control words.
    pub(crate) fn local_end(&self) -> LocalEnd {
        LocalEnd {
            failed: self.has_failed(),
            read_shut: self.end.is_read_shut(),
            write_blocked: self.waiting.is_write_blocked(),
            rooms_on_tcp: match self.end.has_left_ring() {
                true => self.waiting.rooms_on_tcp(),
                false => 0,
            },
        }
    }

    /// A descriptor that is readable and writable for the kernel when this connection is.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn pollable(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(readiness) = self.waiting.readiness.get() {
            return Ok(readiness.as_fd());
        }
        let readiness = ReadinessFd::new()?;
        if self.waiting.readiness.set(readiness).is_ok() {
            self.waiting.add_waiter();
            self.reactor.add_pollable();
        }
        self.sync_readiness();
        match self.waiting.readiness.get() {
            Some(readiness) => Ok(readiness.as_fd()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Like [`Conn::pollable`], with the exact state of a TCP socket at every moment.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn pollable_exact(&self) -> io::Result<BorrowedFd<'_>> {
        self.pollable()?;
        if let Some(readiness) = self.waiting.readiness.get() {
            readiness.make_exact();
            self.sync_readiness();
        }
        self.pollable()
    }

    /// A read has taken the last bytes, and the descriptor may have to show the change.
    pub(super) fn note_empty(&self, rx: &mut Rx) {
        if self.waiting.readiness.get().is_some_and(ReadinessFd::is_exact) {
            self.sync_readiness_locked(rx);
        }
    }

    /// Makes the readiness descriptor, if there is one, show the present readiness, and arms the
    /// line for the next change.
    pub(super) fn sync_readiness(&self) {
        if self.waiting.readiness.get().is_some() {
            self.sync_readiness_locked(&mut self.rx());
        }
    }

    fn sync_readiness_locked(&self, rx: &mut Rx) {
        let Some(readiness) = self.waiting.readiness.get() else { return };
        // A limit, because a peer may signal without end.
        for _ in 0..64 {
            let ready = self.ready_locked(rx);
            if ready.writable {
                self.waiting.set_write_blocked(false);
            }
            // The descriptor shows "writable" until a write has found no room.
            let blocked = self.waiting.is_write_blocked();
            let shown = Ready { writable: ready.writable || !blocked, ..ready };
            readiness.show(shown);
            // An exact descriptor shows each arrival.
            let waits =
                !ready.hang_up && (!shown.readable || !shown.writable || readiness.is_exact());
            if !waits || self.arm() {
                return;
            }
        }
        // The background thread continues.
        self.reactor.wake_background();
    }

    /// Whether a repeated read of a non-blocking socket would still find nothing. The readiness
    /// descriptor, if there is one, shows the result.
    pub(super) fn has_nothing_to_read(&self, rx: &mut Rx) -> bool {
        if self.waiting.readiness.get().is_none() {
            return reader_view(self.words()) == reader_view(rx.half.seen()) && !self.has_failed();
        }
        self.sync_readiness_locked(rx);
        rx.readable() == 0 && !self.has_failed() && !self.end.is_peer_done()
    }

    /// Adds a poller. The poller checks the connection afterwards. `true`: from then on the poller
    /// learns of every change by its queue and `Reactor::poll_lines`. `false`: the poller arms the
    /// connection before a sleep, and compares the control words.
    pub(crate) fn add_poller(&self, entry: &Arc<PollEntry>) -> bool {
        let mut pollers = self.waiting.pollers();
        pollers.push(entry.clone());
        self.waiting.add_waiter();
        match self.carrier().line_in_slab() {
            Some(line) => {
                line.set_in_slab(true);
                true
            }
            // An RNIC's completions name connections.
            None => self.carrier().must_be_polled(),
        }
    }

    /// The line of a new ring, reported to the pollers like the last one's.
    pub(super) fn watch_line(&self, carrier: &Carrier) {
        let pollers = self.waiting.pollers();
        if !pollers.is_empty()
            && let Some(line) = carrier.line_in_slab()
        {
            line.set_in_slab(true);
        }
    }

    /// Undoes one [`Conn::add_poller`].
    pub(crate) fn remove_poller(&self, entry: &Arc<PollEntry>) {
        let mut pollers = self.waiting.pollers();
        let Some(at) = pollers.iter().position(|other| Arc::ptr_eq(other, entry)) else { return };
        pollers.swap_remove(at);
        // The line stays in its slab: another connection of its wait group, or the parent of this
        // process, may poll it. A bit not taken by any poller costs its user one load.
        self.remove_waiter();
    }

    /// Arms the signal line for a poller. `false`: a signal came before, so the caller checks
    /// again.
    pub(crate) fn arm_for_poller(&self) -> bool {
        self.arm()
    }

    /// Undoes [`Conn::arm_for_poller`].
    pub(crate) fn disarm_for_poller(&self) {
        // Sleeping threads and the readiness descriptor need the armed line.
        if self.waiting.count() <= 1
            && let Some(line) = self.carrier().line()
        {
            line.disarm_as(Sleepers::KICK);
        }
    }

    /// Wakes all waiters for a change by this end.
    pub(super) fn failed_or_shut(&self) {
        self.wake_all();
        self.sync_readiness();
    }
}

/// Whether the ring has room enough to wake a writer: a quarter of the ring, so the writer is not woken
/// for every byte read. A single byte is enough if the peer then reports its read position.
fn has_room(sender: &Sender) -> bool {
    let enough = if sender.is_outdated() { 1 } else { sender.usable() / 4 };
    sender.space() >= enough
}
