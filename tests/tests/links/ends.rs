// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ends, urgent bytes and readiness in the view of programs, after the loss of the last link.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::AsFd;

use guest_driver::SmcStream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, pattern, read_exactly, send_all, watched};

use crate::scene::{LOSSES, Loss, Scene, Terms};

fn shows(stream: &SmcStream, flags: PollFlags) -> bool {
    let pollable = stream.pollable_exact().unwrap();
    let mut fds = [PollFd::from_borrowed_fd(pollable.as_fd(), flags)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

fn with_each(test: impl Fn(&mut Scene, Loss)) {
    for (seed, loss) in (0..).zip(LOSSES) {
        // The last bytes sent arrive, in part, or are lost.
        for seed in [seed, seed + 10, seed + 20] {
            watched(LIMIT, || test(&mut Scene::new(Terms::default(), seed), loss));
        }
    }
}

#[test]
fn a_program_sees_no_difference_after_its_connection_has_lost_its_links() {
    with_each(|scene, loss| {
        let [client, server] = scene.connect();
        let bytes = pattern(3, 50_000);
        scene.hold();
        send_all(&client, &bytes);
        scene.lose(loss);
        send_all(&server, b"from the server");
        assert_eq!(read_exactly(&client, 15), b"from the server");
        assert!(!shows(&client, PollFlags::IN));
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
        assert!(client.take_error().unwrap().is_none());
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(server.recv(&mut [0; 9]).unwrap(), 0);
        send_all(&server, b"later");
        drop(server);
        eventually("the last bytes are there", || client.readable().unwrap() == 5);
        assert_eq!(client.recv(&mut [0; 9]).unwrap(), 5);
        eventually("the end shows", || matches!(client.recv(&mut [0; 9]), Ok(0)));
    });
}

#[test]
fn an_urgent_byte_keeps_its_place() {
    with_each(|scene, loss| {
        let [client, server] = scene.connect();
        scene.hold();
        send_all(&client, b"before");
        client.send_urgent(b'!').unwrap();
        scene.lose(loss);
        eventually("the urgent byte is there", || {
            server.recv_urgent().is_ok_and(|byte| byte == b'!')
        });
        assert_eq!(read_exactly(&server, 6), b"before");
        assert_eq!(server.at_mark().unwrap(), Some(true));
        send_all(&client, b"after");
        assert_eq!(read_exactly(&server, 5), b"after");
        assert_eq!(server.at_mark().unwrap(), Some(false));
        client.send_urgent(b'?').unwrap();
        eventually("the second one is there", || {
            server.recv_urgent().is_ok_and(|byte| byte == b'?')
        });
    });
}

#[test]
fn an_end_that_was_said_on_the_link_is_said_again() {
    with_each(|scene, loss| {
        let [client, server] = scene.connect();
        scene.hold();
        send_all(&client, b"all of it");
        client.shutdown(Shutdown::Write).unwrap();
        scene.lose(loss);
        assert_eq!(read_exactly(&server, 9), b"all of it");
        assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
        send_all(&server, b"answer");
        assert_eq!(read_exactly(&client, 6), b"answer");
        drop(server);
        assert_eq!(client.recv(&mut [0; 1]).unwrap(), 0);
    });
}

#[test]
fn a_close_that_was_said_on_the_link_is_an_end() {
    with_each(|scene, loss| {
        let [client, server] = scene.connect();
        scene.hold();
        send_all(&client, b"all of it");
        drop(client);
        scene.lose(loss);
        assert_eq!(read_exactly(&server, 9), b"all of it");
        assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
        drop(server);
        for stack in &scene.stacks {
            eventually("nothing is left", || stack.totals().closing == 0);
        }
    });
}

#[test]
fn an_abort_that_was_said_on_the_link_is_a_reset() {
    with_each(|scene, loss| {
        let [client, server] = scene.connect();
        send_all(&server, b"unread");
        eventually("it has come", || client.readable().unwrap() == 6);
        scene.hold();
        drop(client);
        scene.lose(loss);
        let end = server.recv(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(end, Err(ErrorKind::ConnectionReset));
    });
}

#[test]
fn without_the_option_at_both_ends_the_last_link_is_the_end() {
    let terms = [
        Terms { outlive: [false, true], ..Terms::default() },
        Terms { outlive: [true, false], ..Terms::default() },
        Terms { release_2_0: true, ..Terms::default() },
    ];
    for terms in terms {
        for loss in LOSSES {
            watched(LIMIT, || {
                let mut scene = Scene::new(terms, 1);
                let [client, server] = scene.connect();
                send_all(&client, b"one");
                assert_eq!(read_exactly(&server, 3), b"one");
                scene.lose(loss);
                // An end with nothing to send hears by the other end's reset of TCP.
                for end in [&client, &server] {
                    let end = end.recv(&mut [0; 1]).map_err(|error| error.kind());
                    assert_eq!(end, Err(ErrorKind::ConnectionReset), "{terms:?}");
                }
            });
        }
    }
}
