// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection: ten states, their events, and the resulting actions.
//!
//! RFC 7609 section 4.8.1 (Figure 22, normal) and section 4.8.2 (Figure 23, abnormal):
//!
//! ```text
//!                           Closed ── established ──► Active
//!        Active ── own D or C ──► PeerCloseWait1 ── peer D ──► PeerCloseWait2
//!                 both ── peer C ──► Closed, or AppFinCloseWait if only D was sent ── own C ──► Closed
//!        Active ── peer D or C ──► AppCloseWait1 ── own D ──► AppCloseWait2
//!                 both ── own C ──► Closed, or PeerFinCloseWait if only D was seen ── peer C ──► Closed
//!        any without own C ── abort ──► PeerAbortWait ── peer A ──► Closed
//!        any without own C ── peer A ──► ProcessAbort ── own A delivered ──► Closed
//! ```
//!
//! The figures leave out the flags sent so far by both sides, but the next step depends on the
//! flags; [`Close`] stores them beside the state. `close_table.md` lists the result of
//! [`Close::step`] for every possible value.
//!
//! Interpretations where the text is silent or contradicts itself:
//! - The peer's C in PeerCloseWait leads to Closed after an own C, to AppFinCloseWait after an own D
//!   (wire erratum B-15).
//! - Nothing is sent after an own C or A. An A arriving after the own C is not answered. A side
//!   with the peer's C or A waits for no A, as none can come (B-27). The same holds if the C
//!   crosses the own A, although the text wants everything but an A ignored.
//! - The timer runs once the application has closed, as for FIN_WAIT_2 of TCP. A half close held
//!   open by the application may last as long as the peer sends.
//! - A FIN on the TCP connection is no event at all: Linux sends its FIN ahead of its D or C
//!   (D-16). A Linux peer leaves an A without answer in PeerCloseWait, and has no timers of its
//!   own: the timers here end both, and an own final C or A is always sent.

use crate::wire::cdc::StateFlags;

/// Default time in microseconds for which a closed application's connection waits for the peer: to
/// take the last bytes, or to close as well (CLOSE-20, CLOSE-39).
pub const CLOSE_TIMEOUT_US: u64 = 60_000_000;
/// Default time in microseconds to wait for the answer to an abort (CLOSE-25).
pub const ABORT_TIMEOUT_US: u64 = 5_000_000;

/// State of a connection (CLOSE-2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Not in use: before and after.
    #[default]
    Closed,
    /// Bytes may flow both ways.
    Active,
    /// The own side closed first, at least for writing.
    PeerCloseWait1,
    /// PeerCloseWait1, and the peer is done writing.
    PeerCloseWait2,
    /// The peer has closed and the own application, done writing, has not.
    AppFinCloseWait,
    /// The peer closed first, at least for writing.
    AppCloseWait1,
    /// AppCloseWait1, and the own side is done writing.
    AppCloseWait2,
    /// The own side has closed and the peer, done writing, has not.
    PeerFinCloseWait,
    /// Aborted here; the peer's A is awaited.
    PeerAbortWait,
    /// Aborted by the peer; the own A is on its way.
    ProcessAbort,
}

impl State {
    /// Every state.
    pub const ALL: [State; 10] = [
        State::Closed,
        State::Active,
        State::PeerCloseWait1,
        State::PeerCloseWait2,
        State::AppFinCloseWait,
        State::AppCloseWait1,
        State::AppCloseWait2,
        State::PeerFinCloseWait,
        State::PeerAbortWait,
        State::ProcessAbort,
    ];
}

/// An event of a connection. `shutdown(read)` is no event: the socket handles it alone (CLOSE-16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Rendezvous is complete (CLOSE-3).
    Established,
    /// The application called `shutdown(write)`.
    ShutdownWrite,
    /// The application called `close()` or `shutdown(both)` (CLOSE-17).
    Close {
        /// Bytes wait unread by the application ([`super::Receiver::available`]).
        unread: bool,
    },
    /// The last byte is in the peer's ring, and a close may be pending.
    Flushed,
    /// State flags arrived, new or repeated.
    Peer {
        /// The flags.
        flags: StateFlags,
    },
    /// The control word with the A of [`Actions::SEND_ABORT`] has left.
    AbortDelivered,
    /// The connection has to end at once: by the application's wish (SO_LINGER 0), after a peer's
    /// violation, or because the device or link is gone.
    Abort,
    /// The TCP connection was reset.
    TcpReset,
    /// The timer expired.
    Timeout,
}

