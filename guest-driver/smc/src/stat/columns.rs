// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The columns of `smc stat connections`.
//!
//! A column is a row of [`COLUMNS`]. If the terminal is too narrow for the default columns, the
//! brief ones are shown; these take 80 columns. A line still too long continues in the next line,
//! between two cells.

use std::net::SocketAddr;
use std::time::Duration;

use guest_driver::socket::CurrentCarrier;
use guest_driver::statistics::{Connection, Process};

use super::table::{folded, per_second, printable, size};
use super::tables::{buffers, by, pair, unread_by_peer};

/// A connection to show.
pub(super) struct ConnectionRow<'a> {
    pub(super) process: &'a Process,
    pub(super) connection: &'a Connection,
    /// With `--watch`, the same connection at the preceding look, if present, and the age of the
    /// look.
    pub(super) before: Option<(Option<&'a Connection>, Duration)>,
}

/// A column.
#[derive(Debug)]
pub(super) struct Column {
    /// Name for `--output` and `--sort`, and title.
    name: &'static str,
    /// Whether the cells are numbers, flush right.
    is_number: bool,
    /// When to show the column.
    shown: Where,
    cell: fn(&ConnectionRow<'_>) -> String,
    /// Key for `--sort`, the largest first; `None`: the cell's text.
    order: Option<fn(&ConnectionRow<'_>) -> u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    /// By default, if the terminal is wide.
    Wide,
    /// By default, if the terminal is not wide.
    Brief,
    /// By default.
    Always,
    /// If asked for.
    Asked,
}

impl Column {
    /// Name for `--output` and `--sort`.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }
}

/// Characters of the brief name of a process.
const BRIEF: usize = 13;

const fn column(
    name: &'static str,
    shown: Where,
    cell: fn(&ConnectionRow<'_>) -> String,
) -> Column {
    Column { name, is_number: false, shown, cell, order: None }
}

const fn number(
    name: &'static str,
    shown: Where,
    cell: fn(&ConnectionRow<'_>) -> String,
    order: fn(&ConnectionRow<'_>) -> u64,
) -> Column {
    Column { name, is_number: true, shown, cell, order: Some(order) }
}

/// The columns, in the order of a wide table.
static COLUMNS: [Column; 17] = [
    column("process", Where::Wide, |row| format!("{} {}", row.process.program, row.process.pid)),
    column("program", Where::Brief, brief_name),
    number("pid", Where::Asked, |row| row.process.pid.to_string(), |row| row.process.pid.into()),
    column("type", Where::Wide, |row| match is_on_tcp(row.connection) {
        true => format!("{} on TCP", row.connection.kind),
        false => row.connection.kind.clone(),
    }),
    column("carrier", Where::Asked, |row| carrier(row.connection).to_owned()),
    column("via", Where::Brief, via),
    column("state", Where::Wide, |row| row.connection.state.clone()),
    column("local", Where::Wide, |row| text(row.connection.local)),
    column("port", Where::Brief, |row| {
        row.connection.local.map_or("?".into(), |local| format!(":{}", local.port()))
    }),
    column("peer", Where::Always, |row| text(row.connection.peer)),
    number("sent", Where::Always, |row| row.bytes(|c| c.sent), |row| row.count(|c| c.sent)),
    number(
        "received",
        Where::Always,
        |row| row.bytes(|c| c.received),
        |row| row.count(|c| c.received),
    ),
    number("unread", Where::Wide, unread, |row| row.connection.unread),
    number(
        "buffer",
        Where::Wide,
        |row| buffers(row.connection),
        |row| row.connection.buffers().map_or(0, |(here, _)| here.into()),
    ),
    column("by", Where::Wide, |row| by(row.connection)),
    column("reason", Where::Asked, |row| {
        row.connection.reason.as_ref().map_or("-".into(), |reason| reason.says.clone())
    }),
    column("code", Where::Asked, |row| {
        row.connection.reason.as_ref().map_or("-".into(), |reason| format!("{:08x}", reason.code))
    }),
];

impl ConnectionRow<'_> {
    /// The amount per second since the last look, or the total.
    pub(super) fn count(&self, of: fn(&Connection) -> u64) -> u64 {
        match self.before {
            Some((old, time)) => per_second(of(self.connection), old.map_or(0, of), time),
            None => of(self.connection),
        }
    }

    fn bytes(&self, of: fn(&Connection) -> u64) -> String {
        if self.connection.uncounted { "-".into() } else { size(self.count(of)) }
    }
}

fn text(address: Option<SocketAddr>) -> String {
    address.map_or("?".into(), |address| address.to_string())
}

fn brief_name(row: &ConnectionRow<'_>) -> String {
    let pid = row.process.pid.to_string();
    let room = BRIEF.saturating_sub(pid.len() + 1);
    let name: String = row.process.program.chars().take(room).collect();
    format!("{name} {pid}")
}

/// The carrier with its device or reason, in a few letters.
fn via(row: &ConnectionRow<'_>) -> String {
    let connection = row.connection;
    if is_on_tcp(connection) {
        return format!("{} on TCP", carrier(connection));
    }
    let by = match (&connection.smc_d, &connection.smc_r, &connection.reason) {
        (Some(d), ..) => d.chid.to_string(),
        (_, Some(r), _) => format!("{:08x}", r.group),
        (.., Some(reason)) => reason.name.clone(),
        _ => String::new(),
    };
    format!("{} {by}", carrier(connection)).trim_end().to_owned()
}

/// Whether a connection of SMC has left its device, and goes on over TCP.
fn is_on_tcp(connection: &Connection) -> bool {
    connection.changes.as_ref().is_some_and(|changes| changes.now == CurrentCarrier::Tcp)
}

fn unread(row: &ConnectionRow<'_>) -> String {
    let here = Some(row.connection.unread).filter(|_| !row.connection.uncounted);
    pair(here, unread_by_peer(row.connection))
}

/// Columns chosen by the user. None: the columns fitting the terminal.
#[derive(Clone, Debug, Default)]
pub(super) struct ColumnList(Vec<&'static Column>);

/// The carrier of a connection, in one word.
pub(super) fn carrier(connection: &Connection) -> &str {
    connection.kind.split(' ').next().unwrap_or_default()
}

/// A column of this name.
///
/// # Errors
/// There is none; the text lists every name.
pub(super) fn find(name: &str) -> Result<&'static Column, String> {
    let names = || COLUMNS.iter().map(|column| column.name).collect::<Vec<_>>().join(", ");
    let found = COLUMNS.iter().find(|column| column.name == name);
    found.ok_or_else(|| format!("there is no column {name:?}; there are {}", names()))
}

/// The columns named by `--output`: `wide`, or a list.
///
/// # Errors
/// An unknown name.
pub(super) fn chosen(text: &str) -> Result<ColumnList, String> {
    match text {
        "wide" => Ok(by_default(Where::Wide)),
        list => list.split(',').map(find).collect::<Result<_, _>>().map(ColumnList),
    }
}

fn by_default(shown: Where) -> ColumnList {
    let is_shown = |column: &&Column| [Where::Always, shown].contains(&column.shown);
    ColumnList(COLUMNS.iter().filter(is_shown).collect())
}

/// Sorts by a column, numbers with the largest first.
pub(super) fn sort(rows: &mut [ConnectionRow<'_>], column: &Column) {
    match column.order {
        Some(order) => rows.sort_by_key(|row| std::cmp::Reverse(order(row))),
        None => rows.sort_by_cached_key(|row| (column.cell)(row)),
    }
}

/// The rows below the titles. `room`: columns of the terminal, if there is one.
pub(super) fn lines(
    rows: &[ConnectionRow<'_>],
    chosen: &ColumnList,
    room: Option<usize>,
) -> String {
    if !chosen.0.is_empty() {
        return laid_out(rows, chosen, room);
    }
    let wide = laid_out(rows, &by_default(Where::Wide), None);
    let fits = |room| wide.lines().all(|line| line.chars().count() <= room);
    match room {
        Some(room) if !fits(room) => laid_out(rows, &by_default(Where::Brief), Some(room)),
        _ => wide,
    }
}

fn laid_out(rows: &[ConnectionRow<'_>], columns: &ColumnList, room: Option<usize>) -> String {
    let columns = &columns.0;
    let is_rate = rows.iter().any(|row| row.before.is_some());
    let title = |column: &&Column| match column.name {
        "sent" | "received" if is_rate => format!("{}/s", column.name),
        name => name.to_owned(),
    };
    let mut table = vec![columns.iter().map(title).collect::<Vec<_>>()];
    let cells = |row: &ConnectionRow<'_>| {
        columns.iter().map(|column| printable(&(column.cell)(row))).collect::<Vec<_>>()
    };
    table.extend(rows.iter().map(cells));
    let is_number: Vec<_> = columns.iter().map(|column| column.is_number).collect();
    folded(&table, &is_number, room)
}

#[cfg(test)]
mod tests {
    use guest_driver::statistics::Reason;

    use super::*;

    fn process() -> Process {
        let reason = Reason { name: "PEERNOSMC".into(), says: "plain".into(), ..Reason::default() };
        let tcp = |peer: &str| Connection {
            kind: "TCP".into(),
            state: "Established".into(),
            local: "192.168.100.200:65535".parse().ok(),
            peer: peer.parse().ok(),
            reason: Some(reason.clone()),
            sent: 1023 << 20,
            received: 5,
            ..Connection::default()
        };
        let list = ["192.168.100.201:65535", "[2001:db8:1111:2222:3333:4444:5555:6666]:65535"];
        Process {
            pid: 4_194_304,
            program: "a-long-program-name".into(),
            connections: list.map(tcp).to_vec(),
            ..Process::default()
        }
    }

    fn rows(process: &Process) -> Vec<ConnectionRow<'_>> {
        let shown = |connection| ConnectionRow { process, connection, before: None };
        process.connections.iter().map(shown).collect()
    }

    #[test]
    fn eighty_columns_are_enough_and_no_cell_is_cut_in_two() {
        let process = process();
        for room in [60, 80, 100, 155] {
            let text = lines(&rows(&process), &ColumnList::default(), Some(room));
            for line in text.lines() {
                assert!(line.chars().count() <= room, "{room}: {text}");
            }
            assert!(text.contains("[2001:db8:1111:2222:3333:4444:5555:6666]:65535"), "{text}");
            assert!(text.contains("192.168.100.201:65535") && text.contains("TCP PEERNOSMC"));
        }
        // A line each, and the title.
        let brief = lines(&rows(&process)[..1], &ColumnList::default(), Some(80));
        assert_eq!(brief.lines().count(), 2, "{brief}");
        assert!(lines(&rows(&process), &ColumnList::default(), None).contains("Established"));
    }

    #[test]
    fn columns_are_chosen_by_name() {
        let process = process();
        let some = chosen("pid,peer,reason").unwrap();
        let text = lines(&rows(&process), &some, Some(80));
        assert!(text.starts_with("    pid  peer"), "{text}");
        assert!(text.contains("4194304  192.168.100.201:65535") && text.contains("plain"));
        let wide = chosen("wide").unwrap();
        assert!(lines(&rows(&process), &wide, Some(500)).contains("192.168.100.200:65535"));
        assert!(chosen("pid,nothing").err().unwrap().contains("there are process, program"));
    }

    #[test]
    fn a_connection_that_has_left_its_device_is_one_on_tcp() {
        use guest_driver::socket::CarrierChanges;
        let mut process = process();
        let one = &mut process.connections[0];
        (one.kind, one.reason) = ("SMC-D v2.1".into(), None);
        let type_of = |process: &Process| (find("type").unwrap().cell)(&rows(process)[0]);
        let of = |now| Some(CarrierChanges { now, count: 1, why: None });
        for (now, shown) in [
            (CurrentCarrier::Device, "SMC-D v2.1"),
            (CurrentCarrier::Leaving, "SMC-D v2.1"),
            (CurrentCarrier::Tcp, "SMC-D v2.1 on TCP"),
        ] {
            process.connections[0].changes = of(now);
            assert_eq!(type_of(&process), shown);
        }
        assert_eq!(via(&rows(&process)[0]), "SMC-D on TCP");
    }

    #[test]
    fn a_sort_by_numbers_has_the_largest_first() {
        let mut process = process();
        process.connections[1].received = 7;
        let mut rows = rows(&process);
        sort(&mut rows, find("received").unwrap());
        assert_eq!(rows[0].connection.received, 7);
        sort(&mut rows, find("peer").unwrap());
        assert_eq!(rows[0].connection.received, 5);
    }
}
