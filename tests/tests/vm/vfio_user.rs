// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests whose QEMU maps the areas of the window by vfio-user, each with a file of its own.

use smc_tests::vm::{Bed, Guest, Vm};

use crate::ends::{Client, serve};

/// The device, as its driver sees it.
fn device(guest: &Guest) -> serde_json::Value {
    let said = guest.ok(["smc", "devices", "--json"]);
    serde_json::from_str::<serde_json::Value>(&said).unwrap()["devices"][0].clone()
}

#[test]
fn guests_by_vfio_user_share_a_window_with_each_other_and_outlive_the_daemon() {
    let bed = Bed::with(&["--window-size", "256M"]);
    let [a, b, c] =
        bed.boot([Vm::named("a").vfio_user(), Vm::named("b").vfio_user(), Vm::named("c")]);
    println!("{}", device(&a));
    let _server = serve(&a);
    // One more guest maps on request, and takes an area of the server's guest.
    let mut clients = [Client::new(&b, &a), Client::new(&c, &a)];
    for client in &mut clients {
        client.connect();
        assert_eq!(client.command("stream"), "streams");
    }
    for name in ["a", "b", "c"] {
        let counters = bed.counters(name);
        assert!(counters.slabs > 0, "{name}: no slab in the window");
    }
    bed.assert_faultless();
    bed.kill_daemon();
    for client in &mut clients {
        client.ping();
    }
}
