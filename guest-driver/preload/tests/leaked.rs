// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets in the middle of a handshake, inherited by a program with the library by chance: another
//! thread has made the sockets during the start of the program.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use common::{Fabric, eventually};
use rustix::io::{FdFlags, fcntl_setfd};

/// The head of a CLC message of a type: the eye catcher, the type, a length, and version 2.
const fn head(kind: u8) -> [u8; 8] {
    [0xe2, 0xd4, 0xc3, 0xd9, kind, 0, 100, 0x20]
}
const PROPOSAL: u8 = 1;
const ACCEPT: u8 = 2;
const CONFIRM: u8 = 3;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn has_bytes(socket: &TcpStream) -> bool {
    socket.set_nonblocking(true).unwrap();
    socket.peek(&mut [0; 8]).is_ok_and(|n| n == 8)
}

/// Runs an idle program with the library, which inherits a socket.
fn run_with(fabric: &Fabric, socket: &TcpStream) {
    fcntl_setfd(socket, FdFlags::empty()).unwrap();
    let output = fabric.smc("sh").args(["-c", ":"]).output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn a_program_leaves_the_handshakes_of_others_alone() {
    let fabric = Fabric::new(1);
    for kind in [PROPOSAL, ACCEPT, CONFIRM] {
        let (mut sender, receiver) = pair();
        sender.write_all(&head(kind)).unwrap();
        eventually(|| has_bytes(&receiver));
        run_with(&fabric, &receiver);
        assert!(has_bytes(&receiver), "type {kind}: the program has read the message");
        assert!(!has_bytes(&sender), "type {kind}: the program has answered");
    }
    assert_eq!(fabric.broken(), [""; 0]);
}
