// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The events of a connection: calls of the reactor and of the watch of TCP, and the last use.

use std::sync::PoisonError;

use super::parts::Conn;
use crate::capture;
use crate::reactor::tcp_watch::TcpHandler;
use crate::reactor::{ConnectionHandler, DelayedUpdate};

impl ConnectionHandler for Conn {
    fn on_wake(&self) {
        self.serve_awaited();
        self.send_queued();
        self.check_blocked_writer();
        self.shared.wake_all();
        self.sync_readiness();
        // The waiter may be a writer, and writers do not answer requests of the peer.
        self.on_arrival();
    }

    fn take_change(&self) -> bool {
        let words = self.shared.words();
        let changed = self.shared.waiting.take_change(words);
        // A peer may signal without new words, and then the line must be armed again. If two
        // connections share a line, the other one may have armed it since.
        changed || !self.shared.carrier().line().is_some_and(|line| line.is_quiet())
    }

    fn on_arrival(&self) {
        // The background thread answers, because the application may hold the locks for long.
        if self.shared.is_asked() {
            self.shared.schedule_update();
        }
    }

    fn on_delayed_update(&self, read_before: Option<u64>) -> DelayedUpdate {
        self.flush_update(read_before)
    }

    fn on_tick(&self) {
        self.send_queued();
        self.check_blocked_writer();
        self.answer_flags();
        self.shared.check_keepalive();
        if self.shared.has_queued() || self.shared.waiting.is_write_blocked() {
            self.tx().check_user_timeout(&self.shared);
        }
        // While the descriptor shows readable and writable, the line is not armed, which spares the
        // peer a kick per message. A half close or the end must show all the same.
        self.sync_readiness();
    }

    fn has_waiters(&self) -> bool {
        self.shared.waiting.count() != 0
    }

    fn on_recheck(&self) {
        // The peer could suppress every other wake-up.
        self.shared.wake_sleepers();
        self.note_moves();
        // A reset also concerns a connection without waiting calls (CLOSE-28).
        self.check_tcp();
        self.check_carrier();
        self.shared.carrier().probe_peer();
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
}

impl TcpHandler for Conn {
    fn on_tcp(&self) {
        self.serve_tcp(&mut self.rx());
        self.sync_readiness();
    }

    fn is_sending(&self) -> bool {
        self.is_sending_by_tcp()
    }

    fn on_visit(&self) -> bool {
        self.shared.tcp.visit()
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        if capture::is_on() {
            self.shared.capture_no_more();
        }
        self.count_moved();
        let me: *const Conn = self;
        self.shared.reactor.remove(self.shared.carrier().key(), me);
        if self.shared.waiting.readiness.get().is_some() {
            self.shared.reactor.remove_pollable();
        }
        if self.shared.has_marked_descriptor() {
            self.shared.reactor.remove_marked();
        }
        if self.shared.waiting.word_state.is_known() {
            self.shared.reactor.remove_unwatched();
        }
        self.shared.end_queueing();
        self.shared.end_awaiting();
        let rx = self.rx.get_mut().unwrap_or_else(PoisonError::into_inner);
        rx.carrier.release();
        if self.shared.end.is_finished() {
            rx.carrier.allow_reuse(rx.half.total());
        }
    }
}
