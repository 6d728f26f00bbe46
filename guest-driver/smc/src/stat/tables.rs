// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes as tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use guest_driver::socket::show_gid;
use guest_driver::statistics::{Connection, Handshakes, Process, Reason};

use super::columns::{self, Column, ColumnList, ConnectionRow};
use super::processes::Processes;
use super::sums::{self, By};
use super::table::{printable, row, size, table};
use crate::output;

/// The advice if there is nothing to show.
pub(super) const NO_PROCESS: &str = "No process of yours has SMC now: \"smc listen\", \"smc connect\", \"smc perf\" and \
                      connections of programs under \"smc run\" would be here.\n";

/// In the place of a table without a row.
const NO_CONNECTION: &str =
    "No connection is open now. \"smc stat totals\" counts those that were.\n";

/// Limit of the silent processes with a line in a table.
const MAX_SILENT: usize = 50;

/// Limit of the reasons explained below a table.
const MAX_REASONS: usize = 64;

/// The earlier processes, and their age.
type Before<'a> = Option<(&'a Processes, Duration)>;

fn n(number: impl ToString) -> String {
    number.to_string()
}

pub(super) fn name(process: &Process) -> String {
    format!("{} {}", process.program, process.pid)
}

/// The silent processes, at the end of each table.
pub(super) fn silent(processes: &Processes) -> String {
    let mut text = String::new();
    for silent in processes.silent.iter().take(MAX_SILENT) {
        let socket = printable(&silent.socket.display().to_string());
        let problem = printable(&silent.problem);
        let _ = writeln!(text, "{socket} of process {} does not answer: {problem}", silent.pid);
    }
    if let more @ 1.. = processes.silent.len().saturating_sub(MAX_SILENT) {
        let _ = writeln!(text, "{more} more do not answer");
    }
    if processes.missed > 0 {
        let _ = writeln!(text, "there was no time for {} processes", processes.missed);
    }
    text
}

/// A line per process.
pub(super) fn overview(processes: &Processes) -> String {
    if processes.list.is_empty() {
        return format!("{NO_PROCESS}{}", silent(processes));
    }
    let mut text = table(&[
        "process", "device", "RNICs", "SMC-D", "SMC-R", "TCP", "groups", "sent", "received",
    ]);
    let mut trouble = String::new();
    for process in &processes.list {
        let of =
            |start: &str| process.connections.iter().filter(|c| c.kind.starts_with(start)).count();
        let sum = |bytes: fn(&Connection) -> u64| {
            process.connections.iter().map(bytes).fold(0, u64::saturating_add)
        };
        let cells = [
            devices(process),
            n(process.rnics.iter().filter(|rnic| rnic.active).count()),
            n(of("SMC-D")),
            n(of("SMC-R")),
            n(of("TCP")),
            n(process.groups.len()),
            size(sum(|connection| connection.sent)),
            size(sum(|connection| connection.received)),
        ];
        row(&mut text, &name(process), cells);
        for device in &process.devices {
            if let Some(problem) = &device.problem {
                let line = format!("{}: {}: {problem}", name(process), device.path);
                let _ = writeln!(trouble, "{}", printable(&line));
            }
        }
    }
    let why = reasons(&merged(processes));
    format!("connections now:\n{text}\n{trouble}{why}{}", silent(processes))
}

fn devices(process: &Process) -> String {
    let open = |device: &guest_driver::statistics::DeviceInfo| {
        let file = device.path.rsplit('/').next().unwrap_or_default().to_owned();
        match &device.chid {
            Some(chid) => format!("{file} ({chid})"),
            None => format!("{file} (not open)"),
        }
    };
    match &process.devices[..] {
        [] => "none".into(),
        devices => devices.iter().map(open).collect::<Vec<_>>().join(", "),
    }
}

/// How the connections are shown.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Connections")]
pub(super) struct View {
    /// Print more about each connection.
    #[arg(long, short)]
    details: bool,

    /// Columns: "wide" for those of a wide terminal, or names separated by commas.
    #[arg(long, short, value_name = "COLUMNS", value_parser = columns::chosen)]
    output: Option<ColumnList>,

    /// Sort by this column, numbers with the largest first.
    #[arg(long, value_name = "COLUMN", value_parser = columns::find)]
    pub(super) sort: Option<&'static Column>,

    /// One line for each connection, process, peer's address, or service.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    pub(super) by: By,
}

