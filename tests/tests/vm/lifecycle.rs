//! What happens to machines happens to devices: pause, reboot, crash, unplugging, more memory.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use smc_tests::slowly;
use smc_tests::vm::{Bed, Vm};

use crate::ends::{Client, serve};

/// How soon the survivor of a connection must hear of its end: within a second, where machines are not
/// known to be slow.
fn soon() -> Duration {
    slowly(Duration::from_secs(1))
}

#[test]
fn connections_outlive_a_pause() {
    let bed = Bed::new();
    let [a, b] = bed.pair();
    let mut server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    assert_eq!(server.line(), "0 accepted smc");
    let gid = client.command("gid");
    for guest in [&a, &b] {
        guest.pause();
        // The daemon sees the rings of a paused guest stopped.
        thread::sleep(Duration::from_millis(1500));
        guest.resume();
        client.ping();
    }
    assert_eq!(client.command("gid"), gid);
    assert_eq!(bed.counters("b").connections, 1);
    bed.assert_faultless();
}

#[test]
fn a_reboot_ends_connections_at_once_and_the_guest_comes_back() {
    let bed = Bed::new();
    let [a, b] = bed.pair();
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    assert_eq!(client.command("wait"), "waits");
    let start = Instant::now();
    a.rebooting(|| {
        a.qmp("system_reset");
        client.failed_after();
        let took = start.elapsed();
        println!("the peer of a guest that reboots heard after {took:?}");
        assert!(took < soon(), "{took:?}");
    });
    let _server = serve(&a);
    client.connect();
    bed.assert_faultless();
}

#[test]
fn a_driver_that_is_killed_leaves_the_fabric_and_its_device_can_be_used_again() {
    let bed = Bed::new();
    let [a, b] = bed.pair();
    let server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    assert_eq!(client.command("stream"), "streams");
    let start = Instant::now();
    server.kill();
    client.ended_by_kill();
    println!("the peer of a killed driver heard after {:?}", start.elapsed());
    assert!(start.elapsed() < soon(), "{:?}", start.elapsed());
    let _server = serve(&a);
    client.connect();
    bed.assert_faultless();
}

#[test]
fn a_killed_daemon_resets_connections_within_a_second_and_new_ones_work() {
    let bed = Bed::new();
    let [a, b] = bed.pair();
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    for background in ["stream", "wait"] {
        client.connect_eventually();
        let gid = client.command("gid");
        client.command(background);
        let start = Instant::now();
        bed.kill_daemon();
        let silent = client.failed_after();
        println!("{background}: heard after {:?} ({silent} ms by the guest)", start.elapsed());
        assert!(start.elapsed() < soon(), "{background}: {:?}", start.elapsed());
        // Meanwhile it is TCP.
        assert_eq!(client.command("connect"), "connected tcp");
        client.ping();
        bed.start_daemon();
        client.connect_eventually();
        assert_ne!(client.command("gid"), gid, "a GID never comes back");
    }
}

#[test]
fn more_memory_changes_nothing_for_connections() {
    let bed = Bed::new();
    let hotplug = |name| Vm::named(name).mem("512M,slots=4,maxmem=2G");
    let [a, b] = bed.boot([hotplug("a"), hotplug("b")]);
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    for n in 0..3 {
        // Each makes QEMU send the memory table again, to all its back ends.
        let (file, dimm) = (format!("file{n}"), format!("dimm{n}"));
        let size = 128 << 20;
        let object = json!({ "qom-type": "memory-backend-memfd", "id": file, "size": size,
                             "share": true });
        for guest in [&a, &b] {
            guest.qmp_with("object-add", &object);
            let device = json!({ "driver": "pc-dimm", "id": dimm, "memdev": file });
            guest.qmp_with("device_add", &device);
        }
        client.ping();
        client.connect();
    }
    bed.assert_faultless();
}

#[test]
fn an_unplugged_device_ends_its_connections_and_nothing_else() {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a"), Vm::named("b").unpluggable()]);
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    client.command("wait");
    b.qmp_with("device_del", &json!({ "id": "plug0" }));
    client.failed_after();
    b.qmp_event("DEVICE_DELETED", Duration::from_secs(30));
    assert_eq!(client.command("connect"), "connected tcp");
    client.ping();
    assert_eq!(b.ok(["smc", "devices", "--json"]).trim(), "[]");
}
