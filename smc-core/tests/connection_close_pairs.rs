// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two close machines against each other, and one against the states of Linux: every order of
//! application calls and arriving flags.

use std::collections::HashSet;

use smc_core::connection::close::{Actions, Close, Event, State};
use smc_core::wire::cdc::StateFlags;

const D: StateFlags = StateFlags::SENDING_DONE;
const C: StateFlags = StateFlags::CLOSED;
const A: StateFlags = StateFlags::ABORT;

/// Sends and takes state flags.
trait Peer: Copy + Eq + std::hash::Hash + std::fmt::Debug {
    fn active() -> Self;
    fn is_closed(&self) -> bool;
    /// Possible next states after an application's call, with the resulting TCP reset, if any.
    fn application(&self) -> Vec<(Self, bool)>;
    fn peer(&self, flags: StateFlags) -> (Self, bool);
    fn tcp_reset(&self) -> (Self, bool);
    fn flags(&self) -> StateFlags;
    /// The application has closed, and everything is written.
    fn application_is_done(&self) -> bool;
    /// Whether only a timer can end the wait.
    fn waits_for_timer(&self) -> bool;
}

impl Peer for Close {
    fn active() -> Close {
        Close::new().step(Event::Established, false).0
    }

    fn is_closed(&self) -> bool {
        self.state() == State::Closed
    }

    fn application(&self) -> Vec<(Close, bool)> {
        let mut events = vec![(Event::Abort, false)];
        for unsent in [false, true] {
            events.push((Event::ShutdownWrite, unsent));
            events.push((Event::Close { unread: false }, unsent));
            events.push((Event::Close { unread: true }, unsent));
        }
        if !self.pending().is_empty() {
            events.push((Event::Flushed, false));
        }
        events.into_iter().map(|(event, unsent)| done(self.step(event, unsent))).collect()
    }

    fn peer(&self, flags: StateFlags) -> (Close, bool) {
        done(self.step(Event::Peer { flags }, false))
    }

    fn tcp_reset(&self) -> (Close, bool) {
        done(self.step(Event::TcpReset, false))
    }

    fn flags(&self) -> StateFlags {
        Close::flags(self)
    }

    fn application_is_done(&self) -> bool {
        self.is_closed() || Close::flags(self).intersects(C | A)
    }

    fn waits_for_timer(&self) -> bool {
        matches!(self.step(Event::Timeout, false), (next, _) if next != *self)
    }
}

/// Carries an abort out and says whether the other side's TCP gets a reset.
fn done((close, actions): (Close, Actions)) -> (Close, bool) {
    let reset = actions.contains(Actions::RESET_TCP);
    match actions.contains(Actions::SEND_ABORT) {
        true => (close.step(Event::AbortDelivered, false).0, reset),
        false => (close, reset),
    }
}

/// Both sides, the flags published but not seen yet, and TCP resets on their way.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Pair<P: Peer, Q: Peer> {
    ours: P,
    theirs: Q,
    to_ours: Vec<StateFlags>,
    to_theirs: Vec<StateFlags>,
    reset_to_ours: bool,
    reset_to_theirs: bool,
}

impl<P: Peer, Q: Peer> Pair<P, Q> {
    fn ours_became(&self, (next, reset): (P, bool)) -> Self {
        let mut pair = self.clone();
        if next.flags() != self.ours.flags() {
            pair.to_theirs.push(next.flags());
        }
        pair.ours = next;
        pair.reset_to_theirs |= reset;
        pair
    }

    fn theirs_became(&self, (next, reset): (Q, bool)) -> Self {
        let mut pair = self.clone();
        if next.flags() != self.theirs.flags() {
            pair.to_ours.push(next.flags());
        }
        pair.theirs = next;
        pair.reset_to_ours |= reset;
        pair
    }

