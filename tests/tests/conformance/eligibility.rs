// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which pairs of ends use SMC, and how their other connections go on.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, DataPath, SmcdInfo, Stack};
use smc_core::handshake::DeclineCode;
use smc_tests::end::{End, Host, How, Role, Site};
use smc_tests::watch::LIMIT;
use smc_tests::{
    Bench, Fabric, TIMEOUT, eid, eventually, note, pattern, read_exactly, send_all, slurp, watched,
};
use vhost_device_ism::config::{FabricSpec, GuestSpec};
use virtio_ism_abi::Chid;

on_the_window! {
    a_plain_client_of_an_smc_server_talks_tcp
    a_client_that_begins_with_an_eye_catcher_speaks_smc_or_is_reset
    a_silent_client_is_taken_for_a_plain_one_after_a_while
    a_plain_server_is_reached_by_connect_tcp
    a_server_without_a_device_declines
    a_client_without_a_device_says_nothing_of_smc
    two_stacks_without_devices_talk_tcp
    without_a_common_eid_it_is_tcp
    the_last_of_eight_eids_matches_and_a_ninth_is_not_offered
    a_peer_of_release_2_0_never_uses_an_emulated_device
    each_direction_has_the_path_that_its_writer_has
}

mod smc {
    use super::a_system_eid_alone_is_enough;

    // SMC-R knows no system EID (CLCV2-26).
    on_smc_d! {
        a_system_eid_alone_is_enough
    }
}

/// Why a connection is TCP.
#[track_caller]
fn why(end: &End) -> DeclineCode {
    let nature = end.nature();
    nature.decline.unwrap_or_else(|| panic!("{}", nature.text))
}

/// The info of an SMC-D connection; panics on TCP.
#[track_caller]
fn info(end: &End) -> SmcdInfo {
    let nature = end.nature();
    nature.smc.unwrap_or_else(|| panic!("{}", nature.text))
}

/// Connects two stacks, sends bytes both ways, the client first.
#[track_caller]
fn meet(server: &Host, client: &Host) -> (End, End) {
    let listener = server.listen();
    let (here, there) = thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let (there, _) = listener.accept().unwrap();
            assert_eq!(read_exactly(&there, 5), b"first");
            there
        });
        note("connects");
        let here = client.connect(listener.addr()).unwrap();
        send_all(&here, b"first");
        (here, accepting.join().unwrap())
    });
    let bytes = pattern(1, 20_000);
    send_all(&there, &bytes);
    assert!(read_exactly(&here, bytes.len()) == bytes);
    assert_eq!(here.is_smc(), there.is_smc());
    (here, there)
}

/// Checks a connection for TCP, with these reasons at the two ends.
#[track_caller]
fn expect_tcp(server: &Host, client: &Host, at_client: DeclineCode, at_server: DeclineCode) {
    let (here, there) = meet(server, client);
    assert_eq!(why(&here), at_client, "client: {}", here.nature().text);
    assert_eq!(why(&there), at_server, "server: {}", there.nature().text);
}

// Shows: SOCK-19.
fn a_plain_client_of_an_smc_server_talks_tcp(site: &Site) {
    let mut config = site.config(0);
    config.detect_timeout = Duration::from_millis(150);
    let listener = site.open(Role::Server, config).unwrap().listen();
    // Some begin like a CLC message.
    for hello in [&b"GET / HTTP/1.1"[..], b"x", b"\xe2", b"\xe2\xd4\xc3", b"\xe2\xd4\xc3\xd8abcd"] {
        let mut client = TcpStream::connect(listener.addr()).unwrap();
        client.write_all(hello).unwrap();
        let start = Instant::now();
        let (server, from) = listener.accept().unwrap();
        println!("{} bytes: accepted after {:?}", hello.len(), start.elapsed());
        assert_eq!(from, client.local_addr().unwrap());
        assert_eq!(why(&server), DeclineCode::PeerNoSmc);
        assert_eq!(read_exactly(&server, hello.len()), hello, "nothing was taken");
        send_all(&server, b"answer");
        let mut answer = [0; 6];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"answer");
        drop(client);
        assert!(slurp(&server).is_empty());
    }
}

// Shows: CLC-54, CLC-55.
fn a_client_that_begins_with_an_eye_catcher_speaks_smc_or_is_reset(site: &Site) {
    let listener = site.server(0).listen();
    for damaged in [&b"\xe2\xd4\xc3\xd9\x01\x00\x03\x11abc"[..], b"\xe2\xd4\xc3\xd9data"] {
        let mut client = TcpStream::connect(listener.addr()).unwrap();
        client.write_all(damaged).unwrap();
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut plain = TcpStream::connect(listener.addr()).unwrap();
        plain.write_all(b"x").unwrap();
        let (server, from) = listener.accept().unwrap();
        assert_eq!(from, plain.local_addr().unwrap(), "the program never sees the other one");
        assert_eq!(read_exactly(&server, 1), b"x");
        let end = client.read(&mut [0; 100]).map_err(|error| error.kind());
        assert_eq!(end, Err(ErrorKind::ConnectionReset));
    }
}

