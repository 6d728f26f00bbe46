// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Silent peers in the middle of a handshake, and TCP's reports afterwards.

use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{SmcStream, Stack};
use rustix::net::sockopt;
use smc_core::connection::SMCD_CONTROL_LEN;
use smc_core::handshake::DeclineReason;
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ConsumerWord, ProducerWord, StateFlags};
use smc_test_support::Stopwatch;
use smc_tests::hostile::Hostile;
use smc_tests::leaks::Devices;
use smc_tests::raw::{self, Device, End, LINK, dmbe, propose, put, read_to_end};
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, TIMEOUT, eventually, note, read_exactly, send_all, slurp, watched};
use virtio_ism::{OwnDmb, PeerDmb};

use crate::support::{Door, SOON, is_broken, nothing_is_left, read_until_it_fails, works};

const LEN: u32 = 64 << 10;

/// Time-out of a server's wait for a message.
const SHORT: Duration = Duration::from_secs(2);

fn impatient(bench: &Bench) -> Door {
    let mut config = bench.config(0);
    config.clc_timeout = SHORT;
    config.detect_timeout = SHORT;
    let server = Stack::open(config).unwrap();
    Door::new(smc_tests::Pair::new(server, bench.stack(1), true))
}

/// Clients stalled at every point of a handshake. Dropping them closes their connections.
fn stalled(door: &Door, device: &Device) -> Vec<(&'static str, TcpStream)> {
    let config = device.config();
    let (_, proposal) = raw::proposal(&config);
    let begin = |bytes: &[u8]| {
        let tcp = TcpStream::connect(door.addr()).unwrap();
        put(&tcp, bytes);
        tcp
    };
    let mut clients = vec![
        ("says nothing", begin(&[])),
        ("says one byte", begin(&proposal[..1])),
        ("says three bytes of an eye catcher", begin(&proposal[..3])),
        ("says an eye catcher", begin(&proposal[..4])),
        ("says a header", begin(&proposal[..8])),
        ("keeps the last byte", begin(&proposal[..proposal.len() - 1])),
    ];
    let (tcp, _accepted) = propose(door.addr(), &config).accepted();
    clients.push(("never confirms", tcp));
    let (tcp, accepted) = propose(door.addr(), &config).accepted();
    let (_, confirm) = accepted.confirm(dmbe(1, LEN), LINK);
    put(&tcp, &confirm[..confirm.len() - 1]);
    clients.push(("keeps the last byte of Confirm", tcp));
    clients
}

// Shows: ERR-7.
#[test]
fn stalled_clients_block_nobody_and_are_given_up() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let before = Devices::of(bench.daemon());
        let door = impatient(&bench);
        let device = Device::open(&bench, 2);
        let start = Stopwatch::start();
        let clients = stalled(&door, &device);
        door.serves();
        door.serves();
        println!("served after {:?}", start.elapsed());
        // The first three could be ordinary clients, and are taken for such.
        let plain: Vec<SmcStream> = (0..3).map(|_| door.next_tcp()).collect();
        for (what, tcp) in &clients[3..] {
            note(*what);
            let (bytes, end) = read_to_end(tcp);
            println!("{what}: {end:?} after {:?}", start.elapsed());
            assert!(bytes.is_empty(), "{what}");
        }
        assert!(start.elapsed() < SHORT + SOON, "{:?}", start.elapsed());
        assert_eq!(door.others(), 0);
        drop((clients, plain));
        door.serves();
        drop((door, device));
        nothing_is_left(&bench, before);
    });
}

/// Most pending handshakes of a listener.
const MAX_PENDING: usize = 1024;