/// The connections, as rows of a table.
pub(super) fn rows<'a>(processes: &'a Processes, before: Before<'a>) -> Vec<ConnectionRow<'a>> {
    let mut rows = Vec::new();
    for process in &processes.list {
        rows.extend(process.connections.iter().map(|connection| {
            let before = before.map(|(old, time)| (same(old, process, connection), time));
            ConnectionRow { process, connection, before }
        }));
    }
    rows
}

/// A line per connection, process or peer. `room`: columns of the terminal, if there is one.
pub(super) fn connections(
    processes: &Processes,
    before: Before<'_>,
    view: &View,
    room: Option<usize>,
) -> String {
    if processes.list.is_empty() {
        return format!("{NO_PROCESS}{}", silent(processes));
    }
    let mut rows = rows(processes, before);
    if let Some(column) = view.sort {
        columns::sort(&mut rows, column);
    }
    let mut more = String::new();
    if view.details {
        for row in &rows {
            let _ = writeln!(more, "{}", printable(&detail(row.process, row.connection)));
        }
    }
    let omitted = processes.list.iter().map(|process| process.omitted);
    let omitted = omitted.fold(0, usize::saturating_add);
    if omitted > 0 {
        let _ = writeln!(more, "{omitted} connections more");
    }
    let text = match (&rows[..], view.by) {
        ([], _) => NO_CONNECTION.to_owned(),
        (rows, By::Connection) => {
            let chosen = view.output.clone().unwrap_or_default();
            columns::lines(rows, &chosen, room) + "\n"
        }
        (rows, by) => sums::lines(rows, by, view.sort) + "\n",
    };
    let rest = format!("{}{more}{}", why_tcp(processes), silent(processes));
    text + &room.map_or(rest.clone(), |room| output::wrapped_at(&rest, room))
}

fn same<'a>(
    old: &'a Processes,
    process: &Process,
    connection: &Connection,
) -> Option<&'a Connection> {
    let process = old.list.iter().find(|old| old.pid == process.pid)?;
    let addresses = |connection: &Connection| (connection.local, connection.peer);
    process.connections.iter().find(|old| addresses(old) == addresses(connection))
}

/// Bytes unread by the peer, including the send queue.
pub(super) fn unread_by_peer(connection: &Connection) -> Option<u64> {
    Some(connection.unread_by_peer?.saturating_add(connection.queued.unwrap_or(0)))
}

pub(super) fn pair(here: Option<u64>, there: Option<u64>) -> String {
    match (here, there) {
        (None, None) => "-".into(),
        (here, there) => {
            let text = |bytes: Option<u64>| bytes.map_or("?".into(), size);
            format!("{} / {}", text(here), text(there))
        }
    }
}

pub(super) fn buffers(connection: &Connection) -> String {
    let (here, there) = connection.buffers().unzip();
    pair(here.map(u64::from), there.map(u64::from))
}

/// The carrier of a connection.
pub(super) fn by(connection: &Connection) -> String {
    if let Some(changes) = connection.changes.as_ref().filter(|changes| changes.count > 0) {
        return changes.to_string();
    }
    match (&connection.smc_d, &connection.smc_r, &connection.reason) {
        (Some(d), ..) => {
            format!("fabric {}, {}", d.chid, if d.window { "window" } else { "move" })
        }
        (_, Some(r), _) => format!("group {:08x}, {}", r.group, r.link.local_port()),
        (.., Some(reason)) => format!("{} ({})", reason.name, reason.side),
        _ => "-".into(),
    }
}

