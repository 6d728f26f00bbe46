// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests whose QEMU maps the areas of the window by vfio-user, each with a file of its own.

use smc_tests::vm::{Bed, Vm};

use crate::ends::{Client, serve};

#[test]
fn guests_by_vfio_user_share_a_window_with_each_other_and_outlive_the_daemon() {
    let bed = Bed::with(&["--window-size", "256M"]);
    let [a, b, c] =
        bed.boot([Vm::named("a").vfio_user(), Vm::named("b").vfio_user(), Vm::named("c")]);
    let _server = serve(&a);
    // One more guest maps on request, and takes an area of the server's guest.
    let mut clients = [Client::new(&b, &a), Client::new(&c, &a)];
    for client in &mut clients {
        client.connect();
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
