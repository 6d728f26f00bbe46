// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How much a program may write before anybody reads: as much as TCP's buffers take.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use smc_tests::bytes::{check, fill};
use smc_tests::end::{End, Site};
use smc_tests::{eventually, note, pattern, read_exactly, send_all, slurp, test_timeout};

on_every_fabric! {
    megabytes_are_written_before_the_peer_reads
    both_ends_write_before_they_read
    an_echo_may_be_written_as_a_whole_before_it_is_read
    what_waits_arrives_although_the_writer_has_closed
    what_waits_arrives_although_the_writer_has_ended_its_direction
    a_peer_that_closes_resets_a_writer_whose_bytes_wait
    a_writer_goes_on_as_the_peer_reads
}

/// Polls of the client's descriptors.
mod client {
    use super::{edge_triggered_room_comes_while_nobody_reads, poll_shows_room_while_nobody_reads};

    with_the_client_here! {
        poll_shows_room_while_nobody_reads
        edge_triggered_room_comes_while_nobody_reads
    }
}

/// Tests of features or reports of SMC only.
mod smc {
    use super::{
        a_send_buffer_bounds_what_waits, a_thread_that_polls_sees_room_while_nobody_reads,
        room_is_shown_again_when_the_peer_stops_reading,
        urgent_bytes_between_megabytes_keep_their_place,
    };

    on_smc_in_this_process! {
        a_send_buffer_bounds_what_waits
        a_thread_that_polls_sees_room_while_nobody_reads
        room_is_shown_again_when_the_peer_stops_reading
        urgent_bytes_between_megabytes_keep_their_place
    }
}

/// More than the rings hold, and less than TCP's buffers.
const MUCH: usize = 7 << 19;

/// Writes every byte, without a reader.
#[track_caller]
fn write_ahead(stream: &End, seed: u64, len: usize) {
    thread::scope(|scope| {
        let writer = scope.spawn(|| send_all(stream, &pattern(seed, len)));
        eventually("all bytes are written", || writer.is_finished());
    });
}

fn read_and_check(stream: &End, seed: u64, len: usize) {
    let bytes = read_exactly(stream, len);
    check(seed, 0, &bytes);
}

fn megabytes_are_written_before_the_peer_reads(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    write_ahead(&client, 1, MUCH);
    send_all(&server, b"not read yet");
    read_and_check(&server, 1, MUCH);
    assert_eq!(read_exactly(&client, 12), b"not read yet");
    // Everything as before.
    send_all(&client, b"and on");
    assert_eq!(read_exactly(&server, 6), b"and on");
}

fn both_ends_write_before_they_read(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    for round in 0..2 {
        thread::scope(|scope| {
            for (end, seeds) in [(&client, [1, 2]), (&server, [2, 1])] {
                scope.spawn(move || {
                    send_all(end, &pattern(round + seeds[0], MUCH));
                    note("has written");
                    read_and_check(end, round + seeds[1], MUCH);
                });
            }
        });
    }
}

fn an_echo_may_be_written_as_a_whole_before_it_is_read(site: &Site) {
    let pair = site.pair();
    let (client, mut server) = pair.connect();
    let len = 2 * MUCH;
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut left, mut buf) = (len, vec![0; 64 << 10]);
            while left > 0 {
                let n = server.read(&mut buf).unwrap();
                assert!(n > 0, "the stream ended with {left} bytes to come");
                server.write_all(&buf[..n]).unwrap();
                left -= n;
            }
        });
        send_all(&client, &pattern(3, len));
        note("has written");
        read_and_check(&client, 3, len);
    });
}

fn what_waits_arrives_although_the_writer_has_closed(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    write_ahead(&client, 4, MUCH);
    drop(client);
    thread::sleep(Duration::from_millis(50));
    read_and_check(&server, 4, MUCH);
    assert!(slurp(&server).is_empty());
}

fn what_waits_arrives_although_the_writer_has_ended_its_direction(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    write_ahead(&client, 5, MUCH);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.send(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    send_all(&server, b"answer");
    read_and_check(&server, 5, MUCH);
    assert!(slurp(&server).is_empty());
    drop(server);
    assert_eq!(slurp(&client), b"answer");
}

fn a_peer_that_closes_resets_a_writer_whose_bytes_wait(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    write_ahead(&client, 6, MUCH);
    drop(server);
    let ended = || match client.send(b"x") {
        Err(error) => {
            matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
        }
        Ok(_) => false,
    };
    eventually("writes fail", ended);
}

fn a_writer_goes_on_as_the_peer_reads(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let len = 4 * MUCH;
    thread::scope(|scope| {
        scope.spawn(|| send_all(&client, &pattern(7, len)));
        let mut at = 0;
        // The reader pauses again and again, longer than the writer's wait for a reader.
        while at < len {
            if at % (1 << 20) < 60_000 {
                thread::sleep(Duration::from_millis(5));
            }
            let piece = read_exactly(&server, 50_000.min(len - at));
            check(7, at, &piece);
            at += piece.len();
        }
    });
    send_all(&client, b"and on");
    assert_eq!(read_exactly(&server, 6), b"and on");
}

/// Writes without waiting until `len` bytes are written. `await_room` waits for room, for a moment at
/// most.
fn write_by_turns(client: &End, len: usize, mut await_room: impl FnMut()) {
    client.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let (mut at, mut piece) = (0, vec![0; 60_000]);
    while at < len {
        fill(8, at, &mut piece);
        match client.send(&piece[..piece.len().min(len - at)]) {
            Ok(n) => at += n,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                assert!(begun.elapsed() < test_timeout(), "no room after {at} bytes");
                await_room();
            }
        }
    }
}

