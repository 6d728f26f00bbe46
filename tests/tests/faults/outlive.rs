// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections able to outlive their device. The device goes under streams between two processes: no
//! byte is lost or doubled, and no end is told of a reset.
//!
//! `SMC_OUTLIVE=100` is the number of runs of the streams; the default is one.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use guest_driver::{Config, SmcListener, SmcStream, Stack};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smc_tests::bytes::{check, fill};
use smc_tests::helper::Helper;
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, Fabric, TIMEOUT, eventually, note, pattern, read_exactly, send_all, watched};

use crate::support::PEER;

const STREAMS: usize = 16;
/// Bytes of each stream.
pub(crate) const BYTES: usize = 2 << 20;

pub(crate) fn runs() -> u32 {
    std::env::var("SMC_OUTLIVE").map_or(1, |text| text.parse().expect("SMC_OUTLIVE is a number"))
}

/// The fate of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// kill -9 of the daemon.
    Killed,
    /// The daemon ends in order, but asks no connection to leave.
    Stopped,
    /// The daemon asks every connection to leave before its end, as at SIGTERM.
    Left,
    /// The daemon removes the guest of the connecting end.
    ClientRemoved,
    /// The daemon removes the guest of the accepting end.
    ServerRemoved,
}

pub(crate) const LOSSES: [Loss; 5] =
    [Loss::Killed, Loss::Stopped, Loss::Left, Loss::ClientRemoved, Loss::ServerRemoved];

/// A daemon in its own process, and the stack of the accepting end.
pub(crate) struct Scene {
    pub(crate) daemon: Option<Helper>,
    pub(crate) dir: Dir,
    listener: SmcListener,
    pub(crate) stack: Arc<Stack>,
}

impl Scene {
    pub(crate) fn new() -> Scene {
        Scene::with_leave_time(3600)
    }

    /// A scene with this leave time. A leave time beyond the test's limit makes a connection late in
    /// leaving fail the test.
    pub(crate) fn with_leave_time(seconds: u64) -> Scene {
        let dir = Dir::new();
        let daemon = start_daemon(&dir);
        let mut config = config(0, &dir, true);
        config.testing.leave_time = Duration::from_secs(seconds);
        let stack = Stack::open(config).unwrap();
        let listener = SmcListener::bind(&stack, "127.0.0.1:0").unwrap();
        Scene { daemon: Some(daemon), dir, listener, stack }
    }

    /// An echoing process with so many connections, and their other ends.
    pub(crate) fn repeat(&self, streams: usize) -> (Helper, Vec<SmcStream>) {
        let device = self.dir.socket(1).display().to_string();
        let address = self.listener.local_addr().unwrap().to_string();
        let mut peer = Helper::spawn(PEER, &["repeat", &device, &address, &streams.to_string()]);
        let streams = (0..streams).map(|_| self.listener.accept().unwrap().0).collect();
        assert_eq!(peer.line(), "connected");
        (peer, streams)
    }

    /// A process that writes byte after byte, and the other end of its connection.
    pub(crate) fn trickle(&self) -> (Helper, SmcStream) {
        let device = self.dir.socket(1).display().to_string();
        let address = self.listener.local_addr().unwrap().to_string();
        let mut peer = Helper::spawn(PEER, &["trickle", &device, &address]);
        let (stream, _) = self.listener.accept().unwrap();
        assert_eq!(peer.line(), "connected smc");
        (peer, stream)
    }

    /// Both ends of a connection, and the stack of the client.
    pub(crate) fn pair(&self, outlives: bool) -> (Arc<Stack>, SmcStream, SmcStream) {
        let stack = Stack::open(config(1, &self.dir, outlives)).unwrap();
        let [client, server] = self.connect(&stack);
        for end in [&client, &server] {
            assert!(end.is_smc(), "{}", end.info());
            end.set_read_timeout(Some(TIMEOUT)).unwrap();
            end.set_write_timeout(Some(TIMEOUT)).unwrap();
        }
        (stack, client, server)
    }

