// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer lying after an agreement to go on over TCP: in records, or in the messages of a return to a
//! device; or the peer dies at one of the steps. Its victim's connection is reset at worst, or stays
//! on TCP and works; others are not harmed, and no buffer is left.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use guest_driver::{SmcStream, Stack};
use smc_core::handshake::{
    Accepted, AwaitAccept, AwaitConfirm, AwaitProposal, ClientStep, Config, ServerStep, Terms,
};
use smc_core::time::Tick;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::clc::{CarrierFeatures, CarrierOptions};
use smc_core::wire::ids::{DmbToken, Features, Release};
use smc_core::wire::record::{HEADER_LEN, MAX_DATA, Reason, Record};
use smc_test_support::Stopwatch;
use smc_tests::hostile::LEN;
use smc_tests::leaks::Devices;
use smc_tests::raw::{self, Device, LINK, dmbe, put};
use smc_tests::watch::LIMIT;
use smc_tests::{
    Bench, Fabric, Pair, TIMEOUT, eventually, note, pattern, read_exactly, send_all, watched,
};
use virtio_ism::{OwnDmb, PeerDmb};
use virtio_ism_abi::{Gid, Token};

use crate::support::{SOON, nothing_is_left, read_until_it_ends, works};

/// The options agreed by both ends.
const OPTIONS: CarrierOptions = CarrierOptions::new(CarrierFeatures::RETURN);

/// More than a ring and TCP's buffers hold.
const MUCH: usize = 7 << 20;

/// A bench, an honest connection, and the device of a liar.
struct Stage {
    bench: Bench,
    pair: Pair,
    honest: (SmcStream, SmcStream),
    device: Device,
    before: Devices,
}

impl Stage {
    fn new() -> Stage {
        Stage::of(|config| config.outlive_device = true)
    }

    /// `change` sets options of the honest ends.
    fn of(change: impl Fn(&mut guest_driver::Config)) -> Stage {
        let bench = Bench::new(Fabric::Window, 3);
        let pair = bench.pair_with(change);
        let honest = pair.connect();
        let device = Device::open(&bench, 2);
        let before = Devices::of(bench.daemon()).levels();
        Stage { bench, pair, honest, device, before }
    }

    fn config(&self) -> Arc<Config> {
        Arc::new(Config { carriers: Some(OPTIONS), ..self.device.config() })
    }

    /// A liar connected to the server.
    #[track_caller]
    fn client(&self) -> Liar {
        note("a liar connects");
        let mut tcp = TcpStream::connect(self.pair.addr()).unwrap();
        tcp.set_nodelay(true).unwrap();
        tcp.set_read_timeout(Some(TIMEOUT)).unwrap();
        let (awaiting, proposal) = raw::proposal(&self.config());
        let (rings, victim) = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| self.pair.listener.accept().unwrap().0);
            tcp.write_all(&proposal).unwrap();
            let message = raw::read_message(&tcp, awaiting.reader());
            let rings = Rings::confirm(self, accept_of(awaiting, &message));
            tcp.write_all(&rings.1).unwrap();
            (rings.0, accepting.join().unwrap())
        });
        Liar { tcp, victim, _rings: vec![rings] }
    }

    /// A liar with the client connected to it.
    #[track_caller]
    fn server(&self) -> Liar {
        note("a victim connects to a liar");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stack: &Arc<Stack> = &self.pair.client;
        let (tcp, rings, victim) = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| SmcStream::connect(stack, address).unwrap());
            let (mut tcp, _) = listener.accept().unwrap();
            tcp.set_nodelay(true).unwrap();
            tcp.set_read_timeout(Some(TIMEOUT)).unwrap();
            let awaiting = AwaitProposal::new(self.config(), Tick(0));
            let proposal = raw::read_message(&tcp, awaiting.reader());
            let (own, awaiting, accept) = self.accept(awaiting, &proposal);
            tcp.write_all(&accept).unwrap();
            let confirm = raw::read_message(&tcp, awaiting.reader());
            let rings = Rings::attach(self, own, awaiting, &confirm);
            (tcp, rings, connecting.join().unwrap())
        });
        Liar { tcp, victim, _rings: vec![rings] }
    }

    /// The Accept for a Proposal, with a ring for the proposer.
    fn accept(&self, awaiting: AwaitProposal, proposal: &[u8]) -> (OwnDmb, AwaitConfirm, Vec<u8>) {
        let ServerStep::Eligible(selection) = awaiting.handle(proposal) else { panic!() };
        let candidate = selection.candidates()[0];
        let own = self.device.ism.register(Gid(candidate.peer.0), LEN, 0).unwrap();
        let element = dmbe(own.token().0, LEN);
        let (awaiting, accept) = selection.accept(candidate, None, element, LINK, Tick(0));
        (own, awaiting, accept)
    }

    #[track_caller]
    fn nobody_else_is_harmed(&self) {
        works(&self.honest.0, &self.honest.1);
        eventually("closed connections are gone", || {
            self.pair.client.totals().closing + self.pair.server.totals().closing == 0
        });
        nothing_is_left(&self.bench, self.before);
    }
}