fn poll_shows_room_while_nobody_reads(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    write_by_turns(&client, MUCH, || {
        let fd = client.stream().pollable().unwrap();
        let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
        let limit = rustix::event::Timespec { tv_sec: test_timeout().as_secs() as i64, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "no room");
    });
    read_and_check(&server, 8, MUCH);
}

fn edge_triggered_room_comes_while_nobody_reads(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let flags = EventFlags::OUT | EventFlags::ET;
    let fd = client.stream().pollable().unwrap();
    epoll::add(&set, fd.as_fd(), EventData::new_u64(0), flags).unwrap();
    write_by_turns(&client, MUCH, || {
        let limit = rustix::event::Timespec { tv_sec: test_timeout().as_secs() as i64, tv_nsec: 0 };
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 4];
        let (found, _) = epoll::wait(&set, &mut events, Some(&limit)).unwrap();
        assert_eq!(found.len(), 1, "no edge");
    });
    read_and_check(&server, 8, MUCH);
}

fn a_thread_that_polls_sees_room_while_nobody_reads(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let poller = guest_driver::Poller::new(Duration::ZERO).unwrap();
    let interest = guest_driver::Interest { readable: false, writable: true };
    poller.add(client.stream(), 1, interest).unwrap();
    let mut ready = Vec::new();
    write_by_turns(&client, MUCH, || {
        ready.clear();
        poller.wait(&mut ready, 4, Some(test_timeout())).unwrap();
        assert_eq!(ready.len(), 1, "no room");
    });
    read_and_check(&server, 8, MUCH);
}

/// Writes without waiting until there is no more room; returns the bytes written.
fn fill_up(client: &End) -> usize {
    client.set_nonblocking(true).unwrap();
    let (mut sent, mut refused) = (0, 0);
    while refused < 20 {
        match client.send(&[7; 10_000]) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(_) => {
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    sent
}

/// The background thread may have seen room in between, without any poll at the time.
fn room_is_shown_again_when_the_peer_stops_reading(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let sent = fill_up(&client);
    let poller = guest_driver::Poller::new(Duration::ZERO).unwrap();
    let interest = guest_driver::Interest { readable: false, writable: true };
    poller.add(client.stream(), 1, interest).unwrap();
    let mut left = sent - sent / 2;
    read_exactly(&server, sent / 2);
    while left > 400_000 {
        thread::sleep(Duration::from_millis(20));
        read_exactly(&server, 100_000);
        left -= 100_000;
        let mut ready = Vec::new();
        poller.wait(&mut ready, 4, Some(test_timeout())).unwrap();
        assert_eq!(ready.len(), 1, "no room, and {left} bytes are unread");
    }
}

fn a_send_buffer_bounds_what_waits(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    client.stream().set_send_buffer(1 << 20);
    let sent = fill_up(&client);
    let most = (1 << 20) + site.fabric().room().min(128 << 10);
    assert!(sent <= most && sent > most - 20_000, "{sent} bytes of {most}");
    assert_eq!(client.unread_by_peer(), Some(sent));
    assert!(client.stream().queued() > 0);
    assert!(read_exactly(&server, sent).iter().all(|byte| *byte == 7));
    eventually("nothing waits", || client.stream().queued() == 0);
}

fn urgent_bytes_between_megabytes_keep_their_place(site: &Site) {
    let pair = site.pair();
    let (client, mut server) = pair.connect();
    server.set_oob_inline(true).unwrap();
    let bytes = pattern(9, MUCH);
    let (first, second) = bytes.split_at(MUCH / 2);
    send_all(&client, first);
    client.send_urgent(b'!').unwrap();
    send_all(&client, second);
    let mut got = Vec::new();
    let mut marks = Vec::new();
    let mut buf = vec![0; 100_000];
    while got.len() < MUCH + 1 {
        if server.at_mark().unwrap() == Some(true) && marks.last() != Some(&got.len()) {
            marks.push(got.len());
        }
        let n = server.read(&mut buf).unwrap();
        assert!(n > 0);
        got.extend_from_slice(&buf[..n]);
    }
    assert!(got[..first.len()] == *first && got[first.len()] == b'!');
    assert!(got[first.len() + 1..] == *second);
    assert_eq!(marks, [first.len()]);
}
