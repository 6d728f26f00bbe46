// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The whole close machine as a table: every possible value, every event.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::connection::close::{Actions, Close, Event, State};
use crate::wire::cdc::StateFlags;

const D: StateFlags = StateFlags::SENDING_DONE;
const C: StateFlags = StateFlags::CLOSED;
const A: StateFlags = StateFlags::ABORT;

/// Every distinct event, with its name in the table, and whether bytes are unsent.
pub fn table_events() -> Vec<(&'static str, Event, bool)> {
    let peer = |flags| Event::Peer { flags };
    let close = |unread| Event::Close { unread };
    let events = [
        ("established", Event::Established),
        ("shutdown(write)", Event::ShutdownWrite),
        ("shutdown(write), unsent", Event::ShutdownWrite),
        ("close", close(false)),
        ("close, unsent", close(false)),
        ("close, unread", close(true)),
        ("flushed", Event::Flushed),
        ("peer D", peer(D)),
        ("peer C", peer(C)),
        ("peer C, unsent", peer(C)),
        ("peer D+C", peer(D | C)),
        ("peer A", peer(A)),
        ("peer D+C+A", peer(D | C | A)),
        ("A delivered", Event::AbortDelivered),
        ("abort", Event::Abort),
        ("TCP reset", Event::TcpReset),
        ("timeout", Event::Timeout),
    ];
    events.map(|(name, event)| (name, event, name.ends_with(", unsent"))).to_vec()
}

/// Every reachable value of the machine. Values in state Closed count as one.
pub fn reachable() -> Vec<Close> {
    let key = |c: &Close| (c.state(), c.flags().bits(), c.peer_flags().bits(), c.pending().bits());
    let mut found = vec![Close::new()];
    let mut keys = BTreeSet::from([key(&Close::new())]);
    let mut next = 0;
    while let Some(close) = found.get(next).copied() {
        next += 1;
        for (_, event, unsent) in table_events() {
            let (to, _) = close.step(event, unsent);
            if to.state() != State::Closed && keys.insert(key(&to)) {
                found.push(to);
            }
        }
    }
    found.sort_by_key(key);
    found
}

/// The table as markdown, one section per state.
pub fn close_table() -> String {
    let mut out = String::from(HEAD);
    let mut state = None;
    for close in reachable() {
        if state != Some(close.state()) {
            state = Some(close.state());
            let _ = write!(out, "\n## {:?}\n", close.state());
        }
        if close.state() != State::Closed {
            let _ = write!(
                out,
                "\nsent {}, seen {}{}\n",
                flags(close.flags()),
                flags(close.peer_flags()),
                match close.pending() {
                    none if none.is_empty() => String::new(),
                    pending => format!(", pending {}", flags(pending)),
                }
            );
        }
        out.push_str("\n| event | next | actions |\n|---|---|---|\n");
        let mut ignored = Vec::new();
        for (name, event, unsent) in table_events() {
            let (next, actions) = close.step(event, unsent);
            if next == close && actions.is_empty() {
                ignored.push(name);
                continue;
            }
            let _ = writeln!(out, "| {name} | {} | {} |", target(&close, &next), list(actions));
        }
        let _ = write!(out, "\nwithout effect: {}\n", ignored.join("; "));
    }
    out
}

const HEAD: &str = "\
# Close states

Generated from `smc_core::connection::close` by the test `the_table_is_up_to_date`; edit the code, not this file.

RFC 7609 section 4.8, Figures 22 and 23. A value is the state with what this side has *sent* and *seen* so far (D: done writing, C:
closed, A: aborted) and with what is *pending* until all bytes are written. Every value that can be reached is listed, with every event;
actions are done from left to right. \"unsent\" and \"unread\" mean that such bytes exist.
";

fn flags(flags: StateFlags) -> String {
    if flags.is_empty() {
        return "-".into();
    }
    let names = [(D, "D"), (C, "C"), (A, "A")];
    names.iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, name)| *name).collect()
}

fn target(from: &Close, to: &Close) -> String {
    if to.state() == State::Closed {
        return "**Closed**".into();
    }
    let mut text = match to.state() == from.state() {
        true => String::from("same"),
        false => format!("**{:?}**", to.state()),
    };
    for (name, before, after) in [
        ("sent", from.flags(), to.flags()),
        ("seen", from.peer_flags(), to.peer_flags()),
        ("pending", from.pending(), to.pending()),
    ] {
        if before != after {
            let _ = write!(text, ", {name} {}", flags(after));
        }
    }
    text
}

fn list(actions: Actions) -> String {
    let names = actions.iter_names().map(|(name, _)| name.to_lowercase().replace('_', " "));
    names.collect::<Vec<_>>().join(", ")
}
