// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Claims in place of Confirm: a client lying to its server, a server lying to its client, and claims
//! of another connection. A lie harms its own connection at worst.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use guest_driver::{SmcListener, SmcStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smc_core::handshake::{
    AwaitAccept, AwaitProposal, ClientStep, Config, ConfirmStep, DeclineReason, Route, SendDecline,
    ServerStep, Terms, start_claiming,
};
use smc_core::time::Tick;
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags, ProducerWord, StateFlags};
use smc_core::wire::claim::{CLAIM_CONNECTION, CLAIM_WORD, Claim};
use smc_core::wire::clc::{CarrierFeatures, CarrierOptions};
use smc_core::wire::ids::{DmbToken, Features, Release};
use smc_tests::hostile::LEN;
use smc_tests::raw::{self, Device, LINK, dmbe, put, read_message};
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, Pair, TIMEOUT, eventually, note, send_all, watched};
use virtio_ism::{OwnDmb, PeerDmb};
use virtio_ism_abi::{Gid, Token};

use crate::support::works;

const OPTIONS: CarrierOptions = CarrierOptions::new(CarrierFeatures::RETURN);

const TERMS: Terms =
    Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: Some(OPTIONS) };

struct Stage {
    bench: Bench,
    pair: Pair,
    device: Device,
}

impl Stage {
    fn new() -> Stage {
        let bench = Bench::new(Fabric::Window, 3);
        let pair = bench.pair_with(|config| config.outlive_device = true);
        let device = Device::open(&bench, 2);
        Stage { bench, pair, device }
    }

    fn config(&self) -> Arc<Config> {
        Arc::new(Config { carriers: Some(OPTIONS), ..self.device.config() })
    }
}

fn claim_of(number: NonZeroU16, client: SocketAddr, server: SocketAddr) -> Claim {
    let [client, server] = [client, server].map(|end| match end.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped().octets(), end.port()),
        IpAddr::V6(ip) => (ip.octets(), end.port()),
    });
    Claim::new(number, client, server)
}

/// The last words of a peer without any bytes.
fn close(theirs: &PeerDmb) {
    let producer = ProducerWord { cursor: Cursor::default() };
    let (cursor, producer_flags) = (Cursor::default(), ProducerFlags::empty());
    let state_flags = StateFlags::CLOSED | StateFlags::SENDING_DONE;
    let consumer = ConsumerWord { cursor, producer_flags, state_flags };
    let _ = theirs.deliver(&[], [producer.to_u64(), consumer.to_u64()], true);
}

/// A client by hand: the server knows its DMB from an earlier connection.
struct Client<'a> {
    stage: &'a Stage,
    own: OwnDmb,
    count: u16,
}

/// The client's lie about its claim: the memory's claim, the memory's word, the Proposal's number.
type Lie = fn(&mut Memory, &TcpStream);

struct Memory {
    claim: Claim,
    word: u64,
    proposed: Claim,
}

/// A Proposal without an answer.
struct Proposed {
    tcp: TcpStream,
    awaiting: AwaitAccept,
    memory: Memory,
}

