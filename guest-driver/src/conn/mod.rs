// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One SMC connection, from its handshake to the last use of its buffer.
//!
//! # A connection's life
//!
//! *Begin*: the handshake makes a [`Carrier`], a pair of DMBs or of RDMA elements: the own ring, filled
//! by the peer, the peer's ring, filled by this end, and two control words for each end. [`Conn::new`]
//! registers the connection with the reactor, and with the watch of TCP if both ends can do without
//! their devices.
//!
//! *Send* (`send`): [`SendHalf`] names the path of the next bytes ([`SendPath`](smc_core::stream::SendPath)): into the peer's ring,
//! by one delivery of bytes and words; nowhere, between two carriers; or as a record on TCP (`by_tcp`).
//! Bytes without room wait in the send queue (`send_queue`), or their writer waits (`wait`).
//!
//! *Receive* (`recv`): a reader copies bytes out of the own ring, whether the peer has stored them or
//! this end has, out of records (`from_tcp`). So reads and readiness (`ready`) are the same on both
//! paths. The peer may change its words at any time: a thread copies them out, [`RecvHalf`] checks the
//! copy, and impossible words abort the connection.
//!
//! *Leave* (`change`): the device is about to go, or is gone (`end`). The machine of the send half gives
//! actions: the end of the ring, records, bytes to repeat (`copies`), and the position of the first
//! byte from TCP. This end carries the actions out in one function.
//!
//! *Come back* (`come_back`): a thread of the stack negotiates a new ring, step by step and without a
//! lock, by CLC messages in records. The peer's CHANGE begins both directions of the ring.
//!
//! *End* (`end`): an event and its actions by the table of RFC 7609. The end word (`end_word`) has the
//! result for threads without a lock. The buffer returns to its pool when both ends have finished.
//!
//! # Locks
//!
//! Send side and receive side each have their own lock, so one thread can write while another reads.
//! Lock order: receive side, then send side. A thread sends to the peer only under the lock of the send
//! side, and takes records under both. Atomics hold the state shared by both sides: the consumer
//! cursor, part of every control word, and the end of the connection.

mod by_tcp;
mod captured;
mod carrier;
mod change;
mod come_back;
mod copies;
mod counts;
mod cursors;
mod end;
mod end_word;
mod from_tcp;
mod inherit;
mod keepalive;
mod kept;
mod moved;
mod options;
mod park;
mod ready;
mod record_queue;
mod recv;
mod send;
mod send_queue;
mod tcp;
mod unread;
mod wait;
mod waiting;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use rustix::net::sockopt;
use smc_core::carrier::Role;
use smc_core::connection::Receiver;
use smc_core::stream::{RecvHalf, SendHalf, first_words};

pub(crate) use carrier::Carrier;
use carrier::no_ring;
use change::Records;
pub(crate) use come_back::PeerDevice;
use come_back::WayBack;
use counts::MovedTime;
use cursors::ConsumerCursors;
use end_word::{EndWord, Failure};
use kept::UnreadBytes;
pub(crate) use moved::MovedBytes;
use options::Options;
use send_queue::SendQueue;
pub(crate) use send_queue::{forget_unsent_bytes, has_unsent_bytes, hold_queues};
use tcp::HandshakeTcp;
use waiting::Waiting;

pub(crate) use ready::LocalEnd;

use crate::capture;
use crate::info::ConnectionInfo;
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::spin::Spin;
use crate::reactor::tcp_watch::TcpWatch;
use crate::reactor::wait::Deadline;
use crate::reactor::{ConnectionHandler, DelayedUpdate, Reactor};
use ism_sys::{lock, may_delay};

/// The send side.
pub(super) struct Tx {
    /// The carrier of both directions, as [`Conn::carrier`].
    carrier: Arc<Carrier>,
    half: SendHalf,
    /// The end of the wait for the peer's closing words.
    timer: Option<Instant>,
    /// The time of the peer's loss, while TCP may still report the end of its process.
    lost: Option<Instant>,
    /// The time of the last send, by `total`.
    last_move: MovedTime,
    /// Bytes for which the ring has no room.
    queue: SendQueue,
    /// The TCP connection as another carrier.
    records: Records,
    /// The return from TCP to a ring.
    way_back: WayBack,
}

/// The receive side.
pub(super) struct Rx {
    /// The carrier of both directions, as [`Conn::carrier`].
    carrier: Arc<Carrier>,
    half: RecvHalf,
    /// Unread bytes of an earlier ring.
    kept: Option<UnreadBytes>,
    /// The time of the last arrival, by the peer's producer word.
    last_move: MovedTime,
}

