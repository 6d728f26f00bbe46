// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP_INFO shows the program's bytes and the times of their transfer, with and without the library
//! at either end: programs use TCP_INFO to judge whether a peer is idle, and how far a transfer is.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use combinations::{
    accept_and_greet, connect, connect_and_greet, exchange_as_client, exchange_as_server,
    in_all_combinations,
};
use common::{Fabric, await_listener, eventually, free_port, my_role, role};

/// SIOCOUTQNSD: bytes not sent yet.
const SIOCOUTQNSD: u64 = 0x894b;
/// Number of bytes of one end.
const N: usize = 3 << 20;
/// More than all buffers hold.
const TOO_MUCH: usize = 64 << 20;

/// The observed values. The places are from `struct tcp_info`.
#[derive(Clone, Copy, Debug)]
struct Info {
    unacked: u32,
    since_sent: u32,
    since_received: u32,
    since_acknowledged: u32,
    retransmits: u32,
    acknowledged: u64,
    received: u64,
    segments: [u32; 2],
    unsent: u32,
    data_segments: [u32; 2],
    delivered: u32,
    sent: u64,
    windows: [u32; 2],
}

impl Info {
    /// Whether so many bytes were sent. On TCP a packet may have been repeated, and counts again.
    fn is_sent(&self, bytes: u64) -> bool {
        self.sent == bytes || self.sent > bytes && self.retransmits > 0
    }
}

fn info(stream: &TcpStream) -> Info {
    let mut bytes = [0u8; 256];
    assert_eq!(ask(stream, &mut bytes), 256, "the kernel knows the fields");
    let u32_at = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    Info {
        unacked: u32_at(24),
        since_sent: u32_at(44),
        since_received: u32_at(52),
        since_acknowledged: u32_at(56),
        retransmits: u32_at(100),
        acknowledged: u64_at(120),
        received: u64_at(128),
        segments: [u32_at(136), u32_at(140)],
        unsent: u32_at(144),
        data_segments: [u32_at(156), u32_at(152)],
        delivered: u32_at(192),
        sent: u64_at(200),
        windows: [u32_at(228), u32_at(232)],
    }
}

/// TCP_INFO in its raw form. Returns the length reported by the call.
fn ask(stream: &TcpStream, bytes: &mut [u8]) -> usize {
    let mut len = bytes.len() as libc::socklen_t;
    let at = bytes.as_mut_ptr().cast();
    let fd = stream.as_raw_fd();
    assert_eq!(unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, at, &mut len) }, 0);
    len as usize
}

/// Waits until the peer's kernel has acknowledged everything.
fn acknowledged(stream: &TcpStream) -> Info {
    eventually(|| c::number(stream, libc::TIOCOUTQ).unwrap() == 0);
    info(stream)
}

fn read_bytes(stream: &mut TcpStream, n: usize) {
    stream.read_exact(&mut vec![0; n]).unwrap();
}

#[test]
fn the_bytes_are_those_of_the_program() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!((info(&stream).acknowledged, info(&stream).sent), (0, 0));
        exchange_as_server(&mut stream);
        // The client may have sent more by now.
        assert!(info(&stream).received >= 5);
        let first = acknowledged(&stream);
        assert_eq!((first.acknowledged, first.is_sent(5)), (5, true), "{first:?}");
        read_bytes(&mut stream, N);
        let now = info(&stream);
        assert_eq!((now.received, now.is_sent(5)), (N as u64 + 5, true), "{now:?}");
        assert!(now.data_segments[1] > 1 && now.data_segments[0] == 1, "{now:?}");
        stream.write_all(b"all").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        // The end counts as a byte.
        assert_eq!(info(&stream).received, N as u64 + 6);
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        // The SYN counts as a byte.
        let fresh = info(&stream);
        assert_eq!((fresh.acknowledged, fresh.received, fresh.sent), (1, 0, 0), "{fresh:?}");
        exchange_as_client(&mut stream);
        let first = acknowledged(&stream);
        assert_eq!((first.acknowledged, first.received), (6, 5), "{first:?}");
        assert!(first.is_sent(5), "{first:?}");
        stream.write_all(&vec![7; N]).unwrap();
        read_bytes(&mut stream, 3);
        let last = acknowledged(&stream);
        assert_eq!((last.acknowledged, last.received), (N as u64 + 6, 8), "{last:?}");
        assert_eq!((last.unsent, last.unacked), (0, 0), "{last:?}");
        assert!(last.is_sent(N as u64 + 5), "{last:?}");
        for way in 0..2 {
            assert!(last.data_segments[way] > first.data_segments[way], "{first:?} {last:?}");
            assert!(last.segments[way] > last.data_segments[way], "{last:?}");
        }
        assert!(last.delivered > first.delivered, "{first:?} {last:?}");
        assert!(last.windows.iter().all(|window| *window > 0), "{last:?}");
        stream.shutdown(Shutdown::Write).unwrap();
        eventually(|| info(&stream).acknowledged == N as u64 + 7);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    in_all_combinations(server, client);
}

