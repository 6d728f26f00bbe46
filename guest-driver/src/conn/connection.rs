// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection for its stack and its pollers: the beginning, options, reports, forks and readiness.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use smc_core::carrier::{End, Role};
use smc_core::connection::Receiver;
use smc_core::stream::{RecvHalf, SendHalf, SendPath, first_words, reader_view};
use smc_core::wire::cdc::{ConsumerWord, ProducerWord, StateFlags};
use smc_core::wire::cursor::Cursor;

use super::carrier::{Carrier, no_ring};
use super::counts::MovedTime;
use super::cursors::ConsumerCursors;
use super::end_word::{EndWord, Failure};
use super::local_end::LocalEnd;
use super::options::{Options, Silence};
use super::parts::{Common, Conn, Rx, Shared, Tx};
use super::records::Records;
use super::ring_return::RingReturn;
use super::waiting::Waiting;
use crate::byte_queue::send_queue::SendQueue;
use crate::reactor::poll_queue::PollEntry;
use crate::reactor::readiness_fd::{ReadinessFd, Ready};
use crate::reactor::tcp_watch::TcpWatch;
use crate::reactor::wait::{Waiter, clear_interrupted, was_interrupted};
use crate::reactor::watched_tcp::WatchedTcp;
use crate::reactor::{ConnectionHandler, Reactor};
use ism_sys::interrupt::listening;
use ism_sys::{is_free, lock};
use smc_info::{ConnectionInfo, ConnectionSnapshot, Cursors};
use virtio_ism_abi::signal::Sleepers;

impl Conn {
    /// Makes a connection on its carrier, and registers it with the reactor.
    ///
    /// `watch`: connections may continue over TCP without their device, if the peer has agreed. `role`:
    /// whether this end has proposed the connection.
    ///
    /// # Errors
    /// One of the buffers is too small for a ring.
    pub(crate) fn new(
        carrier: Carrier,
        tcp: TcpStream,
        reactor: Arc<Reactor<Conn>>,
        common: &Common,
        watch: Option<Arc<TcpWatch<Conn>>>,
        role: Role,
    ) -> io::Result<Arc<Conn>> {
        let watch = watch.filter(|_| carrier.may_be_outlived());
        let carrier = Arc::new(carrier);
        let sender = carrier.sender().map_err(no_ring)?;
        let receiver = Receiver::new(carrier.local_ring().map_err(no_ring)?);
        let words = first_words(receiver.ring(), sender.ring());
        let cursors = ConsumerCursors::new(receiver.cursor());
        let tx = Tx {
            carrier: carrier.clone(),
            half: SendHalf::new(sender, role, carrier.may_return_to_ring()),
            timer: None,
            lost: None,
            last_move: MovedTime::new(0),
            queue: SendQueue::default(),
            // The child of a fork can take over a connection that need not be polled.
            records: Records::new(!carrier.must_be_polled()),
            ring_return: RingReturn::new(),
        };
        let rx = Rx {
            carrier: carrier.clone(),
            half: RecvHalf::new(receiver, words),
            unread: None,
            last_move: MovedTime::new(words[0]),
        };
        let shared = Shared {
            cursors,
            end: EndWord::new(),
            waiting: Waiting::new(carrier.words(), &common.spin),
            options: Options::new(common.close_timeout),
            tcp: WatchedTcp::new(tcp),
            reactor: reactor.clone(),
            carrier: ArcSwap::new(carrier),
        };
        let conn = Arc::new_cyclic(|me| Conn {
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            shared,
            moved: common.moved.clone(),
            me: me.clone(),
        });
        // A device gone during the handshake reports nothing any more, and its successor may have
        // another connection by this key.
        let is_gone = conn.shared.carrier().is_device_gone();
        if !is_gone {
            reactor.register(conn.shared.carrier().registration(), Arc::downgrade(&conn));
        }
        if let Some(watch) = watch {
            conn.shared.tcp.enter(watch, Arc::downgrade(&conn));
        }
        if is_gone {
            conn.lost(|_| true);
            return Ok(conn);
        }
        if conn.shared.reactor.is_leaving() {
            conn.on_leave();
        }
        if conn.shared.carrier().has_failed() {
            conn.shared.carrier().ask_for_peer();
            if !conn.shared.carrier().peer_has_left() {
                // The own device, about to go, refuses new work and will report its leave soon.
                conn.on_leave();
            }
            // The peer was lost before the reactor knew this connection.
            conn.check_carrier();
        }
        Ok(conn)
    }

