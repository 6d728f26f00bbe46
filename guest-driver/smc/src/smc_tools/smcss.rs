// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smcss`: the SMC sockets of this user's processes, and the sockets of AF_SMC.

use std::fmt::Write;
use std::net::SocketAddr;

use clap::{ArgAction, Parser};
use guest_driver::statistics::{Connection, Process};

use super::tcp_table::TcpTable;
use super::tool::of_kernel;
use crate::error::CliError;
use crate::kernel::{self, Carrier, Cursors};
use crate::stat::processes;

/// Columns of an address without `--wide`.
const ADDRESS: usize = 23;
/// States of AF_SMC.
const INIT: u8 = 2;
const LISTEN: u8 = 10;
/// Linux's number for a Decline of the peer.
const PEER_DECLINED: u32 = 0x0500_0000;

/// Print information about SMC sockets: of this user's processes with this stack, and of AF_SMC.
/// Options and columns are as in smcss of smc-tools. A column without a value has a dash.
#[derive(Debug, Parser)]
#[command(name = "smcss", version, disable_version_flag = true)]
pub(super) struct Args {
    /// Show all sockets, listening ones included.
    #[arg(short, long, conflicts_with = "listening")]
    all: bool,

    /// Show only listening sockets.
    #[arg(short, long, conflicts_with_all = ["debug", "smcd", "smcr"])]
    listening: bool,

    /// Show buffers, cursors and flags of each socket.
    #[arg(short, long, visible_short_alias = 'e', visible_alias = "extended")]
    debug: bool,

    /// Show only sockets on SMC-D, with GIDs and tokens.
    #[arg(short = 'D', long, conflicts_with = "smcr")]
    smcd: bool,

    /// Show only sockets on SMC-R, with RNICs and links.
    #[arg(short = 'R', long)]
    smcr: bool,

    /// Do not shorten addresses.
    #[arg(short = 'W', long)]
    wide: bool,

    /// Print the version.
    #[arg(short, long, visible_short_alias = 'V', action = ArgAction::Version)]
    version: Option<bool>,
}

/// A line.
#[derive(Clone, Debug)]
struct Row {
    state: String,
    uid: u32,
    inode: u64,
    local: Option<SocketAddr>,
    /// `None` for a listening or new socket.
    rest: Option<Connected>,
}

/// Values of sockets with a peer.
#[derive(Clone, Debug)]
struct Connected {
    peer: Option<SocketAddr>,
    interface: u32,
    carrier: Carrier,
    shutdown: u8,
    details: Option<Cursors>,
    /// Columns of --smcd: GID, token, peer's GID, peer's token, number of the link group.
    smcd: Option<[String; 5]>,
    /// Columns of --smcr: role, RNIC, port, link, GID, peer's GID.
    smcr: Option<[String; 6]>,
}

/// The whole table.
///
/// # Errors
/// The kernel refuses to tell its sockets.
pub(super) fn text(args: &Args) -> Result<String, CliError> {
    let mut rows = Vec::new();
    for process in &processes::all().list {
        of_process(process, &mut rows);
    }
    rows.extend(of_kernel(kernel::sockets())?.iter().map(of_af_smc));
    Ok(table(args, &rows))
}

fn of_process(process: &Process, rows: &mut Vec<Row>) {
    let table = TcpTable::of(process.pid);
    rows.extend(table.listening().iter().map(|tcp| Row {
        state: "LISTEN".into(),
        uid: tcp.uid,
        inode: tcp.inode,
        local: Some(tcp.local),
        rest: None,
    }));
    rows.extend(process.connections.iter().map(|connection| {
        let addresses = connection.local.zip(connection.peer);
        let tcp = addresses.and_then(|(local, peer)| table.connection(local, peer));
        let own = || rustix::process::getuid().as_raw();
        Row {
            state: state(&connection.state),
            uid: tcp.map_or_else(own, |tcp| tcp.uid),
            inode: tcp.map_or(0, |tcp| tcp.inode),
            local: connection.local,
            rest: Some(connected(connection)),
        }
    }));
}

