// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smc_core::connection::close::ABORT_TIMEOUT_US;
use smc_core::connection::{Actions, Event, State};
use smc_core::wire::cdc::{ConsumerWord, StateFlags};

use super::carrier::Carrier;
use super::send_queue::UNSENT;
use super::{Conn, Deadline, Failure, Tx};
use crate::capture;
use crate::reactor::ConnectionHandler;
use crate::reactor::wait::{clear_interrupted, was_interrupted};
use ism_sys::interrupt::listening;
use ism_sys::{has_fin, poll_readable, reset_tcp};

impl Tx {
    /// The one place where an event meets unsent bytes: under the lock of the send side, after the last
    /// check of the peer's words. Another thread may send the bytes at any time.
    fn end(&mut self, event: Event) -> Actions {
        self.half.end(event, self.queue.has_unsent())
    }
}

impl Conn {
    /// `shutdown`, either half or both.
    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.check()?;
        match how {
            Shutdown::Read => self.shutdown_read(),
            Shutdown::Write => {
                if capture::is_on() {
                    self.capture_end();
                }
                self.end_direction(Event::ShutdownWrite);
            }
            // The same as a close (CLOSE-17), except that the handle stays.
            Shutdown::Both => {
                self.close(false);
                self.shutdown_read();
            }
        }
        Ok(())
    }

    /// `shutdown` of both halves as in TCP: received bytes can still be read.
    pub(crate) fn shutdown_both(&self) -> io::Result<()> {
        self.check()?;
        if capture::is_on() {
            self.capture_end();
        }
        self.end_direction(Event::Close { unread: false });
        self.shutdown_read();
        Ok(())
    }

    /// The application closes the connection. Unread data, or `abort`, resets the connection.
    pub(crate) fn close(&self, abort: bool) {
        if capture::is_on() {
            self.capture_end();
        }
        self.reactor.poll();
        if abort {
            return self.abort();
        }
        let mut rx = self.rx();
        // A failure has ended the connection already.
        let _ = self.refresh_rx(&mut rx);
        let has_unread = rx.half.receiver.available() > 0 || rx.kept.is_some();
        let unread = has_unread && !self.end.is_read_shut();
        let mut tx = self.tx();
        self.begin_end(&mut tx);
        if !unread {
            self.end_tcp_first(&tx);
        }
        self.step(&mut tx, Event::Close { unread });
        drop((tx, rx));
        self.sync_readiness();
    }

    /// The program ends its direction.
    fn end_direction(&self, event: Event) {
        let mut tx = self.tx();
        self.begin_end(&mut tx);
        self.step(&mut tx, event);
        drop(tx);
        self.sync_readiness();
    }

    /// Before the program ends its direction: takes the peer's words, and notes whether this end is the
    /// first of the two.
    fn begin_end(&self, tx: &mut Tx) {
        self.refresh_tx(tx);
        tx.half.note_first();
    }

    /// The application is about to close the connection. If this end was the first to end a direction,
    /// its TCP sends the first FIN: the other end can use its port again at once, as on TCP. Not while
    /// bytes may need TCP: the peer takes a FIN and the end of this process for the end of the data.
    fn end_tcp_first(&self, tx: &Tx) {
        if tx.half.ends_first()
            && self.arrives_without_tcp(tx)
            && !tx.half.records.closing
            && !tx.half.has_left()
            && !self.has_failed()
            && let Some(tcp) = &*self.tcp.stream()
        {
            let _ = rustix::net::shutdown(tcp, rustix::net::Shutdown::Write);
        }
    }

    /// Whether all written bytes arrive in the peer's ring, even if this process ends now. A connection
    /// able to outlive its device may have to repeat bytes on TCP, unless the ring is in memory of both
    /// processes: the memory of a restored machine is a copy.
    pub(super) fn arrives_without_tcp(&self, tx: &Tx) -> bool {
        !tx.carrier.keeps_copies()
            && !tx.queue.has_unsent()
            && (!self.may_outlive() || tx.carrier.futex_line().is_some())
    }

    /// Resets the connection, but not its TCP connection: the program continues with the TCP socket.
    pub(crate) fn abandon(&self) {
        self.tcp.discard_addresses();
        self.restore_linger(&mut self.tx());
        drop(self.tcp.take());
        self.abort();
    }

    /// Whether both ends have closed. This call takes the peer's words first, and carries out due
    /// steps; so the stack repeats the call for closed connections.
    pub(crate) fn is_over(&self) -> bool {
        self.reactor.poll();
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        if let Some(end) = tx.timer
            && Instant::now() >= end
        {
            if tx.queue.is_empty() {
                tx.timer = None;
                self.step(&mut tx, Event::Timeout);
            } else {
                // As in TCP, for as long as the peer lives.
                tx.timer = Some(Instant::now() + self.options.close_timeout);
            }
        }
        self.note_unfinished(&mut tx);
        tx.half.close.state() == State::Closed && !tx.half.records.closing
    }

    /// Whether the peer has announced the end of its direction, regardless of later events.
    pub(crate) fn peer_has_ended(&self) -> bool {
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        tx.half.close.peer_done()
    }

    /// State of the termination, for reports.
    pub(crate) fn state(&self) -> State {
        self.tx().half.close.state()
    }

    /// Checks the TCP connection for a reset or a late Decline. A FIN means nothing (CLOSE-44): TCP
    /// stays open and idle (OPT-17).
    pub(crate) fn check_tcp(&self) {
        if self.may_outlive() {
            return self.on_tcp();
        }
        let mut byte = [0u8; 1];
        let peeked = match &*self.tcp.stream() {
            Some(tcp) => peek(tcp, &mut byte),
            None => return,
        };
        match peeked {
            // Data goes over SMC now, so these bytes are a late Decline, or break the protocol.
            Ok(n) if n > 0 => self.abort(),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.on_tcp_reset(),
        }
    }

    /// TCP was reset, so the connection ends (CLOSE-33). A peer already closed, unknown to this end so
    /// far, resets TCP when its process ends, and nothing was lost.
    fn on_tcp_reset(&self) {
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        if !tx.half.close.peer_flags().contains(StateFlags::CLOSED) {
            self.cut(&mut tx);
        }
        drop(tx);
        self.sync_readiness();
    }

    /// The connection ends without a word of the peer. Received bytes can still be read, and behind
    /// them the end of data if the peer has ended its direction; else an error, as on TCP.
    pub(super) fn cut(&self, tx: &mut Tx) {
        if tx.half.close.peer_done() {
            self.end.fail(Failure::Ended);
        }
        self.step_and_keep(tx, Event::TcpReset);
    }

    /// Ends the connection at once: the peer broke the protocol, or the application wants it.
    pub(super) fn abort(&self) {
        self.on(Event::Abort);
    }

    pub(super) fn abort_locked(&self, tx: &mut Tx) {
        self.step(tx, Event::Abort);
    }

    /// Ends the connection if its carrier has failed without a later event.
    pub(super) fn check_carrier(&self) {
        let carrier = self.carrier();
        if carrier.has_failed() && !self.has_failed() && !self.tx().half.has_left() {
            carrier.ask_for_peer();
            self.lost(|now| std::ptr::eq(now, &**carrier));
        }
    }

    /// The peer, its buffer or the device of a carrier is gone. `is_lost` checks the loss of the
    /// connection's present carrier: the loss of a former ring may be reported after a return to
    /// another one.
    pub(super) fn lost(&self, is_lost: impl FnOnce(&Carrier) -> bool) {
        let mut tx = self.tx();
        if is_lost(&tx.carrier) {
            self.lost_locked(&mut tx);
            drop(tx);
            self.sync_readiness();
        }
    }

    /// The device reports the loss of the carrier with this key.
    pub(super) fn heard_of_loss(&self, key: u32) {
        {
            let mut tx = self.tx();
            // The device reports the buffers of a leaving peer ahead of the peer itself.
            if tx.carrier.key() == key && tx.carrier.may_hear_of_peer() {
                self.hold_writes(&mut tx);
                tx.carrier.fail();
                return;
            }
        }
        self.lost(|carrier| carrier.key() == key);
    }

    pub(super) fn lost_locked(&self, tx: &mut Tx) {
        if tx.half.has_left() {
            return self.note_ring_gone(tx);
        }
        self.hold_writes(tx);
        if !self.is_over_by_loss(tx) {
            match self.is_end_of_process(tx) {
                Some(true) => {
                    self.on_peer_flags(tx, StateFlags::CLOSED);
                    self.end.fail(Failure::Ended);
                }
                // The kernel may not have closed the process's sockets yet: the background thread
                // repeats the check by `check_carrier`, as long as there is a background thread.
                None if !self.reactor.is_lost()
                    && tx.lost.get_or_insert_with(Instant::now).elapsed() < FIN_TIME =>
                {
                    return self.schedule_update();
                }
                _ if self.leave(tx) => self.note_ring_gone(tx),
                _ => {
                    self.reset_tcp(tx);
                    self.cut(tx);
                    // No answer can come.
                    self.step(tx, Event::Timeout);
                    self.end.fail(Failure::Reset);
                }
            }
            self.note_end_of_leave(tx);
        }
        self.wake_all();
    }

    /// A connection that has ended before it had left its device holds the device no longer.
    fn note_end_of_leave(&self, tx: &Tx) {
        if self.may_outlive() && !self.must_leave(tx) {
            self.reactor.wake_background();
        }
    }

    /// Writes wait until the connection's next carrier is known.
    pub(super) fn hold_writes(&self, tx: &mut Tx) {
        if self.may_outlive() {
            tx.half.stop();
            self.end.leave_ring();
        }
    }

    /// The peer uses the buffer of the carrier with this key for another connection, so this connection
    /// is over. Unread bytes count for nothing (RMB-23), unless the peer had closed in order.
    pub(super) fn taken(&self, key: u32) {
        let mut tx = self.tx();
        if tx.carrier.key() != key {
            return;
        }
        if !self.is_over_by_loss(&mut tx) {
            self.reset_tcp(&mut tx);
            self.step(&mut tx, Event::TcpReset);
            self.step(&mut tx, Event::Timeout);
            self.end.fail(Failure::Reset);
        }
        drop(tx);
        self.wake_all();
        self.sync_readiness();
    }

    /// Nothing can be sent to the peer any more. `true`: the peer had said its last word, so nothing
    /// was lost.
    fn is_over_by_loss(&self, tx: &mut Tx) -> bool {
        self.carrier().fail();
        self.refresh_tx(tx);
        tx.half.close.state() == State::Closed
            || tx.half.close.peer_flags().contains(StateFlags::CLOSED)
    }

    /// Whether the peer's process has ended after reading every byte written here: the device of this
    /// end lives and has reported that the peer left, and the peer's kernel has closed its TCP
    /// connection by a FIN. TCP reports an end of data to the application then. An end with a lost
    /// device knows nothing of its peer. A living peer with a lost device sends an RST before its
    /// application learns of the loss. A peer lost with its machine sends nothing.
    ///
    /// `None`: neither FIN nor RST has come yet.
    fn is_end_of_process(&self, tx: &mut Tx) -> Option<bool> {
        let may_be = self.carrier().peer_has_left() && tx.half.sender.in_flight() == 0;
        if !may_be || !self.tcp_has_ended()? {
            return Some(false);
        }
        // The last words of the process: its last bytes, and its last read position.
        self.refresh_tx(tx);
        let has_read_all = tx.half.sender.in_flight() == 0 && !tx.queue.has_unsent();
        Some(has_read_all && !self.peer_has_unsent() && self.carrier().has_memory())
    }

    /// Whether the peer's last words show bytes in its send queue ([`UNSENT`]), taken for sent by its
    /// program.
    fn peer_has_unsent(&self) -> bool {
        ConsumerWord::from_u64(self.words()[1]).producer_flags.contains(UNSENT)
    }

    /// Whether the peer's TCP has sent a FIN, and no RST; `None`: neither. The device may report the
    /// end of a process a moment before the kernel has closed the process's sockets.
    fn tcp_has_ended(&self) -> Option<bool> {
        let tcp = self.tcp.stream();
        let Some(tcp) = &*tcp else { return Some(false) };
        let mut byte = [0u8; 1];
        loop {
            match peek(tcp, &mut byte) {
                // The kernel also returns 0 on a reset connection, once the error was taken.
                Ok(0) => {
                    return Some(has_fin(tcp));
                }
                Ok(_) => return Some(false),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !await_fin(tcp) {
                        return None;
                    }
                }
                Err(_) => return Some(false),
            }
        }
    }

    /// Breaks the TCP connection by RST: the peer must not take the end of this process for the end of
    /// its data. No call reports a failure before the RST, because the application may close the
    /// connection or exit then.
    pub(super) fn reset_tcp(&self, tx: &mut Tx) {
        self.restore_linger(tx);
        if let Some(tcp) = self.tcp.take() {
            reset_tcp(tcp);
        }
    }

    fn on(&self, event: Event) {
        let mut tx = self.tx();
        self.step(&mut tx, event);
        drop(tx);
        self.sync_readiness();
    }

    /// The peer's state flags have changed.
    pub(super) fn on_peer_flags(&self, tx: &mut Tx, flags: StateFlags) {
        // TCP delivers bytes from before a reset, and so does this end, although CLOSE-26 would allow
        // discarding them.
        self.step_and_keep(tx, Event::Peer { flags });
        if tx.half.close.peer_done() {
            self.end.end_of_peer();
        }
    }

    pub(super) fn step(&self, tx: &mut Tx, event: Event) {
        let actions = tx.end(event);
        self.carry_out(tx, actions);
    }

    /// Like [`Conn::step`], but received bytes can still be read.
    pub(super) fn step_and_keep(&self, tx: &mut Tx, event: Event) {
        let actions = tx.end(event);
        if actions.contains(Actions::PURGE) {
            self.discard_held(tx);
        }
        self.carry_out(tx, actions - Actions::PURGE);
    }

    fn carry_out(&self, tx: &mut Tx, actions: Actions) {
        if !tx.half.close.can_write() {
            self.end.shut_write();
        }
        if actions.intersects(Actions::SEND_CLOSED | Actions::CLOSE_TCP) {
            self.restore_linger(tx);
        }
        if actions.contains(Actions::RESET_TCP) {
            self.reset_tcp(tx);
        }
        for action in actions.each() {
            self.perform(tx, action);
        }
        if actions.contains(Actions::SEND_ABORT) {
            self.step(tx, Event::AbortDelivered);
        }
        let has_failed = actions.intersects(Actions::REPORT_RESET | Actions::REPORT_ABORTED);
        if has_failed || !tx.half.carrier().is_on_ring() {
            self.note_end_of_leave(tx);
        }
        self.note_unfinished(tx);
    }

    fn perform(&self, tx: &mut Tx, action: Actions) {
        match action {
            Actions::PURGE => {
                self.discard_held(tx);
                self.end.purge();
            }
            Actions::REPORT_RESET => self.end.fail(Failure::Reset),
            Actions::REPORT_ABORTED => self.end.fail(Failure::Aborted),
            Actions::SEND_DONE => self.publish(tx),
            Actions::SEND_CLOSED | Actions::SEND_ABORT => self.publish_last(tx),
            // Woken under the lock. The woken threads take the lock after this thread's release.
            Actions::WAKE_READERS | Actions::WAKE_WRITERS => self.wake_all(),
            Actions::CLOSE_TCP => self.close_tcp(tx),
            Actions::STOP_TIMER => tx.timer = None,
            Actions::START_CLOSE_TIMER => {
                tx.timer = Some(Instant::now() + self.options.close_timeout)
            }
            Actions::START_ABORT_TIMER => {
                let wait = Duration::from_micros(ABORT_TIMEOUT_US).min(self.options.close_timeout);
                tx.timer = Some(Instant::now() + wait);
            }
            Actions::REUSE_BUFFER => self.end.finish(),
            // RESET_TCP was done before. Without REUSE_BUFFER, the drop of the connection unregisters
            // the buffer.
            _ => {}
        }
    }

    /// Like [`Conn::linger`], with an error for unread bytes.
    pub(crate) fn linger_to_end(self: &Arc<Self>, timeout: Duration) -> io::Result<()> {
        self.linger(timeout);
        self.check()?;
        match self.unread_by_peer() {
            0 => Ok(()),
            n => {
                let why = format!("the peer has not read the last {n} bytes");
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
        }
    }

    /// Waits until the peer has read everything or has closed, at most `timeout` (SO_LINGER). A signal
    /// ends the wait, even with a SA_RESTART handler, and the connection closes in the background.
    pub(crate) fn linger(self: &Arc<Self>, timeout: Duration) {
        let deadline = Deadline::after(Some(timeout));
        loop {
            let seen = {
                let mut tx = self.tx();
                self.refresh_tx(&mut tx);
                let is_sent = tx.queue.is_empty() && tx.records.out.is_empty();
                let is_read = tx.half.sender.in_flight() == 0 && is_sent;
                let is_by_tcp = is_read && tx.half.has_left();
                if is_read && !(is_by_tcp && self.has_unacknowledged()) || self.has_failed() {
                    return;
                }
                if is_by_tcp {
                    // No event reports acknowledgements of the peer's kernel.
                    drop(tx);
                    let left = deadline.left().map_or(ACKNOWLEDGED, |(_, left)| left);
                    let pause = Deadline::after(Some(left.min(ACKNOWLEDGED)));
                    clear_interrupted();
                    let _ = listening(|| self.wait_as(&pause, false, was_interrupted));
                    if left.is_zero() || was_interrupted() {
                        return;
                    }
                    continue;
                }
                // The peer need not report its last reads by itself (CDC-21), so ask for them (CDC-23,
                // CDC-24).
                tx.half.sender.request_update();
                if tx.half.sender.publish_due() {
                    self.publish(&mut tx);
                }
                tx.half.seen()
            };
            let flushed = || self.end.has_left_ring() && self.tx().has_room_on_tcp();
            let look = self.look();
            let flushed = || flushed() || look.is_over();
            clear_interrupted();
            let changed = || look.words()[1] != seen || flushed() || was_interrupted();
            let waited = listening(|| self.wait_as(&deadline, false, changed));
            if waited.is_err() || was_interrupted() {
                return;
            }
        }
    }
}

