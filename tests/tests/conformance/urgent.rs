// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Urgent data (RFC 7609 sections 4.7.5 and 4.7.6).

use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use smc_tests::end::{End, Site};
use smc_tests::{eventually, note, pattern, read_exactly, send_all, test_timeout};

on_every_fabric! {
    the_urgent_byte_comes_out_of_band_and_reads_stop_at_it
    without_urgent_data_there_is_none
    an_urgent_byte_is_taken_once
    an_urgent_byte_alone_can_be_taken
    in_line_the_byte_stays_in_the_stream
    many_urgent_bytes_in_a_stream
}

/// Tests of features or reports of SMC only.
mod smc {
    use super::{
        a_closed_window_does_not_keep_the_news,
        bytes_behind_an_urgent_one_arrive_although_the_writer_has_closed,
        normal_data_waits_for_the_urgent_byte, the_mark_is_told,
        urgent_bytes_that_cannot_be_sent_are_taken_back,
    };

    on_smc! {
        the_mark_is_told
        normal_data_waits_for_the_urgent_byte
        bytes_behind_an_urgent_one_arrive_although_the_writer_has_closed
        a_closed_window_does_not_keep_the_news
        urgent_bytes_that_cannot_be_sent_are_taken_back
    }
}

#[track_caller]
fn await_urgent(stream: &End) {
    eventually("urgent data is announced", || stream.has_urgent().unwrap());
}

// Shows: CDC-28, SOCK-8.
fn the_urgent_byte_comes_out_of_band_and_reads_stop_at_it(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    thread::scope(|scope| {
        scope.spawn(|| {
            send_all(&client, b"abc");
            client.send_urgent(b'!').unwrap();
            send_all(&client, b"def");
        });
        await_urgent(&server);
        let mut byte = server.recv_urgent();
        let start = Instant::now();
        while matches!(&byte, Err(e) if e.kind() == ErrorKind::WouldBlock) {
            assert!(start.elapsed() < test_timeout(), "the byte does not come");
            byte = server.recv_urgent();
        }
        assert_eq!(byte.unwrap(), b'!');
        let mut buf = [0; 16];
        assert_eq!(server.recv(&mut buf).unwrap(), 3, "a read stops at the mark");
        assert_eq!(&buf[..3], b"abc");
        assert_eq!(read_exactly(&server, 3), b"def");
    });
}

fn without_urgent_data_there_is_none(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    assert!(!server.has_urgent().unwrap());
    assert_eq!(server.recv_urgent().unwrap_err().kind(), ErrorKind::InvalidInput);
    send_all(&client, b"plain");
    read_exactly(&server, 5);
    assert_eq!(server.recv_urgent().unwrap_err().kind(), ErrorKind::InvalidInput);
}

fn an_urgent_byte_is_taken_once(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.send_urgent(b'u').unwrap();
    await_urgent(&server);
    eventually("the byte comes", || server.recv_urgent().is_ok_and(|byte| byte == b'u'));
    assert_eq!(server.recv_urgent().unwrap_err().kind(), ErrorKind::InvalidInput);
}

fn an_urgent_byte_alone_can_be_taken(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    for byte in *b"xyz" {
        client.send_urgent(byte).unwrap();
        eventually("the byte comes", || server.recv_urgent().is_ok_and(|got| got == byte));
        // The next data comes behind the urgent byte.
        send_all(&client, &[byte; 3]);
        assert_eq!(read_exactly(&server, 3), [byte; 3]);
    }
}

// Shows: SOCK-8.
fn in_line_the_byte_stays_in_the_stream(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    server.set_oob_inline(true).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            send_all(&client, b"abc");
            client.send_urgent(b'!').unwrap();
            send_all(&client, b"def");
        });
        assert_eq!(read_exactly(&server, 7), b"abc!def");
    });
    assert_eq!(server.recv_urgent().unwrap_err().kind(), ErrorKind::InvalidInput);
}

