// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc stat connections --watch` on a terminal: keys change the view.
//!
//! A key has the effect of an option on the command line, so keys show nothing beyond the options.

use std::collections::BTreeSet;
use std::time::Duration;

use super::filter::Filter;
use super::processes::Processes;
use super::tables::{self, View};
use super::{columns, sums};
use crate::output;

/// Columns for sorting by a key, in the order of the key.
const SORTS: [&str; 6] = ["sent", "received", "unread", "process", "peer", "reason"];

/// The choice of connections and view: at first given by the options.
#[derive(Clone, Debug, Default)]
pub(super) struct Choice {
    pub(super) filter: Filter,
    pub(super) view: View,
}

impl Choice {
    /// Executes a key. `false`: the view ends.
    pub(super) fn press(&mut self, key: u8, now: &Processes) -> bool {
        match key {
            b's' => self.next_sort(),
            b'v' => self.view.by = self.view.by.next(),
            b'c' => self.filter.next_carrier(),
            b'r' => self.next_reason(now),
            // Control-D. The terminal makes a signal of Control-C.
            b'q' | 4 => return false,
            _ => {}
        }
        true
    }

    fn next_sort(&mut self) {
        let now = self.view.sort.map(columns::Column::name);
        let at = now.and_then(|now| SORTS.iter().position(|name| *name == now));
        let next = SORTS.get(at.map_or(0, |at| at + 1));
        self.view.sort = next.and_then(|name| columns::find(name).ok());
    }

    /// The next of the present reasons; after the last one, all.
    fn next_reason(&mut self, now: &Processes) {
        let connections = now.list.iter().flat_map(|process| &process.connections);
        let reasons = connections.filter_map(|connection| connection.reason.as_ref());
        let names: BTreeSet<&str> = reasons.map(|reason| reason.name.as_str()).collect();
        let old = self.filter.reason.take();
        let next = names.into_iter().find(|name| old.as_deref().is_none_or(|old| *name > old));
        self.filter.reason = next.map(str::to_owned);
    }

    fn keys(&self) -> String {
        let sort = self.view.sort.map_or("none", columns::Column::name);
        let reason = self.filter.reason.as_deref().unwrap_or("all");
        format!(
            "q quit  s sort: {sort}  v lines: {}  c carrier: {}  r reason: {}\n",
            self.view.by.name(),
            self.filter.carrier_name(),
            super::table::printable(reason),
        )
    }
}

/// A page: the sum, the help for the keys, and the chosen lines.
pub(super) fn page(
    processes: &Processes,
    before: Option<(&Processes, Duration)>,
    choice: &Choice,
    room: Option<usize>,
) -> String {
    let mut chosen = processes.clone();
    choice.filter.apply(&mut chosen);
    let rows = tables::rows(&chosen, before);
    let head = sums::of_all(&rows, chosen.list.len()) + &choice.keys();
    let head = room.map_or(head.clone(), |room| output::wrapped_at(&head, room));
    let body = if chosen.list.is_empty() && !processes.list.is_empty() {
        "No connection fits. Press c or r for others.\n".to_owned()
    } else {
        tables::connections(&chosen, before, &choice.view, room)
    };
    format!("{head}\n{body}")
}

#[cfg(test)]
mod tests {
    use guest_driver::statistics::{Connection, Process, Reason};

    use super::*;
    use crate::stat::sums::By;

    fn processes(sent: u64) -> Processes {
        let connection = |kind: &str, peer: &str, reason: Option<&str>| Connection {
            kind: kind.into(),
            state: "Active".into(),
            local: "192.168.100.200:65535".parse().ok(),
            peer: peer.parse().ok(),
            reason: reason.map(|name| Reason {
                name: name.into(),
                side: "peer".into(),
                says: format!("because of {name}, which is explained in a sentence that is long"),
                ..Reason::default()
            }),
            sent: if reason.is_some() { 0 } else { sent },
            received: if reason.is_some() { 0 } else { 3 * sent },
            uncounted: reason.is_some(),
            ..Connection::default()
        };
        let of = |pid, program: &str, connections| Process {
            pid,
            program: program.into(),
            connections,
            ..Process::default()
        };
        let long = "[2001:db8:1111:2222:3333:4444:5555:6666]:65535";
        let list = vec![
            of(7, "nginx", vec![connection("SMC-D v2.1", "10.0.0.9:80", None)]),
            of(
                4_194_304,
                "redis-server-of-a-long-name",
                vec![
                    connection("SMC-R v2.1", "10.0.0.9:81", None),
                    connection("TCP", long, Some("PEERNOSMC")),
                    connection("TCP", "10.0.0.8:1", Some("NOSMCDEV")),
                ],
            ),
        ];
        Processes { list, ..Processes::default() }
    }

