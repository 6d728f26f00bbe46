// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Damaged, foreign and lying CLC messages, against a server and against a client.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use guest_driver::{Config, ConnectionInfo, SmcStream};
use rustix::event::{PollFd, PollFlags, Timespec};
use smc_core::handshake::{Awaited, ClcReader, DeclineCode, DeclineReason, Dmbe};
use smc_core::wire::clc::{GidChid, Message, SmcTypes};
use smc_core::wire::ids::{Chid, DmbToken, Eid, Gid, GidV1, SizeCode};
use smc_tests::leaks::Devices;
use smc_tests::raw::{
    self, Device, End, LINK, Selected, dmbe, finish, propose, put, read_message, read_to_end,
};
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, Rng, TIMEOUT, eid, note, read_exactly, send_all, watched};

use crate::support::{Door, nothing_is_left};

const LEN: u32 = 64 << 10;

/// A bench with a server and an honest client, and a device for the dishonest peer.
fn stage() -> (Bench, Door, Device) {
    let bench = Bench::new(Fabric::Window, 3);
    let door = Door::new(bench.pair());
    let device = Device::open(&bench, 2);
    (bench, door, device)
}

/// Sends `bytes` as the client's only words. Returns the server's answer, and the kind of end. Any
/// connection made out of the bytes is closed at once.
fn say(door: &Door, bytes: &[u8]) -> (Vec<u8>, End) {
    let tcp = TcpStream::connect(door.addr()).unwrap();
    put(&tcp, bytes);
    // A client with its direction already ended gets no Decline. A server still waiting for bytes gets
    // the end.
    let soon = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    rustix::event::poll(&mut [PollFd::new(&tcp, PollFlags::IN)], Some(&soon)).unwrap();
    finish(&tcp);
    thread::scope(|scope| {
        let reading = scope.spawn(|| read_to_end(&tcp));
        while !reading.is_finished() {
            door.others();
            thread::sleep(Duration::from_micros(100));
        }
        reading.join().unwrap()
    })
}

/// The diagnosis of a Decline.
fn diagnosis(bytes: &[u8]) -> DeclineCode {
    match Message::parse(bytes).unwrap() {
        Message::Decline(decline) => DeclineCode::from(decline.diagnosis.0),
        other => panic!("{other:?}"),
    }
}

// Shows: CLC-55.
#[test]
fn truncated_proposals_break_the_connection() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let (_, proposal) = raw::proposal(&device.config());
        let begin = |door: &Door, cut| {
            note(format!("cuts at {cut}"));
            let tcp = TcpStream::connect(door.addr()).unwrap();
            put(&tcp, &proposal[..cut]);
            finish(&tcp);
            tcp
        };
        let soon = |config: &mut Config| config.detect_timeout = Duration::from_millis(30);
        let door = Door::new(bench.pair_with(soon));
        for cut in 0..4 {
            // So few bytes could be anything: an ordinary client, with its bytes.
            let _tcp = begin(&door, cut);
            let server = door.next();
            assert!(!server.is_smc());
            assert_eq!(read_exactly(&server, cut), &proposal[..cut]);
        }
        drop(door);
        let before = Devices::of(bench.daemon());
        let door = Door::new(bench.pair());
        for cut in 4..proposal.len() {
            let tcp = begin(&door, cut);
            assert_eq!(read_to_end(&tcp), (vec![], End::Reset), "cut at {cut}");
        }
        assert_eq!(door.others(), 0);
        assert_eq!(door.pair.server.totals().broken, proposal.len() as u64 - 4);
        door.serves();
        drop((door, device));
        nothing_is_left(&bench, before);
    });
}

