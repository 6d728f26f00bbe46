// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! No memory of one guest is visible to another beyond the DMBs granted.

use smc_tests::vm::{Bed, Vm};

use crate::ends::{Client, serve};

#[test]
fn a_third_guest_that_reads_its_whole_window_finds_nothing() {
    let bed = Bed::with(&["--window-size", "256M"]);
    let [a, b, c] = bed.boot(["a", "b", "c"].map(Vm::named));
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    assert_eq!(client.command("stream"), "streams");
    let said = c.ok(["smc-test-peer", "rogue", "look", "pci"]);
    println!("{said}");
    assert_eq!(said.trim_end(), "looked at 268435456 of 268435456 bytes, 0 not zero");
    assert_eq!(bed.counters("c").slabs, 0);
    // A guest's leftovers in its window do not appear in its next life either.
    client.end();
    let said = b.ok(["smc-test-peer", "rogue", "look", "pci"]);
    assert!(said.trim_end().ends_with(", 0 not zero"), "{said}");
    bed.assert_faultless();
}