bitflags::bitflags! {
    /// The actions to carry out, in the order of the bits, as yielded by [`Actions::iter`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Actions: u16 {
        /// Throw away unread and unsent bytes.
        const PURGE = 1 << 0;
        /// Socket calls fail from now on: the peer reset the connection (ECONNRESET).
        const REPORT_RESET = 1 << 1;
        /// Socket calls fail from now on: the connection was ended here (ECONNABORTED).
        const REPORT_ABORTED = 1 << 2;
        /// Publish a control word with [`Close::flags`], now including D.
        const SEND_DONE = 1 << 3;
        /// Publish the last control word of this side, with C.
        const SEND_CLOSED = 1 << 4;
        /// Publish the last control word of this side, with A; report [`Event::AbortDelivered`]
        /// when the word has left.
        const SEND_ABORT = 1 << 5;
        /// Wake the threads waiting to read: there is an end of data, or an error.
        const WAKE_READERS = 1 << 6;
        /// Wake the threads waiting to write: there is an error.
        const WAKE_WRITERS = 1 << 7;
        /// Break the TCP connection by RST.
        const RESET_TCP = 1 << 8;
        /// Close the TCP connection by FIN, no longer needed by SMC (CLOSE-1).
        const CLOSE_TCP = 1 << 9;
        /// No timer is needed any more.
        const STOP_TIMER = 1 << 10;
        /// Start or restart the timer, with [`CLOSE_TIMEOUT_US`] or the configured time.
        const START_CLOSE_TIMER = 1 << 11;
        /// Start or restart the timer, with [`ABORT_TIMEOUT_US`].
        const START_ABORT_TIMER = 1 << 12;
        /// Both sides are done: the own element may serve another connection (RMB-21).
        const REUSE_BUFFER = 1 << 13;
        /// The peer never declared its end and might still write: withdraw its right to the own
        /// element (token, RKey) before reusing the memory (RMB-22). The peer's answer to the reset
        /// may be a late A.
        const WITHDRAW_BUFFER = 1 << 14;
    }
}

impl Actions {
    /// Yields single actions, in the order of execution. Like [`Actions::iter`], but without a test
    /// of each known action.
    pub fn each(self) -> impl Iterator<Item = Actions> {
        let mut left = self.bits();
        std::iter::from_fn(move || {
            let lowest = left & left.wrapping_neg();
            left ^= lowest;
            (lowest != 0).then(|| Actions::from_bits_truncate(lowest))
        })
    }
}

/// The termination side of one connection. Plain data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Close {
    state: State,
    /// The flags sent by this side.
    sent: StateFlags,
    /// The flags received from the peer.
    seen: StateFlags,
    /// The flag requested by the application for the time after the last byte: none, D or C
    /// (CLOSE-5).
    pending: StateFlags,
}

// D: this side writes no more. C: this side has closed (CDC-36).
const DONE: StateFlags = StateFlags::SENDING_DONE;
const CLOSED: StateFlags = StateFlags::CLOSED;
const ABORT: StateFlags = StateFlags::ABORT;
const FAILED: Actions = Actions::PURGE.union(Actions::WAKE_READERS).union(Actions::WAKE_WRITERS);

impl Close {
    /// A connection before its establishment.
    pub const fn new() -> Close {
        let none = StateFlags::empty();
        Close { state: State::Closed, sent: none, seen: none, pending: none }
    }

    /// The state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// The state flags of every control word sent now: a flag once sent is repeated (CDC-47).
    #[inline]
    pub const fn flags(&self) -> StateFlags {
        self.sent
    }

    /// The flags received from the peer so far.
    #[inline]
    pub const fn peer_flags(&self) -> StateFlags {
        self.seen
    }

    /// D or C if requested by the application while bytes are still to be written; otherwise empty.
    /// Report [`Event::Flushed`] when the bytes are written.
    pub const fn pending(&self) -> StateFlags {
        self.pending
    }

    /// Whether the application may write: not after an own shutdown, nor after the peer closed
    /// (CLOSE-15, CLOSE-43). EPIPE otherwise, unless an error was reported.
    #[inline]
    pub const fn can_write(&self) -> bool {
        matches!(self.state, State::Active | State::AppCloseWait1)
            && self.pending.is_empty()
            && !self.seen.contains(CLOSED)
    }

    /// Whether the peer's ring and control block may still be written: not after an own C or A,
    /// except by the word with the C or A itself (CLOSE-32, CDC-37), nor in Closed.
    #[inline]
    pub const fn may_publish(&self) -> bool {
        !matches!(self.state, State::Closed) && !self.sent.intersects(CLOSED.union(ABORT))
    }

    /// Whether the peer writes no more bytes. End of data is reached when a load of the producer
    /// word *after* this became true leaves nothing to read (CLOSE-18).
    #[inline]
    pub const fn peer_done(&self) -> bool {
        self.seen.intersects(DONE.union(CLOSED))
    }