fn connected(connection: &Connection) -> Connected {
    let dash = || "-".to_owned();
    let carrier = match (&connection.smc_d, &connection.smc_r, &connection.reason) {
        (Some(_), ..) => Carrier::SmcD,
        (_, Some(_), _) => Carrier::SmcR,
        (.., Some(why)) if why.side == "peer" => Carrier::Tcp(PEER_DECLINED, why.code),
        (.., why) => Carrier::Tcp(why.as_ref().map_or(0, |why| why.code), 0),
    };
    let cursors = connection.cursors.zip(connection.buffers());
    Connected {
        peer: connection.peer,
        interface: 0,
        carrier,
        shutdown: shutdown(&connection.state),
        details: cursors.map(|([written, read_by_peer, written_by_peer, read], buffers)| Cursors {
            token: connection.smc_r.as_ref().map_or(0, |info| info.tokens.0),
            send_buffer: 0,
            receive_buffer: buffers.0,
            peer_buffer: buffers.1,
            cursors: [written_by_peer, read_by_peer, written, read],
            flags: None,
            send_cursors: [written; 3],
        }),
        smcd: connection.smc_d.as_ref().map(|info| {
            [info.local_gid.to_string(), dash(), info.peer_gid.to_string(), dash(), dash()]
        }),
        smcr: connection.smc_r.as_ref().map(|info| {
            let link = &info.link;
            [
                role(info.server),
                link.rnic.clone(),
                format!("{:02x}", link.port),
                format!("{:02x}", link.number),
                guest_driver::socket::show_gid(link.local_gid),
                guest_driver::socket::show_gid(link.peer_gid),
            ]
        }),
    }
}

fn of_af_smc(socket: &kernel::Socket) -> Row {
    let gid = |(gid, extension): (u64, u64)| match extension {
        0 => format!("{gid:016x}"),
        _ => format!("{gid:016x}{extension:016x}"),
    };
    let has_peer = !matches!(socket.state, INIT | LISTEN);
    Row {
        state: state_of_af_smc(socket.state),
        uid: socket.uid,
        inode: socket.inode,
        local: (socket.state != INIT).then_some(socket.local),
        rest: has_peer.then(|| Connected {
            peer: Some(socket.peer),
            interface: socket.interface,
            carrier: socket.carrier,
            shutdown: socket.shutdown,
            details: socket.cursors,
            smcd: socket.dmbs.map(|dmbs| {
                [
                    gid(dmbs.gid),
                    format!("{:016x}", dmbs.token),
                    gid(dmbs.peer_gid),
                    format!("{:016x}", dmbs.peer_token),
                    format!("{:08x}", dmbs.link_id),
                ]
            }),
            smcr: socket.link.as_ref().map(|link| {
                [
                    role(link.server),
                    link.rnic.clone(),
                    format!("{:02x}", link.port),
                    format!("{:02x}", link.number),
                    link.gid.clone(),
                    link.peer_gid.clone(),
                ]
            }),
        }),
    }
}

fn role(server: bool) -> String {
    if server { "SERV" } else { "CLNT" }.to_owned()
}

/// The name in smcss for a state of RFC 7609, or of TCP.
fn state(name: &str) -> String {
    match name {
        "Active" | "Established" => "ACTIVE",
        "PeerCloseWait1" => "PEERCLW1",
        "PeerCloseWait2" => "PEERCLW2",
        "AppCloseWait1" | "ClosedByPeer" => "APPLCLW1",
        "AppCloseWait2" => "APPLCLW2",
        "AppFinCloseWait" => "APPLFINCLW",
        "PeerFinCloseWait" => "PEERFINCLW",
        "PeerAbortWait" => "PEERABORTW",
        "ProcessAbort" => "PROCESSABORT",
        "Opening" => "INIT",
        "Closing" | "Closed" => "CLOSED",
        other => return other.to_uppercase(),
    }
    .to_owned()
}

fn state_of_af_smc(state: u8) -> String {
    match state {
        1 => "ACTIVE",
        INIT => "INIT",
        7 => "CLOSED",
        LISTEN => "LISTEN",
        20 => "PEERCLW1",
        21 => "PEERCLW2",
        22 => "APPLCLW1",
        23 => "APPLCLW2",
        24 => "APPLFINCLW",
        25 => "PEERFINCLW",
        26 => "PEERABORTW",
        27 => "PROCESSABORT",
        other => return format!("{other:#x}?"),
    }
    .to_owned()
}

