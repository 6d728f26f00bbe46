// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The management socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use vhost_device_ism::management::{AddGuest, Client, ClientError};
use virtio_ism_abi::command::BACKING_WINDOW;
use virtio_ism_abi::{Gid, Status};

use super::front_end::*;

fn managed(place: &Place, guests: &[&str]) -> (vhost_device_ism::Daemon, Client) {
    let path = place.path("management");
    let daemon = place.daemon_with(guests, |config| config.management = Some(path.clone()));
    (daemon, Client::connect(&path).unwrap())
}

#[test]
fn guests_are_added_listed_and_removed() {
    let place = Place::new();
    let (_daemon, mut client) = managed(&place, &["a"]);
    let add = AddGuest { socket: place.path("b.sock"), ..AddGuest::default() };
    client.add(&add).unwrap();
    let names: Vec<String> = client.list().unwrap().into_iter().map(|guest| guest.name).collect();
    assert_eq!(names, ["a", "b"]);

    let (mut a, gid_a) = FrontEnd::greet(&place.path("a"));
    let (mut b, gid_b) = FrontEnd::greet(&place.path("b.sock"));
    let token = b.register(gid_a, 1, 65536, BACKING_WINDOW).token.get();
    assert_eq!(a.transfer(token, &[(0, b"hello")], false), Status::Ok);
    assert_eq!(a.transfer(1, &[], true), Status::Enoent);

    let guests = client.list().unwrap();
    assert!(guests.iter().all(|guest| guest.connected));
    assert_eq!(guests[0].gid.as_deref(), Some(gid_a.to_string().as_str()));
    assert_eq!((guests[0].counts.moves, guests[0].counts.move_bytes), (1, 5));
    assert_eq!(guests[0].move_refusals.get("enoent"), Some(&1));
    assert_eq!((guests[1].dmbs, guests[1].dmb_bytes), (1, 65536));
    assert_eq!(guests[1].gid.as_deref(), Some(gid_b.to_string().as_str()));

    client.remove("b").unwrap();
    assert!(!place.path("b.sock").exists());
    b.wait_cut();
    assert_eq!(client.list().unwrap().len(), 1);
    // The same name and socket again, at once.
    client.add(&add).unwrap();
    let (_b, gid) = FrontEnd::greet(&place.path("b.sock"));
    assert!(gid != gid_b && gid != Gid::NONE);
}

#[test]
fn what_cannot_be_done_is_said() {
    let place = Place::new();
    let (_daemon, mut client) = managed(&place, &["a"]);
    let refused = |result: Result<(), ClientError>, part: &str| match result {
        Err(ClientError::Refused(text)) => assert!(text.contains(part), "{text}"),
        other => panic!("{other:?}"),
    };
    refused(client.remove("x"), "no guest");
    let add = |socket: &str| AddGuest { socket: place.path(socket), ..AddGuest::default() };
    refused(client.add(&add("a")), "\"a\"");
    refused(client.add(&AddGuest { name: Some("z".into()), ..add("a") }), "in use");
    refused(client.add(&AddGuest { chid: Some("ff77".into()), ..add("b") }), "ff77");
    refused(client.add(&AddGuest { gid: Some("x".into()), ..add("b") }), "GID");
    refused(client.add(&add("no/such/directory")), "bind");
    assert_eq!(client.list().unwrap().len(), 1);
}

#[test]
fn metrics_come_as_json_and_over_http() {
    let place = Place::new();
    let (_daemon, mut client) = managed(&place, &["a"]);
    let _a = FrontEnd::greet(&place.path("a"));
    let text = client.metrics().unwrap();
    assert!(text.contains("ism_connected{guest=\"a\",chid=\"ff00\"} 1"), "{text}");

    let mut http = UnixStream::connect(place.path("management")).unwrap();
    http.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    http.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())));
    assert!(body.ends_with("# EOF\n"));

    let mut http = UnixStream::connect(place.path("management")).unwrap();
    http.write_all(b"GET /secret HTTP/1.1\r\n\r\n").unwrap();
    answer.clear();
    http.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"));
}

#[test]
fn silent_clients_and_endless_lines_hold_up_nobody() {
    let place = Place::new();
    let (_daemon, mut client) = managed(&place, &["a"]);
    let path = place.path("management");
    let mut silent: Vec<UnixStream> =
        (0..15).map(|_| UnixStream::connect(&path).unwrap()).collect();
    for stream in &mut silent {
        stream.write_all(b"{\"op\":").unwrap();
    }
    assert_eq!(client.list().unwrap().len(), 1);
    // Beyond the limit: the client silent for longest is evicted, the new one is served.
    for _ in 0..20 {
        let mut late = Client::connect(&path).unwrap();
        assert_eq!(late.list().unwrap().len(), 1);
        silent.push(UnixStream::connect(&path).unwrap());
    }
    let mut late = Client::connect(&path).unwrap();

    let mut endless = UnixStream::connect(&path).unwrap();
    let junk = vec![b'x'; 200 << 10];
    let _ = endless.write_all(&junk);
    let mut answer = String::new();
    let _ = BufReader::new(endless).read_line(&mut answer);
    assert!(answer.is_empty() || answer.contains("more than"), "{answer}");
    assert_eq!(late.list().unwrap().len(), 1);
}

#[test]
fn several_requests_in_one_write_are_answered_in_order() {
    let place = Place::new();
    let (_daemon, _client) = managed(&place, &["a"]);
    let mut stream = UnixStream::connect(place.path("management")).unwrap();
    stream
        .write_all(
            b"{\"op\":\"list\"}\n\nnonsense\n{\"op\":\"remove\",\"name\":\"q\"}\n{\"op\":\"list\"}",
        )
        .unwrap();
    // The last line has no end.
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().starts_with("{\"ok\":true,\"guests\":[{"));
    assert!(lines.next().unwrap().contains("expected"));
    assert!(lines.next().unwrap().contains("no guest"));
    assert!(lines.next().unwrap().starts_with("{\"ok\":true,\"guests\":[{"));
    assert_eq!(lines.next(), None);
}