    /// Both ends of one more connection of this client.
    pub(crate) fn connect(&self, client: &Arc<Stack>) -> [SmcStream; 2] {
        let address = self.listener.local_addr().unwrap();
        thread::scope(|scope| {
            let client = scope.spawn(|| SmcStream::connect(client, address).unwrap());
            let (server, _) = self.listener.accept().unwrap();
            [client.join().unwrap(), server]
        })
    }

    /// Sends a line to the daemon; returns the daemon's line of completion.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        let daemon = self.daemon.as_mut().unwrap();
        daemon.feed(line);
        daemon.line()
    }

    /// Starts a successor of the daemon, ended already or about to end.
    pub(crate) fn restart(&mut self) {
        if let Some(last) = self.daemon.take() {
            last.kill();
        }
        self.daemon = Some(start_daemon(&self.dir));
    }

    pub(crate) fn lose(&mut self, loss: Loss) {
        note(format!("{loss:?}"));
        let line = match loss {
            Loss::Killed => return self.daemon.take().unwrap().kill(),
            Loss::Stopped => "stop\n",
            Loss::Left => {
                assert_eq!(self.ask("leave\n"), "left 2 of 2");
                "stop\n"
            }
            Loss::ClientRemoved => "remove port1\n",
            Loss::ServerRemoved => "remove port0\n",
        };
        self.daemon.as_mut().unwrap().feed(line);
    }
}

pub(crate) fn config(n: usize, dir: &Dir, outlives: bool) -> Config {
    let mut config = Fabric::Window.config(n as _, dir.socket(n as _));
    config.outlive_device = outlives;
    // On a busy machine a handshake may wait for daemons ending and starting.
    config.clc_timeout = Duration::from_secs(60);
    config.testing.leave_time = Duration::from_secs(3600);
    config
}

pub(crate) fn start_daemon(dir: &Dir) -> Helper {
    let sockets = [0, 1].map(|n| dir.socket(n).display().to_string());
    let (daemon, ready) = Helper::start(PEER, &["daemon", &sockets[0], &sockets[1]]);
    assert_eq!(ready, "ready");
    daemon
}

/// Sends `BYTES` bytes and reads them back to the end; returns how many came back.
pub(crate) fn bounce(stream: &SmcStream, seed: u64, sent: &AtomicUsize) -> usize {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut block, mut done) = (vec![0; 10_000], 0);
            while done < BYTES {
                let n = block.len().min(BYTES - done);
                fill(seed, done, &mut block[..n]);
                let n = stream.send(&block[..n]).unwrap_or_else(|e| panic!("{seed} {done}: {e}"));
                done += n;
                sent.fetch_add(n, Ordering::Relaxed);
            }
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let (mut buf, mut done) = (vec![0; 7000], 0);
        loop {
            match stream.recv(&mut buf).unwrap_or_else(|e| panic!("{seed} {done}: {e}")) {
                0 => return done,
                n => {
                    check(seed, done, &buf[..n]);
                    done += n;
                }
            }
        }
    })
}

fn lose_under_streams(loss: Loss, run: u32) {
    let mut scene = Scene::new();
    let (mut peer, streams) = scene.repeat(STREAMS);
    let sent = AtomicUsize::new(0);
    let before = STREAMS * BYTES / 16 * (1 + run as usize % 12);
    thread::scope(|scope| {
        let bounces: Vec<_> = (0..STREAMS)
            .map(|n| (n, &streams[n], &sent))
            .map(|(n, stream, sent)| scope.spawn(move || bounce(stream, n as u64, sent)))
            .collect();
        eventually("the streams flow", || sent.load(Ordering::Relaxed) > before);
        scene.lose(loss);
        for bounce in bounces {
            assert_eq!(bounce.join().unwrap(), BYTES);
        }
    });
    for _ in 0..STREAMS {
        assert_eq!(peer.line(), "whole");
    }
    drop(streams);
    eventually("closed connections are gone", || scene.stack.totals().closing == 0);
}