#[test]
fn what_is_unsent_is_what_ioctl_says() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        std::thread::sleep(Duration::from_millis(500));
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        stream.set_nonblocking(true).unwrap();
        let (mut written, mut refused) = (5, 0);
        while refused < 20 && written < TOO_MUCH {
            match stream.write(&[7; 50_000]) {
                Ok(n) => (written, refused) = (written + n, 0),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        }
        // The kernel may send something between two of the questions.
        eventually(|| {
            let now = info(&stream);
            let queues = [libc::TIOCOUTQ, SIOCOUTQNSD].map(|ask| c::number(&stream, ask).unwrap());
            let unacknowledged = (written + 1) as u64 - now.acknowledged;
            now.unsent > 0
                && queues == [unacknowledged as i32, now.unsent as i32]
                && now.windows[0] < 70_000
        });
        stream.set_nonblocking(false).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    in_all_combinations(server, client);
}

/// How long the peers are silent.
const SILENCE: Duration = Duration::from_millis(2500);

#[test]
fn times_tell_since_when_a_connection_is_idle() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        std::thread::sleep(SILENCE);
        // The first question of the process.
        let idle = info(&stream);
        for since in [idle.since_sent, idle.since_received, idle.since_acknowledged] {
            assert!((1400..100_000).contains(&since), "{idle:?}");
        }
        let begun = Instant::now();
        // The kernel counts in ticks.
        let at_most = || begun.elapsed().as_millis() as u32 + 20;
        stream.write_all(b"x").unwrap();
        let now = info(&stream);
        assert!(now.since_sent <= at_most(), "{now:?}");
        read_bytes(&mut stream, 1);
        let now = info(&stream);
        assert!(now.since_received <= at_most(), "{now:?}");
        std::thread::sleep(Duration::from_millis(600));
        let now = info(&stream);
        for since in [now.since_sent, now.since_received, now.since_acknowledged] {
            assert!((560..100_000).contains(&since), "{now:?}");
        }
        // Bytes flow, one way.
        stream.write_all(b"go").unwrap();
        for _ in 0..20 {
            read_bytes(&mut stream, 1000);
            // The bytes are answers.
            let now = info(&stream);
            assert!(now.since_received <= now.since_sent + 20, "{now:?}");
        }
        let now = info(&stream);
        assert!((300..100_000).contains(&now.since_sent), "{now:?}");
        assert!(now.since_received < now.since_sent, "{now:?}");
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        read_bytes(&mut stream, 1);
        stream.write_all(b"y").unwrap();
        read_bytes(&mut stream, 2);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            stream.write_all(&[7; 1000]).unwrap();
        }
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    in_all_combinations(server, client);
}

#[test]
fn what_the_program_has_no_room_for_is_cut_off() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    fn client(port: u16) {
        let stream = connect_and_greet(port);
        acknowledged(&stream);
        let mut all = [0; 256];
        assert_eq!(ask(&stream, &mut all), all.len());
        assert_eq!(all[120..136], [6, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        for n in [0, 1, 8, 104, 121, 128, 130, 192, 205] {
            let mut room = [0xee; 256];
            assert_eq!(ask(&stream, &mut room[..n]), n);
            assert!(room[n..].iter().all(|byte| *byte == 0xee), "{n}");
            // Except for the times, and the kernel's estimates.
            let counted =
                (120..n).filter(|at| !(148..152).contains(at) && !(160..192).contains(at));
            for at in counted {
                assert_eq!(room[at], all[at], "{at} of {n}");
            }
        }
    }
    in_all_combinations(server, client);
}

fn file(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("FILES").unwrap()).join(name)
}

