// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The close machine: the whole table, the rules for every entry, and the sequences of RFC 7609
//! section 4.8.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use smc_core::connection::close::{Actions, Close, Event, State};
use smc_core::testing::{close_table, reachable, table_events};
use smc_core::wire::cdc::StateFlags;

const D: StateFlags = StateFlags::SENDING_DONE;
const C: StateFlags = StateFlags::CLOSED;
const A: StateFlags = StateFlags::ABORT;
const DC: StateFlags = StateFlags::SENDING_DONE.union(StateFlags::CLOSED);

/// An event, and whether bytes are unsent.
type Step = (Event, bool);

const CLOSE: Step = (Event::Close { unread: false }, false);
const CLOSE_UNSENT: Step = (Event::Close { unread: false }, true);
const CLOSE_UNREAD: Event = Event::Close { unread: true };
const SHUTDOWN: Step = (Event::ShutdownWrite, false);
const SHUTDOWN_UNSENT: Step = (Event::ShutdownWrite, true);
const FLUSHED: Step = (Event::Flushed, false);
const ABORTED: Step = (Event::Abort, false);
const TCP_RESET: Step = (Event::TcpReset, false);

fn peer(flags: StateFlags) -> Step {
    (Event::Peer { flags }, false)
}

/// Walks from Active through `events`; returns the final state and the actions of the last event.
fn walk(events: &[Step]) -> (Close, Actions) {
    let mut close = Close::new();
    close.on(Event::Established, false);
    let mut actions = Actions::empty();
    for (event, unsent) in events {
        actions = close.on(*event, *unsent);
    }
    (close, actions)
}

fn state(events: &[Step]) -> State {
    walk(events).0.state()
}

fn every_entry(mut check: impl FnMut(Close, Event, Close, Actions)) {
    for close in reachable() {
        for (_, event, unsent) in table_events() {
            let (next, actions) = close.step(event, unsent);
            check(close, event, next, actions);
        }
    }
}

// Shows: CDC-36, CLOSE-2, CLOSE-3.
#[test]
fn the_table_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/connection/close_table.md");
    let table = close_table();
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(path, &table).unwrap();
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == table,
        "close_table.md differs from the code; UPDATE_TABLES=1 cargo test writes it anew"
    );
}

// ---- rules for every entry

// Shows: CLOSE-2.
#[test]
fn all_ten_states_can_be_reached() {
    for state in State::ALL {
        assert!(reachable().iter().any(|close| close.state() == state), "{state:?}");
    }
}

// Shows: CDC-37, CLOSE-32.
#[test]
fn nothing_is_said_after_an_own_c_or_a() {
    every_entry(|from, event, to, actions| {
        let sends = Actions::SEND_DONE | Actions::SEND_CLOSED | Actions::SEND_ABORT;
        assert!(actions.intersection(sends).iter().count() <= 1, "{from:?} {event:?}");
        if from.flags().intersects(C | A) && from.state() != State::Closed {
            assert!(!actions.intersects(sends), "{from:?} {event:?}");
            assert!(!from.may_publish() && !to.may_publish());
        }
    });
}

// Shows: CDC-8.
#[test]
fn flags_go_on_by_an_action_and_never_off() {
    every_entry(|from, event, to, actions| {
        if event == Event::Established {
            return;
        }
        assert!(to.flags().contains(from.flags()), "{from:?} {event:?}");
        assert!(to.peer_flags().contains(from.peer_flags()), "{from:?} {event:?}");
        let new = to.flags() - from.flags();
        assert_eq!(new.contains(D), actions.contains(Actions::SEND_DONE));
        assert_eq!(new.contains(C), actions.contains(Actions::SEND_CLOSED));
        assert_eq!(new.contains(A), actions.contains(Actions::SEND_ABORT));
    });
}

// Shows: CDC-47.
#[test]
fn repeated_flags_change_nothing() {
    every_entry(|_, event, to, _| {
        if let Event::Peer { .. } = event {
            let old = Event::Peer { flags: to.peer_flags() };
            assert_eq!(to.step(old, true), (to, Actions::empty()), "{to:?}");
        }
    });
}