fn lose_under_streams_often(loss: Loss) {
    for run in 0..runs() {
        watched(LIMIT, || lose_under_streams(loss, run));
    }
}

smc_test_support::tests_of! {
    lose_under_streams_often:
    fn no_byte_is_lost_when_the_daemon_is_killed_under_streams(Loss::Killed);
    fn no_byte_is_lost_when_the_daemon_stops_under_streams(Loss::Stopped);
    fn no_byte_is_lost_when_the_daemon_has_all_leave_under_streams(Loss::Left);
}

#[test]
fn no_byte_is_lost_when_one_end_loses_its_device_under_streams() {
    lose_under_streams_often(Loss::ClientRemoved);
    lose_under_streams_often(Loss::ServerRemoved);
}

fn shows(stream: &SmcStream, flags: PollFlags) -> bool {
    let pollable = stream.pollable_exact().unwrap();
    let mut fds = [PollFd::from_borrowed_fd(pollable.as_fd(), flags)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

// Readiness, half closes, ends and urgent bytes look the same to a program afterwards.
#[test]
fn a_program_sees_no_difference_after_its_connection_has_lost_its_device() {
    for loss in LOSSES {
        watched(LIMIT, || {
            let mut scene = Scene::new();
            let (_stack, client, server) = scene.pair(true);
            let bytes = pattern(3, 50_000);
            send_all(&client, &bytes);
            scene.lose(loss);
            send_all(&server, b"from the server");
            // A connection is listed although its device is gone.
            assert_eq!(scene.stack.connections().len(), 1);
            assert_eq!(read_exactly(&client, 15), b"from the server");
            assert!(!shows(&client, PollFlags::IN) && shows(&client, PollFlags::OUT));
            // Bytes from the ring come first.
            send_all(&client, &bytes);
            assert_eq!(read_exactly(&server, bytes.len()), bytes);
            assert_eq!(read_exactly(&server, bytes.len()), bytes);
            client.set_nonblocking(true).unwrap();
            let nothing = client.recv(&mut [0; 1]).map_err(|error| error.kind());
            assert_eq!(nothing, Err(ErrorKind::WouldBlock));
            send_all(&server, b"x");
            eventually("the byte shows", || shows(&client, PollFlags::IN));
            assert_eq!(client.peek(&mut [0; 9]).unwrap(), 1);
            assert_eq!(client.recv(&mut [0; 9]).unwrap(), 1);
            client.send_urgent(b'!').unwrap();
            eventually("the urgent byte is there", || server.has_urgent().unwrap());
            eventually("it can be read", || server.recv_urgent().is_ok_and(|byte| byte == b'!'));
            assert!(client.take_error().unwrap().is_none());
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(server.recv(&mut [0; 9]).unwrap(), 0);
            send_all(&server, b"later");
            drop(server);
            eventually("the last bytes are there", || client.readable().unwrap() == 5);
            assert_eq!(client.recv(&mut [0; 9]).unwrap(), 5);
            eventually("the end shows", || matches!(client.recv(&mut [0; 9]), Ok(0)));
            drop(client);
            eventually("nothing is left", || scene.stack.totals().closing == 0);
        });
    }
}

// TCP has room for a few bytes on a connection that was used little. Programs send without a look, and
// take an error for the end: PostgreSQL's answer to a request for TLS, for example.
#[test]
fn a_send_that_does_not_wait_finds_room_while_a_connection_leaves_its_ring() {
    for loss in [LOSSES, LOSSES, LOSSES].concat() {
        watched(LIMIT, || {
            let mut scene = Scene::new();
            let (_stack, client, server) = scene.pair(true);
            for end in [&client, &server] {
                end.set_nonblocking(true).unwrap();
            }
            let bytes = pattern(4, 2000);
            std::thread::scope(|scope| {
                for end in [&client, &server] {
                    scope.spawn(|| {
                        for byte in &bytes {
                            assert_eq!(end.send(std::slice::from_ref(byte)).unwrap(), 1);
                            std::thread::sleep(Duration::from_micros(20));
                        }
                    });
                }
                scene.lose(loss);
            });
            for end in [&client, &server] {
                end.set_nonblocking(false).unwrap();
                assert_eq!(read_exactly(end, bytes.len()), bytes);
            }
        });
    }
}

/// Writes on a non-blocking connection until TCP takes no more; returns the number of bytes.
fn fill_tcp(client: &SmcStream, block: &[u8]) -> usize {
    client.set_nonblocking(true).unwrap();
    let mut sent = 0;
    eventually("no room is left", || match client.send(&block[sent % block.len()..]) {
        Ok(n) => {
            sent += n;
            false
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            sent > 100_000 && !shows(client, PollFlags::OUT)
        }
    });
    sent
}

// A non-blocking writer fills TCP's buffers, and is told of new room.
#[test]
fn a_writer_is_told_of_room_on_tcp() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (_stack, client, server) = scene.pair(true);
        scene.lose(Loss::Killed);
        let block = pattern(0, 1 << 20);
        let (sent, mut done) = (fill_tcp(&client, &block), 0);
        while done < sent {
            let bytes = read_exactly(&server, (sent - done).min(block.len()));
            assert!(bytes == block[..bytes.len()], "after {done} bytes");
            done += bytes.len();
        }
        eventually("there is room", || shows(&client, PollFlags::OUT));
    });
}

