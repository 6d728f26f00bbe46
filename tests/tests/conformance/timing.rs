// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Time limits and calls that do not wait.

use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use smc_test_support::Stopwatch;
use smc_tests::end::{End, Site};
use smc_tests::watch::assert_prompt;
use smc_tests::{note, pattern, read_exactly, send_all, test_timeout};

on_every_fabric! {
    a_read_ends_at_its_time_limit
    a_write_ends_at_its_time_limit_with_what_went_out
    limits_can_be_asked_for_and_zero_is_refused
    data_ends_a_read_before_its_limit
    calls_that_do_not_wait_say_so
    a_stream_can_wait_again
    a_listener_that_does_not_wait_says_so
    connecting_in_time_works
    late_data_wakes_a_sleeping_reader_at_once
}

/// Fills every buffer on the way; returns the number of bytes.
fn stuff(stream: &End) -> usize {
    note("fills the window");
    stream.set_nonblocking(true).unwrap();
    let (piece, mut sent, mut refused) = (pattern(1, 100_000), 0, 0);
    while refused < 20 {
        match stream.send(&piece) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    sent
}

#[track_caller]
fn took(start: Instant, at_least: u64) {
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(at_least), "after {took:?} already");
    assert!(took < test_timeout() / 2, "only after {took:?}");
}

fn a_read_ends_at_its_time_limit(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    // Below and above a second, the interval of rechecks of memory.
    for limit in [30, 1200] {
        client.set_read_timeout(Some(Duration::from_millis(limit))).unwrap();
        let start = Instant::now();
        let error = client.recv(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        took(start, limit - 1);
    }
    send_all(&server, b"now");
    assert_eq!(read_exactly(&client, 3), b"now", "the connection is as good as before");
}

fn a_write_ends_at_its_time_limit_with_what_went_out(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let start = Instant::now();
    let n = client.send(&pattern(1, 64 << 20)).unwrap();
    took(start, 290);
    let start = Instant::now();
    let error = client.send(b"x").map(|_| client.send(&[0; 1 << 20]));
    match error {
        // The last byte of TCP's buffers.
        Ok(Ok(_)) | Ok(Err(_)) if !site.is_smc() => {}
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            took(start, 290);
        }
        other => panic!("{other:?}"),
    }
    assert!(read_exactly(&server, n) == pattern(1, n));
}

fn limits_can_be_asked_for_and_zero_is_refused(site: &Site) {
    let pair = site.pair();
    let (client, _server) = pair.connect();
    assert_eq!(client.read_timeout().unwrap(), None);
    assert_eq!(client.write_timeout().unwrap(), None);
    let limit = Some(Duration::from_millis(250));
    client.set_read_timeout(limit).unwrap();
    client.set_write_timeout(limit).unwrap();
    assert_eq!(client.read_timeout().unwrap(), limit);
    assert_eq!(client.write_timeout().unwrap(), limit);
    let zero = Some(Duration::ZERO);
    assert_eq!(client.set_read_timeout(zero).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(client.set_write_timeout(zero).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(client.read_timeout().unwrap(), limit, "a refused limit changes nothing");
}

fn data_ends_a_read_before_its_limit(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_read_timeout(Some(test_timeout())).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            send_all(&server, b"here");
        });
        let start = Instant::now();
        assert_eq!(read_exactly(&client, 4), b"here");
        assert!(start.elapsed() < test_timeout() / 2);
    });
}

fn calls_that_do_not_wait_say_so(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_nonblocking(true).unwrap();
    assert_eq!(client.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(client.peek(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    send_all(&server, b"data");
    let mut buf = [0; 8];
    let start = Instant::now();
    let n = loop {
        match client.recv(&mut buf) {
            Ok(n) => break n,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(start.elapsed() < test_timeout());
    };
    assert_eq!(&buf[..n], b"data");
    drop(server);
    let start = Instant::now();
    while client.recv(&mut buf).is_err() {
        assert!(start.elapsed() < test_timeout(), "the end of data does not come");
    }
    assert_eq!(client.recv(&mut buf).unwrap(), 0);
}

fn a_stream_can_wait_again(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let sent = stuff(&client);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            read_exactly(&server, sent + 3);
        });
        send_all(&client, b"end");
    });
}

fn a_listener_that_does_not_wait_says_so(site: &Site) {
    let pair = site.pair();
    pair.listener.set_nonblocking(true).unwrap();
    assert_eq!(pair.listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    thread::scope(|scope| {
        let connecting = scope.spawn(|| pair.client.connect(pair.addr()).unwrap());
        let start = Instant::now();
        let (server, from) = loop {
            match pair.listener.accept() {
                Ok(accepted) => break accepted,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            assert!(start.elapsed() < test_timeout(), "nobody comes");
            thread::yield_now();
        };
        let client = connecting.join().unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        // Whether the listener waits says nothing of its connections.
        send_all(&client, b"hi");
        assert_eq!(read_exactly(&server, 2), b"hi");
    });
}

fn connecting_in_time_works(site: &Site) {
    let pair = site.pair();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| pair.listener.accept().unwrap().0);
        let addr = pair.addr();
        let client = pair.client.connect_timeout(addr, test_timeout()).unwrap();
        let server = accepting.join().unwrap();
        send_all(&server, b"welcome");
        assert_eq!(read_exactly(&client, 7), b"welcome");
    });
}

fn late_data_wakes_a_sleeping_reader_at_once(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let mut wakes = Vec::new();
    for round in 0..20 {
        let woken = thread::scope(|scope| {
            let reading = scope.spawn(|| read_exactly(&server, 1));
            // Long enough for the reader to be fast asleep.
            thread::sleep(Duration::from_millis(5 + round % 3 * 10));
            let sent = Stopwatch::start();
            send_all(&client, b"x");
            reading.join().unwrap();
            sent.elapsed()
        });
        wakes.push(woken);
    }
    assert_prompt(&wakes);
}
