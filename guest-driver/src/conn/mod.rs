//! One SMC connection: two locks, two rings, and the control words that tie them together.
//!
//! The send side and the receive side are apart, each under its own lock, so that one thread can
//! write while another reads. Lock order: receive side, then send side. All that goes to the peer
//! goes under the lock of the send side. What one side must know of the other is in
//! atomics: the consumer cursor that every control word carries, and how the connection fares.
//!
//! What carries it (a pair of DMBs, or RDMA) is [`Carrier`]'s affair. The words that the peer left
//! are the truth about it, and they are a claim: they are copied out and judged by `smc_core::connection`, and a claim that cannot be true aborts this connection.

mod carrier;
mod end;
mod keepalive;
mod park;
mod ready;
mod recv;
mod send;

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

pub(crate) use ready::LocalEnd;

use crate::info::ConnectionInfo;
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::wait::{Deadline, RECHECK_INTERVAL, Spin, Waiter};
use crate::reactor::{ConnectionHandler, DelayedUpdate, Reactor};

/// Bytes that are copied before the peer is told: large enough to be cheap, small enough that the
/// peer reads one piece while the next is written.
const CHUNK: u32 = 64 << 10;

/// What a blocked or failed call ends with.
const NO_FAILURE: u8 = 0;
const RESET: u8 = 1;
const ABORTED: u8 = 2;

/// The send side.
pub(super) struct Tx {
    sender: Sender,
    close: Close,
    /// State flags of the last control word that went out.
    published: StateFlags,
    /// Producer word of the last control word that went out.
    producer: u64,
    /// The consumer word of the own control block as last looked at.
    seen: u64,
    /// When the wait for the peer's closing words ends.
    timer: Option<Instant>,
    /// Bytes sent since the start.
    total: u64,
}

/// The receive side.
pub(super) struct Rx {
    receiver: Receiver,
    /// Both words of the own control block as last looked at.
    seen: [u64; 2],
    /// Bytes received since the start.
    total: u64,
}