impl<'a> Client<'a> {
    fn new(stage: &'a Stage) -> Client<'a> {
        let (own, theirs, server) = thread::scope(|scope| {
            let accepting = scope.spawn(|| stage.pair.listener.accept().unwrap().0);
            let (tcp, accepted) = raw::propose(stage.pair.addr(), &stage.config()).accepted();
            let own = stage.device.ism.register(Gid(accepted.devices().peer.0), LEN, 0).unwrap();
            let (token, len) = (Token(accepted.peer().token.0), accepted.peer().size.bytes());
            let theirs = stage.device.ism.attach(token, len).unwrap();
            let (_, confirm) = accepted.confirm(dmbe(own.token().0, LEN), LINK);
            put(&tcp, &confirm);
            (own, theirs, accepting.join().unwrap())
        });
        assert!(server.is_smc(), "{}", server.info());
        drop(server);
        close(&theirs);
        Client { stage, own, count: 0 }
    }

    /// Sends a Proposal with a claim to the listener.
    fn propose(&mut self, lie: Lie) -> Proposed {
        self.own.clear().unwrap();
        self.count += 1;
        let tcp = TcpStream::connect(self.stage.pair.addr()).unwrap();
        let number = Claim::number_for(DmbToken(self.own.token().0), self.count);
        let claim = claim_of(number, tcp.local_addr().unwrap(), tcp.peer_addr().unwrap());
        let mut memory = Memory { claim, word: claim.open(), proposed: claim };
        lie(&mut memory, &tcp);
        let shared = self.own.memory();
        shared.copy_in(CLAIM_CONNECTION as usize, memory.claim.connection()).unwrap();
        self.word().store(memory.word, Ordering::Release);
        let number = Some(memory.proposed.number());
        let begun = start_claiming(self.stage.config(), Route::default(), number, Tick(0));
        let (awaiting, proposal) = begun.unwrap();
        put(&tcp, &proposal);
        Proposed { tcp, awaiting, memory }
    }

    fn word(&self) -> &AtomicU64 {
        self.own.memory().atomic_u64(CLAIM_WORD as usize).unwrap()
    }

    /// Takes the server's Accept. Returns the server's DMB, and whether the server has taken the claim.
    fn answer(&self, proposed: Proposed) -> (PeerDmb, bool) {
        let Proposed { tcp, awaiting, memory } = proposed;
        let message = read_message(&tcp, awaiting.reader());
        let ClientStep::Offered(accepted) = awaiting.handle(&message, |_, _| Some(TERMS)) else {
            panic!("declined")
        };
        let is_taken = self.word().load(Ordering::Acquire) == memory.proposed.taken();
        let token = Token(accepted.peer().token.0);
        let theirs = self.stage.device.ism.attach(token, accepted.peer().size.bytes()).unwrap();
        if !is_taken {
            assert_eq!(self.word().load(Ordering::Acquire), memory.word, "another's claim changes");
            self.own.clear().unwrap();
            let (_, confirm) = accepted.confirm(dmbe(self.own.token().0, LEN), LINK);
            put(&tcp, &confirm);
        }
        (theirs, is_taken)
    }

    /// Whether the server takes the claim. The connection works in any case.
    #[track_caller]
    fn is_taken(&mut self, lie: Lie) -> bool {
        let proposed = self.propose(lie);
        thread::scope(|scope| {
            let accepting = scope.spawn(|| self.stage.pair.listener.accept().unwrap().0);
            let _tcp = proposed.tcp.try_clone().unwrap();
            let (theirs, is_taken) = self.answer(proposed);
            let server = accepting.join().unwrap();
            assert!(server.is_smc(), "{}", server.info());
            send_all(&server, b"hello");
            let mut bytes = [0; 5];
            eventually("the bytes are there", || {
                let cursor = ProducerWord::from_u64(self.own.words()[0]).cursor;
                cursor.count == 5
            });
            self.own.memory().copy_out(CLAIM_CONNECTION as usize, &mut bytes).unwrap();
            assert_eq!(&bytes, b"hello");
            drop(server);
            close(&theirs);
            is_taken
        })
    }
}

#[test]
fn a_server_takes_the_claim_of_this_connection_and_no_other() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let mut client = Client::new(&stage);
        assert!(client.is_taken(|_, _| {}));
        let lies: [(&str, Lie); 5] = [
            ("another port", |memory, tcp| {
                let mut other = tcp.local_addr().unwrap();
                other.set_port(other.port() ^ 1);
                let number = memory.claim.number();
                memory.claim = claim_of(number, other, tcp.peer_addr().unwrap());
            }),
            ("another server", |memory, tcp| {
                let mut other = tcp.peer_addr().unwrap();
                other.set_port(other.port() ^ 1);
                memory.claim = claim_of(memory.claim.number(), tcp.local_addr().unwrap(), other);
            }),
            ("an earlier number", |memory, tcp| {
                let number = memory.claim.number().get().wrapping_sub(64).max(64);
                let number = number.try_into().unwrap();
                let (client, server) = (tcp.local_addr().unwrap(), tcp.peer_addr().unwrap());
                memory.proposed = claim_of(number, client, server);
            }),
            ("no claim", |memory, _| memory.word = 0),
            ("an impossible word", |memory, _| memory.word |= 1 << 40),
        ];
        for (what, lie) in lies {
            note(what);
            assert!(!client.is_taken(lie), "{what}");
            assert!(client.is_taken(|_, _| {}), "after {what}");
        }
        let honest = stage.pair.connect();
        works(&honest.0, &honest.1);
    });
}