/// The settings shared by the connections of a stack.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) spin: Arc<Spin>,
    pub(crate) moved: Arc<MovedBytes>,
    /// The longest wait of a closed connection for its peer.
    pub(crate) close_timeout: Duration,
}

/// One SMC connection.
pub(crate) struct Conn {
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    cursors: ConsumerCursors,
    end: EndWord,
    waiting: Waiting,
    options: Options,
    tcp: HandshakeTcp,
    reactor: Arc<Reactor<Conn>>,
    moved: Arc<MovedBytes>,
    /// The carrier of both directions. Exchanged under both locks, so a thread with one of them uses
    /// the copy there.
    carrier: ArcSwap<Carrier>,
}

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
            half: SendHalf::new(sender, role, carrier.may_come_back()),
            timer: None,
            lost: None,
            last_move: MovedTime::new(0),
            queue: SendQueue::default(),
            // The child of a fork can take over a connection that need not be polled.
            records: Records::new(!carrier.must_be_polled()),
            way_back: WayBack::new(),
        };
        let rx = Rx {
            carrier: carrier.clone(),
            half: RecvHalf::new(receiver, words),
            kept: None,
            last_move: MovedTime::new(words[0]),
        };
        let words = carrier.words();
        let conn = Arc::new(Conn {
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            cursors,
            end: EndWord::new(),
            waiting: Waiting::new(words, &common.spin),
            options: Options::new(common.close_timeout),
            tcp: HandshakeTcp::new(tcp),
            reactor: reactor.clone(),
            moved: common.moved.clone(),
            carrier: ArcSwap::new(carrier),
        });
        conn.tx().way_back.me = Arc::downgrade(&conn);
        // A device gone during the handshake reports nothing any more, and its successor may have
        // another connection by this key.
        let is_gone = conn.carrier().is_device_gone();
        if !is_gone {
            reactor.register(conn.carrier().registration(), Arc::downgrade(&conn));
        }
        if let Some(watch) = watch {
            conn.tcp.enter(watch, Arc::downgrade(&conn));
        }
        if is_gone {
            conn.lost(|_| true);
            return Ok(conn);
        }
        if conn.reactor.is_leaving() {
            conn.on_leave();
        }
        if conn.carrier().has_failed() {
            conn.carrier().ask_for_peer();
            if !conn.carrier().peer_has_left() {
                // The own device, about to go, refuses new work and will report its leave soon.
                conn.on_leave();
            }
            // The peer was lost before the reactor knew this connection.
            conn.check_carrier();
        }
        Ok(conn)
    }

    /// The negotiated values.
    pub(crate) fn info(&self) -> ConnectionInfo {
        self.carrier().info()
    }

    /// The reactor of the device or the RNICs.
    pub(crate) fn reactor(&self) -> &Arc<Reactor<Conn>> {
        &self.reactor
    }

    /// Runs `f` on the TCP connection underneath.
    ///
    /// # Errors
    /// `NotConnected`: the TCP connection has ended; or the error of `f`.
    pub(crate) fn with_tcp<T>(
        &self,
        f: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        self.tcp.with(f)
    }

    /// Local and peer address of the TCP connection.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        self.tcp.addresses()
    }

    /// Notes the end of queries for the addresses.
    pub(crate) fn discard_addresses(&self) {
        self.tcp.discard_addresses();
    }

    /// Sets whether calls return `WouldBlock` instead of waiting.
    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.options.set_nonblocking(on);
    }

    /// Remembers TCP_NODELAY.
    pub(crate) fn set_nodelay(&self, on: bool) {
        self.options.set_nodelay(on);
    }

    /// TCP_NODELAY as set, or else the TCP connection's value, possibly inherited.
    pub(crate) fn nodelay(&self) -> io::Result<bool> {
        match self.options.nodelay() {
            Some(on) => Ok(on),
            None => self.with_tcp(|tcp| Ok(sockopt::tcp_nodelay(tcp)?)),
        }
    }

    /// Whether [`Conn::nodelay`] differs from the TCP connection's setting.
    pub(crate) fn remembers_nodelay(&self) -> bool {
        self.options.nodelay().is_some()
    }

    fn tx(&self) -> MutexGuard<'_, Tx> {
        lock(&self.tx)
    }

    fn rx(&self) -> MutexGuard<'_, Rx> {
        lock(&self.rx)
    }

    /// The carrier of both directions, for threads without a lock. The carrier stays alive as long as
    /// the result, while another one may be in use by then.
    #[inline]
    fn carrier(&self) -> Guard<Arc<Carrier>> {
        self.carrier.load()
    }

    #[inline]
    fn words(&self) -> [u64; 2] {
        may_delay();
        self.carrier().words()
    }

    /// Whether the connection has ended in a way not shown by its control words.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.end.has_failed()
    }

    /// Whether calls fail with an error.
    pub(crate) fn has_error(&self) -> bool {
        !matches!(self.end.failure(), None | Some(Failure::Ended))
    }

    /// Fails if the connection has ended abnormally.
    ///
    /// # Errors
    /// `ConnectionReset` or `ConnectionAborted` (SOCK-20).
    fn check(&self) -> io::Result<()> {
        match self.end.failure() {
            None | Some(Failure::Ended) => Ok(()),
            Some(Failure::Reset) => Err(io::ErrorKind::ConnectionReset.into()),
            Some(Failure::Aborted) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// Notes the report of the connection's failure by a call, if `result` is one.
    fn note_report<T>(&self, result: io::Result<T>) -> io::Result<T> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset};
        if matches!(&result, Err(e) if matches!(e.kind(), ConnectionReset | ConnectionAborted)) {
            self.end.report();
            self.waiting.readiness.get().into_iter().for_each(ReadinessFd::clear_error);
        }
        result
    }

    /// The pending error, once (SO_ERROR).
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        // The peer's words may have changed since the last call.
        self.reactor.poll();
        self.ready();
        let error = self.check().err()?;
        self.end.report().then_some(error)
    }
}