// A thread stays to send the rest.
#[test]
fn the_end_of_a_stack_loses_nothing_of_what_its_closed_connections_have_left() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (stack, client, server) = scene.pair(true);
        scene.lose(Loss::Killed);
        let block = pattern(0, 1 << 20);
        let sent = fill_tcp(&client, &block);
        let last = Arc::downgrade(&stack);
        drop((client, stack));
        eventually("the stack is gone", || last.strong_count() == 0);
        let (mut buf, mut done) = (vec![0; 7000], 0);
        while let n @ 1.. = server.recv(&mut buf).unwrap() {
            for (at, byte) in buf[..n].iter().enumerate() {
                assert_eq!(*byte, block[(done + at) % block.len()], "{done} {at}");
            }
            done += n;
        }
        assert_eq!(done, sent);
    });
}

/// Reads after a kill of the peer, soon after the daemon's.
fn read_after_both_were_killed() -> std::io::Result<usize> {
    let mut scene = Scene::new();
    let (peer, streams) = scene.repeat(1);
    let stream = &streams[0];
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    send_all(stream, b"one");
    assert_eq!(read_exactly(stream, 3), b"one");
    scene.lose(Loss::Killed);
    eventually("the device is gone", || scene.stack.devices().is_empty());
    send_all(stream, b"two");
    assert_eq!(read_exactly(stream, 3), b"two");
    peer.kill();
    stream.recv(&mut [0; 1])
}

// During its leaving, an end cannot know how much a lost peer has received. A program does not see the
// end of the leaving, so this tries repeatedly.
#[test]
fn a_peer_that_is_killed_after_it_has_lost_its_device_is_an_end_of_data() {
    watched(LIMIT, || {
        let ended = (0..20).any(|_| match read_after_both_were_killed() {
            Ok(n) => {
                assert_eq!(n, 0);
                true
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                false
            }
        });
        assert!(ended, "a reset each time");
    });
}

#[test]
fn a_peer_that_cannot_outlive_its_device_is_reset_with_it() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (_stack, client, server) = scene.pair(false);
        scene.lose(Loss::Killed);
        for end in [&client, &server] {
            let end = end.recv(&mut [0; 1]).map_err(|error| error.kind());
            assert_eq!(end, Err(ErrorKind::ConnectionReset));
        }
    });
}