// Shows: RMB-14, RMB-21, CLOSE-14, CLOSE-38.
#[test]
fn the_element_is_given_back_exactly_once_and_only_at_the_end() {
    let back = Actions::REUSE_BUFFER | Actions::WITHDRAW_BUFFER;
    every_entry(|from, event, to, actions| {
        let ends = to.state() == State::Closed && from.state() != State::Closed;
        let times = actions.intersection(back).iter().count();
        assert_eq!(times, usize::from(ends), "{from:?} {event:?}");
        assert_eq!(actions.contains(Actions::STOP_TIMER), ends);
        if actions.contains(Actions::REUSE_BUFFER) {
            assert!(to.peer_flags().intersects(C | A), "{from:?} {event:?}: the peer may write");
            assert!(to.flags().intersects(C | A), "{from:?} {event:?}: the peer was told nothing");
        }
    });
}

// Shows: RMB-22, CLOSE-20, CLOSE-25, CLOSE-39.
#[test]
fn no_state_without_an_application_lasts_for_ever() {
    for close in reachable() {
        if close.flags().intersects(C | A) || close.pending().contains(C) {
            let (next, _) = close.step(Event::Timeout, false);
            let (last, _) = next.step(Event::Timeout, false);
            assert_eq!(last.state(), State::Closed, "{close:?}");
        } else {
            assert_eq!(close.step(Event::Timeout, false), (close, Actions::empty()));
        }
    }
    let starts = Actions::START_CLOSE_TIMER | Actions::START_ABORT_TIMER;
    every_entry(|from, event, to, actions| {
        let waits = |c: Close| {
            (c.flags().intersects(C | A) || c.pending().contains(C)) && c.state() != State::Closed
        };
        let new = to.state() != from.state() && matches!(to.state(), State::PeerAbortWait);
        if (waits(to) && !waits(from)) || new {
            assert!(actions.intersects(starts), "{from:?} {event:?} starts no timer");
        }
    });
}

// Shows: CLOSE-22, CLOSE-27, SOCK-20.
#[test]
fn an_abort_in_any_state_before_c_sends_a() {
    for close in reachable() {
        let over =
            matches!(close.state(), State::Closed | State::PeerAbortWait | State::ProcessAbort);
        let (next, actions) = close.step(Event::Abort, false);
        if over {
            assert_eq!((next, actions), (close, Actions::empty()));
        } else if close.flags().contains(C) {
            assert_eq!((next, actions), (close, Actions::RESET_TCP));
        } else {
            assert!(actions.contains(
                Actions::SEND_ABORT | Actions::RESET_TCP | Actions::PURGE | Actions::REPORT_ABORTED
            ));
            let to =
                if close.peer_flags().contains(C) { State::Closed } else { State::PeerAbortWait };
            assert_eq!(next.state(), to);
        }
    }
}

// Shows: CLOSE-4, CLOSE-41.
#[test]
fn unread_bytes_at_close_abort_in_every_state_with_an_open_read_side() {
    for close in reachable() {
        let over =
            matches!(close.state(), State::Closed | State::PeerAbortWait | State::ProcessAbort);
        if !over && !close.flags().union(close.pending()).contains(C) {
            assert!(close.step(CLOSE_UNREAD, false).1.contains(Actions::SEND_ABORT), "{close:?}");
        }
    }
}

// Shows: CLOSE-3, CLOSE-23, CLOSE-25.
#[test]
fn closed_and_aborted_connections_take_no_events() {
    every_entry(|from, event, to, actions| match (from.state(), event) {
        (State::Closed, Event::Established) => assert_eq!(to.state(), State::Active),
        (State::Closed, _) => assert_eq!((to, actions), (from, Actions::empty())),
        (State::ProcessAbort, Event::AbortDelivered | Event::Timeout) => {
            assert_eq!(to.state(), State::Closed);
        }
        (State::ProcessAbort, _) => assert_eq!((to, actions), (from, Actions::empty())),
        (State::PeerAbortWait, Event::Peer { flags }) if flags.intersects(C | A) => {
            assert_eq!(to.state(), State::Closed);
        }
        (State::PeerAbortWait, Event::Timeout) => {
            assert!(to.state() == State::Closed && actions.contains(Actions::WITHDRAW_BUFFER));
        }
        (State::PeerAbortWait, _) => {
            assert_eq!((to.state(), actions), (State::PeerAbortWait, Actions::empty()));
        }
        _ => {}
    });
}

