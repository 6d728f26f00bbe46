// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-R between two guests, both of them this project's.

use std::thread;
use std::time::Duration;

use smc_tests::interop::Report;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

const LIMIT: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug)]
enum End {
    Client,
    Server,
}

/// A server and a client, each with a stack of its own.
struct Ends {
    server: Job,
    client: Job,
}

impl Ends {
    /// Starts both ends; `who` is the argument of `smc_tests::interop::Net`.
    #[track_caller]
    fn new(a: &Guest, b: &Guest, who: &str, address: &str) -> Ends {
        let listen = if address.contains('[') { "[::]:5000" } else { "0.0.0.0:5000" };
        let log = "guest_driver=debug";
        let run = |words: [&str; 5]| Run::from(words).env("RUST_LOG", log).within(LIMIT);
        let mut server = a.spawn(run(["smc-test-peer", "interop", "serve", who, listen]));
        assert_eq!(server.line(), "ready");
        let client = b.spawn(run(["smc-test-peer", "interop", "talk", who, address]).open_stdin());
        Ends { server, client }
    }

    /// The next report of an end.
    #[track_caller]
    fn report(&mut self, end: End) -> Report {
        let job = match end {
            End::Client => &mut self.client,
            End::Server => &mut self.server,
        };
        let line = job.line();
        let report: Report = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(report.error, "", "{report:?}");
        assert_eq!(report.carrier.kind, "smc-r", "{report:?}");
        report
    }

    /// Gives an order and checks both ends' reports for success over SMC-R.
    #[track_caller]
    fn order(&mut self, order: &str) -> [Report; 2] {
        self.client.feed(&format!("{order}\n"));
        let reports = [End::Client, End::Server].map(|end| self.report(end));
        let [client, server] = &reports;
        assert_eq!(client.sent_digest, server.received_digest, "{order}");
        assert_eq!(server.sent_digest, client.received_digest, "{order}");
        println!("{order}: {} ms, {:?}", client.millis, client.carrier);
        reports
    }
}

/// Two guests with so many adapters each.
fn guests(bed: &Bed, adapters: u32) -> [Guest; 2] {
    bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(adapters)))
}

/// Abilities of any connection, over any link.
fn works(ends: &mut Ends, version: u8) {
    let [first, _] = ends.order("ping 10000 1");
    assert_eq!(first.carrier.version, version);
    let [second, _] = ends.order("ping 10000 2");
    assert_eq!(first.carrier.group, second.carrier.group, "one link group for both");
    ends.order("bulk 1000000 3");
    ends.order("wrap 200000 4");
    ends.order("window 0 5");
    ends.order("half 200000 6");
    ends.order("urgent 0 7");
}

// Shows: CLC-21, CLC-31, CLC-32, CLC-38, CLC-39, CLC-41, LG-55.
#[test]
fn version_2_carries_ipv4_and_ipv6() {
    let bed = Bed::new();
    let [a, b] = guests(&bed, 1);
    let mut ends = Ends::new(&a, &b, "rust", &format!("{}:5000", a.ip()));
    works(&mut ends, 2);
    drop(ends);
    let mut ends = Ends::new(&a, &b, "rust", &format!("[{}]:5000", a.ip6_on(0)));
    works(&mut ends, 2);
}

// Shows: CLC-21, CLC-38, CLC-39, LG-19, RMB-30.
#[test]
fn version_1_carries_ipv4_over_two_links() {
    let bed = Bed::new();
    let [a, b] = guests(&bed, 2);
    let mut ends = Ends::new(&a, &b, "rust:v1", &format!("{}:5000", a.ip()));
    works(&mut ends, 1);
}

/// Two networks on one Ethernet, with a router between them.
// Shows: LG-55.
#[test]
fn a_router_may_be_in_between_in_version_2_only() {
    let bed = Bed::new();
    let end = |name| Vm::named(name).no_ism().rnics(1);
    let [a, router, b] = bed.boot([end("a"), Vm::named("r").no_ism(), end("b")]);
    router.ok("for net in 1 2; do ip addr add 10.$net.0.254/24 dev eth0 || exit; done");
    router.ok("echo 1 > /proc/sys/net/ipv4/ip_forward");
    router.ok("for file in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 > $file; done");
    for (guest, here, there) in [(&a, 1, 2), (&b, 2, 1)] {
        guest.ok("ip addr flush dev eth0");
        guest.ok(format!("ip addr add 10.{here}.0.1/24 dev eth0"));
        guest.ok(format!("ip route add 10.{there}.0.0/24 via 10.{here}.0.254"));
    }
    let forwarded = || -> u64 {
        router.ok("awk '/^Ip: [0-9]/ {print $7}' /proc/net/snmp").trim().parse().unwrap()
    };
    let before = forwarded();
    let mut ends = Ends::new(&a, &b, "rust", "10.1.0.1:5000");
    works(&mut ends, 2);
    drop(ends);
    // Writes of at most 1 KiB: RDMA went through the router as well.
    let packets = forwarded() - before;
    assert!(packets > 2 * 1_000_000 / 1024, "{packets} packets");
    // Version 1 does not leave its link (RFC 7609 section 3.5.1.3).
    let server = a.spawn(Run::from("smc listen -v --tcp-ok --smcr v1 5000"));
    server.wait_for("listening");
    let client = b.run("echo hello | smc connect -v --tcp-ok --smcr v1 10.1.0.1 5000");
    println!("{client}");
    assert_eq!(server.wait().ok(), "hello\n");
    assert!(client.err.contains("TCP"), "{client}");
}