fn accept_of(awaiting: AwaitAccept, message: &[u8]) -> Accepted {
    let carriers = Some(OPTIONS);
    let known = Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers };
    match awaiting.handle(message, |_, _| Some(known)) {
        ClientStep::Offered(accepted) => accepted,
        other => panic!("{other:?}"),
    }
}

/// The liar's ring, and the victim's.
struct Rings {
    _own: OwnDmb,
    theirs: PeerDmb,
}

impl Rings {
    /// The rings of a confirming liar, and its Confirm.
    fn confirm(stage: &Stage, accepted: Accepted) -> (Rings, Vec<u8>) {
        let DmbToken(token) = accepted.peer().token;
        let ism = &stage.device.ism;
        let theirs = ism.attach(Token(token), accepted.peer().size.bytes()).unwrap();
        let own = ism.register(Gid(accepted.devices().peer.0), LEN, 0).unwrap();
        let (_, confirm) = accepted.confirm(dmbe(own.token().0, LEN), LINK);
        (Rings { _own: own, theirs }, confirm)
    }

    /// The rings of a liar after receiving a Confirm.
    fn attach(stage: &Stage, own: OwnDmb, awaiting: AwaitConfirm, confirm: &[u8]) -> Rings {
        let smc_core::handshake::ConfirmStep::Established(established) = awaiting.handle(confirm)
        else {
            panic!()
        };
        let DmbToken(token) = established.peer.token;
        let len = established.peer.size.bytes();
        Rings { _own: own, theirs: stage.device.ism.attach(Token(token), len).unwrap() }
    }
}

/// The lying end of a connection, and its victim.
struct Liar {
    tcp: TcpStream,
    victim: SmcStream,
    _rings: Vec<Rings>,
}

fn data(at: u64, bytes: &[u8]) -> Vec<u8> {
    let header = Record::Data { at, len: bytes.len() as u32, more: false }.header();
    [&header[..], bytes].concat()
}

fn clc(message: &[u8]) -> Vec<u8> {
    [&Record::Clc { len: message.len() as u32 }.header()[..], message].concat()
}

/// A header with other bytes at a place.
fn bent(record: Record, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut header = record.header().to_vec();
    header[at..at + bytes.len()].copy_from_slice(bytes);
    header
}

impl Liar {
    fn put(&self, bytes: &[u8]) {
        put(&self.tcp, bytes);
    }

    /// The next record of the victim, and its body.
    #[track_caller]
    fn record(&mut self) -> (Record, Vec<u8>) {
        note("reads a record");
        let mut header = [0; HEADER_LEN];
        self.tcp.read_exact(&mut header).unwrap();
        let record = Record::parse(&header).unwrap();
        let len = match record {
            Record::Data { len, .. } | Record::Clc { len } => len,
            _ => 0,
        };
        let mut body = vec![0; len as usize];
        self.tcp.read_exact(&mut body).unwrap();
        (record, body)
    }

    /// The next CLC message.
    #[track_caller]
    fn message(&mut self) -> Vec<u8> {
        match self.record() {
            (Record::Clc { .. }, body) => body,
            (other, _) => panic!("{other:?}"),
        }
    }

