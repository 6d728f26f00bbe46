// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choice of connections in `smc stat`.

use std::net::IpAddr;

use clap::{Args, ValueEnum};
use guest_driver::statistics::{Connection, Process};

use super::processes::Processes;

/// Options to choose connections. Each given option has to fit.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Connections")]
pub(super) struct Filter {
    /// Only connections of a process: its id, or a part of its name.
    #[arg(long, value_name = "PID|NAME")]
    process: Option<String>,

    /// Only connections with this port at either end.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,

    /// Only connections with this address at either end.
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,

    /// Only connections on this carrier.
    #[arg(long, value_enum, value_name = "CARRIER")]
    carrier: Option<Carrier>,

    /// Only connections whose state has this in its name, such as "active", "established" or "wait".
    #[arg(long, value_name = "TEXT")]
    state: Option<String>,

    /// Only connections on TCP whose reason has this in its number, name or sentence.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// The carrier of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Carrier {
    Smc,
    SmcD,
    SmcR,
    Tcp,
}

impl Filter {
    fn is_empty(&self) -> bool {
        let Filter { process, port, address, carrier, state, reason } = self;
        process.is_none()
            && port.is_none()
            && address.is_none()
            && carrier.is_none()
            && state.is_none()
            && reason.is_none()
    }

    /// Removes unfitting connections, and processes left without any.
    pub(super) fn apply(&self, processes: &mut Processes) {
        if self.is_empty() {
            return;
        }
        for process in &mut processes.list {
            let whole = self.has_process(process);
            process.connections.retain(|connection| whole && self.has(connection));
        }
        processes.list.retain(|process| !process.connections.is_empty());
    }

    fn has_process(&self, process: &Process) -> bool {
        self.process.as_deref().is_none_or(|wanted| match wanted.parse::<u32>() {
            Ok(pid) => process.pid == pid,
            Err(_) => process.program.contains(wanted),
        })
    }

    fn has(&self, connection: &Connection) -> bool {
        let ends = [connection.local, connection.peer];
        let ends = || ends.iter().flatten();
        let carrier = |carrier: Carrier| match carrier {
            Carrier::Smc => connection.kind.starts_with("SMC"),
            Carrier::SmcD => connection.kind.starts_with("SMC-D"),
            Carrier::SmcR => connection.kind.starts_with("SMC-R"),
            Carrier::Tcp => connection.kind == "TCP",
        };
        let state = |wanted: &str| connection.state.to_lowercase().contains(&wanted.to_lowercase());
        let reason = |wanted: &str| {
            connection.reason.as_ref().is_some_and(|reason| {
                format!("{:08x}", reason.code).contains(wanted.trim_start_matches("0x"))
                    || reason.name.contains(wanted)
                    || reason.says.contains(wanted)
            })
        };
        self.port.is_none_or(|port| ends().any(|end| end.port() == port))
            && self.address.is_none_or(|address| {
                ends().any(|end| end.ip().to_canonical() == address.to_canonical())
            })
            && self.carrier.is_none_or(carrier)
            && self.state.as_deref().is_none_or(state)
            && self.reason.as_deref().is_none_or(reason)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use guest_driver::statistics::Reason;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        filter: Filter,
    }

    fn left(options: &str) -> Vec<String> {
        let connection = |kind: &str, local: &str, state: &str, says: Option<&str>| Connection {
            kind: kind.into(),
            state: state.into(),
            local: local.parse().ok(),
            peer: "10.0.0.9:80".parse().ok(),
            reason: says.map(|says| Reason { says: says.into(), ..Reason::default() }),
            ..Connection::default()
        };
        let mut processes = Processes::default();
        for (pid, program) in [(7, "nginx"), (8, "redis")] {
            let connections = vec![
                connection("SMC-D v2.1", "10.0.0.1:1000", "Active", None),
                connection(
                    "TCP",
                    "[::ffff:10.0.0.2]:2000",
                    "ClosedByPeer",
                    Some("the policy says TCP"),
                ),
            ];
            let process =
                Process { pid, program: program.into(), connections, ..Process::default() };
            processes.list.push(process);
        }
        let words = std::iter::once("smc").chain(options.split_whitespace());
        Line::parse_from(words).filter.apply(&mut processes);
        let of = |process: Process| {
            let kinds =
                process.connections.into_iter().map(move |c| format!("{} {}", process.pid, c.kind));
            kinds.collect::<Vec<_>>()
        };
        processes.list.into_iter().flat_map(of).collect()
    }

    #[test]
    fn options_that_are_given_have_to_fit() {
        assert_eq!(left("").len(), 4);
        assert_eq!(left("--process 7"), ["7 SMC-D v2.1", "7 TCP"]);
        assert_eq!(left("--process red --carrier smc"), ["8 SMC-D v2.1"]);
        assert_eq!(left("--port 2000"), ["7 TCP", "8 TCP"]);
        assert_eq!(left("--port 80").len(), 4);
        assert_eq!(left("--address 10.0.0.2 --process 8"), ["8 TCP"]);
        assert_eq!(left("--reason policy"), ["7 TCP", "8 TCP"]);
        assert_eq!(left("--state active --process 7"), ["7 SMC-D v2.1"]);
        assert_eq!(left("--state Closed"), ["7 TCP", "8 TCP"]);
        assert!(left("--state active --carrier tcp").is_empty());
        assert!(left("--reason policy --carrier smc-d").is_empty());
    }
}
