// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices lost between a client's Confirm and its server's read of the Confirm. By then the handshake
//! can no longer fall back to TCP, and the connection goes on over TCP like any other after the loss
//! of its device.

use std::io::{Read, Write, copy};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use guest_driver::{SmcListener, SmcStream, Stack};
use smc_tests::watch::LIMIT;
use smc_tests::{TIMEOUT, eventually, note, read_exactly, send_all, slurp, watched};

use crate::outlive::{LOSSES, Loss, Scene, config};

/// A relay between a client and its server. Messages behind the Proposal wait for a word.
fn hold_confirm(server: SocketAddr) -> (SocketAddr, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (release, held): (_, Receiver<()>) = channel();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(server).unwrap();
        let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answers = thread::spawn(move || {
            let _ = copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        let mut proposal = [0; 4096];
        let n = client.read(&mut proposal).unwrap();
        server.write_all(&proposal[..n]).unwrap();
        held.recv().unwrap();
        let _ = copy(&mut client, &mut server);
        let _ = server.shutdown(Shutdown::Write);
        answers.join().unwrap();
    });
    (address, release)
}

/// The message withheld by the relay between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Proposal,
    Accept,
}

/// Like [`hold_confirm`], for an earlier message.
fn hold(what: Held, server: SocketAddr) -> (SocketAddr, Sender<()>, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (release, held) = channel();
    let (tell, is_there) = channel();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(server).unwrap();
        let [mut from, mut to] = match what {
            Held::Proposal => [client.try_clone().unwrap(), server.try_clone().unwrap()],
            Held::Accept => [server.try_clone().unwrap(), client.try_clone().unwrap()],
        };
        let other = thread::spawn(move || {
            let [from, to] = match what {
                Held::Proposal => [&mut server, &mut client],
                Held::Accept => [&mut client, &mut server],
            };
            let _ = copy(from, to);
            let _ = to.shutdown(Shutdown::Write);
        });
        let mut message = [0; 4096];
        let n = from.read(&mut message).unwrap();
        tell.send(()).unwrap();
        held.recv().unwrap();
        let _ = to.write_all(&message[..n]);
        let _ = copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
        other.join().unwrap();
    });
    (address, release, is_there)
}

fn is_made(what: Held, loss: Loss, has_successor: bool) {
    note(format!("{what:?}, {loss:?}, successor: {has_successor}"));
    let mut scene = Scene::with_leave_time(1);
    let listener = SmcListener::bind(&scene.stack, "127.0.0.1:0").unwrap();
    let (address, release, is_there) = hold(what, listener.local_addr().unwrap());
    let mut client = config(1, &scene.dir, true);
    client.testing.leave_time = Duration::from_secs(1);
    let stack = Stack::open(client).unwrap();
    let accepting = thread::spawn(move || listener.accept().unwrap().0);
    let connecting = {
        let stack = stack.clone();
        thread::spawn(move || SmcStream::connect(&stack, address).unwrap())
    };
    is_there.recv().unwrap();
    lose(&mut scene, &stack, loss, has_successor);
    release.send(()).unwrap();
    let (client, server) = (connecting.join().unwrap(), accepting.join().unwrap());
    assert_eq!(client.is_smc(), server.is_smc(), "{} {}", client.info(), server.info());
    for (from, to) in [(&client, &server), (&server, &client)] {
        from.set_read_timeout(Some(TIMEOUT)).unwrap();
        send_all(from, b"bytes");
        assert_eq!(read_exactly(to, 5), b"bytes");
    }
    send_all(&server, b"last");
    drop(server);
    assert_eq!(slurp(&client), b"last");
}

#[test]
fn a_connection_that_is_being_made_when_its_device_goes_is_made() {
    watched(LIMIT, || {
        for what in [Held::Proposal, Held::Accept] {
            // Nothing has to leave a device in order.
            for loss in LOSSES.into_iter().filter(|loss| *loss != Loss::Left) {
                for has_successor in [false, true] {
                    is_made(what, loss, has_successor);
                }
            }
        }
    });
}

