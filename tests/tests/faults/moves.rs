// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections by moves, able to outlive their device. The device goes with moves under way: no byte
//! is lost or doubled, and no end is told of a reset.
//!
//! `SMC_OUTLIVE=100` is the number of runs of the streams; the default is one.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use guest_driver::{ConnectionInfo, DataPath, SmcListener, SmcStream, Stack};
use smc_tests::bytes::{check, fill};
use smc_tests::helper::Helper;
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, Fabric, TIMEOUT, eventually, note, pattern, read_exactly, send_all, watched};

use crate::back::{is_back, talk};
use crate::outlive::start_daemon;

const STREAMS: usize = 16;
/// Bytes of each direction of a stream.
const BYTES: usize = 1 << 20;

/// Losses of devices: lines for the daemon, or its death.
const LOSSES: [&str; 4] = ["kill", "stop\n", "remove port1\n", "remove port0\n"];

/// The data path wanted by each end: client, server. The ring of an end with stores lies in the
/// window, although its peer moves bytes there.
const PATHS: [[DataPath; 2]; 3] = [
    [DataPath::Move, DataPath::Move],
    [DataPath::Move, DataPath::Auto],
    [DataPath::Auto, DataPath::Move],
];

struct Scene {
    daemon: Option<Helper>,
    listener: SmcListener,
    stacks: [Arc<Stack>; 2],
    paths: [DataPath; 2],
    dir: Dir,
}

impl Scene {
    fn new(paths: [DataPath; 2]) -> Scene {
        let dir = Dir::new();
        let daemon = start_daemon(&dir);
        let stacks = [1, 0].map(|n| {
            let mut config = Fabric::Window.config(n, dir.socket(n));
            config.path = paths[1 - n];
            config.outlive_device = true;
            Stack::open(config).unwrap()
        });
        let listener = SmcListener::bind(&stacks[1], "127.0.0.1:0").unwrap();
        Scene { daemon: Some(daemon), listener, stacks, paths, dir }
    }

    /// Both ends of a connection, the client's first.
    fn connect(&self) -> [SmcStream; 2] {
        let address = self.listener.local_addr().unwrap();
        let ends = thread::scope(|scope| {
            let client = scope.spawn(|| SmcStream::connect(&self.stacks[0], address).unwrap());
            let (server, _) = self.listener.accept().unwrap();
            [client.join().unwrap(), server]
        });
        for (end, path) in ends.iter().zip(self.paths) {
            let ConnectionInfo::Smcd(info) = end.info() else { panic!("{}", end.info()) };
            assert!(!info.window || path != DataPath::Move, "{info:?}");
            end.set_read_timeout(Some(TIMEOUT)).unwrap();
            end.set_write_timeout(Some(TIMEOUT)).unwrap();
        }
        ends
    }

    fn lose(&mut self, loss: &str) {
        note(loss);
        match loss {
            "kill" => self.daemon.take().unwrap().kill(),
            line => self.daemon.as_mut().unwrap().feed(line),
        }
    }
}

