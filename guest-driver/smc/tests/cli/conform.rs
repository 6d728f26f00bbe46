// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc conform` against `smc listen` and `smc connect`: no MUST fails.

use std::process::Output;

use crate::support::{Fabric, run, text};

/// The ids of the report's cases with a verdict.
fn named<'a>(report: &'a serde_json::Value, verdict: &str) -> Vec<&'a str> {
    let cases = report["cases"].as_array().unwrap().iter();
    cases.filter(|one| one["verdict"] == verdict).filter_map(|one| one["id"].as_str()).collect()
}

fn check(output: &Output, fewest: usize) -> serde_json::Value {
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    let failed: Vec<_> = report["cases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["verdict"] == "FAIL" && one["level"] == "must")
        .map(|one| format!("{} {}", one["id"], one["says"]))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert_eq!(output.status.code(), Some(0));
    let passed = named(&report, "PASS").len();
    assert!(passed >= fewest, "{passed} passed");
    report
}

#[test]
fn a_server_of_the_project_fails_no_must() {
    let fabric = Fabric::start("conform-server");
    let (_server, port, _log) = fabric.listen(&["--echo", "--tcp-ok", "--rnic", "none"]);
    let device = fabric.directory().join("smc/b.sock");
    let html = fabric.directory().join("report.html");
    let junit = fabric.directory().join("report.xml");
    let mut command = fabric.smc(&["conform", "--echo", "--aggressive", "--json", "-"]);
    command.args(["--level", "clc,cdc"]);
    command.arg("--device").arg(device).arg("--html").arg(&html).arg("--junit").arg(&junit);
    let output = command.arg(format!("127.0.0.1:{port}")).output().unwrap();
    let report = check(&output, 750);
    for fact in ["smc", "d2", "confirm", "release-2.1", "device", "data"] {
        assert!(report["facts"].as_array().unwrap().contains(&fact.into()), "{fact}");
    }
    let exchanges = &report["cases"][0]["exchanges"];
    assert_eq!(exchanges[0]["from"], "suite");
    assert!(exchanges[0]["explained"].as_str().unwrap().starts_with("CLC Proposal, version 2"));
    let html = std::fs::read_to_string(html).unwrap();
    assert!(html.contains("No MUST failed.") && html.contains("server-accept-eye"));
    let junit = std::fs::read_to_string(junit).unwrap();
    assert!(junit.contains("failures=\"0\"") && junit.contains("<testcase "));
}

#[test]
fn a_client_of_the_project_fails_no_must() {
    let fabric = Fabric::start("conform-client");
    let [own, other] = ["any", "b"].map(|name| fabric.directory().join("smc").join(name));
    let client = format!(
        "{} connect --echo --rnic none --tcp-ok --device {}.sock 127.0.0.1:{{port}}",
        env!("CARGO_BIN_EXE_smc"),
        own.display()
    );
    let mut command =
        fabric.smc(&["conform", "--echo", "--json", "-", "--listen", "0", "--run", &client]);
    command.args(["--wait", "60"]).arg("--device").arg(other.with_extension("sock"));
    // A report of a failure then has the reason known to the client.
    command.env("SMC_LOG", "guest_driver::handshake=debug");
    let report = check(&command.output().unwrap(), 260);
    let data = named(&report, "PASS").iter().filter(|id| id.starts_with("cdc-client-")).count();
    assert!(data > 60, "{data} cases of data passed");
    assert_eq!(named(&report, "DEVIATES-AS-LINUX"), ["client-proposal-v2-mac"]);
}

#[test]
fn a_server_without_smc_is_sent_one_message_and_nothing_more() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        let mut first = listener.accept().unwrap().0;
        let mut bytes = vec![0; 224];
        std::io::Read::read_exact(&mut first, &mut bytes).unwrap();
        std::io::Write::write_all(&mut first, b"HTTP/1.0 400 Bad Request\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut first, &mut rest).unwrap();
        listener.set_nonblocking(true).unwrap();
        (rest.len(), listener.accept().is_err())
    });
    let output = run(&["conform", "--level", "clc", &address]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("does not speak SMC"), "{said}");
    assert_eq!(server.join().unwrap(), (0, true));
}

#[test]
fn a_server_whose_declines_are_wrong_is_tested_and_not_taken_for_one_without_smc() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // The thread ends with the test.
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut decline = [0; 28];
            decline[..8].copy_from_slice(&[0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10]);
            decline[16..20].copy_from_slice(&[3, 3, 0, 0]);
            decline[24..].copy_from_slice(b"oops");
            let _ = std::io::Read::read(&mut client, &mut [0; 1024]);
            let _ = std::io::Write::write_all(&mut client, &decline);
        }
    });
    let one = "server-decline-own-v1";
    let output = run(&["conform", "--level", "clc", "--json", "-", "--only", one, &address]);
    let said = text(&output.stderr);
    assert!(!said.contains("does not speak SMC"), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(named(&report, "FAIL"), [one], "{report}");
}

#[test]
fn the_cases_are_listed_and_those_of_a_directory_are_added() {
    let output = run(&["conform", "--list"]);
    let listed = text(&output.stdout);
    assert!(output.status.success());
    assert!(listed.contains("server-types-answer [must; CLC-3 CLC-5 CLC-6 CLC-23]"), "{listed}");
    let fabric = Fabric::start("conform-list");
    let file = "layer = 'clc'\nrole = 'server'\nprefix = 'mine'\n[[case]]\nid = 'one'\n\
                title = 'Mine'\nrules = ['CLC-9']\nsay = [{ send = 'foreign' }]\n";
    std::fs::write(fabric.directory().join("mine.toml"), file).unwrap();
    let directory = fabric.directory().to_str().unwrap();
    let output = run(&["conform", "--list", "--cases", directory]);
    assert!(text(&output.stdout).contains("mine-one [must; CLC-9]"));
    std::fs::write(fabric.directory().join("mine.toml"), file.replace("say", "says")).unwrap();
    let output = run(&["conform", "--list", "--cases", directory]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("mine.toml: case \"one\""), "{}", text(&output.stderr));
}
