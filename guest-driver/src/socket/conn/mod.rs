//! One SMC-D connection: two locks, two rings, and the control words that tie them together.
//!
//! The send side and the receive side are apart, each under its own lock, so that one thread can
//! write while another reads. Lock order: receive side, then send side. All stores into the peer's
//! control block happen under the lock of the send side. What one side must know of the other is in
//! atomics: the consumer cursor that every control word carries, and how the connection fares.
//!
//! The words in the own DMB are the truth about the peer, and they are a claim: they are copied
//! out and judged by `smc_core::connection`, and a claim that cannot be true aborts this connection.

mod end;
mod ready;
mod recv;
mod send;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use smc_core::connection::{Close, Event, Receiver, Ring, SMCD_CONTROL_LEN, Sender};
use smc_core::wire::cdc::{ConsumerWord, StateFlags};
use virtio_ism_abi::{Gid, Token};

use super::hub::{Hub, Member};
use super::readiness::Readiness;
use super::wait::{NAP, Spin, Waiter};
use crate::adapter::{Link, OwnBuffer, Peer, PeerBuffer};
use crate::socket::SmcDFacts;

/// Bytes that are copied before the peer is told: large enough to be cheap, small enough that the
/// peer reads one piece while the next is written.
const CHUNK: u32 = 64 << 10;

/// What a blocked or failed call ends with.
const FINE: u8 = 0;
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
}

/// The receive side.
pub(super) struct Rx {
    receiver: Receiver,
    /// Both words of the own control block as last looked at.
    seen: [u64; 2],
    /// Bytes received since the start.
    total: u64,
}

/// One SMC-D connection.
pub(crate) struct Conn {
    // Dropped last to first: the buffer goes back to its pool when nothing refers to it any more.
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
    /// `shutdown(read)`: reads return end of data once the ring is empty. Outside the lock of the
    /// receive side, because a sleeping reader has to see it.
    read_shut: AtomicBool,
    /// This side writes no more; for sleeping writers.
    write_shut: AtomicBool,
    /// A write found no room and the application has not been told of room since.
    write_blocked: AtomicBool,
    /// Sleeping threads, and others that wait for a wake-up (pollable, poller).
    awaited: AtomicU32,
    sleepers: Mutex<Vec<Arc<Waiter>>>,
    readiness: OnceLock<Readiness>,
    /// The poller that watches this connection.
    poller: Mutex<Option<Arc<Waiter>>>,
    spin: Spin,
    hub: Arc<Hub>,
    tcp: Mutex<Option<TcpStream>>,
    /// Local and peer address, kept when TCP goes before the application does.
    addresses: OnceLock<(SocketAddr, SocketAddr)>,
    /// Nobody will ask for the addresses any more.
    unaddressed: AtomicBool,
    theirs: Arc<PeerBuffer>,
    /// The peer's DMB is not ours any more: another connection may have it.
    let_go: AtomicBool,
    peer: Arc<Peer>,
    facts: SmcDFacts,
    close_timeout: Duration,
    reuse: AtomicBool,
    own: OwnBuffer,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The two words as one comparable claim for readers: everything but the consumer cursor.
fn reader_view([producer, consumer]: [u64; 2]) -> [u64; 2] {
    let flags = ConsumerWord::from_u64(consumer);
    let flags = ConsumerWord { cursor: Default::default(), ..flags };
    [producer, flags.to_u64()]
}

impl Conn {
    /// Makes a connection of what a handshake brought, and registers it with the hub.
    pub(crate) fn new(
        link: Link,
        tcp: TcpStream,
        hub: Arc<Hub>,
        spin: &Arc<Spin>,
        close_timeout: Duration,
    ) -> io::Result<Arc<Conn>> {
        let Link { fabric, peer, own, theirs, established } = link;
        let ring = |len: u32| Ring::smcd(len).map_err(|e| io::Error::other(e.to_string()));
        let facts = SmcDFacts {
            chid: fabric.chid(),
            local_gid: fabric.device().gid(),
            peer_gid: peer.gid(),
            eid: established.eid.to_string().trim_end().to_owned(),
            release: established.terms.release.code(),
            first_contact: established.first_contact,
            local_buffer: own.dmb().len(),
            peer_buffer: theirs.dmb().len(),
            window: theirs.dmb().is_window(),
            peer_host: established.peer_host.and_then(|h| h.hostname.text().map(str::to_owned)),
        };
        let mut close = Close::new();
        close.on(Event::Established);
        let tx = Tx {
            sender: Sender::new(ring(theirs.dmb().len())?),
            close,
            published: StateFlags::empty(),
            producer: 0,
            seen: 0,
            timer: None,
        };
        let rx = Rx { receiver: Receiver::new(ring(own.dmb().len())?), seen: [0; 2], total: 0 };
        let (idx, slab) = (own.dmb().idx(), own.dmb().slab_id());
        let conn = Arc::new(Conn {
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            consumed: AtomicU64::new(0),
            announced: AtomicU64::new(0),
            peer_done: AtomicBool::new(false),
            failure: AtomicU8::new(FINE),
            purged: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            read_shut: AtomicBool::new(false),
            write_shut: AtomicBool::new(false),
            write_blocked: AtomicBool::new(false),
            awaited: AtomicU32::new(0),
            sleepers: Mutex::default(),
            readiness: OnceLock::new(),
            poller: Mutex::new(None),
            spin: Spin::of(spin),
            hub: hub.clone(),
            tcp: Mutex::new(Some(tcp)),
            addresses: OnceLock::new(),
            unaddressed: AtomicBool::new(false),
            theirs,
            let_go: AtomicBool::new(false),
            peer,
            facts,
            close_timeout,
            reuse: AtomicBool::new(false),
            own,
        });
        let member: Arc<dyn Member> = conn.clone();
        hub.join(idx, slab, Arc::downgrade(&member));
        Ok(conn)
    }