    /// Both directions go to TCP, at their beginning.
    fn on_tcp(mut self) -> Self {
        self.put(&Record::Leave { at: 0, reason: Reason::Wanted, more: false }.header());
        assert!(matches!(self.record().0, Record::Leave { at: 0, .. }));
        assert_eq!(self.record().0, Record::Received { at: 0 });
        self.put(&Record::Received { at: 0 }.header());
        self
    }

    /// The victim is on TCP, and works in both directions from these positions on.
    #[track_caller]
    fn works(&mut self, own: u64, its: u64) {
        self.put(&data(own, b"hello"));
        self.victim.set_read_timeout(Some(TIMEOUT)).unwrap();
        assert_eq!(read_exactly(&self.victim, 5), b"hello");
        send_all(&self.victim, b"answer");
        let (record, body) = self.record();
        assert_eq!(record, Record::Data { at: its, len: 6, more: false });
        assert_eq!(body, b"answer");
    }

    #[track_caller]
    fn hears_of_it(self, what: &str) {
        is_reset(&self.victim, what);
    }

    /// The liar dies. Without a promise of the liar, the victim sees an end of data.
    #[track_caller]
    fn dies(self, what: &str) {
        note(what.to_owned());
        drop(self.tcp);
        assert_eq!(read_until_it_ends(&self.victim), None, "{what}");
    }

    /// The TCP connection is reset.
    #[track_caller]
    fn resets(self, what: &str) {
        ism_sys::reset_tcp(self.tcp);
        is_reset(&self.victim, what);
    }
}

/// The victim is told of a reset, and soon.
#[track_caller]
fn is_reset(victim: &SmcStream, what: &str) {
    note(what.to_owned());
    let start = Stopwatch::start();
    assert!(read_until_it_ends(victim).is_some(), "{what}: an end of data");
    assert!(start.elapsed() < SOON, "{what}: {:?}", start.elapsed());
    assert!(victim.send(b"x").is_err(), "{what}");
}

/// Records forbidden for an end on TCP.
fn lies() -> Vec<(&'static str, Vec<u8>)> {
    let end = |at, flags| Record::End { at, flags }.header().to_vec();
    let done = StateFlags::SENDING_DONE;
    let leave = Record::Leave { at: 0, reason: Reason::Wanted, more: false };
    vec![
        ("no record", vec![0xff; HEADER_LEN]),
        ("bytes of a program", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("LEAVE of a ring that was left", leave.header().to_vec()),
        ("LEAVE with reserved bytes", bent(leave, 2, &[1])),
        ("RECEIVED twice", Record::Received { at: 0 }.header().to_vec()),
        ("CHANGE without a ring", Record::Change { at: 0 }.header().to_vec()),
        ("DATA at another position", data(1, b"x")),
        ("DATA at the last position", data(u64::MAX, b"x")),
        ("DATA of no bytes", bent(Record::Data { at: 0, len: 1, more: false }, 4, &[0; 4])),
        (
            "DATA of too many bytes",
            bent(Record::Data { at: 0, len: 1, more: false }, 4, &(MAX_DATA + 1).to_be_bytes()),
        ),
        ("END at another position", end(7, done)),
        ("URGENT before the first byte", Record::Urgent { at: 0 }.header().to_vec()),
        ("URGENT far ahead", Record::Urgent { at: 1 << 40 }.header().to_vec()),
        ("CLC of no message", clc(&[0xe2; 12])),
        (
            "CLC with another length",
            clc(&[b"\xe2\xd4\xc3\xc4\x01\x00\x20\x00".as_slice(), &[0; 20]].concat()),
        ),
        ("CLC that is too long", bent(Record::Clc { len: 12 }, 4, &[0xff; 4])),
    ]
}

#[test]
fn lies_in_records_reset_the_connection() {
    watched(LIMIT, || {
        let stage = Stage::new();
        for (what, lie) in lies() {
            for server in [false, true] {
                let liar = if server { stage.server() } else { stage.client() };
                let mut liar = liar.on_tcp();
                if server {
                    // Before the victim can propose a ring.
                    liar.put(&lie);
                } else {
                    liar.works(0, 0);
                    // Positions lie by five.
                    liar.put(&lie);
                }
                liar.hears_of_it(what);
            }
        }
        // The earlier end of data holds.
        let end = |at| Record::End { at, flags: StateFlags::SENDING_DONE }.header();
        for lie in [data(0, b"x"), end(1).to_vec()] {
            let liar = stage.client().on_tcp();
            liar.put(&[&end(0)[..], &lie].concat());
            assert_eq!(read_until_it_ends(&liar.victim), None);
            eventually("the victim is told", || liar.victim.send(b"x").is_err());
        }
        stage.nobody_else_is_harmed();
    });
}

// A device carries out earlier moves late: words arrive behind the last bytes.
#[test]
fn what_comes_into_a_ring_that_was_left_is_not_read() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let mut liar = stage.client().on_tcp();
        liar.put(&data(0, b"by TCP"));
        eventually("the bytes are there", || liar.victim.readable().unwrap() == 6);
        let _ = liar._rings[0].theirs.deliver(&[], [0, 0], true);
        assert_eq!(read_exactly(&liar.victim, 6), b"by TCP");
        liar.works(6, 0);
        liar.dies("with a ring that was left");
        stage.nobody_else_is_harmed();
    });
}