// Shows: CLOSE-3.
#[test]
fn a_closed_machine_can_serve_again() {
    let (mut close, _) = walk(&[CLOSE, peer(C)]);
    close.on(Event::Established, false);
    assert_eq!((close.flags(), close.peer_flags()), (StateFlags::empty(), StateFlags::empty()));
    assert!(close.can_write() && close.may_publish() && !close.peer_done());
}

// ---- the walks of section 4.8.1

// Shows: CDC-36, CLOSE-6, CLOSE-7, CLOSE-17.
#[test]
fn active_close() {
    let (close, actions) = walk(&[CLOSE]);
    assert_eq!((close.state(), close.flags()), (State::PeerCloseWait1, C));
    assert!(actions.contains(Actions::SEND_CLOSED | Actions::START_CLOSE_TIMER));
    let (close, actions) = walk(&[SHUTDOWN]);
    assert_eq!((close.state(), close.flags()), (State::PeerCloseWait1, D));
    assert!(actions.contains(Actions::SEND_DONE) && !close.can_write());
    let (close, actions) = walk(&[SHUTDOWN, peer(D)]);
    assert_eq!(close.state(), State::PeerCloseWait2);
    assert!(actions.contains(Actions::WAKE_READERS) && close.peer_done());
}

// Shows: CLOSE-1, CLOSE-8, CLOSE-9.
#[test]
fn active_close_ends_with_the_peers_c() {
    for events in [&[CLOSE, peer(C)][..], &[CLOSE, peer(D), peer(DC)], &[SHUTDOWN, CLOSE, peer(C)]]
    {
        let (close, actions) = walk(events);
        assert_eq!(close.state(), State::Closed);
        assert!(actions.contains(Actions::REUSE_BUFFER | Actions::CLOSE_TCP | Actions::STOP_TIMER));
    }
    assert_eq!(state(&[SHUTDOWN, peer(C)]), State::AppFinCloseWait);
    assert_eq!(state(&[SHUTDOWN, peer(D), peer(C)]), State::AppFinCloseWait);
    let (close, actions) = walk(&[SHUTDOWN, peer(C), CLOSE]);
    assert_eq!((close.state(), close.flags()), (State::Closed, DC));
    assert!(actions.contains(Actions::SEND_CLOSED | Actions::REUSE_BUFFER));
}

// Shows: CLOSE-40.
#[test]
fn close_after_shutdown_sends_c_and_keeps_the_state() {
    for (events, expected) in [
        (&[SHUTDOWN, CLOSE][..], State::PeerCloseWait1),
        (&[SHUTDOWN, peer(D), CLOSE], State::PeerCloseWait2),
    ] {
        let (close, actions) = walk(events);
        assert_eq!((close.state(), close.flags()), (expected, DC));
        assert!(actions.contains(Actions::SEND_CLOSED | Actions::START_CLOSE_TIMER));
    }
}

// Shows: CDC-36, CLOSE-10, CLOSE-12, CLOSE-13, CLOSE-14, CLOSE-15, CLOSE-43.
#[test]
fn passive_close() {
    for flags in [D, C, DC] {
        let (close, actions) = walk(&[peer(flags)]);
        assert_eq!(close.state(), State::AppCloseWait1);
        assert!(actions.contains(Actions::WAKE_READERS));
        assert_eq!(close.can_write(), flags == D);
    }
    assert_eq!(state(&[peer(D), SHUTDOWN]), State::AppCloseWait2);
    assert_eq!(state(&[peer(D), CLOSE]), State::PeerFinCloseWait);
    assert_eq!(state(&[peer(D), SHUTDOWN, CLOSE]), State::PeerFinCloseWait);
    assert_eq!(state(&[peer(C), CLOSE]), State::Closed);
    assert_eq!(state(&[peer(C), SHUTDOWN, CLOSE]), State::Closed);
    assert_eq!(state(&[peer(D), peer(C), CLOSE]), State::Closed);
    assert_eq!(state(&[peer(D), CLOSE, peer(DC)]), State::Closed);
}

