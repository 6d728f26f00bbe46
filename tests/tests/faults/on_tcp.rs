// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting calls on a connection without its device: no device wakes the calls any more, and none of
//! the device's threads looks after them.

use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use smc_tests::watch::LIMIT;
use smc_tests::{TIMEOUT, eventually, note, pattern, read_exactly, send_all, watched};

use crate::outlive::{Loss, Scene};

/// A call with more time than this sleeps without a time of its own while a device is there.
const LONG: Duration = Duration::from_millis(3500);

#[test]
fn calls_end_at_their_time_after_the_device_has_gone() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (stack, client, server) = scene.pair(true);
        scene.lose(Loss::Killed);
        send_all(&client, b"by TCP");
        assert_eq!(read_exactly(&server, 6), b"by TCP");
        for restarts in [false, true] {
            if restarts {
                // Ends this direction, so the connection stays on TCP.
                server.shutdown(std::net::Shutdown::Write).unwrap();
                scene.restart();
                eventually("devices are there", || {
                    !stack.devices().is_empty() && !scene.stack.devices().is_empty()
                });
            }
            let end = if restarts { &server } else { &client };
            end.set_read_timeout(Some(LONG)).unwrap();
            let begun = Instant::now();
            let nothing = end.recv(&mut [0]).map_err(|error| error.kind());
            assert_eq!(nothing, Err(ErrorKind::WouldBlock));
            assert!(begun.elapsed() >= LONG, "{:?}", begun.elapsed());
        }
        client.set_write_timeout(Some(LONG)).unwrap();
        note("fills TCP");
        let block = vec![0; 1 << 20];
        let full = loop {
            if let Err(error) = client.send(&block) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
    });
}

#[test]
fn a_close_that_lingers_waits_until_tcp_has_all_records() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (stack, client, server) = scene.pair(true);
        scene.lose(Loss::Killed);
        let block = pattern(0, 1 << 20);
        // Blocks go in whole and in parts, so bytes are counted within a block.
        let (mut sent, mut done) = (0, 0);
        let read = |done: &mut usize| {
            let mut buf = vec![0; 50_000];
            let n = server.recv(&mut buf).unwrap();
            for (at, byte) in buf[..n].iter().enumerate() {
                assert_eq!(*byte, block[(*done + at) % block.len()], "{done} {at}");
            }
            *done += n;
            n
        };
        client.set_nonblocking(true).unwrap();
        eventually("records wait for TCP", || {
            while let Ok(n) = client.send(&block[sent % block.len()..]) {
                sent += n;
            }
            thread::sleep(Duration::from_millis(50));
            let waits = client.unread_by_peer().unwrap() > 0;
            if !waits {
                // A little room: a record goes into TCP in part.
                read(&mut done);
            }
            waits
        });
        client.set_linger(Some(TIMEOUT)).unwrap();
        thread::scope(|scope| {
            let closing = scope.spawn(|| drop(client));
            thread::sleep(Duration::from_millis(200));
            assert!(!closing.is_finished(), "it has not waited");
            while read(&mut done) > 0 {}
            assert_eq!(done, sent);
        });
        drop(server);
        eventually("nothing is left", || {
            stack.totals().closing + scene.stack.totals().closing == 0
        });
    });
}

/// Either end of a connection.
trait End: Sync {
    fn give(&self, bytes: &[u8]);
    fn take(&self, room: &mut [u8]);
}

impl End for guest_driver::SmcStream {
    fn give(&self, bytes: &[u8]) {
        send_all(self, bytes);
    }

    fn take(&self, room: &mut [u8]) {
        let mut reader = self;
        std::io::Read::read_exact(&mut reader, room).unwrap();
    }
}

impl End for std::net::TcpStream {
    fn give(&self, bytes: &[u8]) {
        let mut writer = self;
        std::io::Write::write_all(&mut writer, bytes).unwrap();
    }

    fn take(&self, room: &mut [u8]) {
        let mut reader = self;
        std::io::Read::read_exact(&mut reader, room).unwrap();
    }
}

/// Bytes per second of one stream.
fn bulk(from: &impl End, to: &impl End, times: usize) -> f64 {
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| (0..times).for_each(|_| from.give(&[7; 64 << 10])));
        (0..times).for_each(|_| to.take(&mut [0; 64 << 10]));
    });
    (times * (64 << 10)) as f64 / begun.elapsed().as_secs_f64()
}

/// Round trips of 64 bytes per second.
fn round_trips(from: &impl End, to: &impl End, times: usize) -> f64 {
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..times).for_each(|_| {
                to.take(&mut [0; 64]);
                to.give(&[1; 64]);
            });
        });
        (0..times).for_each(|_| {
            from.give(&[1; 64]);
            from.take(&mut [0; 64]);
        });
    });
    times as f64 / begun.elapsed().as_secs_f64()
}

/// The ratios to TCP are measured on a quiet machine by `SMC_ROUNDS=9 cargo test --release -p smc-tests
/// --test faults on_tcp::records -- --nocapture`.
#[test]
fn records_on_tcp_carry_streams_and_round_trips() {
    let rounds = std::env::var("SMC_ROUNDS").map(|text| text.parse::<usize>().unwrap());
    let (rounds, blocks, trips) = rounds.map_or((1, 200, 500), |rounds| (rounds, 6000, 20_000));
    let mut scene = Scene::new();
    let (_stack, client, server) = scene.pair(true);
    scene.lose(Loss::Killed);
    send_all(&client, b"by TCP");
    assert_eq!(read_exactly(&server, 6), b"by TCP");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    tcp.set_nodelay(true).unwrap();
    peer.set_nodelay(true).unwrap();
    let mut ratios = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        ratios[0].push(bulk(&client, &server, blocks) / bulk(&tcp, &peer, blocks));
        let by_records = round_trips(&client, &server, trips);
        ratios[1].push(by_records / round_trips(&tcp, &peer, trips));
    }
    for (name, ratios) in ["one stream", "64 B round trips"].iter().zip(&mut ratios) {
        ratios.sort_by(f64::total_cmp);
        let (middle, last) = (ratios[rounds / 2], ratios[rounds - 1]);
        println!("{name}: {middle:.2} of TCP [{:.2} .. {last:.2}]", ratios[0]);
    }
}
