// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two ends of connections, each a program in a guest or on the host: AF_SMC, TCP or this project's
//! sockets, see [`crate::interop`].

use std::fmt;
use std::time::Duration;

use super::bed::Bed;
use super::guest::Guest;
use super::job::Job;
use super::paths;
use super::run::Run;
use super::uml::Uml;
use crate::helper::Helper;
use crate::interop::Report;

/// The enterprise id of both ends, the default of stacks without a configured one.
pub const EID: &str = "VIRTIO-ISM";
/// Where servers listen.
pub const PORT: u16 = 5000;
/// How long an order may take: an emulated guest on a busy host is slow.
const LIMIT: Duration = Duration::from_secs(180);

/// A guest able to run commands.
pub trait Commands {
    /// Starts a command.
    fn start(&self, run: Run) -> Job;
}

impl Commands for Guest {
    fn start(&self, run: Run) -> Job {
        self.spawn(run)
    }
}

impl Commands for Uml {
    fn start(&self, run: Run) -> Job {
        self.spawn(run)
    }
}

/// Without an enterprise id AF_SMC is only TCP.
#[track_caller]
pub fn give_eid(guest: &impl Commands) {
    guest.start(["smc-test-peer", "linux", "ueid", EID].into()).wait().ok();
}

/// A program at one end, with a line of output for each connection.
pub enum End {
    /// In a guest.
    Guest(Job),
    /// On the host.
    Host(Helper),
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            End::Guest(_) => "a program in a guest",
            End::Host(_) => "a program on the host",
        })
    }
}

impl End {
    /// A listening AF_SMC or TCP in a guest.
    #[track_caller]
    pub fn serve(guest: &impl Commands, who: &str) -> End {
        let address = format!("0.0.0.0:{PORT}");
        End::ready(End::Guest(
            guest.start(["smc-test-peer", "interop", "serve", who, &address].into()),
        ))
    }

    /// A listening command in a guest.
    #[track_caller]
    pub fn serve_by(guest: &impl Commands, run: Run) -> End {
        End::ready(End::Guest(guest.start(run)))
    }

    /// A command in a guest, connecting on orders.
    pub fn talk_by(guest: &impl Commands, run: Run) -> End {
        End::Guest(guest.start(run.open_stdin()))
    }

    /// A connecting AF_SMC or TCP in a guest.
    pub fn talk(guest: &impl Commands, who: &str, server: &str) -> End {
        End::talk_within(guest, who, server, LIMIT)
    }

    /// Like [`End::talk`], with a time limit for each report.
    pub fn talk_within(guest: &impl Commands, who: &str, server: &str, limit: Duration) -> End {
        let address = format!("{server}:{PORT}");
        let run = Run::from(["smc-test-peer", "interop", "talk", who, &address]);
        End::Guest(guest.start(run.open_stdin().within(limit)))
    }

    /// A listening process of the host with its own device.
    #[track_caller]
    pub fn serve_on_host(bed: &Bed) -> End {
        End::ready(End::host(bed, "serve", &format!("0.0.0.0:{PORT}")))
    }

    /// A connecting process of the host with its own device.
    #[track_caller]
    pub fn talk_on_host(bed: &Bed, server: &str) -> End {
        End::host(bed, "talk", &format!("{server}:{PORT}"))
    }

    #[track_caller]
    fn host(bed: &Bed, what: &str, address: &str) -> End {
        let who = format!("rust:device={}", bed.port("host").display());
        End::Host(Helper::spawn(paths::test_peer(), &["interop", what, &who, address]))
    }

    #[track_caller]
    fn ready(mut end: End) -> End {
        assert_eq!(end.line(), "ready");
        end
    }

    /// Kills the program, and waits for its end.
    pub fn kill(self) {
        match self {
            End::Guest(job) => {
                job.kill();
            }
            End::Host(helper) => helper.kill(),
        }
    }

    #[track_caller]
    fn line(&mut self) -> String {
        match self {
            End::Guest(job) => job.line(),
            End::Host(helper) => helper.line(),
        }
    }

    /// The end's report of the next connection.
    #[track_caller]
    pub fn report(&mut self) -> Report {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Gives a client an order.
    pub fn order(&mut self, order: &str) {
        let line = format!("{order}\n");
        match self {
            End::Guest(job) => job.feed(&line),
            End::Host(helper) => helper.feed(&line),
        }
    }
}

/// One connection, checked at both ends. Returns both reports, client first.
#[track_caller]
pub fn connection(server: &mut End, client: &mut End, order: &str) -> [Report; 2] {
    client.order(order);
    let here = client.report();
    assert_eq!(here.error, "", "client: {order}: {here:?}");
    let there = server.report();
    assert_eq!(there.error, "", "server: {order}: {there:?}");
    if !order.contains("abort") {
        let sent = (here.sent, here.sent_digest);
        assert_eq!(sent, (there.received, there.received_digest), "{order}: bytes there");
        let sent = (there.sent, there.sent_digest);
        assert_eq!(sent, (here.received, here.received_digest), "{order}: bytes back");
    }
    [here, there]
}

/// Like [`connection`], with `kind` as the carrier.
#[track_caller]
pub fn connection_on(kind: &str, server: &mut End, client: &mut End, order: &str) {
    for report in connection(server, client, order) {
        assert_eq!(report.carrier.kind, kind, "{order}: {}", report.carrier.reason);
    }
}

/// Begins an order of a client, to run in the background on SMC-D.
///
/// The server has accepted the connection already: a later connection got its answer. AF_SMC forgets
/// unaccepted connections of a lost peer (docs/linux.md), and would not report them.
#[track_caller]
pub fn begin(server: &mut End, client: &mut End, order: &str) {
    client.order(&format!("{order} &"));
    assert_eq!(client.report().carrier.kind, "smc-d", "{order}");
    connection_on("smc-d", server, client, "ping 1 1");
}

/// The orders of [`all_orders`], each on its own connection.
const ORDERS: [&str; 10] = [
    "ping 10000 1",
    "ping 10000 2",
    "byte 0 3",
    "bulk 8000000 4",
    "wrap 500000 5",
    "window 0 6",
    "half 1000000 7",
    "abort 0 8",
    "turned-abort 0 9",
    "urgent 0 10",
];

/// Each kind of connection, and then `many` at a time. All must be right, and SMC-D.
#[track_caller]
pub fn all_orders(server: &mut End, client: &mut End, many: usize) {
    for order in ORDERS {
        connection_on("smc-d", server, client, order);
    }
    client.order(&format!("many {many} 100"));
    let here = client.report();
    assert_eq!(here.error, "", "many");
    assert_eq!(here.note, format!("{many} of {many} by SMC, 0 failed "));
    for _ in 0..many {
        let there = server.report();
        assert_eq!((there.error.as_str(), there.carrier.kind.as_str()), ("", "smc-d"));
    }
}