// Shows: RMB-6.
#[test]
fn elements_may_begin_with_eye_catchers() {
    let bed = Bed::new();
    let [a, b] = guests(&bed, 2);
    for (who, version) in [("rust:eyes", 2), ("rust:eyes,v1", 1)] {
        let mut ends = Ends::new(&a, &b, who, &format!("{}:5000", a.ip()));
        works(&mut ends, version);
    }
}

#[test]
fn the_command_needs_no_options() {
    let bed = Bed::new();
    let [a, b] = guests(&bed, 1);
    let server = a.spawn(Run::from(["smc", "listen", "-v", "5000"]).env("RUST_LOG", "debug"));
    server.wait_for("listening");
    let line = format!("echo hello | RUST_LOG=debug smc connect -v {} 5000", a.ip());
    let client = b.run(Run::from(line));
    println!("{client}\n{}", server.err());
    assert_eq!(client.code(), 0);
    assert_eq!(server.wait().ok(), "hello\n");
    assert!(client.err.contains("SMC-R v2.1"), "{client}");
}

// Shows: LG-28.
#[test]
fn further_links_stay_on_the_physical_network_of_the_first() {
    let bed = Bed::new();
    let [a, b] = guests(&bed, 2);
    let links = |who: &str| {
        let mut ends = Ends::new(&a, &b, who, &format!("{}:5000", a.ip()));
        ends.order("ping 1000 1");
        // A second link would be there by now: it is added before the first connection.
        let [client, server] = ends.order("ping 1000 2");
        [client.carrier.links, server.carrier.links]
    };
    assert_eq!(links("rust:pnet=rxe0:ONE,pnet=rxe1:ONE"), [2, 2]);
    assert_eq!(links("rust:pnet=rxe0:ONE,pnet=rxe1:OTHER"), [1, 1]);
}

// Shows: LG-32.
#[test]
fn connections_leave_a_needless_link_once_what_is_under_way_has_arrived() {
    let bed = Bed::new();
    // All adapters reach each other.
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().lan().rnics(2)));
    for (guest, number) in [(&a, 11), (&b, 12)] {
        guest.ok("echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore");
        guest.ok(format!("ip addr flush dev eth1; ip addr add 10.0.0.{number}/24 dev eth1"));
    }
    b.ok("ip link set eth1 down");
    // Clients of version 2.1 with one adapter ask for one link.
    let mut ends = Ends::new(&a, &b, "rust:v1", &format!("{}:5000", a.ip()));
    let [first, _] = ends.order("ping 1000 1");
    assert_eq!(first.carrier.links, 2, "the second one ends at the client's only adapter, too");
    // Two connections, one of them on the asymmetric link.
    ends.client.feed("bulk 12582912 2 &\nbulk 12582912 3 &\n");
    for _ in 0..2 {
        assert_eq!(ends.report(End::Client).cell, "opened");
    }
    thread::sleep(Duration::from_millis(500));
    b.ok("ip link set eth1 up");
    let reports = [End::Client, End::Client, End::Server, End::Server].map(|end| ends.report(end));
    let digests = |reports: &[Report], of: fn(&Report) -> u64| {
        let mut digests: Vec<_> = reports.iter().map(of).collect();
        digests.sort_unstable();
        digests
    };
    let (client, server) = reports.split_at(2);
    for (sender, receiver) in [(client, server), (server, client)] {
        let sent = digests(sender, |report| report.sent_digest);
        assert_eq!(sent, digests(receiver, |report| report.received_digest));
    }
    // Both ends waited, and stopped nothing.
    for job in [&ends.server, &ends.client] {
        let log = job.err();
        let moves: Vec<_> = log.lines().filter(|line| line.contains("connections moved")).collect();
        assert!(matches!(moves[..], [only] if only.contains("in_order=true")), "{moves:?}\n{log}");
    }
    let [last, _] = ends.order("ping 1000 4");
    assert_eq!((last.carrier.links, last.carrier.group), (2, first.carrier.group));
}

// Shows: CLCV2-35.
#[test]
fn an_adapter_of_the_same_physical_network_serves_another_interface() {
    let bed = Bed::new();
    let [a, b] = guests(&bed, 2);
    // The only adapter in use has another interface than the connection.
    let talk = |options: &str| {
        let server = a.spawn(Run::from(format!("smc listen -v --rnic rxe1 {options} 5000")));
        server.wait_for("listening");
        let ip = a.ip();
        let line = format!("echo hello | smc connect -v --rnic rxe1 {options} {ip} 5000");
        (b.run(Run::from(line)), server.wait())
    };
    let (client, server) = talk("--pnet eth0=NET,rxe1=NET");
    assert_eq!(server.ok(), "hello\n");
    assert!(client.err.contains("on rxe1/1, 10.0.1.2"), "{client}");
    let (client, server) = talk("--tcp-ok --pnet eth0=NET,rxe1=OTHER");
    assert_eq!(server.ok(), "hello\n");
    assert!(client.err.contains("TCP"), "{client}");
}
