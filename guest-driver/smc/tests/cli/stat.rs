// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc stat`: processes beside the daemon.

use std::io::{Read, Write};
use std::process::Stdio;

use serde_json::Value;

use crate::support::{Dir, Fabric, Running, eventually, smc, text};

fn output(fabric: &Fabric, args: &[&str]) -> String {
    let output = fabric.smc(&["stat"]).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn json(fabric: &Fabric) -> Value {
    serde_json::from_str(&output(fabric, &["--json"])).unwrap()
}

/// A connected client, after sending a few bytes.
pub(crate) fn client(fabric: &Fabric, port: u16, options: &[&str]) -> Running {
    let mut command = fabric.smc(&["connect"]);
    command.args(options).args(["127.0.0.1", &port.to_string()]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = Running(command.spawn().unwrap());
    client.0.stdin.as_mut().unwrap().write_all(b"bytes").unwrap();
    client
}

#[test]
fn both_ends_of_a_connection_are_shown_and_dead_processes_are_forgotten() {
    let fabric = Fabric::start("stat-both");
    let (mut server, port, _log) = fabric.listen(&[]);
    let client = client(&fabric, port, &[]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();

    let all = json(&fabric);
    // With the pool.
    assert_eq!(all["fabrics"][0]["guests"].as_array().unwrap().len(), 3);
    let of = |pid: u32| {
        let list = all["processes"].as_array().unwrap();
        list.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{all}"))
    };
    let (here, there) = (of(client.0.id()), of(server.0.id()));
    assert_eq!(here["program"], "smc");
    assert_eq!(here["devices"][0]["chid"], "ff00");
    assert_eq!((&here["totals"]["smc_d"], &here["totals"]["tcp"]), (&1.into(), &0.into()));
    let (out, arrived) = (&here["connections"][0], &there["connections"][0]);
    assert_eq!((&out["kind"], &arrived["kind"]), (&"SMC-D v2.1".into(), &"SMC-D v2.1".into()));
    assert_eq!((&out["sent"], &arrived["received"]), (&5.into(), &5.into()), "{all}");
    assert_eq!((&out["local"], &out["peer"]), (&arrived["peer"], &arrived["local"]));
    assert_eq!(out["smc_d"]["peer_gid"], arrived["smc_d"]["local_gid"]);
    assert_eq!(out["smc_d"]["local_buffer"], 524288);
    assert_eq!(out["cursors"][0], arrived["cursors"][2]);

    let overview = output(&fabric, &[]);
    assert!(overview.contains("fabric ff00: 3 guests, 2 connected"), "{overview}");
    assert!(overview.contains(&format!("smc {}", client.0.id())), "{overview}");
    let list = output(&fabric, &["connections", "--details"]);
    for part in [&format!("127.0.0.1:{port}"), "SMC-D v2.1", "fabric ff00", "cursors: written 0:5"]
    {
        assert!(list.contains(part), "{part} in {list}");
    }
    assert!(output(&fabric, &["totals"]).contains("since each process began"));
    assert!(output(&fabric, &["groups"]).contains("No link groups"));
    assert!(output(&fabric, &["rnics"]).contains("RNIC"));
    assert!(!output(&fabric, &["fabric"]).contains("process"));

    drop((client, server));
    eventually("they are forgotten", || json(&fabric)["processes"].as_array().unwrap().is_empty());
    assert!(output(&fabric, &["connections"]).contains("\"smc listen\""));
}

#[test]
fn a_process_that_is_stopped_is_said_to_be_silent() {
    use rustix::process::{Pid, Signal, kill_process};
    let fabric = Fabric::start("stat-stopped");
    let (server, ..) = fabric.listen(&[]);
    eventually("it tells", || !json(&fabric)["processes"].as_array().unwrap().is_empty());
    let pid = Pid::from_child(&server.0);
    kill_process(pid, Signal::STOP).unwrap();
    let all = json(&fabric);
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(all["silent"].as_array().unwrap().len(), 1, "{all}");
}

#[test]
fn a_connection_that_is_tcp_says_why() {
    let fabric = Fabric::start("stat-tcp");
    let (mut server, port, _log) = fabric.listen(&["--eid", "HERE", "--tcp-ok"]);
    let _client = client(&fabric, port, &["--eid", "THERE", "--tcp-ok"]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    let list = output(&fabric, &["connections"]);
    assert!(list.contains("TCP"), "{list}");
    assert!(list.contains("1 TCP: declined by the peer: 0x0303"), "{list}");
    assert!(list.contains("1 TCP: declined here: no common EID"), "{list}");
    let totals = output(&fabric, &["totals"]);
    assert!(totals.contains("TCP because:") && totals.contains("(peer)"), "{totals}");
}

#[test]
fn without_daemon_and_processes_it_says_what_to_do() {
    let dir = Dir::new("stat-none");
    for args in [&["stat"][..], &["stat", "connections"], &["stat", "totals"]] {
        let output = smc(args).env("XDG_RUNTIME_DIR", &dir.0).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        let error = text(&output.stderr);
        assert!(error.contains("no process of yours has SMC"), "{error}");
        assert!(error.contains("Start one with \"smc fabric\""), "{error}");
    }
    assert!(!dir.0.join("smc").exists(), "looking leaves nothing behind");
}

/// A sum of bytes is there after the connection, for metrics of a service.
#[test]
fn bytes_of_connections_that_are_over_are_counted() {
    let fabric = Fabric::start("stat-bytes");
    let (server, port, _log) = fabric.listen(&["--echo"]);
    let pid = server.0.id();
    let totals = || {
        let all = json(&fabric);
        let list = all["processes"].as_array().unwrap();
        let process = list.iter().find(|process| process["pid"] == pid).unwrap();
        let is_over = process["connections"].as_array().unwrap().is_empty();
        (is_over, process["totals"]["sent"].as_u64(), process["totals"]["received"].as_u64())
    };
    for bytes in [5, 10] {
        let mut client = client(&fabric, port, &[]);
        client.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
        assert_eq!(totals(), (false, Some(bytes), Some(bytes)));
        drop(client);
        eventually("the connection is over", || totals().0);
        assert_eq!(totals(), (true, Some(bytes), Some(bytes)));
    }
    let shown = output(&fabric, &["metrics", "--by", "process"]);
    let sample = format!(",pid=\"{pid}\"}} 10\n");
    for name in ["smc_sent_bytes_total{", "smc_received_bytes_total{"] {
        let line = shown.split_inclusive('\n').find(|line| line.starts_with(name)).unwrap();
        assert!(line.contains("program=\"smc\"") && line.ends_with(&sample), "{shown}");
    }
    let shown = output(&fabric, &["connections", "--by", "service"]);
    assert!(shown.starts_with("service  ") || shown.contains("No connection"), "{shown}");
    assert!(output(&fabric, &["totals"]).contains("10 B"), "{shown}");
}
