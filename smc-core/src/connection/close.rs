// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a connection ends: ten states, the events that move it, what has to be done.
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
//! The figures leave out what the two sides have said so far, on which the next step depends;
//! [`Close`] holds it beside the state. `close_table.md` lists what [`Close::step`] does for every
//! value that can occur.
//!
//! Readings where the text is silent or contradicts itself:
//! - The peer's C in PeerCloseWait leads to Closed after an own C, to AppFinCloseWait after an own D
//!   (wire erratum B-15).
//! - Nothing is sent after an own C or A. An A that arrives after the own C is not answered. A
//!   side that has the peer's C or A waits for no A, as none can come (B-27). The same holds if that C
//!   crosses the own A, although the text wants everything but an A ignored.
//! - The timer runs once the application has closed, as for FIN_WAIT_2 of TCP. A half close that
//!   the application holds open may last as long as the peer likes to send.
//! - A FIN on the TCP connection is no event at all: Linux sends it ahead of its D or C (D-16). A
//!   Linux peer leaves an A without answer in PeerCloseWait, and has no timers of its own: the
//!   timers here end both, and an own final C or A is always sent.

use crate::wire::cdc::StateFlags;

/// Default time in microseconds that a closed application's connection waits for the peer: to
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
    /// As PeerCloseWait1, and the peer is done writing.
    PeerCloseWait2,
    /// The peer has closed and the own application, done writing, has not.
    AppFinCloseWait,
    /// The peer closed first, at least for writing.
    AppCloseWait1,
    /// As AppCloseWait1, and the own side is done writing.
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

/// What can happen to a connection. `shutdown(read)` is not among them: it stays with the socket
/// (CLOSE-16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Rendezvous is complete (CLOSE-3).
    Established,
    /// The application called `shutdown(write)`.
    ShutdownWrite {
        /// Bytes accepted from the application are not in the peer's ring yet.
        unsent: bool,
    },
    /// The application called `close()` or `shutdown(both)` (CLOSE-17).
    Close {
        /// Bytes wait that the application did not read ([`super::Receiver::available`]).
        unread: bool,
        /// Bytes accepted from the application are not in the peer's ring yet.
        unsent: bool,
    },
    /// All bytes are in the peer's ring, and a close may be pending.
    Flushed,
    /// State flags arrived, new or repeated.
    Peer {
        /// The flags.
        flags: StateFlags,
        /// Bytes accepted from the application are not in the peer's ring yet.
        unsent: bool,
    },
    /// The control word with the A of [`Actions::SEND_ABORT`] has left.
    AbortDelivered,
    /// The connection has to end at once: the application wants it (SO_LINGER 0), or the peer
    /// broke a rule, or the device or link is gone.
    Abort,
    /// The TCP connection was reset.
    TcpReset,
    /// The timer expired.
    Timeout,
}

bitflags::bitflags! {
    /// What has to be done, in the order of the bits: [`Actions::iter`] yields them so.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Actions: u16 {
        /// Throw away unread and unsent bytes.
        const PURGE = 1 << 0;
        /// Socket calls fail from now on: the peer reset the connection (ECONNRESET).
        const REPORT_RESET = 1 << 1;
        /// Socket calls fail from now on: it was ended here (ECONNABORTED).
        const REPORT_ABORTED = 1 << 2;
        /// Publish a control word with [`Close::flags`], which now has D.
        const SEND_DONE = 1 << 3;
        /// Publish the last control word of this side, with C.
        const SEND_CLOSED = 1 << 4;
        /// Publish the last control word of this side, with A; report
        /// [`Event::AbortDelivered`] when it has left.
        const SEND_ABORT = 1 << 5;
        /// Wake the threads that wait to read: there is an end of data, or an error.
        const WAKE_READERS = 1 << 6;
        /// Wake the threads that wait to write: there is an error.
        const WAKE_WRITERS = 1 << 7;
        /// Break the TCP connection by RST.
        const RESET_TCP = 1 << 8;
        /// Close the TCP connection by FIN, now that SMC is done with it (CLOSE-1).
        const CLOSE_TCP = 1 << 9;
        /// No timer is needed any more.
        const STOP_TIMER = 1 << 10;
        /// Start the timer, or start it again, with [`CLOSE_TIMEOUT_US`] or what is configured.
        const START_CLOSE_TIMER = 1 << 11;
        /// As before, with [`ABORT_TIMEOUT_US`].
        const START_ABORT_TIMER = 1 << 12;
        /// Both sides are done: the own element may serve another connection (RMB-21).
        const REUSE_BUFFER = 1 << 13;
        /// The peer never said that it is done and might still write: withdraw its right to the
        /// own element (token, RKey) before the memory serves anything else (RMB-22). Its answer to
        /// the reset may be a late A.
        const WITHDRAW_BUFFER = 1 << 14;
    }
}

