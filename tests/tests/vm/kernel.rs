// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's driver (`guest-driver/kernel`) in guests: AF_SMC over the device, with itself and with
//! this project's sockets. The test asks the kernel for the carrier of each connection.
//! `tests/uml/module.sh` builds the module, from `source/` and `build/` beside `KERNEL`.

use std::time::Duration;

use serde_json::json;
use smc_tests::vm::ends::{End, PORT, all_orders, begin, connection_on, give_eid};
use smc_tests::vm::figures::{BUFFERS, af_smc_next_to_tcp, set_buffers};
use smc_tests::vm::{Bed, Guest, Run, Vm};

/// Connections at a time.
const MANY: usize = 60;
/// Runs of a measurement; the median counts.
const RUNS: usize = 7;

/// A guest whose ISM device is for the kernel's driver.
fn vm(name: &str) -> Vm {
    Vm::named(name).append("ism.bind=no")
}

/// The driver with its window, and without.
const WINDOW: &str = "window=1";
const MOVES: &str = "window=0";

/// Gives the kernel its driver, and AF_SMC an enterprise id.
#[track_caller]
fn load(guest: &Guest, options: &str) {
    insert(guest, options);
    give_eid(guest);
}

#[track_caller]
fn insert(guest: &Guest, options: &str) {
    guest.ok(format!("insmod /lib/modules/virtio_ism.ko {options}"));
}

/// The device carried bytes in this way, and nothing was refused or lost.
#[track_caller]
fn assert_carried(guest: &Guest, by: &str) {
    let carried = guest.counter(by);
    assert!(carried > 8_000_000, "{}: {by}: {carried}", guest.name());
    for count in ["moves_refused", "moves_dropped", "events_unknown", "events_lost"] {
        assert_eq!(guest.counter(count), 0, "{}: {count}", guest.name());
    }
    guest.assert_no_splats();
}

// Shows: EISM-31.
#[test]
fn two_kernels_speak_smc_d_over_the_window() {
    let bed = Bed::new();
    let [a, b] = bed.boot([vm("a").cpus(2), vm("b")]);
    [&a, &b].into_iter().for_each(|guest| load(guest, WINDOW));
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    all_orders(&mut server, &mut client, MANY);
    [&a, &b].into_iter().for_each(|guest| assert_carried(guest, "store_bytes"));
    drop((server, client));
    bed.assert_faultless();
}

// Shows: EISM-31.
#[test]
fn kernels_without_the_window_speak_smc_d_by_moves() {
    let bed = Bed::new();
    let [a, b] = bed.boot([vm("a").cpus(2), vm("b")]);
    // The other end has its DMBs in the window, written by the device.
    load(&a, WINDOW);
    load(&b, MOVES);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    all_orders(&mut server, &mut client, MANY);
    [&a, &b].into_iter().for_each(|guest| assert_carried(guest, "move_bytes"));
    drop((server, client));
    bed.assert_faultless();
}

// Shows: CDC-46, CLCV2-63, CLCV2-64, EISM-11, EISM-18, EISM-19, EISM-31, RMB-33.
#[test]
fn a_kernel_and_this_projects_stack_speak_smc_d_in_both_roles() {
    let bed = Bed::new();
    let [a, b] = bed.boot([vm("a"), Vm::named("b")]);
    load(&a, WINDOW);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "rust:device=pci", &a.ip());
    all_orders(&mut server, &mut client, MANY);
    server.kill();
    client.kill();
    let mut server = End::serve(&b, "rust:device=pci");
    let mut client = End::talk(&a, "linux", &b.ip());
    all_orders(&mut server, &mut client, MANY);
    assert_carried(&a, "store_bytes");
    drop((server, client));
    bed.assert_faultless();
}

#[test]
fn an_unplugged_device_with_slabs_in_use_ends_its_connections_and_nothing_else() {
    let bed = Bed::new();
    let [a, b] = bed.boot([vm("a"), vm("b").unpluggable()]);
    [&a, &b].into_iter().for_each(|guest| load(guest, WINDOW));
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 1");
    // Both directions, and more than one DMB in a slab.
    let floods = ["flood 0 2", "pour 0 3", "flood 0 4"];
    for order in floods {
        begin(&mut server, &mut client, order);
    }
    assert!(b.counter("store_bytes") > 0, "it stores into slabs");
    b.qmp_with("device_del", &json!({ "id": "plug0" }));
    for _ in floods {
        assert_ne!(client.report().error, "", "its connection has ended");
        assert_ne!(server.report().error, "", "at the other end, too");
    }
    b.qmp_event("DEVICE_DELETED", Duration::from_secs(30));
    let left = b.ok("ls /sys/class/dibs");
    assert!(!left.contains("ism-"), "the device has gone: {left}");
    connection_on("tcp", &mut server, &mut client, "bulk 1000000 5");
    assert_eq!(a.counter("usable"), 1);
    [&a, &b].into_iter().for_each(Guest::assert_no_splats);
    drop((server, client));
    bed.assert_faultless();
}

