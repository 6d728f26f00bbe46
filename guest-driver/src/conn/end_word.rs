// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a connection's end, and of its directions on and off the ring, in one word.
//!
//! Each step of the end sets bits, and none clears one. So a thread having seen a step sees it for
//! good, regardless of other threads. Only the two bits of the ring are cleared, when both directions
//! come back to one; the upper half of the word counts these returns. The failure is the one part with
//! a choice: the first failure stays. A transition releases earlier stores of its thread, and a read of
//! the word acquires them: a thread seeing the peer's last word finds the bytes before it. The tests
//! below hold each transition in each state; `loom_tests` transitions of two threads at once.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};

use bitflags::bitflags;

/// The cause of failed calls, or of an end of data not sent by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Calls fail with `ConnectionReset`.
    Reset,
    /// Calls fail with `ConnectionAborted`.
    Aborted,
    /// The peer's process has ended without a word, or TCP was reset after the peer's last byte. Either
    /// is an end of data.
    Ended,
    /// Calls fail with `TimedOut`.
    TimedOut,
}

bitflags! {
    /// The flags of the word. At most one of the flags of [`Bits::FAILURE`] is set.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Bits: u32 {
        /// [`Failure::Reset`].
        const RESET = 1;
        /// [`Failure::Aborted`].
        const ABORTED = 1 << 1;
        /// [`Failure::Ended`].
        const ENDED = 1 << 2;
        /// A call has reported the failure, as SO_ERROR is reported once.
        const REPORTED = 1 << 3;
        /// One of the ends has aborted the connection, so unread bytes are discarded.
        const PURGED = 1 << 4;
        /// The peer has set "sending done" or "closed".
        const PEER_DONE = 1 << 5;
        /// The program reads no more.
        const READ_SHUT = 1 << 6;
        /// This end writes no more.
        const WRITE_SHUT = 1 << 7;
        /// Both ends have finished with the own buffer.
        const FINISHED = 1 << 8;
        /// This end does not write the peer's ring any more: its bytes go over TCP, or wait for it.
        const LEFT_RING = 1 << 9;
        /// The peer's bytes come over TCP.
        const READS_TCP = 1 << 10;
        /// [`Failure::TimedOut`].
        const TIMED_OUT = 1 << 11;
        const FAILURE = Self::RESET.bits()
            | Self::ABORTED.bits()
            | Self::ENDED.bits()
            | Self::TIMED_OUT.bits();
    }
}

/// One return of the connection to a ring, in the upper half of the word.
const RETURN: u32 = 1 << 16;

impl From<Failure> for Bits {
    fn from(failure: Failure) -> Bits {
        match failure {
            Failure::Reset => Bits::RESET,
            Failure::Aborted => Bits::ABORTED,
            Failure::Ended => Bits::ENDED,
            Failure::TimedOut => Bits::TIMED_OUT,
        }
    }
}

#[derive(Debug)]
pub(super) struct EndWord(AtomicU32);

impl EndWord {
    /// The word of a connection that has just begun.
    pub(super) fn new() -> EndWord {
        EndWord(AtomicU32::new(0))
    }

    #[inline]
    fn bits(&self) -> Bits {
        Bits::from_bits_retain(self.0.load(Ordering::Acquire))
    }

    /// Sets bits, and returns the former word.
    fn set(&self, bits: Bits) -> Bits {
        Bits::from_bits_retain(self.0.fetch_or(bits.bits(), Ordering::AcqRel))
    }

    /// Notes the cause of failing calls from now on. The first failure stays.
    pub(super) fn fail(&self, failure: Failure) {
        let first = |word: u32| {
            let bits = Bits::from_bits_retain(word);
            (!bits.intersects(Bits::FAILURE)).then(|| (bits | failure.into()).bits())
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, first);
    }

    /// The failure of the connection.
    #[inline]
    pub(super) fn failure(&self) -> Option<Failure> {
        let failure = self.bits() & Bits::FAILURE;
        if failure.is_empty() {
            None
        } else if failure.contains(Bits::RESET) {
            Some(Failure::Reset)
        } else if failure.contains(Bits::ABORTED) {
            Some(Failure::Aborted)
        } else if failure.contains(Bits::TIMED_OUT) {
            Some(Failure::TimedOut)
        } else {
            Some(Failure::Ended)
        }
    }

