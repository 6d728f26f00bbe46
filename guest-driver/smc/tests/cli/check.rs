// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc check`: servers of all kinds.

use std::net::TcpListener;
use std::process::Output;

use guest_driver::{Config, Rnics, SmcListener, Stack};
use smc_rendezvous::Mode;

use crate::support::{Fabric, text};

/// Options for the same outcome whether or not this process may see TCP options.
const ALWAYS: &[&str] = &["--propose", "always", "--rnic", "none"];

fn check(fabric: &Fabric, port: u16, options: &[&str]) -> (i32, String) {
    let port = port.to_string();
    let mut command = fabric.smc(&["check"]);
    let output: Output = command.args(options).args(["127.0.0.1", &port]).output().unwrap();
    (output.status.code().unwrap(), text(&output.stdout))
}

#[test]
fn a_server_with_smc_is_found_to_be_one_and_serves_on() {
    let fabric = Fabric::start("check-smc");
    let (_server, port, _log) = fabric.listen(&["--keep"]);
    let (status, output) = check(&fabric, port, ALWAYS);
    assert_eq!(status, 0, "{output}");
    for part in [
        "ok  name       127.0.0.1 is 127.0.0.1",
        "fabric ff00, GID",
        "no  rnic       no SMC-R: RDMA is switched off",
        "ok  handshake  SMC-D v2.1 over fabric ff00",
        "ok  result     a connection would be SMC",
    ] {
        assert!(output.contains(part), "{part} in {output}");
    }
    assert!(output.contains(" option "), "{output}");

    let (status, output) = check(&fabric, port, &[ALWAYS, &["--eid", "OTHER"]].concat());
    assert_eq!(status, 1, "{output}");
    assert!(output.contains("the server declined: 0x0303"), "{output}");

    let (status, output) = check(&fabric, port, &[ALWAYS, &["--json"]].concat());
    let value: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!((status, value["result"].as_str()), (0, Some("smc")));
    assert_eq!(value["connection"]["smc_d"]["chid"], "ff00");
    assert_eq!(value["steps"][0]["name"], "name");
}

#[test]
fn a_server_without_smc_is_left_alone_or_said_to_be_none() {
    let fabric = Fabric::start("check-tcp");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (status, output) = check(&fabric, port, &["--propose", "answered", "--rnic", "none"]);
    let is_known = output.contains("did not answer TCP option 254");
    assert_eq!(status, if is_known { 1 } else { 3 }, "{output}");
    assert!(output.contains("handshake  not tried"), "{output}");
    let mut first = listener.accept().unwrap().0;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut first, &mut bytes).unwrap();
    assert!(bytes.is_empty(), "no byte of SMC was sent");

    // As for a user without the right to use the option.
    let options = ["--propose", "answered", "--rendezvous", "off", "--rnic", "none"];
    let (status, output) = check(&fabric, port, &options);
    assert_eq!(status, 3, "{output}");
    assert!(output.contains("result     not known: this end cannot ask"), "{output}");
    drop(listener.accept().unwrap());

    let (status, output) = check(&fabric, port, &[ALWAYS, &["--timeout", "1"]].concat());
    assert_eq!(status, 2, "{output}");
    assert!(output.contains("it is an ordinary TCP server"), "{output}");

    drop(listener);
    let (status, output) = check(&fabric, port, ALWAYS);
    assert_eq!(status, 2, "{output}");
    assert!(output.contains("no  tcp        127.0.0.1:"), "{output}");
}

#[test]
fn without_a_device_it_would_be_tcp_and_is_said_to_be_for_that() {
    let fabric = Fabric::start("check-none");
    let (_server, port, _log) = fabric.listen(&["--keep"]);
    let (status, output) = check(&fabric, port, &[ALWAYS, &["--device", "/no/such.sock"]].concat());
    assert_eq!(status, 1, "{output}");
    assert!(output.contains("no  device     /no/such.sock: "), "{output}");
    assert!(
        output.contains("no  handshake  nothing was offered: no virtio-ism device"),
        "{output}"
    );
    let (status, output) = check(&fabric, port, &[ALWAYS, &["--eid", "lower"]].concat());
    assert_eq!((status, output.as_str()), (2, ""));
}

#[test]
fn a_server_that_answers_the_option_is_told_from_one_that_does_not() {
    let fabric = Fabric::start("check-option");
    let device = fabric.directory().join("smc/a.sock");
    let config = Config { rendezvous: Mode::Auto, rnics: Rnics::None, ..Config::new(device) };
    let stack = Stack::open(config).unwrap();
    let listener = SmcListener::bind(&stack, "127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || listener.accept().unwrap().0.is_smc());
    let (status, output) = check(&fabric, port, &["--rnic", "none"]);
    assert_eq!(status, 0, "{output}");
    assert!(server.join().unwrap());
    let seen = output.contains("ok  option     the server answered TCP option 254");
    match stack.peer_discovery().unavailable() {
        None => assert!(seen, "{output}"),
        Some(why) => {
            assert!(output.contains("?   option     not known: "), "{output}");
            println!("without TCP options, so half of this was not tried: {why}");
        }
    }
}
