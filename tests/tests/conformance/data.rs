// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes arrive: all of them, once, in order.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::thread;
use std::time::Duration;

use smc_test_support::Stopwatch;
use smc_tests::bytes::{check, fill};
use smc_tests::end::Site;
use smc_tests::{eventually, fewer, note, pattern, read_exactly, send_all, slowly, slurp};

on_every_fabric! {
    writes_of_every_size_arrive_whole
    sixteen_megabytes_arrive_in_order
    pieces_of_odd_sizes_wrap_the_ring_many_times
    reads_take_what_is_there_and_no_more
    a_slow_reader_stops_the_writer_and_loses_nothing
    a_write_without_waiting_is_partial
    vectored_writes_and_reads_keep_the_order
    peeked_bytes_stay
    a_read_across_the_end_of_the_ring_is_one_read_exact
    a_writer_goes_on_although_the_reader_is_busy_elsewhere
    both_directions_flow_at_the_same_time
    single_bytes_go_back_and_forth
    the_number_of_waiting_bytes_is_known
    data_that_looks_like_a_handshake_is_data
}

/// A read of no bytes waits for data with TCP.
mod smc {
    use super::empty_reads_and_writes_do_nothing;

    on_smc! {
        empty_reads_and_writes_do_nothing
    }
}

/// SMC-D's ring of the default receive buffer, bytes.
const RING: usize = (64 << 10) - 32;

// Shows: CLC-1, CLC-32, SOCK-3.
fn writes_of_every_size_arrive_whole(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let sizes = [1, 2, 7, 8, 9, 31, 32, 33, 4095, 4096, 16 << 10, RING - 1, RING, RING + 1]
        .into_iter()
        .chain([64 << 10, 2 * RING + 1, 1_000_003]);
    for (seed, len) in sizes.enumerate() {
        let bytes = pattern(seed as u64, len);
        thread::scope(|scope| {
            scope.spawn(|| send_all(&client, &bytes));
            assert!(read_exactly(&server, len) == bytes, "{len} bytes");
            // The same way back.
            scope.spawn(|| send_all(&server, &bytes));
            assert!(read_exactly(&client, len) == bytes, "{len} bytes back");
        });
    }
}

fn sixteen_megabytes_arrive_in_order(site: &Site) {
    const LEN: usize = 16 << 20;
    let pair = site.pair();
    let (mut client, mut server) = pair.connect();
    let writer = thread::spawn(move || {
        let mut piece = vec![0; 256 << 10];
        for at in (0..LEN).step_by(piece.len()) {
            note(format!("writes at {at}"));
            fill(3, at, &mut piece);
            client.write_all(&piece).unwrap();
        }
    });
    let (mut at, mut buf) = (0, vec![0; 100_000]);
    loop {
        note(format!("reads at {at}"));
        let n = server.read(&mut buf).unwrap();
        if n == 0 {
            break;
        }
        check(3, at, &buf[..n]);
        at += n;
    }
    assert_eq!(at, LEN);
    writer.join().unwrap();
}

// Shows: CDC-17.
fn pieces_of_odd_sizes_wrap_the_ring_many_times(site: &Site) {
    // A small ring, and sizes without a common divisor with the ring's or with each other.
    let pair = site.pair_with(|config| config.recv_buffer = 16 << 10);
    let (mut client, mut server) = pair.connect();
    const LEN: usize = 997 * 1009;
    let writer = thread::spawn(move || {
        let (mut at, mut piece) = (0, vec![0; 997]);
        while at < LEN {
            fill(5, at, &mut piece);
            client.write_all(&piece).unwrap();
            at += piece.len();
        }
    });
    let (mut at, mut buf) = (0, vec![0; 1013]);
    while at < LEN {
        let n = server.read(&mut buf).unwrap();
        assert!(n > 0, "the stream ended at {at}");
        check(5, at, &buf[..n]);
        at += n;
    }
    writer.join().unwrap();
    assert_eq!(server.read(&mut buf).unwrap(), 0);
}