/// A peer may have written much before the news of this end's leaving, and the program may read only
/// after its own write.
#[test]
fn what_a_peer_has_received_is_seen_behind_megabytes_that_nobody_reads() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let mut liar = stage.client();
        leave_unanswered(&mut liar);
        let bytes = pattern(1, MUCH);
        let tcp = liar.tcp.try_clone().unwrap();
        std::thread::scope(|scope| {
            let bytes = &bytes;
            scope.spawn(move || {
                for (n, block) in bytes.chunks(10_000).enumerate() {
                    put(&tcp, &data(n as u64 * 10_000, block));
                }
                put(&tcp, &Record::Received { at: 0 }.header());
            });
            liar.victim.set_write_timeout(Some(TIMEOUT)).unwrap();
            send_all(&liar.victim, b"answer");
            assert!(read_exactly(&liar.victim, MUCH) == *bytes);
        });
        assert_eq!(
            liar.record(),
            (Record::Data { at: 0, len: 6, more: false }, b"answer".to_vec())
        );
        liar.works(MUCH as u64, 6);
        liar.dies("after an answer behind megabytes");
        stage.nobody_else_is_harmed();
    });
}

/// Leaves the ring, and answers nothing to the victim's own leave.
fn leave_unanswered(liar: &mut Liar) {
    liar.put(&Record::Leave { at: 0, reason: Reason::Wanted, more: false }.header());
    assert!(matches!(liar.record().0, Record::Leave { at: 0, .. }));
    assert_eq!(liar.record().0, Record::Received { at: 0 });
}

/// Bytes kept of a connection beside its ring while a record is missing.
const KEPT: usize = 8 << 20;
/// The most bytes queued of a program's writes, as TCP's buffers would take.
const SEND_QUEUE: usize = 4 << 20;

/// Sends bytes from position 0 on until TCP takes no more for a while. Returns how many whole records
/// of 10,000 bytes it took.
fn send_until_held_back(tcp: &TcpStream, bytes: &[u8]) -> usize {
    tcp.set_write_timeout(Some(std::time::Duration::from_secs(1))).unwrap();
    let mut tcp = tcp;
    let blocks = bytes.chunks(10_000).enumerate();
    blocks.take_while(|(n, block)| tcp.write_all(&data(*n as u64 * 10_000, block)).is_ok()).count()
}

