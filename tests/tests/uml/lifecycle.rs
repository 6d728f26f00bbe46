//! Drivers that come and go, and peers and daemons that are killed.

use std::time::{Duration, Instant};

use smc_tests::eventually;
use smc_tests::vm::{Bed, Uml};

use crate::ends::{End, connection_on, one, pair};

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
    client.order("flood 0 1 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
    b.ok("rmmod virtio_ism");
    let start = Instant::now();
    assert_ne!(client.report().error, "", "its connection has ended");
    server.report();
    assert!(start.elapsed() < SOON, "both ends hear of it: {:?}", start.elapsed());
    b.ok("insmod /lib/modules/virtio_ism.ko");
    connection_on("smc-d", &mut server, &mut client, "ping 1000 2");
    drop((server, client));
    [a, b].into_iter().for_each(Uml::finish);
}

#[test]
fn a_guest_that_is_killed_is_missed_and_others_go_on() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    client.order("flood 0 1 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
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
fn a_killed_daemon_ends_connections_and_new_ones_are_tcp() {
    let bed = Bed::new();
    let mut guests = pair(&bed);
    for guest in &mut guests {
        // User-mode Linux itself warns when it ends queues without their back end.
        guest.forgive("arch/um/drivers/virtio_uml.c");
    }
    let [a, b] = &guests;
    let mut server = End::serve(a, "linux");
    let mut client = End::talk(b, "linux", &a.ip());
    client.order("flood 0 1 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
    bed.kill_daemon();
    let start = Instant::now();
    client.report();
    server.report();
    assert!(start.elapsed() < SOON, "both ends hear of it: {:?}", start.elapsed());
    for guest in [a, b] {
        eventually("the device has gone", || guest.ok("ls /sys/class/dibs").is_empty());
    }
    connection_on("tcp", &mut server, &mut client, "bulk 100000 2");
    drop((server, client));
    guests.into_iter().for_each(Uml::finish);
}