#[test]
fn flipped_bytes_of_a_proposal_never_harm_the_server() {
    watched(LIMIT, || {
        let (_bench, door, device) = stage();
        let (_, proposal) = raw::proposal(&device.config());
        let (mut accepts, mut declines, mut resets) = (0, 0, 0);
        for at in 0..proposal.len() {
            for flip in [0x01, 0x80, 0xff] {
                note(format!("flips {flip:#x} at {at}"));
                let mut bytes = proposal.clone();
                bytes[at] ^= flip;
                let (answer, end) = say(&door, &bytes);
                match Message::parse(&answer) {
                    Ok(Message::AcceptD2(_)) => accepts += 1,
                    Ok(Message::Decline(_)) => declines += 1,
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => {
                        assert!(answer.is_empty());
                        resets += usize::from(end == End::Reset);
                    }
                }
            }
        }
        println!("{accepts} accepted, {declines} declined, {resets} reset");
        assert!(declines > 0 && resets > 0);
        door.serves();
    });
}

// Shows: ERR-9.
#[test]
fn noise_behind_an_eye_catcher_breaks_the_connection() {
    watched(LIMIT, || {
        let (_bench, door, _device) = stage();
        let mut rng = Rng::new(7);
        for round in 0..100u32 {
            note(format!("round {round}"));
            let len = 52 + rng.below(300) as usize;
            let mut bytes: Vec<u8> = (0..len).map(|_| rng.bits() as u8).collect();
            let claimed = if round % 2 == 0 { len as u16 } else { rng.bits() as u16 | 64 };
            bytes[..4].copy_from_slice(&[0xe2, 0xd4, 0xc3, 0xd9]);
            bytes[4] = 1;
            bytes[5..7].copy_from_slice(&claimed.min(4096).to_be_bytes());
            let (answer, end) = say(&door, &bytes);
            assert!(answer.is_empty(), "round {round}");
            assert_eq!(end, End::Reset, "round {round}");
        }
        assert_eq!(door.others(), 0);
        door.serves();
    });
}

#[test]
fn nine_eids_break_the_connection() {
    watched(LIMIT, || {
        let (_bench, door, device) = stage();
        let mut config = device.config();
        config.ueids = (0..8).map(|n| eid(&format!("EID-{n}"))).collect();
        let (_, proposal) = raw::proposal(&config);
        // One more than the maximum: the count, the EID, the length, the offset to the next part.
        let (count, eids, offset) = (80, 120, 86);
        assert_eq!(proposal[count], 8);
        let mut bytes = proposal.clone();
        bytes[count] = 9;
        bytes.splice(eids + 8 * 32..eids + 8 * 32, *eid("EID-8").as_bytes());
        let add = |bytes: &mut [u8], at: usize| {
            let value = u16::from_be_bytes([bytes[at], bytes[at + 1]]) + 32;
            bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
        };
        add(&mut bytes, 5);
        add(&mut bytes, offset);
        assert_eq!(say(&door, &bytes), (vec![], End::Reset));
        // The count alone.
        let mut bytes = proposal;
        bytes[count] = 9;
        assert_eq!(say(&door, &bytes), (vec![], End::Reset));
        door.serves();
    });
}

#[test]
fn an_unpaired_chid_is_declined_and_tcp_goes_on() {
    watched(LIMIT, || {
        let (_bench, door, device) = stage();
        let (_, proposal) = raw::proposal(&device.config());
        let Message::Proposal(proposal) = Message::parse(&proposal).unwrap() else { panic!() };
        let half = |chid| GidChid { gid: GidV1([3; 8]), chid: Chid(chid) };
        let own: Vec<GidChid> =
            proposal.v2.as_ref().unwrap().smcd.entries.iter().copied().collect();
        for entries in [
            vec![half(0xff00)],
            vec![half(0xff00), half(0xff01)],
            vec![half(0xff01), own[0], own[1]],
            vec![own[0], own[1], half(0xffff)],
        ] {
            let mut odd = proposal;
            let v2 = odd.v2.as_mut().unwrap();
            assert_eq!(v2.types, SmcTypes::D);
            v2.smcd.entries = smc_core::wire::List::from_slice(&entries).unwrap();
            let mut tcp = TcpStream::connect(door.addr()).unwrap();
            put(&tcp, &odd.emit());
            let answer = read_message(&tcp, ClcReader::new(Awaited::Accept));
            assert_eq!(diagnosis(&answer), DeclineCode::NoSmcdV2Device, "{entries:?}");
            let server = door.next();
            tcp.write_all(b"tcp").unwrap();
            assert_eq!(read_exactly(&server, 3), b"tcp");
            let ConnectionInfo::Tcp(why) = server.info() else { panic!() };
            println!("{why}");
        }
        door.serves();
    });
}