fn reads_take_what_is_there_and_no_more(site: &Site) {
    let pair = site.pair();
    let (client, mut server) = pair.connect();
    send_all(&client, b"hello");
    let mut buf = [0; 100];
    assert_eq!(server.read(&mut buf).unwrap(), 5);
    assert_eq!(&buf[..5], b"hello");
    send_all(&client, b"abcdef");
    eventually("six bytes are there", || server.readable().unwrap() == 6);
    assert_eq!(server.read(&mut buf[..4]).unwrap(), 4);
    assert_eq!(server.read(&mut buf).unwrap(), 2);
    assert_eq!(&buf[..2], b"ef");
}

fn a_slow_reader_stops_the_writer_and_loses_nothing(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_nonblocking(true).unwrap();
    // Until nothing more goes in, for a while: TCP has buffers here and there.
    let (mut sent, mut piece) = (0, vec![0; 5000]);
    let mut refused = 0;
    while refused < 20 {
        fill(1, sent, &mut piece);
        match client.send(&piece) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(sent < 64 << 20, "nothing stops the writer");
    }
    if site.is_smc() {
        let room = site.fabric().room() + (4 << 20);
        assert_eq!(sent, room, "the room in ring and queue is used to the byte");
        assert_eq!(client.unread_by_peer(), Some(room));
    }
    // A reader of small pieces, with the writer blocked in between.
    client.set_nonblocking(false).unwrap();
    let rest = 200_000;
    let total = sent + rest;
    thread::scope(|scope| {
        let (from, client) = (sent, client);
        scope.spawn(move || {
            let mut bytes = vec![0; rest];
            fill(1, from, &mut bytes);
            send_all(&client, &bytes);
        });
        let mut at = 0;
        while at < total {
            let piece = read_exactly(&server, 1_777.min(total - at));
            check(1, at, &piece);
            at += piece.len();
        }
    });
    assert!(slurp(&server).is_empty());
}

// Shows: CDC-27.
fn a_write_without_waiting_is_partial(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_nonblocking(true).unwrap();
    let bytes = pattern(9, 32 << 20);
    let n = client.send(&bytes).unwrap();
    assert!(n > 0 && n < bytes.len(), "{n} bytes of {}", bytes.len());
    if site.is_smc() {
        assert_eq!(n, site.fabric().room());
    }
    assert!(read_exactly(&server, n) == bytes[..n]);
}

// Shows: SOCK-3.
fn vectored_writes_and_reads_keep_the_order(site: &Site) {
    let pair = site.pair();
    let (mut client, mut server) = pair.connect();
    let bytes = pattern(2, 150_000);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Slices of growing sizes, empty ones among them, more than fit into one delivery.
            let mut at = 0;
            while at < bytes.len() {
                let mut slices = Vec::new();
                let mut end = at;
                for i in 0..50 {
                    let next = (end + i * 37).min(bytes.len());
                    slices.push(IoSlice::new(&bytes[end..next]));
                    end = next;
                }
                let n = client.write_vectored(&slices).unwrap();
                assert!(n > 0);
                at += n;
            }
        });
        let mut at = 0;
        while at < bytes.len() {
            let (mut a, mut b, mut c) = ([0; 11], [0; 1], [0; 5000]);
            let mut slices = [
                IoSliceMut::new(&mut a),
                IoSliceMut::new(&mut []),
                IoSliceMut::new(&mut b),
                IoSliceMut::new(&mut c),
            ];
            let n = server.read_vectored(&mut slices).unwrap();
            let got: Vec<u8> = a.into_iter().chain(b).chain(c).take(n).collect();
            assert!(n > 0 && got == bytes[at..at + n], "at {at}");
            at += n;
        }
    });
}

// Shows: SOCK-3.
fn peeked_bytes_stay(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let mut buf = [0; 16];
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            send_all(&client, b"look");
        });
        // Waits for the first byte as a read does.
        let n = server.peek(&mut buf).unwrap();
        assert_eq!(&buf[..n], &b"look"[..n]);
    });
    for _ in 0..3 {
        assert_eq!(server.peek(&mut buf).unwrap(), 4);
        assert_eq!(&buf[..4], b"look");
    }
    assert_eq!(server.peek(&mut buf[..2]).unwrap(), 2);
    assert_eq!(read_exactly(&server, 4), b"look");
    drop(client);
    assert_eq!(server.peek(&mut buf).unwrap(), 0);
}

