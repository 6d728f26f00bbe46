//! AF_SMC on the kernel's driver with itself, and with this project's sockets in a process.

use smc_tests::vm::{Bed, Uml};

use crate::ends::{End, connection_on, one, pair};

/// What is done on a connection each.
const ORDERS: [&str; 10] = [
    "ping 10000 1",
    "ping 10000 2",
    "byte 0 3",
    "bulk 8000000 4",
    "wrap 500000 5",
    "window 0 6",
    "half 1000000 7",
    "abort 0 8",
    "turned-abort 0 9",
    "urgent 0 10",
];

#[track_caller]
fn all_orders(server: &mut End, client: &mut End) {
    for order in ORDERS {
        connection_on("smc-d", server, client, order);
    }
    client.order("many 120 100");
    let here = client.report();
    assert_eq!(here.error, "", "many");
    assert_eq!(here.note, "120 of 120 by SMC, 0 failed ");
    for _ in 0..120 {
        let there = server.report();
        assert_eq!((there.error.as_str(), there.carrier.kind.as_str()), ("", "smc-d"));
    }
}

// Shows: EISM-31.
#[test]
fn two_kernels_speak_smc_d() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    all_orders(&mut server, &mut client);
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
    all_orders(&mut server, &mut client);
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
    all_orders(&mut server, &mut client);
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
    all_orders(&mut server, &mut client);
    drop((server, client));
    bed.assert_faultless();
    guest.finish();
}
