// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc fabric`, `smc listen`, `smc connect` and `smc stat` together.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Output, Stdio};

use crate::support::{Dir, Fabric, Running, text};

fn data(len: u32, seed: u32) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed) >> 13) as u8).collect()
}

#[test]
fn bytes_cross_both_ways_and_both_ends_tell_what_they_negotiated() {
    let fabric = Fabric::start("pipe");
    let (mut server, port, mut log) = fabric.listen(&[]);
    let (there, back) = (data(3_000_000, 1), data(2_500_000, 2));
    let mut stdin = server.0.stdin.take().unwrap();
    let answer = back.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&answer).unwrap());
    let mut stdout = server.0.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        stdout.read_to_end(&mut got).unwrap();
        got
    });
    let client = fabric.connect(port, &[], &there);
    assert!(client.status.success(), "{}", text(&client.stderr));
    assert!(client.stdout == back, "{} bytes", client.stdout.len());
    writer.join().unwrap();
    let got = reader.join().unwrap();
    assert!(got == there, "{} bytes", got.len());
    assert!(server.0.wait().unwrap().success());
    let mut output = String::new();
    log.read_to_string(&mut output).unwrap();
    for output in [output, text(&client.stderr)] {
        assert!(output.contains("SMC-D v2.1 over fabric ff00"), "{output}");
        assert!(output.contains("first contact, buffers of 524288 bytes"), "{output}");
    }
}

#[test]
fn the_last_bytes_arrive_although_the_reader_is_slow_and_the_writer_done() {
    let fabric = Fabric::start("slow");
    let (mut server, port, _log) = fabric.listen(&[]);
    drop(server.0.stdin.take());
    let sent = data(1_500_000, 3);
    let copy = sent.clone();
    let reader = std::thread::spawn(move || {
        // Long after the client has written everything into buffers and pipes.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut got = Vec::new();
        server.0.stdout.take().unwrap().read_to_end(&mut got).unwrap();
        assert!(server.0.wait().unwrap().success());
        got
    });
    let client = fabric.connect(port, &[], &copy);
    assert!(client.status.success(), "{}", text(&client.stderr));
    let got = reader.join().unwrap();
    assert!(got == sent, "{} bytes", got.len());
}

/// The end of a connection whose receiver has finished its own direction before.
#[derive(Clone, Copy, Debug)]
enum Fault {
    ReceiverKilled,
    DaemonKilled,
}

/// Sends `input` to a receiver with a fault after `read` bytes. Returns the sender's output.
fn sender_after(fault: Fault, name: &str, input: Stdio, read: usize) -> Output {
    let mut fabric = Fabric::start(name);
    let (mut server, port, _log) = fabric.listen(&["--outlive-device=false"]);
    drop(server.0.stdin.take());
    let mut command = fabric.smc(&["connect", "127.0.0.1", &port.to_string()]);
    command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    let client = command.spawn().unwrap();
    let mut bytes = vec![0; read];
    server.0.stdout.as_mut().unwrap().read_exact(&mut bytes).unwrap();
    match fault {
        Fault::ReceiverKilled => server.0.kill().unwrap(),
        Fault::DaemonKilled => fabric.kill_daemon(),
    }
    client.wait_with_output().unwrap()
}

#[test]
fn a_sender_whose_connection_ends_before_its_input_fails_and_says_how_much_was_sent() {
    for fault in [Fault::ReceiverKilled, Fault::DaemonKilled] {
        let endless = std::fs::File::open("/dev/zero").unwrap();
        let end = sender_after(fault, "cut", endless.into(), 1 << 20);
        let said = text(&end.stderr);
        assert_eq!(end.status.code(), Some(1), "{fault:?}: {said}");
        let sent = said.split(" after ").nth(1).and_then(|rest| rest.split(' ').next());
        let sent: u64 = sent.and_then(|sent| sent.parse().ok()).unwrap_or_else(|| panic!("{said}"));
        assert!(sent >= 1 << 20, "{fault:?}: {said}");
    }
}

#[test]
fn a_transfer_goes_on_when_the_daemon_is_killed() {
    let mut fabric = Fabric::start("killed");
    let (mut server, port, _log) = fabric.listen(&[]);
    drop(server.0.stdin.take());
    let (dir, sent) = (Dir::new("killed-input"), data(8_000_000, 5));
    std::fs::write(dir.path("input"), &sent).unwrap();
    let mut command = fabric.smc(&["connect", "-v", "127.0.0.1", &port.to_string()]);
    command.stdin(std::fs::File::open(dir.path("input")).unwrap());
    let client = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = server.0.stdout.take().unwrap();
    let mut got = vec![0; 1 << 20];
    stdout.read_exact(&mut got).unwrap();
    fabric.kill_daemon();
    stdout.read_to_end(&mut got).unwrap();
    assert!(got == sent, "{} bytes", got.len());
    let client = client.wait_with_output().unwrap();
    let said = text(&client.stderr);
    assert!(client.status.success() && said.contains("SMC-D v2.1"), "{said}");
    assert!(server.0.wait().unwrap().success());
}

#[test]
fn a_sender_whose_last_bytes_nobody_has_read_fails() {
    // More than the pipe and the receiver's buffer hold, but less than with the ring.
    let file = Dir::new("unread");
    std::fs::write(file.path("input"), data(900_000, 4)).unwrap();
    let input = std::fs::File::open(file.path("input")).unwrap();
    let end = sender_after(Fault::ReceiverKilled, "unread-fabric", input.into(), 1);
    assert_eq!(end.status.code(), Some(1), "{}", text(&end.stderr));
}