    /// Applies an event; [`Close::step`] in place.
    #[inline]
    pub fn on(&mut self, event: Event, unsent: bool) -> Actions {
        let (next, actions) = self.step(event, unsent);
        *self = next;
        actions
    }

    /// The whole machine as a pure function. `unsent`: bytes accepted from the application are not
    /// in the peer's ring yet. `unsent` is no part of an event, because another thread may change
    /// the value between the event and this call: the caller reads it under the lock held for the
    /// call. Otherwise an end could wait for an [`Event::Flushed`] that has already been reported.
    pub fn step(self, event: Event, unsent: bool) -> (Close, Actions) {
        match event {
            Event::Established if self.state == State::Closed => {
                (Close { state: State::Active, ..Close::new() }, Actions::empty())
            }
            Event::Established => self.unmoved(),
            Event::ShutdownWrite => self.shutdown_write(unsent),
            Event::Close { unread } => self.close(unread, unsent),
            Event::Flushed if self.pending.contains(CLOSED) => self.send_closed(),
            Event::Flushed if self.pending.contains(DONE) => self.say_done(),
            Event::Flushed => self.unmoved(),
            Event::Peer { flags } => self.peer(flags, unsent),
            Event::AbortDelivered if self.state == State::ProcessAbort => {
                self.end(Actions::CLOSE_TCP | Actions::REUSE_BUFFER)
            }
            Event::AbortDelivered => self.unmoved(),
            // CLOSE-21; a stalled close ends the same way by `timeout`.
            Event::Abort => self.abort(Actions::REPORT_ABORTED),
            Event::TcpReset if self.sent.contains(CLOSED) => self.unmoved(),
            // Without an earlier A (CLOSE-28); `fail` has no effect after an A (CLOSE-29).
            Event::TcpReset => self.fail(Actions::REPORT_RESET),
            Event::Timeout => self.timeout(),
        }
    }

    fn unmoved(self) -> (Close, Actions) {
        (self, Actions::empty())
    }

    /// Whether an abort is over or under way.
    fn is_over(self) -> bool {
        matches!(self.state, State::Closed | State::PeerAbortWait | State::ProcessAbort)
    }

    /// The only way to Closed: the caller decides on the buffer (CLOSE-38).
    fn end(self, actions: Actions) -> (Close, Actions) {
        let none = StateFlags::empty();
        (Close { state: State::Closed, pending: none, ..self }, Actions::STOP_TIMER | actions)
    }

    fn shutdown_write(self, unsent: bool) -> (Close, Actions) {
        let said = self.sent.union(self.pending);
        if self.is_over() || said.intersects(DONE | CLOSED) {
            return self.unmoved();
        }
        if !unsent {
            return self.say_done();
        }
        if self.seen.contains(CLOSED) {
            return self.abort(Actions::REPORT_RESET);
        }
        (Close { pending: DONE, ..self }, Actions::WAKE_WRITERS)
    }

    fn close(self, unread: bool, unsent: bool) -> (Close, Actions) {
        if self.is_over() || self.sent.union(self.pending).contains(CLOSED) {
            return self.unmoved();
        }
        if unread {
            // In every state with an open read side, not only in Active (CLOSE-4, CLOSE-41).
            return self.abort(Actions::REPORT_ABORTED);
        }
        if !unsent || self.sent.contains(DONE) {
            return self.send_closed();
        }
        if self.seen.contains(CLOSED) {
            return self.abort(Actions::REPORT_RESET);
        }
        let wake = Actions::WAKE_READERS | Actions::WAKE_WRITERS;
        (Close { pending: CLOSED, ..self }, wake | Actions::START_CLOSE_TIMER)
    }

    /// Every byte is out: sends D (CLOSE-6).
    fn say_done(self) -> (Close, Actions) {
        let state = match self.state {
            State::Active => State::PeerCloseWait1,
            // In AppCloseWait1 (CLOSE-12).
            _ => State::AppCloseWait2,
        };
        let next = Close { state, sent: self.sent | DONE, pending: StateFlags::empty(), ..self };
        (next, Actions::SEND_DONE | Actions::WAKE_WRITERS)
    }

    /// Every byte is out: sends C (CLOSE-6).
    fn send_closed(self) -> (Close, Actions) {
        let said = Close { sent: self.sent | CLOSED, pending: StateFlags::empty(), ..self };
        let actions = Actions::SEND_CLOSED | Actions::WAKE_READERS | Actions::WAKE_WRITERS;
        if self.seen.contains(CLOSED) {
            return said.end(actions | Actions::CLOSE_TCP | Actions::REUSE_BUFFER);
        }
        let state = match self.state {
            State::Active => State::PeerCloseWait1,
            // The peer has said D only (CLOSE-13).
            State::AppCloseWait1 | State::AppCloseWait2 => State::PeerFinCloseWait,
            // After an own D: the state stays, C goes out all the same (CLOSE-40).
            other => other,
        };
        (Close { state, ..said }, actions | Actions::START_CLOSE_TIMER)
    }

