// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests migrated with their device: the device asks its driver for a reset, and connections go on.
//!
//! The guest `b` goes, and `a` stays. The other host has its own daemon.

mod again;
mod long;
mod parties;
mod snapshots;

use std::os::unix::net::UnixListener;

use serde_json::json;
use smc_tests::eventually;
use smc_tests::vm::ends::{End, connection_on, give_eid};
use smc_tests::vm::{Bed, Guest, Vm};

use crate::ends::{self, Client};
use crate::outlive::{Streams, serve};

/// Streams of each of two clients in one guest.
const FEW: usize = 4;

fn machine(name: &str) -> Vm {
    Vm::named(name).lan()
}

// The guest stands still before any notice to its driver, and later stores into its copy of the
// window.
#[test]
fn streams_go_on_when_their_guest_is_saved() {
    let bed = Bed::new();
    let [a, mut b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    for round in 0..4 {
        let file = bed.path(&format!("saved{round}"));
        let uri = format!("file:{}", file.display());
        println!(
            "{:?}",
            b.save(|b| {
                b.pause();
                b.qmp_with("migrate", &json!({ "uri": uri }));
            })
        );
        b.restore(&bed, &file);
        client.come_back("restored");
    }
    client.finish("restored");
    server.assert_whole();
    bed.assert_faultless();
}

// By TCP, between networks. Each host has a fabric of its own.
#[test]
fn a_guest_speaks_smc_with_the_guests_of_the_host_where_it_is() {
    let Some([here, there]) = Bed::two_hosts([&["--chid", "ff00"], &["--chid", "ff01"]]) else {
        return;
    };
    let with_two = machine("b").another_ism().append("ism.hugepages=64");
    let [a, mut b] = here.boot([machine("a"), with_two]);
    let [c] = there.boot([machine("c")]);
    let servers = [&a, &c].map(|guest| serve(guest, "window"));
    let mut to_a = Streams::some(FEW, &b, &a, "window");
    to_a.flow();
    let mut to_c = Streams::some(FEW, &b, &c, "window");
    assert_eq!(to_c.command("open"), "open tcp");
    println!("{:?}", b.migrate(&there));
    to_a.leave("away from a");
    assert_eq!(to_a.command("open"), "open tcp");
    to_c.flow();
    to_a.assert_on_tcp();
    to_c.assert_on_device();
    println!("{:?}", b.migrate(&here));
    to_c.leave("away from c");
    to_a.come_back("with a again");
    to_c.assert_on_tcp();
    to_a.finish("with a again");
    to_c.finish("away from c");
    servers.iter().for_each(|server| server.assert_whole());
    here.assert_faultless();
    there.assert_faultless();
}

#[test]
fn a_guest_that_is_not_migrated_in_the_end_goes_on() {
    let bed = Bed::new();
    let [a, b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    for cancelled in [true, false] {
        client.flow();
        // A receiver taking a part of the state and no more.
        let path = bed.path(if cancelled { "cancelled" } else { "failed" });
        let door = UnixListener::bind(&path).unwrap();
        b.qmp_with("migrate", &json!({ "uri": format!("unix:{}", path.display()) }));
        assert_eq!(client.command("left"), "left");
        if cancelled {
            b.qmp("migrate_cancel");
        }
        drop(door);
        let ended = ["cancelled", "failed"];
        eventually("it has ended", || {
            let status = b.qmp("query-migrate")["status"].clone();
            ended.iter().any(|ended| status == *ended)
        });
        assert!(b.running());
        client.come_back("not migrated");
        client.finish("not migrated");
    }
    client.flow();
    client.finish("at the end");
    server.assert_whole();
    bed.assert_faultless();
}

#[test]
fn a_host_with_another_window_refuses_the_guest_which_goes_on() {
    let bed = Bed::new();
    let there = bed.another_host_with(&["--window-size", "1G"]);
    let [a, b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    b.migrate_in_vain(&there);
    assert!(b.running());
    client.come_back("refused");
    client.finish("refused");
    client.flow();
    client.finish("at the end");
    server.assert_whole();
    bed.assert_faultless();
}

/// The kernel's drivers have devices again, and the kernel's sockets use SMC-D.
///
/// AF_SMC resets a connection whose handshake meets the change of devices, at one end or at both. So each
/// attempt has programs of its own.
#[track_caller]
fn kernels_speak_smc_again([a, b]: [&Guest; 2], ends: [End; 2]) {
    ends.into_iter().for_each(End::kill);
    eventually("connections are SMC again", || {
        let mut server = End::serve(a, "linux");
        let mut client = End::talk(b, "linux", &a.ip());
        client.order("bulk 1000000 3");
        let report = client.report();
        let again = report.error.is_empty() && report.carrier.kind == "smc-d";
        if again {
            let there = server.report();
            assert_eq!((there.error.as_str(), there.carrier.kind.as_str()), ("", "smc-d"));
            assert_eq!(report.sent_digest, there.received_digest, "bytes there");
            assert_eq!(report.received_digest, there.sent_digest, "bytes back");
        }
        client.kill();
        server.kill();
        again
    });
}

// Its connections cannot go on without the device, and its migration is not refused for them.
#[test]
fn a_guest_with_the_kernels_driver_is_migrated_with_its_device() {
    let bed = Bed::new();
    let there = bed.another_host();
    let [mut a, mut b] = bed.boot([machine("a"), machine("b")].map(|vm| vm.append("ism.bind=no")));
    for guest in [&a, &b] {
        guest.ok("insmod /lib/modules/virtio_ism.ko");
        give_eid(guest);
    }
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 1");
    client.order("pour 0 2 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
    println!("{:?}", b.migrate(&there));
    for end in [&mut client, &mut server] {
        assert_ne!(end.report().error, "", "its connection has ended");
    }
    connection_on("tcp", &mut server, &mut client, "bulk 1000000 3");
    println!("{:?}", a.migrate(&there));
    kernels_speak_smc_again([&a, &b], [server, client]);
    [&a, &b].into_iter().for_each(Guest::assert_no_splats);
    there.assert_faultless();
}

#[test]
fn a_guest_with_the_kernels_driver_is_saved_with_its_device() {
    let bed = Bed::new();
    let [a, mut b] = bed.boot([machine("a"), machine("b")].map(|vm| vm.append("ism.bind=no")));
    for guest in [&a, &b] {
        guest.ok("insmod /lib/modules/virtio_ism.ko");
        give_eid(guest);
    }
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 1");
    client.order("pour 0 2 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
    let file = bed.path("saved");
    b.save(|b| {
        b.pause();
        b.qmp_with("migrate", &json!({ "uri": format!("file:{}", file.display()) }));
    });
    b.restore(&bed, &file);
    for end in [&mut client, &mut server] {
        assert_ne!(end.report().error, "", "its connection has ended");
    }
    kernels_speak_smc_again([&a, &b], [server, client]);
    [&a, &b].into_iter().for_each(Guest::assert_no_splats);
    bed.assert_faultless();
}

// A program with connections bound to the device sees a reset at both ends, and nothing else.
#[test]
fn connections_that_end_with_their_device_are_reset() {
    let bed = Bed::new();
    let there = bed.another_host();
    let [a, mut b] = bed.boot([machine("a"), machine("b")]);
    let server = ends::serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    assert_eq!(client.command("stream"), "streams");
    b.migrate(&there);
    client.failed_after();
    server.wait_for("0 ended ConnectionReset");
    assert_eq!(client.command("connect"), "connected tcp");
    client.ping();
}