/// Shakes hands up to Accept.
fn up_to_accept(door: &Door, device: &Device) -> (TcpStream, Vec<u8>) {
    let (tcp, accepted) = propose(door.addr(), &device.config()).accepted();
    let own = Dmbe { token: DmbToken(0x1234), index: 0, size: SizeCode::MIN };
    (tcp, accepted.confirm(own, LINK).1)
}

/// The connection is reset, or closed behind a Decline.
#[track_caller]
fn assert_broken(what: &str, answer: &[u8], end: End) {
    if answer.is_empty() {
        assert_eq!(end, End::Reset, "{what}");
    } else {
        println!("{what}: {}", diagnosis(answer));
        assert_eq!(end, End::Closed, "{what}");
    }
}

// Shows: CLC-55.
#[test]
fn damaged_confirms_break_the_connection_and_leave_nothing() {
    watched(LIMIT, || {
        let (bench, door, device) = stage();
        let before = Devices::of(bench.daemon());
        let (tcp, confirm) = up_to_accept(&door, &device);
        drop(tcp);
        for cut in (0..confirm.len()).step_by(3) {
            note(format!("cuts at {cut}"));
            let (tcp, confirm) = up_to_accept(&door, &device);
            put(&tcp, &confirm[..cut]);
            finish(&tcp);
            // A client with its end before the first byte ends in order.
            let end = if cut == 0 { End::Closed } else { End::Reset };
            assert_eq!(read_to_end(&tcp), (vec![], end), "cut at {cut}");
        }
        for at in 0..confirm.len() {
            note(format!("flips at {at}"));
            let (tcp, mut confirm) = up_to_accept(&door, &device);
            confirm[at] ^= 0x41;
            put(&tcp, &confirm);
            finish(&tcp);
            // Whatever is flipped: the token is nobody's, so this can never become a connection.
            let (answer, end) = read_to_end(&tcp);
            assert_broken(&format!("byte {at}"), &answer, end);
        }
        assert_eq!(door.others(), 0);
        door.serves();
        drop((door, device));
        nothing_is_left(&bench, before);
    });
}

#[test]
fn a_confirm_that_does_not_repeat_accept_breaks_the_connection() {
    watched(LIMIT, || {
        let (_bench, door, device) = stage();
        type Change = fn(&mut smc_core::wire::clc::SmcdV2);
        let changes: [(&str, Change); 9] = [
            ("another CHID", |confirm| confirm.chid = Chid(0xff01)),
            ("another EID", |confirm| confirm.eid = eid("OTHER")),
            ("no EID", |confirm| confirm.eid = Eid::ZERO),
            ("another GID", |confirm| confirm.gid = Gid([7; 16])),
            ("no first contact", |confirm| confirm.first_contact = None),
            ("token 0", |confirm| confirm.token = DmbToken(0)),
            ("an unknown token", |confirm| confirm.token = DmbToken(u64::MAX)),
            ("another element", |confirm| confirm.index = 200),
            ("another feature mask", |confirm| {
                confirm.first_contact.as_mut().unwrap().features = Default::default();
            }),
        ];
        for (what, change) in changes {
            note(what);
            let (tcp, accepted) = propose(door.addr(), &device.config()).accepted();
            // A usable DMB.
            let victim = virtio_ism_abi::Gid(accepted.devices().peer.0);
            let own = device.ism.register(victim, LEN, 0).unwrap();
            let (_, confirm) = accepted.confirm(dmbe(own.token().0, LEN), LINK);
            let Message::ConfirmD2(mut confirm) = Message::parse(&confirm).unwrap() else {
                panic!()
            };
            change(&mut confirm);
            put(&tcp, &Message::ConfirmD2(confirm).emit());
            let (answer, end) = match door.soon() {
                None => read_to_end(&tcp),
                Some(stream) => panic!("{what}: {}", stream.info()),
            };
            assert_broken(what, &answer, end);
        }
        assert_eq!(door.others(), 0);
        door.serves();
    });
}

