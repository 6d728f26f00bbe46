//! Two ends of connections, each a program in a guest or on the host.

use std::time::Duration;

use smc_tests::helper::Helper;
use smc_tests::interop::Report;
use smc_tests::vm::{Bed, Job, Run, Uml};

/// The enterprise id of both ends, which is that of stacks that were not told one.
pub(super) const EID: &str = "VIRTIO-ISM";
/// Where servers listen.
pub(super) const PORT: u16 = 5000;
/// How long an order may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Two guests whose AF_SMC has an enterprise id.
#[track_caller]
pub(super) fn pair(bed: &Bed) -> [Uml; 2] {
    let guests = bed.boot_uml(["a", "b"], "");
    guests.iter().for_each(give_eid);
    guests
}

/// One guest whose AF_SMC has an enterprise id.
#[track_caller]
pub(super) fn one(bed: &Bed) -> Uml {
    let [guest] = bed.boot_uml(["a"], "");
    give_eid(&guest);
    guest
}

/// Without an enterprise id AF_SMC is only TCP.
#[track_caller]
pub(super) fn give_eid(guest: &Uml) {
    guest.ok(["smc-test-peer", "linux", "ueid", EID]);
}

/// A program at one end, which says a line for each connection.
pub(super) enum End {
    Guest(Job),
    Host(Helper),
}

impl End {
    /// AF_SMC, or TCP, that listens in a guest.
    #[track_caller]
    pub(super) fn serve(guest: &Uml, who: &str) -> End {
        let address = format!("0.0.0.0:{PORT}");
        End::ready(End::Guest(guest.spawn(["smc-test-peer", "interop", "serve", who, &address])))
    }

    /// A command in a guest that listens.
    #[track_caller]
    pub(super) fn serve_by(guest: &Uml, run: Run) -> End {
        End::ready(End::Guest(guest.spawn(run)))
    }

    /// A command in a guest that connects as orders say.
    pub(super) fn talk_by(guest: &Uml, run: Run) -> End {
        End::Guest(guest.spawn(run.open_stdin()))
    }

    /// AF_SMC, or TCP, that connects in a guest.
    pub(super) fn talk(guest: &Uml, who: &str, server: &str) -> End {
        End::talk_within(guest, who, server, LIMIT)
    }

    /// As [`End::talk`], with so long for each report.
    pub(super) fn talk_within(guest: &Uml, who: &str, server: &str, limit: Duration) -> End {
        let address = format!("{server}:{PORT}");
        let run = Run::from(["smc-test-peer", "interop", "talk", who, &address]);
        End::Guest(guest.spawn(run.open_stdin().within(limit)))
    }

    /// A process of the host with a device of its own, that listens.
    #[track_caller]
    pub(super) fn serve_on_host(bed: &Bed) -> End {
        End::ready(End::host(bed, "serve", &format!("0.0.0.0:{PORT}")))
    }

    /// A process of the host with a device of its own, that connects.
    #[track_caller]
    pub(super) fn talk_on_host(bed: &Bed, server: &str) -> End {
        End::host(bed, "talk", &format!("{server}:{PORT}"))
    }

    #[track_caller]
    fn host(bed: &Bed, what: &str, address: &str) -> End {
        let who = format!("rust:device={}", bed.port("host").display());
        End::Host(Helper::spawn(
            env!("CARGO_BIN_EXE_smc-test-peer"),
            &["interop", what, &who, address],
        ))
    }

    #[track_caller]
    fn ready(mut end: End) -> End {
        assert_eq!(end.line(), "ready");
        end
    }

    /// Ends the program at once, and waits until it has gone.
    pub(super) fn kill(self) {
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

    /// Its report of the next connection.
    #[track_caller]
    pub(super) fn report(&mut self) -> Report {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Gives a client an order.
    pub(super) fn order(&mut self, order: &str) {
        let line = format!("{order}\n");
        match self {
            End::Guest(job) => job.feed(&line),
            End::Host(helper) => helper.feed(&line),
        }
    }
}

/// One connection, which must be right at both ends: what both say of it, client first.
#[track_caller]
pub(super) fn connection(server: &mut End, client: &mut End, order: &str) -> [Report; 2] {
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

/// As [`connection`], on what `kind` says.
#[track_caller]
pub(super) fn connection_on(kind: &str, server: &mut End, client: &mut End, order: &str) {
    for report in connection(server, client, order) {
        assert_eq!(report.carrier.kind, kind, "{order}: {}", report.carrier.reason);
    }
}
