// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests migrated and saved: first their device is unplugged, in the end a device is plugged in.
//!
//! The guest `b` goes, and `a` stays. Every guest is on one Ethernet, in the role of the hosts'
//! network.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use smc_tests::eventually;
use smc_tests::interop::{ENOUGH, Report};
use smc_tests::slowly;
use smc_tests::vm::ends::{End, connection_on, give_eid};
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

use crate::ends::{Client, serve};
use crate::page::block;

/// Limit for both ends of a connection to notice an unplugged device.
fn soon() -> Duration {
    slowly(Duration::from_secs(1))
}

fn stays() -> Vm {
    Vm::named("a").lan()
}

fn goes() -> Vm {
    Vm::named("b").lan().unpluggable()
}

/// Seconds since the guest has booted.
#[track_caller]
fn uptime(guest: &Guest) -> f64 {
    let text = guest.ok("cat /proc/uptime");
    text.split(' ').next().and_then(|seconds| seconds.parse().ok()).unwrap()
}

/// A TCP connection with bytes flowing both ways all the time.
struct Tcp {
    server: End,
    client: End,
}

impl Tcp {
    #[track_caller]
    fn open(server: &Guest, client: &Guest) -> Tcp {
        let command = |what, address: &str| {
            let run = Run::from(["smc-test-peer", "interop", what, "tcp", address]);
            run.within(Duration::from_secs(180))
        };
        let address = format!("{}:5001", server.ip());
        let server = End::serve_by(server, command("serve", "0.0.0.0:5001"));
        let mut client = End::talk_by(client, command("talk", &address));
        client.order("until 0 11 &");
        assert_eq!(client.report().cell, "opened");
        Tcp { server, client }
    }

    /// Checks for every byte in both directions; returns the ends' reports, the client's first.
    #[track_caller]
    fn finish(mut self, client: &Guest) -> [Report; 2] {
        client.ok(["touch", ENOUGH]);
        let [here, there] = [self.client.report(), self.server.report()];
        client.ok(["rm", ENOUGH]);
        for report in [&here, &there] {
            assert_eq!(report.error, "");
            assert_eq!(report.carrier.kind, "tcp");
        }
        assert_eq!((here.sent, here.sent_digest), (there.received, there.received_digest));
        assert_eq!((there.sent, there.sent_digest), (here.received, here.received_digest));
        println!(
            "{} bytes there and back on TCP; longest pause: {} ms for the guest that stays, {} ms by \
             the clock of the one that goes",
            here.sent, there.pause, here.pause
        );
        [here, there]
    }
}

/// Unplugs the device of a guest with a connection. The connection ends at once, and the next one is
/// TCP.
#[track_caller]
fn unplug(guest: &Guest, client: &mut Client, server: &Job) {
    client.connect();
    assert_eq!(client.command("wait"), "waits");
    let (start, waited) = (Instant::now(), guest.run_delay());
    guest.qmp_with("device_del", &json!({ "id": "plug0" }));
    client.failed_after();
    server.wait_for("0 ended ConnectionReset");
    let took = start.elapsed();
    let waited = guest.run_delay().saturating_sub(waited);
    guest.wait_unplugged(0);
    println!("both ends hear after {took:?}, the device has gone after {:?}", start.elapsed());
    assert!(took < soon() + waited, "{took:?}, of which it waited {waited:?}");
    assert_eq!(client.command("connect"), "connected tcp");
    client.ping();
}

/// Plugs a device in, and gives the device to programs once the guest has found it.
#[track_caller]
fn plug(guest: &Guest) {
    let start = Instant::now();
    guest.plug(0);
    bind(guest);
    println!("programs may have the device {:?} after it was plugged in", start.elapsed());
}

/// Gives the device to programs once the guest has found it.
#[track_caller]
fn bind(guest: &Guest) {
    eventually("the guest has its device", || {
        guest.ok("smc devices --bind").contains("bound to vfio-pci")
    });
}

/// A program started before the device came is on SMC.
#[track_caller]
fn is_on_smc(client: &mut Client) {
    let start = Instant::now();
    client.connect_eventually();
    println!("a connection is SMC {:?} after that", start.elapsed());
}