#[test]
fn a_peer_that_never_answers_leave_is_held_back_and_harms_only_itself() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let mut liar = stage.client();
        leave_unanswered(&mut liar);
        let bytes = pattern(1, 64 << 20);
        let taken = send_until_held_back(&liar.tcp, &bytes);
        assert!(taken < bytes.len() / 10_000, "TCP has taken everything");
        let readable = liar.victim.readable().unwrap();
        assert!((KEPT..KEPT + (2 << 20)).contains(&readable), "{readable} bytes are kept");
        works(&stage.honest.0, &stage.honest.1);
        // The program loses nothing, and writes wait for the peer, as on TCP.
        liar.victim.set_read_timeout(Some(TIMEOUT)).unwrap();
        assert!(read_exactly(&liar.victim, taken * 10_000) == bytes[..taken * 10_000]);
        liar.victim.set_nonblocking(true).unwrap();
        let queued: usize = std::iter::from_fn(|| liar.victim.send(&bytes[..1 << 20]).ok()).sum();
        assert!((1..=SEND_QUEUE).contains(&queued), "{queued} bytes are queued");
        let full = liar.victim.send(b"answer").map_err(|error| error.kind());
        assert_eq!(full, Err(std::io::ErrorKind::WouldBlock));
        liar.victim.set_nonblocking(false).unwrap();
        liar.resets("TCP instead of an answer");
        stage.nobody_else_is_harmed();
    });
}

// The liar's ring and TCP stay. A program's close ends the connection in time nevertheless.
#[test]
fn a_closed_connection_waits_for_an_answer_to_leave_no_longer_than_for_closing_words() {
    watched(LIMIT, || {
        let close_timeout = std::time::Duration::from_secs(1);
        let stage = Stage::of(|config| {
            config.outlive_device = true;
            config.testing.close_timeout = close_timeout;
        });
        let mut liar = stage.client();
        liar.put(&Record::Leave { at: 0, reason: Reason::Wanted, more: false }.header());
        assert!(matches!(liar.record().0, Record::Leave { at: 0, .. }));
        let Liar { tcp, victim, _rings, .. } = liar;
        drop(victim);
        eventually("the closed connection is gone", || stage.pair.server.totals().closing == 0);
        drop((tcp, _rings));
        stage.nobody_else_is_harmed();
    });
}

// Each ring of the liar would leave a ring's worth of unread bytes behind.
#[test]
fn a_program_reads_before_a_peer_with_too_many_unread_bytes_comes_back() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let mut liar = stage.client();
        leave_unanswered(&mut liar);
        let bytes = pattern(1, KEPT + liar._rings[0].theirs.len() as usize);
        for (n, block) in bytes.chunks(10_000).enumerate() {
            liar.put(&data(n as u64 * 10_000, block));
        }
        liar.put(&Record::Received { at: 0 }.header());
        let (awaiting, proposal) = raw::proposal(&stage.config());
        liar.put(&clc(&proposal));
        let message = liar.message();
        let answer = awaiting.handle(&message, |_, _| None);
        assert!(matches!(answer, ClientStep::PeerDeclined(_)));
        liar.victim.set_read_timeout(Some(TIMEOUT)).unwrap();
        assert!(read_exactly(&liar.victim, bytes.len()) == bytes);
        let (awaiting, proposal) = raw::proposal(&stage.config());
        liar.put(&clc(&proposal));
        let message = liar.message();
        drop(accept_of(awaiting, &message));
        liar.dies("after Accept");
        stage.nobody_else_is_harmed();
    });
}

// Each Proposal is declined, and an answer unread by the liar would stay in the victim's memory.
#[test]
fn a_peer_that_proposes_and_reads_no_answer_is_reset() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let mut liar = stage.client().on_tcp();
        rustix::net::sockopt::set_socket_recv_buffer_size(&liar.tcp, 4096).unwrap();
        // After an urgent byte by TCP, the victim stays there.
        liar.victim.send_urgent(b'!').unwrap();
        let (_, proposal) = raw::proposal(&stage.config());
        let message = clc(&proposal);
        // The victim's TCP takes some megabytes of answers.
        let fails = (0..2_000_000).position(|_| liar.tcp.write_all(&message).is_err());
        assert!(fails.is_some(), "every Proposal was answered");
        liar.hears_of_it("a Proposal before the answer to the last one");
        stage.nobody_else_is_harmed();
    });
}

/// A liar with a ring proposed and accepted.
fn accepted(stage: &Stage) -> (Liar, Accepted) {
    let mut liar = stage.client().on_tcp();
    let (awaiting, proposal) = raw::proposal(&stage.config());
    liar.put(&clc(&proposal));
    let message = liar.message();
    (liar, accept_of(awaiting, &message))
}