fn detail(process: &Process, connection: &Connection) -> String {
    let of = |address: Option<std::net::SocketAddr>| address.map_or("?".into(), n);
    let mut text = format!("{} {}:", name(process), of(connection.peer));
    if let Some(d) = &connection.smc_d {
        let contact = if d.first_contact { "first contact" } else { "known peer" };
        let _ = write!(text, " {} -> {}, {contact}", d.local_gid, d.peer_gid);
    }
    if let Some(r) = &connection.smc_r {
        let link = &r.link;
        let _ = write!(
            text,
            " link {}, {}#{} -> {}#{}, tokens {:08x} {:08x}, rkeys {:08x} {:08x}, {} failovers",
            link.number,
            show_gid(link.local_gid),
            link.local_qp,
            show_gid(link.peer_gid),
            link.peer_qp,
            r.tokens.0,
            r.tokens.1,
            r.rkeys.0,
            r.rkeys.1,
            r.failovers,
        );
    }
    if let Some(eid) = connection.eid() {
        let _ = write!(text, ", EID {eid}");
    }
    if let Some(host) = connection.peer_host() {
        let _ = write!(text, ", host {host}");
    }
    if let Some(queued @ 1..) = connection.queued {
        let _ = write!(text, ", {} in the send queue", size(queued));
    }
    if let Some([written, read_by_peer, written_by_peer, read]) = connection.cursors {
        let at = |(wrap, offset): (u16, u32)| format!("{wrap}:{offset}");
        let _ = write!(
            text,
            ", cursors: written {} of which the peer read {}, peer wrote {} of which read {}",
            at(written),
            at(read_by_peer),
            at(written_by_peer),
            at(read),
        );
    }
    if let Some(reason) = &connection.reason {
        let _ = write!(text, " {}", reason.says);
    }
    text
}

/// The reasons for TCP of the listed connections, each reason once.
fn why_tcp(processes: &Processes) -> String {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let connections = processes.list.iter().flat_map(|process| &process.connections);
    for reason in connections.filter_map(|connection| connection.reason.as_ref()) {
        *counts.entry(&reason.says).or_default() += 1;
    }
    let mut text = String::new();
    let more = counts.len().saturating_sub(MAX_REASONS);
    for (says, count) in counts.into_iter().take(MAX_REASONS) {
        let _ = writeln!(text, "{count} TCP: {}", printable(says));
    }
    if more > 0 {
        let _ = writeln!(text, "{more} reasons more");
    }
    text
}

/// Link groups, each with its links.
pub(super) fn groups(processes: &Processes) -> String {
    if processes.list.is_empty() {
        return format!("{NO_PROCESS}{}", silent(processes));
    }
    let mut groups = table(&[
        "process",
        "group",
        "type",
        "role",
        "peer",
        "kind",
        "connections",
        "links",
        "RMBs",
        "failovers",
        "timer",
    ]);
    let mut links = table(&[
        "process",
        "group",
        "link",
        "RNIC",
        "own end",
        "peer's end",
        "MTU",
        "state",
        "connections",
        "credits",
    ]);
    for process in &processes.list {
        for group in &process.groups {
            let id = format!("{:08x}", group.group);
            let cells = [
                id.clone(),
                group.protocol(),
                group.role().into(),
                format!("{:016x}", u64::from_be_bytes(group.peer_id)),
                group.topology.to_string(),
                format!("{} of {}", group.connections, group.max_connections),
                format!("{} of {}", group.links.len(), group.max_links),
                format!("{} + {}", group.rmbs.0, group.rmbs.1),
                n(group.failovers),
                group.timer.map_or("-".into(), |us| format!("{:.1} s", us as f64 / 1e6)),
            ];
            row(&mut groups, &name(process), cells);
            for link in &group.links {
                let cells = [
                    id.clone(),
                    n(link.number),
                    link.local_port(),
                    format!("{}#{}", show_gid(link.local_gid), link.local_qp),
                    format!("{}#{}", show_gid(link.peer_gid), link.peer_qp),
                    n(link.mtu),
                    link.state.to_string(),
                    n(link.connections),
                    n(link.credits),
                ];
                row(&mut links, &name(process), cells);
            }
        }
    }
    let end = silent(processes);
    if groups.is_empty() {
        let why = without_rdma(processes);
        return format!("No link groups: no SMC-R connection has been made.\n{why}{end}");
    }
    format!("{groups}\nlinks:\n{links}\n{end}")
}

fn without_rdma(processes: &Processes) -> String {
    let mut text = String::new();
    for process in &processes.list {
        if let Some(why) = &process.no_rdma {
            let _ = writeln!(text, "{}", printable(&format!("{}: {why}", name(process))));
        }
    }
    text
}

