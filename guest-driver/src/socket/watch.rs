// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `Watch`: waiting for any of several connections and one more descriptor, for callers with an event
//! loop of their own, to avoid a system call per event.
//!
//! Every such wait has the same order. The thread reads the state of the connections and keeps their
//! tokens, arms each connection, compares the tokens again, and sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::SmcStream;
use crate::byte_queue::ByteQueue;
use crate::conn::{self, Conn, LocalEnd};
use crate::reactor::Reactor;
use crate::reactor::poll_queue::{PollEntry, PollQueue};
use crate::reactor::readiness_fd::ReadinessFd;
use crate::reactor::spin::Spin;
use crate::reactor::wait::{
    RECHECK_INTERVAL, Waiter, WaiterNotifier, clear_interrupted, set_mask, was_interrupted,
};
pub use ism_sys::SignalMask;
use ism_sys::interrupt::listening;
use ism_sys::{EventFd, lock};
use smc_core::stream::reader_view;
use smc_info::MovedCounts;

/// The possible operations on a connection right now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// A read would not block: bytes, end of data, or an error.
    pub readable: bool,
    /// A write would not block.
    pub writable: bool,
    /// The peer sends no more.
    pub read_closed: bool,
    /// Nothing goes either way any more.
    pub hang_up: bool,
    /// The connection ended abnormally.
    pub failed: bool,
    /// Urgent data is announced or there.
    pub urgent: bool,
}

/// The cause of a sleep's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// A connection or the extra descriptor may have changed.
    Changed,
    /// A signal was handled.
    Interrupted,
}

/// A connection at some moment: its control words, and state not shown by them; see
/// [`SmcStream::change_token`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeToken {
    words: [u64; 2],
    /// A killed peer sends nothing, so its end is no change of a word.
    end: LocalEnd,
}

impl ChangeToken {
    /// Whether a reader has no more to do than at `earlier`: only the peer's reading has moved.
    pub fn same_for_reader(self, earlier: ChangeToken) -> bool {
        reader_view(self.words) == reader_view(earlier.words)
            && self.end.same_for_reader(earlier.end)
    }
}

/// A sleeper to be woken by connections. Belongs to one waiting thread at a time.
#[derive(Debug)]
pub struct Watch {
    waiter: Arc<Waiter>,
    watched: Arc<WatchedStreams>,
    spin: Spin,
}

/// The state shared by a watch and its streams.
struct WatchedStreams {
    queue: Arc<PollQueue>,
    /// The reactors of the streams, each with its number of streams.
    reactors: Mutex<Vec<(Arc<Reactor<Conn>>, usize)>>,
}

impl std::fmt::Debug for WatchedStreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedStreams").field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// A connection watched by a [`Watch`] under a number.
pub struct WatchedStream {
    conn: Arc<Conn>,
    entry: Arc<PollEntry>,
    is_announced: bool,
    watched: Arc<WatchedStreams>,
}

/// The lines armed by [`Watch::arm_lines`].
pub struct ArmedLines {
    reactors: Vec<Arc<Reactor<Conn>>>,
    is_quiet: bool,
}

impl ArmedLines {
    /// Whether nothing came before. Otherwise the caller must not sleep.
    pub fn is_quiet(&self) -> bool {
        self.is_quiet
    }
}

impl Drop for ArmedLines {
    fn drop(&mut self) {
        self.reactors.iter().for_each(|reactor| reactor.disarm_lines());
    }
}

impl std::fmt::Debug for ArmedLines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArmedLines").field("is_quiet", &self.is_quiet).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for WatchedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedStream").field("entry", &self.entry).finish_non_exhaustive()
    }
}

impl WatchedStream {
    /// Whether [`Watch::take_changes`] reports every change. Otherwise the caller arms the connection
    /// before a sleep, and compares [`SmcStream::change_token`].
    pub fn is_announced(&self) -> bool {
        self.is_announced
    }

    /// The caller checks the connection after this.
    pub fn begin(&self) {
        self.entry.begin();
    }
}

