// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection ends, leaves its device, or returns to a ring: the calls of the program and of the
//! stack. The steps themselves are of the send side.

use std::io;
use std::net::{IpAddr, Shutdown};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use smc_core::carrier::{Input, Reading, Renewal, Role};
use smc_core::connection::{Event, State};
use smc_core::time::Tick;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{HEADER_LEN, Reason, Record};

use super::carrier::Carrier;
use super::end_word::Failure;
use super::parts::{Conn, Rx};
use super::records_in::first_chunk;
use super::return_steps::Step;
use super::ring_return::PeerDevice;
use super::tcp_io::peek;
use crate::capture;
use crate::handshake::ring::{RingParams, RingStep, Stage};
use crate::reactor::tcp_watch::TcpHandler;
use crate::reactor::wait::{Deadline, clear_interrupted, was_interrupted};
use ism_sys::interrupt::listening;

/// Pause between two checks of the acknowledgements of the peer's kernel.
const ACKNOWLEDGED: Duration = Duration::from_millis(5);

impl Conn {
    /// `shutdown`, either half or both.
    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.shared.check()?;
        match how {
            Shutdown::Read => self.shutdown_read(),
            Shutdown::Write => {
                if capture::is_on() {
                    self.shared.capture_end();
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
        self.shared.check()?;
        if capture::is_on() {
            self.shared.capture_end();
        }
        self.end_direction(Event::Close { unread: false });
        self.shutdown_read();
        Ok(())
    }

    /// The application closes the connection. Unread data, or `abort`, resets the connection.
    pub(crate) fn close(&self, abort: bool) {
        if capture::is_on() {
            self.shared.capture_end();
        }
        self.shared.reactor.poll();
        if abort {
            return self.abort();
        }
        let mut rx = self.rx();
        // A failure has ended the connection already.
        let _ = self.refresh_rx(&mut rx);
        let has_unread = rx.half.receiver.available() > 0 || rx.unread.is_some();
        let unread = has_unread && !self.shared.end.is_read_shut();
        let mut tx = self.tx();
        tx.begin_end(&self.shared);
        if !unread {
            tx.end_tcp_first(&self.shared);
        }
        tx.step(&self.shared, Event::Close { unread });
        drop((tx, rx));
        self.sync_readiness();
    }

    /// The program ends its direction.
    fn end_direction(&self, event: Event) {
        let mut tx = self.tx();
        tx.begin_end(&self.shared);
        tx.step(&self.shared, event);
        drop(tx);
        self.sync_readiness();
    }

    /// Resets the connection, but not its TCP connection: the program continues with the TCP socket.
    pub(crate) fn abandon(&self) {
        self.shared.tcp.discard_addresses();
        self.tx().restore_linger(&self.shared);
        drop(self.shared.tcp.take());
        self.abort();
    }

    /// Whether both ends have closed. This call takes the peer's words first, and carries out due
    /// steps; so the stack repeats the call for closed connections.
    pub(crate) fn is_over(&self) -> bool {
        self.shared.reactor.poll();
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        if let Some(end) = tx.timer
            && Instant::now() >= end
        {
            if tx.queue.is_empty() {
                tx.timer = None;
                tx.step(&self.shared, Event::Timeout);
            } else {
                // As in TCP, for as long as the peer lives.
                tx.timer = Some(Instant::now() + self.shared.options.close_timeout);
            }
        }
        tx.note_unfinished(&self.shared);
        tx.half.close.state() == State::Closed && !tx.half.records.closing
    }

    /// Whether the peer has announced the end of its direction, regardless of later events.
    pub(crate) fn peer_has_ended(&self) -> bool {
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        tx.half.close.peer_done()
    }

    /// State of the termination, for reports.
    pub(crate) fn state(&self) -> State {
        self.tx().half.close.state()
    }

    /// Checks the TCP connection for a reset or a late Decline. A FIN means nothing (CLOSE-44): TCP
    /// stays open and idle (OPT-17).
    pub(crate) fn check_tcp(&self) {
        if self.shared.may_outlive() {
            return self.on_tcp();
        }
        let mut byte = [0u8; 1];
        let peeked = match &*self.shared.tcp.stream() {
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
        tx.refresh(&self.shared);
        if !tx.half.close.peer_flags().contains(StateFlags::CLOSED) {
            tx.cut(&self.shared);
        }
        drop(tx);
        self.sync_readiness();
    }

    /// Ends the connection at once: the peer broke the protocol, or the application wants it.
    pub(super) fn abort(&self) {
        self.on(Event::Abort);
    }

    /// Ends the connection if its carrier has failed without a later event.
    pub(super) fn check_carrier(&self) {
        let carrier = self.shared.carrier();
        if carrier.has_failed() && !self.shared.has_failed() && !self.tx().half.has_left() {
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
            tx.on_loss(&self.shared);
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
                tx.stop_sending(&self.shared);
                tx.carrier.fail();
                return;
            }
        }
        self.lost(|carrier| carrier.key() == key);
    }

    /// The peer uses the buffer of the carrier with this key for another connection, so this connection
    /// is over. Unread bytes count for nothing (RMB-23), unless the peer had closed in order.
    pub(super) fn taken(&self, key: u32) {
        let mut tx = self.tx();
        if tx.carrier.key() != key {
            return;
        }
        if !tx.is_over_by_loss(&self.shared) {
            tx.reset_tcp(&self.shared);
            tx.step(&self.shared, Event::TcpReset);
            tx.step(&self.shared, Event::Timeout);
            self.shared.end.fail(Failure::Reset);
        }
        drop(tx);
        self.shared.wake_all();
        self.sync_readiness();
    }

    pub(super) fn on(&self, event: Event) {
        let mut tx = self.tx();
        tx.step(&self.shared, event);
        drop(tx);
        self.sync_readiness();
    }

    /// Like [`Conn::linger`], with an error for unread bytes.
    pub(crate) fn linger_to_end(self: &Arc<Self>, timeout: Duration) -> io::Result<()> {
        self.linger(timeout);
        self.shared.check()?;
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
                tx.refresh(&self.shared);
                let is_sent = tx.queue.is_empty() && tx.records.out.is_empty();
                let is_read = tx.half.sender.in_flight() == 0 && is_sent;
                let is_by_tcp = is_read && tx.half.has_left();
                if is_read && !(is_by_tcp && self.shared.has_unacknowledged())
                    || self.shared.has_failed()
                {
                    return;
                }
                if is_by_tcp {
                    // No event reports acknowledgements of the peer's kernel.
                    drop(tx);
                    let left = deadline.left().map_or(ACKNOWLEDGED, |(_, left)| left);
                    let pause = Deadline::after(Some(left.min(ACKNOWLEDGED)));
                    clear_interrupted();
                    let _ = listening(|| self.shared.wait_as(&pause, false, was_interrupted));
                    if left.is_zero() || was_interrupted() {
                        return;
                    }
                    continue;
                }
                // The peer need not report its last reads by itself (CDC-21), so ask for them (CDC-23,
                // CDC-24).
                tx.half.sender.request_update();
                if tx.half.sender.publish_due() {
                    tx.publish(&self.shared);
                }
                tx.half.seen()
            };
            let flushed = || self.shared.end.has_left_ring() && self.tx().has_room_on_tcp();
            let look = self.shared.look();
            let flushed = || flushed() || look.is_over();
            clear_interrupted();
            let changed = || look.words()[1] != seen || flushed() || was_interrupted();
            let waited = listening(|| self.shared.wait_as(&deadline, false, changed));
            if waited.is_err() || was_interrupted() {
                return;
            }
        }
    }