/// RNIC ports in use by processes.
pub(super) fn rnics(processes: &Processes) -> String {
    if processes.list.is_empty() {
        return format!("{NO_PROCESS}{}", silent(processes));
    }
    let mut text =
        table(&["process", "RNIC", "interface", "state", "MTU", "network", "links", "GIDs"]);
    for process in &processes.list {
        for rnic in &process.rnics {
            let cells = [
                rnic.full_name(),
                rnic.netdev.clone().unwrap_or_else(|| "-".into()),
                if rnic.active { "active" } else { "down" }.into(),
                n(rnic.mtu),
                rnic.pnet.clone().unwrap_or_else(|| "-".into()),
                n(rnic.links),
                rnic.gids.iter().map(|gid| show_gid(*gid)).collect::<Vec<_>>().join(" "),
            ];
            row(&mut text, &name(process), cells);
        }
    }
    let why = without_rdma(processes);
    if text.is_empty() {
        return format!("No RNIC is used.\n{why}{}", silent(processes));
    }
    format!("{text}\n{why}{}", silent(processes))
}

/// Results of handshakes.
pub(super) fn totals(processes: &Processes) -> String {
    if processes.list.is_empty() {
        return format!("{NO_PROCESS}{}", silent(processes));
    }
    let mut text = table(&[
        "process", "SMC-D", "SMC-R", "TCP", "broken", "closing", "peers", "pooled", "sent",
        "received",
    ]);
    let all = merged(processes);
    for process in &processes.list {
        row(&mut text, &name(process), cells(&process.totals));
    }
    if processes.list.len() > 1 {
        row(&mut text, "all", cells(&all));
    }
    format!(
        "handshakes, and bytes by SMC, since each process began:\n{text}\n{}{}",
        reasons(&all),
        silent(processes)
    )
}

fn cells(totals: &Handshakes) -> [String; 9] {
    [
        n(totals.smc_d),
        n(totals.smc_r),
        n(totals.tcp),
        n(totals.broken),
        n(totals.closing),
        n(totals.peers),
        n(totals.pooled),
        size(totals.sent),
        size(totals.received),
    ]
}

/// The sum of all processes.
fn merged(processes: &Processes) -> Handshakes {
    let mut all = Handshakes::default();
    let mut reasons: BTreeMap<(u32, &str), Reason> = BTreeMap::new();
    for totals in processes.list.iter().map(|process| &process.totals) {
        all.smc_d = all.smc_d.saturating_add(totals.smc_d);
        all.smc_r = all.smc_r.saturating_add(totals.smc_r);
        all.tcp = all.tcp.saturating_add(totals.tcp);
        all.broken = all.broken.saturating_add(totals.broken);
        all.closing = all.closing.saturating_add(totals.closing);
        all.peers = all.peers.saturating_add(totals.peers);
        all.pooled = all.pooled.saturating_add(totals.pooled);
        all.sent = all.sent.saturating_add(totals.sent);
        all.received = all.received.saturating_add(totals.received);
        for reason in &totals.reasons {
            reasons
                .entry((reason.code, &reason.side))
                .and_modify(|known| known.count = known.count.saturating_add(reason.count))
                .or_insert_with(|| reason.clone());
        }
    }
    all.reasons = reasons.into_values().collect();
    all.reasons.sort_by_key(|reason| std::cmp::Reverse(reason.count));
    all
}

/// Why connections were TCP, counted by code.
fn reasons(totals: &Handshakes) -> String {
    if totals.reasons.is_empty() {
        return String::new();
    }
    let mut text = String::from("TCP because:\n");
    for reason in &totals.reasons {
        let Reason { code, name, side, says, count, .. } = reason;
        let line = format!("{count:>8}  0x{code:08x} {name} ({side}): {says}");
        let _ = writeln!(text, "{}", printable(&line));
    }
    output::wrapped(&text)
}

#[cfg(test)]
mod tests {
    use super::super::processes::Silent;
    use super::*;
    use guest_driver::socket::{LinkGroupInfo, LinkInfo, RnicInfo, SmcrInfo};
    use guest_driver::statistics::DeviceInfo;

    fn gid(text: &str) -> [u8; 16] {
        text.parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().octets()
    }

    fn link() -> LinkInfo {
        LinkInfo {
            number: 2,
            rnic: "rxe1".into(),
            port: 1,
            local_gid: gid("192.0.2.7"),
            peer_gid: gid("192.0.2.8"),
            local_qp: 17,
            peer_qp: 18,
            mtu: 1024,
            state: "active".into(),
            ..LinkInfo::default()
        }
    }