    /// What was negotiated.
    pub(crate) fn facts(&self) -> &SmcDFacts {
        &self.facts
    }

    /// Where its device's threads meet.
    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
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
    pub(crate) fn leave_addresses(&self) {
        self.unaddressed.store(true, Ordering::Relaxed);
    }

    /// Takes the TCP connection away.
    fn take_tcp(&self) -> Option<TcpStream> {
        if !self.unaddressed.load(Ordering::Relaxed)
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

    fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// This connection writes no more, except for the very word that says so.
    fn let_go_of_theirs(&self) {
        if !self.let_go.swap(true, Ordering::Relaxed) {
            self.theirs.release();
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
        self.own.dmb().words()
    }

    #[inline]
    fn has_failed(&self) -> bool {
        self.failure.load(Ordering::Acquire) != FINE
    }

    /// The error of a call on a connection that ended abnormally.
    fn check(&self) -> io::Result<()> {
        match self.failure.load(Ordering::Acquire) {
            FINE => Ok(()),
            RESET => Err(io::ErrorKind::ConnectionReset.into()),
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// Takes note that the application was told how the connection fares.
    fn told<T>(&self, result: io::Result<T>) -> io::Result<T> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset};
        if matches!(&result, Err(e) if matches!(e.kind(), ConnectionReset | ConnectionAborted)) {
            self.reported.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The pending error, once (SO_ERROR).
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        // Looks at what the peer says, which nobody may have done since.
        self.ready();
        let error = self.check().err()?;
        (!self.reported.swap(true, Ordering::Relaxed)).then_some(error)
    }

    /// Waits until `changed`, or fails with `TimedOut`'s cousin `WouldBlock` at the deadline, as a
    /// socket with a timeout does. Called without locks.
    fn wait(&self, deadline: Option<Instant>, mut changed: impl FnMut() -> bool) -> io::Result<()> {
        let mut news = || changed() || self.has_failed();
        if self.spin.until(&mut news) {
            return Ok(());
        }
        let start = Instant::now();
        let waiter = Waiter::current();
        lock(&self.sleepers).push(waiter.clone());
        self.awaited.fetch_add(1, Ordering::SeqCst);
        let result = self.sleep(&waiter, deadline, &mut news);
        if result.is_ok() {
            self.spin.slept(start.elapsed());
        }
        let mut sleepers = lock(&self.sleepers);
        sleepers.retain(|other| !Arc::ptr_eq(other, &waiter));
        // The last one out takes its "asleep" back; until then a signal costs the peer a kick.
        if self.awaited.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(line) = self.own.dmb().line()
        {
            line.disarm();
        }
        result
    }

    fn sleep(
        &self,
        waiter: &Arc<Waiter>,
        deadline: Option<Instant>,
        news: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        loop {
            let seen = waiter.seen();
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
            let now = Instant::now();
            let left = deadline.map_or(NAP, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let nap = left.min(NAP);
            self.hub.sleep(waiter, seen, nap, None);
            if news() {
                return Ok(());
            }
            if now.elapsed() >= NAP {
                self.look_at_tcp();
            }
        }
    }

    /// Says "asleep" on the signal line. `false`: there was a signal meanwhile; look again.
    fn arm(&self) -> bool {
        // In guest memory every signal is an event record, armed or not.
        let Some(line) = self.own.dmb().line() else { return true };
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
            self.hub.wake(&other);
        }
        let poller = lock(&self.poller).clone();
        if let Some(poller) = poller {
            self.hub.wake(&poller);
        }
    }

    /// Wakes everybody who waits for this connection.
    fn wake_all(&self) {
        if self.awaited.load(Ordering::SeqCst) == 0 {
            return;
        }
        let sleepers: Vec<_> = lock(&self.sleepers).clone();
        for waiter in sleepers {
            self.hub.wake(&waiter);
        }
        let poller = lock(&self.poller).clone();
        if let Some(poller) = poller {
            self.hub.wake(&poller);
        }
    }
}

impl Member for Conn {
    fn on_wake(&self) {
        self.wake_all();
        self.settle();
    }

    fn on_glance(&self) {
        self.answer_flags();
        // While the descriptor shows readable and writable the line is not armed, to spare the peer
        // a kick per message; a half close or the end must show all the same.
        self.settle();
    }

    fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::SeqCst) != 0
    }

    fn peer_gid(&self) -> Gid {
        self.peer.gid()
    }

    fn peer_token(&self) -> Token {
        self.theirs.dmb().token()
    }

    fn on_lost(&self) {
        self.lost();
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.hub.leave(self.own.dmb().idx());
        if self.readiness.get().is_some() {
            self.hub.remove_pollable();
        }
        self.let_go_of_theirs();
        if *self.reuse.get_mut() {
            let rx = self.rx.get_mut().unwrap_or_else(PoisonError::into_inner);
            // The control block, and what came behind it.
            let dirty = rx.total.saturating_add(u64::from(SMCD_CONTROL_LEN));
            self.own.allow_reuse(usize::try_from(dirty).unwrap_or(usize::MAX));
        }
    }
}
