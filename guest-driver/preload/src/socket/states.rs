// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The states of a socket, as one table: the next state for each state and event, and the actions
//! of the transition. Nothing here reads a descriptor, takes a lock or waits.
//!
//! ```text
//!     socket()                           accept()
//!         │                                 │
//! ┌───────▼───────┐  Connect         ┌──────▼──────┐
//! │  Unconnected  ├─────────────────►│  Undecided  │
//! └───────┬───────┘                  └──────┬──────┘
//!         │                                 │ Use, Close
//!         │                          ┌──────▼──────┐ Propose ┌─────────────┐
//!         │ Plain                    │  Deciding   ├────────►│  Proposing  │
//!         │                          └──┬───────┬──┘         └─┬─────────┬─┘
//!         │                    EndOnTcp │       │ Break        │ Break   │ EndOnSmc
//!         │                             │       │ ┌────────────┘         │
//! ┌───────▼───────┐◄────────────────────┘ ┌─────▼─▼─────┐         ┌──────▼──────┐
//! │      Tcp      │◄── EndOnTcp           │   Failed    │         │     Smc     │
//! └───────────────┘    (Proposing)        └─────────────┘         └──────┬──────┘
//!                                                                        │ HandOver
//!                                                                 ┌──────▼──────┐
//!                                                                 │   Relayed   │
//!                                                                 └─────────────┘
//! ```
//!
//! `Plain` moves Undecided to Tcp as well: a server sees at once that its client proposes nothing.
//! `Reset` is a `Break` by the peer. `Postpone` moves Deciding back to Undecided: a call of the
//! program was interrupted or must not wait, and only the program can go on with the handshake.
//!
//! `Forbid` moves Unconnected, Undecided and Deciding to a state of the same kind whose name ends
//! with `ForTcp`. From there on all goes the same way, but `Propose` is refused: a client proposes
//! nothing, and a server declines.
//!
//! The whole table. `-`: nothing happens, and the caller gets `None`. A state in its own row: the
//! state stays, without any action.
//!
//! | | Connect | Plain | Use | Forbid | Propose | Close | EndOnTcp | EndOnSmc | Break | Reset | Postpone | HandOver |
//! |---|---|---|---|---|---|---|---|---|---|---|---|---|
//! | Unconnected | Undecided | Tcp | - | UnconnectedForTcp | - | - | - | - | - | - | - | - |
//! | UnconnectedForTcp | Tcp | Tcp | - | UnconnectedForTcp | - | - | - | - | - | - | - | - |
//! | Undecided | - | Tcp | Deciding | UndecidedForTcp | - | DecidingForTcp | - | - | - | - | - | - |
//! | UndecidedForTcp | - | Tcp | DecidingForTcp | UndecidedForTcp | - | DecidingForTcp | - | - | - | - | - | - |
//! | Deciding | - | - | - | DecidingForTcp | Proposing | - | Tcp | - | Failed | Failed | Undecided | - |
//! | DecidingForTcp | - | - | - | DecidingForTcp | - | - | Tcp | - | Failed | Failed | UndecidedForTcp | - |
//! | Proposing | - | - | - | - | Proposing | - | Tcp | Smc | Failed | Failed | - | - |
//! | Smc | - | - | - | - | - | - | - | - | - | - | - | Relayed |
//! | Tcp | - | - | - | Tcp | - | - | - | - | - | - | - | - |
//! | Failed | - | - | - | - | - | - | - | - | - | - | - | - |
//! | Relayed | - | - | - | - | - | - | - | - | - | - | - | Relayed |

