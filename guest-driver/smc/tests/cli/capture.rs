// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc capture`: the file as read by tshark.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use crate::support::{Dir, Fabric, Running, eventually, text};

/// A request and a response of HTTP, and commands of redis, over the pipe of `smc listen` and
/// `smc connect`.
#[test]
fn tshark_reassembles_streams_and_dissects_http_and_redis() {
    let fabric = Fabric::start("capture");
    let dir = Dir::new("capture-files");
    let path = dir.path("a.pcapng");
    let (mut server, port, _log) = fabric.listen(&[]);
    let mut client = crate::stat::client(&fabric, port, &[]);
    let mut arrived = [0; 5];
    server.0.stdout.as_mut().unwrap().read_exact(&mut arrived).unwrap();
    let mut command = fabric.smc(&["capture", "-w", &path]);
    let capture = Running(command.stdout(Stdio::null()).spawn().unwrap());

    let request = "GET /a HTTP/1.1\r\nHost: x\r\n\r\n";
    let response =
        format!("HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n{}", "z".repeat(90_000));
    let exchange = |from: &mut Running, to: &mut Running, bytes: &str| {
        from.0.stdin.as_mut().unwrap().write_all(bytes.as_bytes()).unwrap();
        let mut got = vec![0; bytes.len()];
        to.0.stdout.as_mut().unwrap().read_exact(&mut got).unwrap();
        assert_eq!(text(&got), bytes);
    };
    // The capture begins at some moment.
    eventually("the capture has begun", || {
        exchange(&mut client, &mut server, "*1\r\n$4\r\nPING\r\n");
        std::fs::metadata(&path).is_ok_and(|file| file.len() > 200)
    });
    exchange(&mut client, &mut server, request);
    exchange(&mut server, &mut client, &response);
    let tshark = |options: &[&str]| {
        let mut command = Command::new("tshark");
        command.args(["-r", &path]).args(options).stdin(Stdio::null());
        command.output().map(|output| text(&output.stdout))
    };
    if Command::new("tshark").arg("--version").output().is_err() {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "there is no tshark");
        eprintln!("SKIPPED: no tshark");
        return;
    }
    let as_http = format!("tcp.port=={port},http");
    let mut seen = String::new();
    eventually("HTTP is dissected", || {
        seen = tshark(&[
            "-d",
            &as_http,
            "-Y",
            "http",
            "-T",
            "fields",
            "-e",
            "http.request.uri",
            "-e",
            "http.response.code",
            "-e",
            "http.content_length",
        ])
        .unwrap();
        seen.matches("/a").count() == 1 && seen.matches("200\t90000").count() == 1
    });
    let as_redis = format!("tcp.port=={port},resp");
    let redis = tshark(&["-d", &as_redis, "-Y", "resp", "-V"]).unwrap();
    assert!(redis.contains("PING"), "{redis}");
    let faults = tshark(&[
        "-o",
        "tcp.check_checksum:TRUE",
        "-o",
        "ip.check_checksum:TRUE",
        "-Y",
        "tcp.checksum.status==0 || ip.checksum.status==0 || tcp.analysis.lost_segment",
    ])
    .unwrap();
    assert_eq!(faults, "");
    let names = tshark(&["-T", "fields", "-e", "frame.interface_name"]).unwrap();
    let pids = [client.0.id(), server.0.id()];
    assert!(pids.iter().any(|pid| names.contains(&format!("smc {pid}"))), "{names}");
    drop(capture);
    // The processes go on without the capture.
    exchange(&mut client, &mut server, "after");
}