fn many_urgent_bytes_in_a_stream(site: &Site) {
    // In line nothing is lost, however the marks fall.
    let pair = site.pair_with(|config| config.recv_buffer = 16 << 10);
    let (client, server) = pair.connect();
    server.set_oob_inline(true).unwrap();
    let bytes = pattern(6, 200 * 501);
    thread::scope(|scope| {
        scope.spawn(|| {
            for piece in bytes.chunks(501) {
                let (last, most) = piece.split_last().unwrap();
                send_all(&client, most);
                client.send_urgent(*last).unwrap();
            }
        });
        assert!(read_exactly(&server, bytes.len()) == bytes);
    });
}

// Shows: SOCK-8.
fn the_mark_is_told(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    send_all(&client, b"abc");
    client.send_urgent(b'!').unwrap();
    await_urgent(&server);
    assert_eq!(server.at_mark().unwrap(), Some(false));
    assert_eq!(read_exactly(&server, 3), b"abc");
    assert_eq!(server.at_mark().unwrap(), Some(true));
    send_all(&client, b"d");
    assert_eq!(read_exactly(&server, 1), b"d");
    assert_eq!(server.at_mark().unwrap(), Some(false));
}

// Shows: CDC-33.
fn normal_data_waits_for_the_urgent_byte(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    send_all(&client, b"abc");
    client.send_urgent(b'!').unwrap();
    client.set_nonblocking(true).unwrap();
    // As on TCP, the writer does not wait; the bytes do.
    assert_eq!(client.send(b"x").unwrap(), 1);
    client.set_nonblocking(false).unwrap();
    assert_eq!(read_exactly(&server, 3), b"abc");
    eventually("the byte comes", || server.recv_urgent().is_ok_and(|byte| byte == b'!'));
    assert_eq!(read_exactly(&server, 1), b"x");
}

fn bytes_behind_an_urgent_one_arrive_although_the_writer_has_closed(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let bytes = pattern(3, 20_000);
    send_all(&client, b"abc");
    for byte in *b"!?" {
        client.send_urgent(byte).unwrap();
        send_all(&client, &bytes);
    }
    drop(client);
    thread::sleep(Duration::from_millis(5));
    assert_eq!(read_exactly(&server, 3), b"abc");
    assert!(read_exactly(&server, bytes.len()) == bytes);
    assert!(read_exactly(&server, bytes.len()) == bytes);
    let mut end = [0u8];
    assert_eq!(server.recv(&mut end).unwrap(), 0);
}

// Shows: CDC-31.
fn a_closed_window_does_not_keep_the_news(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_nonblocking(true).unwrap();
    let bytes = pattern(1, 1 << 20);
    let sent = client.send(&bytes).unwrap();
    client.set_nonblocking(false).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            note("sends an urgent byte into a closed window");
            client.send_urgent(b'?').unwrap();
        });
        await_urgent(&server);
        assert_eq!(server.recv_urgent().unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(read_exactly(&server, sent) == bytes[..sent]);
        eventually("the byte comes", || server.recv_urgent().is_ok_and(|byte| byte == b'?'));
    });
    send_all(&client, b"on");
    assert_eq!(read_exactly(&server, 2), b"on");
}

fn urgent_bytes_that_cannot_be_sent_are_taken_back(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.set_nonblocking(true).unwrap();
    let bytes = pattern(2, 6 << 20);
    // Until ring and queue are full.
    let (mut sent, mut refused) = (0, 0);
    while refused < 20 {
        match client.send(&bytes[sent..]) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(_) => {
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    assert_eq!(client.send_urgent(b'?').unwrap_err().kind(), ErrorKind::WouldBlock);
    client.set_nonblocking(false).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| send_all(&client, b"afterwards"));
        assert!(read_exactly(&server, sent) == bytes[..sent]);
        assert_eq!(read_exactly(&server, 10), b"afterwards");
    });
    assert_eq!(server.recv_urgent().unwrap_err().kind(), ErrorKind::InvalidInput);
}