    /// Whether the connection has a failure.
    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.bits().intersects(Bits::FAILURE)
    }

    /// Notes the report of the failure by a call. `true`: none has reported it before.
    pub(super) fn report(&self) -> bool {
        !self.set(Bits::REPORTED).contains(Bits::REPORTED)
    }

    /// Notes that one of the ends has aborted the connection.
    pub(super) fn purge(&self) {
        self.set(Bits::PURGED);
    }

    /// Whether unread bytes are discarded.
    #[inline]
    pub(super) fn is_purged(&self) -> bool {
        self.bits().contains(Bits::PURGED)
    }

    /// Notes the peer's announcement of its end.
    pub(super) fn end_of_peer(&self) {
        self.set(Bits::PEER_DONE);
    }

    /// Whether the peer has announced its end.
    #[inline]
    pub(super) fn is_peer_done(&self) -> bool {
        self.bits().contains(Bits::PEER_DONE)
    }

    /// Notes that reads return end of data once the ring is empty.
    pub(super) fn shut_read(&self) {
        self.set(Bits::READ_SHUT);
    }

    /// Whether the program reads no more.
    #[inline]
    pub(super) fn is_read_shut(&self) -> bool {
        self.bits().contains(Bits::READ_SHUT)
    }

    /// Notes that this end writes no more.
    pub(super) fn shut_write(&self) {
        self.set(Bits::WRITE_SHUT);
    }

    /// Whether this end writes no more.
    #[inline]
    pub(super) fn is_write_shut(&self) -> bool {
        self.bits().contains(Bits::WRITE_SHUT)
    }

    /// Notes that this end does not write the peer's ring any more.
    pub(super) fn leave_ring(&self) {
        self.set(Bits::LEFT_RING);
    }

    /// Whether this end does not write the peer's ring any more.
    #[inline]
    pub(super) fn has_left_ring(&self) -> bool {
        self.bits().contains(Bits::LEFT_RING)
    }

    /// Notes that the peer's bytes come over TCP.
    pub(super) fn read_tcp(&self) {
        self.set(Bits::READS_TCP);
    }

    /// Whether the peer's bytes come over TCP.
    #[inline]
    pub(super) fn reads_tcp(&self) -> bool {
        self.bits().contains(Bits::READS_TCP)
    }

    /// Notes the start of a new ring for reads, and with `writes` also for writes.
    pub(super) fn return_to_ring(&self, writes: bool) {
        let left = if writes { Bits::LEFT_RING } else { Bits::empty() };
        let cleared = (Bits::READS_TCP | left).bits();
        let back = |word: u32| Some((word & !cleared).wrapping_add(RETURN));
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, back);
    }

    /// Number of returns of the connection to a ring.
    #[inline]
    pub(super) fn returns(&self) -> u32 {
        self.0.load(Ordering::Acquire) / RETURN
    }

    /// Notes that both ends have finished with the own buffer, now free for another connection.
    pub(super) fn finish(&self) {
        self.set(Bits::FINISHED);
    }

    /// Whether the own buffer may serve another connection.
    pub(super) fn is_finished(&self) -> bool {
        self.bits().contains(Bits::FINISHED)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Fail(Failure),
        Report,
        Purge,
        EndOfPeer,
        ShutRead,
        ShutWrite,
        Finish,
        LeaveRing,
        ReadTcp,
    }

    const EVENTS: [Event; 12] = [
        Event::Fail(Failure::Reset),
        Event::Fail(Failure::Aborted),
        Event::Fail(Failure::Ended),
        Event::Fail(Failure::TimedOut),
        Event::Report,
        Event::Purge,
        Event::EndOfPeer,
        Event::ShutRead,
        Event::ShutWrite,
        Event::Finish,
        Event::LeaveRing,
        Event::ReadTcp,
    ];

    /// The state of a word as its callers see it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Seen {
        failure: Option<Failure>,
        reported: bool,
        purged: bool,
        peer_done: bool,
        read_shut: bool,
        write_shut: bool,
        finished: bool,
        left_ring: bool,
        reads_tcp: bool,
    }

    /// Every state: each failure with each choice of the eight flags.
    fn states() -> Vec<Seen> {
        use Failure::{Aborted, Ended, Reset, TimedOut};
        let failures = [None, Some(Reset), Some(Aborted), Some(Ended), Some(TimedOut)];
        let flags = (0..256u32).map(|flags| move |at: u32| flags & (1 << at) != 0);
        flags
            .flat_map(|flag| {
                failures.map(|failure| Seen {
                    failure,
                    reported: flag(0),
                    purged: flag(1),
                    peer_done: flag(2),
                    read_shut: flag(3),
                    write_shut: flag(4),
                    finished: flag(5),
                    left_ring: flag(6),
                    reads_tcp: flag(7),
                })
            })
            .collect()
    }

    /// Carries an event out, and returns the result of [`EndWord::report`].
    fn carry_out(word: &EndWord, event: Event) -> Option<bool> {
        match event {
            Event::Fail(failure) => word.fail(failure),
            Event::Report => return Some(word.report()),
            Event::Purge => word.purge(),
            Event::EndOfPeer => word.end_of_peer(),
            Event::ShutRead => word.shut_read(),
            Event::ShutWrite => word.shut_write(),
            Event::Finish => word.finish(),
            Event::LeaveRing => word.leave_ring(),
            Event::ReadTcp => word.read_tcp(),
        }
        None
    }

    /// A word in this state, made by the events leading there.
    fn word_in(state: Seen) -> EndWord {
        let word = EndWord::new();
        if let Some(failure) = state.failure {
            word.fail(failure);
        }
        for (set, event) in [
            (state.reported, Event::Report),
            (state.purged, Event::Purge),
            (state.peer_done, Event::EndOfPeer),
            (state.read_shut, Event::ShutRead),
            (state.write_shut, Event::ShutWrite),
            (state.finished, Event::Finish),
            (state.left_ring, Event::LeaveRing),
            (state.reads_tcp, Event::ReadTcp),
        ] {
            if set {
                carry_out(&word, event);
            }
        }
        word
    }

    /// The state of the word; a report shows in the bits only.
    fn seen(word: &EndWord) -> Seen {
        assert_eq!(word.has_failed(), word.failure().is_some());
        Seen {
            failure: word.failure(),
            reported: word.bits().contains(Bits::REPORTED),
            purged: word.is_purged(),
            peer_done: word.is_peer_done(),
            read_shut: word.is_read_shut(),
            write_shut: word.is_write_shut(),
            finished: word.is_finished(),
            left_ring: word.has_left_ring(),
            reads_tcp: word.reads_tcp(),
        }
    }

    #[test]
    fn every_event_in_every_state_adds_what_it_says_and_takes_nothing_away() {
        assert_eq!(states().len(), 1280);
        for state in states() {
            for event in EVENTS {
                let word = word_in(state);
                assert_eq!(seen(&word), state);
                let mut expected = state;
                match event {
                    Event::Fail(failure) => {
                        expected.failure = Some(state.failure.unwrap_or(failure));
                    }
                    Event::Report => expected.reported = true,
                    Event::Purge => expected.purged = true,
                    Event::EndOfPeer => expected.peer_done = true,
                    Event::ShutRead => expected.read_shut = true,
                    Event::ShutWrite => expected.write_shut = true,
                    Event::Finish => expected.finished = true,
                    Event::LeaveRing => expected.left_ring = true,
                    Event::ReadTcp => expected.reads_tcp = true,
                }
                let first = carry_out(&word, event);
                assert_eq!(seen(&word), expected, "{event:?} in {state:?}");
                assert!(first.is_none_or(|first| first != state.reported), "{state:?}");
                assert_ne!(carry_out(&word, event), Some(true), "reported twice");
                assert_eq!(seen(&word), expected, "{event:?} again in {state:?}");
            }
        }
    }

    #[test]
    fn a_return_clears_the_bits_of_the_ring_and_no_others_and_is_counted() {
        for state in states() {
            for writes in [false, true] {
                let word = word_in(state);
                let before = word.returns();
                word.return_to_ring(writes);
                let left_ring = state.left_ring && !writes;
                assert_eq!(seen(&word), Seen { left_ring, reads_tcp: false, ..state });
                assert_eq!(word.returns(), before + 1);
            }
        }
    }

    #[test]
    fn the_count_of_returns_overflows_into_nothing() {
        let word = EndWord::new();
        word.end_of_peer();
        (0..=u32::from(u16::MAX)).for_each(|_| word.return_to_ring(true));
        assert_eq!((word.returns(), word.is_peer_done()), (0, true));
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test --manifest-path tests/loom/Cargo.toml --release`
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    use super::*;

    #[test]
    fn the_first_of_two_failures_stays_and_no_step_beside_it_is_lost() {
        loom::model(|| {
            let word = Arc::new(EndWord::new());
            let others = [Failure::Reset, Failure::Ended].map(|failure| {
                let word = word.clone();
                thread::spawn(move || {
                    word.fail(failure);
                    word.failure()
                })
            });
            word.end_of_peer();
            let [one, other] = others.map(|other| other.join().unwrap());
            assert!(one.is_some() && one == other, "{one:?}, {other:?}");
            assert_eq!(word.failure(), one);
            assert!(word.is_peer_done());
        });
    }

    #[test]
    fn whoever_sees_the_end_of_the_peer_sees_what_came_before_it() {
        loom::model(|| {
            let (word, bytes) = (Arc::new(EndWord::new()), Arc::new(AtomicU32::new(0)));
            let sender = {
                let (word, bytes) = (word.clone(), bytes.clone());
                thread::spawn(move || {
                    bytes.store(7, Ordering::Relaxed);
                    word.end_of_peer();
                })
            };
            // Another step in between does not break the chain.
            word.shut_read();
            if word.is_peer_done() {
                assert_eq!(bytes.load(Ordering::Relaxed), 7);
            }
            sender.join().unwrap();
        });
    }

    #[test]
    fn one_of_two_calls_reports_a_failure() {
        loom::model(|| {
            let word = Arc::new(EndWord::new());
            word.fail(Failure::Aborted);
            let other = {
                let word = word.clone();
                thread::spawn(move || word.report())
            };
            let mine = word.report();
            assert!(mine != other.join().unwrap());
        });
    }
}
