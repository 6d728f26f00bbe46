// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection.

use std::io;
use std::net::{Shutdown, TcpStream};
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
use ism_sys::{poll_readable, reset_tcp, tcp_counts};

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
                let unsent = self.has_held();
                self.note_end();
                self.on(Event::ShutdownWrite { unsent });
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
        self.note_end();
        self.on(Event::Close { unread: false, unsent: self.has_held() });
        self.shutdown_read();
        Ok(())
    }

    /// The application closes the connection. Unread data, or `abort`, resets the connection.
    pub(crate) fn close(&self, abort: bool) {
        if capture::is_on() {
            self.capture_end();
        }
        self.reactor.poll();
        let unread = {
            let mut rx = self.rx();
            // A failure has ended the connection already.
            let _ = self.refresh_rx(&mut rx);
            (rx.receiver.available() > 0 || rx.kept.is_some()) && !self.end.is_read_shut()
        };
        self.note_end();
        if !abort && !unread {
            self.end_tcp_first();
        }
        self.on(match abort {
            true => Event::Abort,
            false => Event::Close { unread, unsent: self.has_held() },
        });
    }

    /// Before the application ends its direction: notes whether it is the first of the two that ends.
    fn note_end(&self) {
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        let said = tx.close.flags().union(tx.close.pending());
        if !said.intersects(StateFlags::SENDING_DONE | StateFlags::CLOSED) && !tx.close.peer_done()
        {
            tx.ends_first = true;
        }
    }

    /// The application is about to close the connection. If this end was the first to end a direction,
    /// its TCP sends the first FIN: the other end can use its port again at once, as on TCP. Not while
    /// bytes are unsent, or may not arrive if this process ends now: the peer takes a FIN and the end of
    /// this process for the end of all bytes.
    fn end_tcp_first(&self) {
        let is_first = {
            let tx = self.tx();
            let has_arrived = !tx.carrier.keeps_copies() && !tx.queue.has_unsent();
            tx.ends_first && has_arrived && !tx.is_flushing()
        };
        if is_first
            && !self.has_failed()
            && !self.may_outlive()
            && let Some(tcp) = &*self.tcp.stream()
        {
            let _ = rustix::net::shutdown(tcp, rustix::net::Shutdown::Write);
        }
    }

    /// Resets the connection, but not its TCP connection: the program goes on with the socket of that.
    pub(crate) fn abandon(&self) {
        self.tcp.discard_addresses();
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
        tx.close.state() == State::Closed && !tx.is_flushing()
    }

    /// Whether the peer has announced the end of its direction, regardless of later events.
    pub(crate) fn peer_has_ended(&self) -> bool {
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        tx.close.peer_done()
    }

    /// State of the termination, for reports.
    pub(crate) fn state(&self) -> State {
        self.tx().close.state()
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
        if !tx.close.peer_flags().contains(StateFlags::CLOSED) {
            self.cut(&mut tx);
        }
        drop(tx);
        self.sync_readiness();
    }

    /// The connection ends without a word of the peer. Received bytes can still be read, and behind
    /// them the end of data if the peer has ended its direction; else an error, as on TCP.
    pub(super) fn cut(&self, tx: &mut Tx) {
        if tx.close.peer_done() {
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
        if carrier.has_failed() && !self.has_failed() && !self.tx().has_left() {
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
            let tx = self.tx();
            // The device reports the buffers of a leaving peer ahead of the peer itself.
            if tx.carrier.key() == key && tx.carrier.may_hear_of_peer() {
                self.hold_writes();
                tx.carrier.fail();
                return;
            }
        }
        self.lost(|carrier| carrier.key() == key);
    }

    pub(super) fn lost_locked(&self, tx: &mut Tx) {
        if tx.has_left() {
            return self.note_ring_gone(tx);
        }
        self.hold_writes();
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
                    self.reset_tcp();
                    self.cut(tx);
                    // No answer can come.
                    self.step(tx, Event::Timeout);
                    self.end.fail(Failure::Reset);
                }
            }
        }
        self.wake_all();
    }

    /// Writes wait until it is known how the connection goes on.
    pub(super) fn hold_writes(&self) {
        if self.may_outlive() {
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
            self.reset_tcp();
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
        tx.close.state() == State::Closed || tx.close.peer_flags().contains(StateFlags::CLOSED)
    }

    /// Whether the peer's process has ended after reading every byte written here: the device of this
    /// end lives and has reported that the peer left, and the peer's kernel has closed its TCP
    /// connection by a FIN. TCP reports an end of data to the application then. An end with a lost
    /// device knows nothing of its peer. A living peer with a lost device sends an RST before its
    /// application learns of the loss. A peer lost with its machine sends nothing.
    ///
    /// `None`: neither FIN nor RST has come yet.
    fn is_end_of_process(&self, tx: &mut Tx) -> Option<bool> {
        let may_be = self.carrier().peer_has_left() && tx.sender.in_flight() == 0;
        if !may_be || !self.tcp_has_ended()? {
            return Some(false);
        }
        // The last words of the process: its last bytes, and its last read position.
        self.refresh_tx(tx);
        let has_read_all = tx.sender.in_flight() == 0 && tx.queue.is_empty();
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
                    return Some(tcp_counts(tcp).is_ok_and(|counts| counts.state == CLOSE_WAIT));
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

    /// Breaks the TCP connection by RST, so that the peer does not take the end of this process for
    /// the end of its data. No call reports a failure before this is done, because the application
    /// may close the connection or exit then.
    pub(super) fn reset_tcp(&self) {
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
        // TCP delivers what came before a reset, and so does this end, although CLOSE-26 would let
        // it throw the bytes away.
        self.step_and_keep(tx, Event::Peer { flags, unsent: !tx.queue.is_empty() });
        if tx.close.peer_done() {
            self.end.end_of_peer();
        }
    }

    pub(super) fn step(&self, tx: &mut Tx, event: Event) {
        let actions = tx.close.on(event);
        self.carry_out(tx, actions);
    }

    /// As [`Conn::step`], but what has arrived can still be read.
    fn step_and_keep(&self, tx: &mut Tx, event: Event) {
        let actions = tx.close.on(event);
        if actions.contains(Actions::PURGE) {
            self.discard_held(tx);
        }
        self.carry_out(tx, actions - Actions::PURGE);
    }

    fn carry_out(&self, tx: &mut Tx, actions: Actions) {
        if !tx.close.can_write() {
            self.end.shut_write();
        }
        if actions.contains(Actions::RESET_TCP) {
            self.reset_tcp();
        }
        for action in actions.each() {
            self.perform(tx, action);
        }
        if actions.contains(Actions::SEND_ABORT) {
            self.step(tx, Event::AbortDelivered);
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

    /// Waits until the peer has read everything or has closed, at most `timeout` (SO_LINGER).
    pub(crate) fn linger(self: &Arc<Self>, timeout: Duration) {
        let deadline = Deadline::after(Some(timeout));
        loop {
            let seen = {
                let mut tx = self.tx();
                self.refresh_tx(&mut tx);
                let is_sent = tx.queue.is_empty() && tx.has_no_records();
                if tx.sender.in_flight() == 0 && is_sent || self.has_failed() {
                    return;
                }
                // The peer need not report its last reads by itself (CDC-21), so ask it (CDC-23,
                // CDC-24).
                tx.sender.request_update();
                if tx.sender.publish_due() {
                    self.publish(&mut tx);
                }
                tx.seen
            };
            let flushed = || self.end.has_left_ring() && self.tx().has_room_on_tcp();
            let look = self.look();
            let flushed = || flushed() || look.is_over();
            if self.wait(&deadline, || look.words()[1] != seen || flushed()).is_err() {
                return;
            }
        }
    }
}

/// State of a TCP connection whose peer has sent a FIN, as in `include/net/tcp_states.h`.
pub(super) const CLOSE_WAIT: u8 = 8;

/// The shortest wait of a connection for the FIN of an ended process.
const FIN_TIME: Duration = Duration::from_millis(500);

/// The longest sleep for FINs of lost peers, of the process's connections together in one second.
const FIN_BUDGET: Duration = Duration::from_millis(50);

/// Waits a moment until the peer's FIN may have come. `false`: the time for that is used up.
fn await_fin(tcp: &TcpStream) -> bool {
    /// The second of the clock, times 2^20, and how much of its budget is spent, microseconds. No
    /// lock: a thread could hold it while the process forks.
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

/// Peeks without blocking, whatever the mode of the stream.
fn peek(tcp: &TcpStream, byte: &mut [u8; 1]) -> io::Result<usize> {
    use rustix::net::RecvFlags;
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (n, _) = rustix::net::recv(tcp, &mut byte[..], flags)?;
    Ok(n)
}