/// Looks again and again, from before the connection loses its device: no count becomes less.
fn watch_counts(stream: &TcpStream, done: &AtomicBool) {
    let counts = |info: &Info| {
        let [out, in_] = info.data_segments.map(u64::from);
        [info.acknowledged, info.received, info.sent, out, in_]
    };
    let mut before = info(stream);
    while !done.load(Ordering::Relaxed) {
        let now = info(stream);
        let pairs = counts(&before).into_iter().zip(counts(&now));
        assert!(pairs.into_iter().all(|(before, now)| now >= before), "{before:?} {now:?}");
        assert!(now.acknowledged <= now.sent + 2, "{now:?}");
        before = now;
    }
}

/// The own window when nothing is unread: the window of a ring, never by chance the kernel's.
const RING: u32 = (256 << 10) - 32;

/// Exchanges words until both ends have a ring, or (0) until both have none. Returns the number of
/// words.
fn await_carrier(stream: &mut TcpStream, wanted: u32) -> u64 {
    let begun = Instant::now();
    for words in 1.. {
        let is_ring = info(stream).windows[1] == RING;
        let own = [u8::from(is_ring == (wanted == RING))];
        stream.write_all(&own).unwrap();
        let mut theirs = [0];
        stream.read_exact(&mut theirs).unwrap();
        if (own, theirs) == ([1], [1]) {
            return words;
        }
        assert!(begun.elapsed() < smc_test_support::TIMEOUT, "{wanted} {:?}", info(stream));
        std::thread::sleep(Duration::from_millis(20));
    }
    unreachable!()
}

/// Sends and receives, loses its device in the middle, finds another one, and compares the counts.
fn lose_the_device(stream: &mut TcpStream, me: &str, syn: u64) {
    const ROUNDS: usize = 200;
    const PIECE: usize = 20_000;
    let done = AtomicBool::new(false);
    let copy = stream.try_clone().unwrap();
    let looks = std::thread::scope(|scope| {
        let looks = scope.spawn(|| watch_counts(&copy, &done));
        let mut words = 0;
        for round in 0..ROUNDS {
            if round == ROUNDS / 2 {
                std::fs::write(file(me), "").unwrap();
                eventually(|| file("lost").exists());
                words += await_carrier(stream, 0);
            }
            if round == ROUNDS / 4 * 3 {
                words += await_carrier(stream, RING);
            }
            stream.write_all(&[7; PIECE]).unwrap();
            read_bytes(stream, PIECE);
        }
        done.store(true, Ordering::Relaxed);
        (looks.join(), words)
    });
    let words = looks.1;
    looks.0.unwrap();
    // Records count without their headers, and a packet of TCP counts once.
    let all = (ROUNDS * PIECE) as u64 + 5 + words;
    eventually(|| {
        let now = info(stream);
        // The peer may have closed the connection by now, which counts as a byte.
        let received = now.received == all || now.received == all + 1;
        received && (now.acknowledged, now.sent) == (all + syn, all)
    });
}

#[test]
fn counts_go_on_when_a_connection_loses_its_device() {
    const TEST: &str = "counts_go_on_when_a_connection_loses_its_device";
    if let Some((role, port)) = my_role() {
        if role == "server" {
            let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
            let mut stream = accept_and_greet(&listener);
            lose_the_device(&mut stream, "server", 0);
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        } else {
            let mut stream = connect_and_greet(port);
            lose_the_device(&mut stream, "client", 1);
        }
        return;
    }
    let mut fabric = Fabric::new(6);
    let (port, this) = (free_port(), std::env::current_exe().unwrap());
    let files = fabric.file("files");
    std::fs::create_dir(&files).unwrap();
    let program = |fabric: &Fabric| {
        let mut command = fabric.smc(&this);
        command.env("FILES", &files);
        command.env("SMC_RUN_DETECT_MS", "10000");
        command
    };
    let server = role(&mut program(&fabric), TEST, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), TEST, "client", port);
    eventually(|| files.join("server").exists() && files.join("client").exists());
    assert_eq!(fabric.decided(), (2, 0));
    fabric.kill_daemon();
    std::fs::write(files.join("lost"), "").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    fabric.start_daemon(6);
    client.finish_beside(&[&server]);
    server.finish();
}
