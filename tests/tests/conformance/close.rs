// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How connections end, in order and out of order.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use smc_test_support::Stopwatch;
use smc_tests::end::{End, Site};
use smc_tests::{eventually, note, pattern, read_exactly, send_all, slowly, slurp, test_timeout};

on_every_fabric! {
    a_half_close_is_end_of_data_and_the_other_half_works_on
    data_comes_before_the_end_of_data
    shutdown_of_both_halves_ends_both
    reads_end_after_an_own_shutdown_of_the_read_half
    writes_fail_after_an_own_shutdown
    writes_fail_after_the_peer_has_closed
    a_second_shutdown_does_no_harm
    unread_data_at_close_resets_the_peer
    half_closed_with_unread_data_still_resets
    linger_of_zero_resets_the_peer
    linger_waits_for_the_peer_to_read
    linger_does_not_wait_longer_than_asked
    a_close_in_the_background_loses_nothing
    both_sides_close_at_once
    a_blocked_reader_hears_of_the_close
    a_blocked_reader_hears_of_an_own_shutdown
    a_blocked_writer_hears_of_a_reset
    a_blocked_writer_hears_of_an_own_shutdown
    the_last_clone_closes
    an_error_is_reported_once_by_take_error
}

fn is_reset(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted)
}

/// Reads to the end, expected to be a reset.
#[track_caller]
fn await_reset(stream: &End) {
    note("waits for a reset");
    stream.set_read_timeout(Some(test_timeout())).unwrap();
    let mut buf = [0; 4096];
    let error = loop {
        match stream.recv(&mut buf) {
            Ok(0) => panic!("an orderly end instead of a reset"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

// Shows: CLOSE-7, CLOSE-15.
fn a_half_close_is_end_of_data_and_the_other_half_works_on(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    send_all(&client, b"question");
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(slurp(&server), b"question");
    assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0, "the end stays");
    let answer = pattern(1, 300_000);
    thread::scope(|scope| {
        scope.spawn(|| send_all(&server, &answer));
        assert!(read_exactly(&client, answer.len()) == answer);
    });
    server.shutdown(Shutdown::Write).unwrap();
    assert!(slurp(&client).is_empty());
}

// Shows: CLOSE-18.
fn data_comes_before_the_end_of_data(site: &Site) {
    let pair = site.pair();
    for len in [1, 1000, 60_000] {
        let (client, server) = pair.connect();
        let bytes = pattern(len as u64, len);
        send_all(&client, &bytes);
        drop(client);
        thread::sleep(Duration::from_millis(10));
        assert!(slurp(&server) == bytes);
        assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
    }
}

// Shows: CLOSE-17.
fn shutdown_of_both_halves_ends_both(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.shutdown(Shutdown::Both).unwrap();
    assert!(slurp(&server).is_empty());
    assert!(slurp(&client).is_empty());
    assert_eq!(client.send(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
}

// Shows: CLOSE-16.
fn reads_end_after_an_own_shutdown_of_the_read_half(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.shutdown(Shutdown::Read).unwrap();
    assert_eq!(client.recv(&mut [0; 8]).unwrap(), 0);
    // The other half is unchanged.
    send_all(&client, b"still here");
    assert_eq!(read_exactly(&server, 10), b"still here");
}

fn writes_fail_after_an_own_shutdown(site: &Site) {
    let pair = site.pair();
    let (client, _server) = pair.connect();
    client.shutdown(Shutdown::Write).unwrap();
    for _ in 0..2 {
        assert_eq!(client.send(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}

// Shows: CLOSE-43.
fn writes_fail_after_the_peer_has_closed(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    drop(server);
    note("writes until it fails");
    let start = Instant::now();
    // TCP accepts a write or two before the news.
    let error = loop {
        match client.send(b"x") {
            Ok(_) => thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
        assert!(start.elapsed() < test_timeout(), "writes go on for ever");
    };
    assert!(error.kind() == ErrorKind::BrokenPipe || is_reset(&error), "{error}");
    assert!(client.send(b"x").is_err());
}

fn a_second_shutdown_does_no_harm(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.shutdown(Shutdown::Write).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    send_all(&server, b"fine");
    assert_eq!(read_exactly(&client, 4), b"fine");
}

// Shows: CLOSE-4.
fn unread_data_at_close_resets_the_peer(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    send_all(&client, b"nobody reads this");
    eventually("the data is there", || server.readable().unwrap() > 0);
    drop(server);
    await_reset(&client);
    let error = client.send(b"x").unwrap_err();
    assert!(error.kind() == ErrorKind::BrokenPipe || is_reset(&error), "{error}");
}

// Shows: CLOSE-41.
fn half_closed_with_unread_data_still_resets(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    server.shutdown(Shutdown::Write).unwrap();
    send_all(&client, b"nobody reads this");
    eventually("the data is there", || server.readable().unwrap() > 0);
    drop(server);
    // The end of data came first: a reader sees the end, then the writer the reset.
    let start = Instant::now();
    loop {
        match client.send(b"x") {
            Ok(_) => thread::sleep(Duration::from_millis(1)),
            Err(error) if is_reset(&error) || error.kind() == ErrorKind::BrokenPipe => break,
            Err(error) => panic!("{error}"),
        }
        assert!(start.elapsed() < test_timeout(), "writes go on for ever");
    }
}

// Shows: CLOSE-21.
fn linger_of_zero_resets_the_peer(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    server.set_linger(Some(Duration::ZERO)).unwrap();
    drop(server);
    await_reset(&client);
}

fn linger_waits_for_the_peer_to_read(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_linger(Some(test_timeout())).unwrap();
    let bytes = pattern(4, 50_000);
    send_all(&client, &bytes);
    thread::scope(|scope| {
        let closing = scope.spawn(move || drop(client));
        thread::sleep(Duration::from_millis(100));
        if site.is_smc() {
            // TCP is content when the peer's kernel has the bytes.
            assert!(!closing.is_finished(), "did not wait for the reader");
        }
        assert!(slurp(&server) == bytes);
        drop(server);
        note("waits for the lingering close");
        closing.join().unwrap();
    });
}

fn linger_does_not_wait_longer_than_asked(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_linger(Some(Duration::from_secs(1))).unwrap();
    send_all(&client, b"unread");
    let (start, soon) = (Instant::now(), Stopwatch::start());
    drop(client);
    assert!(soon.elapsed() < slowly(Duration::from_secs(10)), "{:?}", start.elapsed());
    if site.is_smc() {
        assert!(start.elapsed() >= Duration::from_millis(900), "{:?}", start.elapsed());
    }
    assert_eq!(slurp(&server), b"unread");
}

// Shows: CLOSE-5.
fn a_close_in_the_background_loses_nothing(site: &Site) {
    let pair = site.pair();
    let (mut client, server) = pair.connect();
    let bytes = pattern(8, 500_000);
    let copy = bytes.clone();
    let writer = thread::spawn(move || {
        client.write_all(&copy).unwrap();
        drop(client);
    });
    thread::sleep(Duration::from_millis(30));
    assert!(slurp(&server) == bytes);
    writer.join().unwrap();
}

// Shows: CLOSE-19.
fn both_sides_close_at_once(site: &Site) {
    let pair = site.pair();
    for _ in 0..20 {
        let (client, server) = pair.connect();
        thread::scope(|scope| {
            scope.spawn(move || drop(client));
            scope.spawn(move || drop(server));
        });
    }
    eventually("all are gone", || {
        pair.server.totals().closing == 0 && pair.client.totals().closing == 0
    });
}

// Shows: CLOSE-10.
fn a_blocked_reader_hears_of_the_close(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    thread::scope(|scope| {
        let reading = scope.spawn(|| slurp(&client));
        thread::sleep(Duration::from_millis(50));
        drop(server);
        assert!(reading.join().unwrap().is_empty());
    });
}

fn a_blocked_reader_hears_of_an_own_shutdown(site: &Site) {
    let pair = site.pair();
    let (client, _server) = pair.connect();
    thread::scope(|scope| {
        let reading = scope.spawn(|| slurp(&client));
        thread::sleep(Duration::from_millis(50));
        let start = Stopwatch::start();
        client.shutdown(Shutdown::Read).unwrap();
        assert!(reading.join().unwrap().is_empty());
        println!("woken after {:?}", start.elapsed());
        assert!(start.elapsed() < slowly(Duration::from_secs(3)));
    });
}

// Shows: SOCK-20.
fn a_blocked_writer_hears_of_a_reset(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    thread::scope(|scope| {
        let writing = scope.spawn(|| {
            note("writes until it fails");
            let mut client = &client;
            client.write_all(&vec![1; 64 << 20]).unwrap_err()
        });
        thread::sleep(Duration::from_millis(50));
        let start = Stopwatch::start();
        // Full of unread data: closing resets.
        drop(server);
        let error = writing.join().unwrap();
        println!("woken after {:?}: {error}", start.elapsed());
        assert!(is_reset(&error) || error.kind() == ErrorKind::BrokenPipe, "{error}");
        assert!(start.elapsed() < slowly(Duration::from_secs(3)));
    });
}

fn a_blocked_writer_hears_of_an_own_shutdown(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    thread::scope(|scope| {
        let writing = scope.spawn(|| {
            note("writes until it is told to stop");
            let mut client = &client;
            client.write_all(&vec![1; 64 << 20]).unwrap_err().kind()
        });
        thread::sleep(Duration::from_millis(100));
        let start = Stopwatch::start();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(writing.join().unwrap(), ErrorKind::BrokenPipe);
        println!("woken after {:?}", start.elapsed());
        assert!(start.elapsed() < slowly(Duration::from_secs(3)));
    });
    // Earlier bytes arrive.
    assert!(slurp(&server).iter().all(|byte| *byte == 1));
}

fn the_last_clone_closes(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let clone = client.try_clone().unwrap();
    drop(client);
    send_all(&clone, b"open");
    assert_eq!(read_exactly(&server, 4), b"open");
    drop(clone);
    assert!(slurp(&server).is_empty());
}

// Shows: SOCK-20.
fn an_error_is_reported_once_by_take_error(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    assert!(client.take_error().unwrap().is_none());
    server.set_linger(Some(Duration::ZERO)).unwrap();
    drop(server);
    let mut found = None;
    eventually("the error is there", || {
        found = client.take_error().unwrap();
        found.is_some()
    });
    assert_eq!(found.map(|error| error.kind()), Some(ErrorKind::ConnectionReset));
    assert!(client.take_error().unwrap().is_none());
}
