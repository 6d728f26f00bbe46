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
    let pcap = fabric.directory().join("pcap");
    command.args(["--level", "clc,cdc"]).arg("--pcap").arg(&pcap);
    command.arg("--device").arg(device).arg("--html").arg(&html).arg("--junit").arg(&junit);
    let output = command.arg(format!("127.0.0.1:{port}")).output().unwrap();
    let report = check(&output, 750);
    for fact in ["smc", "d2", "confirm", "release-2.1", "device", "data"] {
        assert!(report["facts"].as_array().unwrap().contains(&fact.into()), "{fact}");
    }
    let exchanges = &report["cases"][0]["exchanges"];
    assert_eq!(exchanges[0]["from"], "suite");
    assert!(exchanges[0]["explained"].as_str().unwrap().starts_with("CLC Proposal, version 2"));
    // `smc decode` reads the packets of a case.
    let decoded = run(&["decode", pcap.join("server-accept-eye.pcapng").to_str().unwrap()]);
    let decoded = text(&decoded.stdout);
    for message in ["Proposal", "Accept"] {
        assert!(decoded.contains(&format!("CLC {message}")), "{message}: {decoded}");
    }
    // Against itself, the report has no difference; a failure that is new is one.
    let [earlier, later] = ["earlier", "later"].map(|name| fabric.directory().join(name));
    std::fs::write(&earlier, &output.stdout).unwrap();
    std::fs::write(
        &later,
        text(&output.stdout).replacen("\"verdict\": \"PASS\"", "\"verdict\": \"FAIL\"", 1),
    )
    .unwrap();
    for (later, code, says) in
        [(&earlier, 0, "No case has another verdict."), (&later, 1, "Fails now: 1")]
    {
        let output =
            fabric.smc(&["conform", "--compare"]).arg(&earlier).arg(later).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert!(text(&output.stdout).contains(says), "{}", text(&output.stdout));
    }
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
    // The server is gone.
    let output = run(&["conform", "--level", "clc", &address]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("cannot connect to"), "{said}");
    assert!(!said.contains("does not speak SMC"), "{said}");
    let output = run(&["conform", "--compare", "/dev/null", "/dev/null"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no report of smc conform"), "{}", text(&output.stderr));
}

#[test]
fn a_silent_target_is_announced_as_such_before_it_is_given_up() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_smc"));
    command.args(["conform", "--level", "clc", &address]).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    let mut errors = std::io::BufReader::new(child.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut errors, &mut line).unwrap();
    assert!(line.contains("a silent one gets 32 s"), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A server with this answer to whatever comes, which ends with the test.
fn always_says(answer: [u8; 28]) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let _ = std::io::Read::read(&mut client, &mut [0; 1024]);
            let _ = std::io::Write::write_all(&mut client, &answer);
        }
    });
    address
}

#[test]
fn a_server_whose_declines_are_wrong_is_tested_and_not_taken_for_one_without_smc() {
    let mut decline = [0; 28];
    decline[..8].copy_from_slice(&[0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10]);
    decline[16..20].copy_from_slice(&[3, 3, 0, 0]);
    let (mut wrong_end, mut wrong_begin) = (decline, decline);
    wrong_end[24..].copy_from_slice(b"oops");
    wrong_begin[0] ^= 1;
    for answer in [wrong_end, wrong_begin] {
        let one = "server-decline-own-v1";
        let address = always_says(answer);
        let output = run(&["conform", "--level", "clc", "--json", "-", "--only", one, &address]);
        let said = text(&output.stderr);
        assert!(!said.contains("does not speak SMC"), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(named(&report, "FAIL"), [one], "{report}");
    }
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
