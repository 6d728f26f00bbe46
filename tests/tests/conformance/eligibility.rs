//! Who speaks SMC with whom, and what becomes of a connection that does not.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, DataPath, Facts, Fallback, SmcListener, SmcStream, Stack};
use smc_core::handshake::DeclineCode;
use smc_tests::watch::LIMIT;
use smc_tests::{
    Bench, Fabric, eid, eventually, note, pattern, read_exactly, send_all, slurp, watched,
};
use vhost_device_ism::config::{FabricConfig, PortSpec};
use virtio_ism_abi::Chid;

/// Why a connection is TCP.
#[track_caller]
fn why(stream: &SmcStream) -> Fallback {
    match stream.facts() {
        Facts::Tcp(why) => why,
        facts => panic!("{facts}"),
    }
}

/// Connects two stacks, sends bytes both ways, the client first.
#[track_caller]
fn meet(server: &Arc<Stack>, client: &Arc<Stack>) -> (SmcStream, SmcStream) {
    let listener = SmcListener::bind(server, "127.0.0.1:0").unwrap();
    let (here, there) = thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let (there, _) = listener.accept().unwrap();
            assert_eq!(read_exactly(&there, 5), b"first");
            there
        });
        note("connects");
        let here = SmcStream::connect(client, listener.local_addr().unwrap()).unwrap();
        send_all(&here, b"first");
        (here, accepting.join().unwrap())
    });
    let bytes = pattern(1, 20_000);
    send_all(&there, &bytes);
    assert!(read_exactly(&here, bytes.len()) == bytes);
    assert_eq!(here.is_smc(), there.is_smc());
    (here, there)
}

/// A connection that is TCP for this reason at the two ends.
#[track_caller]
fn expect_tcp(
    server: &Arc<Stack>,
    client: &Arc<Stack>,
    at_client: DeclineCode,
    at_server: DeclineCode,
) {
    let (here, there) = meet(server, client);
    assert_eq!(why(&here).code(), at_client, "client: {}", why(&here));
    assert_eq!(why(&there).code(), at_server, "server: {}", why(&there));
}

#[test]
fn a_plain_client_of_an_smc_server_talks_tcp() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let listener = SmcListener::bind(&bench.stack(0), "127.0.0.1:0").unwrap();
        // Some begin like a CLC message.
        for hello in [&b"GET / HTTP/1.1"[..], b"x", b"\xe2", b"\xe2\xd4\xc3\xd9\x01\x00\x03\x11abc"]
        {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.write_all(hello).unwrap();
            let start = Instant::now();
            let (server, from) = listener.accept().unwrap();
            println!("{} bytes: accepted after {:?}", hello.len(), start.elapsed());
            assert_eq!(from, client.local_addr().unwrap());
            assert_eq!(why(&server).code(), DeclineCode::PeerNoSmc);
            assert_eq!(read_exactly(&server, hello.len()), hello, "nothing was taken");
            send_all(&server, b"answer");
            let mut answer = [0; 6];
            client.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"answer");
            drop(client);
            assert!(slurp(&server).is_empty());
        }
    });
}

#[test]
fn a_silent_client_is_taken_for_a_plain_one_after_a_while() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let mut config = bench.config(0);
        config.detect_timeout = Duration::from_millis(150);
        let listener = SmcListener::bind(&Stack::open(config).unwrap(), "127.0.0.1:0").unwrap();
        let start = Instant::now();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(140), "{:?}", start.elapsed());
        assert_eq!(why(&server).code(), DeclineCode::PeerNoSmc);
        // The server talks first.
        send_all(&server, b"220 ready");
        let mut greeting = [0; 9];
        client.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"220 ready");
        // A client that says nothing at all and goes.
        drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (server, _) = listener.accept().unwrap();
        assert!(slurp(&server).is_empty());
    });
}

#[test]
fn a_plain_server_is_reached_by_connect_tcp() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client =
            SmcStream::connect_tcp(&bench.stack(0), listener.local_addr().unwrap()).unwrap();
        assert_eq!(why(&client), Fallback::Asked);
        let (mut server, _) = listener.accept().unwrap();
        send_all(&client, b"plain");
        let mut buf = [0; 5];
        server.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"plain", "not a byte of a handshake");
    });
}

#[test]
fn a_server_without_a_device_declines() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let server = Stack::open(Config::default()).unwrap();
        let code = DeclineCode::NoIsm2Support;
        expect_tcp(&server, &bench.stack(1), code, code);
        assert_eq!(code.value() >> 16, 0x0303);
    });
}

#[test]
fn a_client_without_a_device_says_nothing_of_smc() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let client = Stack::open(Config::default()).unwrap();
        let (here, there) = meet(&bench.stack(0), &client);
        assert!(matches!(why(&here), Fallback::NoDevice(_)));
        assert_eq!(why(&here).code(), DeclineCode::NoSmcDevice);
        assert_eq!(why(&there).code(), DeclineCode::PeerNoSmc);
    });
}

