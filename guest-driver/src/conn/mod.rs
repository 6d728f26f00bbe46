// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One SMC connection: two locks, two rings, and the control words that tie them together.
//!
//! Send side and receive side each have their own lock, so that one thread can write while another
//! reads. Lock order: receive side, then send side. A thread sends to the peer only under the lock
//! of the send side. Atomics hold what one side must know of the other: the consumer cursor, which
//! every control word carries, and how the connection has ended.
//!
//! [`Carrier`] brings bytes and words to the peer, by a pair of DMBs or by RDMA. The peer stores
//! its words into memory that it can change at any time. So a thread copies them out and has
//! `smc_core::connection` check them. Words that cannot be true abort the connection.

mod carrier;
mod end;
mod inherit;
mod keepalive;
mod park;
mod ready;
mod recv;
mod send;
mod send_queue;
mod wait;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use smc_core::connection::{Close, Event, Receiver, Sender};
use smc_core::wire::cdc::{ConsumerWord, ProducerWord, StateFlags};

pub(crate) use carrier::Carrier;
use carrier::no_ring;
use keepalive::Silence;
use send_queue::SendQueue;
pub(crate) use send_queue::{forget_unsent_bytes, has_unsent_bytes, hold_queues};

pub(crate) use ready::LocalEnd;

use crate::info::ConnectionInfo;
use crate::reactor::poll_queue::PollEntry;
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::spin::Spin;
use crate::reactor::wait::{Deadline, Waiter};
use crate::reactor::{ConnectionHandler, DelayedUpdate, Reactor};
use ism_sys::lock;

/// Bytes of a long write between two updates of the producer cursor. Updates cost little at this
/// size, and the peer can read one part while this end writes the next.
const CHUNK: u32 = 64 << 10;

/// The connection has not ended abnormally.
const NO_FAILURE: u8 = 0;
/// Calls fail with `ConnectionReset`.
const RESET: u8 = 1;
/// Calls fail with `ConnectionAborted`.
const ABORTED: u8 = 2;
/// The peer's process has ended without a word, or TCP was reset after the peer's last byte. Either
/// is an end of data.
const ENDED: u8 = 3;

/// The send side.
pub(super) struct Tx {
    sender: Sender,
    close: Close,
    /// State flags of the last control words that were sent.
    published: StateFlags,
    /// The last producer word that was sent.
    producer: u64,
    /// The peer's consumer word at the last refresh.
    seen: u64,
    /// When the wait for the peer's closing words ends.
    timer: Option<Instant>,
    /// Since when the peer is gone, while TCP may still say whether its process has ended.
    lost: Option<Instant>,
    /// Number of bytes sent.
    total: u64,
    /// How often bytes were sent.
    deliveries: u64,
    /// Bytes for which the ring has no room.
    queue: SendQueue,
}

/// The receive side.
pub(super) struct Rx {
    receiver: Receiver,
    /// No bytes will follow those that are here, and all of them could be read when this was found.
    ended: bool,
    /// A read has reported the failure of the connection, so none returns bytes any more.
    failed: bool,
    /// The peer's words at the last refresh.
    seen: [u64; 2],
    /// Number of bytes received.
    total: u64,
    /// How often new bytes were found.
    arrivals: u64,
}

/// One SMC connection.
pub(crate) struct Conn {
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    /// The consumer cursor, as the cursor part of a consumer word.
    consumed: AtomicU64,
    /// The last consumer cursor that was sent, in the same form.
    announced: AtomicU64,
    /// The peer has set "sending done" or "closed".
    peer_done: AtomicBool,
    /// [`NO_FAILURE`], [`RESET`] or [`ABORTED`].
    failure: AtomicU8,
    /// One of the ends has aborted the connection, so unread bytes are discarded.
    purged: AtomicBool,
    /// A call has reported the failure, as SO_ERROR is reported once.
    reported: AtomicBool,
    nonblocking: AtomicBool,
    /// TCP_NODELAY, once it was set. It changes nothing.
    nodelay: OnceLock<AtomicBool>,
    /// `shutdown(read)`: reads return end of data once the ring is empty. Not under the lock of the
    /// receive side, because a sleeping reader has to see it.
    read_shut: AtomicBool,
    /// This end writes no more. A sleeping writer has to see it, too.
    write_shut: AtomicBool,
    /// A write that must not wait found no room, and no poll has shown room since.
    write_blocked: AtomicBool,
    /// The send queue has bytes. Not under the lock of the send side, because
    /// the reactor asks at every event.
    holding: AtomicBool,
    /// The background thread will check whether the peer knows of all that was read.
    update_scheduled: AtomicBool,
    /// Since when the peer is silent; `None`: silence is not tested.
    keepalive: Mutex<Option<Silence>>,
    /// Number of sleeping threads and pollers, plus one for a readiness descriptor.
    waiters: AtomicU32,
    sleepers: Mutex<Vec<Arc<Waiter>>>,
    /// The words at the last [`ConnectionHandler::take_change`].
    last_change: [AtomicU64; 2],
    /// How threads sleep on the armed word of the line.
    word_state: wait::WordState,
    readiness: OnceLock<ReadinessFd>,
    /// The entries of the pollers that watch the connection.
    pollers: Mutex<Vec<Arc<PollEntry>>>,
    spin: Spin,
    reactor: Arc<Reactor<Conn>>,
    tcp: Mutex<Option<TcpStream>>,
    /// Local and peer address, kept when the TCP connection ends before the application does.
    addresses: OnceLock<(SocketAddr, SocketAddr)>,
    /// No call will ask for the addresses any more.
    addresses_discarded: AtomicBool,
    /// This end writes the peer's buffer no more, so another connection may.
    peer_buffer_released: AtomicBool,
    close_timeout: Duration,
    /// The own buffer may serve another connection.
    reuse: AtomicBool,
    carrier: Carrier,
}