/// A liar whose Confirm was taken: the victim's CHANGE has come.
fn confirmed(stage: &Stage) -> Liar {
    let (mut liar, accepted) = accepted(stage);
    let (rings, confirm) = Rings::confirm(stage, accepted);
    liar.put(&clc(&confirm));
    assert_eq!(liar.record().0, Record::Change { at: 0 });
    liar._rings.push(rings);
    liar
}

/// A Decline, in place of the expected message.
fn decline(stage: &Stage) -> Vec<u8> {
    let (awaiting, _) = raw::proposal(&stage.config());
    let declined = awaiting.handle(&[0; 8], |_, _| None);
    drop(declined);
    smc_core::handshake::SendDecline::opening(
        &stage.config(),
        smc_core::handshake::DeclineReason::NoIsmDevice,
    )
    .message
}

#[test]
fn a_client_that_lies_while_it_comes_back_harms_only_itself() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let change = |at| Record::Change { at }.header();
        let (_, proposal) = raw::proposal(&stage.config());
        // Instead of Confirm.
        let (liar, _) = accepted(&stage);
        liar.put(&clc(&proposal));
        liar.hears_of_it("a second Proposal");
        let (liar, _) = accepted(&stage);
        liar.put(&change(0));
        liar.hears_of_it("CHANGE without Confirm");
        let (liar, _) = accepted(&stage);
        liar.put(&Record::Leave { at: 0, reason: Reason::Wanted, more: false }.header());
        liar.hears_of_it("LEAVE of a ring that has not begun");
        let (mut liar, _) = accepted(&stage);
        liar.put(&clc(&decline(&stage)));
        liar.works(0, 0);
        liar.put(&clc(&proposal));
        liar.message();
        liar.dies("after Accept");
        let (liar, _) = accepted(&stage);
        liar.resets("TCP after Accept");
        // A missing ring: the victim declines, and goes on.
        let (mut liar, agreed) = accepted(&stage);
        let (_, confirm) = agreed.confirm(dmbe(0x1234_5678, LEN), LINK);
        liar.put(&clc(&confirm));
        liar.message();
        liar.works(0, 0);
        liar.dies("after a Confirm of no ring");
        // After the victim's CHANGE.
        let liar = confirmed(&stage);
        liar.put(&change(3));
        liar.hears_of_it("CHANGE at another position");
        let liar = confirmed(&stage);
        liar.put(&clc(&proposal));
        liar.hears_of_it("a Proposal instead of CHANGE");
        let liar = confirmed(&stage);
        liar.resets("TCP instead of CHANGE");
        let liar = confirmed(&stage);
        note("death instead of CHANGE");
        drop(liar.tcp);
        // The victim has left TCP.
        assert!(read_until_it_ends(&liar.victim).is_some());
        drop(liar.victim);
        drop(liar._rings);
        // Words in the ring before CHANGE are not read, and the victim works afterwards.
        let liar = confirmed(&stage);
        let abort = u64::from(StateFlags::ABORT.bits()) << 8 | u64::from(StateFlags::ABORT.bits());
        let _ = liar._rings[1].theirs.deliver(&[], [u64::MAX, abort], true);
        let _ = liar._rings[1].theirs.deliver(&[], [0, 0], true);
        liar.put(&data(0, b"by TCP"));
        assert_eq!(read_exactly(&liar.victim, 6), b"by TCP");
        liar.put(&change(6));
        liar.victim.set_read_timeout(Some(std::time::Duration::from_millis(50))).unwrap();
        let nothing = liar.victim.recv(&mut [0]).map_err(|error| error.kind());
        assert_eq!(nothing, Err(std::io::ErrorKind::WouldBlock));
        liar.resets("TCP on the new ring");
        stage.nobody_else_is_harmed();
    });
}

/// A liar with a Proposal of a ring from its victim.
fn proposed(stage: &Stage) -> (Liar, Vec<u8>) {
    let mut liar = stage.server().on_tcp();
    let proposal = liar.message();
    (liar, proposal)
}

