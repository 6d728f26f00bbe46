// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! AF_SMC on the kernel's driver with itself, and with this project's sockets in a process.

use smc_tests::vm::{Bed, Uml};

use crate::ends::{End, all_orders, one, pair};

// Shows: EISM-31.
#[test]
fn two_kernels_speak_smc_d() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    all_orders(&mut server, &mut client, 120);
    for guest in [&a, &b] {
        assert!(guest.counter("move_bytes") > 8_000_000);
        for count in ["moves_refused", "moves_dropped", "events_unknown", "events_lost"] {
            assert_eq!(guest.counter(count), 0, "{count}");
        }
    }
    drop((server, client));
    bed.assert_faultless();
    Uml::finish_all([a, b]);
}

#[test]
fn both_ends_are_in_one_kernel() {
    let bed = Bed::new();
    let guest = one(&bed);
    let mut server = End::serve(&guest, "linux");
    let mut client = End::talk(&guest, "linux", &guest.ip());
    all_orders(&mut server, &mut client, 120);
    drop((server, client));
    bed.assert_faultless();
    guest.finish();
}

// Shows: CDC-46, CLCV2-63, CLCV2-64, EISM-11, EISM-18, EISM-19, EISM-31, RMB-33.
#[test]
fn a_process_serves_the_kernels_sockets() {
    let bed = Bed::new();
    let guest = one(&bed);
    let mut server = End::serve_on_host(&bed);
    let mut client = End::talk(&guest, "linux", &guest.host_ip());
    all_orders(&mut server, &mut client, 120);
    drop((server, client));
    bed.assert_faultless();
    guest.finish();
}

// Shows: CDC-46, CLCV2-63, CLCV2-64, EISM-11, EISM-18, EISM-19, EISM-31, RMB-33.
#[test]
fn a_process_is_a_client_of_the_kernels_sockets() {
    let bed = Bed::new();
    let guest = one(&bed);
    let mut server = End::serve(&guest, "linux");
    let mut client = End::talk_on_host(&bed, &guest.ip());
    all_orders(&mut server, &mut client, 120);
    drop((server, client));
    bed.assert_faultless();
    guest.finish();
}
