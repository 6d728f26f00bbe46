// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices follow their machine: pause, reboot, crash, unplugging, more memory.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use smc_tests::slowly;
use smc_tests::vm::{Bed, Guest, Vm};

use crate::ends::{Client, PORT, serve};

/// Runs of a measurement; the median counts.
const RUNS: usize = 7;

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
        // Meanwhile connections are TCP.
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

#[test]
#[ignore = "it measures: cargo xtask vm --slow --show-output --only lifecycle::first_byte"]
fn first_byte_after_a_boot_and_after_a_restart_of_the_daemon() {
    let bed = Bed::alone();
    let plain = Vm::named("c").no_ism();
    let [a, b, c] = bed.boot([Vm::named("a"), Vm::named("b"), plain]);
    let _server = serve(&a);
    let (ip, smc) = (a.ip(), "smc connect --device pci");
    // Seconds from the kernel's first to the first byte: on SMC, on TCP in the same guest, and on TCP in a
    // guest without the device.
    let mut boots = [(); 3].map(|()| Vec::new());
    for _ in 0..RUNS {
        for (seconds, (guest, program)) in boots.iter_mut().zip([(&b, smc), (&b, "nc"), (&c, "nc")])
        {
            guest.reset();
            seconds.push(first_byte(guest, &format!("{program} {ip} {PORT}")));
        }
    }
    let more: Vec<f64> = boots[0].iter().zip(&boots[1]).map(|(smc, tcp)| smc - tcp).collect();
    println!("a first byte on SMC after a boot is later than on TCP by {} s", scatter(&more));
    let [smc, tcp, without] = boots.map(|seconds| scatter(&seconds));
    println!("first byte after a boot: SMC {smc} s, TCP {tcp} s, TCP without a device {without} s");
    // Seconds from the daemon's start to a connection of any kind, and to one on SMC.
    let mut starts = [(); 2].map(|()| Vec::new());
    let mut client = Client::new(&b, &a);
    for _ in 0..RUNS {
        client.connect_eventually();
        bed.kill_daemon();
        assert_eq!(client.command("connect"), "connected tcp");
        client.ping();
        let start = Instant::now();
        bed.start_daemon();
        let answers = Instant::now();
        client.command("connect");
        client.ping();
        starts[0].push(answers.elapsed().as_secs_f64());
        client.connect_eventually();
        starts[1].push(start.elapsed().as_secs_f64());
    }
    let [any, smc] = starts.map(|seconds| scatter(&seconds));
    println!("after the daemon's start: a first byte on anything takes {any} s, on SMC {smc} s");
}

/// The guest's uptime, seconds, when the first byte of an echo has come through a program.
#[track_caller]
fn first_byte(guest: &Guest, program: &str) -> f64 {
    let line = format!(
        "echo x | {program} | {{ head -c 1; read up rest < /proc/uptime; echo \" $up\"; }}"
    );
    let said = guest.ok(line);
    let seconds = said.strip_prefix("x ").and_then(|seconds| seconds.trim().parse().ok());
    seconds.unwrap_or_else(|| panic!("{program}: {said}"))
}

/// The median, the smallest and the largest.
fn scatter(all: &[f64]) -> String {
    let mut all = all.to_vec();
    all.sort_unstable_by(f64::total_cmp);
    format!("{:.2} [{:.2} .. {:.2}]", all[all.len() / 2], all[0], all[all.len() - 1])
}
