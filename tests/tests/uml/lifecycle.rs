// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drivers loaded and removed, and peers and daemons killed.

use std::thread;
use std::time::{Duration, Instant};

use smc_tests::eventually;
use smc_tests::vm::{Bed, Uml};

use crate::ends::{End, begin, connection_on, give_eid, one, pair};

/// How soon the survivor must hear of the end of its peer.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn the_module_comes_and_goes() {
    let bed = Bed::new();
    let guest = one(&bed);
    for _ in 0..10 {
        guest.ok("rmmod virtio_ism");
        assert_eq!(guest.ok("ls /sys/class/dibs"), "");
        guest.ok("insmod /lib/modules/virtio_ism.ko");
        assert_eq!(guest.ok("ls /sys/class/dibs").lines().count(), 1);
    }
    bed.assert_faultless();
    guest.finish();
}

#[test]
fn the_module_is_removed_under_connections() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    begin(&mut server, &mut client, "flood 0 1");
    b.ok("rmmod virtio_ism");
    let start = Instant::now();
    assert_ne!(client.report().error, "", "its connection has ended");
    server.report();
    assert!(start.elapsed() < SOON, "both ends hear of it: {:?}", start.elapsed());
    b.ok("insmod /lib/modules/virtio_ism.ko");
    connection_on("smc-d", &mut server, &mut client, "ping 1000 2");
    drop((server, client));
    Uml::finish_all([a, b]);
}

#[test]
fn the_driver_is_unbound_under_load_and_bound_again() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    for _ in 0..3 {
        begin(&mut server, &mut client, "flood 0 1");
        b.ok("cd /sys/bus/virtio/drivers/virtio_ism && echo virtio? > unbind");
        assert_eq!(b.ok("ls /sys/class/dibs"), "");
        assert_ne!(client.report().error, "", "its connection has ended");
        assert_ne!(server.report().error, "", "at the other end, too");
        connection_on("tcp", &mut server, &mut client, "ping 1000 2");
        b.ok("cd /sys/bus/virtio/devices && echo virtio? > ../drivers/virtio_ism/bind");
        connection_on("smc-d", &mut server, &mut client, "ping 1000 3");
    }
    drop((server, client));
    bed.assert_faultless();
    Uml::finish_all([a, b]);
}

#[test]
fn removal_waits_for_a_program_that_keeps_its_connection_open() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    begin(&mut server, &mut client, "flood 0 1");
    begin(&mut server, &mut client, "stay 0 2");
    let removal = b.spawn("rmmod virtio_ism");
    assert_ne!(client.report().error, "", "the one that sends has ended");
    // At the other end both have.
    server.report();
    server.report();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(removal.ended(), None, "the other one is still open");
    // Meanwhile the kernel serves others.
    connection_on("tcp", &mut server, &mut client, "ping 1000 3");
    client.kill();
    removal.wait().ok();
    drop(server);
    bed.assert_faultless();
    Uml::finish_all([a, b]);
}

#[test]
fn a_client_that_is_killed_is_missed_and_leaves_nothing() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    for seed in 0..5 {
        let mut client = End::talk(&b, "linux", &a.ip());
        for _ in 0..3 {
            begin(&mut server, &mut client, &format!("flood 0 {seed}"));
        }
        client.kill();
        for _ in 0..3 {
            assert_ne!(server.report().error, "");
        }
    }
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 9");
    drop((server, client));
    bed.assert_faultless();
    Uml::finish_all([a, b]);
}

#[test]
fn a_guest_that_is_killed_is_missed_and_others_go_on() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    begin(&mut server, &mut client, "flood 0 1");
    b.kill();
    let start = Instant::now();
    let there = server.report();
    assert!(start.elapsed() < SOON, "{:?}: {there:?}", start.elapsed());
    let mut client = End::talk_on_host(&bed, &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 2");
    drop((server, client));
    drop(b);
    a.finish();
}

#[test]
fn a_killed_daemon_ends_connections_and_its_successor_serves_new_guests() {
    let bed = Bed::new();
    let mut guests = pair(&bed);
    for guest in &mut guests {
        // User-mode Linux itself warns when ending queues without their back end.
        guest.forgive("arch/um/drivers/virtio_uml.c");
    }
    let [a, b] = &guests;
    let mut server = End::serve(a, "linux");
    let mut client = End::talk(b, "linux", &a.ip());
    begin(&mut server, &mut client, "flood 0 1");
    bed.kill_daemon();
    let start = Instant::now();
    client.report();
    server.report();
    assert!(start.elapsed() < SOON, "both ends hear of it: {:?}", start.elapsed());
    for guest in [a, b] {
        eventually("the device has gone", || guest.ok("ls /sys/class/dibs").is_empty());
    }
    connection_on("tcp", &mut server, &mut client, "bulk 100000 2");
    // User-mode Linux does not reconnect. A newly started guest has the device.
    bed.start_daemon();
    let [late] = bed.boot_uml(["c"], "");
    give_eid(&late);
    let mut at_late = End::serve(&late, "linux");
    let mut on_host = End::talk_on_host(&bed, &late.ip());
    connection_on("smc-d", &mut at_late, &mut on_host, "bulk 100000 3");
    connection_on("tcp", &mut server, &mut client, "bulk 100000 4");
    drop((server, client, at_late, on_host));
    Uml::finish_all(guests.into_iter().chain([late]));
}
