// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Discovery of peers with only an enterprise id configured: this project's sockets, the kernel's
//! AF_SMC and plain TCP programs, by TCP option 254.

use smc_tests::interop::Report;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

/// The default enterprise id of stacks.
const EID: &str = "VIRTIO-ISM";
const RUST: &str = "rust";

#[track_caller]
fn report(job: &mut Job) -> Report {
    let line = job.line();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// One connection from `b` to `a`, with bytes to and fro.
#[track_caller]
fn meet([a, b]: [&Guest; 2], port: u16, server: &str, client: &str, carrier: &str) {
    let line = format!("{client} -> {server}");
    let interop = |what: &str, who: &str, address: String| {
        Run::from(["smc-test-peer", "interop", what, who, &address]).open_stdin()
    };
    let mut serve = a.spawn(interop("serve", server, format!("0.0.0.0:{port}")));
    assert_eq!(serve.line(), "ready");
    let mut talk = b.spawn(interop("talk", client, format!("{}:{port}", a.ip())));
    talk.feed("ping 10000 1\n");
    for (end, report) in [(client, report(&mut talk)), (server, report(&mut serve))] {
        assert_eq!(report.error, "", "{line}: {report:?}");
        if end != "tcp" {
            assert_eq!(report.carrier.kind, carrier, "{line}: {report:?}");
        }
    }
    println!("{line:<27} {carrier}");
}

// Shows: OPT-11, OPT-12.
#[test]
fn all_find_those_who_speak_smc_and_nobody_else() {
    let bed = Bed::new();
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(1)));
    for guest in [&a, &b] {
        guest.ok(["smc-test-peer", "linux", "ueid", EID]);
    }
    let meetings = [
        (RUST, RUST, "smc-r"),
        ("linux", RUST, "smc-r"),
        (RUST, "linux", "smc-r"),
        ("tcp", RUST, "tcp"),
        (RUST, "tcp", "tcp"),
    ];
    for (port, (client, server, carrier)) in (5000..).zip(meetings) {
        meet([&a, &b], port, server, client, carrier);
    }
}