/// A liar whose Accept was taken: the victim's Confirm has come.
fn accepting(stage: &Stage) -> Liar {
    let (mut liar, proposal) = proposed(stage);
    let awaiting = AwaitProposal::new(stage.config(), Tick(0));
    let (own, awaiting, accept) = stage.accept(awaiting, &proposal);
    liar.put(&clc(&accept));
    let confirm = liar.message();
    liar._rings.push(Rings::attach(stage, own, awaiting, &confirm));
    liar
}

#[test]
fn a_server_that_lies_while_its_client_comes_back_harms_only_itself() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let change = |at| Record::Change { at }.header();
        // Instead of Accept.
        let (liar, proposal) = proposed(&stage);
        liar.put(&clc(&proposal));
        liar.hears_of_it("a Proposal instead of Accept");
        let (liar, _) = proposed(&stage);
        liar.put(&change(0));
        liar.hears_of_it("CHANGE instead of Accept");
        let (mut liar, _) = proposed(&stage);
        liar.works(0, 0);
        liar.put(&clc(&decline(&stage)));
        liar.works(5, 6);
        liar.dies("after Decline");
        let (liar, _) = proposed(&stage);
        liar.dies("instead of Accept");
        let (liar, _) = proposed(&stage);
        liar.resets("TCP instead of Accept");
        // A missing ring: the victim declines, and goes on.
        let (mut liar, proposal) = proposed(&stage);
        let ServerStep::Eligible(selection) =
            AwaitProposal::new(stage.config(), Tick(0)).handle(&proposal)
        else {
            panic!()
        };
        let candidate = selection.candidates()[0];
        let (_, accept) = selection.accept(candidate, None, dmbe(0x1234_5678, LEN), LINK, Tick(0));
        liar.put(&clc(&accept));
        liar.message();
        liar.works(0, 0);
        liar.dies("after an Accept of no ring");
        // After the victim's Confirm.
        let liar = accepting(&stage);
        liar.put(&change(3));
        liar.hears_of_it("CHANGE at another position");
        let liar = accepting(&stage);
        liar.put(&clc(&proposal));
        liar.hears_of_it("a Proposal instead of CHANGE");
        let mut liar = accepting(&stage);
        liar.works(0, 0);
        liar.put(&clc(&decline(&stage)));
        liar.works(5, 6);
        liar.dies("after a late Decline");
        let liar = accepting(&stage);
        liar.dies("instead of CHANGE");
        let liar = accepting(&stage);
        liar.resets("TCP instead of CHANGE");
        let mut liar = accepting(&stage);
        liar.put(&data(0, b"by TCP"));
        liar.put(&change(6));
        assert_eq!(read_exactly(&liar.victim, 6), b"by TCP");
        assert_eq!(liar.record().0, Record::Change { at: 0 });
        liar.resets("TCP on the new ring");
        stage.nobody_else_is_harmed();
    });
}

/// A peer leaves its device, and its TCP connection says nothing. Meanwhile the victim's device goes.
fn loses_its_device_while_it_waits_for_a_fin(outlives: bool) {
    let stage = Stage::of(|config| config.outlive_device = outlives);
    let Liar { mut tcp, victim, _rings, .. } = stage.client();
    victim.set_read_timeout(Some(TIMEOUT)).unwrap();
    drop(_rings);
    drop(stage.device);
    // The victim knows of the peer's leaving by now, and waits for the peer's FIN.
    std::thread::sleep(std::time::Duration::from_millis(100));
    stage.bench.daemon().remove_guest("port0").unwrap();
    let mut header = [0; HEADER_LEN];
    if outlives {
        tcp.read_exact(&mut header).unwrap();
        assert!(matches!(Record::parse(&header), Ok(Record::Leave { .. })));
    }
    drop(tcp);
    let end = victim.recv(&mut [0]).map_err(|error| error.kind());
    assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset));
}

#[test]
fn an_end_that_waits_for_a_fin_hears_that_its_own_device_is_gone() {
    for outlives in [true, false] {
        watched(LIMIT, || loses_its_device_while_it_waits_for_a_fin(outlives));
    }
}