    fn pressed(keys: &[u8]) -> Choice {
        let mut choice = Choice::default();
        keys.iter().for_each(|key| assert!(choice.press(*key, &processes(0)), "{key}"));
        choice
    }

    fn shown(choice: &Choice, room: usize) -> String {
        let before = processes(0);
        let before = Some((&before, Duration::from_secs(2)));
        let page = page(&processes(4 << 20), before, choice, Some(room));
        for line in page.lines() {
            assert!(line.chars().count() <= room, "{room}: {line:?} in\n{page}");
        }
        page
    }

    #[test]
    fn a_page_has_sums_and_keys_and_fits_80_and_160_columns() {
        for keys in [&b""[..], b"v", b"vv", b"s", b"ssssss", b"c", b"r", b"rr", b"cccrrvv"] {
            for room in [80, 160] {
                let page = shown(&pressed(keys), room);
                assert!(page.starts_with("processes: ") && page.contains("q quit"), "{page}");
            }
        }
        let page = shown(&Choice::default(), 80);
        let head = page.lines().next().unwrap();
        assert_eq!(
            head,
            "processes: 2   on SMC: 2   on TCP: 2   sent: 4.0 MiB/s   received: 12.0 MiB/s"
        );
        assert!(page.contains("sent/s") && page.contains("nginx 7"), "{page}");
        assert!(page.contains("1 TCP: because of PEERNOSMC"), "{page}");
    }

    #[test]
    fn keys_sort_choose_and_end() {
        let now = processes(0);
        let mut choice = Choice::default();
        for name in SORTS {
            assert!(choice.press(b's', &now));
            assert_eq!(choice.view.sort.map(columns::Column::name), Some(name));
        }
        assert!(choice.press(b's', &now) && choice.view.sort.is_none());
        // Each present reason, and then all.
        for reason in [Some("NOSMCDEV"), Some("PEERNOSMC"), None] {
            assert!(choice.press(b'r', &now));
            assert_eq!(choice.filter.reason.as_deref(), reason);
        }
        let page = shown(&pressed(b"rr"), 80);
        assert!(page.contains("PEERNOSMC") && !page.contains("nginx"), "{page}");
        let page = shown(&pressed(b"c"), 80);
        assert!(page.contains("nginx") && !page.contains("NOSMCDEV"), "{page}");
        // A carrier and a reason excluding each other.
        let page = shown(&pressed(b"cr"), 80);
        assert!(page.contains("No connection fits"), "{page}");
        for end in [b'q', 4] {
            assert!(!choice.press(end, &now));
        }
        assert!(choice.press(b'x', &now), "other keys do nothing");
    }

    #[test]
    fn processes_and_peers_are_lines_with_what_their_connections_have_together() {
        let choice = pressed(b"v");
        assert_eq!(choice.view.by, By::Process);
        let page = shown(&choice, 80);
        let line = page.lines().find(|line| line.starts_with("redis-server-of")).unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(
            words,
            ["redis-server-of-a-long-name", "4194304", "1", "2", "2.0", "MiB", "6.0", "MiB"]
        );
        let page = shown(&pressed(b"vv"), 80);
        let of = |peer: &str| {
            let line = page.lines().find(|line| line.starts_with(peer));
            line.unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(of("10.0.0.9")[1..], ["2", "0", "4.0", "MiB", "12.0", "MiB"]);
        // The kernel counts the bytes of TCP connections.
        assert_eq!(of("2001:db8:")[1..], ["0", "1", "-", "-"]);
        assert_eq!(pressed(b"vvv").view.by, By::Service);
        assert_eq!(pressed(b"vvvv").view.by, By::Connection);
    }
}