    /// The address of this end.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        self.shared.tcp.addresses().ok().map(|(local, _)| local.ip())
    }

    /// Whether the connection is on TCP and may come back to a ring, or has to let go of one.
    pub(crate) fn may_return_to_ring(&self) -> bool {
        let tx = self.tx();
        let may_return = tx.may_return() && tx.half.close.state() == State::Active;
        let is_asked = tx.half.carrier().renewal() != Renewal::None;
        !tx.ring_return.retired.is_empty()
            || (may_return || is_asked) && !tx.half.carrier().is_over() && self.shared.tcp.is_open()
    }

    /// Has the connection propose a ring at its next turn, although it was refused one before.
    pub(crate) fn retry_return(&self) {
        let way = &mut self.tx().ring_return;
        let now = way.now();
        way.back_off.retry(now);
    }

    /// The connection's knowledge of its peer's device.
    pub(crate) fn sign_of_device(&self) -> Option<(IpAddr, PeerDevice)> {
        if !self.shared.may_outlive() {
            return None;
        }
        let sign = {
            let tx = self.tx();
            let way = &tx.ring_return;
            let at = |tick: Tick| way.begin + Duration::from_micros(tick.0);
            match (way.back_off.ring_since(), way.back_off.refused_at()) {
                (Some(since), _) => PeerDevice::Ring(at(since)),
                (None, Some(refused)) => {
                    let may_try = tx.may_return() && tx.half.close.state() == State::Active;
                    (tx.half.carrier().role() == Role::Client && may_try)
                        .then_some(PeerDevice::Refused(at(refused)))?
                }
                (None, None) => return None,
            }
        };
        Some((self.shared.tcp.addresses().ok()?.1.ip(), sign))
    }

    /// Carries out the next step of the return to a ring, if one is due. The step may take device
    /// commands. `true`: LLC is under way, and the return continues after it.
    pub(crate) fn return_to_ring(&self, params: &RingParams) -> bool {
        let (step, retired) = {
            let may_begin = {
                let rx = self.rx();
                !rx.half.receiver.exception()
                    && rx.may_begin_ring(self.shared.own_ring().len() as usize)
            };
            let mut tx = self.tx();
            let step = tx.next_step(params, may_begin);
            let retired = std::mem::take(&mut tx.ring_return.retired);
            (step, retired)
        };
        drop(retired);
        let Some(step) = step else { return false };
        let is_proposal = matches!(step, Step::Propose);
        // Dropped behind the Decline.
        let mut declined = None;
        let done = match step {
            Step::Propose => params.propose(),
            Step::Accept(message) => params.accept(&message),
            Step::Confirm(awaiting, message) => params.confirm(*awaiting, &message),
            Step::Attach(offer, message) => params.attach(*offer, &message),
            Step::Link(link, message) => params.link(link, &message),
            Step::Decline(stage) => {
                declined = stage;
                RingStep::No(params.decline())
            }
        };
        let links = matches!(done, RingStep::Later(_) | RingStep::Message(Stage::Linking(_), _));
        if self.tx().end_step(&self.shared, is_proposal, done, params) {
            // The peer may have begun the ring already.
            self.serve_tcp(&mut self.rx());
        }
        drop(declined);
        links
    }

    /// Takes the peer's CHANGE as the next record, and begins both directions of the new ring. `false`:
    /// the program has to read an urgent byte before.
    pub(super) fn begin_ring(&self, rx: &mut Rx) -> bool {
        if self.refresh_rx(rx).is_err()
            || rx.half.receiver.exception()
            || self.keep_unread(rx).is_err()
        {
            return false;
        }
        let mut tx = self.tx();
        let Some(Ok(record)) = first_chunk(&tx.records.input).map(|header| Record::parse(&header))
        else {
            return false;
        };
        tx.records.input.drain(..HEADER_LEN);
        tx.switch(&self.shared, Input::Record(record), 0);
        if tx.half.carrier().is_over() || tx.half.carrier().incoming().reading() != Reading::Ring {
            return true;
        }
        let Some(next) = tx.ring_return.renewal.take_ring() else { return false };
        if tx.records.recv.stored() != Some(rx.half.total()) {
            tx.switch(&self.shared, Input::Violated, 0);
            return true;
        }
        let me = self.me.clone();
        let last = self.shared.carrier().key();
        tx.exchange(&self.shared, rx, next.clone());
        drop(tx);
        self.shared.reactor.remove(last, std::ptr::from_ref(self));
        let is_known = self.shared.reactor.enter(next.registration(), me);
        if self.shared.reactor.is_leaving() {
            self.leave_in_order();
        }
        if !is_known || next.is_device_gone() || next.has_failed() {
            self.tx().on_loss(&self.shared);
        }
        // The readiness descriptor arms the new line, and retired values are dropped.
        self.shared.tcp.watch_room();
        self.shared.tcp.want_return();
        true
    }

    /// Whether the ring was left with written bytes not yet taken by TCP, or the connection is
    /// [unfinished](Tx::is_unfinished).
    pub(super) fn is_sending_by_tcp(&self) -> bool {
        let tx = self.tx();
        if tx.is_unfinished(&self.shared) {
            return true;
        }
        let has_more = !tx.queue.is_empty() || !tx.records.out.is_empty();
        tx.half.has_left() && has_more && !tx.half.carrier().is_over() && self.shared.tcp.is_open()
    }

    /// Leaves the ring of a working device about to go, if the connection may continue without it.
    pub(super) fn leave_in_order(&self) {
        let mut tx = self.tx();
        tx.refresh(&self.shared);
        if !tx.half.has_left()
            && tx.must_leave(&self.shared)
            && self.shared.tcp.watch_bytes().is_ok()
        {
            tracing::debug!(peer = %self.shared.carrier(), "connection leaves its device");
            tx.switch(&self.shared, Input::Leave(Reason::DeviceLeaves), 0);
        }
    }

    /// Whether the connection will continue over TCP without its device, but does not yet, or reads
    /// memory of the device.
    pub(crate) fn must_leave_device(&self) -> bool {
        self.tx().must_leave(&self.shared)
    }

    /// Whether the connection will continue without its device, and reads memory of the device.
    pub(crate) fn needs_device_memory(&self) -> bool {
        self.tx().must_leave(&self.shared) && !self.shared.carrier().ring_stays()
    }

    /// Continues with a copy of the own ring, because the memory goes with a lost device. Later writes
    /// of the peer do not arrive, and the peer is informed.
    pub(crate) fn keep_memory(&self) {
        self.lost(Carrier::is_device_gone);
        let (_rx, tx) = (self.rx(), self.tx());
        // Otherwise the next access finds the memory gone with the device.
        if tx.carrier.is_device_gone() {
            tx.carrier.keep_ring();
        }
    }

    /// The program has set SO_LINGER of the socket.
    pub(crate) fn follow_linger(&self, linger: Option<Duration>) {
        let mut tx = self.tx();
        if tx.records.linger.is_some() {
            tx.records.linger = Some(linger);
            let zero = Some(Duration::ZERO);
            let _ = self.shared.tcp.with(|tcp| Ok(sockopt::set_socket_linger(tcp, zero)?));
        }
    }

    /// SO_LINGER of the program, while the socket has another one.
    pub(crate) fn programs_linger(&self) -> Option<Option<Duration>> {
        self.tx().records.linger
    }
}
