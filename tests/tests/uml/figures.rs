// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! AF_SMC on the device next to TCP, between two guests whose kernel looks for no mistakes.

use smc_tests::vm::Bed;
use smc_tests::vm::figures::{BUFFERS, af_smc_next_to_tcp, set_buffers};

use crate::ends::pair;

/// Runs; the median counts.
const RUNS: usize = 7;

#[test]
#[ignore = "it measures: cargo xtask uml --perf"]
fn af_smc_next_to_tcp_in_figures() {
    let bed = Bed::alone();
    let [a, b] = pair(&bed);
    let orders = [
        ("stream, MB/s", "stream 100000000 1"),
        ("round trip of 64 B, us", "rounds 3000 1"),
        ("connections per second", "connects 200 1"),
    ];
    for buffer in BUFFERS {
        for guest in [&a, &b] {
            set_buffers(guest, buffer);
        }
        println!("buffers of {buffer} bytes:");
        af_smc_next_to_tcp([&a, &b], &a.ip(), &orders, RUNS);
        for guest in [&a, &b] {
            // The link group goes with the module, and its buffers as well.
            guest.ok("rmmod virtio_ism");
            guest.ok("insmod /lib/modules/virtio_ism.ko");
        }
    }
    bed.assert_faultless();
}