#[test]
fn a_server_that_keeps_takes_one_client_after_the_other() {
    let fabric = Fabric::start("keep");
    let (mut server, port, _log) = fabric.listen(&["--keep"]);
    drop(server.0.stdin.take());
    let mut stdout = server.0.stdout.take().unwrap();
    for word in [b"first", b"other"] {
        let client = fabric.connect(port, &[], word);
        assert!(client.status.success(), "{}", text(&client.stderr));
        let mut got = [0u8; 5];
        stdout.read_exact(&mut got).unwrap();
        assert_eq!(&got, word);
    }
    assert!(server.0.try_wait().unwrap().is_none(), "it still listens");
}

#[test]
fn without_a_common_eid_the_connection_is_refused_or_tcp() {
    let fabric = Fabric::start("eid");
    let (mut server, port, mut log) = fabric.listen(&["--eid", "HERE"]);
    let client = fabric.connect(port, &["--eid", "THERE"], b"x");
    assert!(!client.status.success());
    let output = text(&client.stderr);
    assert!(output.contains("the connection is not SMC"), "{output}");
    assert!(output.contains("--tcp-ok"), "{output}");
    assert!(!server.0.wait().unwrap().success());
    let mut output = String::new();
    log.read_to_string(&mut output).unwrap();
    assert!(output.contains("the connection is not SMC"), "{output}");

    let (mut server, port, _log) = fabric.listen(&["--eid", "HERE", "--tcp-ok"]);
    drop(server.0.stdin.take());
    let client = fabric.connect(port, &["--eid", "THERE", "--tcp-ok"], b"by TCP");
    assert!(client.status.success(), "{}", text(&client.stderr));
    assert!(text(&client.stderr).contains("TCP ("), "{}", text(&client.stderr));
    let mut got = Vec::new();
    server.0.stdout.take().unwrap().read_to_end(&mut got).unwrap();
    assert_eq!(got, b"by TCP");
}

#[test]
fn a_plain_tcp_client_is_served_if_that_is_allowed() {
    let fabric = Fabric::start("plain");
    let (mut server, port, _log) = fabric.listen(&["--tcp-ok"]);
    drop(server.0.stdin.take());
    let mut client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.write_all(b"plain").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = Vec::new();
    server.0.stdout.take().unwrap().read_to_end(&mut got).unwrap();
    assert_eq!(got, b"plain");
}

#[test]
fn statistics_show_the_guests() {
    let fabric = Fabric::start("stat");
    let output = fabric.smc(&["stat"]).output().unwrap();
    let output = text(&output.stdout);
    assert!(output.contains("fabric ff00: 3 guests, 0 connected"), "{output}");
    let (_server, ..) = fabric.listen(&[]);
    let output = fabric.smc(&["stat", "--json"]).output().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let guests = value["fabrics"][0]["guests"].as_array().unwrap();
    assert_eq!(guests.len(), 3);
    let server = guests.iter().find(|guest| guest["name"] == "a").unwrap();
    assert_eq!(server["connected"], true);
    assert!(server["gid"].is_string(), "{server}");
    assert!(server["refusals"].is_object(), "{server}");
}

#[test]
fn a_server_has_one_form_of_address_and_a_message_for_each_way_of_being_none() {
    let fabric = Fabric::start("address");
    let (mut server, port, _log) = fabric.listen(&[]);
    drop(server.0.stdin.take());
    let to = format!("localhost:{port}");
    let output = fabric.smc(&["connect", &to]).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    drop(server);

    let connect = |server: &str| {
        let output = fabric.smc(&["connect", server]).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let said = connect("nowhere.invalid:5000");
    assert!(said.contains("nowhere.invalid is not known"), "{said}");
    assert!(!said.contains("smc listen"), "{said}");
    let said = connect("localhost");
    assert!(said.contains("\"localhost\" names no server: expected HOST:PORT"), "{said}");
    let said = connect(&to);
    assert!(said.contains(&format!("Start one with \"smc listen {port}\"")), "{said}");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let plain = listener.local_addr().unwrap();
    let answer = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").unwrap();
    });
    let said = connect(&plain.to_string());
    assert!(said.contains("Is it an ordinary TCP server?"), "{said}");
    answer.join().unwrap();
}

#[test]
fn servers_and_clients_beyond_the_first_take_devices_of_the_pool() {
    let fabric = Fabric::start("pipe-pool");
    let (mut first, port, _log) = fabric.listen(&[]);
    let (mut second, other, _log) = fabric.listen(&[]);
    let mut clients = Vec::new();
    for port in [port, other] {
        let mut command = fabric.smc(&["connect"]);
        command.args(["127.0.0.1", &port.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut client = Running(command.spawn().unwrap());
        client.0.stdin.as_mut().unwrap().write_all(b"bytes").unwrap();
        // Both stay, so the second one finds the first one's device in use.
        let server = if port == other { &mut second } else { &mut first };
        let mut bytes = [0; 5];
        server.0.stdout.as_mut().unwrap().read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"bytes");
        clients.push(client);
    }
    let listed = text(&fabric.smc(&["stat", "fabric"]).output().unwrap().stdout);
    assert!(listed.contains("pool: 2 of 16 devices in use"), "{listed}");
}