#[test]
fn two_stacks_without_devices_talk_tcp() {
    watched(LIMIT, || {
        let open = || Stack::open(Config::default()).unwrap();
        let (here, _) = meet(&open(), &open());
        assert!(matches!(why(&here), Fallback::NoDevice(_)));
    });
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_it() {
    watched(LIMIT, || {
        let error = Stack::open(Config::new("/nonexistent/ism.sock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/ism.sock"), "{error}");
    });
}

#[test]
fn without_a_common_eid_it_is_tcp() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let open = |n: usize, names: &[&str]| {
            let config = names.iter().fold(bench.config(n), |config, name| config.eid(eid(name)));
            Stack::open(config).unwrap()
        };
        let server = open(0, &["GROUP-A", "GROUP-B"]);
        {
            let client = open(1, &["GROUP-C"]);
            let code = DeclineCode::NoSmcdDevice;
            assert_eq!(code.value(), 0x0303_0001);
            expect_tcp(&server, &client, code, code);
            // And again: nothing was remembered that spoils it.
            expect_tcp(&server, &client, code, code);
            assert_eq!(server.totals().peers, 0);
        }
        // One of several is enough.
        let client = open(1, &["GROUP-C", "GROUP-D", "GROUP-B"]);
        let (here, there) = meet(&server, &client);
        for stream in [here, there] {
            let Facts::SmcD(facts) = stream.facts() else { panic!("{}", stream.facts()) };
            assert_eq!(facts.eid, "GROUP-B");
        }
    });
}

#[test]
fn the_last_of_eight_eids_matches_and_a_ninth_is_not_offered() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let many =
            (0..9).fold(bench.config(1), |config, n| config.eid(eid(&format!("NUMBER-{n}"))));
        let client = Stack::open(many).unwrap();
        {
            let server = Stack::open(bench.config(0).eid(eid("NUMBER-7"))).unwrap();
            assert!(meet(&server, &client).0.is_smc());
        }
        let server = Stack::open(bench.config(0).eid(eid("NUMBER-8"))).unwrap();
        let code = DeclineCode::NoSmcdDevice;
        expect_tcp(&server, &client, code, code);
    });
}

#[test]
fn a_system_eid_alone_is_enough() {
    watched(LIMIT, || {
        for fabric in [Fabric::Window, Fabric::Loopback] {
            let bench = Bench::new(fabric, 2);
            let open = |n| {
                let mut config = bench.config(n);
                config.eids.clear();
                config.seid = Some(eid("SYSTEM-1"));
                Stack::open(config).unwrap()
            };
            let (here, _) = meet(&open(0), &open(1));
            let Facts::SmcD(facts) = here.facts() else { panic!("{}", here.facts()) };
            assert_eq!(facts.eid, "SYSTEM-1");
        }
    });
}

#[test]
fn a_peer_of_release_2_0_never_uses_an_emulated_device() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        let old = |n| {
            let mut config = bench.config(n);
            config.release_2_0 = true;
            Stack::open(config).unwrap()
        };
        let (here, there) = meet(&bench.stack(0), &old(1));
        println!("old client: {} / {}", why(&here), why(&there));
        let (here, there) = meet(&old(2), &bench.stack(3));
        assert_eq!(why(&here).code().value() >> 16, 0x0303, "{}", why(&here));
        println!("old server: {} / {}", why(&here), why(&there));
    });
}

/// A daemon with ports 0 and 1 on fabric ff00, 2 and 3 on ff01.
fn two_fabrics() -> Bench {
    Bench::tuned(Fabric::Window, 4, |config| {
        config.fabrics.push(FabricConfig::new(Chid(0xff01)));
        for port in config.ports.iter_mut().skip(2) {
            port.chid = Chid(0xff01);
        }
    })
}

#[test]
fn fabrics_that_do_not_meet_make_it_tcp() {
    watched(LIMIT, || {
        let bench = two_fabrics();
        let code = DeclineCode::NoSmcdV2Device;
        expect_tcp(&bench.stack(0), &bench.stack(2), code, code);
    });
}

#[test]
fn equal_chids_of_two_daemons_do_not_meet() {
    watched(LIMIT, || {
        let (one, other) = (Bench::new(Fabric::Window, 1), Bench::new(Fabric::Window, 1));
        let code = DeclineCode::NoSmcdV2Device;
        expect_tcp(&one.stack(0), &other.stack(0), code, code);
        // The loopback of another operating system, as it were.
        let (one, other) = (Bench::new(Fabric::Loopback, 1), Bench::new(Fabric::Loopback, 1));
        expect_tcp(&one.stack(0), &other.stack(0), code, code);
    });
}

#[test]
fn a_stack_with_two_devices_uses_the_one_that_reaches_its_peer() {
    watched(LIMIT, || {
        let bench = two_fabrics();
        let open = |ports: &[usize]| {
            let mut config = bench.config(ports[0]);
            config.devices = ports.iter().map(|n| bench.socket(*n).into()).collect();
            Stack::open(config).unwrap()
        };
        let chid = |stream: &SmcStream| match stream.facts() {
            Facts::SmcD(facts) => facts.chid.0,
            facts => panic!("{facts}"),
        };
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

#[test]
fn each_direction_has_the_path_that_its_writer_has() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let mut config = bench.config(1);
        config.path = DataPath::Move;
        let (here, there) = meet(&bench.stack(0), &Stack::open(config).unwrap());
        let window = |stream: &SmcStream| match stream.facts() {
            Facts::SmcD(facts) => facts.window,
            facts => panic!("{facts}"),
        };
        println!("client window {}, server window {}", window(&here), window(&there));
        assert!(!window(&here));
    });
}

#[test]
fn ports_come_and_go_while_the_daemon_runs() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let server = bench.stack(0);
        for _ in 0..3 {
            let path = bench.socket(9);
            bench.daemon().add_port(PortSpec::new(&path)).unwrap();
            let client = bench.stack(9);
            assert!(meet(&server, &client).0.is_smc());
            drop(client);
            bench.daemon().remove_port("port9").unwrap();
        }
    });
}