#[cfg(feature = "tokio")]
impl WatchedStream {
    /// The connection.
    pub(super) fn conn(&self) -> &Arc<Conn> {
        &self.conn
    }
}

impl Drop for WatchedStream {
    fn drop(&mut self) {
        self.conn.remove_poller(&self.entry);
        let mut reactors = lock(&self.watched.reactors);
        for (reactor, count) in reactors.iter_mut() {
            *count -= usize::from(Arc::ptr_eq(reactor, self.conn.reactor()));
        }
        reactors.retain(|(reactor, count)| {
            if *count == 0 {
                reactor.remove_poller();
            }
            *count > 0
        });
    }
}

impl Watch {
    /// A sleeper that spins for at most `spin` before it sleeps.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(spin: Duration) -> io::Result<Watch> {
        let watch = Watch::without_notifier(spin);
        watch.make_notifier()?;
        Ok(watch)
    }

    /// A watch without a descriptor, for [`Watch::sleep_on_lines`] only, until
    /// [`Watch::make_notifier`] has made one.
    pub fn without_notifier(spin: Duration) -> Watch {
        let waiter = Arc::new(Waiter::default());
        let queue = PollQueue::new(waiter.clone());
        let watched = Arc::new(WatchedStreams { queue, reactors: Mutex::default() });
        Watch { waiter, watched, spin: Spin::new(spin) }
    }

    /// Makes the notifier, unless there is one.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn make_notifier(&self) -> io::Result<()> {
        self.waiter.make_notifier()
    }

    /// Watches a connection until the result is dropped, under a number of the caller's. The caller
    /// checks the connection once after this. `None`: the connection is TCP.
    pub fn add(&self, stream: &SmcStream, number: u32) -> Option<WatchedStream> {
        let conn = stream.conn()?.clone();
        let entry = PollEntry::new(&self.watched.queue, number);
        let is_announced = conn.add_poller(&entry);
        let mut reactors = lock(&self.watched.reactors);
        match reactors.iter_mut().find(|(known, _)| Arc::ptr_eq(known, conn.reactor())) {
            Some((_, count)) => *count += 1,
            None => {
                conn.reactor().add_poller();
                reactors.push((conn.reactor().clone(), 1));
            }
        }
        drop(reactors);
        Some(WatchedStream { conn, entry, is_announced, watched: self.watched.clone() })
    }

    /// Whether [`Watch::take_changes`] has numbers, after a check of shared memory.
    pub fn has_changes(&self) -> bool {
        self.for_reactors(|reactor| {
            reactor.poll();
            reactor.poll_lines();
        });
        self.watched.queue.has_changes()
    }

    /// Whether [`Watch::take_changes`] has numbers.
    #[cfg(feature = "tokio")]
    pub(super) fn has_queued(&self) -> bool {
        self.watched.queue.has_changes()
    }

    /// From now on a wake-up makes the notifier readable, for a caller waiting by other means than
    /// [`Watch::sleep`]. `false`: there was a wake-up after `count`, so the caller must not wait.
    /// [`Watch::end_sleep`] follows in any case.
    #[cfg(feature = "tokio")]
    pub(super) fn begin_sleep(&self, count: u32) -> bool {
        self.waiter.set_polling(true);
        !self.waiter.is_woken(count)
    }

    /// Undoes one [`Watch::begin_sleep`].
    #[cfg(feature = "tokio")]
    pub(super) fn end_sleep(&self) {
        self.waiter.set_polling(false);
    }

    /// The numbers of connections that may have changed. The caller calls [`WatchedStream::begin`] for
    /// each before a check.
    pub fn take_changes(&self) -> Vec<u32> {
        self.watched.queue.take()
    }

    /// Whether a caller with `n` connections arms each of them before a sleep, and compares their
    /// states, instead of [`Watch::arm_lines`]: there are other watches, and `n` is small.
    pub fn arms_each(&self, n: usize) -> bool {
        let mut each = false;
        self.for_reactors(|reactor| each |= reactor.arms_each(n));
        each
    }

    /// Like [`SmcStream::arm`], for every connection whose changes [`Watch::take_changes`] reports, until
    /// the result is dropped.
    pub fn arm_lines(&self) -> ArmedLines {
        // The present reactors: a stream removed meanwhile moves the others in the list.
        let reactors: Vec<_> =
            lock(&self.watched.reactors).iter().map(|(one, _)| one.clone()).collect();
        let mut is_quiet = true;
        // Every reactor is armed, because the drop disarms every one.
        reactors.iter().for_each(|reactor| is_quiet &= reactor.arm_lines());
        ArmedLines { reactors, is_quiet }
    }

    /// Handles the events of devices, unless another thread does, and news of idle peers. A caller that
    /// does not sleep calls this every 200 us or so. Costs a system call.
    pub fn poll_idle_peers(&self) {
        self.for_reactors(|reactor| reactor.poll_idle_groups());
    }

    /// Checks peers again, in case a wake-up was missed. Once a second is often enough.
    pub fn recheck_lines(&self) {
        self.for_reactors(|reactor| reactor.recheck_lines());
    }

    fn for_reactors(&self, mut f: impl FnMut(&Arc<Reactor<Conn>>)) {
        // Not under the lock: an event may be the end of a watched connection.
        let mut at = 0;
        loop {
            let reactor = lock(&self.watched.reactors).get(at).map(|(one, _)| one.clone());
            let Some(reactor) = reactor else { return };
            f(&reactor);
            at += 1;
        }
    }

    /// Spins until `changed` returns `true`, for as long as worthwhile. `false`: nothing changed.
    pub fn spin_until(&self, changed: impl FnMut() -> bool) -> bool {
        self.spin.until(changed)
    }

    /// Records the duration of a wait with a sleep. The spinning of later waits depends on it.
    pub fn slept(&self, wait: Duration) {
        self.spin.note_sleep(wait);
    }

    /// An eventfd, readable when a connection wakes the sleeper. The descriptor given to
    /// [`Watch::sleep`] must be an epoll set with this eventfd.
    pub fn notifier(&self) -> BorrowedFd<'_> {
        self.eventfd().as_fd()
    }

    fn eventfd(&self) -> &EventFd {
        // The caller has made a notifier.
        self.waiter.notifier().unwrap_or_else(|| std::process::abort())
    }

    /// Makes the notifier unreadable again.
    pub fn clear_notifier(&self) {
        if let Some(notifier) = self.waiter.notifier() {
            notifier.clear();
        }
    }

    /// Number of wake-ups so far. The caller reads the number before the state of the connections.
    pub fn count(&self) -> u32 {
        self.waiter.wake_count()
    }

    /// Wakes the sleeper.
    pub fn wake(&self) {
        self.waiter.wake();
    }

    /// Sleeps until one of these watched connections changes, or for `timeout` (a second at most),
    /// where their peers can wake the thread without the device. `None`: one of them cannot, and there
    /// was no sleep; the caller arms them and calls [`Watch::sleep`]. `changed` checks them once more.
    pub fn sleep_on_lines(
        &self,
        streams: &[&SmcStream],
        count: u32,
        timeout: Duration,
        changed: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        let conns: Vec<_> = streams.iter().filter_map(|stream| stream.conn()).collect();
        clear_interrupted();
        let (me, timeout) = ((&self.waiter, count), timeout.min(RECHECK_INTERVAL));
        let slept = listening(|| conn::sleep_on_lines(&conns, me, timeout, changed));
        let woken = if was_interrupted() { Woken::Interrupted } else { Woken::Changed };
        slept.then_some(woken)
    }

    /// [`Watch::sleep`] with another signal mask during the sleep, as in `ppoll`.
    pub fn sleep_with_mask(
        &self,
        mask: Option<SignalMask>,
        any: Option<&SmcStream>,
        count: u32,
        timeout: Duration,
        extra: BorrowedFd<'_>,
    ) -> Woken {
        set_mask(mask);
        let woken = self.sleep(any, count, timeout, extra);
        set_mask(None);
        woken
    }

    /// Like [`Watch::sleep_with_mask`], until one of `others` has one of its events (in the bits of poll(2)).
    /// The call clears the notifier if the notifier has ended the sleep.
    pub fn sleep_beside(
        &self,
        mask: Option<SignalMask>,
        any: Option<&SmcStream>,
        count: u32,
        timeout: Duration,
        others: &[(BorrowedFd<'_>, i16)],
    ) -> Woken {
        set_mask(mask);
        let woken =
            self.sleep_until(any, count, timeout, WaiterNotifier::List(self.eventfd(), others));
        set_mask(None);
        woken
    }

    /// Sleeps until a connection wakes this watch after `count`, until `extra` is readable, or for
    /// `timeout` (a second at most). `any` is one of the watched connections, if there are any.
    pub fn sleep(
        &self,
        any: Option<&SmcStream>,
        count: u32,
        timeout: Duration,
        extra: BorrowedFd<'_>,
    ) -> Woken {
        self.sleep_until(any, count, timeout, WaiterNotifier::Set(extra))
    }

    fn sleep_until(
        &self,
        any: Option<&SmcStream>,
        count: u32,
        timeout: Duration,
        ends: WaiterNotifier<'_>,
    ) -> Woken {
        clear_interrupted();
        let timeout = timeout.min(RECHECK_INTERVAL);
        listening(|| match any.and_then(SmcStream::conn) {
            Some(conn) => {
                let limit = Some((Instant::now(), timeout));
                Reactor::sleep(conn.reactor(), &self.waiter, count, limit, Some(ends));
            }
            None => self.waiter.sleep_on(ends, count, Some(timeout)),
        });
        if was_interrupted() { Woken::Interrupted } else { Woken::Changed }
    }
}

impl SmcStream {
    /// The possible operations on the connection right now. With `urgent` this includes urgent data.
    /// For TCP: the default.
    pub fn readiness(&self, urgent: bool) -> Readiness {
        let Some(conn) = self.conn() else { return Readiness::default() };
        conn.reactor().poll();
        let ready = conn.ready();
        Readiness {
            readable: ready.readable,
            writable: ready.writable,
            read_closed: ready.read_closed,
            hang_up: ready.hang_up,
            failed: conn.has_error(),
            urgent: urgent && conn.has_urgent().unwrap_or(false),
        }
    }

    /// The state of the connection, for [`SmcStream::changed_since`]. Costs four loads.
    pub fn change_token(&self) -> ChangeToken {
        let Some(conn) = self.conn() else { return ChangeToken::default() };
        ChangeToken { words: conn.control_words(), end: conn.local_end() }
    }

    /// Whether [`SmcStream::readiness`] may differ from the state at `earlier`.
    pub fn changed_since(&self, earlier: ChangeToken) -> bool {
        self.conn().is_some_and(|conn| {
            conn.reactor().poll();
            conn.control_words() != earlier.words || conn.local_end() != earlier.end
        })
    }

    /// Waits until a read (with `write`: or a write) may do something impossible at `earlier`. Spins
    /// first.
    ///
    /// # Errors
    /// `WouldBlock` at the deadline; `Interrupted`: a signal was handled.
    pub fn wait_for_change(
        &self,
        earlier: ChangeToken,
        write: bool,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        match self.conn() {
            Some(conn) => conn.wait_for_change(earlier.words, write, deadline),
            None => Ok(()),
        }
    }

    /// Like [`SmcStream::pollable`]. For SMC the descriptor shows at once that a read has taken the
    /// last bytes, and a hang-up only when both ends have closed. Each such read costs a system call.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn pollable_exact(&self) -> io::Result<BorrowedFd<'_>> {
        match self.conn() {
            Some(conn) => conn.pollable_exact(),
            None => self.pollable(),
        }
    }

    /// Number of connections of this process with a readiness descriptor, of two numbers each.
    #[doc(hidden)]
    pub fn with_readiness_descriptors() -> usize {
        ReadinessFd::count()
    }

    /// Whether the peer has ended its direction, also if the connection was reset afterwards (SMC only;
    /// `None` for TCP).
    pub fn peer_has_ended(&self) -> Option<bool> {
        self.conn().map(|conn| conn.peer_has_ended())
    }

    /// Bytes written by the program and not on their way to the peer, as SIOCOUTQNSD returns. For TCP:
    /// 0.
    pub fn queued(&self) -> usize {
        self.conn().map_or(0, |conn| conn.queued())
    }

    /// Counts and times of the connection's bytes (SMC only; `None` for TCP, as TCP_INFO has them). The
    /// first call in a process has every connection store the times of its messages, at a cost of 7 ns
    /// for each.
    pub fn moved_counts(&self) -> Option<MovedCounts> {
        self.conn().map(|conn| conn.moved_counts())
    }

    /// Bytes written by the program and not received by the peer, as SIOCOUTQ returns, and the unsent
    /// bytes among them (SIOCOUTQNSD). For TCP: 0.
    pub fn outstanding(&self) -> [usize; 2] {
        self.conn().map_or([0; 2], |conn| conn.outstanding())
    }

    /// Whether this many bytes can be read now, as SO_RCVLOWAT asks, or enough for the peer to wait for
    /// a read. For TCP: `false`.
    ///
    /// # Errors
    /// The connection ended abnormally.
    pub fn has_readable(&self, bytes: usize) -> io::Result<bool> {
        self.conn().map_or(Ok(false), |conn| conn.has_readable(bytes))
    }

    /// SO_LINGER of the program, if the TCP socket has another value for now: the connection has left
    /// its device, and bytes are unread. For TCP: `None`.
    pub fn programs_linger(&self) -> Option<Option<Duration>> {
        self.conn()?.programs_linger()
    }

    /// Bounds unsent bytes written by the program, as TCP_NOTSENT_LOWAT does; 0: no bound. Does nothing
    /// for TCP.
    pub fn set_unsent_limit(&self, bytes: usize) {
        if let Some(conn) = self.conn() {
            let limit = if bytes == 0 { usize::MAX } else { bytes };
            conn.limit_queue(|queue| queue.unsent_limit = limit);
        }
    }

    /// Bounds the time without a read of the peer while a write finds no room, as TCP_USER_TIMEOUT does,
    /// in milliseconds; 0: no bound. Later the connection fails with `TimedOut`. Does nothing for TCP.
    pub fn set_user_timeout(&self, milliseconds: u32) {
        if let Some(conn) = self.conn() {
            let limit = Duration::from_millis(milliseconds.into());
            conn.limit_queue(|queue| {
                queue.user_timeout = Some(limit).filter(|limit| !limit.is_zero())
            });
        }
    }

    /// Bounds bytes written by the program before the peer reads, as SO_SNDBUF does. `bytes` is the
    /// option's value on the socket: twice the value set by the program. Does nothing for TCP.
    pub fn set_send_buffer(&self, bytes: usize) {
        if let Some(conn) = self.conn() {
            conn.set_send_buffer(bytes);
        }
    }
}