/// Each client sends so many bytes of a Proposal and then nothing.
fn flood(bytes: usize) {
    watched(LIMIT, move || {
        allow_descriptors(4 * MAX_PENDING as u64);
        let bench = Bench::new(Fabric::Window, 3);
        let door = Door::new(bench.pair());
        let device = Device::open(&bench, 2);
        let (_, proposal) = raw::proposal(&device.config());
        // A slow client of another address.
        let began = Instant::now();
        let slow = connect_from(Ipv4Addr::new(127, 0, 0, 2), door.addr());
        put(&slow, &proposal[..bytes]);
        let clients: Vec<_> = (0..MAX_PENDING + 100)
            .map(|_| {
                let tcp = TcpStream::connect(door.addr()).unwrap();
                put(&tcp, &proposal[..bytes]);
                tcp
            })
            .collect();
        let start = Stopwatch::start();
        let client = SmcStream::connect(&door.pair.client, door.addr()).unwrap();
        works(&client, &door.next_smc());
        println!("{bytes} bytes each: served after {:?}", start.elapsed());
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        slow.set_nonblocking(true).unwrap();
        let kept = slow.peek(&mut [0]).map_err(|error| error.kind());
        // Fewer bytes make an ordinary client, with no further wait for a Proposal.
        if bytes >= 4 && began.elapsed() < Duration::from_secs(2) {
            assert_eq!(kept, Err(ErrorKind::WouldBlock), "the flood's address pays");
        }
        drop(clients);
    });
}

#[test]
fn a_flood_of_half_open_clients_delays_nobody() {
    flood(0);
    flood(1);
    flood(4);
    flood(8);
    flood(20);
}

/// Raises the limit of open descriptors.
pub(crate) fn allow_descriptors(count: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < count) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(count), ..limit }).unwrap();
    }
}

/// A TCP connection from an address of this machine.
pub(crate) fn connect_from(ip: Ipv4Addr, to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let tcp = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&tcp, &SocketAddr::from((ip, 0))).unwrap();
    connect(&tcp, &to).unwrap();
    TcpStream::from(tcp)
}

// Shows: ERR-7, ERR-8.
#[test]
fn a_server_that_stalls_is_a_timeout_at_the_client() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let mut config = bench.config(1);
        config.clc_timeout = SHORT;
        let client = Stack::open(config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for part in [0, 1, 8, 60] {
            thread::scope(|scope| {
                let (config, listener) = (device.config(), &listener);
                let stalling = scope.spawn(move || {
                    let selected = raw::select(listener, &config);
                    put(&selected.tcp, &selected.accept_bytes(dmbe(1, LEN))[..part]);
                    read_to_end(&selected.tcp)
                });
                let (start, soon) = (Instant::now(), Stopwatch::start());
                let error = SmcStream::connect(&client, address).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
                println!("{part} bytes: {error} after {:?}", start.elapsed());
                assert!(start.elapsed() >= SHORT && soon.elapsed() < SHORT + SOON);
                assert!(stalling.join().unwrap().0.is_empty());
            });
        }
        // The application's own timeout may be shorter.
        thread::scope(|scope| {
            let (config, listener) = (device.config(), &listener);
            scope.spawn(move || read_to_end(&raw::select(listener, &config).tcp));
            let (start, soon) = (Instant::now(), Stopwatch::start());
            let limit = Duration::from_millis(200);
            let error = SmcStream::connect_timeout(&client, &address, limit).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            assert!(start.elapsed() >= limit && soon.elapsed() < SOON);
        });
        // A plain server without an answer, and an address without a server.
        drop(listener);
        assert_eq!(
            SmcStream::connect(&client, address).unwrap_err().kind(),
            ErrorKind::ConnectionRefused
        );
    });
}

/// A connection of an honest client to a raw server: the client's stream, the raw end, and the
/// server's DMBs, alive as long as held.
type Half = (SmcStream, TcpStream, (OwnDmb, PeerDmb));

fn half(bench: &Bench, device: &Device) -> Half {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = bench.stack(1);
    thread::scope(|scope| {
        let address = listener.local_addr().unwrap();
        let connecting = scope.spawn(move || SmcStream::connect(&client, address).unwrap());
        let selected = raw::select(&listener, &device.config());
        let own = device.ism.register(selected.client(), LEN, 0).unwrap();
        let (tcp, awaiting) = selected.accept(dmbe(own.token().0, LEN));
        let established = raw::confirmed(&tcp, awaiting);
        let token = virtio_ism_abi::Token(established.peer.token.0);
        let theirs = device.ism.attach(token, established.peer.size.bytes()).unwrap();
        let stream = connecting.join().unwrap();
        assert!(stream.is_smc(), "{}", stream.info());
        (stream, tcp, (own, theirs))
    })
}