// Shows: CLOSE-5.
#[test]
fn a_close_waits_for_unsent_bytes() {
    let (close, actions) = walk(&[CLOSE_UNSENT]);
    assert_eq!((close.state(), close.pending()), (State::Active, C));
    assert!(!actions.intersects(Actions::SEND_CLOSED) && close.may_publish() && !close.can_write());
    let (close, actions) = walk(&[CLOSE_UNSENT, FLUSHED]);
    assert_eq!((close.state(), close.flags()), (State::PeerCloseWait1, C));
    assert!(actions.contains(Actions::SEND_CLOSED));
    let (close, _) = walk(&[SHUTDOWN_UNSENT, FLUSHED]);
    assert_eq!((close.state(), close.flags()), (State::PeerCloseWait1, D));
    let (close, _) = walk(&[SHUTDOWN_UNSENT, CLOSE_UNSENT, FLUSHED]);
    assert_eq!((close.state(), close.flags()), (State::PeerCloseWait1, C));
    assert_eq!(state(&[peer(D), CLOSE_UNSENT, FLUSHED]), State::PeerFinCloseWait);
    assert_eq!(state(&[CLOSE_UNSENT, peer(D), FLUSHED]), State::PeerFinCloseWait);
    assert_eq!(state(&[SHUTDOWN_UNSENT, peer(D), FLUSHED]), State::AppCloseWait2);
}

// Shows: CLOSE-11.
#[test]
fn the_peers_c_with_bytes_unsent_is_a_reset() {
    let unsent = (Event::Peer { flags: C }, true);
    for events in [
        &[unsent][..],
        &[CLOSE_UNSENT, peer(C)],
        &[SHUTDOWN_UNSENT, peer(C)],
        &[peer(D), CLOSE_UNSENT, peer(C)],
        &[peer(C), CLOSE_UNSENT],
        &[peer(C), SHUTDOWN_UNSENT],
    ] {
        let (close, actions) = walk(events);
        assert_eq!(close.state(), State::Closed, "{events:?}: the peer's C was seen");
        let reset = Actions::SEND_ABORT | Actions::REPORT_RESET | Actions::PURGE;
        assert!(actions.contains(reset), "{events:?}");
    }
}

// Shows: CLOSE-20, CLOSE-39.
#[test]
fn half_closes_are_not_timed_and_full_ones_are() {
    for half in [&[SHUTDOWN][..], &[SHUTDOWN, peer(D)], &[peer(D)], &[peer(C), SHUTDOWN]] {
        let (close, actions) = walk(half);
        assert!(!actions.intersects(Actions::START_CLOSE_TIMER));
        assert_eq!(close.step(Event::Timeout, false), (close, Actions::empty()));
    }
    for full in [&[CLOSE][..], &[SHUTDOWN, peer(D), CLOSE], &[peer(D), CLOSE]] {
        let (close, actions) = walk(full);
        assert!(actions.contains(Actions::START_CLOSE_TIMER));
        let (last, actions) = close.step(Event::Timeout, false);
        assert_eq!(last.state(), State::Closed);
        // The peer may still write: the element cannot simply serve again.
        assert_eq!(actions, Actions::RESET_TCP | Actions::WITHDRAW_BUFFER | Actions::STOP_TIMER);
    }
}

// Shows: CLOSE-21.
#[test]
fn a_stalled_flush_becomes_an_abort() {
    let (close, actions) = walk(&[CLOSE_UNSENT, (Event::Timeout, false)]);
    assert_eq!(close.state(), State::PeerAbortWait);
    assert!(
        actions.contains(Actions::SEND_ABORT | Actions::RESET_TCP | Actions::START_ABORT_TIMER)
    );
}

// ---- the walks of section 4.8.2

// Shows: CLOSE-21, CLOSE-22, CLOSE-23, CLOSE-24.
#[test]
fn active_abort_waits_for_the_peers_a() {
    let (close, _) = walk(&[ABORTED]);
    assert_eq!((close.state(), close.flags()), (State::PeerAbortWait, A));
    let (close, actions) = walk(&[ABORTED, peer(A)]);
    assert_eq!(close.state(), State::Closed);
    assert_eq!(actions, Actions::REUSE_BUFFER | Actions::STOP_TIMER);
    assert_eq!(state(&[ABORTED, peer(D)]), State::PeerAbortWait);
}