/// The part of the two words that concerns readers: everything but the consumer cursor.
pub(super) fn reader_view([producer, consumer]: [u64; 2]) -> [u64; 2] {
    let flags = ConsumerWord::from_u64(consumer);
    let flags = ConsumerWord { cursor: Default::default(), ..flags };
    [producer, flags.to_u64()]
}

impl Conn {
    /// Makes a connection on its carrier, and registers it with the reactor.
    ///
    /// # Errors
    /// One of the buffers is too small for a ring.
    pub(crate) fn new(
        carrier: Carrier,
        tcp: TcpStream,
        reactor: Arc<Reactor<Conn>>,
        spin: &Arc<Spin>,
        close_timeout: Duration,
    ) -> io::Result<Arc<Conn>> {
        let sender = carrier.sender().map_err(no_ring)?;
        let receiver = Receiver::new(carrier.local_ring().map_err(no_ring)?);
        // The words of both ends before they have sent any: cursors at the start of the rings.
        let producer = ProducerWord { cursor: receiver.ring().start() }.to_u64();
        let at = |cursor| ConsumerWord { cursor, ..Default::default() }.to_u64();
        let (seen, consumed) = (at(sender.ring().start()), at(receiver.cursor()));
        let mut close = Close::new();
        close.on(Event::Established);
        let tx = Tx {
            close,
            published: StateFlags::empty(),
            producer: sender.producer_word().to_u64(),
            sender,
            seen,
            timer: None,
            lost: None,
            total: 0,
            deliveries: 0,
            queue: SendQueue::default(),
        };
        let rx = Rx {
            receiver,
            ended: false,
            failed: false,
            seen: [producer, seen],
            total: 0,
            arrivals: 0,
        };
        let words = carrier.words();
        let conn = Arc::new(Conn {
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            consumed: AtomicU64::new(consumed),
            announced: AtomicU64::new(consumed),
            peer_done: AtomicBool::new(false),
            failure: AtomicU8::new(NO_FAILURE),
            purged: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            nodelay: OnceLock::new(),
            read_shut: AtomicBool::new(false),
            write_shut: AtomicBool::new(false),
            write_blocked: AtomicBool::new(false),
            holding: AtomicBool::new(false),
            update_scheduled: AtomicBool::new(false),
            keepalive: Mutex::new(None),
            waiters: AtomicU32::new(0),
            sleepers: Mutex::default(),
            last_change: words.map(AtomicU64::new),
            word_state: wait::WordState::default(),
            readiness: OnceLock::new(),
            pollers: Mutex::default(),
            spin: Spin::of(spin),
            reactor: reactor.clone(),
            tcp: Mutex::new(Some(tcp)),
            addresses: OnceLock::new(),
            addresses_discarded: AtomicBool::new(false),
            peer_buffer_released: AtomicBool::new(false),
            close_timeout,
            reuse: AtomicBool::new(false),
            carrier,
        });
        reactor.register(conn.carrier.registration(), Arc::downgrade(&conn));
        if conn.carrier.has_failed() {
            // The peer was lost before the reactor knew this connection.
            conn.check_carrier();
        }
        Ok(conn)
    }

    /// What was negotiated.
    pub(crate) fn info(&self) -> ConnectionInfo {
        self.carrier.info()
    }

    /// The reactor of its device or RNICs.
    pub(crate) fn reactor(&self) -> &Arc<Reactor<Conn>> {
        &self.reactor
    }

    /// Runs `f` on the TCP connection underneath.
    ///
    /// # Errors
    /// `NotConnected`: the TCP connection has ended; or the error of `f`.
    pub(crate) fn with_tcp<T>(&self, f: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        match &*lock(&self.tcp) {
            Some(tcp) => f(tcp),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Local and peer address of the TCP connection. Only this call asks the kernel for them,
    /// because a short connection need not pay for two system calls.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        match self.addresses.get() {
            Some(addresses) => Ok(*addresses),
            None => self.with_tcp(|tcp| Ok((tcp.local_addr()?, tcp.peer_addr()?))),
        }
    }

