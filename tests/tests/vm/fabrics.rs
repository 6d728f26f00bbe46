// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Members of each fabric, and their number.

use smc_tests::Dir;
use smc_tests::vm::{Bed, Vm};

use crate::ends::{Client, PORT, serve};

// Shows: SEC-14.
#[test]
fn guests_of_two_fabrics_reach_each_other_by_tcp_only() {
    // A fabric exists once named by a socket.
    let sockets = Dir::new();
    let unused =
        ["ff00", "ff01"].map(|chid| format!("{},chid={chid}", sockets.path().join(chid).display()));
    let bed = Bed::with(&["--socket-path", &unused[0], "--socket-path", &unused[1]]);
    let other = |name| Vm::named(name).fabric("ff01");
    let [a, b, c, d] = bed.boot([Vm::named("a"), Vm::named("b"), other("c"), other("d")]);
    let _servers = [serve(&a), serve(&c)];
    Client::new(&b, &a).connect();
    Client::new(&d, &c).connect();
    for (guest, server) in [(&b, &c), (&d, &a)] {
        let mut client = Client::new(guest, server);
        assert_eq!(client.command("connect"), "connected tcp");
        client.ping();
    }
    bed.assert_faultless();
}

#[test]
fn each_process_of_a_guest_takes_a_free_device() {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a").another_ism(), Vm::named("b")]);
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    // The second device of the same guest, and the server of the first: the window leads back.
    let mut second = Client::new(&a, &a);
    second.connect();
    assert_ne!(second.command("gid"), client.command("gid"));
    let devices = a.ok(["smc", "devices", "--json"]);
    assert_eq!(devices.matches("\"in_use\":true").count(), 2, "{devices}");
    let third = a.run(["smc", "connect", "--device", "pci", &b.ip(), PORT]);
    assert_ne!(third.code(), 0);
    println!("{}", third.err);
    assert!(third.err.contains("in use") || third.err.contains("busy"), "{third}");
    bed.assert_faultless();
}