    fn peer(self, flags: StateFlags, unsent: bool) -> (Close, Actions) {
        let new = flags - self.seen;
        if new.is_empty() || matches!(self.state, State::Closed | State::ProcessAbort) {
            return self.unmoved();
        }
        let next = Close { seen: self.seen | flags, ..self };
        let closed = next.seen.contains(CLOSED);
        // Only the last word of the peer counts, perhaps an abort as well (CLOSE-23, CLOSE-24,
        // CLOSE-30).
        if self.state == State::PeerAbortWait {
            return match next.seen.intersects(ABORT | CLOSED) {
                true => next.end(Actions::REUSE_BUFFER),
                false => next.unmoved(),
            };
        }
        if flags.contains(ABORT) {
            return next.peer_abort();
        }
        if closed && !self.sent.intersects(DONE | CLOSED) && (unsent || !self.pending.is_empty()) {
            // The last bytes have no place to go any more (CLOSE-11).
            return next.abort(Actions::REPORT_RESET);
        }
        let wake = match closed {
            true => Actions::WAKE_READERS | Actions::WAKE_WRITERS,
            false => Actions::WAKE_READERS,
        };
        let state = match self.state {
            // The peer closes first (CLOSE-10).
            State::Active => State::AppCloseWait1,
            // Only an own D was sent (CLOSE-9).
            State::PeerCloseWait1 | State::PeerCloseWait2 if closed => State::AppFinCloseWait,
            // D behind the own one (CLOSE-7).
            State::PeerCloseWait1 => State::PeerCloseWait2,
            other => other,
        };
        // Both have closed, one after the other or at once (CLOSE-8, CLOSE-14, CLOSE-19).
        if closed && self.sent.contains(CLOSED) {
            return next.end(wake | Actions::CLOSE_TCP | Actions::REUSE_BUFFER);
        }
        (Close { state, ..next }, wake)
    }

    /// Reports the error, purges, and answers with an A (CLOSE-26), but not behind an own C (CLOSE-42).
    fn peer_abort(self) -> (Close, Actions) {
        let actions = FAILED | Actions::REPORT_RESET;
        if self.sent.contains(CLOSED) {
            return self.end(actions | Actions::CLOSE_TCP | Actions::REUSE_BUFFER);
        }
        let (state, pending) = (State::ProcessAbort, StateFlags::empty());
        let next = Close { state, sent: self.sent | ABORT, pending, ..self };
        (next, actions | Actions::SEND_ABORT | Actions::START_ABORT_TIMER)
    }

    /// Ends the connection from here.
    fn abort(self, report: Actions) -> (Close, Actions) {
        if !self.is_over() && self.sent.contains(CLOSED) {
            // Nothing may be sent any more (CLOSE-27); the peer's C or A, or the timer, ends the
            // connection.
            return (self, Actions::RESET_TCP);
        }
        // TCP is reset while the A is on its way (CLOSE-31).
        self.fail(report | Actions::RESET_TCP)
    }

    /// Sends A and waits for the peer's (CLOSE-22), unless the peer has said its last word.
    fn fail(self, actions: Actions) -> (Close, Actions) {
        if self.is_over() {
            return self.unmoved();
        }
        let actions = actions | FAILED | Actions::SEND_ABORT;
        let (sent, pending) = (self.sent | ABORT, StateFlags::empty());
        let next = Close { state: State::PeerAbortWait, sent, pending, ..self };
        if self.seen.contains(CLOSED) {
            return next.end(actions | Actions::REUSE_BUFFER);
        }
        (next, actions | Actions::START_ABORT_TIMER)
    }

    fn timeout(self) -> (Close, Actions) {
        match self.state {
            State::Closed => self.unmoved(),
            State::PeerAbortWait => self.end(Actions::WITHDRAW_BUFFER),
            // The peer has sent A and writes no more; only the answer is stuck.
            State::ProcessAbort => self.end(Actions::CLOSE_TCP | Actions::REUSE_BUFFER),
            _ if self.sent.contains(CLOSED) => {
                self.end(Actions::RESET_TCP | Actions::WITHDRAW_BUFFER)
            }
            _ if self.pending.contains(CLOSED) => self.abort(Actions::REPORT_ABORTED),
            _ => self.unmoved(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_come_one_by_one_in_the_order_of_their_bits() {
        let some = Actions::SEND_DONE | Actions::PURGE | Actions::WITHDRAW_BUFFER;
        for actions in [Actions::empty(), some, Actions::all()] {
            assert!(actions.each().eq(actions.iter()), "{actions:?}");
        }
    }
}
