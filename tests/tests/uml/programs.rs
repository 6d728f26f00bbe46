// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmodified programs on the kernel's AF_SMC, by `smc run --stack kernel`.

use smc_tests::vm::{Bed, Run, Uml};

use crate::ends::{End, connection_on, pair};

/// A command with TCP sockets under `smc run --stack kernel`.
fn under_smc_run(words: &[&str]) -> Run {
    let mut all = vec!["smc", "run", "--stack", "kernel", "--strict", "smc-test-peer", "interop"];
    all.extend(words);
    Run::from(&all[..])
}

#[test]
fn programs_on_tcp_sockets_are_on_af_smc() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve_by(&a, under_smc_run(&["serve", "tcp", "0.0.0.0:5000"]));
    let address = format!("{}:5000", a.ip());
    let mut client = End::talk_by(&b, under_smc_run(&["talk", "tcp", &address]));
    // The program itself sees TCP.
    for order in ["ping 10000 1", "bulk 4000000 2", "half 100000 3", "window 0 4", "urgent 0 5"] {
        connection_on("tcp", &mut server, &mut client, order);
    }
    for guest in [&a, &b] {
        assert!(guest.counter("move_bytes") > 4_000_000, "the bytes went over the device");
    }
    // A program without `smc run` gets TCP from the same server.
    let moved = a.counter("move_bytes");
    let mut plain = End::talk(&b, "tcp", &a.ip());
    connection_on("tcp", &mut server, &mut plain, "bulk 1000000 6");
    assert!(a.counter("move_bytes") < moved + 500_000, "these did not");
    drop((server, client, plain));
    bed.assert_faultless();
    Uml::finish_all([a, b]);
}

#[test]
fn smc_knows_what_the_kernel_has() {
    let bed = Bed::new();
    let [guest] = bed.boot_uml(["a"], "");
    let doctor = |guest: &Uml| guest.run("smc doctor").out;
    let text = doctor(&guest);
    assert!(text.contains("no enterprise id") && text.contains("smcd ueid add"), "{text}");
    let refused = guest.run("smc run --stack kernel --strict true");
    assert!(refused.code() == 125 && refused.err.contains("no enterprise id"), "{refused}");
    guest.ok("smc run --stack kernel smc-test-peer linux show");
    crate::ends::give_eid(&guest);
    let text = doctor(&guest);
    assert!(text.contains("enterprise ids VIRTIO-ISM"), "{text}");
    assert!(text.contains("SMC works here"), "{text}");
    let text = guest.run("smc devices").out;
    assert!(text.contains("ism-virtio0  the kernel's") && text.contains("CHID ff00"), "{text}");
    guest.ok("smc run --stack kernel --strict smc-test-peer linux show");
    guest.ok("rmmod virtio_ism");
    let text = doctor(&guest);
    assert!(text.contains("without an ISM device"), "{text}");
    guest.finish();
}
