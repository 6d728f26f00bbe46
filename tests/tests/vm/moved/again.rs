// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's refusals for a guest with the device or under migration, and a file restored twice.

use std::os::unix::net::UnixListener;

use serde_json::json;
use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest};

use super::machine;
use crate::outlive::{Streams, serve};

/// A migration refused by QEMU at one of these commands.
#[track_caller]
fn assert_refused(guest: &Guest, commands: &[(&str, serde_json::Value)]) {
    let refused = commands.iter().find_map(|(command, arguments)| {
        guest.try_qmp(command, arguments).err().map(|error| format!("{command}: {error}"))
    });
    match refused {
        Some(why) => println!("{why}"),
        None => {
            eventually("it has failed", || guest.qmp("query-migrate")["status"] == "failed");
        }
    }
    assert!(guest.running());
}

#[test]
fn a_guest_whose_migration_is_refused_goes_on() {
    let bed = Bed::new();
    let [a, b] = bed.boot([machine("a"), machine("b").unpluggable()]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    let nowhere = bed.path("nowhere");
    let uri = json!({ "uri": format!("unix:{}", nowhere.display()) });
    let post_copy = |on: bool| {
        let all = [json!({ "capability": "postcopy-ram", "state": on })];
        ("migrate-set-capabilities", json!({ "capabilities": all }))
    };
    let mode = |mode: &str| ("migrate-set-parameters", json!({ "mode": mode }));
    assert_refused(&b, &[post_copy(true), ("migrate", uri.clone())]);
    let _ = b.try_qmp(post_copy(false).0, &post_copy(false).1);
    assert_refused(&b, &[mode("cpr-transfer"), ("migrate", uri.clone())]);
    let _ = b.try_qmp(mode("normal").0, &mode("normal").1);
    // No receiver listens there.
    assert_refused(&b, &[("migrate", uri)]);
    client.stay("refused");
    // The device stays during the migration.
    let path = bed.path("slowly");
    let door = UnixListener::bind(&path).unwrap();
    b.qmp_with("migrate", &json!({ "uri": format!("unix:{}", path.display()) }));
    assert_eq!(client.command("left"), "left");
    println!("{}", b.try_qmp("device_del", &json!({ "id": "plug0" })).unwrap_err());
    b.qmp("migrate_cancel");
    drop(door);
    eventually("it is cancelled", || b.qmp("query-migrate")["status"] == "cancelled");
    client.come_back("cancelled");
    client.finish("at the end");
    server.assert_whole();
    bed.assert_faultless();
}

#[test]
fn a_file_is_restored_again() {
    let bed = Bed::new();
    // The program in the file has one device, and keeps the device.
    let with_two = machine("b").another_ism().append("ism.hugepages=64");
    let [a, mut b] = bed.boot([machine("a"), with_two]);
    let server = serve(&a, "window");
    let mut client = Streams::new(&b, &a, "window");
    client.flow();
    let file = bed.path("saved");
    b.save(|b| {
        b.pause();
        b.qmp_with("migrate", &json!({ "uri": format!("file:{}", file.display()) }));
    });
    b.restore(&bed, &file);
    client.come_back("restored");
    client.finish("restored");
    server.assert_whole();
    // The guest's former connections are over for the peer: the guest's programs are told, and new
    // streams flow.
    b.restore_again(&bed, &file);
    let mut again = Streams::new(&b, &a, "window");
    again.flow();
    again.finish("restored again");
    bed.assert_faultless();
}