#[test]
fn a_decline_in_place_of_proposal_or_confirm_is_tcp() {
    watched(LIMIT, || {
        let (bench, door, device) = stage();
        let before = Devices::of(bench.daemon());
        let config = Arc::new(device.config());
        let opening =
            smc_core::handshake::SendDecline::opening(&config, DeclineReason::Policy).message;
        let mut tcp = TcpStream::connect(door.addr()).unwrap();
        put(&tcp, &[&opening[..], b"data"].concat());
        let server = door.next();
        assert!(!server.is_smc());
        assert_eq!(read_exactly(&server, 4), b"data", "what follows the Decline is data");
        send_all(&server, b"answer");
        tcp.read_exact(&mut [0; 6]).unwrap();

        let (mut tcp, accepted) = propose(door.addr(), &config).accepted();
        let decline = accepted.decline(DeclineReason::NoMemory).message;
        put(&tcp, &[&decline[..], b"data"].concat());
        let server = door.next();
        let ConnectionInfo::Tcp(why) = server.info() else { panic!("{}", server.info()) };
        assert_eq!(why.code(), DeclineCode::NoMemory);
        assert_eq!(read_exactly(&server, 4), b"data");
        send_all(&server, b"answer");
        tcp.read_exact(&mut [0; 6]).unwrap();
        drop(tcp);
        door.serves();
        drop((server, door, device));
        nothing_is_left(&bench, before);
    });
}

/// Connects an honest client to a raw server, with `answer` in reply to the Proposal.
fn answered<T>(
    bench: &Bench,
    device: &Device,
    answer: impl FnOnce(Selected) -> T + Send,
) -> (std::io::Result<SmcStream>, T)
where
    T: Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = bench.stack(1);
    thread::scope(|scope| {
        let address = listener.local_addr().unwrap();
        let connecting = scope.spawn(move || SmcStream::connect(&client, address));
        let value = answer(raw::select(&listener, &device.config()));
        (connecting.join().unwrap(), value)
    })
}

#[test]
fn damaged_accepts_are_an_error_at_the_client() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let (client, device) = (bench.stack(1), Device::open(&bench, 2));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let own = Dmbe { token: DmbToken(0x1234), index: 0, size: SizeCode::MIN };
        let length = {
            let (result, length) = answered_by(&listener, &client, &device, |selected| {
                let length = selected.accept_bytes(own).len();
                put(&selected.tcp, b"HTTP/1.1 400 Bad Request\r\n\r\n");
                length
            });
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            println!("{error}");
            length
        };
        for cut in (0..length).step_by(5) {
            note(format!("cuts at {cut}"));
            let (result, ()) = answered_by(&listener, &client, &device, |selected| {
                put(&selected.tcp, &selected.accept_bytes(own)[..cut]);
                finish(&selected.tcp);
                drop(selected.tcp);
            });
            let error = result.unwrap_err();
            assert!(!error.to_string().is_empty());
            assert_ne!(error.kind(), ErrorKind::TimedOut, "cut at {cut}");
        }
        let mut errors = 0;
        for at in 0..length {
            note(format!("flips at {at}"));
            let (result, ()) = answered_by(&listener, &client, &device, |selected| {
                let mut bytes = selected.accept_bytes(own);
                bytes[at] ^= 0x41;
                put(&selected.tcp, &bytes);
                finish(&selected.tcp);
                // The client either breaks off or declines, because the token is nobody's.
                read_to_end(&selected.tcp);
            });
            match result {
                Ok(stream) => assert!(!stream.is_smc(), "byte {at}"),
                Err(_) => errors += 1,
            }
        }
        println!("{errors} of {length} are errors, the others declined");
        assert!(errors > 40);
        drop(listener);
        assert!(TcpStream::connect_timeout(&address, TIMEOUT).is_err());
    });
}