/// Sends Proposals with claims to the listener's kernel.
fn queued(clients: &mut [Client<'_>; 3]) -> [Proposed; 3] {
    let proposed = clients.each_mut().map(|client| client.propose(|_, _| {}));
    for Proposed { tcp, .. } in &proposed {
        eventually("the server's kernel has the Proposal", || {
            ism_sys::unacknowledged(tcp.as_fd()).unwrap() == 0
        });
    }
    proposed
}

/// Whether the server has taken the claim already.
fn has_taken(client: &Client<'_>, proposed: &Proposed) -> bool {
    client.word().load(Ordering::Acquire) == proposed.memory.proposed.taken()
}

/// A server takes several clients at once from its own listener, and one from a listener that workers may
/// share. In `poll`, the program decides.
fn answers_ahead(is_shared: bool) {
    let mut stage = Stage::new();
    if is_shared {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        stage.pair.listener = SmcListener::new(&stage.pair.server, tcp).unwrap();
    }
    let listener = &stage.pair.listener;
    let accept_once_readable = || {
        let mut fds = [PollFd::from_borrowed_fd(listener.pollable(), PollFlags::IN)];
        let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "nothing is reported");
        listener.accept().unwrap().0
    };
    let mut clients = [(); 3].map(|()| Client::new(&stage));
    assert!(clients[0].is_taken(|_, _| {}));
    for is_polled in [false, true] {
        let proposed = queued(&mut clients);
        let first = if is_polled { accept_once_readable() } else { listener.accept().unwrap().0 };
        for (client, proposed) in clients.iter().zip(&proposed).skip(1) {
            assert_eq!(has_taken(client, proposed), !is_polled && !is_shared);
        }
        // The descriptor tells of the others, also where the program has not asked for it before.
        let servers = [first, accept_once_readable(), accept_once_readable()];
        for ((client, proposed), server) in clients.iter().zip(proposed).zip(servers) {
            let tcp = proposed.tcp.try_clone().unwrap();
            assert_eq!(server.peer_addr().unwrap(), tcp.local_addr().unwrap(), "in order");
            let (theirs, is_taken) = client.answer(proposed);
            assert!(is_taken);
            drop(server);
            close(&theirs);
        }
    }
}

#[test]
fn a_server_that_accepts_one_client_answers_the_others_with_claims() {
    watched(LIMIT, || [false, true].into_iter().for_each(answers_ahead));
}

/// A server by hand, and its victim.
struct Server<'a> {
    stage: &'a Stage,
    listener: TcpListener,
}

/// A lie of a server about a claim.
type ServerLie<'a> = &'a dyn Fn(&Claimed);

/// The server's part of a handshake with a claim.
struct Claimed {
    tcp: TcpStream,
    /// The client's DMB of the earlier connection.
    theirs: PeerDmb,
    taken: u64,
    /// Accept as at a later contact, and at a first one.
    accepts: [Vec<u8>; 2],
    _own: OwnDmb,
}