/// One SMC connection.
pub(crate) struct Conn {
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    /// The consumer cursor, as the cursor part of a consumer word.
    consumed: AtomicU64,
    /// The newest consumer cursor that went out, in the same form.
    announced: AtomicU64,
    /// The peer has said D or C.
    peer_done: AtomicBool,
    failure: AtomicU8,
    /// Unread bytes are thrown away: the connection was aborted by one of its ends.
    purged: AtomicBool,
    /// The failure was reported once, as SO_ERROR is.
    reported: AtomicBool,
    nonblocking: AtomicBool,
    /// TCP_NODELAY, which changes nothing, once it was set.
    nodelay: OnceLock<AtomicBool>,
    /// `shutdown(read)`: reads return end of data once the ring is empty. Outside the lock of the
    /// receive side, because a sleeping reader has to see it.
    read_shut: AtomicBool,
    /// This side writes no more; for sleeping writers.
    write_shut: AtomicBool,
    /// A write found no room and the application has not been told of room since.
    write_blocked: AtomicBool,
    /// The background thread is to look whether the peer was told of all that was read.
    update_scheduled: AtomicBool,
    /// When the way to a silent peer is tested.
    keepalive: Mutex<Option<Silence>>,
    /// Sleeping threads, and others that wait for a wake-up (pollable, poller).
    waiters: AtomicU32,
    sleepers: Mutex<Vec<Arc<Waiter>>>,
    /// The words as they were when sleepers were last woken for them.
    last_change: [AtomicU64; 2],
    readiness: OnceLock<ReadinessFd>,
    /// The poller that watches this connection.
    poller: Mutex<Option<Arc<Waiter>>>,
    spin: Spin,
    reactor: Arc<Reactor<Conn>>,
    tcp: Mutex<Option<TcpStream>>,
    /// Local and peer address, kept when TCP goes before the application does.
    addresses: OnceLock<(SocketAddr, SocketAddr)>,
    /// Nobody will ask for the addresses any more.
    addresses_discarded: AtomicBool,
    /// The peer's element is not ours any more: another connection may have it.
    peer_buffer_released: AtomicBool,
    close_timeout: Duration,
    reuse: AtomicBool,
    carrier: Carrier,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The two words as one comparable claim for readers: everything but the consumer cursor.
pub(super) fn reader_view([producer, consumer]: [u64; 2]) -> [u64; 2] {
    let flags = ConsumerWord::from_u64(consumer);
    let flags = ConsumerWord { cursor: Default::default(), ..flags };
    [producer, flags.to_u64()]
}

impl Conn {
    /// Makes a connection on what carries it, and registers it with the reactor.
    pub(crate) fn new(
        carrier: Carrier,
        tcp: TcpStream,
        reactor: Arc<Reactor<Conn>>,
        spin: &Arc<Spin>,
        close_timeout: Duration,
    ) -> io::Result<Arc<Conn>> {
        let sender = carrier.sender().map_err(no_ring)?;
        let receiver = Receiver::new(carrier.local_ring().map_err(no_ring)?);
        // What both ends have said before they said anything: their cursors stand at the start.
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
            total: 0,
        };
        let rx = Rx { receiver, seen: [producer, seen], total: 0 };
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
            update_scheduled: AtomicBool::new(false),
            keepalive: Mutex::new(None),
            waiters: AtomicU32::new(0),
            sleepers: Mutex::default(),
            last_change: words.map(AtomicU64::new),
            readiness: OnceLock::new(),
            poller: Mutex::new(None),
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
            // It happened before the reactor could tell.
            conn.lost();
        }
        Ok(conn)
    }

    /// What was negotiated.
    pub(crate) fn info(&self) -> ConnectionInfo {
        self.carrier.info()
    }

    /// Where the threads of its device or RNICs meet.
    pub(crate) fn reactor(&self) -> &Arc<Reactor<Conn>> {
        &self.reactor
    }

    /// Runs `f` on the TCP connection underneath, if it is still there.
    pub(crate) fn with_tcp<T>(&self, f: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        match &*lock(&self.tcp) {
            Some(tcp) => f(tcp),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Local and peer address of the TCP connection. Asked for when they are wanted: that is two
    /// system calls, which a short connection need not pay.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        match self.addresses.get() {
            Some(addresses) => Ok(*addresses),
            None => self.with_tcp(|tcp| Ok((tcp.local_addr()?, tcp.peer_addr()?))),
        }
    }

    /// Nobody will ask for the addresses any more.
    pub(crate) fn discard_addresses(&self) {
        self.addresses_discarded.store(true, Ordering::Relaxed);
    }

    /// Takes the TCP connection away.
    fn take_tcp(&self) -> Option<TcpStream> {
        if !self.addresses_discarded.load(Ordering::Relaxed)
            && let Ok(addresses) = self.addresses()
        {
            let _ = self.addresses.set(addresses);
        }
        lock(&self.tcp).take()
    }

    /// Whether calls return `WouldBlock` instead of waiting.
    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// Remembers TCP_NODELAY.
    pub(crate) fn set_nodelay(&self, on: bool) {
        self.nodelay.get_or_init(AtomicBool::default).store(on, Ordering::Relaxed);
    }

    /// TCP_NODELAY as remembered, or else as the TCP connection has it: from its listener, perhaps.
    pub(crate) fn nodelay(&self) -> io::Result<bool> {
        match self.nodelay.get() {
            Some(on) => Ok(on.load(Ordering::Relaxed)),
            None => self.with_tcp(TcpStream::nodelay),
        }
    }

    fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// This connection writes no more, except for the very word that says so.
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

    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.load(Ordering::Acquire) != NO_FAILURE
    }

    /// The error of a call on a connection that ended abnormally.
    fn check(&self) -> io::Result<()> {
        match self.failure.load(Ordering::Acquire) {
            NO_FAILURE => Ok(()),
            RESET => Err(io::ErrorKind::ConnectionReset.into()),
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// Takes note that the application was told how the connection fares.
    fn note_report<T>(&self, result: io::Result<T>) -> io::Result<T> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset};
        if matches!(&result, Err(e) if matches!(e.kind(), ConnectionReset | ConnectionAborted)) {
            self.reported.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The pending error, once (SO_ERROR).
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        // Looks at what the peer says, which nobody may have done since.
        self.reactor.poll();
        self.ready();
        let error = self.check().err()?;
        (!self.reported.swap(true, Ordering::Relaxed)).then_some(error)
    }

    /// Waits until `changed`, or fails with `TimedOut`'s cousin `WouldBlock` at the deadline, as a
    /// socket with a timeout does. Called without locks.
    fn wait(&self, deadline: &Deadline, mut changed: impl FnMut() -> bool) -> io::Result<()> {
        // A peer that says something new all the time, and nothing of use, does not stretch it.
        if deadline.is_over() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut news = || changed() || self.has_failed();
        // A look at an RNIC's queues takes much longer than one at memory.
        let (spun, learns) = match self.carrier.must_be_polled() {
            true => {
                let look = || {
                    self.reactor.poll();
                    news()
                };
                (self.spin.until_polled(look), self.spin.spins_polled())
            }
            false => (self.spin.until(&mut news), self.spin.learns()),
        };
        if spun {
            return Ok(());
        }
        // Where there is no fast clock, each look at it is a system call.
        let start = learns.then(Instant::now);
        let waiter = Waiter::current();
        lock(&self.sleepers).push(waiter.clone());
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let result = self.sleep(&waiter, deadline, &mut news);
        if let (Ok(()), Some(start)) = (&result, start) {
            self.spin.note_sleep(start.elapsed());
        }
        let mut sleepers = lock(&self.sleepers);
        sleepers.retain(|other| !Arc::ptr_eq(other, &waiter));
        // The last one out takes its "asleep" back; until then a signal costs the peer a kick.
        if self.waiters.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(line) = self.carrier.line()
        {
            line.disarm();
        }
        result
    }

    /// Whoever leads the reactor polls it: here is only to look at what that brings.
    fn sleep(
        &self,
        waiter: &Arc<Waiter>,
        deadline: &Deadline,
        news: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        loop {
            let seen = waiter.wake_count();
            if !self.arm() {
                // Somebody else may sleep on what this arming undid.
                self.wake_others(waiter);
                if news() {
                    return Ok(());
                }
                continue;
            }
            if news() {
                return Ok(());
            }
            let limit = deadline.left();
            if limit.is_some_and(|(_, left)| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            // Long before the deadline a nap of the background thread ends the sleep, and no timer
            // has to be set and taken back for each.
            let limit = limit.filter(|(_, left)| *left < 3 * RECHECK_INTERVAL);
            self.reactor.sleep(waiter, seen, limit, None);
            if news() {
                return Ok(());
            }
        }
    }

    /// Says "asleep" on the signal line. `false`: there was a signal meanwhile; look again.
    fn arm(&self) -> bool {
        // In guest memory every signal is an event record, armed or not.
        let Some(line) = self.carrier.line() else { return true };
        line.take();
        if line.arm() {
            return true;
        }
        line.disarm();
        line.take();
        false
    }

    fn wake_others(&self, but: &Arc<Waiter>) {
        let others: Vec<_> =
            lock(&self.sleepers).iter().filter(|w| !Arc::ptr_eq(w, but)).cloned().collect();
        for other in others {
            self.reactor.wake(&other);
        }
        let poller = lock(&self.poller).clone();
        if let Some(poller) = poller {
            self.reactor.wake(&poller);
        }
    }

    /// Wakes everybody who waits for this connection.
    fn wake_all(&self) {
        if self.waiters.load(Ordering::SeqCst) == 0 {
            return;
        }
        self.wake_sleepers();
        let poller = lock(&self.poller).clone();
        if let Some(poller) = poller {
            self.reactor.wake(&poller);
        }
    }

    /// Wakes the threads that sleep for this connection; how many.
    fn wake_sleepers(&self) -> usize {
        let (first, others) = {
            let sleepers = lock(&self.sleepers);
            let Some((first, others)) = sleepers.split_first() else { return 0 };
            // Mostly it is the only one: no allocation for it.
            (first.clone(), others.to_vec())
        };
        self.reactor.wake(&first);
        for waiter in &others {
            self.reactor.wake(waiter);
        }
        1 + others.len()
    }
}

impl ConnectionHandler for Conn {
    fn on_wake(&self) {
        self.wake_all();
        self.sync_readiness();
        // Who sleeps may be a writer, to whom the peer's questions are nothing.
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
        // Both are asked. A peer may signal and say nothing new; then the line is to be armed again.
        // And where two connections share a line, the other one may have armed it since.
        !same || !self.carrier.line().is_some_and(|line| line.is_quiet())
    }

    fn on_arrival(&self) {
        // Not here: the application may be in a call, and hold the locks for as long as that takes.
        if self.is_asked() {
            self.schedule_update();
        }
    }

    fn on_delayed_update(&self, read_before: Option<u64>) -> DelayedUpdate {
        self.flush_update(read_before)
    }

    fn on_tick(&self) {
        self.answer_flags();
        self.check_keepalive();
        // While the descriptor shows readable and writable the line is not armed, to spare the peer
        // a kick per message; a half close or the end must show all the same.
        self.sync_readiness();
    }

    fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::SeqCst) != 0
    }

    fn on_recheck(&self) {
        // What a peer can write is never the only reason to wake.
        if self.wake_sleepers() > 0 {
            self.check_tcp();
        }
        self.carrier.probe_peer();
    }

    fn on_lost(&self) {
        self.lost();
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
        self.release_peer_buffer();
        if *self.reuse.get_mut() {
            let rx = self.rx.get_mut().unwrap_or_else(PoisonError::into_inner);
            self.carrier.allow_reuse(rx.total);
        }
    }
}
