// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A sent Proposal gets its answer, whatever the fate of the client's device: the answer is taken from
//! the stream, and none of its bytes reaches the program.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use guest_driver::interpose::Outgoing;
use guest_driver::{SmcStream, Stack};
use smc_core::handshake::{AwaitConfirm, ConfirmStep, DeclineReason};
use smc_tests::raw::{self, Device, Selected, dmbe, put};
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, eventually, note, read_exactly, send_all, watched};

use crate::support::all_closed;

const LEN: u32 = 64 << 10;

/// The server's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Accept,
    Decline,
    /// The device goes when half of the Accept is there.
    HalfAccept,
}

/// The cause of the loss of the client's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Removed,
    Stopped,
}

fn lose(bench: &mut Bench, loss: Loss) {
    match loss {
        Loss::Removed => bench.daemon().remove_guest("port1").unwrap(),
        Loss::Stopped => bench.stop_daemon(),
    }
    // Until the client has noticed, as a rule. The result is the same.
    thread::sleep(Duration::from_millis(100));
}

/// Serves by hand: `at` runs when the Proposal is there, and before the answer is complete.
fn answer(device: &Device, selected: Selected, answer: Answer, at: impl FnOnce()) -> TcpStream {
    let own = device.ism.register(selected.client(), LEN, 0).unwrap();
    let element = dmbe(own.token().0, LEN);
    match answer {
        Answer::Decline => {
            at();
            let decline = selected.selection.decline(DeclineReason::NoIsmDevice);
            put(&selected.tcp, &decline.message);
            selected.tcp
        }
        Answer::Accept => {
            at();
            let (tcp, awaiting) = selected.accept(element);
            declines(&tcp, awaiting);
            tcp
        }
        Answer::HalfAccept => {
            let bytes = selected.accept_bytes(element);
            let (first, second) = bytes.split_at(bytes.len() / 2);
            put(&selected.tcp, first);
            thread::sleep(Duration::from_millis(20));
            at();
            put(&selected.tcp, second);
            let now = smc_core::time::Tick(0);
            let candidate = selected.selection.candidates()[0];
            let (awaiting, _) = selected.selection.accept(candidate, None, element, raw::LINK, now);
            declines(&selected.tcp, awaiting);
            selected.tcp
        }
    }
}

/// The client's answer to Accept is a Decline.
#[track_caller]
fn declines(tcp: &TcpStream, awaiting: AwaitConfirm) {
    let reply = raw::read_message(tcp, awaiting.reader());
    let step = awaiting.handle(&reply);
    assert!(matches!(step, ConfirmStep::PeerDeclined(_)), "{step:?}");
}

/// Both programs talk, and get each other's bytes and no others.
fn talk(client: &SmcStream, mut server: &TcpStream) {
    assert!(!client.is_smc(), "{}", client.info());
    server.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(client, 6), b"answer");
    send_all(client, b"question");
    let mut question = [0; 8];
    server.read_exact(&mut question).unwrap();
    assert_eq!(&question, b"question");
}

fn each(case: impl Fn(&mut Bench, Arc<Stack>, &Device, Answer, Loss)) {
    for given in [Answer::Decline, Answer::Accept, Answer::HalfAccept] {
        for loss in [Loss::Removed, Loss::Stopped] {
            watched(LIMIT, || {
                note(format!("{given:?}, {loss:?}"));
                let mut bench = Bench::new(Fabric::Window, 3);
                let client = bench.stack(1);
                let device = Device::open(&bench, 2);
                case(&mut bench, client, &device, given, loss);
            });
        }
    }
}

#[test]
fn a_blocking_connect_settles_its_proposal_when_the_device_goes() {
    each(|bench, client, device, given, loss| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stack = client.clone();
        let connecting = thread::spawn(move || SmcStream::connect(&stack, address).unwrap());
        let selected = raw::select(&listener, &device.config());
        let server = answer(device, selected, given, || lose(bench, loss));
        talk(&connecting.join().unwrap(), &server);
    });
}

#[test]
fn a_handshake_that_never_waits_settles_its_proposal_when_the_device_goes() {
    each(|bench, client, device, given, loss| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut outgoing = Outgoing::new(&client, tcp, false);
        assert!(outgoing.advance().unwrap().is_none());
        let selected = raw::select(&listener, &device.config());
        let (stream, server) = thread::scope(|scope| {
            let serving = scope.spawn(|| answer(device, selected, given, || lose(bench, loss)));
            let stream = loop {
                if let Some(stream) = outgoing.advance().unwrap() {
                    break stream;
                }
                thread::sleep(Duration::from_millis(1));
            };
            (stream, serving.join().unwrap())
        });
        talk(&stream, &server);
    });
}

// The device may come back as another one before the answer does.
#[test]
fn an_accept_for_a_device_that_was_replaced_is_declined() {
    watched(LIMIT, || {
        let mut bench = Bench::new(Fabric::Window, 3);
        let pair = bench.pair();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = pair.client.clone();
        let connecting = thread::spawn(move || SmcStream::connect(&client, address).unwrap());
        let device = Device::open(&bench, 2);
        let selected = raw::select(&listener, &device.config());
        lose(&mut bench, Loss::Stopped);
        bench.start_daemon(3);
        let (tcp, awaiting) = selected.accept(dmbe(77, LEN));
        declines(&tcp, awaiting);
        talk(&connecting.join().unwrap(), &tcp);
    });
}

// By the time a server attaches its client's DMB, the handshake can no longer fall back to TCP.
#[test]
fn few_attachments_leave_tcp_and_break_nothing() {
    watched(LIMIT, || {
        let bench = Bench::tuned(Fabric::Window, 3, |config| {
            config.fabrics[0].quotas.max_attach = Some(1);
        });
        let pair = bench.pair();
        let clients = [pair.client.clone(), bench.stack(2)];
        for round in 0..20 {
            note(format!("round {round}"));
            // A connection of the other client has, or had, the server's only place.
            let first = pair.connect_any_from(&clients[round % 2]);
            assert!(first.0.is_smc() && first.1.is_smc(), "{}", first.0.info());
            let second = pair.connect_any_from(&clients[(round + 1) % 2]);
            assert!(!second.0.is_smc() && !second.1.is_smc(), "{}", second.0.info());
            for (here, there) in [&first, &second] {
                send_all(here, b"question");
                assert_eq!(read_exactly(there, 8), b"question");
            }
            drop((first, second));
            all_closed(&pair);
            eventually("the other client has closed", || clients[1].totals().closing == 0);
        }
    });
}
