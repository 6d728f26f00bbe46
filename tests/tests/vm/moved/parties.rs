// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Acts of the parties during a migration: the guest, its monitor, and both daemons.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;

use serde_json::json;
use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest, Way};

use super::machine;
use crate::outlive::{Streams, serve};

/// A migration to a receiver taking a part of the guest's state and no more.
pub(super) struct Stuck<'a> {
    guest: &'a Guest,
    door: UnixListener,
    path: PathBuf,
}

impl Stuck<'_> {
    #[track_caller]
    pub(super) fn begin<'a>(bed: &Bed, guest: &'a Guest, name: &str) -> Stuck<'a> {
        let path = bed.path(name);
        let door = UnixListener::bind(&path).unwrap();
        guest.qmp_with("migrate", &json!({ "uri": format!("unix:{}", path.display()) }));
        Stuck { guest, door, path }
    }

    #[track_caller]
    pub(super) fn cancel(self) {
        self.guest.qmp("migrate_cancel");
        drop(self.door);
        let status = || self.guest.qmp("query-migrate")["status"].clone();
        eventually("it is cancelled", || status() == "cancelled");
        assert!(self.guest.running());
        std::fs::remove_file(self.path).unwrap();
    }
}

// Meanwhile the daemon cannot be asked, and the device cannot be opened. QEMU refuses new blockers
// during a migration, and with `-only-migratable` at any time.
#[test]
fn daemons_come_and_go_while_a_guest_is_migrated() {
    let bed = Bed::new();
    let [a, b] = bed.boot([machine("a"), machine("b").qemu(["-only-migratable"])]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    for what in ["nothing", "killed", "restarted", "drained"] {
        let first = Stuck::begin(&bed, &b, "first");
        client.leave(what);
        match what {
            "killed" => bed.kill_daemon(),
            "restarted" => bed.restart_daemon(),
            "drained" => {
                let _ = bed.management().drain("b", None, false).unwrap();
            }
            _ => {}
        }
        first.cancel();
        // Before the driver has its device again.
        let second = Stuck::begin(&bed, &b, "second");
        assert_eq!(client.command("more"), "more", "{what}");
        second.cancel();
        match what {
            "killed" => bed.start_daemon(),
            "drained" => {
                let _ = bed.management().undrain("b").unwrap();
            }
            _ => {}
        }
        client.come_back(what);
    }
    client.finish("at the end");
    server.assert_whole();
}

#[test]
fn a_guest_boots_while_it_is_migrated() {
    let bed = Bed::new();
    let [a, b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    let stuck = Stuck::begin(&bed, &b, "stuck");
    client.leave("stuck");
    b.reset();
    println!("{}", b.ok("smc devices || true"));
    stuck.cancel();
    eventually("the device is free", || b.ok("smc devices || true").contains("free"));
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    client.finish("booted");
    drop(server);
    bed.assert_faultless();
}

#[test]
fn a_kernels_driver_that_comes_while_its_guest_is_migrated_gets_the_device() {
    let bed = Bed::new();
    let b = bed.boot([machine("b").append("ism.bind=no")]).into_iter().next().unwrap();
    let stuck = Stuck::begin(&bed, &b, "stuck");
    b.ok("insmod /lib/modules/virtio_ism.ko");
    stuck.cancel();
    let has_device = || !b.run("ls /sys/class/dibs | grep ism-").out.is_empty();
    eventually("the kernel has its device", has_device);
    b.assert_no_splats();
    // The same without a daemon.
    b.ok("rmmod virtio_ism");
    bed.kill_daemon();
    b.ok("insmod /lib/modules/virtio_ism.ko");
    bed.start_daemon();
    eventually("the kernel has its device", has_device);
    b.ok("rmmod virtio_ism");
    b.assert_no_splats();
    bed.assert_faultless();
}

// The DMBs are guests' memory, written by the daemon.
#[test]
fn streams_over_moves_go_on() {
    let bed = Bed::new();
    let there = bed.another_host();
    let [mut a, mut b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "moves");
    let mut client = Streams::new(&b, &a, "moves");
    client.flow();
    println!("{:?}", b.migrate(&there));
    client.leave("migrated");
    client.assert_on_tcp();
    println!("{:?}", a.migrate(&there));
    client.come_back("together");
    for round in 0..2 {
        let file = there.path(&format!("saved{round}"));
        let uri = format!("file:{}", file.display());
        b.save(|b| {
            b.pause();
            b.qmp_with("migrate", &json!({ "uri": uri }));
        });
        b.restore(&there, &file);
        client.come_back("restored");
    }
    client.finish("at the end");
    server.assert_whole();
    there.assert_faultless();
}

#[test]
fn both_ends_are_migrated_at_once() {
    let bed = Bed::new();
    let there = bed.another_host();
    let [mut a, mut b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    let at_once = |[a, b]: [(&mut Guest, &Bed); 2]| {
        thread::scope(|scope| {
            scope.spawn(|| println!("{:?}", a.0.migrate(a.1)));
            println!("{:?}", b.0.migrate(b.1));
        });
    };
    at_once([(&mut a, &there), (&mut b, &there)]);
    client.come_back("together");
    b.migrate(&bed);
    client.leave("apart");
    // In opposite directions.
    at_once([(&mut a, &bed), (&mut b, &there)]);
    assert_eq!(client.command("more"), "more");
    client.assert_on_tcp();
    b.migrate(&bed);
    client.come_back("together again");
    client.finish("at the end");
    server.assert_whole();
    bed.assert_faultless();
    there.assert_faultless();
}

#[test]
fn a_guest_comes_to_a_host_whose_daemon_has_died() {
    let bed = Bed::new();
    let there = bed.another_host();
    let [a, mut b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    b.migrate_as(&there, Way::default(), || there.kill_daemon());
    client.leave("without a daemon");
    there.start_daemon();
    b.migrate_as(&bed, Way::default(), || bed.kill_daemon());
    assert_eq!(client.command("more"), "more");
    bed.start_daemon();
    client.come_back("with a daemon");
    client.finish("at the end");
    server.assert_whole();
    there.assert_faultless();
}