impl ConnectionHandler for Conn {
    fn on_wake(&self) {
        self.serve_awaited();
        self.send_held();
        self.check_blocked_writer();
        self.wake_all();
        self.sync_readiness();
        // The waiter may be a writer, and writers do not answer requests of the peer.
        self.on_arrival();
    }

    fn take_change(&self) -> bool {
        let words = self.words();
        let changed = self.waiting.take_change(words);
        // A peer may signal without new words, and then the line must be armed again. If two
        // connections share a line, the other one may have armed it since.
        changed || !self.carrier().line().is_some_and(|line| line.is_quiet())
    }

    fn on_arrival(&self) {
        // The background thread answers, because the application may hold the locks for long.
        if self.is_asked() {
            self.schedule_update();
        }
    }

    fn on_delayed_update(&self, read_before: Option<u64>) -> DelayedUpdate {
        self.flush_update(read_before)
    }

    fn on_tick(&self) {
        self.send_held();
        self.check_blocked_writer();
        self.answer_flags();
        self.check_keepalive();
        // While the descriptor shows readable and writable, the line is not armed, which spares the
        // peer a kick per message. A half close or the end must show all the same.
        self.sync_readiness();
    }

    fn has_waiters(&self) -> bool {
        self.waiting.count() != 0
    }

    fn on_recheck(&self) {
        // The peer could suppress every other wake-up.
        self.wake_sleepers();
        self.note_moves();
        // A reset also concerns a connection without waiting calls (CLOSE-28).
        self.check_tcp();
        self.check_carrier();
        self.carrier().probe_peer();
    }

    fn on_lost(&self, key: u32) {
        self.heard_of_loss(key);
    }

    fn on_leave(&self) {
        self.leave_in_order();
        self.sync_readiness();
    }

    fn on_taken(&self, key: u32) {
        self.taken(key);
    }

    fn on_tcp(&self) {
        self.serve_tcp(&mut self.rx());
        self.sync_readiness();
    }

    fn is_sending(&self) -> bool {
        self.is_sending_by_tcp()
    }

    fn on_visit(&self) -> bool {
        self.tcp.visit()
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        if capture::is_on() {
            self.capture_no_more();
        }
        self.count_moved();
        let me: *const Conn = self;
        self.reactor.remove(self.carrier().key(), me);
        if self.waiting.readiness.get().is_some() {
            self.reactor.remove_pollable();
        }
        if self.waiting.word_state.is_known() {
            self.reactor.remove_unwatched();
        }
        self.end_holding();
        self.end_awaiting();
        let rx = self.rx.get_mut().unwrap_or_else(PoisonError::into_inner);
        rx.carrier.release();
        if self.end.is_finished() {
            rx.carrier.allow_reuse(rx.half.total());
        }
    }
}
