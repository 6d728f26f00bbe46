//! The conformance suite of the host transport, with its two ends in two virtual machines.

use std::time::Duration;

use smc_tests::vm::{Bed, Guest, Run};

/// Runs a part of the suite in `b` against an agent in `a`.
#[track_caller]
fn passes(part: &str) {
    let bed = Bed::new();
    let [a, b] = bed.pair();
    let mut agent = a.spawn(["smc-test-peer", "agent", "pci", "0.0.0.0:7711"]);
    println!("{}", agent.line());
    let output = b.run(suite(&a, part));
    let lines = output.out.lines().filter(|line| line.contains("test result"));
    println!("{part}: {}", lines.collect::<Vec<_>>().join("\n"));
    assert_eq!(output.code(), 0, "{output}");
    assert!(!output.out.contains(" 0 passed"), "{output}");
    bed.assert_faultless();
}

fn suite(agent: &Guest, part: &str) -> Run {
    let run = Run::from(["conformance", "--ignored", "--test-threads=1", part]);
    run.env("SMC_TEST_FAR", &format!("{}:7711", agent.ip()))
        .env("SMC_TEST_DEVICE", "pci")
        .env("SMC_TEST_SLOW", "5")
        .within(Duration::from_secs(480))
}

#[test]
fn over_the_window() {
    passes("far::window");
}

#[test]
fn over_moves() {
    passes("far::moves");
}

#[test]
fn over_tcp_after_a_decline() {
    passes("far::fallback");
}

#[test]
fn over_the_window_with_the_server_here() {
    passes("far::turned::window");
}