/// Bit 0: nothing more will be read. Bit 1: nothing more will be written.
fn shutdown(state: &str) -> u8 {
    match state {
        "AppCloseWait1" | "AppFinCloseWait" => 1,
        "PeerCloseWait1" => 2,
        "PeerCloseWait2" | "AppCloseWait2" | "PeerFinCloseWait" => 3,
        _ => 0,
    }
}

/// An address, shortened to its columns unless `wide`.
fn address(address: Option<SocketAddr>, wide: bool) -> String {
    let Some(address) = address else { return "-".into() };
    let (ip, port) = (address.ip().to_canonical().to_string(), address.port().to_string());
    let room = ADDRESS - 1 - port.len();
    if wide || ip.len() <= room {
        return format!("{ip}:{port}");
    }
    let kept = ip.get(..room - 2).unwrap_or(&ip);
    format!("{kept}..:{port}")
}

fn table(args: &Args, rows: &[Row]) -> String {
    let mut text = format!(
        "{:<15}{:<6}{:<8}{:<24}{:<24}{:<5}{:<5}",
        "State", "UID", "Inode", "Local Address", "Peer Address", "Intf", "Mode"
    );
    if args.debug {
        text += "Shutd Token    Sndbuf   Rcvbuf   Peerbuf  rxprod-Cursor rxcons-Cursor rxFlags \
                 txprod-Cursor txcons-Cursor txFlags txprep-Cursor txsent-Cursor txfin-Cursor  ";
    }
    if args.smcr {
        let _ = write!(
            text,
            "{:<5}{:<16}{:<5}{:<7}{:<41}Peer-GID",
            "Role", "IB-Device", "Port", "Linkid", "GID"
        );
    }
    if args.smcd {
        let _ = write!(
            text,
            "{:<37}{:<17}{:<37}{:<17}Linkid",
            "GID", "Token", "Peer-GID", "Peer-Token"
        );
    }
    for row in rows.iter().filter(|row| is_shown(args, row)) {
        text.truncate(text.trim_end().len());
        text.push('\n');
        line(args, row, &mut text);
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn is_shown(args: &Args, row: &Row) -> bool {
    let Some(rest) = &row.rest else {
        return (args.all || (args.listening && row.state == "LISTEN")) && !args.smcd && !args.smcr;
    };
    !args.listening
        && (!args.smcd || rest.carrier == Carrier::SmcD)
        && (!args.smcr || rest.carrier == Carrier::SmcR)
}

fn line(args: &Args, row: &Row, text: &mut String) {
    let local = address(row.local, args.wide);
    let _ = write!(text, "{:<14} {:05} {:07} {local:<ADDRESS$} ", row.state, row.uid, row.inode);
    let Some(rest) = &row.rest else { return };
    let peer = address(rest.peer, args.wide);
    let _ = write!(text, "{peer:<ADDRESS$} {:04x} ", rest.interface);
    *text += &match rest.carrier {
        Carrier::SmcD => "SMCD ".to_owned(),
        Carrier::SmcR => "SMCR ".to_owned(),
        Carrier::Tcp(own, 0) => format!("TCP {own:#010x}"),
        Carrier::Tcp(own, peer) => format!("TCP {own:#010x}/{peer:#010x}"),
    };
    if matches!(rest.carrier, Carrier::Tcp(..)) {
        return;
    }
    if let Some(details) = rest.details.filter(|_| args.debug) {
        write_details(rest.shutdown, &details, text);
    }
    if let Some([role, rnic, port, link, gid, peer_gid]) = rest.smcr.as_ref().filter(|_| args.smcr)
    {
        let _ = write!(text, "{role:<4} {rnic:<15} {port:<4} {link:<6} {gid:<40} {peer_gid}");
    }
    if let Some([gid, token, peer_gid, peer, link]) = rest.smcd.as_ref().filter(|_| args.smcd) {
        let _ = write!(text, "{gid:<36} {token:<16} {peer_gid:<36} {peer:<16} {link}");
    }
}

fn write_details(shutdown: u8, details: &Cursors, text: &mut String) {
    *text += match shutdown & 3 {
        0 => " <->  ",
        1 => " R->  ",
        2 => " <-W  ",
        _ => " R-W  ",
    };
    let sizes = [details.send_buffer, details.receive_buffer, details.peer_buffer];
    for size in [details.token].iter().chain(&sizes) {
        let _ = write!(text, "{size:08x} ");
    }
    let cursor = |(wrap, offset): (u16, u32)| format!("{wrap:04x}:{offset:08x} ");
    for n in 0..2 {
        let (one, other) = (details.cursors[2 * n], details.cursors[2 * n + 1]);
        let flags = details.flags.map(|flags| flags[n]);
        let flags =
            flags.map_or_else(|| "-".into(), |(one, other)| format!("{one:02x}:{other:02x}"));
        let _ = write!(text, "{}{}{flags:<7} ", cursor(one), cursor(other));
    }
    details.send_cursors.iter().for_each(|at| *text += &cursor(*at));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Args {
        Args::parse_from(["smcss"].iter().chain(words))
    }

    fn row(carrier: Carrier) -> Row {
        let smcd = ["11", "-", "22", "-", "-"].map(str::to_owned);
        Row {
            state: state("Active"),
            uid: 1000,
            inode: 26289,
            local: Some("10.0.0.1:5000".parse().unwrap()),
            rest: Some(Connected {
                peer: Some("[fd00:1111:2222:3333:4444::1]:40000".parse().unwrap()),
                interface: 0,
                carrier,
                shutdown: shutdown("PeerCloseWait1"),
                details: Some(Cursors { receive_buffer: 0x80000, ..Cursors::default() }),
                smcd: (carrier == Carrier::SmcD).then_some(smcd),
                smcr: None,
            }),
        }
    }

    fn listener() -> Row {
        Row { state: "LISTEN".into(), rest: None, ..row(Carrier::SmcD) }
    }

    #[test]
    fn columns_are_those_of_smc_tools() {
        let rows = [row(Carrier::SmcD), row(Carrier::Tcp(0x0301_0000, 0)), listener()];
        let expected = "\
State          UID   Inode   Local Address           Peer Address            Intf Mode
ACTIVE         01000 0026289 10.0.0.1:5000           fd00:1111:2222:..:40000 0000 SMCD
ACTIVE         01000 0026289 10.0.0.1:5000           fd00:1111:2222:..:40000 0000 TCP 0x03010000
";
        assert_eq!(table(&args(&[]), &rows), expected);
        let wide = table(&args(&["-W"]), &rows);
        assert!(wide.contains("fd00:1111:2222:3333:4444::1:40000"), "{wide}");
    }

    #[test]
    fn options_select_sockets() {
        let rows = [row(Carrier::SmcD), row(Carrier::Tcp(0, 0)), listener()];
        let lines = |words: &[&str]| table(&args(words), &rows).lines().count() - 1;
        assert_eq!([lines(&[]), lines(&["-a"]), lines(&["-l"])], [2, 3, 1]);
        assert_eq!([lines(&["-D"]), lines(&["-R"]), lines(&["-aD"])], [1, 0, 1]);
        assert!(Args::try_parse_from(["smcss", "-D", "-R"]).is_err());
        assert!(Args::try_parse_from(["smcss", "-l", "-a"]).is_err());
    }

    #[test]
    fn headings_stand_over_their_columns() {
        for words in [&["-d"][..], &["-D"], &["-dD"]] {
            let text = table(&args(words), &[row(Carrier::SmcD)]);
            let lines: Vec<&str> = text.lines().collect();
            let at = |heading: &str| lines[0].find(heading);
            if let Some(at) = at("Rcvbuf") {
                assert_eq!(&lines[1][at..at + 8], "00080000", "{text}");
            }
            if let Some(at) = at("Shutd") {
                assert_eq!(&lines[1][at..at + 5], " <-W ", "{text}");
            }
            if let Some(at) = at("Peer-GID") {
                assert_eq!(&lines[1][at..at + 2], "22", "{text}");
            }
        }
    }
}
