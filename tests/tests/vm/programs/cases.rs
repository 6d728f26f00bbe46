// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs measured on SMC and on TCP: the parts of a case, and its run.

use std::time::Duration;

use smc_tests::vm::unmodified::{self, on, serve, smc_d, stat};
use smc_tests::vm::{Bed, Guest, Run, print_always};

/// Whether each end is put on SMC, server first.
const COMBINATIONS: [[bool; 2]; 4] = [[true, true], [true, false], [false, true], [false, false]];

/// Guests with the programs, and `devices` devices each. `None`, after a report: the programs are not
/// installed.
pub(super) fn guests(bed: &Bed, devices: usize) -> Option<[Guest; 2]> {
    let guests = unmodified::guests(bed, devices);
    if guests.is_none() {
        assert!(std::env::var("CI").map_or(true, |ci| ci != "true"), "no programs to be run");
        let why = "`cargo xtask vm` found no programs to be run";
        print_always(&format!("NOT TESTED: {why}"));
    }
    guests
}

/// Runs a client's command and gives its output.
pub(super) type Client<'a> = dyn Fn(&str) -> String + 'a;

/// A server and its measurement.
pub(super) struct Case<'a> {
    pub(super) name: &'a str,
    /// The server's command line, with `PORT` for the port.
    pub(super) server: &'a str,
    /// Returns a client's figure, given the port and a function for running command lines at the
    /// client's end.
    pub(super) measure: &'a dyn Fn(u16, &Client<'_>) -> f64,
    pub(super) kind: Kind,
}

/// How a server comes to SMC.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Processes outlive their connections.
    Lasting,
    /// A process per session.
    Sessions,
    /// The server executes itself with the connection as standard input and output; these stay on TCP.
    StandardDescriptors,
    /// The server's language makes system calls itself, and the server stays on TCP.
    OwnSystemCalls,
}

/// Runs each case in every combination; prints the table's lines. The first run of a large program is
/// slow, because the emulator has to translate the code: `warm` adds a run without a figure.
pub(super) fn table(guests: [&Guest; 2], cases: &[Case<'_>], warm: bool) {
    let mut port = 6000;
    for case in cases {
        if warm {
            port += 1;
            figure(guests, case, [false, false], port);
        }
        let figures = COMBINATIONS.map(|on_smc| {
            port += 1;
            figure(guests, case, on_smc, port)
        });
        let [both, server, client, none] = figures;
        println!(
            "{:24} SMC {both:12.1}  TCP {none:12.1}  ratio {:5.2}   only server {:5.2}, only client {:5.2}",
            case.name,
            both / none,
            server / none,
            client / none
        );
    }
}

/// The client's figure, after a check of the carrier by `smc stat`.
fn figure(
    [a, b]: [&Guest; 2],
    case: &Case<'_>,
    [on_server, on_client]: [bool; 2],
    port: u16,
) -> f64 {
    let run = |smc, program: &str| match case.kind {
        // With `--strict`, staying on TCP would be an error.
        Kind::OwnSystemCalls if smc => format!("smc run {program}"),
        _ => on(smc, program),
    };
    let job = serve(a, &run(on_server, case.server), port);
    let both = on_server && on_client;
    // Sessions must be checked while alive.
    let seen = (both && case.kind == Kind::Sessions).then(|| {
        let look = r#"until smc stat --json 2>/dev/null | grep -q '"SMC-D v2'; do sleep 0.1; done"#;
        a.spawn(Run::from(look).within(Duration::from_secs(300)))
    });
    let figure = (case.measure)(port, &|program| b.ok(run(on_client, program)));
    let name = case.name;
    match (seen, case.kind) {
        (Some(seen), _) => assert_eq!(seen.wait_within(Duration::from_secs(2)).code(), 0, "{name}"),
        (None, Kind::Sessions) => (),
        (None, kind) if on_server => {
            let smc = both && kind == Kind::Lasting;
            assert_eq!(smc_d(a) > 0, smc, "{name}: {:?}", stat(a));
        }
        (None, _) => (),
    }
    drop(job);
    figure
}