    /// Says that no call will ask for the addresses any more.
    pub(crate) fn discard_addresses(&self) {
        self.addresses_discarded.store(true, Ordering::Relaxed);
    }

    /// Takes the TCP connection, and keeps the addresses if a call may ask for them.
    fn take_tcp(&self) -> Option<TcpStream> {
        if !self.addresses_discarded.load(Ordering::Relaxed)
            && let Ok(addresses) = self.addresses()
        {
            let _ = self.addresses.set(addresses);
        }
        lock(&self.tcp).take()
    }

    /// Sets whether calls return `WouldBlock` instead of waiting.
    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// Remembers TCP_NODELAY.
    pub(crate) fn set_nodelay(&self, on: bool) {
        self.nodelay.get_or_init(AtomicBool::default).store(on, Ordering::Relaxed);
    }

    /// TCP_NODELAY as it was set, or else that of the TCP connection, which may have inherited it.
    pub(crate) fn nodelay(&self) -> io::Result<bool> {
        match self.nodelay.get() {
            Some(on) => Ok(on.load(Ordering::Relaxed)),
            None => self.with_tcp(TcpStream::nodelay),
        }
    }

    fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Lets another connection write the peer's buffer. This one sends at most its last words.
    fn release_peer_buffer(&self) {
        if !self.peer_buffer_released.swap(true, Ordering::Relaxed) {
            self.carrier.release();
        }
    }

    fn tx(&self) -> MutexGuard<'_, Tx> {
        lock(&self.tx)
    }

    fn rx(&self) -> MutexGuard<'_, Rx> {
        lock(&self.rx)
    }

    #[inline]
    fn words(&self) -> [u64; 2] {
        self.carrier.words()
    }

    /// Whether the connection has ended in a way that its control words do not tell.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.load(Ordering::Acquire) != NO_FAILURE
    }

    /// Whether calls fail with an error.
    pub(crate) fn has_error(&self) -> bool {
        !matches!(self.failure.load(Ordering::Acquire), NO_FAILURE | ENDED)
    }

    /// Fails if the connection has ended abnormally.
    ///
    /// # Errors
    /// `ConnectionReset` or `ConnectionAborted`.
    fn check(&self) -> io::Result<()> {
        match self.failure.load(Ordering::Acquire) {
            NO_FAILURE | ENDED => Ok(()),
            RESET => Err(io::ErrorKind::ConnectionReset.into()),
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// Notes that a call has reported the failure of the connection, if `result` does.
    fn note_report<T>(&self, result: io::Result<T>) -> io::Result<T> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset};
        if matches!(&result, Err(e) if matches!(e.kind(), ConnectionReset | ConnectionAborted)) {
            self.reported.store(true, Ordering::Relaxed);
            self.readiness.get().into_iter().for_each(ReadinessFd::clear_error);
        }
        result
    }

    /// The pending error, once (SO_ERROR).
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        // The peer's words may have changed since the last call.
        self.reactor.poll();
        self.ready();
        let error = self.check().err()?;
        (!self.reported.swap(true, Ordering::Relaxed)).then_some(error)
    }
}

impl ConnectionHandler for Conn {
    fn on_wake(&self) {
        self.send_held();
        self.check_blocked_writer();
        self.wake_all();
        self.sync_readiness();
        // The waiter may be a writer, which does not answer requests of the peer.
        self.on_arrival();
    }

    fn take_change(&self) -> bool {
        let words = self.words();
        let mut same = true;
        for (last_change, word) in self.last_change.iter().zip(words) {
            if last_change.load(Ordering::Relaxed) != word {
                last_change.store(word, Ordering::Relaxed);
                same = false;
            }
        }
        // A peer may signal without new words, and then the line must be armed again. If two
        // connections share a line, the other one may have armed it since.
        !same || !self.carrier.line().is_some_and(|line| line.is_quiet())
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
        self.waiters.load(Ordering::SeqCst) != 0
    }

    fn on_recheck(&self) {
        // The peer could suppress every other wake-up.
        self.wake_sleepers();
        // A reset concerns a connection that no call waits on as well (CLOSE-28).
        self.check_tcp();
        self.check_carrier();
        self.carrier.probe_peer();
    }

    fn on_lost(&self) {
        // The device reports the buffers of a peer that leaves ahead of the peer itself.
        if self.carrier.may_hear_of_peer() {
            self.carrier.fail();
        } else {
            self.lost();
        }
    }

    fn on_taken(&self) {
        self.taken();
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.reactor.remove(self.carrier.key());
        if self.readiness.get().is_some() {
            self.reactor.remove_pollable();
        }
        if self.word_state.is_known() {
            self.reactor.remove_unwatched();
        }
        self.end_holding();
        self.release_peer_buffer();
        if *self.reuse.get_mut() {
            let rx = self.rx.get_mut().unwrap_or_else(PoisonError::into_inner);
            self.carrier.allow_reuse(rx.total);
        }
    }
}