    /// The possible events without an application. State flags may be missed when later flags
    /// follow.
    fn deliveries(&self) -> Vec<Self> {
        let mut next = Vec::new();
        for i in 0..self.to_ours.len() {
            let mut pair = self.clone();
            pair.to_ours.drain(..=i);
            next.push(pair.ours_became(self.ours.peer(self.to_ours[i])));
        }
        for i in 0..self.to_theirs.len() {
            let mut pair = self.clone();
            pair.to_theirs.drain(..=i);
            next.push(pair.theirs_became(self.theirs.peer(self.to_theirs[i])));
        }
        if self.reset_to_ours {
            let pair = Self { reset_to_ours: false, ..self.clone() };
            next.push(pair.ours_became(self.ours.tcp_reset()));
        }
        if self.reset_to_theirs {
            let pair = Self { reset_to_theirs: false, ..self.clone() };
            next.push(pair.theirs_became(self.theirs.tcp_reset()));
        }
        next
    }

    fn all_next(&self) -> Vec<Self> {
        let mut next = self.deliveries();
        next.extend(self.ours.application().into_iter().map(|to| self.ours_became(to)));
        next.extend(self.theirs.application().into_iter().map(|to| self.theirs_became(to)));
        next
    }
}

/// Calls `check` for every reachable pair.
fn explore<P: Peer, Q: Peer>(mut check: impl FnMut(&Pair<P, Q>)) -> usize {
    let start = Pair {
        ours: P::active(),
        theirs: Q::active(),
        to_ours: Vec::new(),
        to_theirs: Vec::new(),
        reset_to_ours: false,
        reset_to_theirs: false,
    };
    let mut seen = HashSet::from([start.clone()]);
    let mut work = vec![start];
    while let Some(pair) = work.pop() {
        check(&pair);
        for next in pair.all_next() {
            if seen.insert(next.clone()) {
                work.push(next);
            }
        }
    }
    seen.len()
}

// Shows: CDC-47, CLOSE-19, CLOSE-30, CLOSE-31.
#[test]
fn two_own_ends_close_without_a_timer_in_every_order() {
    let pairs = explore::<Close, Close>(|pair| {
        let quiet = pair.deliveries().is_empty();
        let done = pair.ours.application_is_done() && pair.theirs.application_is_done();
        if quiet && done {
            assert!(pair.ours.is_closed() && pair.theirs.is_closed(), "{pair:?}");
        }
    });
    assert!(pairs > 500, "only {pairs} pairs came about");
}

// Shows: RMB-21, CLOSE-32.
#[test]
fn an_element_serves_again_only_when_the_peer_says_nothing_more() {
    explore::<Close, Close>(|pair| {
        for flags in &pair.to_ours {
            let (next, actions) = pair.ours.step(Event::Peer { flags: *flags }, false);
            if actions.contains(Actions::REUSE_BUFFER) {
                assert_eq!(pair.to_ours.last(), Some(flags), "{pair:?} {next:?}");
                assert!(!pair.theirs.may_publish());
            }
        }
        if pair.ours.is_closed() {
            assert!(pair.to_ours.is_empty(), "{pair:?}: a store after the end");
            assert!(!pair.theirs.may_publish(), "{pair:?}");
        }
    });
}

/// Socket states of Linux, as visible to a peer (linux-interop appendix B). The model has no timers
/// and ignores TCP.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Linux {
    state: State,
    sent: u8,
    seen: u8,
}

impl Linux {
    fn to(self, state: State, sent: StateFlags) -> Linux {
        Linux { state, sent: self.sent | sent.bits(), ..self }
    }
}

impl Peer for Linux {
    fn active() -> Linux {
        Linux { state: State::Active, sent: 0, seen: 0 }
    }

    fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    fn application(&self) -> Vec<(Linux, bool)> {
        let closed = self.flags().contains(C);
        let after_c = self.seen & C.bits() != 0;
        let next = match self.state {
            State::Active => vec![
                self.to(State::PeerCloseWait1, D),
                self.to(State::PeerCloseWait1, C),
                // Unread data.
                self.to(State::PeerCloseWait1, A),
            ],
            State::PeerCloseWait1 | State::PeerCloseWait2
                if !closed && !self.flags().contains(A) =>
            {
                vec![self.to(self.state, C)]
            }
            State::AppFinCloseWait => vec![self.to(State::Closed, C)],
            State::AppCloseWait1 | State::AppCloseWait2 => {
                let end = if after_c { State::Closed } else { State::PeerFinCloseWait };
                let mut next = vec![self.to(end, C)];
                if self.state == State::AppCloseWait1 {
                    next.push(self.to(State::AppCloseWait2, D));
                }
                next
            }
            State::ProcessAbort => vec![self.to(State::Closed, A)],
            _ => vec![],
        };
        next.into_iter().map(|linux| (linux, false)).collect()
    }