#[test]
fn a_guest_is_migrated_without_its_device_and_speaks_smc_again() {
    let bed = Bed::new();
    let [a, mut b] = bed.boot([stays(), goes()]);
    let server = serve(&a);
    let mut client = Client::new(&b, &a);
    unplug(&b, &mut client, &server);
    let (tcp, before, qemu) = (Tcp::open(&a, &b), uptime(&b), b.pid());
    println!("{:?}", b.migrate(&bed));
    assert_ne!(b.pid(), qemu);
    assert!(uptime(&b) > before, "it has not booted");
    // A connection of TCP from before.
    client.ping();
    assert_eq!(client.command("connect"), "connected tcp");
    tcp.finish(&b);
    plug(&b);
    is_on_smc(&mut client);
    bed.assert_faultless();
}

#[test]
fn a_guest_that_comes_to_another_host_speaks_smc_with_the_guests_there() {
    let bed = Bed::new();
    let there = bed.another_host();
    let [a, mut b] = bed.boot([stays(), goes()]);
    let [c] = there.boot([Vm::named("c").lan()]);
    let [server, _at_c] = [&a, &c].map(serve);
    let mut client = Client::new(&b, &a);
    unplug(&b, &mut client, &server);
    let tcp = Tcp::open(&a, &b);
    println!("{:?}", b.migrate(&there));
    tcp.finish(&b);
    client.end();
    plug(&b);
    let mut client = Client::new(&b, &c);
    client.connect();
    assert_eq!(there.counters("b").connections, 1);
    client.end();
    // Memory of the other host's guests is no memory of this one's.
    let mut client = Client::new(&b, &a);
    assert_eq!(client.command("connect"), "connected tcp");
    client.ping();
    bed.assert_faultless();
    there.assert_faultless();
}

/// Feeds QEMU's monitor a block of the page, line by line. Repeats a line refused while the guest
/// still has the device.
#[track_caller]
fn monitor(guest: &Guest, name: &str, file: &Path) {
    let text = block(name).replace("/run/ism/b.sock", guest.socket(0).to_str().unwrap());
    for line in text.replace("/run/ism/b.state", file.to_str().unwrap()).lines() {
        let mut said = String::new();
        let accepted = || {
            said = guest.monitor(line);
            said != "Error: Chardev 'plug-socket0' is busy"
        };
        eventually(line, accepted);
        assert_eq!(said, "", "{line}");
    }
}

// By the commands of the page.
#[test]
fn a_guest_is_saved_without_its_device_and_speaks_smc_when_restored() {
    let bed = Bed::new();
    let [a, mut b] = bed.boot([stays(), goes()]);
    let (_server, file) = (serve(&a), bed.path("b.state"));
    let mut client = Client::new(&b, &a);
    client.connect();
    client.command("wait");
    monitor(&b, "monitor: unplug", &file);
    client.failed_after();
    assert_eq!(client.command("connect"), "connected tcp");
    let (tcp, before) = (Tcp::open(&a, &b), uptime(&b));
    println!("{:?}", b.save(|b| monitor(b, "monitor: save", &file)));
    assert!(!b.is_alive());
    let start = Instant::now();
    b.restore(&bed, &file);
    println!("restored after {:?}", start.elapsed());
    assert!(uptime(&b) > before, "it has not booted");
    client.ping();
    tcp.finish(&b);
    monitor(&b, "monitor: plug in", &file);
    bind(&b);
    is_on_smc(&mut client);
    bed.assert_faultless();
}

#[test]
fn a_guest_with_the_kernels_driver_is_migrated_without_its_device() {
    let bed = Bed::new();
    let [a, mut b] = bed.boot([stays(), goes()].map(|vm| vm.append("ism.bind=no")));
    for guest in [&a, &b] {
        guest.ok("insmod /lib/modules/virtio_ism.ko");
        give_eid(guest);
    }
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 1");
    client.order("pour 0 2 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
    b.unplug(0);
    for end in [&mut client, &mut server] {
        assert_ne!(end.report().error, "", "its connection has ended");
    }
    connection_on("tcp", &mut server, &mut client, "bulk 1000000 3");
    let tcp = Tcp::open(&a, &b);
    println!("{:?}", b.migrate(&bed));
    tcp.finish(&b);
    connection_on("tcp", &mut server, &mut client, "bulk 1000000 4");
    let start = Instant::now();
    b.plug(0);
    b.ok("n=0; until ls /sys/class/dibs | grep -q ism-; do n=$((n+1)); [ $n -lt 300 ] || exit 1; \
          sleep 0.1; done");
    println!("the kernel has its device after {:?}", start.elapsed());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 5");
    [&a, &b].into_iter().for_each(Guest::assert_no_splats);
    drop((server, client));
    bed.assert_faultless();
}
