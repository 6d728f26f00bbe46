// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Costs avoided on TCP after a connection has left its ring: no record waits for an acknowledgement,
//! and no event loop waits for room already there.

use std::io::ErrorKind;
use std::os::fd::{OwnedFd, RawFd};

use guest_driver::SmcStream;
use rustix::net::{SocketAddrAny, getpeername, getsockname, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, pattern, read_exactly, send_all, watched};

use crate::outlive::{Loss, Scene};

/// The TCP socket of a stream; this process has its only descriptor.
fn tcp_of(stream: &SmcStream) -> OwnedFd {
    let (local, peer) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    let is_it = |fd: &OwnedFd| {
        getsockname(fd).is_ok_and(|at| at == SocketAddrAny::from(local))
            && getpeername(fd).is_ok_and(|at| at == Some(SocketAddrAny::from(peer)))
    };
    let me = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let names =
        std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.parse::<RawFd>().ok());
    // Threads of other tests close theirs.
    let mut all = numbers.filter_map(|n| pidfd_getfd(&me, n, PidfdGetfdFlags::empty()).ok());
    all.find(is_it).expect("the stream's socket")
}

// Nagle's algorithm would wait for the acknowledgement of the previous record, and the peer's kernel
// delays acknowledgements by 40 ms.
#[test]
fn records_do_not_wait_for_acknowledgements() {
    for loss in [Loss::Left, Loss::Killed] {
        watched(LIMIT, || {
            let mut scene = Scene::new();
            let (_stack, client, server) = scene.pair(true);
            client.set_nodelay(true).unwrap();
            for end in [&client, &server] {
                assert!(!sockopt::tcp_nodelay(tcp_of(end)).unwrap(), "nothing is sent so far");
            }
            scene.lose(loss);
            eventually("both ends have left", || {
                send_all(&client, b"there");
                assert_eq!(read_exactly(&server, 5), b"there");
                send_all(&server, b"and back");
                assert_eq!(read_exactly(&client, 8), b"and back");
                [&client, &server].iter().all(|end| sockopt::tcp_nodelay(tcp_of(end)).unwrap())
            });
            assert_eq!([&client, &server].map(|end| end.nodelay().unwrap()), [true, false]);
            server.set_nodelay(true).unwrap();
            assert!(server.nodelay().unwrap());
        });
    }
}

// An event loop checks a connection again after a change since the last check.
#[test]
fn room_on_tcp_is_a_change() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (_stack, client, server) = scene.pair(true);
        scene.lose(Loss::Killed);
        client.set_nonblocking(true).unwrap();
        let block = pattern(0, 1 << 20);
        for round in 0..3 {
            let (mut sent, mut token) = (0, client.change_token());
            eventually("no room is left", || match client.send(&block) {
                Ok(n) => {
                    sent += n;
                    false
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    // Before the check, as in event loops.
                    token = client.change_token();
                    sent > 100_000 && !client.readiness(false).writable
                }
            });
            read_exactly(&server, sent);
            eventually("there is room", || client.readiness(false).writable);
            assert!(client.changed_since(token), "{round}");
        }
    });
}