/// The carrier of a socket's connection, as far as calls of the program need to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketState {
    /// The socket is not connected. The kernel carries out all calls.
    Unconnected,
    /// TCP has connected the socket or is connecting it, and no thread has begun the handshake.
    Undecided,
    /// A thread does the handshake.
    Deciding,
    /// SMC.
    Smc,
    /// TCP. The kernel carries out all calls.
    Tcp,
    /// Nothing: the handshake failed and took the connection with it.
    Failed,
    /// Another process; the descriptor is a Unix socket. See `relay.rs`.
    Relayed,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum SocketStage {
    /// Not connected.
    Unconnected,
    /// Not connected, and the connection will stay on TCP.
    UnconnectedForTcp,
    /// Connected, or about to be; no thread has begun the handshake.
    Undecided,
    /// Like `Undecided`, and the connection stays on TCP.
    UndecidedForTcp,
    /// The handshake has begun, and may not end with SMC yet.
    Deciding,
    /// The handshake has begun, and must end with TCP.
    DecidingForTcp,
    /// The handshake may end with SMC.
    Proposing,
    /// SMC carries the connection.
    Smc,
    /// TCP carries the connection.
    Tcp,
    /// The handshake took the connection with it.
    Failed,
    /// Another process carries the connection.
    Relayed,
}

/// An event at a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketEvent {
    /// TCP has connected the socket, or is connecting it, and the client may propose SMC.
    Connect,
    /// The client of a connection does not propose SMC, and no handshake has begun.
    Plain,
    /// A call needs to know the carrier of the connection.
    Use,
    /// The connection has to stay on TCP, where only the kernel can serve it.
    Forbid,
    /// The handshake may end with SMC from now on.
    Propose,
    /// The program has closed a server's connection while the client waits for an answer.
    Close,
    /// The handshake has ended with TCP.
    EndOnTcp,
    /// The handshake has ended with SMC.
    EndOnSmc,
    /// The handshake has broken the connection.
    Break,
    /// The peer has reset TCP during the handshake.
    Reset,
    /// The handshake waits until the next call on the connection.
    Postpone,
    /// Another process carries the connection from now on.
    HandOver,
}

/// An action of a transition. The order of actions in a transition is the order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketAction {
    /// Stores the new state: from here on, calls of the program see it.
    Store,
    /// Begins the handshake.
    StartHandshake,
    /// Undoes the changes of `connect` to TCP's acknowledgements.
    RestoreAcks,
    /// Sends the bytes written by the program so far.
    SendEarly,
    /// Keeps the error for a call of the program.
    KeepError,
    /// Disconnects the TCP socket.
    Disconnect,
    /// Changes the registrations in epoll sets for the new state. Registrations on SMC need the
    /// stored state, so the state is stored meanwhile.
    MoveRegistrations,
    /// Wakes the threads that wait for the decision.
    Wake,
    /// Removes the descriptor from the table: the kernel carries out all calls.
    RemoveEntry,
}

/// The transition of an event in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketTransition {
    /// The new state.
    pub(crate) to: SocketStage,
    /// The actions, in the order of execution.
    pub(crate) actions: &'static [SocketAction],
}