/// Like `answered`, on an existing listener and stack.
fn answered_by<T: Send>(
    listener: &TcpListener,
    client: &Arc<guest_driver::Stack>,
    device: &Device,
    answer: impl FnOnce(Selected) -> T + Send,
) -> (std::io::Result<SmcStream>, T) {
    thread::scope(|scope| {
        let config = device.config();
        let serving = scope.spawn(move || answer(raw::select(listener, &config)));
        let result = SmcStream::connect(client, listener.local_addr().unwrap());
        // Ends the server's wait, if the server waits.
        let result = result.inspect(|stream| {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        });
        (result, serving.join().unwrap())
    })
}

#[test]
fn an_accept_of_what_was_not_proposed_is_an_error() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        type Change = fn(&mut smc_core::wire::clc::SmcdV2);
        let changes: [(&str, Change); 2] = [
            ("CHID", |accept| accept.chid = Chid(0xff07)),
            ("EID", |accept| accept.eid = Eid::new("NEVER-OFFERED").unwrap()),
        ];
        for (what, change) in changes {
            let (result, end) = answered(&bench, &device, |selected| {
                let bytes = selected.accept_bytes(dmbe(77, LEN));
                let Message::AcceptD2(mut accept) = Message::parse(&bytes).unwrap() else {
                    panic!()
                };
                change(&mut accept);
                put(&selected.tcp, &Message::AcceptD2(accept).emit());
                read_to_end(&selected.tcp)
            });
            let error = result.unwrap_err();
            println!("{error}");
            assert!(error.to_string().contains(what), "{error}");
            assert_eq!(end, (vec![], End::Reset));
        }
    });
}

#[test]
fn an_accept_with_a_token_of_nobody_is_declined() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let before = Devices::of(bench.daemon());
        let of_nobody = dmbe(0xdead, LEN);
        for (element, code) in [
            (of_nobody, DeclineCode::BufferRegistration),
            (Dmbe { index: 1, ..of_nobody }, DeclineCode::DmbInUse),
        ] {
            let (result, mut tcp) = answered(&bench, &device, |selected| {
                let (tcp, awaiting) = selected.accept(element);
                let message = read_message(&tcp, awaiting.reader());
                assert_eq!(diagnosis(&message), code);
                tcp
            });
            let client = result.unwrap();
            assert!(!client.is_smc());
            send_all(&client, b"then TCP");
            let mut buf = [0; 8];
            tcp.read_exact(&mut buf).unwrap();
            assert_eq!(&buf, b"then TCP");
        }
        nothing_is_left(&bench, before);
    });
}

// Shows: CLC-63.
#[test]
fn a_late_decline_is_followed_by_an_orderly_close() {
    watched(LIMIT, || {
        let (_bench, door, device) = stage();
        let (tcp, accepted) = raw::propose(door.addr(), &device.config()).accepted();
        let (_, mut confirm) = accepted.confirm(dmbe(1, LEN), LINK);
        // A size code refused by every server.
        confirm[25] = 0xf0;
        put(&tcp, &confirm);
        let (answer, end) = read_to_end(&tcp);
        assert_eq!(diagnosis(&answer), DeclineReason::ReservedValue { field: "", value: 0 }.code());
        assert_eq!(end, End::Closed);
        door.serves();
    });
}

#[test]
fn a_server_that_declines_is_tcp_and_its_data_follows() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let (result, _tcp) = answered(&bench, &device, |Selected { tcp, selection }| {
            let decline = selection.decline(DeclineReason::NoDmb).message;
            put(&tcp, &[&decline[..], b"at once"].concat());
            tcp
        });
        let client = result.unwrap();
        let ConnectionInfo::Tcp(why) = client.info() else { panic!("{}", client.info()) };
        assert_eq!(why.code(), DeclineCode::TooManyDmbs);
        assert_eq!(read_exactly(&client, 7), b"at once");
    });
}
