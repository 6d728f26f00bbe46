// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! kill -9 in the middle of a transfer: of a client, a server, the daemon.

use std::io::{ErrorKind, Read};
use std::thread;
use std::time::Duration;

use guest_driver::{Config, SmcListener, SmcStream, Stack};
use smc_test_support::Stopwatch;
use smc_tests::helper::Helper;
use smc_tests::watch::LIMIT;
use smc_tests::{
    Bench, Dir, Fabric, Pair, eventually, note, pattern, read_exactly, send_all, watched,
};

use crate::support::{
    PEER, SOON, is_broken, read_until_it_ends, read_until_it_fails, serves, works,
    write_until_it_fails,
};

const FABRICS: [Fabric; 3] = [Fabric::Window, Fabric::Move, Fabric::Loopback];

fn path(bench: &Bench, port: usize) -> String {
    bench.socket(port).display().to_string()
}

/// Runs `body`, prints the time taken, and fails unless below `SOON`.
#[track_caller]
fn soon<T>(what: &str, body: impl FnOnce() -> T) -> T {
    let start = Stopwatch::start();
    let value = body();
    println!("{what}: {:?}", start.elapsed());
    assert!(start.elapsed() < SOON, "{what}: {:?}", start.elapsed());
    value
}

// Shows: CLOSE-33.
#[test]
fn a_killed_client_is_an_end_of_data_and_others_go_on() {
    for fabric in FABRICS {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 3);
            let pair = bench.pair();
            let other = pair.connect();
            let address = pair.addr().to_string();
            let mut helper = Helper::spawn(PEER, &["source", &path(&bench, 2), &address]);
            let (mut victim, _) = pair.listener.accept().unwrap();
            assert_eq!(helper.line(), "connected smc");
            victim.read_exact(&mut [0; 300_000]).unwrap();
            helper.kill();
            assert_eq!(soon("the reader hears", || read_until_it_ends(&victim)), None);
            assert_eq!(victim.send(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
            works(&other.0, &other.1);
            serves(&pair);
        });
    }
}

#[test]
fn a_killed_server_is_a_reset_and_a_new_one_serves() {
    for fabric in FABRICS {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 2);
            let client = bench.stack(1);
            for _ in 0..2 {
                let (mut helper, address) = start_sink(&bench);
                let stream = SmcStream::connect(&client, &*address).unwrap();
                assert!(stream.is_smc(), "{}", stream.info());
                assert_eq!(helper.line(), "accepted smc");
                send_all(&stream, &pattern(1, 500_000));
                let clone = stream.try_clone().unwrap();
                let reader = thread::spawn(move || read_until_it_fails(&clone));
                thread::sleep(Duration::from_millis(30));
                // With unread bytes at the peer. Without, this would be an end of data.
                helper.stop();
                stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
                let _ = stream.send(b"unread");
                helper.kill();
                let kind = soon("the writer hears", || write_until_it_fails(&stream));
                assert!(is_broken(kind), "{kind}");
                let kind = soon("the reader hears", || reader.join().unwrap());
                assert_eq!(kind, ErrorKind::ConnectionReset);
            }
        });
    }
}

fn start_sink(bench: &Bench) -> (Helper, String) {
    // A killed process's port is free again a moment later.
    let mut stack = None;
    eventually("the port is free", || {
        stack = Stack::open(bench.config(0)).ok();
        stack.is_some()
    });
    drop(stack);
    Helper::start(PEER, &["sink", &path(bench, 0)])
}

#[test]
fn an_idle_connection_hears_of_a_killed_peer_while_it_waits() {
    for fabric in FABRICS {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 2);
            let server = bench.stack(0);
            let listener = SmcListener::bind(&server, "127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let mut helper = Helper::spawn(PEER, &["idle", &path(&bench, 1), &address]);
            let (victim, _) = listener.accept().unwrap();
            assert_eq!(helper.line(), "connected smc");
            assert!(victim.is_smc());
            let reader = thread::spawn(move || read_until_it_ends(&victim));
            thread::sleep(Duration::from_millis(1500));
            helper.kill();
            assert_eq!(soon("the sleeper hears", || reader.join().unwrap()), None);
            eventually("the peer is forgotten", || {
                server.totals().peers == 0 || fabric == Fabric::Loopback
            });
        });
    }
}