/// The table. `None`: nothing happens.
pub(crate) const fn next(stage: SocketStage, event: SocketEvent) -> Option<SocketTransition> {
    use SocketAction::{
        Disconnect, KeepError, MoveRegistrations, RemoveEntry, RestoreAcks, SendEarly,
        StartHandshake, Store, Wake,
    };
    use SocketEvent as E;
    use SocketStage as S;
    let (to, actions): (S, &'static [SocketAction]) = match (stage, event) {
        (S::Unconnected, E::Connect) => (S::Undecided, &[MoveRegistrations, Store]),
        (S::UnconnectedForTcp, E::Connect) | (S::Unconnected | S::UnconnectedForTcp, E::Plain) => {
            (S::Tcp, &[Store, RemoveEntry])
        }
        (S::Undecided | S::UndecidedForTcp, E::Plain) => {
            (S::Tcp, &[MoveRegistrations, Store, Wake, RemoveEntry])
        }
        (S::Undecided, E::Use) => (S::Deciding, &[Store, StartHandshake]),
        (S::UndecidedForTcp, E::Use) | (S::Undecided | S::UndecidedForTcp, E::Close) => {
            (S::DecidingForTcp, &[Store, StartHandshake])
        }
        (S::Unconnected, E::Forbid) => (S::UnconnectedForTcp, &[Store]),
        (S::Undecided, E::Forbid) => (S::UndecidedForTcp, &[Store]),
        (S::Deciding, E::Forbid) => (S::DecidingForTcp, &[Store]),
        (S::UnconnectedForTcp | S::UndecidedForTcp | S::DecidingForTcp | S::Tcp, E::Forbid) => {
            (stage, &[])
        }
        (S::Deciding, E::Propose) => (S::Proposing, &[Store]),
        (S::Proposing, E::Propose) => (stage, &[]),
        (S::Deciding | S::DecidingForTcp | S::Proposing, E::EndOnTcp) => {
            (S::Tcp, &[RestoreAcks, SendEarly, MoveRegistrations, Store, Wake, RemoveEntry])
        }
        (S::Proposing, E::EndOnSmc) => (S::Smc, &[SendEarly, MoveRegistrations, Store, Wake]),
        (S::Deciding | S::DecidingForTcp | S::Proposing, E::Break) => {
            (S::Failed, &[KeepError, Disconnect, MoveRegistrations, Store, Wake])
        }
        (S::Deciding | S::DecidingForTcp | S::Proposing, E::Reset) => {
            (S::Failed, &[KeepError, MoveRegistrations, Store, Wake])
        }
        (S::Deciding, E::Postpone) => (S::Undecided, &[MoveRegistrations, Store, Wake]),
        (S::DecidingForTcp, E::Postpone) => (S::UndecidedForTcp, &[MoveRegistrations, Store, Wake]),
        (S::Smc, E::HandOver) => (S::Relayed, &[Store]),
        (S::Relayed, E::HandOver) => (stage, &[]),
        _ => return None,
    };
    Some(SocketTransition { to, actions })
}

impl SocketStage {
    /// Each row, in the order of the numbers.
    const ALL: [SocketStage; 11] = [
        SocketStage::Unconnected,
        SocketStage::UnconnectedForTcp,
        SocketStage::Undecided,
        SocketStage::UndecidedForTcp,
        SocketStage::Deciding,
        SocketStage::DecidingForTcp,
        SocketStage::Proposing,
        SocketStage::Smc,
        SocketStage::Tcp,
        SocketStage::Failed,
        SocketStage::Relayed,
    ];

    /// The row of a number.
    pub(crate) fn of(number: u32) -> SocketStage {
        // All numbers come from this type.
        Self::ALL.get(number as usize).copied().unwrap_or(SocketStage::Failed)
    }

    /// The row in which a socket begins.
    pub(crate) const fn first(state: SocketState) -> SocketStage {
        match state {
            SocketState::Unconnected => SocketStage::Unconnected,
            SocketState::Undecided => SocketStage::Undecided,
            SocketState::Deciding => SocketStage::Deciding,
            SocketState::Smc => SocketStage::Smc,
            SocketState::Tcp => SocketStage::Tcp,
            SocketState::Failed => SocketStage::Failed,
            SocketState::Relayed => SocketStage::Relayed,
        }
    }