// Shows: CDC-36, CLOSE-26, SOCK-20.
#[test]
fn passive_abort_answers_and_ends() {
    for before in [&[][..], &[SHUTDOWN], &[SHUTDOWN, peer(D)], &[peer(D)], &[peer(C), SHUTDOWN]] {
        let mut events = before.to_vec();
        events.push(peer(A));
        let (close, actions) = walk(&events);
        assert_eq!(close.state(), State::ProcessAbort);
        assert!(actions.contains(Actions::SEND_ABORT | Actions::REPORT_RESET | Actions::PURGE));
        events.push((Event::AbortDelivered, false));
        let (close, actions) = walk(&events);
        assert_eq!(close.state(), State::Closed);
        assert!(actions.contains(Actions::REUSE_BUFFER | Actions::CLOSE_TCP));
    }
}

// Shows: CLOSE-42.
#[test]
fn an_a_after_the_own_c_is_not_answered() {
    for before in [&[CLOSE][..], &[SHUTDOWN, CLOSE], &[peer(D), CLOSE]] {
        let mut events = before.to_vec();
        events.push(peer(A));
        let (close, actions) = walk(&events);
        assert_eq!(close.state(), State::Closed);
        assert!(!actions.intersects(Actions::SEND_ABORT));
        assert!(actions.contains(Actions::REPORT_RESET | Actions::PURGE | Actions::REUSE_BUFFER));
    }
}

// Shows: CLOSE-42.
#[test]
fn who_has_the_peers_c_waits_for_no_a() {
    let (close, actions) = walk(&[peer(C), ABORTED]);
    assert_eq!(close.state(), State::Closed);
    assert!(actions.contains(Actions::SEND_ABORT | Actions::REUSE_BUFFER));
    // The C crosses the A.
    assert_eq!(state(&[ABORTED, peer(C)]), State::Closed);
}

// Shows: CLOSE-21, CLOSE-28, CLOSE-29, CLOSE-33.
#[test]
fn a_tcp_reset_starts_an_abort_unless_the_peer_has_said_so() {
    let (close, actions) = walk(&[TCP_RESET]);
    assert_eq!(close.state(), State::PeerAbortWait);
    assert!(actions.contains(Actions::SEND_ABORT | Actions::REPORT_RESET));
    assert!(!actions.intersects(Actions::RESET_TCP));
    let (close, actions) = walk(&[peer(A), TCP_RESET]);
    assert_eq!((close.state(), actions), (State::ProcessAbort, Actions::empty()));
    let (close, actions) = walk(&[ABORTED, TCP_RESET]);
    assert_eq!((close.state(), actions), (State::PeerAbortWait, Actions::empty()));
    // After the own C there is nothing to say; the wait goes on.
    let (close, actions) = walk(&[CLOSE, TCP_RESET]);
    assert_eq!((close.state(), actions), (State::PeerCloseWait1, Actions::empty()));
    // A closed peer with an expired connection gets an abort; this end does not wait for the peer.
    let (close, actions) = walk(&[peer(C), TCP_RESET]);
    assert_eq!(close.state(), State::Closed);
    assert!(actions.contains(Actions::SEND_ABORT | Actions::REPORT_RESET | Actions::REUSE_BUFFER));
}

// Shows: CLOSE-1.
#[test]
fn actions_come_in_the_order_in_which_they_are_done() {
    let (_, actions) = walk(&[peer(A)]);
    let order: Vec<_> = actions.iter().collect();
    let index = |action| order.iter().position(|a| *a == action).unwrap();
    assert!(index(Actions::PURGE) < index(Actions::SEND_ABORT));
    assert!(index(Actions::SEND_ABORT) < index(Actions::WAKE_READERS));
    let (_, actions) = walk(&[peer(C), CLOSE]);
    let order: Vec<_> = actions.iter().collect();
    assert_eq!(order.last(), Some(&Actions::REUSE_BUFFER));
}
