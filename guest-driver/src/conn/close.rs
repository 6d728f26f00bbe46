// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection at the send side: an event, and its actions by the table of RFC 7609.

use std::time::{Duration, Instant};

use smc_core::connection::close::ABORT_TIMEOUT_US;
use smc_core::connection::{Actions, Event, State};
use smc_core::wire::cdc::StateFlags;

use super::end_word::Failure;
use super::parts::{Shared, Tx};
use ism_sys::reset_tcp;

/// The shortest wait of a connection for the FIN of an ended process.
const FIN_TIME: Duration = Duration::from_millis(500);

impl Tx {
    /// The one place where an event meets unsent bytes: under the lock of the send side, after the last
    /// check of the peer's words. Another thread may send the bytes at any time.
    pub(super) fn end(&mut self, event: Event) -> Actions {
        self.half.end(event, self.queue.has_unsent())
    }

    /// Before the program ends its direction: takes the peer's words, and notes whether this end is the
    /// first of the two.
    pub(super) fn begin_end(&mut self, shared: &Shared) {
        self.refresh(shared);
        self.half.note_first();
    }

    /// The application is about to close the connection. If this end was the first to end a direction,
    /// its TCP sends the first FIN: the other end can use its port again at once, as on TCP. Not while
    /// bytes may need TCP: the peer takes a FIN and the end of this process for the end of the data.
    /// A stream used by no call any more ends with the FIN.
    pub(super) fn end_tcp_first(&mut self, shared: &Shared) {
        if self.half.ends_first()
            && self.arrives_without_tcp(shared)
            && !self.half.records.closing
            && !self.half.has_left()
            && !shared.has_failed()
        {
            if shared.tcp.is_discarded() {
                self.restore_linger(shared);
                drop(shared.tcp.take());
            } else if let Some(tcp) = &*shared.tcp.stream() {
                let _ = rustix::net::shutdown(tcp, rustix::net::Shutdown::Write);
            }
        }
    }

    /// Whether all written bytes arrive in the peer's ring, even if this process ends now. A connection
    /// able to outlive its device may have to repeat bytes on TCP, unless the ring is in memory of both
    /// processes: the memory of a restored machine is a copy.
    pub(super) fn arrives_without_tcp(&self, shared: &Shared) -> bool {
        !self.carrier.keeps_copies()
            && !self.queue.has_unsent()
            && (!shared.may_outlive() || self.carrier.futex_line().is_some())
    }

    /// The connection ends without a word of the peer. Received bytes can still be read, and behind
    /// them the end of data if the peer has ended its direction; else an error, as on TCP.
    pub(super) fn cut(&mut self, shared: &Shared) {
        if self.half.close.peer_done() {
            shared.end.fail(Failure::Ended);
        }
        self.step_and_keep(shared, Event::TcpReset);
    }

    pub(super) fn abort(&mut self, shared: &Shared) {
        self.step(shared, Event::Abort);
    }

    pub(super) fn on_loss(&mut self, shared: &Shared) {
        if self.half.has_left() {
            return self.note_ring_gone(shared);
        }
        self.stop_sending(shared);
        if !self.is_over_by_loss(shared) {
            match self.is_end_of_process(shared) {
                Some(true) => {
                    self.on_peer_flags(shared, StateFlags::CLOSED);
                    shared.end.fail(Failure::Ended);
                }
                // The kernel may not have closed the process's sockets yet: the background thread
                // repeats the check by `check_carrier`, as long as there is a background thread.
                None if !shared.reactor.is_lost()
                    && self.lost.get_or_insert_with(Instant::now).elapsed() < FIN_TIME =>
                {
                    return shared.schedule_update();
                }
                _ if self.leave(shared) => self.note_ring_gone(shared),
                _ => {
                    self.reset_tcp(shared);
                    self.cut(shared);
                    // No answer can come.
                    self.step(shared, Event::Timeout);
                    shared.end.fail(Failure::Reset);
                }
            }
            self.note_end_of_leave(shared);
        }
        shared.wake_all();
    }

    /// A connection that has ended before it had left its device holds the device no longer.
    fn note_end_of_leave(&self, shared: &Shared) {
        if shared.may_outlive() && !self.must_leave(shared) {
            shared.reactor.wake_background();
        }
    }

    /// Writes wait until the connection's next carrier is known.
    pub(super) fn stop_sending(&mut self, shared: &Shared) {
        if shared.may_outlive() {
            self.half.stop();
            shared.end.leave_ring();
        }
    }