    /// The state for the program's calls.
    pub(crate) const fn state(self) -> SocketState {
        match self {
            SocketStage::Unconnected | SocketStage::UnconnectedForTcp => SocketState::Unconnected,
            SocketStage::Undecided | SocketStage::UndecidedForTcp => SocketState::Undecided,
            SocketStage::Deciding | SocketStage::DecidingForTcp | SocketStage::Proposing => {
                SocketState::Deciding
            }
            SocketStage::Smc => SocketState::Smc,
            SocketStage::Tcp => SocketState::Tcp,
            SocketStage::Failed => SocketState::Failed,
            SocketStage::Relayed => SocketState::Relayed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const EVENTS: [SocketEvent; 12] = [
        SocketEvent::Connect,
        SocketEvent::Plain,
        SocketEvent::Use,
        SocketEvent::Forbid,
        SocketEvent::Propose,
        SocketEvent::Close,
        SocketEvent::EndOnTcp,
        SocketEvent::EndOnSmc,
        SocketEvent::Break,
        SocketEvent::Reset,
        SocketEvent::Postpone,
        SocketEvent::HandOver,
    ];

    /// The table in the documentation above: state and event to the new state, or `-`.
    fn documented() -> BTreeMap<(String, String), String> {
        let rows = include_str!("states.rs").lines().filter_map(|line| line.strip_prefix("//! |"));
        let mut rows = rows.map(|row| row.split('|').map(|cell| cell.trim().to_owned()));
        let events: Vec<String> = rows.next().unwrap().collect();
        rows.next();
        let mut table = BTreeMap::new();
        for row in rows {
            let row: Vec<String> = row.collect();
            for (event, to) in
                events.iter().zip(&row).skip(1).filter(|(event, _)| !event.is_empty())
            {
                table.insert((row[0].clone(), event.clone()), to.clone());
            }
        }
        table
    }

    #[test]
    fn each_event_does_in_each_state_what_the_documentation_says() {
        let documented = documented();
        assert_eq!(documented.len(), SocketStage::ALL.len() * EVENTS.len());
        for stage in SocketStage::ALL {
            for event in EVENTS {
                let to = next(stage, event).map_or("-".to_owned(), |t| format!("{:?}", t.to));
                let key = (format!("{stage:?}"), format!("{event:?}"));
                assert_eq!(Some(&to), documented.get(&key), "{key:?}");
            }
        }
    }

    /// Each pair of a state and an event with a transition.
    fn transitions() -> impl Iterator<Item = (SocketStage, SocketEvent, SocketTransition)> {
        let pairs = SocketStage::ALL.into_iter().flat_map(|s| EVENTS.map(|event| (s, event)));
        pairs.filter_map(|(stage, event)| Some((stage, event, next(stage, event)?)))
    }

    #[test]
    fn a_new_state_is_stored_once_and_an_old_one_needs_nothing() {
        for (stage, event, transition) in transitions() {
            let stored = transition.actions.iter().filter(|a| **a == SocketAction::Store).count();
            assert_eq!(stored, usize::from(transition.to != stage), "{stage:?} {event:?}");
            assert!(transition.to != stage || transition.actions.is_empty());
        }
    }

    #[test]
    fn whoever_waits_for_the_decision_is_woken_after_it_is_stored() {
        for (stage, event, SocketTransition { to, actions }) in transitions() {
            let at = |action| actions.iter().position(|a| *a == action);
            let waits = |state| matches!(state, SocketState::Undecided | SocketState::Deciding);
            let decided = waits(stage.state()) && !waits(to.state())
                || stage.state() == SocketState::Deciding && to.state() == SocketState::Undecided;
            assert_eq!(at(SocketAction::Wake).is_some(), decided, "{stage:?} {event:?}");
            assert!(!decided || at(SocketAction::Wake) > at(SocketAction::Store));
            // The bytes written so far go out before the program can write more.
            assert!(at(SocketAction::SendEarly) < at(SocketAction::Store) || !decided);
            assert!(at(SocketAction::MoveRegistrations) < at(SocketAction::Store) || !decided);
            // The kernel must have all before the library forgets the socket.
            assert_eq!(
                at(SocketAction::RemoveEntry).is_some(),
                to == SocketStage::Tcp && to != stage
            );
        }
    }

    #[test]
    fn a_connection_that_must_stay_on_tcp_never_comes_to_smc() {
        let mut reached = vec![
            SocketStage::UnconnectedForTcp,
            SocketStage::UndecidedForTcp,
            SocketStage::DecidingForTcp,
        ];
        let mut at = 0;
        while let Some(&stage) = reached.get(at) {
            for to in EVENTS.into_iter().filter_map(|event| Some(next(stage, event)?.to)) {
                if !reached.contains(&to) {
                    reached.push(to);
                }
            }
            at += 1;
        }
        assert!(!reached.contains(&SocketStage::Proposing) && !reached.contains(&SocketStage::Smc));
    }

    #[test]
    fn numbers_are_those_of_the_rows() {
        for stage in SocketStage::ALL {
            assert_eq!(SocketStage::of(stage as u32), stage);
        }
    }
}