    fn process() -> Process {
        let by_rdma = Connection {
            kind: "SMC-R v2.1".into(),
            local: "192.0.2.1:5000".parse().ok(),
            peer: "192.0.2.2:6000".parse().ok(),
            sent: 3 << 20,
            unread: 5,
            unread_by_peer: Some(0),
            queued: Some(3 << 20),
            cursors: Some([(1, 2), (3, 4), (5, 6), (7, 8)]),
            smc_r: Some(Box::new(SmcrInfo {
                group: 0x100,
                link: link(),
                rkeys: (0xabc, 0xdef),
                local_buffer: 65536,
                peer_buffer: 1 << 20,
                failovers: 1,
                ..SmcrInfo::default()
            })),
            ..Connection::default()
        };
        let reason = Reason {
            code: 0x0301_0000,
            name: "PEERNOSMC".into(),
            side: "peer".into(),
            says: "the peer speaks\x1b plain TCP".into(),
            count: 2,
            ..Reason::default()
        };
        let plain = Connection {
            kind: "TCP".into(),
            reason: Some(reason.clone()),
            ..Connection::default()
        };
        let links = vec![link()];
        let (max_links, rmbs) = (2, (3, 4));
        let group = LinkGroupInfo { group: 0x100, links, max_links, rmbs, ..Default::default() };
        let rnic = RnicInfo { name: "rxe1".into(), port: 1, active: true, ..RnicInfo::default() };
        let device = DeviceInfo { path: "/run/a.sock".into(), ..DeviceInfo::default() };
        Process {
            pid: 42,
            program: "redis".into(),
            devices: vec![DeviceInfo { problem: Some("no daemon".into()), ..device }],
            connections: vec![by_rdma, plain],
            groups: vec![group],
            rnics: vec![rnic],
            omitted: 9,
            totals: Handshakes { smc_r: 1, tcp: 2, reasons: vec![reason], ..Handshakes::default() },
            ..Process::default()
        }
    }

    fn some() -> Processes {
        Processes { list: vec![process()], ..Processes::default() }
    }

    fn has(text: &str, parts: &[&str]) {
        for part in parts {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!text.contains('\x1b'), "nothing of others reaches the terminal as it is");
    }

    #[test]
    fn connections_show_what_carries_them_and_why_they_are_tcp() {
        let text = connections(&some(), None, &View { details: true, ..View::default() }, None);
        has(
            &text,
            &[
                "redis 42",
                "SMC-R v2.1",
                "192.0.2.2:6000",
                "3.0 MiB",
                "5 B / 3.0 MiB",
                "64.0 KiB / 1.0 MiB",
                "group 00000100, rxe1/1",
                "PEERNOSMC (peer)",
                "1 TCP: the peer speaks",
                "rkeys 00000abc 00000def, 1 failovers, 3.0 MiB in the send queue",
                "written 1:2 of which the peer read 3:4, peer wrote 5:6 of which read 7:8",
                "9 connections more",
            ],
        );
        assert!(!connections(&some(), None, &View::default(), None).contains("rkeys"));
    }

    #[test]
    fn a_second_snapshot_gives_rates() {
        let mut old = some();
        old.list[0].connections[0].sent = 1 << 20;
        let text =
            connections(&some(), Some((&old, Duration::from_secs(2))), &View::default(), None);
        has(&text, &["sent/s", "1.0 MiB"]);
    }

    #[test]
    fn groups_are_followed_by_their_links() {
        let text = groups(&some());
        has(&text, &["00000100", "1 of 2", "3 + 4", "192.0.2.7#17", "192.0.2.8#18", "active"]);
        has(&rnics(&some()), &["rxe1/1", "active"]);
    }

    #[test]
    fn processes_are_added_up_and_their_problems_listed() {
        let mut two = some();
        two.list.push(Process { pid: 43, ..process() });
        let problem = "timed out".to_owned();
        two.silent.push(Silent { pid: 44, socket: "/run/process-44.sock".into(), problem });
        let text = totals(&two);
        has(&text, &["redis 43", "all", "4  0x03010000 PEERNOSMC (peer)"]);
        has(
            &overview(&two),
            &["/run/a.sock: no daemon", "process-44.sock of process 44 does not answer"],
        );
    }

    #[test]
    fn no_process_is_a_hint() {
        for text in [
            overview(&Processes::default()),
            connections(&Processes::default(), None, &View::default(), None),
            groups(&Processes::default()),
            rnics(&Processes::default()),
            totals(&Processes::default()),
        ] {
            has(&text, &["No process of yours has SMC now", "smc run"]);
        }
    }
}
