// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The conformance suite of the host transport, with its two ends in two virtual machines.

use std::time::Duration;

use smc_tests::vm::{Bed, Guest, Run, Vm};

/// Runs parts of the suite in `b` against an agent in `a`.
#[track_caller]
fn passes(parts: &[&str]) {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a"), Vm::named("b").tests()]);
    let mut agent = a.spawn(["smc-test-peer", "agent", "pci", "0.0.0.0:7711"]);
    println!("{}", agent.line());
    let output = b.run(suite(&a, parts));
    let lines = output.out.lines().filter(|line| line.contains("test result"));
    println!("{parts:?}: {}", lines.collect::<Vec<_>>().join("\n"));
    assert_eq!(output.code(), 0, "{output}");
    assert!(!output.out.contains(" 0 passed"), "{output}");
    bed.assert_faultless();
}

fn suite(agent: &Guest, parts: &[&str]) -> Run {
    let run =
        Run::new(["conformance", "--ignored", "--test-threads=1"].iter().chain(parts).copied());
    run.env("SMC_TEST_FAR", &format!("{}:7711", agent.ip()))
        .env("SMC_TEST_DEVICE", "pci")
        .env("SMC_TEST_SLOW", "5")
        .within(Duration::from_secs(480))
}

smc_test_support::tests_of! {
    passes:
    fn over_the_window(&["far::window"]);
    fn over_moves(&["far::moves"]);
    /// Bytes and ends: the rest is as between processes.
    fn over_tcp_after_a_decline(&["close::far::fallback", "data::far::fallback"]);
    /// Bytes and ends: all of the suite has the roles like this over moves.
    fn over_the_window_with_the_server_here(&["close::far::turned::window", "data::far::turned::window"]);
}

/// Runs a part of the suite over SMC-R between guests with so many RNICs, on the network of `ip6` or
/// of IPv4.
#[track_caller]
fn passes_over_rdma(part: &str, rnics: u32, ip6: bool) {
    let bed = Bed::new();
    let vms = [Vm::named("a"), Vm::named("b").tests()];
    let [a, b] = bed.boot(vms.map(|vm| vm.no_ism().rnics(rnics).mtu(9000)));
    let (any, address) = match ip6 {
        true => ("[::]:7711", format!("[{}]:7711", a.ip6_on(0))),
        false => ("0.0.0.0:7711", format!("{}:7711", a.ip())),
    };
    let mut agent = a.spawn(Run::from(["smc-test-peer", "agent", "none", any]).within(LONG));
    println!("{}", agent.line());
    let run = Run::from(["conformance", "--ignored", "--test-threads=1", part]);
    let output = b.run(run.env("SMC_TEST_FAR", &address).env("SMC_TEST_SLOW", "5").within(LONG));
    let lines = output.out.lines().filter(|line| line.contains("test result"));
    println!("{part}, {rnics} RNICs: {}", lines.collect::<Vec<_>>().join("\n"));
    assert_eq!(output.code(), 0, "{output}");
    assert!(!output.out.contains(" 0 passed"), "{output}");
}

/// How long the whole suite may take between machines.
const LONG: Duration = Duration::from_secs(900);

smc_test_support::tests_of! {
    passes_over_rdma:
    // Shows: CLC-44.
    fn over_rdma_by_ipv4("::far::rdma::", 1, false);
    #[ignore = "long: the suite over soft-RoCE under emulation"]
    fn over_rdma_by_ipv6("::far::rdma::", 1, true);
    #[ignore = "long: the suite over soft-RoCE under emulation"]
    fn over_rdma_with_two_rnics_and_the_server_here("::far::turned::rdma::", 2, false);
    #[ignore = "long: the suite over soft-RoCE under emulation"]
    fn over_rdma_version_1_by_ipv4("::far::rdma_v1::", 1, false);
    #[ignore = "long: the suite over soft-RoCE under emulation"]
    fn over_rdma_version_1_by_ipv6_with_two_rnics("::far::rdma_v1::", 2, true);
}

/// Plays the messages and data of links by `smc conform` over soft-RoCE. Panics on a failed MUST, or if
/// few cases of a level pass.
#[track_caller]
fn plays_links(b: &Guest, command: &str) {
    let played = b.run(Run::from(command).within(LONG));
    let report: serde_json::Value =
        serde_json::from_str(&played.out).unwrap_or_else(|error| panic!("{error}: {played}"));
    println!("facts {}; {}; {} s", report["facts"], report["summary"], report["seconds"]);
    // The report has thousands of lines: print only the failed cases, with their exchanges.
    let cases = report["cases"].as_array().unwrap().iter();
    let failed: Vec<String> = cases
        .filter(|one| one["verdict"] == "FAIL")
        .map(|one| {
            format!("{} [{}]: {}\n{:#}", one["id"], one["level"], one["says"], one["exchanges"])
        })
        .collect();
    println!("{}", failed.join("\n"));
    let deviates = |one: &&serde_json::Value| one["verdict"] == "DEVIATES-AS-LINUX";
    let cases = report["cases"].as_array().unwrap().iter();
    for one in cases.filter(deviates) {
        println!("as Linux does: {} {}", one["id"], one["says"]);
    }
    assert_eq!(report["failed_musts"], 0, "{} cases failed", failed.len());
    for (layer, fewest) in [("llc", 60), ("cdc", 17)] {
        let cases = report["cases"].as_array().unwrap().iter();
        let passed = cases.filter(|one| one["layer"] == layer && one["verdict"] == "PASS").count();
        assert!(passed >= fewest, "{passed} cases of {layer} passed");
    }
}

// Shows: LLC-10, LLC-12, LLC-58.
#[test]
fn a_server_keeps_the_rules_of_links() {
    let bed = Bed::new();
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(1)));
    let _server = a.spawn(Run::from("smc listen --echo --tcp-ok --device none 5000").within(LONG));
    let address = format!("{}:5000", a.ip());
    let suite = "smc conform --echo --rnic any --level llc,cdc --connections 2 --json -";
    plays_links(&b, &format!("{suite} {address}"));
}

// Shows: LLC-13, LLC-20, ERR-14.
#[test]
#[ignore = "long: clients that get no Confirm Link wait for 20 s"]
fn a_client_keeps_the_rules_of_links() {
    let bed = Bed::new();
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(1)));
    let clients =
        format!("while true; do smc connect --echo --tcp-ok --device none {}:5000; done", b.ip());
    let _clients = a.spawn(Run::new(["sh", "-c", &clients]).within(LONG));
    let suite = "smc conform --echo --rnic any --level llc,cdc --wait 60 --json - --listen 5000";
    plays_links(&b, suite);
}
