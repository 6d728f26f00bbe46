// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections in sum: of each process, peer or service, and of all.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::ValueEnum;

use super::columns::{Column, ConnectionRow, carrier};
use super::metrics;
use super::table::{printable, size};

/// The meaning of a line of the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum By {
    /// A connection.
    #[default]
    Connection,
    /// The connections of a process.
    Process,
    /// The connections with an address.
    Peer,
    /// The connections of a service of systemd, or of a program without one.
    Service,
}

impl By {
    pub(super) fn name(self) -> &'static str {
        match self {
            By::Connection => "connection",
            By::Process => "process",
            By::Peer => "peer",
            By::Service => "service",
        }
    }

    /// The line for a connection.
    ///
    /// `services`: names already looked up.
    fn key(self, row: &ConnectionRow<'_>, services: &mut BTreeMap<u32, String>) -> String {
        match self {
            By::Peer => {
                let peer = row.connection.peer;
                peer.map_or("?".into(), |peer| peer.ip().to_canonical().to_string())
            }
            By::Service => {
                let of = services.entry(row.process.pid);
                let name = of.or_insert_with(|| {
                    let service = metrics::service(row.process.pid);
                    service.unwrap_or_else(|| row.process.program.clone())
                });
                name.clone()
            }
            By::Process | By::Connection => format!("{} {}", row.process.program, row.process.pid),
        }
    }
}

/// The sum of some connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    smc: usize,
    tcp: usize,
    /// Bytes, or bytes per second. The bytes of a program's own TCP connections are counted by the
    /// kernel.
    sent: u64,
    received: u64,
}

impl Sum {
    fn add(&mut self, row: &ConnectionRow<'_>) {
        match carrier(row.connection) {
            "TCP" => self.tcp += 1,
            _ => self.smc += 1,
        }
        self.sent = self.sent.saturating_add(row.count(|connection| connection.sent));
        self.received = self.received.saturating_add(row.count(|connection| connection.received));
    }

    fn is_counted(&self) -> bool {
        self.smc > 0 || self.sent > 0 || self.received > 0
    }
}

fn is_rate(rows: &[ConnectionRow<'_>]) -> bool {
    rows.iter().any(|row| row.before.is_some())
}

/// A line for each process or peer. The first line has the most traffic, or the most of the column
/// of `sort`.
pub(super) fn lines(rows: &[ConnectionRow<'_>], by: By, sort: Option<&Column>) -> String {
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    let mut services = BTreeMap::new();
    for row in rows {
        sums.entry(by.key(row, &mut services)).or_default().add(row);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    match sort.map(Column::name) {
        Some("sent") => sums.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.sent)),
        Some("received") => sums.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.received)),
        // The lines are sorted by their names already.
        Some("process" | "program" | "peer" | "service") => {}
        _ => sums.sort_by_key(|(_, sum)| {
            (
                std::cmp::Reverse(sum.sent.saturating_add(sum.received)),
                std::cmp::Reverse(sum.smc + sum.tcp),
            )
        }),
    }
    let per = if is_rate(rows) { "/s" } else { "" };
    let head = [by.name().into(), "SMC".into(), "TCP".into()];
    let head = head.into_iter().chain([format!("sent{per}"), format!("received{per}")]);
    let mut table = vec![head.collect::<Vec<String>>()];
    for (name, sum) in sums {
        let bytes = |bytes| if sum.is_counted() { size(bytes) } else { "-".into() };
        let cells =
            [sum.smc.to_string(), sum.tcp.to_string(), bytes(sum.sent), bytes(sum.received)];
        table.push(std::iter::once(printable(&name)).chain(cells).collect());
    }
    let longest = table.iter().filter_map(|line| line.first()).map(|name| name.chars().count());
    let width = longest.max().unwrap_or(0);
    let mut text = String::new();
    for line in table {
        for (at, cell) in line.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = match at {
                0 => write!(text, "{cell:<width$}"),
                1 | 2 => write!(text, "  {cell:>5}"),
                _ => write!(text, "  {cell:>10}"),
            };
        }
        text.push('\n');
    }
    text
}
