// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots in files, in QEMU's various ways. The guest goes on, and so do its streams.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest};

use super::machine;
use crate::outlive::{Streams, serve};

/// Sets QEMU's capabilities for migrations. `false`, after a report: QEMU refuses one of them here.
fn set(guest: &Guest, names: &[&str], on: bool) -> bool {
    let all: Vec<Value> =
        names.iter().map(|name| json!({ "capability": name, "state": on })).collect();
    let set = guest.try_qmp("migrate-set-capabilities", &json!({ "capabilities": all }));
    if let Err(error) = &set {
        println!("NOT TESTED: {names:?}: {error}");
    }
    set.is_ok()
}

#[track_caller]
fn wait_completed(guest: &Guest) {
    eventually("a snapshot is complete", || {
        let status = guest.qmp("query-migrate")["status"].clone();
        assert_ne!(status, "failed", "{}", guest.qmp("query-migrate"));
        status == "completed"
    });
}

#[test]
fn a_guest_goes_on_after_snapshots_in_files() {
    let bed = Bed::new();
    let [a, b] = bed.boot([machine("a"), machine("b")]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    let ways: [&[&str]; 4] =
        [&[], &["mapped-ram", "multifd"], &["xbzrle"], &["background-snapshot"]];
    for (n, way) in ways.into_iter().enumerate() {
        if !set(&b, way, true) {
            continue;
        }
        let file = bed.path(&format!("snapshot{n}"));
        b.qmp_with("migrate", &json!({ "uri": format!("file:{}", file.display()) }));
        wait_completed(&b);
        if !b.running() {
            b.resume();
        }
        client.come_back(&format!("{way:?}"));
        assert!(set(&b, way, false));
        std::fs::remove_file(file).unwrap();
    }
    // For a QEMU started anew on the same host.
    b.qmp_with("migrate-set-parameters", &json!({ "mode": "cpr-reboot" }));
    let file = bed.path("rebooted");
    b.qmp_with("migrate", &json!({ "uri": format!("file:{}", file.display()) }));
    wait_completed(&b);
    b.resume();
    client.come_back("rebooted");
    client.finish("at the end");
    server.assert_whole();
    bed.assert_faultless();
}

#[test]
fn a_guest_goes_on_after_a_snapshot_beside_it_that_is_cancelled() {
    let bed = Bed::new();
    let [a, b] = bed.boot([machine("a"), machine("b")]);
    if !set(&b, &["background-snapshot"], true) {
        return;
    }
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    // The guest stands still where its memory has not been taken.
    let path = bed.path("slowly");
    let door = UnixListener::bind(&path).unwrap();
    let reader = thread::spawn(move || {
        let (mut taken, _) = door.accept().unwrap();
        let mut buf = vec![0; 64 << 10];
        while taken.read(&mut buf).is_ok_and(|n| n > 0) {
            thread::sleep(Duration::from_millis(5));
        }
    });
    b.qmp_with("migrate", &json!({ "uri": format!("unix:{}", path.display()) }));
    eventually("it is under way", || b.qmp("query-migrate")["status"] == "active");
    thread::sleep(Duration::from_millis(300));
    b.qmp("migrate_cancel");
    eventually("it is cancelled", || b.qmp("query-migrate")["status"] == "cancelled");
    reader.join().unwrap();
    client.come_back("cancelled");
    // A snapshot paused just before its last state, and then cancelled.
    assert!(set(&b, &["background-snapshot"], false));
    assert!(set(&b, &["pause-before-switchover"], true));
    let file = bed.path("snapshot");
    b.qmp_with("migrate", &json!({ "uri": format!("file:{}", file.display()) }));
    eventually("it is about to be complete", || {
        b.qmp("query-migrate")["status"] == "pre-switchover"
    });
    thread::sleep(Duration::from_millis(300));
    b.qmp("migrate_cancel");
    eventually("it goes on", || b.running());
    client.come_back("cancelled late");
    client.finish("at the end");
    server.assert_whole();
    bed.assert_faultless();
}