// Shows: CLC-63.
#[test]
fn a_late_decline_breaks_the_connection() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let (client, tcp, _dmbs) = half(&bench, &device);
        let config = device.config();
        let late = smc_core::handshake::SendDecline::opening(&config, DeclineReason::Internal);
        put(&tcp, &late.message);
        let start = Stopwatch::start();
        let kind = read_until_it_fails(&client);
        assert!(is_broken(kind), "{kind}");
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert_eq!(read_to_end(&tcp).1, End::Reset);
    });
}

// Shows: OPT-17, SOCK-17, SOCK-18, SEC-17.
#[test]
fn bytes_on_tcp_after_the_switch_never_reach_the_application() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let (client, tcp, _dmbs) = half(&bench, &device);
        put(&tcp, b"stray payload");
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut buf = [0; 64];
        let error = client.recv(&mut buf).unwrap_err();
        assert!(is_broken(error.kind()), "{error}");
        assert_eq!(buf, [0; 64]);
    });
}

// Shows: CLOSE-21, CLOSE-28, CLOSE-33.
#[test]
fn a_reset_of_tcp_ends_the_connection() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let (client, tcp, _dmbs) = half(&bench, &device);
        sockopt::set_socket_linger(&tcp, Some(Duration::ZERO)).unwrap();
        let start = Stopwatch::start();
        drop(tcp);
        assert_eq!(read_until_it_fails(&client), ErrorKind::ConnectionReset);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert!(client.send(b"x").is_err());
    });
}

// Shows: CLOSE-28.
#[test]
fn a_reset_of_tcp_is_noticed_although_no_call_waits_and_what_came_before_is_read() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let pair = bench.pair();
        for state in [StateFlags::empty(), StateFlags::SENDING_DONE] {
            let (peer, victim) = Hostile::connect(&pair, &device);
            victim.set_nonblocking(true).unwrap();
            let producer = ProducerWord { cursor: Cursor { wrap: 0, count: 100 } };
            let consumer = ConsumerWord { state_flags: state, ..Default::default() };
            let words = [producer.to_u64(), consumer.to_u64()];
            peer.theirs.deliver(&[(SMCD_CONTROL_LEN, &[7; 100])], words, true).unwrap();
            assert_eq!(victim.readable().unwrap(), 100);
            sockopt::set_socket_linger(&peer.tcp, Some(Duration::ZERO)).unwrap();
            drop(peer.tcp);
            eventually("a write fails", || victim.send(b"x").is_err());
            let mut buf = [0; 200];
            assert_eq!(victim.recv(&mut buf).unwrap(), 100);
            let end = victim.recv(&mut buf).map_err(|error| error.kind());
            // As on TCP, the peer's last byte may be known.
            let wanted = if state.is_empty() { Err(ErrorKind::ConnectionReset) } else { Ok(0) };
            assert_eq!(end, wanted);
        }
    });
}

// Shows: OPT-17, CLOSE-44.
#[test]
fn a_fin_of_tcp_means_nothing() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let device = Device::open(&bench, 2);
        let (client, tcp, _dmbs) = half(&bench, &device);
        tcp.shutdown(Shutdown::Write).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
        assert_eq!(client.recv(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock);
        send_all(&client, b"still");
    });
}

// Shows: CLC-57.
#[test]
fn a_proposal_whose_header_comes_slowly_is_answered() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let door = Door::new(bench.pair());
        let device = Device::open(&bench, 2);
        let (awaiting, proposal) = raw::proposal(&device.config());
        let tcp = TcpStream::connect(door.addr()).unwrap();
        tcp.set_nodelay(true).unwrap();
        tcp.set_read_timeout(Some(TIMEOUT)).unwrap();
        // Longer than the server waits for the first bytes, and not as long as for the rest.
        for (piece, pause) in [(0..4, 500), (4..7, 300), (7..proposal.len(), 0)] {
            put(&tcp, &proposal[piece]);
            thread::sleep(Duration::from_millis(pause));
        }
        raw::Proposed { tcp, awaiting }.accepted();
    });
}