fn a_silent_client_is_taken_for_a_plain_one_after_a_while(site: &Site) {
    let mut config = site.config(0);
    config.detect_timeout = Duration::from_millis(150);
    let listener = site.open(Role::Server, config).unwrap().listen();
    let start = Instant::now();
    let mut client = TcpStream::connect(listener.addr()).unwrap();
    let (server, _) = listener.accept().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(140), "{:?}", start.elapsed());
    assert_eq!(why(&server), DeclineCode::PeerNoSmc);
    // The server talks first.
    send_all(&server, b"220 ready");
    let mut banner = [0; 9];
    client.read_exact(&mut banner).unwrap();
    assert_eq!(&banner, b"220 ready");
    // A client gone without a byte.
    drop(TcpStream::connect(listener.addr()).unwrap());
    let (server, _) = listener.accept().unwrap();
    assert!(slurp(&server).is_empty());
}

fn a_plain_server_is_reached_by_connect_tcp(site: &Site) {
    let listener = TcpListener::bind((site.here(), 0)).unwrap();
    let client = site.client(1).connect_how(listener.local_addr().unwrap(), How::Tcp).unwrap();
    assert_eq!(why(&client), DeclineCode::TcpWanted);
    assert!(client.nature().text.contains("asked for"), "{}", client.nature().text);
    let (mut server, _) = listener.accept().unwrap();
    send_all(&client, b"plain");
    let mut buf = [0; 5];
    server.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"plain", "not a byte of a handshake");
}

fn a_server_without_a_device_declines(site: &Site) {
    let server = site.open(Role::Server, Config::default()).unwrap();
    let code = DeclineCode::NoIsm2Support;
    expect_tcp(&server, &site.client(1), code, code);
    assert_eq!(code.value() >> 16, 0x0303);
}

fn a_client_without_a_device_says_nothing_of_smc(site: &Site) {
    let client = site.open(Role::Client, Config::default()).unwrap();
    let (here, there) = meet(&site.server(0), &client);
    assert_eq!(why(&here), DeclineCode::NoSmcDevice);
    assert_eq!(why(&there), DeclineCode::PeerNoSmc);
}