fn send(stream: &SmcStream, seed: u64, sent: &AtomicUsize) {
    let (mut block, mut done) = (vec![0; 10_000], 0);
    while done < BYTES {
        let n = block.len().min(BYTES - done);
        fill(seed, done, &mut block[..n]);
        let n = stream.send(&block[..n]).unwrap_or_else(|e| panic!("{seed} {done}: {e}"));
        done += n;
        sent.fetch_add(n, Ordering::Relaxed);
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

fn receive(stream: &SmcStream, seed: u64) {
    let (mut buf, mut done) = (vec![0; 7000], 0);
    loop {
        match stream.recv(&mut buf).unwrap_or_else(|e| panic!("{seed} {done}: {e}")) {
            0 => return assert_eq!(done, BYTES, "{seed}"),
            n => {
                check(seed, done, &buf[..n]);
                done += n;
            }
        }
    }
}

fn lose_under_streams(paths: [DataPath; 2], loss: &str, run: usize) {
    let mut scene = Scene::new(paths);
    let pairs: Vec<_> = (0..STREAMS).map(|_| scene.connect()).collect();
    let sent = AtomicUsize::new(0);
    let before = 2 * STREAMS * BYTES / 16 * (1 + run % 12);
    thread::scope(|scope| {
        let mut ends = Vec::new();
        for (n, [client, server]) in pairs.iter().enumerate() {
            let (to_server, to_client, sent) = (2 * n as u64, 2 * n as u64 + 1, &sent);
            ends.push(scope.spawn(move || send(client, to_server, sent)));
            ends.push(scope.spawn(move || send(server, to_client, sent)));
            ends.push(scope.spawn(move || receive(server, to_server)));
            ends.push(scope.spawn(move || receive(client, to_client)));
        }
        eventually("the streams flow", || sent.load(Ordering::Relaxed) > before);
        scene.lose(loss);
        for end in ends {
            end.join().unwrap();
        }
    });
    drop(pairs);
    for stack in &scene.stacks {
        eventually("closed connections are gone", || stack.totals().closing == 0);
    }
}

fn lose_under_streams_often(paths: [DataPath; 2]) {
    let runs = std::env::var("SMC_OUTLIVE").map_or(1, |text| text.parse().unwrap());
    for run in 0..runs {
        for loss in LOSSES {
            watched(LIMIT, || lose_under_streams(paths, loss, run));
        }
    }
}

#[test]
fn no_byte_is_lost_when_devices_go_under_moves() {
    lose_under_streams_often(PATHS[0]);
}

#[test]
fn no_byte_is_lost_when_one_end_moves_and_the_other_stores() {
    lose_under_streams_often(PATHS[1]);
    lose_under_streams_often(PATHS[2]);
}

#[test]
fn ends_and_urgent_bytes_survive_the_loss_of_moves() {
    for loss in LOSSES {
        watched(LIMIT, || {
            let mut scene = Scene::new(PATHS[0]);
            let [client, server] = scene.connect();
            let bytes = pattern(3, 50_000);
            send_all(&client, &bytes);
            client.send_urgent(b'!').unwrap();
            scene.lose(loss);
            let urgent = || server.recv_urgent().is_ok_and(|byte| byte == b'!');
            eventually("the urgent byte is there", urgent);
            assert_eq!(read_exactly(&server, bytes.len()), bytes);
            send_all(&client, b"after");
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_exactly(&server, 5), b"after");
            assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
            send_all(&server, b"answer");
            drop(server);
            assert_eq!(read_exactly(&client, 6), b"answer");
            assert_eq!(client.recv(&mut [0; 1]).unwrap(), 0);
        });
    }
}

#[test]
fn connections_by_moves_come_back() {
    for paths in PATHS {
        watched(LIMIT, || {
            let mut scene = Scene::new(paths);
            let [client, server] = scene.connect();
            let bytes = pattern(3, 50_000);
            for _ in 0..2 {
                send_all(&client, &bytes);
                send_all(&server, &bytes);
                scene.lose("kill");
                eventually("devices are gone", || {
                    scene.stacks.iter().all(|stack| stack.devices().is_empty())
                });
                scene.daemon = Some(start_daemon(&scene.dir));
                eventually("it is back", || scene.stacks.iter().all(is_back));
                // Unread bytes of the last ring come first.
                send_all(&client, b"after");
                assert!(read_exactly(&client, bytes.len()) == bytes);
                assert!(read_exactly(&server, bytes.len()) == bytes);
                assert_eq!(read_exactly(&server, 5), b"after");
                talk(&client, &server);
                let path = |end: &SmcStream| match end.info() {
                    ConnectionInfo::Smcd(info) => info.window,
                    other => panic!("{other}"),
                };
                assert!(paths[0] != DataPath::Move || !path(&client));
            }
        });
    }
}