#[test]
fn a_plain_client_that_talks_slowly_is_served() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let door = impatient(&bench);
        let mut tcp = TcpStream::connect(door.addr()).unwrap();
        // Begins like a Proposal, and then differs.
        tcp.write_all(&[0xe2, 0xd4]).unwrap();
        thread::sleep(Duration::from_millis(100));
        tcp.write_all(b"hello").unwrap();
        tcp.shutdown(Shutdown::Write).unwrap();
        let server = door.next();
        assert!(!server.is_smc());
        assert_eq!(read_exactly(&server, 7), b"\xe2\xd4hello");
        assert!(slurp(&server).is_empty());
        door.serves();
    });
}

#[test]
fn a_handshake_under_way_reaches_a_thread_that_still_accepts() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let pair = Arc::new(bench.pair());
        let addr = pair.listener.local_addr().unwrap();
        let device = Device::open(&bench, 2);
        // Either thread may take either client.
        for _ in 0..6 {
            let (tell, accepted) = mpsc::channel();
            let threads = [(); 2].map(|()| {
                let (pair, tell) = (pair.clone(), tell.clone());
                thread::spawn(move || tell.send(pair.listener.accept().unwrap().0).unwrap())
            });
            thread::sleep(Duration::from_millis(20));
            let (slow, offer) = propose(addr, &device.config()).accepted();
            thread::sleep(Duration::from_millis(20));
            note("a client that takes no time: one of the threads leaves with it");
            let quick = SmcStream::connect(&pair.client, addr).unwrap();
            works(&quick, &accepted.recv_timeout(TIMEOUT).unwrap());
            note("the client that took its time: it is the other thread's");
            let victim = virtio_ism_abi::Gid(offer.devices().peer.0);
            let own = device.ism.register(victim, LEN, 0).unwrap();
            let (_, confirm) = offer.confirm(dmbe(own.token().0, LEN), LINK);
            put(&slow, &confirm);
            assert!(accepted.recv_timeout(TIMEOUT).unwrap().is_smc());
            for thread in threads {
                thread.join().unwrap();
            }
        }
    });
}

#[test]
fn a_program_that_accepts_once_for_each_event_gets_every_client() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let pair = bench.pair();
        let listener = &pair.listener;
        listener.set_nonblocking(true).unwrap();
        let clients = [(); 3].map(|()| TcpStream::connect(pair.addr()).unwrap());
        let await_readable = || {
            let mut fds = [PollFd::from_borrowed_fd(listener.pollable(), PollFlags::IN)];
            let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
            assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "nothing is reported");
        };
        for _ in &clients {
            await_readable();
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        note("the listener waits for the first bytes of all clients");
        for tcp in &clients {
            put(tcp, b"GET / HTTP/1.0");
            eventually("the bytes are there", || {
                ism_sys::unacknowledged(tcp.as_fd()).unwrap() == 0
            });
        }
        for _ in &clients {
            await_readable();
            assert!(!listener.accept().unwrap().0.is_smc());
        }
    });
}

#[test]
fn messages_that_come_byte_by_byte_are_messages() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let door = Door::new(bench.pair());
        let device = Device::open(&bench, 2);
        let drip = |tcp: &TcpStream, bytes: &[u8]| {
            for byte in bytes {
                put(tcp, &[*byte]);
                thread::sleep(Duration::from_micros(200));
            }
        };
        let tcp = TcpStream::connect(door.addr()).unwrap();
        tcp.set_nodelay(true).unwrap();
        let (awaiting, proposal) = raw::proposal(&device.config());
        drip(&tcp, &proposal);
        let (tcp, accepted) = raw::Proposed { tcp, awaiting }.accepted();
        let victim = virtio_ism_abi::Gid(accepted.devices().peer.0);
        let own = device.ism.register(victim, LEN, 0).unwrap();
        let (_, confirm) = accepted.confirm(dmbe(own.token().0, LEN), LINK);
        drip(&tcp, &confirm);
        let server = door.next();
        assert!(server.is_smc(), "{}", server.info());
        assert_eq!(server.send(b"fine").unwrap(), 4);
    });
}