#[test]
fn a_killed_daemon_resets_its_connections_and_a_new_one_serves() {
    watched(LIMIT, || {
        let dir = Dir::new();
        let sockets = [0, 1].map(|n| dir.socket(n).display().to_string());
        let args = ["daemon", &sockets[0], &sockets[1]];
        let (daemon, ready) = Helper::start(PEER, &args);
        assert_eq!(ready, "ready");
        let open = |n: usize| {
            let config = Config { outlive_device: false, ..Config::new(&sockets[n]) };
            Stack::open(config).unwrap()
        };
        let pair = Pair::new(open(0), open(1), true);
        let (client, server) = pair.connect();
        works(&client, &server);
        let idle = pair.connect();
        let reader = thread::spawn(move || read_until_it_fails(&server));
        let (writing, written) = pair.connect();
        let writer = thread::spawn(move || write_until_it_fails(&writing));
        thread::sleep(Duration::from_millis(50));
        daemon.kill();
        soon("a reader hears", || assert_eq!(reader.join().unwrap(), ErrorKind::ConnectionReset));
        soon("a writer hears", || assert!(is_broken(writer.join().unwrap())));
        soon("an idle one hears", || {
            assert_eq!(read_until_it_fails(&idle.0), ErrorKind::ConnectionReset);
            assert_eq!(read_until_it_fails(&idle.1), ErrorKind::ConnectionReset);
        });
        drop((client, idle, written));

        // Meanwhile connections are TCP.
        let without = Pair { smc: false, ..pair };
        {
            let (here, there) = connect_talking_first(&without);
            assert!(!here.is_smc() && !there.is_smc());
        }
        note("starts a daemon again");
        let (_daemon, ready) = Helper::start(PEER, &args);
        assert_eq!(ready, "ready");
        let pair = Pair { smc: true, ..without };
        eventually("new connections are SMC again", || {
            let (here, there) = connect_talking_first(&pair);
            here.is_smc() && there.is_smc()
        });
        serves(&pair);
    });
}

/// A connection with the client's bytes first: without a Proposal, a server waits for them.
fn connect_talking_first(pair: &Pair) -> (SmcStream, SmcStream) {
    thread::scope(|scope| {
        let accepting = scope.spawn(|| pair.listener.accept().unwrap().0);
        let here = SmcStream::connect(&pair.client, pair.addr()).unwrap();
        send_all(&here, b"first");
        let there = accepting.join().unwrap();
        assert_eq!(read_exactly(&there, 5), b"first");
        (here, there)
    })
}

#[test]
fn a_stopped_daemon_is_noticed_and_reopened() {
    for fabric in FABRICS {
        watched(LIMIT, || {
            let mut bench = Bench::new(fabric, 2);
            let pair = bench.pair();
            for _ in 0..3 {
                let (client, server) = pair.connect();
                works(&client, &server);
                bench.stop_daemon();
                assert!(is_broken(soon("the client hears", || read_until_it_fails(&client))));
                assert!(is_broken(soon("the server hears", || write_until_it_fails(&server))));
                bench.start_daemon(2);
                drop((client, server));
                eventually("new connections are SMC again", || {
                    let (here, there) = connect_talking_first(&pair);
                    here.is_smc() && there.is_smc()
                });
            }
        });
    }
}

#[test]
fn a_port_that_is_removed_ends_its_connections_only() {
    for fabric in FABRICS {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 3);
            let pair = bench.pair();
            let third = bench.stack(2);
            let (kept, kept_server) = pair.connect();
            let (lost, lost_server) = pair.connect_from(&third);
            works(&lost, &lost_server);
            bench.daemon().remove_guest("port2").unwrap();
            let kind = soon("its own end hears", || read_until_it_fails(&lost));
            assert_eq!(kind, ErrorKind::ConnectionReset);
            let kind = soon("the peer hears", || read_until_it_fails(&lost_server));
            assert_eq!(kind, ErrorKind::ConnectionReset);
            works(&kept, &kept_server);
            serves(&pair);
        });
    }
}

#[test]
fn what_a_peer_wrote_before_it_died_can_be_read() {
    for fabric in FABRICS {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 3);
            let pair = bench.pair();
            let third = bench.stack(2);
            let (dying, survivor) = pair.connect_from(&third);
            let bytes = pattern(3, 40_000);
            send_all(&dying, &bytes);
            // Moves are under way for a moment.
            eventually("all is there", || survivor.readable().unwrap() == bytes.len());
            bench.daemon().remove_guest("port2").unwrap();
            assert!(read_exactly(&survivor, bytes.len()) == bytes);
            assert_eq!(read_until_it_fails(&survivor), ErrorKind::ConnectionReset);
        });
    }
}

#[test]
fn departed_clients_are_forgotten_by_a_server_that_only_accepts() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let server = bench.stack(0);
        let listener = SmcListener::bind(&server, "127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn(move || {
            for stream in listener.incoming().take(10) {
                drop(stream.unwrap());
            }
            note("waits for a client that never comes");
            let _ = listener.accept();
        });
        for _ in 0..10 {
            let mut client = None;
            eventually("the port is free", || {
                client = Stack::open(bench.config(1)).ok();
                client.is_some()
            });
            let client = client.unwrap();
            let mut stream = SmcStream::connect(&client, address).unwrap();
            assert!(stream.is_smc(), "{}", stream.info());
            assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
        }
        eventually("departed peers are forgotten", || server.totals().peers == 0);
        eventually("with their buffers", || {
            bench
                .daemon()
                .list()
                .iter()
                .all(|port| port.device.as_ref().is_none_or(|d| d.dmbs == 0))
        });
        // Wakes the server up for its end.
        drop(std::net::TcpStream::connect(address));
        serving.join().unwrap();
    });
}