// Shows: CDC-18.
fn a_read_across_the_end_of_the_ring_is_one_read_exact(site: &Site) {
    let pair = site.pair_with(|config| config.recv_buffer = 16 << 10);
    let (client, server) = pair.connect();
    thread::scope(|scope| {
        // 10,000 of 16,352 bytes: every second or third message wraps.
        scope.spawn(|| (0..40).for_each(|round| send_all(&client, &pattern(round, 10_000))));
        for round in 0..40 {
            assert!(read_exactly(&server, 10_000) == pattern(round, 10_000), "round {round}");
        }
    });
}

fn a_writer_goes_on_although_the_reader_is_busy_elsewhere(site: &Site) {
    let pair = site.pair_with(|config| config.recv_buffer = 16 << 10);
    let (client, server) = pair.connect();
    // Less than half of the ring is read; the reader need not announce so little.
    send_all(&client, &pattern(1, 8000));
    assert!(read_exactly(&server, 8000) == pattern(1, 8000));
    // The unused rest of the ring, and then the part read already, while the reader makes no call.
    let start = Stopwatch::start();
    send_all(&client, &pattern(2, 16_352));
    println!("went on after {:?}", start.elapsed());
    assert!(start.elapsed() < slowly(Duration::from_secs(3)), "{:?}", start.elapsed());
    assert!(read_exactly(&server, 16_352) == pattern(2, 16_352));
}

// Shows: CLC-44, CDC-39.
fn both_directions_flow_at_the_same_time(site: &Site) {
    const LEN: usize = 2 << 20;
    let pair = site.pair();
    let (client, server) = pair.connect();
    thread::scope(|scope| {
        for (seed, from, to) in [(1, &client, &server), (2, &server, &client)] {
            scope.spawn(move || send_all(from, &pattern(seed, LEN)));
            scope.spawn(move || assert!(read_exactly(to, LEN) == pattern(seed, LEN)));
        }
    });
}

// Shows: CLC-41, CLC-42, CDC-25.
fn single_bytes_go_back_and_forth(site: &Site) {
    let rounds = fewer(2000);
    let pair = site.pair();
    let (mut client, mut server) = pair.connect();
    let echo = thread::spawn(move || {
        let mut byte = [0];
        for _ in 0..rounds {
            server.read_exact(&mut byte).unwrap();
            server.write_all(&byte).unwrap();
        }
    });
    for i in 0..rounds {
        note(format!("round {i}"));
        let mut byte = [0];
        client.write_all(&[i as u8]).unwrap();
        client.read_exact(&mut byte).unwrap();
        assert_eq!(byte[0], i as u8);
    }
    echo.join().unwrap();
}

fn empty_reads_and_writes_do_nothing(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    assert_eq!(client.send(&[]).unwrap(), 0);
    assert_eq!(server.recv(&mut []).unwrap(), 0);
    send_all(&client, b"x");
    assert_eq!(server.recv(&mut []).unwrap(), 0);
    assert_eq!(read_exactly(&server, 1), b"x");
}

fn the_number_of_waiting_bytes_is_known(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    assert_eq!(server.readable().unwrap(), 0);
    send_all(&client, &[1; 1234]);
    eventually("1234 bytes wait", || server.readable().unwrap() == 1234);
    if site.is_smc() {
        assert_eq!(client.unread_by_peer(), Some(1234));
    }
    read_exactly(&server, 1000);
    assert_eq!(server.readable().unwrap(), 234);
}

fn data_that_looks_like_a_handshake_is_data(site: &Site) {
    let config = smc_tests::raw::host(&[(0xff00, 1)]);
    let (_, proposal) = smc_tests::raw::proposal(&config);
    let pair = site.pair();
    let (client, server) = pair.connect();
    for (from, to) in [(&client, &server), (&server, &client)] {
        send_all(from, &proposal);
        assert!(read_exactly(to, proposal.len()) == proposal);
    }
}