/// Pause between two checks of the acknowledgements of the peer's kernel.
const ACKNOWLEDGED: Duration = Duration::from_millis(5);

/// The shortest wait of a connection for the FIN of an ended process.
const FIN_TIME: Duration = Duration::from_millis(500);

/// The longest sleep for FINs of lost peers, of the process's connections together in one second.
const FIN_BUDGET: Duration = Duration::from_millis(50);

/// Waits a moment for the peer's FIN. `false`: the time budget is used up.
fn await_fin(tcp: impl AsFd) -> bool {
    /// The second of the clock, times 2^20, plus the spent part of its budget, microseconds. No lock: a
    /// thread could hold it while the process forks.
    static SPENT: AtomicU64 = AtomicU64::new(0);
    let clock = ism_sys::read_clock(rustix::time::ClockId::Monotonic);
    let second = (clock.tv_sec as u64) << 20;
    let last = SPENT.load(Ordering::Relaxed);
    let spent = last.saturating_sub(second);
    let budget = FIN_BUDGET.saturating_sub(Duration::from_micros(spent));
    let begun = Instant::now();
    let _ = poll_readable(&[tcp.as_fd()], Some(budget), None);
    let took = begun.elapsed();
    SPENT.store(second + (spent + took.as_micros() as u64).min(0xf_ffff), Ordering::Relaxed);
    took < budget
}

/// Peeks without blocking, in any mode of the stream.
fn peek(tcp: impl AsFd, byte: &mut [u8; 1]) -> io::Result<usize> {
    use rustix::net::RecvFlags;
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (n, _) = rustix::net::recv(tcp, &mut byte[..], flags)?;
    Ok(n)
}