#[doc(hidden)]
impl SmcStream {
    /// From now on a change of the connection wakes the watch while the connection is armed.
    pub fn watch(&self, watch: &Watch) {
        if let Some(conn) = self.conn() {
            conn.add_sleeper(&watch.waiter);
        }
    }

    /// Undoes [`SmcStream::watch`].
    pub fn unwatch(&self, watch: &Watch) {
        if let Some(conn) = self.conn() {
            conn.remove_sleeper(&watch.waiter);
        }
    }

    /// Asks the peer to wake this end's watches at its next change. `false`: the connection has changed
    /// already, so the caller must not sleep.
    pub fn arm(&self) -> bool {
        self.conn().is_none_or(|conn| conn.arm_for_poller())
    }

    /// Undoes [`SmcStream::arm`], and spares the peer a wake-up.
    pub fn disarm(&self) {
        if let Some(conn) = self.conn() {
            conn.disarm_for_poller();
        }
    }

    /// Handles the events of the device, unless another thread does. A caller that never sleeps calls
    /// this now and then to keep events from piling up. Costs a reading of the clock.
    pub fn poll_events(&self) {
        if let Some(conn) = self.conn() {
            conn.reactor().try_poll();
        }
    }

    /// Whether send queues of connections of this process have bytes, lost if the process ends, or
    /// bytes sent by TCP may be lost by a later record for this end: of connections inheritable by the
    /// child of a fork, and of others. [`Stack::check_closed`](super::Stack::check_closed) checks the
    /// connections again.
    pub fn any_has_unsent_bytes() -> [bool; 2] {
        conn::has_unsent_bytes()
    }