    /// Runs `f` on the TCP connection underneath.
    ///
    /// # Errors
    /// `NotConnected`: the TCP connection has ended; or the error of `f`.
    pub(crate) fn with_tcp<T>(
        &self,
        f: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        self.shared.tcp.with(f)
    }

    /// Local and peer address of the TCP connection.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        self.shared.tcp.addresses()
    }

    /// TCP_NODELAY as set, or else the TCP connection's value, possibly inherited.
    pub(crate) fn nodelay(&self) -> io::Result<bool> {
        self.shared.nodelay()
    }

    /// Adds a thread to be woken at every change.
    pub(crate) fn add_sleeper(&self, waiter: &Arc<Waiter>) {
        self.shared.waiting.add_sleeper(waiter);
    }

    /// Undoes one [`Conn::add_sleeper`].
    pub(crate) fn remove_sleeper(&self, waiter: &Arc<Waiter>) {
        self.shared.remove_sleeper(waiter);
    }

    /// Whether the connection needs only memory and descriptors, present in a child, too.
    pub(crate) fn can_be_inherited(&self) -> bool {
        !self.shared.carrier().must_be_polled() && !self.shared.has_failed()
    }

    /// Whether the child of a fork has to check TCP now and then: for the peer's bytes, room, or the
    /// peer's records while a ring is being left.
    pub(crate) fn needs_turns(&self) -> bool {
        let is_due = |end: &End| !end.is_on_ring() && !end.is_over();
        !self.shared.carrier().must_be_polled() && is_due(self.tx().half.carrier())
    }

    /// Whether no thread holds a lock of the connection.
    pub(crate) fn is_unlocked(&self) -> bool {
        is_free(&self.rx)
            && is_free(&self.tx)
            && self.shared.options.is_unlocked()
            && self.shared.tcp.is_unlocked()
            && self.shared.waiting.is_unlocked()
    }

    /// The descriptors of the connection.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let readiness =
            self.shared.waiting.readiness.get().map(|readiness| readiness.descriptors());
        self.shared.tcp.descriptors().into_iter().chain(readiness.into_iter().flatten()).collect()
    }

    /// Forgets the waiting threads of the parent, and takes up the plans of the parent's background
    /// thread.
    pub(crate) fn forget_threads(&self) {
        if let Some(line) = self.shared.carrier().line_in_slab() {
            line.set_in_slab(false);
        }
        self.shared.waiting.forget_threads();
        self.shared.tcp.forget_threads();
        // A step under way is lost with its message, so the handshake for a ring ends by a Decline.
        self.tx().ring_return.renewal.lose_step();
        self.shared.watch_again();
        self.shared.cursors.clear_update();
        self.shared.schedule_update();
        self.on_arrival();
    }

    /// Sets the time of silence before a test of the path to the peer; `None`: never.
    pub(crate) fn set_keepalive(&self, limit: Option<Duration>) {
        let (words, since) = (self.shared.words(), Instant::now());
        *lock(&self.shared.options.keepalive) = limit.map(|limit| Silence { limit, words, since });
    }

    /// The present state of the connection.
    pub(crate) fn snapshot(&self) -> ConnectionSnapshot {
        let addresses = self.shared.addresses().ok();
        let (received, unread, read, written_by_peer) = {
            let mut rx = self.rx();
            // A failure shows in the state.
            let _ = self.refresh_rx(&mut rx);
            let written = ProducerWord::from_u64(rx.half.seen()[0]).cursor;
            (rx.half.total(), rx.half.receiver.available(), rx.half.receiver.cursor(), written)
        };
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        ConnectionSnapshot {
            local: addresses.map(|(local, _)| local),
            peer: addresses.map(|(_, peer)| peer),
            info: self.shared.carrier().info(),
            changes: self.shared.may_outlive().then(|| tx.report()),
            state: format!("{:?}", tx.half.close.state()),
            sent: tx.half.total(),
            received,
            unread,
            unread_by_peer: tx.half.sender.in_flight(),
            queued: tx.queue.len(),
            cursors: Cursors {
                written: wrap_and_count(tx.half.sender.producer_word().cursor),
                read_by_peer: wrap_and_count(ConsumerWord::from_u64(tx.half.seen()).cursor),
                written_by_peer: wrap_and_count(written_by_peer),
                read: wrap_and_count(read),
            },
        }
    }

    /// Bytes so far, both directions together, and an upper bound of the turns in writing between the
    /// ends.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        let (received, arrivals) = {
            let rx = self.rx();
            (rx.half.total(), rx.half.arrivals())
        };
        let tx = self.tx();
        (tx.half.total().saturating_add(received), tx.half.deliveries().min(arrivals))
    }

    /// The negotiated values.
    pub(crate) fn info(&self) -> ConnectionInfo {
        self.shared.carrier().info()
    }

    /// The reactor of the device or the RNICs.
    pub(crate) fn reactor(&self) -> &Arc<Reactor<Conn>> {
        &self.shared.reactor
    }

    /// Notes the end of queries for the addresses.
    pub(crate) fn discard_addresses(&self) {
        self.shared.tcp.discard_addresses();
    }

    /// Sets whether calls return `WouldBlock` instead of waiting.
    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.shared.options.set_nonblocking(on);
    }

    /// Remembers TCP_NODELAY.
    pub(crate) fn set_nodelay(&self, on: bool) {
        self.shared.options.set_nodelay(on);
    }

    /// Whether [`Shared::nodelay`] differs from the TCP connection's setting.
    pub(crate) fn remembers_nodelay(&self) -> bool {
        self.shared.options.nodelay().is_some()
    }

    pub(super) fn tx(&self) -> MutexGuard<'_, Tx> {
        lock(&self.tx)
    }

    pub(super) fn rx(&self) -> MutexGuard<'_, Rx> {
        lock(&self.rx)
    }

    /// Whether calls fail with an error.
    pub(crate) fn has_error(&self) -> bool {
        !matches!(self.shared.end.failure(), None | Some(Failure::Ended))
    }

    /// The pending error, once (SO_ERROR).
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        // The peer's words may have changed since the last call.
        self.shared.reactor.poll();
        self.ready();
        let error = self.shared.check().err()?;
        self.shared.end.report().then_some(error)
    }

    /// The connection is over.
    pub(super) fn count_moved(&mut self) {
        let sent = self.tx.get_mut().unwrap_or_else(PoisonError::into_inner).half.total();
        let received = self.rx.get_mut().unwrap_or_else(PoisonError::into_inner).half.total();
        self.moved.add([sent, received]);
    }

    /// See [`WatchedTcp::lend`].
    pub(crate) fn lend_tcp(&self, fd: RawFd) {
        self.shared.tcp.lend(fd);
    }

    /// The number of the TCP socket, if lent.
    pub(crate) fn lent_number(&self) -> Option<RawFd> {
        self.shared.tcp.lent_number()
    }

    /// See [`WatchedTcp::own`].
    pub(crate) fn own_tcp(&self, copy: Option<OwnedFd>) {
        self.shared.tcp.own(copy);
    }

    /// Whether a close of the connection may need its TCP socket: for bytes not received by the peer, for
    /// records, or for a reset. If not, the end of TCP may come together with the close.
    pub(crate) fn close_needs_tcp(&self) -> bool {
        self.shared.reactor.poll();
        let mut rx = self.rx();
        // A failure has ended the connection already.
        let _ = self.refresh_rx(&mut rx);
        let is_unread = rx.half.receiver.available() > 0 || rx.unread.is_some();
        let tx = self.tx();
        let leaves = tx.half.path() != SendPath::Ring || self.shared.end.reads_tcp();
        is_unread || leaves || !tx.arrives_without_tcp(&self.shared) || self.shared.has_failed()
    }

    /// The present readiness of the connection. A poller without room is woken when the send queue
    /// accepts a write. The peer does not signal this: it has stalled.
    pub(crate) fn ready(&self) -> Ready {
        let ready = self.ready_locked(&mut self.rx());
        if !ready.writable {
            self.shared.waiting.set_write_blocked(true);
            self.await_stall();
        }
        ready
    }

    fn ready_locked(&self, rx: &mut Rx) -> Ready {
        let ended = self.refresh_rx(rx).unwrap_or(true);
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        let failed = self.has_error();
        let shut = self.shared.end.is_read_shut();
        // The peer closed, so nothing goes either way, or both directions have ended.
        let closed = tx.half.close.peer_flags().contains(StateFlags::CLOSED);
        let own_end = tx.half.own_flags().intersects(StateFlags::SENDING_DONE | StateFlags::CLOSED);
        Ready {
            readable: rx.readable() > 0 || ended || shut || failed,
            writable: failed
                || !tx.half.close.can_write()
                || tx.half.records.broken
                || tx.shows_room(),
            read_closed: ended || shut || failed,
            hang_up: failed || closed || (own_end && (ended || shut)),
            both_ended: failed || (own_end && (ended || shut)),
            failed,
            arrived: rx.half.total(),
        }
    }

    /// The control words.
    pub(crate) fn control_words(&self) -> [u64; 2] {
        self.shared.words()
    }

    /// The state not shown by the control words.
    pub(crate) fn local_end(&self) -> LocalEnd {
        LocalEnd {
            failed: self.shared.has_failed(),
            read_shut: self.shared.end.is_read_shut(),
            write_blocked: self.shared.waiting.is_write_blocked(),
            rooms_on_tcp: match self.shared.end.has_left_ring() {
                true => self.shared.waiting.rooms_on_tcp(),
                false => 0,
            },
        }
    }

    /// A descriptor that is readable and writable for the kernel when this connection is.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn pollable(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(readiness) = self.shared.waiting.readiness.get() {
            return Ok(readiness.as_fd());
        }
        let readiness = ReadinessFd::new()?;
        if self.shared.waiting.readiness.set(readiness).is_ok() {
            self.shared.waiting.add_waiter();
            self.shared.reactor.add_pollable();
        }
        self.sync_readiness();
        match self.shared.waiting.readiness.get() {
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
        if let Some(readiness) = self.shared.waiting.readiness.get() {
            readiness.make_exact();
            self.shared.mark_line();
            self.sync_readiness();
        }
        self.pollable()
    }

    /// A read has taken the last bytes, and the descriptor may have to show the change.
    pub(super) fn note_empty(&self, rx: &mut Rx) {
        if self.shared.waiting.readiness.get().is_some_and(ReadinessFd::is_exact) {
            self.sync_readiness_locked(rx);
        }
    }

    /// Makes the readiness descriptor, if there is one, show the present readiness, and arms the
    /// line for the next change.
    pub(super) fn sync_readiness(&self) {
        if self.shared.waiting.readiness.get().is_some() {
            self.sync_readiness_locked(&mut self.rx());
        }
    }

    fn sync_readiness_locked(&self, rx: &mut Rx) {
        let Some(readiness) = self.shared.waiting.readiness.get() else { return };
        // A limit, because a peer may signal without end.
        for _ in 0..64 {
            let before = self.shared.words();
            let ready = self.ready_locked(rx);
            if ready.writable {
                self.shared.waiting.set_write_blocked(false);
            }
            // The descriptor shows "writable" until a write has found no room.
            let blocked = self.shared.waiting.is_write_blocked();
            let shown = Ready { writable: ready.writable || !blocked, ..ready };
            readiness.show(shown);
            // An exact descriptor shows each arrival.
            let waits =
                !ready.hang_up && (!shown.readable || !shown.writable || readiness.is_exact());
            if !waits || self.shared.is_marked() {
                return;
            }
            // Arming takes the pending bit, maybe of words stored since.
            if self.shared.arm() && self.shared.words() == before {
                return;
            }
        }
        // The background thread continues.
        self.shared.reactor.wake_background();
    }

    /// Whether a repeated read of a non-blocking socket would still find nothing. The readiness
    /// descriptor, if there is one, shows the result.
    pub(super) fn has_nothing_to_read(&self, rx: &mut Rx) -> bool {
        if self.shared.waiting.readiness.get().is_none() {
            return reader_view(self.shared.words()) == reader_view(rx.half.seen())
                && !self.shared.has_failed();
        }
        self.sync_readiness_locked(rx);
        rx.readable() == 0 && !self.shared.has_failed() && !self.shared.end.is_peer_done()
    }

    /// Adds a poller. The poller checks the connection afterwards. `true`: from then on the poller
    /// learns of every change by its queue and `Reactor::poll_lines`. `false`: the poller arms the
    /// connection before a sleep, and compares the control words.
    pub(crate) fn add_poller(&self, entry: &Arc<PollEntry>) -> bool {
        let mut pollers = self.shared.waiting.pollers();
        pollers.push(entry.clone());
        self.shared.waiting.add_waiter();
        match self.shared.carrier().line_in_slab() {
            Some(line) => {
                line.set_in_slab(true);
                true
            }
            // An RNIC's completions name connections.
            None => self.shared.carrier().must_be_polled(),
        }
    }

    /// Undoes one [`Conn::add_poller`].
    pub(crate) fn remove_poller(&self, entry: &Arc<PollEntry>) {
        let mut pollers = self.shared.waiting.pollers();
        let Some(at) = pollers.iter().position(|other| Arc::ptr_eq(other, entry)) else { return };
        pollers.swap_remove(at);
        // The line stays in its slab: another connection of its wait group, or the parent of this
        // process, may poll it. A bit not taken by any poller costs its user one load.
        self.shared.remove_waiter();
    }

    /// Arms the signal line for a poller. `false`: a signal came before, so the caller checks
    /// again.
    pub(crate) fn arm_for_poller(&self) -> bool {
        self.shared.arm()
    }

    /// Undoes [`Conn::arm_for_poller`].
    pub(crate) fn disarm_for_poller(&self) {
        // Sleeping threads and the readiness descriptor need the armed line.
        if self.shared.waiting.count() <= 1
            && let Some(line) = self.shared.carrier().line()
        {
            line.disarm_as(Sleepers::KICK);
        }
    }

    /// Wakes all waiters for a change by this end.
    pub(super) fn failed_or_shut(&self) {
        self.shared.wake_all();
        self.sync_readiness();
    }

    /// Waits until the words differ from `seen`, in the part relevant to a reader, or with `write` to a
    /// writer.
    ///
    /// # Errors
    /// `WouldBlock` at the deadline; `Interrupted`: a signal was handled meanwhile.
    pub(crate) fn wait_for_change(
        &self,
        seen: [u64; 2],
        write: bool,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        clear_interrupted();
        // The kernel restarts a sleep on a word after a handler with SA_RESTART, as in calls without a
        // time limit.
        let (end, on_word) = (deadline.into(), deadline.is_none());
        let look = self.shared.look();
        listening(|| match write {
            true => self.await_room(&end, on_word, seen[1], was_interrupted),
            false => self.shared.await_bytes(&end, on_word, || {
                let read_shut = || self.shared.end.is_read_shut();
                reader_view(look.words()) != reader_view(seen)
                    || look.is_over()
                    || read_shut()
                    || was_interrupted()
            }),
        })?;
        if was_interrupted() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

fn wrap_and_count(cursor: Cursor) -> (u16, u32) {
    (cursor.wrap, cursor.count)
}