#[test]
fn a_peer_that_lies_in_slabs_harms_only_its_connections() {
    const CONNECTIONS: usize = 10;
    let bed = Bed::new();
    // One device of the other guest is a usual peer's.
    let [a, b] = bed.boot([vm("a"), Vm::named("b").another_ism()]);
    load(&a, WINDOW);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "rust:device=pci", &a.ip());
    begin(&mut server, &mut client, "flood 0 1");
    let address = format!("{}:{PORT}", a.ip());
    let n = CONNECTIONS.to_string();
    let lie = Run::from(["smc-test-peer", "rogue", "lie", "pci", &address, &n]);
    let mut liar = b.spawn(lie.open_stdin());
    println!("{}", liar.line());
    for _ in 0..CONNECTIONS {
        assert_ne!(server.report().error, "");
    }
    // Not before: AF_SMC keeps unaccepted connections for ever (docs/linux.md).
    liar.kill();
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 2");
    assert_eq!(a.counter("usable"), 1);
    a.assert_no_splats();
    drop((server, client));
    bed.assert_faultless();
}

#[test]
#[ignore = "it measures: cargo xtask vm --slow --show-output --only kernel::af_smc"]
fn af_smc_next_to_tcp_in_figures() {
    let bed = Bed::alone();
    let [a, b] = bed.boot([vm("a"), vm("b")]);
    [&a, &b].into_iter().for_each(give_eid);
    let given = std::env::var("SMC_KERNEL_OPTIONS").ok();
    let all = given.unwrap_or_else(|| format!("{MOVES};{WINDOW}"));
    for (options, buffer) in all.split(';').flat_map(|options| BUFFERS.map(|len| (options, len))) {
        for guest in [&a, &b] {
            insert(guest, options);
            set_buffers(guest, buffer);
        }
        println!("{options}, buffers of {buffer} bytes:");
        let orders = [
            ("stream, MB/s", "stream 50000000 1"),
            ("round trip of 64 B, us", "rounds 1000 1"),
            ("connections per second", "connects 100 1"),
        ];
        af_smc_next_to_tcp([&a, &b], &a.ip(), &orders, RUNS);
        costs(&bed, &a, &b);
        for guest in [&a, &b] {
            guest.assert_no_splats();
            guest.ok("rmmod virtio_ism");
        }
    }
}

/// Prints the costs of a stream on AF_SMC, and on TCP: kicks and moves of both ends, and processor
/// time of both guests and of the daemon.
#[track_caller]
fn costs(bed: &Bed, a: &Guest, b: &Guest) {
    const MIB: f64 = 200e6 / (1 << 20) as f64;
    let count = || {
        ["kicks", "moves"].map(|name| [a, b].iter().map(|guest| guest.counter(name)).sum::<u64>())
    };
    let pids = [a.pid(), b.pid(), bed.daemon_pid()];
    for (who, kind) in [("linux", "smc-d"), ("tcp", "tcp")] {
        let mut server = End::serve(a, who);
        let mut client = End::talk(b, who, &a.ip());
        connection_on(kind, &mut server, &mut client, "ping 1000 1");
        let (before, times) = (count(), pids.map(processor_time));
        client.order("stream 200000000 1");
        assert_eq!(client.report().error, "");
        let now = pids.map(processor_time);
        let [kicks, moves] = count();
        let [kicks, moves] = [kicks - before[0], moves - before[1]].map(|n| n as f64 / MIB);
        let [server_ms, client_ms, daemon] =
            [0, 1, 2].map(|n| (now[n] - times[n]).as_secs_f64() * 1e3 / MIB);
        println!(
            "for each MiB of a stream on {kind}: {kicks:.2} kicks, {moves:.2} moves and kicks; \
             processor ms: server {server_ms:.2}, client {client_ms:.2}, daemon {daemon:.2}"
        );
        server.kill();
        client.kill();
    }
}

/// Processor time of a process of the host, in steps of 10 ms.
#[track_caller]
fn processor_time(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // utime and stime; the name before them may have spaces.
    let (_, rest) = text.rsplit_once(')').unwrap();
    let ticks: u64 = rest.split(' ').skip(12).take(2).map(|n| n.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}