impl Actions {
    /// One by one, in the order in which they are to be done. As [`Actions::iter`], without asking
    /// for each action there is.
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
    /// What this side has said.
    sent: StateFlags,
    /// What the peer has said.
    seen: StateFlags,
    /// What the application wants said once all bytes are written: nothing, D or C (CLOSE-5).
    pending: StateFlags,
}

// D: this side writes no more. C: it has closed (CDC-36).
const DONE: StateFlags = StateFlags::SENDING_DONE;
const CLOSED: StateFlags = StateFlags::CLOSED;
const ABORT: StateFlags = StateFlags::ABORT;
const FAILED: Actions = Actions::PURGE.union(Actions::WAKE_READERS).union(Actions::WAKE_WRITERS);

impl Close {
    /// A connection that is not established yet.
    pub const fn new() -> Close {
        let none = StateFlags::empty();
        Close { state: State::Closed, sent: none, seen: none, pending: none }
    }

    /// The state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// The state flags of every control word sent now: what was said once is repeated (CDC-47).
    #[inline]
    pub const fn flags(&self) -> StateFlags {
        self.sent
    }

    /// What the peer has said so far.
    #[inline]
    pub const fn peer_flags(&self) -> StateFlags {
        self.seen
    }

    /// D or C if the application has asked for it and bytes are still to be written; otherwise
    /// empty. Report [`Event::Flushed`] when they are.
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
    /// except by the very word that says so (CLOSE-32, CDC-37), nor in Closed.
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
    pub fn on(&mut self, event: Event) -> Actions {
        let (next, actions) = self.step(event);
        *self = next;
        actions
    }

    /// The whole machine as a pure function.
    pub fn step(self, event: Event) -> (Close, Actions) {
        match event {
            Event::Established if self.state == State::Closed => {
                (Close { state: State::Active, ..Close::new() }, Actions::empty())
            }
            Event::Established => self.unmoved(),
            Event::ShutdownWrite { unsent } => self.shutdown_write(unsent),
            Event::Close { unread, unsent } => self.close(unread, unsent),
            Event::Flushed if self.pending.contains(CLOSED) => self.send_closed(),
            Event::Flushed if self.pending.contains(DONE) => self.say_done(),
            Event::Flushed => self.unmoved(),
            Event::Peer { flags, unsent } => self.peer(flags, unsent),
            Event::AbortDelivered if self.state == State::ProcessAbort => {
                self.end(Actions::CLOSE_TCP | Actions::REUSE_BUFFER)
            }
            Event::AbortDelivered => self.unmoved(),
            // CLOSE-21; a close that stalls comes to the same by `timeout`.
            Event::Abort => self.abort(Actions::REPORT_ABORTED),
            Event::TcpReset if self.sent.contains(CLOSED) => self.unmoved(),
            // Without an A before it (CLOSE-28); `fail` does nothing after one (CLOSE-29).
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

    /// The only way to Closed: the caller says what becomes of the buffer (CLOSE-38).
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

    /// All bytes are out: sends D (CLOSE-6).
    fn say_done(self) -> (Close, Actions) {
        let state = match self.state {
            State::Active => State::PeerCloseWait1,
            // In AppCloseWait1 (CLOSE-12).
            _ => State::AppCloseWait2,
        };
        let next = Close { state, sent: self.sent | DONE, pending: StateFlags::empty(), ..self };
        (next, Actions::SEND_DONE | Actions::WAKE_WRITERS)
    }

    /// All bytes are out: sends C (CLOSE-6).
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
        // Only the last word of the peer counts, which may abort as well (CLOSE-23, CLOSE-24, CLOSE-30).
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
            // Nothing may be said any more (CLOSE-27); the peer's C or A, or the timer, ends it.
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
            // The peer has said A and writes no more; it is only the answer that is stuck.
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
