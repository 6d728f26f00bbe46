// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vanishing peers: at each point of the handshake, and afterwards; the device first, or TCP first.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use guest_driver::SmcStream;
use smc_core::wire::ids::DmbToken;
use smc_test_support::Stopwatch;
use smc_tests::hostile::Hostile;
use smc_tests::leaks::Devices;
use smc_tests::raw::{self, Device, LINK, dmbe, propose, put};
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, TIMEOUT, eventually, note, watched};
use virtio_ism_abi::{Gid, Token};

use crate::support::{Door, SOON, is_broken, nothing_is_left, read_until_it_ends, works};

const LEN: u32 = 64 << 10;

/// Opens a device; the port of a departed device is free a moment later.
fn device(bench: &Bench) -> Device {
    eventually("the port is free", || {
        bench.daemon().list().iter().any(|p| p.spec.name == "port2" && p.device.is_none())
    });
    Device::open(bench, 2)
}

/// Goes in one of two orders.
fn go<T>(device_first: bool, device: Device, tcp: TcpStream, dmbs: T) {
    if device_first {
        // DMBs keep their device alive; drop both.
        drop(dmbs);
        drop(device);
        thread::sleep(Duration::from_millis(20));
        drop(tcp);
    } else {
        drop(tcp);
        thread::sleep(Duration::from_millis(20));
        drop(dmbs);
        drop(device);
    }
}

#[test]
fn a_client_may_vanish_at_every_point() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let before = Devices::of(bench.daemon());
        let door = Door::new(bench.pair());
        for device_first in [true, false] {
            for point in 0..6 {
                note(format!("vanishes at point {point}, device first: {device_first}"));
                let device = device(&bench);
                let config = device.config();
                if point == 0 {
                    go(device_first, device, TcpStream::connect(door.addr()).unwrap(), ());
                    continue;
                }
                let proposed = propose(door.addr(), &config);
                if point == 1 {
                    go(device_first, device, proposed.tcp, ());
                    continue;
                }
                let (tcp, accepted) = proposed.accepted();
                if point == 2 {
                    go(device_first, device, tcp, ());
                    continue;
                }
                let DmbToken(token) = accepted.peer().token;
                let theirs = device.ism.attach(Token(token), accepted.peer().size.bytes()).unwrap();
                if point == 3 {
                    go(device_first, device, tcp, theirs);
                    continue;
                }
                let victim = Gid(accepted.devices().peer.0);
                let own = device.ism.register(victim, LEN, 0).unwrap();
                let (_, confirm) = accepted.confirm(dmbe(own.token().0, LEN), LINK);
                if point == 4 {
                    // The named DMB is gone at the server's attach, but the client is not, so the
                    // server breaks the connection.
                    drop(own);
                    put(&tcp, &confirm);
                    assert!(std::io::Read::read(&mut &tcp, &mut [0; 1]).is_err());
                    go(device_first, device, tcp, theirs);
                    continue;
                }
                put(&tcp, &confirm);
                let stream = door.next_smc();
                let start = Stopwatch::start();
                go(device_first, device, tcp, (own, theirs));
                let end = read_until_it_ends(&stream);
                assert!(matches!(end, None | Some(ErrorKind::ConnectionReset)), "{end:?}");
                assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
            }
            door.serves();
        }
        // A client gone without a byte was an ordinary one.
        for stream in door.drain() {
            assert!(!stream.is_smc(), "{}", stream.info());
        }
        drop(door);
        nothing_is_left(&bench, before);
    });
}

#[test]
fn a_server_may_vanish_at_every_point() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let before = Devices::of(bench.daemon());
        let pair = bench.pair();
        for device_first in [true, false] {
            for point in 0..5 {
                note(format!("vanishes at point {point}, device first: {device_first}"));
                let device = device(&bench);
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let address = listener.local_addr().unwrap();
                let result = thread::scope(|scope| {
                    let client = &pair.client;
                    let connecting = scope.spawn(move || SmcStream::connect(client, address));
                    serve_until(point, device_first, device, &listener);
                    connecting.join().unwrap()
                });
                match result {
                    Ok(stream) if stream.is_smc() => {
                        assert!(point >= 3, "point {point}");
                        let start = Stopwatch::start();
                        let end = read_until_it_ends(&stream);
                        assert!(matches!(end, None | Some(ErrorKind::ConnectionReset)), "{end:?}");
                        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
                    }
                    // Declined, because the DMB was not there any more.
                    Ok(stream) => {
                        println!("point {point}: {}", stream.info());
                        assert_eq!(point, 2);
                    }
                    Err(error) => {
                        println!("point {point}: {error}");
                        assert!(point <= 2, "{error}");
                        assert_ne!(error.kind(), ErrorKind::TimedOut);
                    }
                }
            }
        }
        let (client, server) = pair.connect();
        works(&client, &server);
        drop((client, server, pair));
        nothing_is_left(&bench, before);
    });
}

fn serve_until(point: usize, device_first: bool, device: Device, listener: &TcpListener) {
    if point == 0 {
        let (tcp, _) = listener.accept().unwrap();
        return go(device_first, device, tcp, ());
    }
    let selected = raw::select(listener, &device.config());
    if point == 1 {
        return go(device_first, device, selected.tcp, ());
    }
    let own = device.ism.register(selected.client(), LEN, 0).unwrap();
    let token = own.token().0;
    if point == 2 {
        drop(own);
        let (tcp, _) = selected.accept(dmbe(token, LEN));
        // The client's answer shows the end of its attempt.
        let _ = std::io::Read::read(&mut &tcp, &mut [0; 1]);
        return go(device_first, device, tcp, ());
    }
    let (tcp, awaiting) = selected.accept(dmbe(token, LEN));
    let established = raw::confirmed(&tcp, awaiting);
    if point == 3 {
        return go(device_first, device, tcp, own);
    }
    let theirs =
        device.ism.attach(Token(established.peer.token.0), established.peer.size.bytes()).unwrap();
    go(device_first, device, tcp, (own, theirs));
}

// Shows: CLC-63.
#[test]
fn a_device_that_goes_takes_only_its_own_connections_along() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        let pair = bench.pair();
        let honest = pair.connect();
        let (first, second) = (Device::open(&bench, 2), Device::open(&bench, 3));
        let (one, of_one) = Hostile::connect(&pair, &first);
        let (two, of_two) = Hostile::connect(&pair, &second);
        drop(one);
        drop(first);
        assert!(read_until_it_ends(&of_one).is_none_or(is_broken));
        works(&honest.0, &honest.1);
        of_two.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert_eq!(of_two.recv(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(of_two.send(b"fine").unwrap(), 4);
        drop(two);
    });
}

#[test]
fn a_peer_that_withdraws_its_dmb_ends_that_connection_only() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let pair = bench.pair();
        let honest = pair.connect();
        let device = Device::open(&bench, 2);
        let (one, of_one) = Hostile::connect(&pair, &device);
        let (two, of_two) = Hostile::connect(&pair, &device);
        let start = Stopwatch::start();
        // The victim learns of the withdrawal by an event, or by a refused move.
        drop(one.own);
        of_one.set_read_timeout(Some(TIMEOUT)).unwrap();
        assert_eq!(of_one.recv(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert!(of_one.send(b"x").is_err());
        assert_eq!(of_two.send(b"fine").unwrap(), 4);
        works(&honest.0, &honest.1);
        drop(two);
    });
}
