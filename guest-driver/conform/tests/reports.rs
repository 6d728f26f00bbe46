// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reports of a run with failed cases: rules in words, values, causes, and commands.

#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod target;

use std::time::{Duration, UNIX_EPOCH};

use smc_conform::{Options, Report, RunHeader, Target, run};
use smc_core::handshake::Kinds;
use target::{Fault, Host, Server, names};

/// Breaks the trailer of a Decline, and the EID of an Accept.
fn spoil(message: &mut [u8]) {
    if let [0xe2, 0xd4, 0xc3, 0xd9, 4, .., last] = message {
        *last ^= 1;
    }
    if let [0xe2, 0xd4, 0xc3, _, 2, ..] = message
        && let Some(byte) = message.get_mut(34)
    {
        *byte = b'X';
    }
}

fn with_report(only: &str, check: impl FnOnce(&Report<'_>)) {
    let fault = Fault { outgoing: |message| spoil(message), ..Fault::NONE };
    let server = Server::start(Host::of(Kinds::SMCD_V2), fault);
    let options = Options {
        target: Target::Server(server.address),
        echo: true,
        aggressive: false,
        connections: 4,
        wait: Duration::from_secs(5),
        time_factor: 1,
        only: vec![only.into()],
        layers: vec!["clc".into()],
        fabric: None,
        rdma: None,
        announce: None,
        names: names(&server.host),
    };
    let results = run(target::cases(), &options, &target::progress).unwrap();
    let about = RunHeader {
        program: "suite".into(),
        command: "suite server:1".into(),
        again: "suite server:1 --only ".into(),
        target: "server:1".into(),
        began: UNIX_EPOCH,
        not_tried: Vec::new(),
    };
    check(&Report { results: &results, about: &about });
}

#[test]
fn failed_cases_are_grouped_by_cause_with_rules_in_words_and_a_command() {
    with_report("server-decline", |report| {
        let failed = report.results.failed_musts();
        assert!(failed > 1);
        let text = report.text(false);
        let cause = "cases: came a message that cannot be read: decline does not end with the eye \
                     catcher it begins with";
        assert_eq!(text.matches(cause).count(), 1, "{text}");
        assert!(text.contains("\n    Again: suite server:1 --only '=server-decline-"), "{text}");
        assert!(text.contains("\n    CLC-4 (must; RFC 7609 "), "{text}");
        let html = report.html();
        let first = html.find("class=\"case ").unwrap();
        assert!(html[first..].starts_with("class=\"case fail"));
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        let rules = json["requirements"].as_array().unwrap();
        let rule = rules.iter().find(|rule| rule["id"] == "CLC-4").unwrap();
        assert_eq!(rule["level"], "must");
        assert!(rule["text"].as_str().unwrap().len() > 10);
        let junit = report.junit();
        assert!(junit.contains("CLC-4 (must; RFC 7609 ") && junit.contains(" ms, target: e2d4c3"));
        let ktap = report.ktap();
        let count = report.results.results.len();
        assert!(ktap.starts_with(&format!("KTAP version 1\n1..{count}\n")), "{ktap}");
        let lines = |start: &str| ktap.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(lines("ok ") + lines("not ok "), count);
        assert!(lines("not ok ") >= failed && ktap.contains("# SKIP "));
    });
}

#[test]
fn a_wrong_name_is_shown_as_text_beside_the_expected_one() {
    with_report("=server-accept-eid", |report| {
        let text = report.text(false);
        assert_eq!(report.results.results.len(), 1, "one case is named");
        assert!(text.contains("eid, at byte 34, is \"XONFORMANCE\" (584f4e46"), "{text}");
        assert!(
            text.contains("expected \"CONFORMANCE\" (434f4e46") && text.contains(": $eid\n"),
            "{text}"
        );
    });
}