    fn peer(&self, flags: StateFlags) -> (Linux, bool) {
        let over = self.flags().intersects(C | A);
        let state = match self.state {
            State::Closed | State::ProcessAbort => self.state,
            State::Active | State::AppCloseWait1 if flags.contains(A) => State::ProcessAbort,
            State::PeerCloseWait1 | State::PeerCloseWait2 if flags.contains(A) && !over => {
                State::ProcessAbort
            }
            _ if flags.contains(A) => State::Closed,
            State::Active => State::AppCloseWait1,
            State::PeerCloseWait1 | State::PeerCloseWait2 if flags.contains(C) => match over {
                true => State::Closed,
                false => State::AppFinCloseWait,
            },
            State::PeerCloseWait1 => State::PeerCloseWait2,
            State::PeerFinCloseWait if flags.contains(C) => State::Closed,
            other => other,
        };
        (Linux { state, seen: self.seen | flags.bits(), ..*self }, false)
    }

    fn tcp_reset(&self) -> (Linux, bool) {
        (*self, false)
    }

    fn flags(&self) -> StateFlags {
        StateFlags::from_bits_truncate(self.sent)
    }

    fn application_is_done(&self) -> bool {
        self.is_closed() || self.flags().intersects(C | A)
    }

    fn waits_for_timer(&self) -> bool {
        false
    }
}

#[test]
fn linux_never_keeps_us_longer_than_a_timer_nor_we_linux_at_all() {
    explore::<Close, Linux>(|pair| {
        let quiet = pair.deliveries().is_empty();
        let done = pair.ours.application_is_done() && pair.theirs.application_is_done();
        if quiet && done {
            assert!(pair.theirs.is_closed(), "Linux hangs: {pair:?}");
            assert!(pair.ours.is_closed() || pair.ours.waits_for_timer(), "{pair:?}");
            if !pair.ours.is_closed() {
                // Linux drops the A without an answer after sending only D.
                assert_eq!(pair.ours.state(), State::PeerAbortWait, "{pair:?}");
            }
        }
    });
}

/// The reachable states of one end, with a send queue emptied by other threads between any two
/// steps. Each state: the machine, whether the queue has bytes, and a thread's view of the queue
/// before its step.
fn with_a_queue(looks_before: bool) -> Vec<(Close, bool, Option<bool>)> {
    let start = (Close::active(), false, None);
    let (mut found, mut at) = (vec![start], 0);
    while let Some((close, held, seen)) = found.get(at).copied() {
        at += 1;
        let mut next = Vec::new();
        let mut on = |event, unsent, held: bool, seen| {
            let (to, actions) = close.step(event, unsent);
            next.push((to, held && !actions.contains(Actions::PURGE), seen));
        };
        for flags in [D, C, D | C, A] {
            on(Event::Peer { flags }, held, held, seen);
        }
        for event in [Event::ShutdownWrite, Event::Close { unread: false }] {
            match (looks_before, seen) {
                (true, None) => {}
                (true, Some(before)) => on(event, before, held, None),
                (false, _) => on(event, held, held, None),
            }
        }
        if held && !close.pending().is_empty() {
            on(Event::Flushed, false, false, seen);
        } else if held {
            next.push((close, false, seen));
        }
        if close.can_write() {
            next.push((close, true, seen));
        }
        if looks_before {
            next.push((close, held, Some(held)));
        }
        next.retain(|state| !found.contains(state));
        next.dedup();
        found.extend(next);
    }
    found
}

// Shows: CLOSE-5.
#[test]
fn an_end_that_waits_for_bytes_to_be_sent_has_some_in_every_order() {
    let stands = |looks_before: bool| {
        let mut states = with_a_queue(looks_before).into_iter();
        states.find(|(close, held, _)| !close.pending().is_empty() && !held)
    };
    assert_eq!(stands(false), None);
    // The search finds a thread looking before taking the lock.
    assert!(stands(true).is_some());
}