    /// Puts bytes written earlier by the program into the peer's buffer, and the rest into the send
    /// queue. Does nothing for TCP.
    pub fn send_queue(&self, bytes: ByteQueue) {
        if let Some(conn) = self.conn() {
            conn.send_queue(bytes);
        }
    }

    /// Bytes a write takes now without waiting, as far as this end knows. `usize::MAX` if TCP carries
    /// the connection.
    pub fn room(&self) -> usize {
        self.conn().map_or(usize::MAX, |conn| conn.room())
    }

    /// After a non-waiting write without room: checks for a moment, at most 50 us, for reads of the
    /// peer. `true`: another try may find room.
    pub fn look_for_room(&self) -> bool {
        self.conn().is_some_and(|conn| conn.look_for_room())
    }

    /// Called by the child of a fork: the bytes in send queues are its parent's.
    pub fn forget_unsent_bytes() {
        conn::forget_unsent_bytes();
    }

    /// Like [`SmcStream::shutdown`] of both halves, but as on TCP: unread bytes do not reset the
    /// connection, and can still be read.
    ///
    /// # Errors
    /// As [`SmcStream::shutdown`].
    pub fn shutdown_both(&self) -> io::Result<()> {
        match self.conn() {
            Some(conn) => conn.shutdown_both(),
            None => self.shutdown(std::net::Shutdown::Both),
        }
    }