fn two_stacks_without_devices_talk_tcp(site: &Site) {
    let open = |role| site.open(role, Config::default()).unwrap();
    let (here, _) = meet(&open(Role::Server), &open(Role::Client));
    assert_eq!(why(&here), DeclineCode::NoSmcDevice);
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_it() {
    watched(LIMIT, || {
        let error = Stack::open(Config::new("/nonexistent/ism.sock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/ism.sock"), "{error}");
    });
}

// Shows: CLCV2-33, SEC-13.
fn without_a_common_eid_it_is_tcp(site: &Site) {
    let open = |role, n: usize, names: &[&str]| {
        let config = names.iter().fold(site.config(n), |config, name| config.eid(eid(name)));
        site.open(role, config).unwrap()
    };
    let server = open(Role::Server, 0, &["GROUP-A", "GROUP-B"]);
    {
        let client = open(Role::Client, 1, &["GROUP-C"]);
        let code = DeclineCode::NoSmcdDevice;
        assert_eq!(code.value(), 0x0303_0001);
        expect_tcp(&server, &client, code, code);
        // And again: the first attempt has left no state to spoil the second.
        expect_tcp(&server, &client, code, code);
        assert_eq!(server.totals().peers, 0);
    }
    // One of several is enough.
    let client = open(Role::Client, 1, &["GROUP-C", "GROUP-D", "GROUP-B"]);
    let (here, there) = meet(&server, &client);
    for stream in [here, there] {
        assert_eq!(info(&stream).eid, eid("GROUP-B"));
    }
}

// Shows: EID-17.
fn the_last_of_eight_eids_matches_and_a_ninth_is_not_offered(site: &Site) {
    let open = |config| site.open(Role::Server, config).unwrap();
    let many = (0..9).fold(site.config(1), |config, n| config.eid(eid(&format!("NUMBER-{n}"))));
    let client = site.open(Role::Client, many).unwrap();
    {
        let server = open(site.config(0).eid(eid("NUMBER-7")));
        assert!(meet(&server, &client).0.is_smc());
    }
    let server = open(site.config(0).eid(eid("NUMBER-8")));
    let code = DeclineCode::NoSmcdDevice;
    expect_tcp(&server, &client, code, code);
}

// Shows: EID-11.
fn a_system_eid_alone_is_enough(site: &Site) {
    let pair = site.pair_with(|config| {
        config.eids.clear();
        config.testing.seid = Some(eid("SYSTEM-1"));
    });
    let (client, server) = pair.connect();
    for end in [client, server] {
        assert_eq!(info(&end).eid, eid("SYSTEM-1"));
    }
}

fn a_peer_of_release_2_0_never_uses_an_emulated_device(site: &Site) {
    let old = |role, n| {
        let mut config = site.config(n);
        config.testing.release_2_0 = true;
        site.open(role, config).unwrap()
    };
    {
        let (here, there) = meet(&site.server(0), &old(Role::Client, 1));
        println!("old client: {} / {}", here.nature().text, there.nature().text);
        assert!(!here.is_smc());
    }
    let (here, there) = meet(&old(Role::Server, 0), &site.client(1));
    println!("old server: {} / {}", here.nature().text, there.nature().text);
    assert_eq!(why(&here).value() >> 16, 0x0303, "{}", here.nature().text);
}

// The following tests are about the daemon and its ports, and stay in this process: two fabrics, two
// daemons, a stack with two devices, ports added and removed.

/// A daemon with ports 0 and 1 on fabric ff00, 2 and 3 on ff01.
fn two_fabrics() -> Bench {
    Bench::tuned(Fabric::Window, 4, |config| {
        config.fabrics.push(FabricSpec::new(Chid(0xff01)));
        for port in config.guests.iter_mut().skip(2) {
            port.chid = Chid(0xff01);
        }
    })
}

#[test]
fn fabrics_that_do_not_meet_make_it_tcp() {
    watched(LIMIT, || {
        let bench = two_fabrics();
        let code = DeclineCode::NoSmcdV2Device;
        expect_tcp(&Host::of(bench.stack(0)), &Host::of(bench.stack(2)), code, code);
    });
}

#[test]
fn equal_chids_of_two_daemons_do_not_meet() {
    watched(LIMIT, || {
        let (one, other) = (Bench::new(Fabric::Window, 1), Bench::new(Fabric::Window, 1));
        let code = DeclineCode::NoSmcdV2Device;
        expect_tcp(&Host::of(one.stack(0)), &Host::of(other.stack(0)), code, code);
        // A second loopback fabric acts as another operating system's loopback.
        let (one, other) = (Bench::new(Fabric::Loopback, 1), Bench::new(Fabric::Loopback, 1));
        expect_tcp(&Host::of(one.stack(0)), &Host::of(other.stack(0)), code, code);
    });
}

#[test]
fn a_stack_with_two_devices_uses_the_one_that_reaches_its_peer() {
    watched(LIMIT, || {
        let bench = two_fabrics();
        let open = |ports: &[usize]| {
            let mut config = bench.config(ports[0]);
            config.devices = ports.iter().map(|n| bench.socket(*n).into()).collect();
            Host::of(Stack::open(config).unwrap())
        };
        let chid = |end: &End| info(end).chid.0;
        let server = open(&[0, 2]);
        assert_eq!(server.devices().len(), 2);
        {
            // Both: the client's order of preference decides.
            let client = open(&[3, 1]);
            let (here, _) = meet(&server, &client);
            assert_eq!(chid(&here), 0xff01);
        }
        let (first, second) = (open(&[1]), open(&[3]));
        for _ in 0..2 {
            let (a, a2) = meet(&server, &first);
            let (b, b2) = meet(&server, &second);
            assert_eq!((chid(&a), chid(&b)), (0xff00, 0xff01));
            assert_eq!((chid(&a2), chid(&b2)), (0xff00, 0xff01));
        }
        eventually("one that left is forgotten", || server.totals().peers == 2);
    });
}

fn each_direction_has_the_path_that_its_writer_has(site: &Site) {
    let mut config = site.config(1);
    config.path = DataPath::Move;
    let (here, there) = meet(&site.server(0), &site.open(Role::Client, config).unwrap());
    println!("client window {}, server window {}", info(&here).window, info(&there).window);
    assert!(!info(&here).window);
}

#[test]
fn ports_come_and_go_while_the_daemon_runs() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let server = Host::of(bench.stack(0));
        for _ in 0..3 {
            let path = bench.socket(9);
            bench.daemon().add_guest(GuestSpec::new(&path)).unwrap();
            let client = Host::of(bench.stack(9));
            assert!(meet(&server, &client).0.is_smc());
            drop(client);
            bench.daemon().remove_guest("port9").unwrap();
        }
    });
}
