// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers and listeners as a table: the traffic of their connections, and whether SMC pays.

use std::collections::BTreeSet;
use std::time::Duration;

use guest_driver::traffic::{Endpoint, EndpointTraffic};

use super::processes::Processes;
use super::table::{row, size, table};
use super::tables::{NO_PROCESS, name, silent};

/// A line per server and listener. Processes of one program share their knowledge, so each is shown
/// for the first process.
pub(super) fn table_of(processes: &Processes) -> String {
    if processes.list.is_empty() {
        return format!("{NO_PROCESS}{}", silent(processes));
    }
    let mut text = table(&[
        "process",
        "end",
        "address",
        "choice",
        "why",
        "on SMC",
        "on TCP",
        "observed",
        "bytes",
        "round trips",
        "lifetime",
        "gain",
    ]);
    let mut shown = BTreeSet::new();
    for process in &processes.list {
        for known in &process.endpoints {
            let (end, address) = match &known.endpoint {
                Endpoint::Server(address) => ("client of", address),
                Endpoint::Listener(address) => ("listener", address),
            };
            if !shown.insert((known.table, &process.program, end, *address)) {
                continue;
            }
            let (choice, why) = choice(known);
            let cells = [
                end.into(),
                address.to_string(),
                choice.into(),
                why.into(),
                known.smc.to_string(),
                known.tcp.to_string(),
                known.samples.to_string(),
                size(known.bytes),
                known.round_trips.to_string(),
                duration(Duration::from_micros(known.lifetime_us)),
                format!("{} %", known.gain / 10),
            ];
            row(&mut text, &name(process), cells);
        }
    }
    if shown.is_empty() {
        return format!(
            "Nothing was learned yet: no connection of a program under \"smc run\" has been on SMC \
             by TCP option 254.\n{}",
            silent(processes)
        );
    }
    format!("{text}\n{}", silent(processes))
}

/// The carrier of the next connections, and the reason.
fn choice(known: &EndpointTraffic) -> (&'static str, &'static str) {
    match known {
        EndpointTraffic { endpoint: Endpoint::Listener(_), .. } => ("SMC", "the client decides"),
        EndpointTraffic { forced: true, .. } => ("SMC", "a rule forces it"),
        EndpointTraffic { on_tcp: true, .. } => ("TCP", "too short for SMC"),
        EndpointTraffic { learned: true, .. } => ("SMC", "it pays"),
        _ => ("SMC", "learning"),
    }
}

fn duration(time: Duration) -> String {
    match time.as_micros() {
        us @ 0..1000 => format!("{us} us"),
        us @ 1000..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        us => format!("{:.1} s", us as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use guest_driver::statistics::Process;

    use super::*;

    fn known(endpoint: Endpoint) -> EndpointTraffic {
        EndpointTraffic {
            table: 7,
            endpoint,
            on_tcp: false,
            learned: false,
            forced: false,
            gain: 14,
            smc: 9,
            tcp: 64,
            samples: 1,
            bytes: 2048,
            round_trips: 1,
            lifetime_us: 1500,
        }
    }

    fn process(pid: u32, endpoints: Vec<EndpointTraffic>) -> Process {
        Process { pid, program: "ab".into(), endpoints, ..Process::default() }
    }

    #[test]
    fn a_server_that_processes_share_has_one_line_with_the_reason() {
        let server = Endpoint::Server("192.0.2.1:80".parse().unwrap());
        let all = |change: fn(&mut EndpointTraffic)| {
            let mut known = known(server);
            change(&mut known);
            let list = vec![process(41, vec![known.clone()]), process(42, vec![known])];
            table_of(&Processes { list, ..Processes::default() })
        };
        let text = all(|known| (known.on_tcp, known.learned) = (true, true));
        for part in
            ["ab 41", "client of", "192.0.2.1:80", "TCP", "too short for SMC", "1.5 ms", "1 %"]
        {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!text.contains("ab 42"), "{text}");
        assert!(all(|known| known.forced = true).contains("a rule forces it"));
        assert!(all(|known| known.learned = true).contains("it pays"));
        assert!(all(|_| {}).contains("learning"));
    }

    #[test]
    fn nothing_to_show_is_said() {
        let none = Processes { list: vec![process(41, Vec::new())], ..Processes::default() };
        assert!(table_of(&none).contains("Nothing was learned yet"));
        assert!(table_of(&Processes::default()).contains("No process of yours has SMC now"));
        let listener = Endpoint::Listener("[::1]:80".parse().unwrap());
        let list = vec![process(41, vec![known(listener)])];
        let text = table_of(&Processes { list, ..Processes::default() });
        assert!(text.contains("the client decides"), "{text}");
    }
}