    /// Resets the connection and lets go of its TCP socket, where the program has a descriptor of its
    /// own. TCP itself is left unchanged. Does nothing for a connection carried by TCP.
    pub fn abandon(&self) {
        if let Some(conn) = self.conn() {
            conn.abandon();
        }
    }

    /// From now on the connection uses its TCP socket by this number of the caller's, and has no
    /// descriptor of its own. Before the number is closed, the caller lends another one or calls
    /// [`SmcStream::own_tcp`]. Does nothing for a connection carried by TCP, nor for another file's
    /// number.
    pub fn lend_tcp(&self, fd: RawFd) {
        if let Some(conn) = self.conn() {
            conn.lend_tcp(fd);
        }
    }

    /// The number lent by [`SmcStream::lend_tcp`].
    pub fn lent_number(&self) -> Option<RawFd> {
        self.conn()?.lent_number()
    }

    /// From now on the connection uses this descriptor of its TCP socket. `None`: TCP ends for the
    /// connection, while SMC continues to carry it.
    pub fn own_tcp(&self, copy: Option<OwnedFd>) {
        if let Some(conn) = self.conn() {
            conn.own_tcp(copy);
        }
    }

    /// Whether a close of the connection may need its TCP socket.
    pub fn close_needs_tcp(&self) -> bool {
        self.conn().is_some_and(|conn| self.has_linger() || conn.close_needs_tcp())
    }

    /// Checks whether the TCP connection underneath was reset. Once a second is often enough.
    pub fn check_tcp(&self) {
        if let Some(conn) = self.conn() {
            conn.check_tcp();
        }
    }
}
