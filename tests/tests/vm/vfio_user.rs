// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests whose QEMU maps the areas of the window by vfio-user, each with a file of its own.

use smc_tests::eventually;
use smc_tests::vm::{Bed, Vm};

use crate::outlive::{Streams, serve};

#[test]
fn guests_by_vfio_user_share_a_window_and_outlive_the_daemon() {
    let bed = Bed::with(&["--window-size", "256M"]);
    let [a, b, c] =
        bed.boot([Vm::named("a").vfio_user(), Vm::named("b").vfio_user(), Vm::named("c")]);
    let devices = a.ok("smc devices");
    assert!(devices.contains("data path   window"), "{devices}");
    let server = serve(&a, "window");
    // The last guest maps on request, and takes an area of the server's guest.
    let mut clients = [&b, &c].map(|guest| Streams::some(8, guest, &a, "window"));
    for client in &mut clients {
        client.flow();
        client.assert_on_device();
    }
    for name in ["a", "b", "c"] {
        assert!(bed.counters(name).slabs > 0, "{name}: no slab in the window");
    }
    bed.assert_faultless();
    // QEMU does not connect again: a guest goes on without the device, and its window keeps the bytes.
    bed.kill_daemon();
    for client in &mut clients {
        client.leave("killed");
        client.assert_on_tcp();
        client.finish("killed");
    }
    server.assert_whole();
    for guest in [&a, &b] {
        eventually("the guest has lost its device", || {
            guest.ok("smc devices").contains("cannot be used")
        });
    }
}