impl<'a> Server<'a> {
    fn new(stage: &'a Stage) -> Server<'a> {
        Server { stage, listener: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    /// Runs `lie` with a client that has claimed its DMB. Returns the client's result; an established
    /// client may have sent something.
    #[track_caller]
    fn lies(&self, what: &str, lie: impl FnOnce(&Claimed)) -> std::io::Result<(SmcStream, bool)> {
        note(what.to_owned());
        let stack = &self.stage.pair.client;
        let address = self.listener.local_addr().unwrap();
        let connect = || SmcStream::connect(stack, address);
        let theirs = thread::scope(|scope| {
            let connecting = scope.spawn(connect);
            let (tcp, own, selection) = self.select();
            let candidate = selection.candidates()[0];
            let element = dmbe(own.token().0, LEN);
            let (awaiting, accept) = selection.accept(candidate, None, element, LINK, Tick(0));
            put(&tcp, &accept);
            let confirm = read_message(&tcp, awaiting.reader());
            let ConfirmStep::Established(established) = awaiting.handle(&confirm) else { panic!() };
            let (token, len) = (Token(established.peer.token.0), established.peer.size.bytes());
            let theirs = self.stage.device.ism.attach(token, len).unwrap();
            drop(connecting.join().unwrap().unwrap());
            close(&theirs);
            eventually("the client's DMB is in its pool", || {
                stack.totals().closing == 0 && stack.totals().pooled > 0
            });
            theirs
        });
        thread::scope(|scope| {
            let connecting = scope.spawn(connect);
            let (tcp, own, selection) = self.select();
            let number = selection.claim().expect("a claim");
            let claim = claim_of(number, tcp.peer_addr().unwrap(), tcp.local_addr().unwrap());
            let word = theirs.shared_word(CLAIM_WORD).unwrap();
            assert_eq!(word.load(Ordering::Acquire), claim.open());
            let candidate = selection.candidates()[0];
            let element = dmbe(own.token().0, LEN);
            let accepts = [Some(TERMS), None]
                .map(|known| selection.clone().accept(candidate, known, element, LINK, Tick(0)).1);
            let claimed = Claimed { tcp, theirs, taken: claim.taken(), accepts, _own: own };
            lie(&claimed);
            let result = connecting.join().unwrap();
            let is_silent = claimed.is_silent();
            close(&claimed.theirs);
            result.map(|stream| (stream, is_silent))
        })
    }

    fn select(&self) -> (TcpStream, OwnDmb, smc_core::handshake::Selection) {
        let (tcp, _) = self.listener.accept().unwrap();
        tcp.set_read_timeout(Some(TIMEOUT)).unwrap();
        let awaiting = AwaitProposal::new(self.stage.config(), Tick(0));
        let proposal = read_message(&tcp, awaiting.reader());
        let ServerStep::Eligible(selection) = awaiting.handle(&proposal) else { panic!() };
        let peer = Gid(selection.candidates()[0].peer.0);
        let own = self.stage.device.ism.register(peer, LEN, 0).unwrap();
        (tcp, own, selection)
    }
}

impl Claimed {
    fn set(&self, word: u64) {
        self.theirs.shared_word(CLAIM_WORD).unwrap().store(word, Ordering::Release);
    }

    fn is_silent(&self) -> bool {
        self.tcp.set_nonblocking(true).unwrap();
        let peeked = self.tcp.peek(&mut [0]);
        matches!(peeked, Err(error) if error.kind() == ErrorKind::WouldBlock)
    }
}

#[test]
fn a_client_believes_a_taken_claim_only_with_an_accept_of_the_claimed_peer() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let server = Server::new(&stage);
        let (stream, is_silent) = server
            .lies("no lie", |client| {
                client.set(client.taken);
                put(&client.tcp, &client.accepts[0]);
            })
            .unwrap();
        assert!(stream.is_smc() && is_silent, "{}", stream.info());
        drop(stream);

        for word in [None, Some(0), Some(u64::MAX)] {
            let stream = server.lies("not taken", |client| {
                word.into_iter().for_each(|word| client.set(word));
                put(&client.tcp, &client.accepts[1]);
                let mut kind = [0; 8];
                std::io::Read::read_exact(&mut &client.tcp, &mut kind).unwrap();
                assert_eq!(kind[4], 3, "Confirm");
            });
            assert!(stream.unwrap().0.is_smc());
        }

        let decline = SendDecline::opening(&stage.config(), DeclineReason::NoDmb).message;
        let lies: [(&str, ServerLie<'_>); 3] = [
            ("a first contact", &|client| put(&client.tcp, &client.accepts[1])),
            ("a Decline", &|client| put(&client.tcp, &decline)),
            ("an end", &|client| client.tcp.shutdown(std::net::Shutdown::Both).unwrap()),
        ];
        for (what, lie) in lies {
            let result = server.lies(what, |client| {
                client.set(client.taken);
                lie(client);
            });
            assert!(result.is_err(), "{what}");
        }
        let honest = stage.pair.connect();
        works(&honest.0, &honest.1);
        stage.bench.assert_faultless();
    });
}

#[test]
fn short_connections_are_whole_whoever_claims() {
    watched(LIMIT, || {
        let stage = Stage::new();
        let (server, client) = (&stage.pair.listener, &stage.pair.client);
        let address = stage.pair.addr();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..400 {
                    let (mut stream, _) = server.accept().unwrap();
                    scope.spawn(move || {
                        let request = smc_tests::slurp(&stream);
                        stream.write_all(&request).unwrap();
                    });
                }
            });
            for thread in 0..4u64 {
                scope.spawn(move || {
                    for at in 0..100 {
                        let stream = SmcStream::connect(client, address).unwrap();
                        assert!(stream.is_smc(), "{}", stream.info());
                        let bytes = smc_tests::pattern(thread * 1000 + at, at as usize * 37);
                        send_all(&stream, &bytes);
                        stream.shutdown(std::net::Shutdown::Write).unwrap();
                        assert_eq!(smc_tests::slurp(&stream), bytes);
                    }
                });
            }
        });
        stage.bench.assert_faultless();
    });
}