    /// Nothing can be sent to the peer any more. `true`: the peer had said its last word, so nothing
    /// was lost.
    pub(super) fn is_over_by_loss(&mut self, shared: &Shared) -> bool {
        shared.carrier().fail();
        self.refresh(shared);
        self.half.close.state() == State::Closed
            || self.half.close.peer_flags().contains(StateFlags::CLOSED)
    }

    /// Whether the peer's process has ended after reading every byte written here: the device of this
    /// end lives and has reported that the peer left, and the peer's kernel has closed its TCP
    /// connection by a FIN. TCP reports an end of data to the application then. An end with a lost
    /// device knows nothing of its peer. A living peer with a lost device sends an RST before its
    /// application learns of the loss. A peer lost with its machine sends nothing.
    ///
    /// `None`: neither FIN nor RST has come yet.
    fn is_end_of_process(&mut self, shared: &Shared) -> Option<bool> {
        let may_be = shared.carrier().peer_has_left() && self.half.sender.in_flight() == 0;
        if !may_be || !shared.tcp_has_ended()? {
            return Some(false);
        }
        // The last words of the process: its last bytes, and its last read position.
        self.refresh(shared);
        let has_read_all = self.half.sender.in_flight() == 0 && !self.queue.has_unsent();
        Some(has_read_all && !shared.peer_has_unsent() && shared.carrier().has_memory())
    }

    /// Breaks the TCP connection by RST: the peer must not take the end of this process for the end of
    /// its data. No call reports a failure before the RST, because the application may close the
    /// connection or exit then.
    pub(super) fn reset_tcp(&mut self, shared: &Shared) {
        self.restore_linger(shared);
        if let Some(tcp) = shared.tcp.take() {
            reset_tcp(tcp);
        }
    }

    /// The peer's state flags have changed.
    pub(super) fn on_peer_flags(&mut self, shared: &Shared, flags: StateFlags) {
        // TCP delivers bytes from before a reset, and so does this end, although CLOSE-26 would allow
        // discarding them.
        self.step_and_keep(shared, Event::Peer { flags });
        if self.half.close.peer_done() {
            shared.end.end_of_peer();
        }
    }

    pub(super) fn step(&mut self, shared: &Shared, event: Event) {
        let actions = self.end(event);
        self.carry_out(shared, actions);
    }

    /// Like [`Tx::step`], but received bytes can still be read.
    pub(super) fn step_and_keep(&mut self, shared: &Shared, event: Event) {
        let actions = self.end(event);
        if actions.contains(Actions::PURGE) {
            self.discard_queue(shared);
        }
        self.carry_out(shared, actions - Actions::PURGE);
    }

    pub(super) fn carry_out(&mut self, shared: &Shared, actions: Actions) {
        if !self.half.close.can_write() {
            shared.end.shut_write();
        }
        if actions.intersects(Actions::SEND_CLOSED | Actions::CLOSE_TCP) {
            self.restore_linger(shared);
        }
        if actions.contains(Actions::RESET_TCP) {
            self.reset_tcp(shared);
        }
        for action in actions.each() {
            self.perform(shared, action);
        }
        if actions.contains(Actions::SEND_ABORT) {
            self.step(shared, Event::AbortDelivered);
        }
        let has_failed = actions.intersects(Actions::REPORT_RESET | Actions::REPORT_ABORTED);
        if has_failed || !self.half.carrier().is_on_ring() {
            self.note_end_of_leave(shared);
        }
        self.note_unfinished(shared);
    }

    fn perform(&mut self, shared: &Shared, action: Actions) {
        match action {
            Actions::PURGE => {
                self.discard_queue(shared);
                shared.end.purge();
            }
            Actions::REPORT_RESET => shared.end.fail(Failure::Reset),
            Actions::REPORT_ABORTED => shared.end.fail(Failure::Aborted),
            Actions::SEND_DONE => self.publish(shared),
            Actions::SEND_CLOSED | Actions::SEND_ABORT => self.publish_last(shared),
            // Woken under the lock. The woken threads take the lock after this thread's release.
            Actions::WAKE_READERS | Actions::WAKE_WRITERS => shared.wake_all(),
            Actions::CLOSE_TCP => self.close_tcp(shared),
            Actions::STOP_TIMER => self.timer = None,
            Actions::START_CLOSE_TIMER => {
                self.timer = Some(Instant::now() + shared.options.close_timeout)
            }
            Actions::START_ABORT_TIMER => {
                let wait =
                    Duration::from_micros(ABORT_TIMEOUT_US).min(shared.options.close_timeout);
                self.timer = Some(Instant::now() + wait);
            }
            Actions::REUSE_BUFFER => shared.end.finish(),
            // RESET_TCP was done before. Without REUSE_BUFFER, the drop of the connection unregisters
            // the buffer.
            _ => {}
        }
    }
}