/// Loses the devices of server and client, and waits until both know. `has_successor`: then there are new
/// ones.
fn lose(scene: &mut Scene, client: &Arc<Stack>, loss: Loss, has_successor: bool) {
    scene.lose(loss);
    let are_there = |scene: &Scene, server: bool, of_client: bool| {
        (scene.stack.devices().len(), client.devices().len()) == (server.into(), of_client.into())
    };
    let (server_stays, client_stays) = (loss == Loss::ClientRemoved, loss == Loss::ServerRemoved);
    eventually("the devices are gone", || are_there(scene, server_stays, client_stays));
    if has_successor {
        scene.restart();
        eventually("both are there again", || are_there(scene, true, true));
    }
}

fn lives_on(loss: Loss, has_successor: bool, writes_before: bool) {
    note(format!("{loss:?}, successor: {has_successor}, writes before: {writes_before}"));
    // A short time for leaving: neither side waits for the handshake, or for the relay's withheld
    // messages.
    let mut scene = Scene::with_leave_time(1);
    let listener = SmcListener::bind(&scene.stack, "127.0.0.1:0").unwrap();
    let (address, release) = hold_confirm(listener.local_addr().unwrap());
    let mut client = config(1, &scene.dir, true);
    client.testing.leave_time = Duration::from_secs(1);
    let stack = Stack::open(client).unwrap();
    let accepting = thread::spawn(move || listener.accept().unwrap().0);
    let client = SmcStream::connect(&stack, address).unwrap();
    assert!(client.is_smc(), "{}", client.info());
    if writes_before {
        send_all(&client, b"before ");
    }
    lose(&mut scene, &stack, loss, has_successor);
    release.send(()).unwrap();
    let server = accepting.join().unwrap();
    assert!(server.is_smc(), "{}", server.info());
    for end in [&client, &server] {
        end.set_read_timeout(Some(TIMEOUT)).unwrap();
    }
    if writes_before {
        assert_eq!(read_exactly(&server, 7), b"before ");
    }
    for _ in 0..20 {
        send_all(&client, b"request");
        assert_eq!(read_exactly(&server, 7), b"request");
        send_all(&server, b"answer");
        assert_eq!(read_exactly(&client, 6), b"answer");
        thread::sleep(Duration::from_millis(1));
    }
    send_all(&server, b"last");
    drop(server);
    assert_eq!(slurp(&client), b"last");
}

#[test]
fn a_connection_confirmed_when_its_device_is_gone_goes_on_over_tcp() {
    watched(LIMIT, || {
        for loss in LOSSES {
            for (has_successor, writes_before) in [(false, true), (true, true), (true, false)] {
                lives_on(loss, has_successor, writes_before);
            }
        }
    });
}

/// The daemon asks all to leave, and attaches nothing any more. The device is still there.
#[test]
fn a_connection_confirmed_when_its_device_is_about_to_go_leaves_in_order() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let listener = SmcListener::bind(&scene.stack, "127.0.0.1:0").unwrap();
        let (address, release) = hold_confirm(listener.local_addr().unwrap());
        let stack = Stack::open(config(1, &scene.dir, true)).unwrap();
        let accepting = thread::spawn(move || listener.accept().unwrap().0);
        let client = SmcStream::connect(&stack, address).unwrap();
        send_all(&client, b"before");
        scene.daemon.as_mut().unwrap().feed("leave\n");
        eventually("devices take on nothing", || {
            scene.stack.devices().is_empty() && stack.devices().is_empty()
        });
        release.send(()).unwrap();
        let server = accepting.join().unwrap();
        assert_eq!(read_exactly(&server, 6), b"before");
        send_all(&server, b"answer");
        assert_eq!(read_exactly(&client, 6), b"answer");
        assert_eq!(scene.daemon.as_mut().unwrap().line(), "left 2 of 2");
    });
}
