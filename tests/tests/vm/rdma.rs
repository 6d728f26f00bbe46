// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests with RDMA adapters, and Linux's own SMC between them.

use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest, Run, Vm};

/// The lines about an adapter.
#[track_caller]
fn adapter(guest: &Guest, name: &str) -> Vec<String> {
    let text = guest.ok(["smc-test-peer", "rdma", "show"]);
    let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("{name} ")));
    let first = lines.next().unwrap_or_else(|| panic!("no {name}: {text}")).to_owned();
    let gids = lines.take_while(|line| line.starts_with(' ')).map(str::to_owned);
    std::iter::once(first).chain(gids).collect()
}

#[test]
fn guests_have_adapters_with_addresses_and_nodes() {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a").no_ism().rnics(2), Vm::named("b").no_ism().rnics(1)]);
    for (guest, name, nic, n) in [(&a, "rxe0", 0, 1), (&a, "rxe1", 1, 1), (&b, "rxe0", 0, 2)] {
        // An IPv6 address comes into the table in the background.
        let ip6 = format!("fd00:000{nic}:0000:0000:0000:0000:0000:000{n} RoCE v2 eth{nic}");
        eventually("the adapter has its addresses", || {
            adapter(guest, name).iter().any(|line| line.ends_with(&ip6))
        });
        let lines = adapter(guest, name);
        assert_eq!(lines[0], format!("{name} 4: ACTIVE /dev/infiniband/uverbs{nic}"));
        let ip = format!("0000:0000:0000:0000:0000:ffff:0a00:0{nic}0{n} RoCE v2 eth{nic}");
        assert!(lines.iter().any(|line| line.ends_with(&ip)), "{lines:?}");
        guest.ok(format!("test -c /dev/infiniband/uverbs{nic}"));
    }
    assert!(!b.ok(["smc-test-peer", "rdma", "show"]).contains("rxe1"));
    for address in [b.ip(), b.ip6_on(0)] {
        a.ok(format!("ping -c 1 -W 20 {address}"));
    }
}

#[test]
fn an_adapter_goes_down_and_comes_back_with_its_interface_and_its_cable() {
    let bed = Bed::new();
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(2)));
    let state = || adapter(&a, "rxe1")[0].split(' ').nth(2).unwrap().to_owned();
    assert_eq!(state(), "ACTIVE");
    a.ok("ip link set eth1 down");
    eventually("the port is down", || state() == "DOWN");
    a.ok("ip link set eth1 up");
    eventually("the port is up", || state() == "ACTIVE");
    a.set_cable(1, false);
    eventually("the port has noticed", || state() == "DOWN");
    a.set_cable(1, true);
    eventually("the port is up again", || state() == "ACTIVE");
    a.ok(format!("ping -c 1 -W 20 {}", b.ip_on(1)));
    b.ok(["smc-test-peer", "rdma", "remove", "rxe1"]);
    assert!(!b.ok(["smc-test-peer", "rdma", "show"]).contains("rxe1"));
}

/// The driver's own test programs, a process per test, for each leaves something behind.
#[track_caller]
fn passes(guest: &Guest, program: &str, options: &str) {
    let list = guest.ok(format!("{program} {options} --list"));
    let tests: Vec<&str> = list.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    assert!(!tests.is_empty(), "{list}");
    for test in &tests {
        guest.ok(Run::from(format!("{program} {options} --exact {test}")).env("CI", "true"));
    }
    println!("{program}: {} tests", tests.len());
}

#[test]
fn verbs_do_what_the_driver_expects_of_them() {
    let bed = Bed::new();
    let [guest] = bed.boot([Vm::named("a").tests().no_ism().lan().rnics(1)]);
    passes(&guest, "verbs-rxe", "--ignored --skip cost");
}

#[test]
fn tcp_options_are_sent_and_seen() {
    let bed = Bed::new();
    let [guest] = bed.boot([Vm::named("a").tests().no_ism()]);
    // The kernel of the guests has no SYN cookies.
    passes(&guest, "rendezvous", "--skip syn_cookies");
}
